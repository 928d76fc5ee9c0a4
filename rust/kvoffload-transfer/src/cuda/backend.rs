//! One direction of the CUDA backend: whose piece goes into the queues next, and which job is over.
//!
//! Jobs take turns, piece by piece, and a new job is next: a short load waits for what is in the
//! queues and one piece of every other load at most. A failed job is tried once more on the other
//! path.

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvoffload_core::jobs::JobKind;
use kvoffload_core::layout::KvLayout;
use kvoffload_core::plan::CopyRun;
use kvoffload_core::pool::Slot;
use parking_lot::Mutex;

use super::calibrate::Chooser;
use super::driver::{Device, DriverError, Event};
use super::mover::{Mover, Path, Piece};
use super::pinned::{PinnedRegion, Ready};
use crate::backend::{Backend, Ended, Poll, Progress, Work};
use crate::error::CopyError;
use crate::host::KeepAlive;
use crate::notices::Notices;

/// Bytes of a piece on the direct path.
const DIRECT_PIECE: u64 = 8 << 20;
/// Bytes of a job's first piece. Each of the next ones is twice as long, up to a chunk: so the copy
/// engine starts soon, while the rest is still being prepared.
const FIRST_PIECE: u64 = 1 << 20;
/// Jobs held at once.
const DEPTH: usize = 64;
/// Pieces that one `poll` puts into the queues at most.
const PIECES_A_POLL: usize = 32;
/// How long to leave the device alone while copies run: a piece takes 150 us on a fast bus, and the
/// queues hold several.
const PACE: Duration = Duration::from_micros(25);
/// How long to wait for memory that is being registered: some milliseconds a piece.
const REGISTERING: Duration = Duration::from_micros(500);
/// An engine that works submits jobs at every step, some ten milliseconds apart.
const LINGER: Duration = Duration::from_millis(20);
const TIMER_SLACK_NS: u64 = 1_000;
const IDLE: Duration = Duration::from_secs(3600);

/// What both directions and the callers share.
pub(super) struct Common {
    pub(super) device: Arc<Device>,
    pub(super) layout: Arc<KvLayout>,
    /// Address of each tensor's first block.
    pub(super) tensors: Vec<u64>,
    pub(super) marks: Marks,
    pub(super) counters: Counters,
    pub(super) notices: Arc<Notices>,
}

/// Events by job.
#[derive(Default)]
pub(super) struct Marks {
    /// What a job waits for on the device: from its submit until its start.
    pub(super) before: Mutex<HashMap<u64, Event>>,
    /// After the last copy of a job that is in the queues as a whole.
    pub(super) after: Mutex<HashMap<u64, Arc<Event>>>,
}

/// Counters that only the CUDA backend has.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) direct_jobs: AtomicU64,
    pub(super) staged_jobs: AtomicU64,
    pub(super) retries: AtomicU64,
    pub(super) pieces: AtomicU64,
    /// Times that a piece waited for memory to be registered.
    pub(super) registration_waits: AtomicU64,
}

