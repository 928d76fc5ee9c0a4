//! The engine over the host backend: what a worker without a GPU uses.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvoffload_core::jobs::JobKind;
use kvoffload_core::layout::{KvLayout, PageRef, TensorLayout};
use kvoffload_core::plan::Geometry;

use super::faults::FaultPlan;
use super::{HostBackend, HostMemory, KeepAlive};
use crate::backend::Backend;
use crate::engine::{Completion, Engine, EngineConfig, ShutdownReport, Stats};
use crate::error::{StartError, SubmitError, WaitTimeout};
use crate::region::Region;

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
    /// Dropped when the engine's threads have ended, on one of them.
    pub keep_alive: Option<KeepAlive>,
    /// Faults to inject: for tests only.
    pub faults: FaultPlan,
    /// Settings of queues and verification.
    pub engine: EngineConfig,
}

/// Stores chunks of tensors in ordinary memory into a region of its own, and loads them back.
///
/// All methods may be called from several threads. Only [`HostEngine::wait`] and
/// [`HostEngine::shutdown`] wait for copies.
#[derive(Debug)]
pub struct HostEngine {
    engine: Engine,
    region_address: usize,
}

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
        let region = Arc::new(Region::new(num_slots, slot_bytes)?);
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
        let region_address = region.base_address();
        Ok(Self {
            engine: Engine::start(layout, &region, backends, &config.engine)?,
            region_address,
        })
    }

    /// Address of the region's first byte, for tests and debuggers; unmapped after a shutdown.
    #[must_use]
    pub fn region_address(&self) -> usize {
        self.region_address
    }

    /// Queues a copy from blocks to slots; see [`Engine::submit`].
    ///
    /// # Errors
    /// See [`SubmitError`]; nothing has changed then.
    pub fn submit_store(&self, job: u64, geometry: Geometry<'_>) -> Result<(), SubmitError> {
        self.engine.submit(JobKind::Store, job, geometry)
    }

    /// Queues a copy from slots to blocks; see [`Engine::submit`].
    ///
    /// # Errors
    /// See [`SubmitError`]; nothing has changed then.
    pub fn submit_load(&self, job: u64, geometry: Geometry<'_>) -> Result<(), SubmitError> {
        self.engine.submit(JobKind::Load, job, geometry)
    }

    /// All ends since the last call; see [`Engine::take_finished`].
    #[must_use]
    pub fn take_finished(&self) -> Vec<Completion> {
        self.engine.take_finished()
    }

    /// All ends, or one failure alone; see [`Engine::take_finished_or_failure`].
    ///
    /// # Errors
    /// The oldest failed job; all other ends stay for the next call.
    pub fn take_finished_or_failure(&self) -> Result<Vec<Completion>, Completion> {
        self.engine.take_finished_or_failure()
    }

    /// Blocks until none of these jobs is live; see [`Engine::wait`].
    ///
    /// # Errors
    /// Some have not ended in time.
    pub fn wait(&self, jobs: &[u64], timeout: Duration) -> Result<(), WaitTimeout> {
        self.engine.wait(jobs, timeout)
    }

    /// Blocks until the copies of these jobs are over, or in the device's queues; see
    /// [`Engine::wait_enqueued`].
    ///
    /// # Errors
    /// Some have got to neither in time.
    pub fn wait_enqueued(&self, jobs: &[u64], timeout: Duration) -> Result<(), WaitTimeout> {
        self.engine.wait_enqueued(jobs, timeout)
    }

    /// Blocks until no job is live of those that are now; see [`Engine::drain`].
    ///
    /// # Errors
    /// Some have not ended in time.
    pub fn drain(&self, timeout: Duration) -> Result<(), WaitTimeout> {
        self.engine.drain(timeout)
    }

    /// Ends the engine and unmaps the region; see [`Engine::shutdown`].
    pub fn shutdown(&self, timeout: Duration) -> ShutdownReport {
        self.engine.shutdown(timeout)
    }

    /// A snapshot of the counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.engine.stats()
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
