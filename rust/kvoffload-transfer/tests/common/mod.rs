//! A device, a model of what jobs do to it, and jobs to do.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "every test file uses a part of this"
)]

pub mod gate;

use std::sync::Arc;
use std::time::Duration;

use kvoffload_core::layout::{PageRef, TensorLayout, slot_bytes};
use kvoffload_core::plan::Geometry;
use kvoffload_core::pool::Slot;
use kvoffload_transfer::region::Backing;
use kvoffload_transfer::{
    Completion, EngineConfig, FaultPlan, HostConfig, HostEngine, HostTensor, JobKind, SubmitError,
};

/// Longer than anything here takes; a test that needs it has failed.
pub const LONG: Duration = Duration::from_secs(60);
/// Long enough for a copy of a few bytes that nothing holds up.
pub const SHORT: Duration = Duration::from_millis(50);

/// Tensors, groups and slots.
#[derive(Clone, Debug)]
pub struct Shape {
    pub tensors: Vec<TensorLayout>,
    pub groups: Vec<Vec<PageRef>>,
    pub blocks_per_chunk: u32,
    pub num_slots: u32,
}

impl Shape {
    /// One group over one tensor without padding.
    pub fn simple(num_blocks: u32, page_bytes: u64, num_slots: u32) -> Self {
        Self {
            tensors: vec![TensorLayout {
                num_blocks,
                block_stride: page_bytes,
                page_bytes,
            }],
            groups: vec![vec![PageRef {
                tensor: 0,
                page_bytes,
            }]],
            blocks_per_chunk: 1,
            num_slots,
        }
    }

    pub fn slot_bytes(&self) -> u64 {
        slot_bytes(&self.groups, self.blocks_per_chunk)
    }

    /// Bytes of one tensor, padding after the last block included.
    fn tensor_bytes(&self, tensor: usize) -> usize {
        let tensor = self.tensors[tensor];
        tensor.num_blocks as usize * tensor.block_stride as usize
    }
}

/// The memory of a device. Touch it only while no job is live.
pub struct Device {
    tensors: Vec<*mut [u8]>,
}

// SAFETY: the pointers are owned; the tests touch the bytes from one thread at a time, as above.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// Every byte differs from its neighbours and from the same byte of other tensors.
    pub fn new(shape: &Shape) -> Arc<Self> {
        let bytes = |tensor: usize, at: usize| (at * 31 + at / 256 * 7 + tensor * 101 + 1) as u8;
        let tensor = |tensor: usize| -> *mut [u8] {
            let bytes: Box<[u8]> = (0..shape.tensor_bytes(tensor))
                .map(|at| bytes(tensor, at))
                .collect();
            Box::into_raw(bytes)
        };
        Arc::new(Self {
            tensors: (0..shape.tensors.len()).map(tensor).collect(),
        })
    }

    pub fn bytes(&self, tensor: usize) -> Vec<u8> {
        // SAFETY: owned memory that no job is touching.
        unsafe { (*self.tensors[tensor]).to_vec() }
    }

    pub fn all_bytes(&self) -> Vec<Vec<u8>> {
        (0..self.tensors.len())
            .map(|tensor| self.bytes(tensor))
            .collect()
    }

    pub fn fill(&self, tensor: usize, range: std::ops::Range<usize>, byte: u8) {
        let tensor = self.tensors[tensor];
        // SAFETY: owned memory that no job is touching.
        let bytes = unsafe { &mut *tensor };
        bytes[range].fill(byte);
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        for &tensor in &self.tensors {
            // SAFETY: made by `Box::into_raw`, freed once.
            drop(unsafe { Box::from_raw(tensor) });
        }
    }
}

/// A job's numbers.
#[derive(Clone, Debug)]
pub struct Job {
    pub block_ids: Vec<u32>,
    pub group_sizes: Vec<u32>,
    pub block_indices: Vec<u64>,
    pub slots: Vec<Slot>,
}

