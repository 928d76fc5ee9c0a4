//! An engine on the simulated device, and a model of what it does.

use kvoffload_core::pool::Slot;

use super::*;
use crate::cuda::driver::Known;
use crate::region::Backing;
use crate::verify::Verify;

pub(super) const BLOCKS: usize = 96;
pub(super) const SLOTS: usize = 40;
pub(super) const PAGES: [usize; 3] = [8192, 4096, 5000];
pub(super) const LONG: Duration = Duration::from_secs(60);

/// Memory of the device, in one allocation.
pub(super) fn known(memory: &[u8]) -> Known {
    Known::new(
        memory.as_ptr().expose_provenance() as u64,
        memory.len() as u64,
    )
}

/// A tensor that is all of some memory, without anything between its pages.
pub(super) fn tensor(memory: &[u8], page: usize) -> DeviceTensor {
    DeviceTensor {
        address: memory.as_ptr().expose_provenance() as u64,
        layout: TensorLayout {
            num_blocks: (memory.len() / page) as u32,
            block_stride: page as u64,
            page_bytes: page as u64,
        },
    }
}

/// An engine of one group that has all of these tensors.
pub(super) fn config(
    tensors: Vec<DeviceTensor>,
    slots: usize,
    blocks_per_chunk: u32,
) -> CudaConfig {
    let page = |(tensor, of): (u32, &DeviceTensor)| PageRef {
        tensor,
        page_bytes: of.layout.page_bytes,
    };
    let groups: Vec<Vec<PageRef>> = vec![(0..).zip(&tensors).map(page).collect()];
    CudaConfig {
        device: 0,
        tensors,
        slot_bytes: kvoffload_core::layout::slot_bytes(&groups, blocks_per_chunk),
        groups,
        blocks_per_chunk,
        num_slots: slots as u32,
        backing: Backing::Private,
        keep_alive: None,
        copy_path: CopyPath::Auto,
        staging_bytes: 2 << 20,
        pinning: Pinning::Register,
        kernel_blocks: None,
        faults: CudaFaults::default(),
        engine: EngineConfig::default(),
    }
}

/// What the rig is made with.
#[derive(Clone, Default)]
pub(super) struct Setup {
    pub(super) seed: u32,
    pub(super) path: CopyPath,
    pub(super) per_chunk: u32,
    pub(super) faults: CudaFaults,
    pub(super) verify: Verify,
    pub(super) pinning: Pinning,
}

/// An engine, the memory it serves, and a model of both sides.
pub(super) struct Rig {
    pub(super) engine: CudaEngine,
    /// The stream on which the engine computes.
    pub(super) compute: usize,
    /// To the driver each tensor is an allocation. Forgotten before the memory is freed.
    _known: Vec<Known>,
    pub(super) tensors: Vec<Box<[u8]>>,
    /// What every block should hold when all that was submitted has been done.
    pub(super) blocks: Vec<[Vec<u8>; 3]>,
    pub(super) slots: Vec<Option<Vec<[Vec<u8>; 3]>>>,
    pub(super) per_chunk: usize,
    /// Jobs that are not known to be over or waited for, and their blocks.
    pub(super) live: Vec<(u64, bool, Vec<usize>)>,
    pub(super) jobs: u64,
    /// Slots of the newest one.
    pub(super) newest: Vec<usize>,
    pub(super) refused: Vec<SubmitError>,
    pub(super) random: u64,
    pub(super) wrong: Arc<AtomicBool>,
}

