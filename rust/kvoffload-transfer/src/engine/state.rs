//! Which jobs are live, which may start, and who waits for whom: the part of the engine that has no
//! threads. Its lock is held for short moments only, which do not depend on how much a job names (but
//! for a slot's quarantine); what takes longer is in `order.rs`.
//!
//! A job is *held back* until every earlier live job that conflicts with it (one of them writes a
//! slot or a block that both use) has ended. It only ever waits for earlier jobs, so there is always
//! one that can go on. Within a direction jobs start in the order of their submits, except that those
//! held back are passed by the others.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use kvoffload_core::fence::Ticket;
use kvoffload_core::jobs::JobKind;
use kvoffload_core::pool::Slot;

use super::job::{Completion, JobIds, Live, Phase, Queue, Start, Until};
use super::stats::{KindStats, Stats};
use crate::backend::Mark;
use crate::error::{CopyError, SubmitError};

/// See the module's description.
#[derive(Debug)]
pub(super) struct State {
    pub(super) live: HashMap<u64, Live>,
    /// Jobs without a place among those who use slots and blocks, in the order of their submits, as
    /// (order, job).
    inbox: VecDeque<(u64, u64)>,
    /// Per direction.
    pub(super) queues: [Queue; 2],
    /// Jobs to give up that had not started, as (order, job).
    pub(super) to_withdraw: VecDeque<(u64, u64)>,
    submits: u64,
    max_jobs: usize,
    finished: Vec<Completion>,
    /// Ids in `finished`.
    untaken: HashSet<u64>,
    /// For each quarantined slot, how many overdue jobs name it.
    quarantine: HashMap<Slot, usize>,
    pub(super) stats: Stats,
    /// Per direction, whether its thread wakes soon without being woken.
    pub(super) wakes_soon: [bool; 2],
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
    pub(super) fn new(max_jobs: usize) -> Self {
        Self {
            live: HashMap::new(),
            inbox: VecDeque::new(),
            queues: Default::default(),
            to_withdraw: VecDeque::new(),
            submits: 0,
            max_jobs,
            finished: Vec::new(),
            untaken: HashSet::new(),
            quarantine: HashMap::new(),
            stats: Stats::default(),
            wakes_soon: [false; 2],
            closing: false,
            threads: 0,
            abandoned: Vec::new(),
        }
    }

    /// Whether a job can be taken whose geometry is known to be good.
    pub(super) fn admit(&self, job: u64, slots: &[Slot]) -> Result<(), SubmitError> {
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
            && let Some(&slot) = slots.iter().find(|slot| self.quarantine.contains_key(slot))
        {
            return Err(SubmitError::Quarantined { job, slot });
        }
        Ok(())
    }

    /// Takes a job that was admitted into the inbox.
    pub(super) fn submit(&mut self, job: u64, kind: JobKind, ids: Arc<JobIds>, mark: Option<Mark>) {
        self.submits += 1;
        let live = Live {
            kind,
            order: self.submits,
            ids,
            mark,
            submitted: Instant::now(),
            phase: Phase::Submitted,
            ticket: None,
            blockers: Vec::new(),
            blocked_by: 0,
            dependents: Vec::new(),
            overdue: false,
            rushed: false,
            cancelled: false,
        };
        self.live.insert(job, live);
        self.inbox.push_back((self.submits, job));
        let stats = self.kind_stats(kind);
        stats.live += 1;
        stats.live_peak = stats.live_peak.max(stats.live);
    }

    /// Whether there are jobs without a place.
    pub(super) fn has_mail(&self) -> bool {
        !self.inbox.is_empty()
    }

    /// Takes the oldest job without a place out of the inbox.
    pub(super) fn next_mail(&mut self) -> Option<(u64, JobKind, Arc<JobIds>)> {
        loop {
            let (order, job) = self.inbox.pop_front()?;
            // Not one that was cancelled, nor a later job of the same id.
            let live = self.live.get(&job).filter(|live| live.order == order);
            if let Some(live) = live.filter(|live| !live.cancelled) {
                return Some((job, live.kind, Arc::clone(&live.ids)));
            }
        }
    }

    /// A job out of the inbox has its place, and has to wait for `blockers`, which are all live.
    pub(super) fn placed(&mut self, job: u64, ticket: Ticket, blockers: &[u64]) {
        for blocker in blockers {
            if let Some(blocker) = self.live.get_mut(blocker) {
                blocker.dependents.push(job);
            }
        }
        let Some(live) = self.live.get_mut(&job) else {
            return;
        };
        live.ticket = Some(ticket);
        live.phase = Phase::Held;
        live.blocked_by = blockers.len();
        live.blockers.extend(blockers);
        let rushed = live.rushed;
        if blockers.is_empty() {
            self.make_ready(job);
        } else {
            self.stats.fence_waits += 1;
            if rushed {
                self.rush(blockers);
            }
        }
    }