impl Job {
    /// Whole chunks of one block in the only group.
    pub fn simple(blocks: &[u32], slots: &[u32]) -> Self {
        Self {
            block_ids: blocks.to_vec(),
            group_sizes: vec![blocks.len() as u32],
            block_indices: vec![0],
            slots: slots.iter().map(|&slot| Slot::new(slot)).collect(),
        }
    }

    pub fn geometry(&self) -> Geometry<'_> {
        Geometry {
            block_ids: &self.block_ids,
            group_sizes: &self.group_sizes,
            block_indices: &self.block_indices,
            slots: &self.slots,
        }
    }
}

/// Most tests look at copies, and load what the region holds anyway.
pub fn copies_only() -> EngineConfig {
    EngineConfig {
        stored_only: false,
        ..EngineConfig::default()
    }
}

/// An engine over a device.
pub struct Rig {
    pub device: Arc<Device>,
    pub engine: HostEngine,
}

pub fn config(shape: &Shape, device: &Arc<Device>, faults: FaultPlan) -> HostConfig {
    let tensors = shape.tensors.iter().zip(&device.tensors);
    HostConfig {
        tensors: tensors
            .map(|(&layout, memory)| HostTensor {
                address: memory.cast::<u8>().expose_provenance(),
                layout,
            })
            .collect(),
        groups: shape.groups.clone(),
        blocks_per_chunk: shape.blocks_per_chunk,
        num_slots: shape.num_slots,
        slot_bytes: shape.slot_bytes(),
        backing: Backing::Private,
        keep_alive: Some(Box::new(Arc::clone(device))),
        faults,
        engine: EngineConfig {
            shutdown_timeout: SHORT,
            ..copies_only()
        },
    }
}

impl Rig {
    pub fn new(shape: &Shape, faults: FaultPlan) -> Self {
        Self::with(shape, faults, |_| {})
    }

    pub fn with(shape: &Shape, faults: FaultPlan, set: impl FnOnce(&mut EngineConfig)) -> Self {
        let device = Device::new(shape);
        let mut config = config(shape, &device, faults);
        set(&mut config.engine);
        // SAFETY: the device is kept alive by the configuration and touched only between jobs.
        let engine = unsafe { HostEngine::new(config) }.unwrap();
        Self { device, engine }
    }

    pub fn submit(&self, kind: JobKind, job: u64, what: &Job) -> Result<(), SubmitError> {
        match kind {
            JobKind::Store => self.engine.submit_store(job, what.geometry()),
            JobKind::Load => self.engine.submit_load(job, what.geometry()),
        }
    }

    pub fn store(&self, job: u64, blocks: &[u32], slots: &[u32]) {
        self.engine
            .submit_store(job, Job::simple(blocks, slots).geometry())
            .unwrap();
    }

    pub fn load(&self, job: u64, slots: &[u32], blocks: &[u32]) {
        self.engine
            .submit_load(job, Job::simple(blocks, slots).geometry())
            .unwrap();
    }

    /// Waits for these jobs and takes all ends, in the order of their ids.
    pub fn finish(&self, jobs: &[u64]) -> Vec<Completion> {
        self.engine.wait(jobs, LONG).unwrap();
        let mut ends = self.engine.take_finished();
        ends.sort_by_key(|end| end.job);
        ends
    }

    /// As `finish`, if all of them are to end well.
    pub fn finish_well(&self, jobs: &[u64]) {
        for end in self.finish(jobs) {
            assert_eq!(end.outcome, Ok(()), "{end:?}");
        }
    }
}

/// What jobs do to the bytes when they run one after another: byte by byte, without plans. `B` is what is
/// known of a byte.
pub struct Model<B = u8> {
    shape: Shape,
    pub tensors: Vec<Vec<B>>,
    region: Vec<B>,
}

impl<B: From<u8> + Clone> Model<B> {
    pub fn new(shape: &Shape, device: &Device) -> Self {
        let region = shape.slot_bytes() as usize * shape.num_slots as usize;
        let known = |bytes: Vec<u8>| bytes.into_iter().map(B::from).collect();
        Self {
            shape: shape.clone(),
            tensors: device.all_bytes().into_iter().map(known).collect(),
            region: vec![B::from(0); region],
        }
    }

