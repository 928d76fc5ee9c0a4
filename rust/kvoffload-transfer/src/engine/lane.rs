//! The thread of one direction.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvoffload_core::jobs::JobKind;

use super::Shared;
use super::job::{JobIds, Start};
use super::state::{State, lane};
use crate::backend::{Backend, Ended, Poll, Progress, Work};
use crate::error::CopyError;
use crate::region::Region;
use crate::verify::StoreNumber;

/// A thread that wakes by itself so soon is not woken for a job: the system call would cost the
/// caller more than all the rest of a submit.
const SOON: Duration = Duration::from_micros(25);
/// How often it looks for jobs by itself once there have been none for [`QUIET`]: that costs a few per
/// cent of a core.
const NOW_AND_THEN: Duration = Duration::from_micros(50);
const QUIET: Duration = Duration::from_millis(1);

/// Everything one thread works with.
pub(super) struct Lane {
    kind: JobKind,
    shared: Arc<Shared>,
    region: Arc<Region>,
    backend: Box<dyn Backend>,
    /// Jobs in the backend.
    held: usize,
    /// When the thread had something to do last, if it looks for jobs by itself since.
    active: Option<Instant>,
    /// When to ask the backend again; `None`: only after a wake-up.
    poll_at: Option<Instant>,
    /// What the backend reported and has not been dealt with.
    progress: Progress,
    /// Stores that have begun, and what they name, until the verifier knows of them.
    begun: Vec<(StoreNumber, Arc<JobIds>)>,
    /// The job that is being started or ended.
    current: Option<u64>,
    /// The last thing done was to place a job.
    placed: bool,
}

enum Next {
    Start(Start),
    End(Ended),
    Poll,
    /// Find out whom the next job in the inbox has to wait for.
    Place,
    /// Somebody waits for a job that the backend may hold.
    Rush(u64),
    /// Nobody wants a job any more that the backend may hold.
    Cancel(u64),
    /// Nobody wants the next job any more of those that had not started.
    Withdraw,
    /// Give up what the backend holds.
    GiveUp,
    /// Give up a job that has not started.
    Drop(u64),
    Exit,
}

/// The thread's body.
pub(super) fn run(lane: Lane) {
    // Declared before the lane is moved in, so that it runs when the lane and the memory it owns
    // are gone.
    let _exit = Exit(Arc::clone(&lane.shared));
    let mut lane = lane;
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| lane.backend.start())) {
        lane.recover(&*panic);
    }
    loop {
        match catch_unwind(AssertUnwindSafe(|| lane.turn())) {
            Ok(true) => {}
            Ok(false) => break,
            Err(panic) => lane.recover(&*panic),
        }
    }
}

/// Tells the engine that a thread is over, however it ended.
struct Exit(Arc<Shared>);

impl Drop for Exit {
    fn drop(&mut self) {
        self.0.state.lock().threads -= 1;
        self.0.ended.notify_all();
    }
}

impl Lane {
    pub(super) fn new(
        kind: JobKind,
        shared: Arc<Shared>,
        region: Arc<Region>,
        backend: Box<dyn Backend>,
    ) -> Self {
        Self {
            kind,
            shared,
            region,
            backend,
            held: 0,
            active: None,
            poll_at: None,
            progress: Progress::default(),
            begun: Vec::new(),
            current: None,
            placed: false,
        }
    }

    /// Does one thing; false at the end.
    fn turn(&mut self) -> bool {
        let next = self.next();
        self.active = Some(Instant::now());
        self.placed = matches!(next, Next::Place);
        match next {
            Next::Place => self.shared.place_next(),
            Next::Withdraw => self.shared.withdraw_next(),
            Next::Start(start) => {
                let (job, rushed) = (start.job, start.rushed);
                self.current = Some(job);
                match self.start(start) {
                    Ok(()) => {
                        self.held += 1;
                        self.current = None;
                        if rushed {
                            self.backend.rush(job);
                        }
                    }
                    Err(error) => {
                        self.note_begun();
                        self.shared.finish(job, 0, 0.0, Err(error));
                    }
                }
                self.current = None;
                self.poll_at = Some(Instant::now());
            }
            Next::Rush(job) => {
                self.backend.rush(job);
                self.poll_at = Some(Instant::now());
            }
            Next::Cancel(job) => {
                self.backend.cancel(job);
                self.poll_at = Some(Instant::now());
            }
            Next::End(ended) => {
                self.current = Some(ended.work.job);
                self.end(ended);
                self.current = None;
            }
            Next::Poll => {
                let before = self.progress.ended.len();
                let poll = self.backend.poll(&mut self.progress);
                self.held -= self.progress.ended.len() - before;
                if !self.progress.enqueued.is_empty() {
                    self.shared.enqueued(&self.progress.enqueued);
                    self.progress.enqueued.clear();
                }
                self.note_begun();
                self.poll_at = match poll {
                    Poll::Again => Some(Instant::now()),
                    Poll::After(pause) => Instant::now().checked_add(pause),
                };
            }
            Next::GiveUp => {
                for Work { job, .. } in self.backend.abandon() {
                    self.shared
                        .finish(job, 0, 0.0, Err(CopyError::Abandoned { job }));
                }
                self.held = 0;
            }
            Next::Drop(job) => {
                self.shared
                    .finish(job, 0, 0.0, Err(CopyError::Abandoned { job }));
            }
            Next::Exit => return false,
        }
        true
    }