impl Counters {
    fn add(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// Mistakes and failures to make on purpose: for tests only.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CudaFaults {
    /// Copies do not wait for the engine's compute.
    pub skip_compute_wait: bool,
    /// The two steps of the staged path do not wait for each other.
    pub skip_staging_wait: bool,
    /// A stream that should wait for a job's copies does not.
    pub skip_stream_wait: bool,
    /// Threads keep the stream capture mode they started with.
    pub keep_capture_mode: bool,
    /// Everything that is enqueued on this path fails.
    pub fail_path: Option<Path>,
    /// Every n-th store fails, on both paths; 0: none.
    pub fail_every_store: u64,
    /// Every n-th load fails, on both paths; 0: none.
    pub fail_every_load: u64,
    /// Loads copy nothing and report success: a control that must be noticed.
    pub load_nothing: bool,
}

/// One direction. Fields are dropped in order: the queues first, then the memory they use.
pub(super) struct CudaBackend {
    kind: JobKind,
    mover: Mover,
    jobs: VecDeque<Job>,
    piece: Piece,
    /// Where the piece's first range lies in the region.
    first_offset: u64,
    chooser: Arc<Chooser>,
    pinned: Arc<PinnedRegion>,
    common: Arc<Common>,
    faults: CudaFaults,
    submitted: u64,
    _keep_alive: Arc<Option<KeepAlive>>,
}

struct Job {
    work: Work,
    /// What must have happened on the device before its blocks are touched.
    after: Option<Arc<Event>>,
    /// Chosen when its first piece is known.
    path: Option<Path>,
    /// A range that was asked for and did not go into the piece.
    held: Option<CopyRun>,
    /// Bytes that are not in the queues yet.
    left: u64,
    /// Pieces that are in the queues.
    pieces: u32,
    start: Option<Event>,
    /// After the newest piece of this attempt.
    last: Option<Arc<Event>>,
    rushed: bool,
    /// The first attempt's error.
    retried: Option<String>,
    fail: bool,
}

impl Job {
    fn is_enqueued(&self) -> bool {
        self.left == 0
    }
}

enum Step {
    Sent,
    /// Not now: the queues are full, or memory is being registered.
    Blocked,
    Failed(CopyError),
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
            piece: Piece::default(),
            first_offset: 0,
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
        let (mut sent, mut passed) = (0, 0);
        while passed < self.jobs.len() && sent < PIECES_A_POLL {
            let Some(mut job) = self.jobs.pop_front() else {
                break;
            };
            let paced = self.mover.has_room() || job.rushed;
            if job.is_enqueued() || !paced || !self.mover.can_send() {
                passed += 1;
                self.jobs.push_back(job);
                continue;
            }
            match self.step(&mut job) {
                Step::Sent => (passed, sent) = (0, sent + 1),
                Step::Blocked => passed += 1,
                Step::Failed(error) => {
                    passed = 0;
                    if let Err(error) = self.retry(&mut job, error) {
                        progress.ended.push_back(ended(job, 0.0, Err(error)));
                        continue;
                    }
                }
            }
            if let (true, Some(last)) = (job.is_enqueued(), &job.last) {
                let mut after = self.common.marks.after.lock();
                after.insert(job.work.job, Arc::clone(last));
                progress.enqueued.push(job.work.job);
            }
            self.jobs.push_back(job);
        }
        self.finish(progress)?;
        Ok(if sent == PIECES_A_POLL {
            Poll::Again
        } else if !self.mover.is_idle() {
            Poll::After(PACE)
        } else if !self.jobs.is_empty() {
            Poll::After(REGISTERING)
        } else {
            Poll::After(IDLE)
        })
    }