    pub fn run(&mut self, kind: JobKind, job: &Job) {
        self.copy(kind, job, |target, source| target.clone_from(source));
    }

    /// Has `copy` make each byte of a job's targets out of itself and the byte of the source.
    pub fn copy(&mut self, kind: JobKind, job: &Job, copy: impl Fn(&mut B, &B)) {
        let per_chunk = self.shape.blocks_per_chunk as usize;
        let (mut blocks, mut slots) = (&job.block_ids[..], &job.slots[..]);
        for (group, &size) in job.group_sizes.iter().enumerate() {
            let size = size as usize;
            let skip = if size == 0 {
                0
            } else {
                job.block_indices[group] as usize % per_chunk
            };
            for (i, &block) in blocks[..size].iter().enumerate() {
                let (chunk, sub_block) = ((skip + i) / per_chunk, (skip + i) % per_chunk);
                let mut host = slots[chunk].index() * self.shape.slot_bytes() as usize;
                for page in &self.shape.groups[group] {
                    let bytes = page.page_bytes as usize;
                    let tensor = page.tensor as usize;
                    let device = block as usize * self.shape.tensors[tensor].block_stride as usize;
                    let at = host + sub_block * bytes;
                    let device = &mut self.tensors[tensor][device..device + bytes];
                    let slot = &mut self.region[at..at + bytes];
                    for (device, slot) in device.iter_mut().zip(slot) {
                        match kind {
                            JobKind::Store => copy(slot, device),
                            JobKind::Load => copy(device, slot),
                        }
                    }
                    host += per_chunk * bytes;
                }
            }
            blocks = &blocks[size..];
            slots = &slots[(skip + size).div_ceil(per_chunk)..];
        }
    }
}

/// A small random generator for what proptest need not shrink.
pub struct Random(pub u64);

impl Random {
    /// A number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % limit
    }

    /// `n` different numbers below `limit`, in random order.
    pub fn distinct(&mut self, n: usize, limit: usize) -> Vec<u32> {
        let mut all: Vec<u32> = (0..limit as u32).collect();
        for i in 0..n {
            let other = i + self.below(limit - i);
            all.swap(i, other);
        }
        all.truncate(n);
        all
    }
}

/// A legal job of any form: several groups, partial first and last chunks.
pub fn random_job(shape: &Shape, kind: JobKind, random: &mut Random) -> Job {
    let per_chunk = shape.blocks_per_chunk as usize;
    let mut job = Job {
        block_ids: vec![],
        group_sizes: vec![],
        block_indices: vec![],
        slots: vec![],
    };
    let num_slots = shape.num_slots as usize;
    let slots = random.distinct(num_slots, num_slots);
    let num_blocks = shape
        .tensors
        .iter()
        .map(|tensor| tensor.num_blocks)
        .min()
        .unwrap() as usize;
    let blocks = random.distinct(num_blocks, num_blocks);
    let (mut slots, mut blocks) = (&slots[..], &blocks[..]);
    for _ in &shape.groups {
        let skip = random.below(per_chunk);
        let room = (slots.len() * per_chunk)
            .saturating_sub(skip)
            .min(blocks.len());
        let size = random.below(room.min(3 * per_chunk) + 1);
        let used = if size == 0 {
            0
        } else {
            (skip + size).div_ceil(per_chunk)
        };
        job.group_sizes.push(size as u32);
        job.block_indices
            .push((random.below(5) * per_chunk + skip) as u64);
        job.block_ids.extend(&blocks[..size]);
        job.slots
            .extend(slots[..used].iter().map(|&slot| Slot::new(slot)));
        slots = &slots[used..];
        // What is only read may be named again by the next group.
        if kind == JobKind::Load {
            blocks = &blocks[size..];
        }
    }
    job
}