    /// What to do next; waits until there is something.
    fn next(&mut self) -> Next {
        if let Some(ended) = self.progress.ended.pop_front() {
            return Next::End(ended);
        }
        let shared = Arc::clone(&self.shared);
        let mut state = shared.state.lock();
        loop {
            let abandoning = shared.abandoning();
            if abandoning && self.held > 0 {
                return Next::GiveUp;
            }
            // Before anything is started or copied.
            if let Some(job) = state.next_cancel(self.kind) {
                return Next::Cancel(job);
            }
            if !state.to_withdraw.is_empty() {
                return Next::Withdraw;
            }
            if let Some(job) = state.next_rush(self.kind) {
                return Next::Rush(job);
            }
            // Jobs that somebody waits for are not kept waiting by those that only take their time.
            let full = !abandoning && self.held >= self.backend.depth().max(1);
            if let Some(start) = self.may_start(full, &mut state) {
                return if abandoning {
                    Next::Drop(start.job)
                } else {
                    Next::Start(start)
                };
            }
            // By turns, so that neither a full inbox nor a busy backend holds the other up.
            let poll = self.held > 0 && self.poll_at.is_some_and(|at| at <= Instant::now());
            if state.has_mail() && !(poll && self.placed) {
                return Next::Place;
            }
            if poll {
                return Next::Poll;
            }
            if state.closing && !state.has_live(self.kind) {
                return Next::Exit;
            }
            let wake = &shared.wake[lane(self.kind)];
            let at = match self.held {
                0 => self.linger(),
                _ => self.poll_at,
            };
            match at {
                Some(at) => {
                    let soon = at.saturating_duration_since(Instant::now()) <= NOW_AND_THEN;
                    state.wakes_soon[lane(self.kind)] = soon;
                    wake.wait_until(&mut state, at);
                    state.wakes_soon[lane(self.kind)] = false;
                }
                None => wake.wait(&mut state),
            }
        }
    }

    /// The next job to start, if the backend takes one.
    fn may_start(&self, full: bool, state: &mut State) -> Option<Start> {
        if full && !self.backend.takes_rushed() {
            return None;
        }
        state.start(self.kind, full)
    }

    /// When to look for jobs again while there are none; `None`: when somebody says so.
    fn linger(&mut self) -> Option<Instant> {
        let now = Instant::now();
        let for_whom = self.backend.linger();
        let active = self.active?;
        let idle = now.saturating_duration_since(active);
        if idle >= for_whom {
            self.active = None;
            return None;
        }
        let pause = if idle < QUIET { SOON } else { NOW_AND_THEN };
        Some(now + pause)
    }

    /// Hands a job's copies to the backend.
    fn start(&mut self, start: Start) -> Result<(), CopyError> {
        let Start {
            job,
            order,
            ids,
            mark,
            ..
        } = start;
        let Self { shared, region, .. } = self;
        let (layout, verifier) = (&shared.layout, &shared.verifier);
        let geometry = ids.geometry();
        let store = match self.kind {
            JobKind::Store => {
                let number = StoreNumber::new(order);
                self.begun.push((number, Arc::clone(&ids)));
                Some(number)
            }
            JobKind::Load => {
                let (chunks, stop) = (geometry.chunks(layout), || shared.abandoning());
                // SAFETY: the job is live and reads the slots, so the fence holds every job back that
                // would write them.
                unsafe { verifier.check(layout, region, (job, order), chunks, stop) }?;
                None
            }
        };
        let mut work = Work::new(job, layout, ids, mark);
        work.store = store;
        self.backend.submit(work)
    }

    /// Notes what the stores write that have begun. It takes a while for long ones, so it is done after
    /// the backend's `poll` has their first copies under way (on a device), but before any of them is
    /// reported: until then the fence keeps other jobs away from their slots.
    fn note_begun(&mut self) {
        let Self { shared, begun, .. } = self;
        for (number, ids) in begun.drain(..) {
            let geometry = ids.geometry();
            let chunks = geometry.chunks(&shared.layout);
            shared.verifier.store_begins(number, chunks);
        }
    }

    /// Does what is left to do when the copies of a job are over, and reports it.
    fn end(&mut self, ended: Ended) {
        let Ended {
            work,
            seconds,
            outcome,
        } = ended;
        let Self { shared, region, .. } = self;
        let (layout, verifier) = (&shared.layout, &shared.verifier);
        if let Some(store) = work.store {
            let geometry = work.ids.geometry();
            let (chunks, stop) = (geometry.chunks(layout), || shared.abandoning());
            match outcome {
                // Once everything is given up, nothing is loaded any more.
                // SAFETY: the job is live and writes the slots, so the fence holds every other job on
                // them back; its own copies are over.
                Ok(()) => unsafe { verifier.stored(layout, region, store, chunks, stop) },
                Err(_) => verifier.failed(store, chunks),
            }
        }
        if outcome.is_ok() {
            self.backend.retire(&work);
        }
        shared.finish(work.job, work.bytes, seconds, outcome);
        shared.recycle(work.ids);
    }

    /// After a panic: the jobs it may have hit end with an error, once nothing copies for them.
    fn recover(&mut self, panic: &(dyn Any + Send)) {
        let message = panic_text(panic);
        self.shared.state.lock().stats.panics += 1;
        self.note_begun();
        let given_up = self.backend.abandon();
        self.held = 0;
        self.progress.enqueued.clear();
        for job in given_up
            .iter()
            .map(|work| work.job)
            .chain(self.current.take())
        {
            let message = message.clone();
            self.shared
                .finish(job, 0, 0.0, Err(CopyError::Panicked { job, message }));
        }
    }
}

/// The text of a panic, if it has one.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
        .to_owned()
}
