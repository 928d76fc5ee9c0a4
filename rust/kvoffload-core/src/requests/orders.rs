//! What the workers are told with a step.

use crate::jobs::{JobId, JobKind};
use crate::pool::Slot;

use super::table::RequestId;

/// What the completion of a job needs.
#[derive(Clone, Debug)]
pub(super) struct JobBody {
    pub(super) request: RequestId,
    /// The keys of its slots, back to back, in the order of the slots.
    pub(super) keys: Box<[u8]>,
    pub(super) key_bytes: usize,
    /// The GPU blocks of a store, which it reads.
    pub(super) blocks: Box<[u32]>,
    /// When it began.
    pub(super) began: std::time::Duration,
    /// Its keys are not pinned: nothing of it is to be given back.
    pub(super) hollow: bool,
}

impl JobBody {
    pub(super) fn keys(&self) -> impl Iterator<Item = &[u8]> + Clone {
        self.keys.chunks_exact(self.key_bytes.max(1))
    }
}

/// A copy that the workers are to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobOrder {
    /// The job's name.
    pub id: JobId,
    /// Its direction.
    pub kind: JobKind,
    /// The request it is for.
    pub request: Box<str>,
    /// GPU blocks, group after group.
    pub blocks: Box<[u32]>,
    /// How many of them belong to each group.
    pub group_sizes: Box<[u32]>,
    /// For each group the position of its first block in the request, in blocks.
    pub first_blocks: Box<[u64]>,
    /// The slots of the chunks, in the same order. Empty although there are blocks: the load cannot be
    /// made, and is to be reported as failed. Without blocks, too, it is a load of nothing, which
    /// succeeds.
    pub slots: Box<[Slot]>,
}

/// Everything the workers are told with a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Orders {
    /// Loads to start.
    pub loads: Vec<JobOrder>,
    /// Stores to start once this step is computed.
    pub stores: Vec<JobOrder>,
    /// Stores, of this step or earlier ones, that must have read their blocks before this step writes
    /// them. Jobs that use the same slots keep their order, flushed or not: after a reset, a slot may
    /// be given away while a void store has still to write it.
    pub flush: Vec<JobId>,
    /// Loads that must not be taken for good: what they read is void.
    pub void: Vec<JobId>,
}

impl Orders {
    /// Whether there is nothing to tell.
    pub fn is_empty(&self) -> bool {
        self.loads.is_empty()
            && self.stores.is_empty()
            && self.flush.is_empty()
            && self.void.is_empty()
    }
}
