//! What can go wrong, one type per moment: at the start, at a submit, in a copy, in a wait.

use std::io;
use std::time::Duration;

use kvoffload_core::layout::LayoutError;
use kvoffload_core::plan::PlanError;
use kvoffload_core::pool::Slot;
use thiserror::Error;

use crate::cuda::{CudaUnavailable, DriverError};

/// Why an engine could not be started. Nothing of it remains.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    /// A number that must not be zero.
    #[error("{field} is 0: at least 1 is needed")]
    Zero {
        /// Name of the setting.
        field: &'static str,
    },
    /// The region does not fit.
    #[error(
        "the host region needs {needed} bytes but {limited_by} leaves {available}: \
         lower cpu_bytes_to_use or raise that limit"
    )]
    TooLarge {
        /// Bytes the region has.
        needed: u64,
        /// Bytes that can be taken now.
        available: u64,
        /// What limits it: a file, or the address space.
        limited_by: String,
    },
    /// Tensors, groups and slots that do not fit each other.
    #[error("{0}")]
    Layout(#[from] LayoutError),
    /// A tensor whose bytes would lie outside the address space, or at address zero.
    #[error(
        "tensor {tensor} cannot lie at address {address:#x} with {bytes} bytes: \
         pass the address of its first block"
    )]
    Address {
        /// Index of the tensor.
        tensor: usize,
        /// Address that was given.
        address: usize,
        /// Bytes from the first byte of its first block to the last byte of its last.
        bytes: u64,
    },
    /// A setting that makes no sense together with another.
    #[error("{field} cannot be used here: {reason}")]
    Setting {
        /// Name of the setting.
        field: &'static str,
        /// Why not, and what to do.
        reason: &'static str,
    },
    /// The operating system refused.
    #[error("the system refused to {what}: {source}")]
    System {
        /// What was asked of it.
        what: &'static str,
        /// Its answer.
        source: io::Error,
    },
    /// There is no CUDA to use.
    #[error("{0}")]
    Cuda(#[from] CudaUnavailable),
    /// The CUDA driver refused.
    #[error("the CUDA backend could not start: {0}")]
    Driver(DriverError),
    /// The code that starts the engine panicked.
    #[error("the transfer engine could not start: {message}; please report this")]
    Panicked {
        /// The panic's text.
        message: String,
    },
}

/// Why a job was not taken. Nothing has changed, and nothing of it will be reported.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// Blocks, groups or slots that the layout does not have, or that do not fit each other.
    #[error("job {job}: {source}")]
    Geometry {
        /// The refused job.
        job: u64,
        /// What is wrong with it.
        source: PlanError,
    },
    /// The id is in use: its job is live, or its end has not been taken yet.
    #[error("job {job} exists already: give every job its own id until its end has been taken")]
    Duplicate {
        /// The refused job.
        job: u64,
    },
    /// As many jobs are live or not yet taken as the engine allows.
    #[error("job {job}: {limit} jobs are queued or not yet taken: take finished jobs first")]
    QueueFull {
        /// The refused job.
        job: u64,
        /// The limit.
        limit: usize,
    },
    /// A copy that missed a deadline may still touch the slot.
    #[error(
        "job {job}: slot {} may still be in use by a copy that missed its deadline: \
         do not reuse the slot until that job is reported",
        .slot.get()
    )]
    Quarantined {
        /// The refused job.
        job: u64,
        /// The first such slot it names.
        slot: Slot,
    },
    /// The CUDA context is gone, with everything in it.
    #[error("job {job}: the CUDA context is lost: restart the engine")]
    DeviceLost {
        /// The refused job.
        job: u64,
    },
    /// The CUDA driver refused to note what the job comes after.
    #[error("job {job}: {source}")]
    Driver {
        /// The refused job.
        job: u64,
        /// Its answer.
        source: DriverError,
    },
    /// The region is another rank's.
    #[error("job {job}: this rank only reads the region: the rank that owns it stores")]
    ReadOnly {
        /// The refused job.
        job: u64,
    },
    /// The engine is shut down.
    #[error("job {job}: the transfer engine is shut down: make a new worker")]
    Closed {
        /// The refused job.
        job: u64,
    },
}

