//! Random jobs of an engine on the simulated device, against a model; and controls without each wait.

mod cancel;
mod rows;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvoffload_core::pool::Slot;

use super::*;
use crate::cuda::driver::{Known, Op, fresh};
use crate::region::Backing;
use crate::verify::Verify;

const BLOCKS: usize = 96;
const SLOTS: usize = 40;
const PAGES: [usize; 3] = [8192, 4096, 5000];
const LONG: Duration = Duration::from_secs(60);

/// Memory of the device, in one allocation.
fn known(memory: &[u8]) -> Known {
    Known::new(
        memory.as_ptr().expose_provenance() as u64,
        memory.len() as u64,
    )
}

/// What the rig is made with.
#[derive(Clone, Default)]
struct Setup {
    seed: u32,
    path: CopyPath,
    per_chunk: u32,
    faults: CudaFaults,
    verify: Verify,
    pinning: Pinning,
}

/// An engine, the memory it serves, and a model of both sides.
struct Rig {
    engine: CudaEngine,
    /// The stream on which the engine computes.
    compute: usize,
    /// To the driver each tensor is an allocation. Forgotten before the memory is freed.
    _known: Vec<Known>,
    tensors: Vec<Box<[u8]>>,
    /// What every block should hold when all that was submitted has been done.
    blocks: Vec<[Vec<u8>; 3]>,
    slots: Vec<Option<Vec<[Vec<u8>; 3]>>>,
    per_chunk: usize,
    /// Jobs that are not known to be over or waited for, and their blocks.
    live: Vec<(u64, bool, Vec<usize>)>,
    jobs: u64,
    /// Slots of the newest one.
    newest: Vec<usize>,
    refused: Vec<SubmitError>,
    random: u64,
    wrong: Arc<AtomicBool>,
}

impl Rig {
    fn new(setup: Setup) -> Self {
        let tensors: Vec<Box<[u8]>> = PAGES
            .iter()
            .map(|page| vec![0; page * BLOCKS].into_boxed_slice())
            .collect();
        let shapes = tensors
            .iter()
            .zip(PAGES)
            .map(|(tensor, page)| DeviceTensor {
                address: tensor.as_ptr().expose_provenance() as u64,
                layout: TensorLayout {
                    num_blocks: BLOCKS as u32,
                    block_stride: page as u64,
                    page_bytes: page as u64,
                },
            });
        let groups = vec![
            PAGES
                .iter()
                .enumerate()
                .map(|(tensor, &page)| PageRef {
                    tensor: tensor as u32,
                    page_bytes: page as u64,
                })
                .collect::<Vec<_>>(),
        ];
        let per_chunk = setup.per_chunk.max(1);
        let config = CudaConfig {
            device: setup.seed,
            tensors: shapes.collect(),
            slot_bytes: kvoffload_core::layout::slot_bytes(&groups, per_chunk),
            groups,
            blocks_per_chunk: per_chunk,
            num_slots: SLOTS as u32,
            backing: Backing::Private,
            keep_alive: None,
            copy_path: setup.path,
            staging_bytes: 2 << 20,
            pinning: setup.pinning,
            kernel_blocks: None,
            faults: setup.faults,
            engine: EngineConfig {
                verify: setup.verify,
                ..EngineConfig::default()
            },
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

    fn draw(&mut self, below: usize) -> usize {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.random >> 33) as usize) % below
    }

