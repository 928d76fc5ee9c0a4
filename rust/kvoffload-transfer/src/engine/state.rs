//! Which jobs are live, which may start, and who waits for whom: the part of the engine that has no
//! threads.
//!
//! A job is *held back* until every earlier live job that conflicts with it (one of them writes a
//! slot or a block that both use) has ended. It only ever waits for earlier jobs, so there is always
//! one that can go on. Within a direction jobs start in the order of their submits, except that those
//! held back are passed by the others.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use kvoffload_core::fence::{Fence, Use};
use kvoffload_core::jobs::JobKind;
use kvoffload_core::plan::Geometry;
use kvoffload_core::pool::Slot;

use super::stats::{KindStats, Stats};
use crate::error::{CopyError, SubmitError};

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

/// What a job named, kept as long as it is live.
#[derive(Debug)]
pub(crate) struct JobIds {
    block_ids: Box<[u32]>,
    group_sizes: Box<[u32]>,
    block_indices: Box<[u64]>,
    pub(super) slots: Box<[Slot]>,
}

impl JobIds {
    pub(super) fn new(geometry: &Geometry<'_>) -> Self {
        Self {
            block_ids: geometry.block_ids.into(),
            group_sizes: geometry.group_sizes.into(),
            block_indices: geometry.block_indices.into(),
            slots: geometry.slots.into(),
        }
    }

    pub(super) fn geometry(&self) -> Geometry<'_> {
        Geometry {
            block_ids: &self.block_ids,
            group_sizes: &self.group_sizes,
            block_indices: &self.block_indices,
            slots: &self.slots,
        }
    }
}

#[derive(Debug)]
struct Live {
    kind: JobKind,
    /// Position in the order of submits.
    order: u64,
    ids: Arc<JobIds>,
    submitted: Instant,
    /// Jobs it waits for.
    blockers: usize,
    /// Jobs that wait for it.
    dependents: Vec<u64>,
    /// A wait for it has timed out, so that its slots are quarantined.
    overdue: bool,
}

/// See the module's description.
#[derive(Debug)]
pub(super) struct State {
    live: HashMap<u64, Live>,
    /// Startable jobs as (order, job), per direction.
    ready: [BinaryHeap<Reverse<(u64, u64)>>; 2],
    slots: Fence,
    blocks: Fence,
    /// False only in a test that shows what the fence is for.
    fences: bool,
    submits: u64,
    max_jobs: usize,
    finished: Vec<Completion>,
    /// Ids in `finished`.
    untaken: HashSet<u64>,
    /// For each quarantined slot, how many overdue jobs name it.
    quarantine: HashMap<Slot, usize>,
    pub(super) stats: Stats,
    /// Nothing new is taken.
    pub(super) closing: bool,
    /// Threads that have not ended yet.
    pub(super) threads: usize,
    pub(super) abandoned: Vec<u64>,
}

/// Index of a direction's queue.
pub(super) fn lane(kind: JobKind) -> usize {
    match kind {
        JobKind::Store => 0,
        JobKind::Load => 1,
    }
}

impl State {
    pub(super) fn new(max_jobs: usize, fences: bool) -> Self {
        Self {
            live: HashMap::new(),
            ready: Default::default(),
            slots: Fence::new(),
            blocks: Fence::new(),
            fences,
            submits: 0,
            max_jobs,
            finished: Vec::new(),
            untaken: HashSet::new(),
            quarantine: HashMap::new(),
            stats: Stats::default(),
            closing: false,
            threads: 0,
            abandoned: Vec::new(),
        }
    }

    /// Takes a job whose geometry is known to be good. Says whether it can start at once.
    pub(super) fn submit(
        &mut self,
        job: u64,
        kind: JobKind,
        ids: JobIds,
    ) -> Result<bool, SubmitError> {
        if self.closing {
            return Err(SubmitError::Closed { job });
        }
        if self.live.contains_key(&job) || self.untaken.contains(&job) {
            return Err(SubmitError::Duplicate { job });
        }
        if self.live.len() + self.finished.len() >= self.max_jobs {
            return Err(SubmitError::QueueFull {
                job,
                limit: self.max_jobs,
            });
        }
        if !self.quarantine.is_empty()
            && let Some(&slot) = ids
                .slots
                .iter()
                .find(|slot| self.quarantine.contains_key(slot))
        {
            return Err(SubmitError::Quarantined { job, slot });
        }

        let (slot_use, block_use) = match kind {
            JobKind::Store => (Use::Write, Use::Read),
            JobKind::Load => (Use::Read, Use::Write),
        };
        let mut blockers = Vec::new();
        for slot in &ids.slots {
            self.slots.enter(job, slot.get(), slot_use, &mut blockers);
        }
        for &block in &ids.block_ids {
            self.blocks.enter(job, block, block_use, &mut blockers);
        }
        if !self.fences {
            blockers.clear();
        }
        for blocker in &blockers {
            if let Some(blocker) = self.live.get_mut(blocker) {
                blocker.dependents.push(job);
            }
        }

        self.submits += 1;
        let order = self.submits;
        if blockers.is_empty() {
            self.ready[lane(kind)].push(Reverse((order, job)));
        } else {
            self.stats.fence_waits += 1;
        }
        let live = Live {
            kind,
            order,
            ids: Arc::new(ids),
            submitted: Instant::now(),
            blockers: blockers.len(),
            dependents: Vec::new(),
            overdue: false,
        };
        self.live.insert(job, live);
        let stats = self.kind_stats(kind);
        stats.live += 1;
        stats.live_peak = stats.live_peak.max(stats.live);
        Ok(blockers.is_empty())
    }

