//! One direction of the CUDA backend: whose piece goes into the queues next, and which job is over.
//!
//! A job is put into the queues when the compute it comes after is done, and not before: what stands in
//! a stream holds up all behind it, and a step of the engine can take a second. Only a job that somebody
//! waits for is put there at once, with a wait in front.
//!
//! Jobs take turns, piece by piece, and a new job is next: a short load waits for what is in the
//! queues and one piece of every other load at most. A failed job is tried once more on the other
//! path; a path that keeps failing is left alone.

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvoffload_core::jobs::JobKind;
use kvoffload_core::pool::Slot;

use super::calibrate::{Chooser, CopyPath};
use super::error::DriverError;
use super::filler::Filler;
use super::job::Job;
use super::mover::{Mover, Path, injected};
use super::objects::Event;
use super::piece::{MOST_COPIES, Piece};
use super::pinned::PinnedRegion;
use super::queue::PACE_BYTES;
use super::shared::{Common, Counters, CudaFaults};
use crate::backend::{Backend, Poll, Progress, Work};
use crate::error::CopyError;
use crate::host::KeepAlive;

/// Bytes of a piece on the direct path. Long pieces have many rows; but a load has to wait for one of
/// another load, and loads are waited for.
const DIRECT_STORE: u64 = PACE_BYTES;
const DIRECT_LOAD: u64 = 8 << 20;
/// The most copies of a direct piece: the driver takes 0.4 to 3 us for each.
const DIRECT_COPIES: usize = 8192;
/// Bytes of a job's first piece. Each of the next staged ones is twice as long, up to a chunk, and towards
/// the end each is half of what is left: so the copy engine starts soon, and little is left to do on
/// either side of its work.
const FIRST_PIECE: u64 = 1 << 20;
/// Stores of slots below this length go through each group's in the order of host memory. In random order an
/// H200 writes slots of 128 KiB at some 91 % of its speed, of 1 MiB at 99 %; and where staged slots lie next
/// to one another, they are one copy.
const SHORT_SLOT: u64 = 1 << 20;
/// Jobs held at once.
const DEPTH: usize = 64;
/// Pieces that one `poll` puts into the queues at most.
const PIECES_A_POLL: usize = 32;
/// After so many failures in a row a path is left alone.
const TOO_OFTEN: u32 = 8;
/// How long to leave the device alone while copies run: a piece takes 150 us or more on a fast bus, and
/// there is another behind it.
const PACE: Duration = Duration::from_micros(25);
/// And near the end of loads, for which requests wait: the last bytes take 40 us on a fast bus.
const ENDING: Duration = Duration::from_micros(4);
const LAST_BYTES: u64 = 2 << 20;
/// How long to leave the device alone while jobs wait for compute only.
const COMPUTING: Duration = Duration::from_micros(100);
/// How many of them are asked for at a time.
const ASKED: usize = 8;
/// How long to wait for memory that is being registered: some milliseconds a piece.
const REGISTERING: Duration = Duration::from_micros(500);
/// An engine that works submits jobs at every step, some ten milliseconds apart.
const LINGER: Duration = Duration::from_millis(20);
const TIMER_SLACK_NS: u64 = 1_000;
const IDLE: Duration = Duration::from_secs(3600);

/// One direction. Fields are dropped in order: the queues first, then the memory they use.
pub(super) struct CudaBackend {
    kind: JobKind,
    mover: Mover,
    jobs: VecDeque<Job>,
    /// How often each path has failed since it last worked.
    failures: [u32; 2],
    piece: Piece,
    chooser: Arc<Chooser>,
    pinned: Arc<PinnedRegion>,
    common: Arc<Common>,
    faults: CudaFaults,
    submitted: u64,
    _keep_alive: Arc<Option<KeepAlive>>,
}

enum Step {
    Sent,
    /// Not now: memory is being registered.
    Blocked,
    Failed(CopyError),
    /// As failed, and no other path would help.
    Hopeless(CopyError),
}

impl CudaBackend {
    pub(super) fn new(
        kind: JobKind,
        mover: Mover,
        chooser: Arc<Chooser>,
        pinned: Arc<PinnedRegion>,
        common: Arc<Common>,
        faults: CudaFaults,
        keep_alive: Arc<Option<KeepAlive>>,
    ) -> Self {
        Self {
            kind,
            mover,
            jobs: VecDeque::with_capacity(DEPTH),
            failures: [0; 2],
            piece: Piece::default(),
            chooser,
            pinned,
            common,
            faults,
            submitted: 0,
            _keep_alive: keep_alive,
        }
    }