    /// Puts the job's next piece into the queues.
    fn step(&mut self, job: &mut Job) -> Step {
        let longest = match job.path {
            Some(Path::Direct) => DIRECT_PIECE,
            _ => self.mover.chunk().unwrap_or(DIRECT_PIECE),
        };
        let chunk = longest.min(FIRST_PIECE << job.pieces.min(16));
        let id = job.work.job;
        let failed = |slot, reason| {
            Step::Failed(CopyError::Failed {
                job: id,
                slot,
                reason,
            })
        };
        if let Err(offset) = self.fill(job, chunk) {
            let reason = "its host memory could not be had".to_owned();
            return failed(self.slot(offset), reason);
        }
        if self.piece.is_empty() {
            Counters::add(&self.common.counters.registration_waits);
            return Step::Blocked;
        }
        let bytes = self.piece.bytes();
        let ranges = self.piece.ranges.len() as u64;
        let path = *job.path.get_or_insert_with(|| {
            let path = self.chooser.choose(self.kind, ranges, bytes, job.left);
            let counters = &self.common.counters;
            Counters::add(match path {
                Path::Direct => &counters.direct_jobs,
                Path::Staged => &counters.staged_jobs,
            });
            path
        });
        // Only the first piece has to wait: the others come after it on the same stream.
        let after = match job.last {
            None => job.after.as_deref(),
            Some(_) => None,
        };
        let (timed, pageable) = (job.start.is_none(), self.pinned.is_pageable());
        let sent = if job.fail {
            Err(injected(path))
        } else {
            // SAFETY: the ranges lie in the tensors, which the backend keeps alive and whose blocks the
            // job may use, and in the region, whose pieces are ready and stay so; the fence keeps
            // conflicting jobs away until this one has ended, and `after` is what the engine had
            // enqueued on those blocks when it submitted the job.
            unsafe { self.mover.send(path, &self.piece, after, timed, pageable) }
        };
        match sent {
            Ok(sent) => {
                Counters::add(&self.common.counters.pieces);
                job.left -= bytes;
                job.pieces += 1;
                job.start = job.start.take().or(sent.start);
                job.last = Some(sent.done);
                Step::Sent
            }
            Err(error) => {
                self.note(&error);
                let slot = self.slot(self.first_offset);
                failed(slot, format!("{error}, on the {} path", path.name()))
            }
        }
    }

    /// Collects a piece of at most `chunk` bytes; an error is the offset of memory that is not there.
    fn fill(&mut self, job: &mut Job, chunk: u64) -> Result<(), u64> {
        self.piece.clear();
        let piece_bytes = self.common.layout.piece_bytes();
        let (mut end, mut ready) = (u64::MAX, u64::MAX);
        loop {
            let room = self.piece.room(chunk);
            if room == 0 {
                return Ok(());
            }
            let Some(run) = job
                .held
                .take()
                .or_else(|| job.work.next_run(&self.common.layout, room))
            else {
                return Ok(());
            };
            let at = run.region_offset;
            if run.bytes > room {
                job.held = Some(run);
                return Ok(());
            }
            // Slots are long: the next range mostly lies in the same piece.
            if at / piece_bytes != ready {
                match self.pinned.ready(at) {
                    Ready::Yes => ready = at / piece_bytes,
                    Ready::Later => {
                        job.held = Some(run);
                        return Ok(());
                    }
                    Ready::Never => return Err(at),
                }
            }
            if self.piece.is_empty() {
                self.first_offset = at;
            }
            let device = self.common.tensors[run.tensor as usize] + run.device_offset;
            // Pieces of the region are not copied across: they may lie in different memory.
            let follows = at == end && !at.is_multiple_of(piece_bytes);
            let host = self.pinned.address(at);
            self.piece.push(device, host, run.bytes, follows);
            end = at + run.bytes;
        }
    }

    /// Prepares a failed job for the other path, or gives the error back.
    fn retry(&mut self, job: &mut Job, error: CopyError) -> Result<(), CopyError> {
        // What is in the queues of it must not touch memory any more, whatever happens next.
        if let Err(error) = self.mover.drain() {
            self.note(&error);
        }
        let error = match (error, job.retried.take()) {
            (CopyError::Failed { job, slot, reason }, Some(before)) => {
                let reason = format!("{reason}; before that: {before}");
                return Err(CopyError::Failed { job, slot, reason });
            }
            (error, _) => error,
        };
        let Some(path) = job.path.map(Path::other) else {
            return Err(error);
        };
        if self.common.device.is_lost() || (path == Path::Staged && self.mover.chunk().is_none()) {
            return Err(error);
        }
        Counters::add(&self.common.counters.retries);
        let notice = format!("{error}: trying the {} path", path.name());
        self.common.notices.add(notice);
        if let CopyError::Failed { reason, .. } = error {
            job.retried = Some(reason);
        }
        job.work.restart();
        job.path = Some(path);
        (job.left, job.pieces) = (job.work.bytes, 0);
        (job.held, job.start, job.last) = (None, None, None);
        Ok(())
    }