    /// The next job of a direction that may start.
    pub(super) fn start(&mut self, kind: JobKind) -> Option<(u64, Arc<JobIds>)> {
        let Reverse((_, job)) = self.ready[lane(kind)].pop()?;
        let live = self.live.get(&job)?;
        let (ids, waited) = (Arc::clone(&live.ids), live.submitted.elapsed());
        self.kind_stats(kind).queued_us += waited.as_micros() as u64;
        Some((job, ids))
    }

    /// Whether a job of the direction could start.
    pub(super) fn can_start(&self, kind: JobKind) -> bool {
        !self.ready[lane(kind)].is_empty()
    }

    /// Whether a direction has jobs that have not ended.
    pub(super) fn has_live(&self, kind: JobKind) -> bool {
        match kind {
            JobKind::Store => self.stats.stores.live > 0,
            JobKind::Load => self.stats.loads.live > 0,
        }
    }

    /// A live job has ended: its copy touches nothing any more. Jobs that waited for it may start.
    /// A job that is not live is ignored, so that no job can be reported twice.
    pub(super) fn finish(
        &mut self,
        job: u64,
        bytes: u64,
        seconds: f64,
        outcome: Result<(), CopyError>,
    ) {
        let Some(live) = self.live.remove(&job) else {
            return;
        };
        self.slots.leave(job);
        self.blocks.leave(job);
        for dependent in live.dependents {
            if let Some(waiting) = self.live.get_mut(&dependent) {
                waiting.blockers -= 1;
                if waiting.blockers == 0 {
                    self.ready[lane(waiting.kind)].push(Reverse((waiting.order, dependent)));
                }
            }
        }
        if live.overdue {
            self.release(&live.ids.slots);
        }
        let stats = self.kind_stats(live.kind);
        stats.live -= 1;
        let bytes = match outcome {
            Ok(()) => bytes,
            Err(_) => 0,
        };
        match &outcome {
            Ok(()) => {
                stats.jobs += 1;
                stats.bytes += bytes;
            }
            Err(error) => {
                stats.failures += 1;
                if matches!(error, CopyError::Abandoned { .. }) {
                    self.abandoned.push(job);
                }
            }
        }
        self.untaken.insert(job);
        self.finished.push(Completion {
            job,
            kind: live.kind,
            bytes,
            seconds,
            outcome,
        });
    }

    /// All ends not yet taken, oldest first.
    pub(super) fn take_finished(&mut self) -> Vec<Completion> {
        self.untaken.clear();
        std::mem::take(&mut self.finished)
    }

    /// The oldest end with an error, if there is one.
    pub(super) fn take_failure(&mut self) -> Option<Completion> {
        let at = self
            .finished
            .iter()
            .position(|completion| completion.outcome.is_err())?;
        let failure = self.finished.remove(at);
        self.untaken.remove(&failure.job);
        Some(failure)
    }

    pub(super) fn is_live(&self, job: u64) -> bool {
        self.live.contains_key(&job)
    }

    /// Whether any of the jobs is live; those found at the list's end that are not are dropped.
    pub(super) fn any_live(&self, jobs: &mut Vec<u64>) -> bool {
        while jobs.pop_if(|job| !self.is_live(*job)).is_some() {}
        !jobs.is_empty()
    }

    pub(super) fn num_live(&self) -> usize {
        self.live.len()
    }

    pub(super) fn live_jobs(&self) -> Vec<u64> {
        self.live.keys().copied().collect()
    }

    /// A wait for these live jobs has timed out: keeps their slots from later jobs until they end.
    pub(super) fn quarantine(&mut self, jobs: &[u64]) {
        self.stats.wait_timeouts += 1;
        for job in jobs {
            let Some(live) = self.live.get_mut(job) else {
                continue;
            };
            if std::mem::replace(&mut live.overdue, true) {
                continue;
            }
            for &slot in &live.ids.slots {
                *self.quarantine.entry(slot).or_default() += 1;
            }
        }
        self.stats.quarantined_slots = self.quarantine.len() as u64;
    }

    fn release(&mut self, slots: &[Slot]) {
        for slot in slots {
            if let Some(jobs) = self.quarantine.get_mut(slot) {
                *jobs -= 1;
                if *jobs == 0 {
                    self.quarantine.remove(slot);
                    self.stats.quarantine_released += 1;
                }
            }
        }
        self.stats.quarantined_slots = self.quarantine.len() as u64;
    }

    fn kind_stats(&mut self, kind: JobKind) -> &mut KindStats {
        match kind {
            JobKind::Store => &mut self.stats.stores,
            JobKind::Load => &mut self.stats.loads,
        }
    }
}