    /// Reaps, feeds the queues, and hands over what is over. An error concerns all jobs.
    fn advance(&mut self, progress: &mut Progress) -> Result<Poll, DriverError> {
        self.mover.reap()?;
        let (mut sent, mut passed, mut waiting) = (0, 0, 0);
        while passed < self.jobs.len() && sent < PIECES_A_POLL {
            let Some(mut job) = self.jobs.pop_front() else {
                break;
            };
            if job.cancelled {
                passed += 1;
                self.jobs.push_back(job);
                continue;
            }
            if let Some(after) = job.after.as_ref().filter(|_| !job.rushed) {
                let computed = match waiting {
                    ASKED.. => Ok(false),
                    _ => after.is_done(),
                };
                match computed {
                    Ok(true) => job.after = None,
                    Ok(false) => {
                        (waiting, passed) = (waiting + 1, passed + 1);
                        self.jobs.push_back(job);
                        continue;
                    }
                    Err(error) => {
                        self.jobs.push_front(job);
                        return Err(error);
                    }
                }
            }
            let path = self.path_now(&job);
            let paced = self.mover.has_room(path) || job.rushed;
            // As long as its path is not chosen, it may be either.
            let direct = path == Path::Direct && job.path.is_some();
            let listed = direct || self.mover.can_stage();
            if job.is_enqueued() || !paced || !listed {
                passed += 1;
                self.jobs.push_back(job);
                continue;
            }
            let moved_on = catch_unwind(AssertUnwindSafe(|| self.move_on(&mut job)));
            match moved_on {
                Ok(Ok(true)) => (passed, sent) = (0, sent + 1),
                Ok(Ok(false)) => passed += 1,
                Ok(Err(error)) => {
                    passed = 0;
                    progress.ended.push_back(job.ended(0.0, Err(error)));
                    continue;
                }
                Err(panic) => {
                    // The engine ends all jobs that `abandon` gives it: this one must be among them.
                    self.jobs.push_front(job);
                    resume_unwind(panic);
                }
            }
            if job.is_enqueued() && job.pieces > 0 {
                let ends = job.last.clone();
                self.common.after.lock().insert(job.work.job, ends);
                progress.enqueued.push(job.work.job);
            }
            self.jobs.push_back(job);
        }
        self.finish(progress)?;
        Ok(if sent == PIECES_A_POLL {
            Poll::Again
        } else if !self.mover.is_idle() {
            Poll::After(if self.is_ending() { ENDING } else { PACE })
        } else if waiting > 0 {
            Poll::After(COMPUTING)
        } else if !self.jobs.is_empty() {
            Poll::After(REGISTERING)
        } else {
            Poll::After(IDLE)
        })
    }

    /// Whether nothing but a few bytes stands between loads and their end.
    fn is_ending(&self) -> bool {
        // A rushed job's copies may wait for compute, and staged ones for room on the device.
        let waits = |job: &Job| job.pieces > 0 && job.after.is_some();
        self.kind == JobKind::Load
            && self.mover.bytes() <= LAST_BYTES
            && !self.mover.starves()
            && !self.jobs.iter().any(waits)
    }

    /// Takes a job one piece further, on the other path if it must; says whether it moved.
    fn move_on(&mut self, job: &mut Job) -> Result<bool, CopyError> {
        match self.step(job) {
            Step::Sent => Ok(true),
            Step::Blocked => Ok(false),
            Step::Failed(error) => self.retry(job, error).map(|()| true),
            Step::Hopeless(error) => {
                // As for a retry: a job that is over must not touch memory any more.
                self.drain();
                Err(error)
            }
        }
    }