    /// What a live job named, and its place.
    pub(super) fn place(&self, job: u64) -> Option<(Ticket, Arc<JobIds>)> {
        let live = self.live.get(&job)?;
        Some((live.ticket?, Arc::clone(&live.ids)))
    }

    /// A job waits for nobody any more.
    fn make_ready(&mut self, job: u64) {
        let Some(live) = self.live.get_mut(&job) else {
            return;
        };
        live.phase = Phase::Ready;
        let queue = &mut self.queues[lane(live.kind)];
        queue.jobs += 1;
        let heap = match live.rushed {
            true => &mut queue.rushed,
            false => &mut queue.ready,
        };
        heap.push(Reverse((live.order, job)));
    }

    /// The next job of a direction that may start; `full`: only one that somebody waits for.
    pub(super) fn start(&mut self, kind: JobKind, full: bool) -> Option<Start> {
        let queue = &mut self.queues[lane(kind)];
        loop {
            let next = queue.rushed.pop();
            let next = next.or_else(|| if full { None } else { queue.ready.pop() });
            let Reverse((order, job)) = next?;
            // Not one that was started out of the other heap, nor a later job of the same id.
            let Some(live) = self.live.get_mut(&job).filter(|live| live.order == order) else {
                continue;
            };
            // One that was cancelled is about to be withdrawn.
            if live.phase != Phase::Ready || live.cancelled {
                continue;
            }
            live.phase = Phase::Started;
            queue.jobs -= 1;
            let start = Start {
                job,
                order,
                ids: Arc::clone(&live.ids),
                mark: live.mark.take(),
                rushed: live.rushed,
            };
            let waited = live.submitted.elapsed().as_micros() as u64;
            self.kind_stats(kind).queued_us += waited;
            return Some(start);
        }
    }

    /// Whether a direction's thread has something to do for a job it does not know of.
    pub(super) fn has_work(&self, kind: JobKind) -> bool {
        let queue = &self.queues[lane(kind)];
        let asked = !queue.to_rush.is_empty() || !queue.to_cancel.is_empty();
        queue.jobs > 0 || asked || !self.to_withdraw.is_empty()
    }

    /// Somebody waits until the copies of these jobs are in the device's queues: they, and those that
    /// hold them back, go first.
    pub(super) fn rush(&mut self, jobs: &[u64]) {
        let mut jobs = jobs.to_vec();
        while let Some(job) = jobs.pop() {
            let Some(live) = self.live.get_mut(&job) else {
                continue;
            };
            if std::mem::replace(&mut live.rushed, true) {
                continue;
            }
            let queue = &mut self.queues[lane(live.kind)];
            match live.phase {
                // Once it has its place.
                Phase::Submitted => {}
                Phase::Held => jobs.extend(&live.blockers),
                Phase::Ready => queue.rushed.push(Reverse((live.order, job))),
                Phase::Started => queue.to_rush.push(job),
                Phase::Enqueued => {}
            }
        }
    }

    /// The next started job of a direction that its backend is to hurry up.
    pub(super) fn next_rush(&mut self, kind: JobKind) -> Option<u64> {
        while let Some(job) = self.queues[lane(kind)].to_rush.pop() {
            let live = self.live.get(&job);
            if live.is_some_and(|live| live.phase == Phase::Started) {
                return Some(job);
            }
        }
        None
    }

    /// All copies of these jobs are in the device's queues.
    pub(super) fn enqueued(&mut self, jobs: &[u64]) {
        for job in jobs {
            if let Some(live) = self.live.get_mut(job) {
                live.phase = Phase::Enqueued;
            }
        }
    }

    /// Whether a direction has jobs that have not ended.
    pub(super) fn has_live(&self, kind: JobKind) -> bool {
        match kind {
            JobKind::Store => self.stats.stores.live > 0,
            JobKind::Load => self.stats.loads.live > 0,
        }
    }

    /// A live job has ended: its copy touches nothing any more, and it has given up its place. Jobs
    /// that waited for it may start.
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
        for dependent in live.dependents {
            if let Some(waiting) = self.live.get_mut(&dependent) {
                waiting.blocked_by -= 1;
                if waiting.blocked_by == 0 {
                    self.make_ready(dependent);
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
            Err(CopyError::Cancelled { .. }) => stats.cancelled += 1,
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

    /// Whether a wait for the job has to go on.
    pub(super) fn is_awaited(&self, job: u64, until: Until) -> bool {
        let live = self.live.get(&job);
        live.is_some_and(|live| until == Until::Ended || live.phase != Phase::Enqueued)
    }

    /// Whether a wait for any of the jobs has to go on; those found at the list's end for which it
    /// has not are dropped.
    pub(super) fn any_awaited(&self, jobs: &mut Vec<u64>, until: Until) -> bool {
        while jobs.pop_if(|job| !self.is_awaited(*job, until)).is_some() {}
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
