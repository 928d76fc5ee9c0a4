//! The engine over the host backend: what a worker without a GPU uses.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use kvoffload_core::jobs::JobKind;
use kvoffload_core::layout::{KvLayout, PageRef, TensorLayout};
use kvoffload_core::plan::Geometry;

use super::faults::FaultPlan;
use super::{HostBackend, HostMemory, KeepAlive};
use crate::backend::Backend;
use crate::engine::{Engine, EngineConfig};
use crate::error::{StartError, SubmitError};
use crate::region::{Backing, Region};

/// A KV-cache tensor in ordinary memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostTensor {
    /// Address of the first byte of its first block.
    pub address: usize,
    /// Its blocks.
    pub layout: TensorLayout,
}

/// Everything a [`HostEngine`] is made from.
pub struct HostConfig {
    /// The tensors to copy from and to.
    pub tensors: Vec<HostTensor>,
    /// Per KV group, the parts of a block, in the order they have in a slot.
    pub groups: Vec<Vec<PageRef>>,
    /// Blocks in a chunk.
    pub blocks_per_chunk: u32,
    /// Slots in the region.
    pub num_slots: u32,
    /// Bytes of a slot; see [`kvoffload_core::layout::slot_bytes`].
    pub slot_bytes: u64,
    /// Where the region's memory comes from.
    pub backing: Backing,
    /// Dropped when the engine's threads have ended, on one of them.
    pub keep_alive: Option<KeepAlive>,
    /// Faults to inject: for tests only.
    pub faults: FaultPlan,
    /// Settings of queues and verification.
    pub engine: EngineConfig,
}

/// Stores chunks of tensors in ordinary memory into a region of its own, and loads them back.
///
/// All methods, those of [`Engine`] too, may be called from several threads. Only [`Engine::wait`] and
/// its like and [`Engine::shutdown`] wait for copies.
#[derive(Debug)]
pub struct HostEngine(Engine);

impl HostEngine {
    /// Makes the region and starts the engine.
    ///
    /// # Safety
    /// All blocks of all tensors may be read and written at the given addresses until `keep_alive`
    /// is dropped. From a job's submit until its end is known, nobody else writes the blocks it
    /// stores from or touches the blocks it loads to.
    /// With `fences` off, which is for tests, jobs that conflict must not run at the same time either.
    ///
    /// # Errors
    /// See [`StartError`]; nothing remains then.
    pub unsafe fn new(config: HostConfig) -> Result<Self, StartError> {
        let HostConfig {
            tensors,
            groups,
            num_slots,
            slot_bytes,
            backing,
            keep_alive,
            faults,
            ..
        } = config;
        let layout = KvLayout::new(
            tensors.iter().map(|tensor| tensor.layout).collect(),
            groups,
            config.blocks_per_chunk,
            num_slots,
            slot_bytes,
            Region::slots_per_piece(slot_bytes),
        )?;
        let layout = Arc::new(layout);
        let region = Arc::new(Region::with(backing, num_slots, slot_bytes)?);
        let addresses: Vec<usize> = tensors.iter().map(|tensor| tensor.address).collect();
        // SAFETY: passed on to the caller; the addresses are in the layout's order.
        let memory = unsafe {
            HostMemory::new(
                &layout,
                &addresses,
                Arc::clone(&region),
                keep_alive,
                faults.loads,
            )
        }?;
        let memory = Arc::new(memory);
        let backends = [JobKind::Store, JobKind::Load].map(|kind| -> Box<dyn Backend> {
            Box::new(HostBackend::new(kind, Arc::clone(&memory), faults.clone()))
        });
        Engine::start(layout, &region, backends, &config.engine).map(Self)
    }

    /// Queues a copy from blocks to slots; see [`Engine::submit`].
    ///
    /// # Errors
    /// See [`SubmitError`]; nothing has changed then.
    pub fn submit_store(&self, job: u64, geometry: Geometry<'_>) -> Result<(), SubmitError> {
        self.0.submit(JobKind::Store, job, geometry)
    }

    /// Queues a copy from slots to blocks; see [`Engine::submit`].
    ///
    /// # Errors
    /// See [`SubmitError`]; nothing has changed then.
    pub fn submit_load(&self, job: u64, geometry: Geometry<'_>) -> Result<(), SubmitError> {
        self.0.submit(JobKind::Load, job, geometry)
    }
}

/// What is done with jobs is the engine's business.
impl Deref for HostEngine {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.0
    }
}

impl fmt::Debug for HostConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostConfig")
            .field("tensors", &self.tensors.len())
            .field("groups", &self.groups.len())
            .field("blocks_per_chunk", &self.blocks_per_chunk)
            .field("num_slots", &self.num_slots)
            .field("slot_bytes", &self.slot_bytes)
            .field("faults", &self.faults)
            .field("engine", &self.engine)
            .finish_non_exhaustive()
    }
}