    /// Puts the job's next piece into the queues.
    fn step(&mut self, job: &mut Job) -> Step {
        let direct = match self.kind {
            JobKind::Store => DIRECT_STORE,
            JobKind::Load => DIRECT_LOAD,
        };
        let path = self.path_now(job);
        let most = match (job.path, path) {
            (Some(_), Path::Staged) => MOST_COPIES,
            _ => DIRECT_COPIES,
        };
        let chunk = match (job.path, path) {
            (Some(_), Path::Direct) => direct,
            // Its path will be chosen by its first piece, which must fit into both.
            (None, _) => FIRST_PIECE.min(self.mover.chunk().unwrap_or(direct)),
            (Some(_), Path::Staged) => {
                let longest = self.mover.chunk().unwrap_or(direct);
                longest
                    .min(PACE_BYTES) // A longer one would keep others from overlapping with it.
                    .min(FIRST_PIECE << job.pieces.min(16))
                    .min((job.left / 2).max(FIRST_PIECE))
            }
        };
        let filler = Filler::new(&self.common, &self.pinned, &mut self.piece, chunk, most);
        let first_offset = match filler.fill(job) {
            Ok(Some(first_offset)) => first_offset,
            Ok(None) => {
                Counters::add(&self.common.counters.registration_waits);
                return Step::Blocked;
            }
            Err(offset) => {
                let reason = "its host memory could not be had".to_owned();
                return Step::Hopeless(job.failed(self.slot(offset), reason));
            }
        };
        let bytes = self.piece.bytes();
        let ranges = self.piece.ranges.len() as u64;
        if job.path.is_none() {
            job.path = Some(self.choose(ranges, bytes, job.left));
        }
        let path = self.path_now(job);
        if Some(path) != job.path {
            Counters::add(&self.common.counters.switched_pieces);
        }
        // Only a path's first piece has to wait: the others come after it on the same stream.
        let after = match job.last[path as usize] {
            None => job.after.as_ref(),
            Some(_) => None,
        };
        let (timed, pageable) = (
            job.start[path as usize].is_none(),
            self.pinned.is_pageable(),
        );
        let sent = if job.fail {
            Err(injected("this job"))
        } else {
            // SAFETY: the ranges lie in the tensors, which the backend keeps alive and whose blocks the
            // job may use, and in the region, whose pieces are ready and stay so; the fence keeps
            // conflicting jobs away until this one has ended, and `after` is what the engine had
            // enqueued on those blocks when it submitted the job. No range reaches out of its home: a
            // block lies in its tensor, and runs end where pieces do.
            unsafe { self.mover.send(path, &self.piece, after, timed, pageable) }
        };
        if let Some(error) = self.mover.take_refusal() {
            self.common.notices.add(format!(
                "the driver has refused to copy rows ({error}): no more are made, so short fragments take \
                 longer on the direct path"
            ));
        }
        match sent {
            Ok(sent) => {
                Counters::add(&self.common.counters.pieces);
                let rows = &self.common.counters.row_copies;
                rows.fetch_add(sent.row_copies, Ordering::Relaxed);
                self.failures[path as usize] = 0;
                job.left -= bytes;
                job.pieces += 1;
                if timed {
                    job.start[path as usize] = sent.start.map(Arc::new);
                }
                job.last[path as usize] = Some(sent.done);
                Step::Sent
            }
            Err(error) => {
                self.common.note(&error);
                self.failures[path as usize] += 1;
                job.path = Some(path); // Which may have been switched to: not to be tried again.
                let slot = self.slot(first_offset);
                Step::Failed(job.failed(slot, format!("{error}, on the {} path", path.name())))
            }
        }
    }

    /// The path of a job, by its first piece.
    fn choose(&self, ranges: u64, bytes: u64, all: u64) -> Path {
        let mut path = self.chooser.choose(self.kind, ranges, bytes, all);
        if self.failures[path as usize] >= TOO_OFTEN && self.has(path.other()) {
            path = path.other();
        }
        let counters = &self.common.counters;
        Counters::add(match path {
            Path::Direct => &counters.direct_jobs,
            Path::Staged => &counters.staged_jobs,
        });
        path
    }

    /// The way of a job's next piece. Where staged pieces starve, the next ones do not join them.
    fn path_now(&self, job: &Job) -> Path {
        let broken = self.failures[Path::Direct as usize] >= TOO_OFTEN;
        match (job.path, self.chooser.wanted) {
            _ if self.mover.chunk().is_none() => Path::Direct,
            // A job that is tried again keeps to one path.
            (Some(path), _) if job.retried.is_some() => path,
            (Some(Path::Direct), _) => Path::Direct,
            (path, CopyPath::Only(wanted)) => path.unwrap_or(wanted),
            (_, CopyPath::Auto) if self.mover.starves() && !broken => Path::Direct,
            (_, CopyPath::Auto) => Path::Staged,
        }
    }

    fn has(&self, path: Path) -> bool {
        path == Path::Direct || self.mover.chunk().is_some()
    }

    /// Prepares a failed job for the other path, or gives the error back.
    fn retry(&mut self, job: &mut Job, error: CopyError) -> Result<(), CopyError> {
        // What is in the queues of it must not touch memory any more, whatever happens next.
        self.drain();
        let CopyError::Failed { slot, reason, .. } = error else {
            return Err(error);
        };
        if let Some(before) = job.retried.take() {
            return Err(job.failed(slot, format!("{reason}; before that: {before}")));
        }
        let path = job.path.map(Path::other).filter(|path| self.has(*path));
        let Some(path) = path.filter(|_| !self.common.device.is_lost()) else {
            return Err(job.failed(slot, reason));
        };
        Counters::add(&self.common.counters.retries);
        self.common.notices.add(format!(
            "a copy failed ({reason}): it was tried again on the {} path",
            path.name()
        ));
        job.retried = Some(reason);
        job.restart(path);
        Ok(())
    }

    /// Waits until the queues are empty; where that fails nothing is certain any more.
    fn drain(&mut self) {
        if let Err(error) = self.mover.drain() {
            self.common.give_up(&error);
        }
    }