impl Rig {
    pub(super) fn new(setup: Setup) -> Self {
        let tensors: Vec<Box<[u8]>> = PAGES
            .iter()
            .map(|page| vec![0; page * BLOCKS].into_boxed_slice())
            .collect();
        let shapes = tensors.iter().zip(PAGES);
        let shapes = shapes.map(|(memory, page)| tensor(memory, page)).collect();
        let per_chunk = setup.per_chunk.max(1);
        let config = CudaConfig {
            device: setup.seed,
            copy_path: setup.path,
            pinning: setup.pinning,
            faults: setup.faults,
            engine: EngineConfig {
                verify: setup.verify,
                ..EngineConfig::default()
            },
            ..config(shapes, SLOTS, per_chunk)
        };
        let known = tensors.iter().map(|tensor| known(tensor)).collect();
        // SAFETY: the tensors are `Rig`'s, which shuts the engine down before they go; the rig leaves the
        // blocks of live jobs alone.
        let engine = unsafe { CudaEngine::new(config) }.unwrap();
        Self {
            engine,
            compute: fresh() as usize,
            tensors,
            _known: known,
            blocks: vec![PAGES.map(|page| vec![0; page]); BLOCKS],
            slots: vec![None; SLOTS],
            per_chunk: per_chunk as usize,
            live: Vec::new(),
            jobs: 0,
            newest: Vec::new(),
            refused: Vec::new(),
            random: u64::from(setup.seed) ^ 0x5151,
            wrong: Arc::default(),
        }
    }

