//! One job on its way through the engine.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::Instant;

use kvoffload_core::fence::Ticket;
use kvoffload_core::jobs::JobKind;
use kvoffload_core::plan::Geometry;
use kvoffload_core::pool::Slot;

use crate::backend::Mark;
use crate::error::CopyError;

/// Numbers of a job that is large.
const LARGE_JOB: usize = 1 << 16;

/// The end of one job.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    /// The job.
    pub job: u64,
    /// Its direction.
    pub kind: JobKind,
    /// Bytes that were copied; 0 if it failed.
    pub bytes: u64,
    /// Seconds between the first copy's start and the last one's end.
    pub seconds: f64,
    /// Whether all bytes arrived.
    pub outcome: Result<(), CopyError>,
}

/// What a job names, kept as long as it is live; then its memory serves another job.
#[derive(Debug, Default)]
pub struct JobIds {
    /// See [`Geometry::block_ids`].
    pub block_ids: Vec<u32>,
    /// See [`Geometry::group_sizes`].
    pub group_sizes: Vec<u32>,
    /// See [`Geometry::block_indices`].
    pub block_indices: Vec<u64>,
    /// See [`Geometry::slots`].
    pub slots: Vec<Slot>,
}

impl JobIds {
    /// Whether it takes so much memory that it should not be kept for another job.
    pub(super) fn is_large(&self) -> bool {
        let capacities = [
            self.block_ids.capacity(),
            self.slots.capacity(),
            self.group_sizes.capacity(),
            self.block_indices.capacity(),
        ];
        capacities.iter().any(|&capacity| capacity > LARGE_JOB)
    }

    /// Replaces all of it.
    pub fn set(&mut self, geometry: &Geometry<'_>) {
        fn set<T: Copy>(to: &mut Vec<T>, from: &[T]) {
            to.clear();
            to.extend_from_slice(from);
        }
        set(&mut self.block_ids, geometry.block_ids);
        set(&mut self.group_sizes, geometry.group_sizes);
        set(&mut self.block_indices, geometry.block_indices);
        set(&mut self.slots, geometry.slots);
    }

    pub(crate) fn geometry(&self) -> Geometry<'_> {
        Geometry {
            block_ids: &self.block_ids,
            group_sizes: &self.group_sizes,
            block_indices: &self.block_indices,
            slots: &self.slots,
        }
    }
}

/// A job that has not been submitted yet, in the memory of one that is over (and with its numbers).
#[derive(Debug, Default)]
pub struct NewJob(pub(super) Arc<JobIds>);

impl NewJob {
    /// What it names, to be written.
    pub fn ids(&mut self) -> &mut JobIds {
        Arc::get_mut(&mut self.0).expect("a new job has no other owner")
    }
}

#[derive(Debug)]
pub(super) struct Live {
    pub(super) kind: JobKind,
    /// Position in the order of submits.
    pub(super) order: u64,
    pub(super) ids: Arc<JobIds>,
    /// For the backend, until the job is started.
    pub(super) mark: Option<Mark>,
    pub(super) submitted: Instant,
    pub(super) phase: Phase,
    /// Its place among those who use slots and blocks, once it has one.
    pub(super) ticket: Option<Ticket>,
    /// Jobs it had to wait for when it got its place, and how many of them are live.
    pub(super) blockers: Vec<u64>,
    pub(super) blocked_by: usize,
    /// Jobs that wait for it.
    pub(super) dependents: Vec<u64>,
    /// A wait for it has timed out, so that its slots are quarantined.
    pub(super) overdue: bool,
    /// Somebody waits until its copies are in the device's queues.
    pub(super) rushed: bool,
    /// Nobody wants it any more.
    pub(super) cancelled: bool,
}

/// How far a live job has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// It is in the inbox: nobody knows whom it has to wait for.
    Submitted,
    /// It waits for other jobs.
    Held,
    /// It is in the queue of its direction.
    Ready,
    /// Its direction's thread has it.
    Started,
    /// All its copies are in the device's queues.
    Enqueued,
}

/// A job that a thread is to start.
#[derive(Debug)]
pub(super) struct Start {
    pub(super) job: u64,
    /// Position in the order of submits.
    pub(super) order: u64,
    pub(super) ids: Arc<JobIds>,
    pub(super) mark: Option<Mark>,
    /// Somebody waits for its copies to be in the device's queues.
    pub(super) rushed: bool,
}

/// Jobs of one direction that may start, as (order, job).
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// How many there are. The heaps may name others: a job that is rushed while it waits is put
    /// into the other heap, too, and left in the first.
    pub(super) jobs: usize,
    pub(super) rushed: BinaryHeap<Reverse<(u64, u64)>>,
    pub(super) ready: BinaryHeap<Reverse<(u64, u64)>>,
    /// Started jobs that the backend is to hurry up.
    pub(super) to_rush: Vec<u64>,
    /// Started jobs that the backend is to give up, as (order, job).
    pub(super) to_cancel: Vec<(u64, u64)>,
}

/// What a wait waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Until {
    /// The job is over.
    Ended,
    /// The job is over, or its copies are in the device's queues.
    Enqueued,
}