    /// Different numbers below `below`, at most `most` of them; sometimes neighbours.
    fn some(&mut self, below: usize, most: usize) -> Vec<usize> {
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

    fn address(&self, tensor: usize, block: usize) -> usize {
        self.tensors[tensor].as_ptr().addr() + block * PAGES[tensor]
    }

    fn compute(&self, run: impl FnOnce() + Send + 'static) {
        let op = Op::Run(Box::new(run));
        self.engine.common.device.push(self.compute, op);
    }

    /// Whether a live job uses a block; `writes`: only those that write it.
    fn in_use(&self, block: usize, writes: bool) -> bool {
        let mut live = self.live.iter();
        live.any(|(_, load, blocks)| (*load || !writes) && blocks.contains(&block))
    }

    /// The engine writes blocks that no job uses.
    fn write(&mut self) {
        for block in self.some(BLOCKS, 30) {
            if !self.in_use(block, false) {
                self.write_block(block);
            }
        }
    }

    fn write_block(&mut self, block: usize) {
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
    fn read(&mut self) {
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

    fn submit(&mut self, kind: JobKind, blocks: Vec<usize>, slots: &[usize]) {
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
        // SAFETY: a stream of the simulated device.
        match unsafe { self.engine.submit(kind, self.jobs, geometry, self.compute) } {
            Ok(()) => self.live.push((self.jobs, kind == JobKind::Load, blocks)),
            Err(error) => self.refused.push(error),
        }
    }

    fn store(&mut self) {
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

    fn load(&mut self) {
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

    fn take(&mut self) {
        for end in self.engine.take_finished() {
            assert_eq!(end.outcome, Ok(()));
            self.live.retain(|(job, ..)| *job != end.job);
        }
    }

    /// The compute stream waits for one of the jobs; what it does afterwards may use the job's blocks.
    fn wait_on(&mut self) {
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
    fn is_right(&mut self) -> bool {
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

/// A few hundred steps in which everything may happen; whether all bytes are right.
fn play(setup: Setup, steps: usize) -> (bool, CudaStatsOf) {
    let mut rig = Rig::new(setup);
    for _ in 0..steps {
        match rig.draw(12) {
            0..=2 => rig.write(),
            3 | 4 => rig.read(),
            5 | 6 => rig.store(),
            7 | 8 => rig.load(),
            9 => rig.take(),
            10 => rig.wait_on(),
            _ => {
                // A kernel of the engine leaves no room, mostly for longer than a piece may take.
                let until = Instant::now() + Duration::from_millis(rig.draw(8) as u64);
                rig.engine.common.device.world.lock().no_room = Some(until);
                thread::sleep(Duration::from_millis(3));
            }
        }
        if rig.live.len() > 6 {
            rig.wait_on();
        }
        rig.take();
    }
    let right = rig.is_right();
    (right, rig.engine.device_stats().into_iter().collect())
}

type CudaStatsOf = std::collections::HashMap<&'static str, u64>;

fn setups() -> impl Iterator<Item = Setup> {
    let paths = [
        CopyPath::Auto,
        CopyPath::Only(Path::Direct),
        CopyPath::Only(Path::Staged),
    ];
    let pinnings = [Pinning::Register, Pinning::Allocate, Pinning::None];
    (0..seeds()).map(move |seed| Setup {
        seed,
        path: paths[seed as usize % 3],
        per_chunk: 1 + seed % 2,
        verify: if seed % 4 < 2 {
            Verify::Off
        } else {
            Verify::All
        },
        pinning: pinnings[(seed / 3) as usize % 3],
        ..Setup::default()
    })
}

/// More of them with `KVOFFLOAD_SEEDS`, for a long search.
fn seeds() -> u32 {
    let wanted = std::env::var("KVOFFLOAD_SEEDS");
    wanted.map_or(12, |seeds| seeds.parse().expect("a number"))
}

#[test]
fn every_byte_arrives_whatever_order_streams_run_in() {
    let (mut switched, mut rows) = (0, 0);
    for setup in setups() {
        let seed = setup.seed;
        let (right, stats) = play(setup, 150);
        assert!(right, "seed {seed}");
        switched += stats["switched_pieces"];
        rows += stats["row_copies"];
    }
    assert!(rows > 0, "no rows were copied");
    assert!(switched > 0, "no piece went the other way");
}

#[test]
fn a_failed_piece_is_copied_again() {
    for seed in 0..6 {
        for faults in [
            CudaFaults {
                fail_piece: 1 + u64::from(seed),
                ..CudaFaults::default()
            },
            CudaFaults {
                fail_path: Some(Path::Staged),
                ..CudaFaults::default()
            },
            CudaFaults {
                fail_path: Some(Path::Direct),
                ..CudaFaults::default()
            },
        ] {
            let setup = Setup {
                seed,
                faults,
                ..Setup::default()
            };
            let (right, _) = play(setup.clone(), 60);
            assert!(right, "seed {seed}, {:?}", setup.faults);
        }
    }
}

/// Without each of the waits, some order shows it.
#[test]
fn a_missing_wait_shows() {
    let none = CudaFaults::default();
    for (path, faults) in [
        (
            Path::Staged,
            CudaFaults {
                skip_compute_wait: true,
                ..none.clone()
            },
        ),
        (
            Path::Direct,
            CudaFaults {
                skip_compute_wait: true,
                ..none.clone()
            },
        ),
        (
            Path::Staged,
            CudaFaults {
                skip_staging_wait: true,
                ..none.clone()
            },
        ),
        (
            Path::Staged,
            CudaFaults {
                skip_ring_wait: true,
                ..none.clone()
            },
        ),
        (
            Path::Staged,
            CudaFaults {
                skip_stream_wait: true,
                ..none.clone()
            },
        ),
        (
            Path::Direct,
            CudaFaults {
                skip_stream_wait: true,
                ..none.clone()
            },
        ),
    ] {
        let shows = (0..20).any(|seed| {
            let path = CopyPath::Only(path);
            let setup = Setup {
                seed,
                path,
                faults: faults.clone(),
                per_chunk: 2, // jobs that are longer than the ring
                ..Setup::default()
            };
            !play(setup, 100).0
        });
        assert!(shows, "{faults:?} on the {} path", path.name());
    }
}

/// Stores half the slots from half the blocks, the lower or the upper ones.
fn store_half(rig: &mut Rig, upper: bool) -> u64 {
    let (block, slot) = if upper {
        (BLOCKS / 2, SLOTS / 2)
    } else {
        (0, 0)
    };
    let slots: Vec<usize> = (slot..slot + SLOTS / 2).collect();
    let blocks: Vec<usize> = (block..block + SLOTS / 2 * rig.per_chunk).collect();
    let chunks = blocks.chunks(rig.per_chunk);
    for (chunk, &slot) in chunks.zip(&slots) {
        rig.slots[slot] = Some(chunk.iter().map(|&b| rig.blocks[b].clone()).collect());
    }
    rig.submit(JobKind::Store, blocks, &slots);
    rig.jobs
}

/// Makes a rig whose compute stream stands until the gate, an event, is opened.
fn gated(path: CopyPath) -> (Rig, u64) {
    let mut rig = Rig::new(Setup {
        path,
        ..Setup::default()
    });
    rig.write();
    let gate = fresh();
    let device = &rig.engine.common.device;
    device.push(rig.compute, Op::Wait(gate));
    (rig, gate)
}

fn open(rig: &Rig, gate: u64) {
    let device = &rig.engine.common.device;
    device.push(fresh() as usize, Op::Record(gate));
}

#[test]
fn a_job_that_waits_for_compute_holds_up_no_other() {
    for path in [Path::Direct, Path::Staged] {
        let (mut rig, gate) = gated(CopyPath::Only(path));
        let late = store_half(&mut rig, false);
        let stands = rig.compute;
        rig.compute = fresh() as usize;
        let early = store_half(&mut rig, true);
        rig.engine.wait(&[early], LONG).unwrap();
        let waits = rig.engine.wait(&[late], Duration::from_millis(20));
        assert!(waits.is_err(), "its compute is not done");
        open(&rig, gate);
        rig.compute = stands;
        assert!(rig.is_right());
    }
}

#[test]
fn nor_does_one_that_somebody_waits_for_where_there_is_another_way() {
    let (mut rig, gate) = gated(CopyPath::Auto);
    let late = store_half(&mut rig, false);
    let stands = rig.compute;
    rig.compute = fresh() as usize;
    // SAFETY: a stream of the simulated device.
    unsafe { rig.engine.wait_on(&[late], rig.compute, LONG) }.unwrap();
    // On a third stream, since the second one stands as well now.
    rig.compute = fresh() as usize;
    let early = store_half(&mut rig, true);
    rig.engine.wait(&[early], LONG).unwrap();
    open(&rig, gate);
    rig.compute = stands;
    assert!(rig.is_right());
}

/// Whatever call of the driver fails once: the job is copied on the other path, or in another form, and
/// its bytes are right.
#[test]
fn one_failed_call_is_made_good() {
    for (call, code) in (1..60).flat_map(|call| [(call, 1), (call, 2)]) {
        for path in [Path::Direct, Path::Staged] {
            let mut rig = Rig::new(Setup {
                seed: call as u32,
                path: CopyPath::Only(path),
                per_chunk: 2,
                ..Setup::default()
            });
            rig.write();
            *rig.engine.common.device.failure.lock() = Some((call, code));
            store_half(&mut rig, true);
            rig.store();
            rig.load();
            rig.store();
            rig.read();
            let what = format!("call {call} with {code} on the {} path", path.name());
            assert!(rig.is_right(), "{what}");
        }
    }
}

/// A context that is lost at any call: every job ends with an error, and later ones are refused.
#[test]
fn a_lost_context_ends_all_jobs() {
    for call in 1..30 {
        let mut rig = Rig::new(Setup {
            seed: call as u32,
            ..Setup::default()
        });
        *rig.engine.common.device.failure.lock() = Some((call, 700));
        for upper in [false, true, false] {
            store_half(&mut rig, upper);
        }
        let taken: Vec<u64> = rig.live.iter().map(|(job, ..)| *job).collect();
        rig.engine.wait(&taken, LONG).unwrap();
        let ends = rig.engine.take_finished();
        assert_eq!(ends.len(), taken.len());
        let mut failed = ends.iter().filter(|end| end.outcome.is_err());
        let lost = rig.engine.common.device.is_lost();
        assert_eq!(
            failed.next().is_some() || !rig.refused.is_empty(),
            lost,
            "call {call}"
        );
        if lost {
            let (job, slots) = (99, [Slot::new(0)]);
            let geometry = Geometry {
                block_ids: &[0],
                group_sizes: &[1],
                block_indices: &[0],
                slots: &slots,
            };
            // SAFETY: a stream of the simulated device.
            let refused = unsafe { rig.engine.submit(JobKind::Store, job, geometry, 0) };
            assert_eq!(refused, Err(SubmitError::DeviceLost { job }));
            let notices = rig.engine.take_notices();
            let said = notices
                .iter()
                .filter(|text| text.contains("context is lost"))
                .count();
            assert_eq!(said, 1, "{notices:?}");
        }
    }
}