impl SubmitError {
    /// The refused job.
    #[must_use]
    pub fn job(&self) -> u64 {
        match self {
            Self::Geometry { job, .. }
            | Self::Duplicate { job }
            | Self::QueueFull { job, .. }
            | Self::Quarantined { job, .. }
            | Self::DeviceLost { job }
            | Self::Driver { job, .. }
            | Self::ReadOnly { job }
            | Self::Closed { job } => *job,
        }
    }
}

/// Why a job that was taken did not copy its bytes. What it was to write is undefined.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CopyError {
    /// The backend could not copy.
    #[error(
        "job {job}: the copy failed at slot {}: {reason}; \
         the bytes it was to write must not be used", .slot.get()
    )]
    Failed {
        /// The job.
        job: u64,
        /// Slot of the first bytes that were not copied.
        slot: Slot,
        /// What happened.
        reason: String,
    },
    /// The slot does not hold what this worker stored there; nothing was loaded.
    #[error(
        "job {job}: slot {} {reason}; nothing was loaded: recompute its tokens, \
         and look for whatever else writes to the region", .slot.get()
    )]
    Verify {
        /// The job.
        job: u64,
        /// The slot.
        slot: Slot,
        /// What is wrong with it.
        reason: VerifyReason,
    },
    /// The code that handled the job panicked. The lane goes on.
    #[error("job {job}: the transfer thread panicked: {message}; please report this")]
    Panicked {
        /// The job.
        job: u64,
        /// The panic's text.
        message: String,
    },
    /// [`Engine::cancel`](crate::Engine::cancel) was called for the job before all of it was copied.
    #[error("job {job} was cancelled: the bytes it was to write must not be used")]
    Cancelled {
        /// The job.
        job: u64,
    },
    /// The engine was shut down before the job ended.
    #[error("job {job}: the transfer engine was shut down before the copy ended")]
    Abandoned {
        /// The job.
        job: u64,
    },
}

impl CopyError {
    /// The job that failed.
    #[must_use]
    pub fn job(&self) -> u64 {
        match self {
            Self::Failed { job, .. }
            | Self::Verify { job, .. }
            | Self::Panicked { job, .. }
            | Self::Cancelled { job }
            | Self::Abandoned { job } => *job,
        }
    }

    /// The slot at fault, where one is known.
    #[must_use]
    pub fn slot(&self) -> Option<Slot> {
        match self {
            Self::Failed { slot, .. } | Self::Verify { slot, .. } => Some(*slot),
            Self::Panicked { .. } | Self::Cancelled { .. } | Self::Abandoned { .. } => None,
        }
    }
}

/// How a slot differs from what was stored there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum VerifyReason {
    /// No store of this worker has written the slot.
    #[error("was never stored by this worker")]
    NeverStored,
    /// The last store to the slot failed, was cancelled or was abandoned.
    #[error("holds the remains of a store that failed or was cancelled")]
    StoreFailed,
    /// The slot holds a chunk of another KV group.
    #[error("holds a chunk of KV group {stored}, not of group {wanted}")]
    OtherGroup {
        /// Group that was stored.
        stored: u32,
        /// Group the load is for.
        wanted: u32,
    },
    /// The chunk was stored without some of the blocks: vLLM had dropped them by then.
    #[error(
        "holds blocks {}..{} of its chunk, not all of {}..{}: use blocks_per_chunk 1 with this model",
        .stored.0, .stored.1, .wanted.0, .wanted.1
    )]
    OtherBlocks {
        /// Blocks of the chunk that were stored: the first, and one past the last.
        stored: (u32, u32),
        /// Blocks that the load is for.
        wanted: (u32, u32),
    },
    /// The bytes have changed since they were stored.
    #[error("has other bytes than were stored (hash {found:#018x}, stored {stored:#018x})")]
    Changed {
        /// Hash at the store.
        stored: u64,
        /// Hash now.
        found: u64,
    },
}

/// A wait whose deadline passed. The jobs it names are not done, and their slots are quarantined.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{} of the jobs waited for did not end within {waited:?} (first: {}): \
     their slots stay out of use until they do", .jobs.len(), .jobs.first().copied().unwrap_or_default()
)]
pub struct WaitTimeout {
    /// The jobs that are not done, in ascending order.
    pub jobs: Vec<u64>,
    /// How long was waited.
    pub waited: Duration,
}