    /// Hands over the jobs whose last copy is done.
    fn finish(&mut self, progress: &mut Progress) -> Result<(), DriverError> {
        let mut at = 0;
        while let Some(job) = self.jobs.get(at) {
            let done = match &job.last {
                Some(last) => job.is_enqueued() && last.is_done()?,
                None => job.is_enqueued(),
            };
            if !done {
                at += 1;
                continue;
            }
            let seconds = match (&job.start, &job.last) {
                (Some(start), Some(last)) => start.seconds_until(last)?,
                _ => 0.0,
            };
            let job = self.jobs.remove(at).expect("it was there just now");
            self.common.marks.after.lock().remove(&job.work.job);
            progress.ended.push_back(ended(job, seconds, Ok(())));
        }
        Ok(())
    }

    /// Ends all jobs: the device as a whole has failed.
    fn fail_all(&mut self, error: &DriverError, progress: &mut Progress) {
        self.note(error);
        if let Err(error) = self.mover.drain() {
            self.note(&error);
        }
        for job in self.take_all() {
            let slot = job.work.geometry().slots.first().copied();
            let failure = CopyError::Failed {
                job: job.work.job,
                slot: slot.unwrap_or(Slot::new(0)),
                reason: error.to_string(),
            };
            progress.ended.push_back(ended(job, 0.0, Err(failure)));
        }
    }

    fn take_all(&mut self) -> Vec<Job> {
        let mut after = self.common.marks.after.lock();
        for job in &self.jobs {
            after.remove(&job.work.job);
        }
        self.jobs.drain(..).collect()
    }

    /// Says once that the context is lost.
    fn note(&self, error: &DriverError) {
        if self.common.device.note(error) {
            self.common.notices.add(format!(
                "the CUDA context is lost: {error}. This worker takes no more jobs: restart the engine"
            ));
        }
    }

    /// The slot that holds a byte of the region.
    fn slot(&self, offset: u64) -> Slot {
        // Exact: the region's slots have 32-bit numbers.
        Slot::new((offset / self.common.layout.slot_bytes()) as u32)
    }
}

fn ended(job: Job, seconds: f64, outcome: Result<(), CopyError>) -> Ended {
    Ended {
        work: job.work,
        seconds,
        outcome,
    }
}

/// The error of a copy that a test wants to fail.
fn injected(path: Path) -> DriverError {
    DriverError {
        call: "an injected fault",
        code: 1,
        name: "CUDA_ERROR_INVALID_VALUE".to_owned(),
        text: path.name().to_owned(),
    }
}

impl Backend for CudaBackend {
    fn start(&mut self) {
        // By default the system may end each pause 50 us late.
        rustix::thread::set_current_timer_slack(NonZeroU64::new(TIMER_SLACK_NS)).ok();
        if let Err(error) = self.common.device.attach() {
            self.note(&error);
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

    fn submit(&mut self, work: Work) -> Result<(), CopyError> {
        let after = self.common.marks.before.lock().remove(&work.job);
        self.submitted += 1;
        let (every, nothing) = match self.kind {
            JobKind::Store => (self.faults.fail_every_store, false),
            JobKind::Load => (self.faults.fail_every_load, self.faults.load_nothing),
        };
        let job = Job {
            after: after
                .filter(|_| !self.faults.skip_compute_wait)
                .map(Arc::new),
            path: None,
            held: None,
            left: if nothing { 0 } else { work.bytes },
            pieces: 0,
            start: None,
            last: None,
            rushed: false,
            retried: None,
            fail: every != 0 && self.submitted.is_multiple_of(every),
            work,
        };
        self.jobs.push_front(job);
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
            self.jobs.push_front(job);
        }
    }

    fn abandon(&mut self) -> Vec<Work> {
        if let Err(error) = self.mover.drain() {
            self.note(&error);
        }
        self.take_all().into_iter().map(|job| job.work).collect()
    }
}