    /// Hands over the jobs whose last copy is done, and the cancelled ones of which none is under way.
    fn finish(&mut self, progress: &mut Progress) -> Result<(), DriverError> {
        let mut at = 0;
        while let Some(job) = self.jobs.get(at) {
            if !job.is_done()? {
                at += 1;
                continue;
            }
            let seconds = job.seconds()?;
            let job = self.jobs.remove(at).expect("it was there just now");
            self.common.after.lock().remove(&job.work.job);
            let outcome = job.outcome();
            progress.ended.push_back(job.ended(seconds, outcome));
        }
        Ok(())
    }

    /// Ends all jobs: the device as a whole has failed.
    fn fail_all(&mut self, error: &DriverError, progress: &mut Progress) {
        self.common.give_up(error);
        self.drain();
        for job in self.take_all() {
            let slot = job.work.geometry().slots.first().copied();
            let failure = job.failed(slot.unwrap_or(Slot::new(0)), error.to_string());
            progress.ended.push_back(job.ended(0.0, Err(failure)));
        }
    }

    fn take_all(&mut self) -> Vec<Job> {
        let mut after = self.common.after.lock();
        for job in &self.jobs {
            after.remove(&job.work.job);
        }
        self.jobs.drain(..).collect()
    }

    /// The slot that holds a byte of the region.
    fn slot(&self, offset: u64) -> Slot {
        // Exact: the region's slots have 32-bit numbers.
        Slot::new((offset / self.common.layout.slot_bytes()) as u32)
    }
}

impl Backend for CudaBackend {
    fn start(&mut self) {
        // By default the system may end each pause 50 us late.
        rustix::thread::set_current_timer_slack(NonZeroU64::new(TIMER_SLACK_NS)).ok();
        if let Err(error) = self.common.device.attach() {
            self.common.note(&error);
            let text = format!("a transfer thread cannot use the device: {error}");
            self.common.notices.add(text);
        }
    }

    fn depth(&self) -> usize {
        DEPTH
    }

    fn linger(&self) -> Duration {
        LINGER
    }

    fn takes_rushed(&self) -> bool {
        true
    }

    fn submit(&mut self, mut work: Work) -> Result<(), CopyError> {
        let slot = work.geometry().slots.first().copied();
        let refused = |reason: &str| CopyError::Failed {
            job: work.job,
            slot: slot.unwrap_or(Slot::new(0)),
            reason: reason.to_owned(),
        };
        if self.common.device.is_lost() {
            return Err(refused("the CUDA context is lost"));
        }
        // Without it the copies would not wait for the engine's compute.
        let Some(Ok(after)) = work.mark.take().map(|mark| mark.downcast::<Event>()) else {
            return Err(refused("no event came with it"));
        };
        self.submitted += 1;
        let (every, nothing) = match self.kind {
            JobKind::Store => (self.faults.fail_every_store, false),
            JobKind::Load => (self.faults.fail_every_load, self.faults.load_nothing),
        };
        let layout = &self.common.layout;
        if self.kind == JobKind::Store && layout.slot_bytes() < SHORT_SLOT {
            work.sort_by_slot(layout);
        }
        self.pinned
            .want(work.slots().map(|slot| slot.get().into()), false);
        let after = (!self.faults.skip_compute_wait).then(|| Arc::new(*after));
        let mut job = Job::new(work, after);
        job.fail = every != 0 && self.submitted.is_multiple_of(every);
        if nothing {
            job.left = 0;
        }
        // Behind the others that have had no turn, before those that have: so those that wait for compute
        // stay in the order of their submits.
        let fresh = self.jobs.iter().rposition(|job| job.pieces == 0);
        self.jobs.insert(fresh.map_or(0, |at| at + 1), job);
        Ok(())
    }

    fn poll(&mut self, progress: &mut Progress) -> Poll {
        match self.advance(progress) {
            Ok(poll) => poll,
            Err(error) => {
                self.fail_all(&error, progress);
                Poll::After(IDLE)
            }
        }
    }

    fn rush(&mut self, job: u64) {
        let at = self.jobs.iter().position(|held| held.work.job == job);
        if let Some(mut job) = at.and_then(|at| self.jobs.remove(at)) {
            job.rushed = true;
            self.pinned
                .want(job.work.slots().map(|slot| slot.get().into()), true);
            self.jobs.push_front(job);
        }
    }

    fn cancel(&mut self, job: u64) {
        if let Some(job) = self.jobs.iter_mut().find(|held| held.work.job == job) {
            job.cancelled = true;
        }
    }

    fn abandon(&mut self) -> Vec<Work> {
        self.drain();
        self.take_all().into_iter().map(|job| job.work).collect()
    }
}