    pub(super) fn draw(&mut self, below: usize) -> usize {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.random >> 33) as usize) % below
    }

    /// Different numbers below `below`, at most `most` of them; sometimes neighbours.
    pub(super) fn some(&mut self, below: usize, most: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..below).collect();
        let count = 1 + self.draw(most.min(below));
        if self.draw(3) == 0 {
            let first = self.draw(below - count + 1);
            return (first..first + count).collect();
        }
        (0..count)
            .map(|_| all.swap_remove(self.draw(all.len())))
            .collect()
    }

    pub(super) fn address(&self, tensor: usize, block: usize) -> usize {
        self.tensors[tensor].as_ptr().addr() + block * PAGES[tensor]
    }

    pub(super) fn compute(&self, run: impl FnOnce() + Send + 'static) {
        let op = Op::Run(Box::new(run));
        self.engine.common.device.push(self.compute, op);
    }

    /// Whether a live job uses a block; `writes`: only those that write it.
    pub(super) fn in_use(&self, block: usize, writes: bool) -> bool {
        let mut live = self.live.iter();
        live.any(|(_, load, blocks)| (*load || !writes) && blocks.contains(&block))
    }

    /// The engine writes blocks that no job uses.
    pub(super) fn write(&mut self) {
        for block in self.some(BLOCKS, 30) {
            if !self.in_use(block, false) {
                self.write_block(block);
            }
        }
    }

    pub(super) fn write_block(&mut self, block: usize) {
        let value = self.draw(256) as u8;
        for (tensor, page) in PAGES.into_iter().enumerate() {
            let bytes: Vec<u8> = (0..page).map(|at| value.wrapping_add(at as u8)).collect();
            self.blocks[block][tensor].clone_from(&bytes);
            let address = self.address(tensor, block);
            self.compute(move || {
                // SAFETY: a page of the rig's tensors; ops run under the world's lock.
                unsafe {
                    let page = std::ptr::with_exposed_provenance_mut::<u8>(address);
                    page.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
                }
            });
        }
    }

    /// The engine reads blocks that no load is about to write.
    pub(super) fn read(&mut self) {
        for block in self.some(BLOCKS, 30) {
            if self.in_use(block, true) {
                continue;
            }
            for tensor in 0..PAGES.len() {
                let address = self.address(tensor, block);
                let expected = self.blocks[block][tensor].clone();
                let wrong = Arc::clone(&self.wrong);
                self.compute(move || {
                    // SAFETY: as in `write`.
                    let page = unsafe {
                        std::slice::from_raw_parts(
                            std::ptr::with_exposed_provenance::<u8>(address),
                            expected.len(),
                        )
                    };
                    if page != expected {
                        wrong.store(true, Ordering::Relaxed);
                    }
                });
            }
        }
    }

    pub(super) fn submit(&mut self, kind: JobKind, blocks: Vec<usize>, slots: &[usize]) {
        self.jobs += 1;
        self.newest = slots.to_vec();
        let ids: Vec<u32> = blocks.iter().map(|&block| block as u32).collect();
        let places: Vec<Slot> = slots.iter().map(|&slot| Slot::new(slot as u32)).collect();
        let geometry = Geometry {
            block_ids: &ids,
            group_sizes: &[ids.len() as u32],
            block_indices: &[0],
            slots: &places,
        };
        match submit(&self.engine, kind, self.jobs, &geometry, self.compute) {
            Ok(()) => self.live.push((self.jobs, kind == JobKind::Load, blocks)),
            Err(error) => self.refused.push(error),
        }
    }

    pub(super) fn store(&mut self) {
        let slots = self.some(SLOTS, SLOTS);
        let mut blocks = Vec::new();
        let (neighbours, first) = (self.draw(2) == 0, self.draw(BLOCKS));
        let per_chunk = self.per_chunk;
        for &slot in &slots {
            let next = first + blocks.len();
            let block = |at: usize| match neighbours {
                true => (next + at) % BLOCKS,
                false => self.draw(BLOCKS),
            };
            let chunk: Vec<usize> = (0..per_chunk).map(block).collect();
            self.slots[slot] = Some(chunk.iter().map(|&b| self.blocks[b].clone()).collect());
            blocks.extend(chunk);
        }
        self.submit(JobKind::Store, blocks, &slots);
    }

    pub(super) fn load(&mut self) {
        let mut slots = self.some(SLOTS, SLOTS);
        slots.retain(|&slot| self.slots[slot].is_some());
        let mut free: Vec<usize> = (0..BLOCKS).collect();
        slots.truncate(BLOCKS / self.per_chunk);
        let mut blocks = Vec::new();
        let neighbours = self.draw(2) == 0;
        for &slot in &slots {
            let chunk = self.slots[slot].clone().unwrap();
            for bytes in chunk {
                let block = match neighbours {
                    true => free.remove(0),
                    false => free.swap_remove(self.draw(free.len())),
                };
                self.blocks[block] = bytes;
                blocks.push(block);
            }
        }
        if !blocks.is_empty() {
            self.submit(JobKind::Load, blocks, &slots);
        }
    }

    pub(super) fn take(&mut self) {
        for end in self.engine.take_finished() {
            assert_eq!(end.outcome, Ok(()));
            self.live.retain(|(job, ..)| *job != end.job);
        }
    }

    /// The compute stream waits for one of the jobs; what it does afterwards may use the job's blocks.
    pub(super) fn wait_on(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let at = self.draw(self.live.len());
        let job = self.live[at].0;
        // SAFETY: a stream of the simulated device.
        unsafe { self.engine.wait_on(&[job], self.compute, LONG) }.unwrap();
        self.live.remove(at);
    }

    /// Lets everything end, and says whether all bytes are right.
    pub(super) fn is_right(&mut self) -> bool {
        let device = Arc::clone(&self.engine.common.device);
        let jobs: Vec<u64> = (1..=self.jobs).collect();
        while self.engine.wait(&jobs, Duration::from_millis(1)).is_err() {
            device.world.lock().advance();
        }
        while !device.drain(self.compute) {
            thread::yield_now();
        }
        self.take();
        assert_eq!(self.refused, []);
        assert_eq!(device.refused_rows.load(Ordering::Relaxed), 0);
        let mut right = !self.wrong.load(Ordering::Relaxed);
        for (block, pages) in self.blocks.iter().enumerate() {
            for (tensor, page) in pages.iter().enumerate() {
                let at = block * PAGES[tensor];
                right &= self.tensors[tensor][at..at + page.len()] == page[..];
            }
        }
        right
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        assert_eq!(self.engine.shutdown(LONG).stuck_threads, 0);
    }
}

/// Submits a job that comes after what is on a stream of the simulated device.
pub(super) fn submit(
    engine: &CudaEngine,
    kind: JobKind,
    job: u64,
    geometry: &Geometry<'_>,
    stream: usize,
) -> Result<(), SubmitError> {
    let mut new = engine.new_job();
    new.ids().set(geometry);
    // SAFETY: any number names a stream of the simulated device.
    unsafe { engine.submit(kind, job, new, stream) }
}
