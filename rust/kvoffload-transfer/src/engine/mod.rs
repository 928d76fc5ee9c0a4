//! Queues, threads and completions: takes jobs, orders them, has them copied, reports their ends.
//!
//! - The caller's thread copies a job's numbers, checks them and puts the job into an inbox. It never
//!   waits for a copy.
//! - Stores and loads have a thread each, so that no load queues behind a store it has nothing to do
//!   with. Whichever thread is free first finds out whom the jobs in the inbox have to wait for
//!   (`order.rs`); which job may start when is decided in `state.rs`.
//! - A thread works in short steps (the host backend copies 8 MiB at most in one), between which a
//!   shutdown is noticed. Counters and completions need only a lock that is never held during a copy.
//! - What one job's code panics with ends that job (and what its backend held) with an error; the
//!   thread goes on.
//! - A job that is cancelled ends at once if it has not started (`cancel.rs`); if it has, its backend stops
//!   before its next copy.
//! - A wait that times out puts the slots of its jobs into quarantine: no new job may name them until
//!   the copies are known to be over.

mod cancel;
mod config;
mod job;
mod lane;
mod order;
mod state;
mod stats;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use kvoffload_core::jobs::JobKind;
use kvoffload_core::layout::KvLayout;
use kvoffload_core::plan::{CheckScratch, Geometry};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::backend::{Backend, Mark};
use crate::error::{CopyError, StartError, SubmitError, WaitTimeout};
use crate::region::Region;
use crate::verify::{Verifier, Verify};
pub use config::{EngineConfig, ShutdownReport};
use job::Until;
pub use job::{Completion, JobIds, NewJob};
use lane::Lane;
pub(crate) use lane::panic_text;
use order::Order;
use state::{State, lane};
pub use stats::{KindStats, Stats};

/// How long a shutdown waits for its threads once they have been told to give up. A step of the host
/// backend takes milliseconds; only a driver that hangs needs more.
const GRACE: Duration = Duration::from_secs(5);

/// Of how many jobs that are over the memory is kept.
const SPARE_JOBS: usize = 256;

/// Moves the bytes of jobs, in both directions, over one backend.
#[derive(Debug)]
pub struct Engine {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Working memory of the checks at a submit.
    scratch: Mutex<CheckScratch>,
    shutdown_timeout: Duration,
    region_address: usize,
    /// What others map to join the region, until it is taken.
    region_file: Mutex<Option<OwnedFd>>,
    /// The region is another process's.
    reads_only: bool,
}

/// What callers and threads share. The region is not in it: the threads own it, so that it is
/// unmapped when they have ended.
#[derive(Debug)]
struct Shared {
    layout: Arc<KvLayout>,
    verifier: Verifier,
    /// Taken by the threads only, and never while they hold `state`.
    order: Mutex<Order>,
    state: Mutex<State>,
    /// Memory of jobs that are over.
    spare: Mutex<Vec<NewJob>>,
    /// Wakes a direction's thread: a job was submitted, it has something to start, or the engine is closing.
    wake: [Condvar; 2],
    /// A job or a thread has ended, or a job's copies are all enqueued.
    ended: Condvar,
    /// Everything live is to be given up. Set while `state` is locked.
    abandoning: AtomicBool,
}

impl Engine {
    /// Starts the two threads. `backends` copy stores and loads, in this order; they may keep clones of
    /// the layout.
    ///
    /// # Errors
    /// A region that is not the layout's, a limit of 0, or a thread that the system refused.
    pub fn start(
        layout: Arc<KvLayout>,
        region: &Arc<Region>,
        backends: [Box<dyn Backend>; 2],
        config: &EngineConfig,
    ) -> Result<Self, StartError> {
        if config.max_jobs == 0 {
            return Err(StartError::Zero { field: "max_jobs" });
        }
        if (region.num_slots(), region.slot_bytes()) != (layout.num_slots(), layout.slot_bytes()) {
            let reason = "it has other slots than the layout: make both from the same numbers";
            return Err(StartError::Setting {
                field: "region",
                reason,
            });
        }
        let reads_only = region.is_joined();
        // Of a region that others store to it is not known what the slots hold.
        let (verify, stored_only) = match reads_only {
            true => (Verify::Off, false),
            false => (config.verify, config.stored_only),
        };
        let shared = Arc::new(Shared {
            verifier: Verifier::new(verify, stored_only, layout.num_slots()),
            order: Mutex::new(Order::new(&layout, config.fences)),
            state: Mutex::new(State::new(config.max_jobs)),
            spare: Mutex::default(),
            wake: Default::default(),
            ended: Condvar::new(),
            abandoning: AtomicBool::new(false),
            layout,
        });
        let scratch = Mutex::new(CheckScratch::new(&shared.layout));
        let engine = Self {
            shared,
            threads: Mutex::default(),
            scratch,
            shutdown_timeout: config.shutdown_timeout,
            region_address: region.base_address(),
            region_file: Mutex::new(region.take_file()),
            reads_only,
        };
        let kinds = [
            (JobKind::Store, "kvoffload-store"),
            (JobKind::Load, "kvoffload-load"),
        ];
        for ((kind, name), backend) in kinds.into_iter().zip(backends) {
            let lane = Lane::new(
                kind,
                Arc::clone(&engine.shared),
                Arc::clone(region),
                backend,
            );
            engine.shared.state.lock().threads += 1;
            match thread::Builder::new()
                .name(name.to_owned())
                .spawn(|| lane::run(lane))
            {
                Ok(handle) => engine.threads.lock().push(handle),
                // Dropping the engine ends the thread that was started before.
                Err(source) => {
                    engine.shared.state.lock().threads -= 1;
                    return Err(StartError::System {
                        what: "start a thread",
                        source,
                    });
                }
            }
        }
        Ok(engine)
    }

    /// A job to be filled and submitted. What it holds by then is an earlier job's.
    #[must_use]
    pub fn new_job(&self) -> NewJob {
        self.shared.spare.lock().pop().unwrap_or_default()
    }

    /// Queues a job. Its end will be reported once, by [`Engine::take_finished`].
    ///
    /// Copies the numbers of blocks and slots and checks them, which costs a few nanoseconds for each,
    /// and never waits for a copy. Jobs that conflict on a slot or a block run in the order of their
    /// submits.
    ///
    /// # Errors
    /// See [`SubmitError`]; nothing has changed then.
    pub fn submit(
        &self,
        kind: JobKind,
        job: u64,
        geometry: Geometry<'_>,
    ) -> Result<(), SubmitError> {
        let mut new = self.new_job();
        new.ids().set(&geometry);
        self.submit_after(kind, job, new, None)
    }

    /// As [`Engine::submit`], without a copy of the numbers, and with something for the backend to know
    /// about this moment.
    ///
    /// # Errors
    /// See [`SubmitError`]; nothing has changed then.
    pub fn submit_after(
        &self,
        kind: JobKind,
        job: u64,
        new: NewJob,
        mark: Option<Mark>,
    ) -> Result<(), SubmitError> {
        let shared = &*self.shared;
        let checked = self.check(kind, job, &new.0);
        let mut state = shared.state.lock();
        let admitted = checked.and_then(|()| state.admit(job, &new.0.slots));
        if admitted.is_ok() {
            // No clone is kept here: the job may be over, and its memory free, before this returns.
            state.submit(job, kind, new.0, mark);
            let wakes_soon = state.wakes_soon[lane(kind)];
            drop(state);
            if !wakes_soon {
                shared.wake[lane(kind)].notify_one();
            }
        } else {
            drop(state);
            shared.recycle(new.0);
        }
        admitted
    }

    /// Whether a job is a good one, whatever others there are.
    fn check(&self, kind: JobKind, job: u64, ids: &JobIds) -> Result<(), SubmitError> {
        if self.reads_only && kind == JobKind::Store {
            return Err(SubmitError::ReadOnly { job });
        }
        let mut scratch = self.scratch.lock();
        let checked = ids
            .geometry()
            .check_job(kind, &self.shared.layout, &mut scratch);
        checked.map_err(|source| SubmitError::Geometry { job, source })
    }

    /// The ends of all jobs that have ended since the last call, oldest first.
    #[must_use]
    pub fn take_finished(&self) -> Vec<Completion> {
        self.shared.state.lock().take_finished()
    }

    /// As [`Engine::take_finished`], for callers that report one error at a time.
    ///
    /// # Errors
    /// The oldest failed job, if there is one; all other ends stay for the next call.
    pub fn take_finished_or_failure(&self) -> Result<Vec<Completion>, Completion> {
        let mut state = self.shared.state.lock();
        match state.take_failure() {
            Some(failure) => Err(failure),
            None => Ok(state.take_finished()),
        }
    }

    /// Blocks until none of these jobs is live. Ids that are unknown, or whose job has ended, are
    /// ignored; an end is still reported by [`Engine::take_finished`], failed or not.
    ///
    /// # Errors
    /// Some have not ended in time. They are not done: their ends will be reported when they come,
    /// and until then no new job may name their slots.
    pub fn wait(&self, jobs: &[u64], timeout: Duration) -> Result<(), WaitTimeout> {
        self.wait_until(jobs, timeout, Until::Ended)
    }

    /// As [`Engine::wait`], but a job need not be over if all its copies are in the device's queues:
    /// whatever is put into those queues later finds them done. Until then these jobs, and those that
    /// hold them back, go before others, and their backends do not spread them over time.
    ///
    /// # Errors
    /// Some have got to neither in time; as with [`Engine::wait`].
    pub fn wait_enqueued(&self, jobs: &[u64], timeout: Duration) -> Result<(), WaitTimeout> {
        self.wait_until(jobs, timeout, Until::Enqueued)
    }

    /// Blocks until no job is live of those that are now.
    ///
    /// # Errors
    /// As with [`Engine::wait`].
    pub fn drain(&self, timeout: Duration) -> Result<(), WaitTimeout> {
        let live = self.shared.state.lock().live_jobs();
        self.wait(&live, timeout)
    }

    fn wait_until(&self, jobs: &[u64], timeout: Duration, until: Until) -> Result<(), WaitTimeout> {
        let started = Instant::now();
        let mut left = jobs.to_vec();
        left.sort_unstable();
        left.dedup();
        let mut state = self.shared.state.lock();
        if until == Until::Enqueued && state.any_awaited(&mut left, until) {
            state.rush(&left);
            self.shared.unlock_and_wake(state);
            state = self.shared.state.lock();
        }
        while state.any_awaited(&mut left, until) {
            if self
                .shared
                .wait_for_end(&mut state, started.checked_add(timeout))
            {
                continue;
            }
            left.retain(|&job| state.is_awaited(job, until));
            if left.is_empty() {
                break;
            }
            state.quarantine(&left);
            return Err(WaitTimeout {
                jobs: left,
                waited: started.elapsed(),
            });
        }
        Ok(())
    }

    /// Ends the engine: takes nothing new, gives live jobs (queued ones too) `timeout` to end, gives
    /// up what is left, ends the threads, and with them unmaps the region. Ends can still be taken
    /// afterwards. May be called again, also at the same time; the answer is the same, unless a stuck
    /// thread has ended since.
    pub fn shutdown(&self, timeout: Duration) -> ShutdownReport {
        let deadline = Instant::now().checked_add(timeout);
        let shared = &*self.shared;
        let mut state = shared.state.lock();
        state.closing = true;
        shared.wake_all();
        while state.num_live() > 0 && state.threads > 0 {
            if !shared.wait_for_end(&mut state, deadline) {
                break;
            }
        }
        if state.num_live() > 0 {
            shared.abandoning.store(true, Ordering::Relaxed);
            shared.wake_all();
        }
        let grace = Instant::now().checked_add(GRACE);
        while state.threads > 0 && shared.wait_for_end(&mut state, grace) {}
        if state.threads == 0 {
            // Jobs are left over only if a thread died of a panic that nobody could catch.
            for job in state.live_jobs() {
                state.finish(job, 0, 0.0, Err(CopyError::Abandoned { job }));
            }
            shared.ended.notify_all();
        }
        state.abandoned.sort_unstable();
        let report = ShutdownReport {
            abandoned: state.abandoned.clone(),
            stuck_threads: state.threads,
        };
        drop(state);
        if report.stuck_threads == 0 {
            for thread in std::mem::take(&mut *self.threads.lock()) {
                // A panic that ended it was printed when it happened, and its jobs were reported.
                thread.join().ok();
            }
        }
        report
    }

    /// What other processes map to join the region; given out once, and only by an engine whose region
    /// is [`Backing::Shared`](crate::region::Backing).
    #[must_use]
    pub fn take_region_file(&self) -> Option<OwnedFd> {
        self.region_file.lock().take()
    }

    /// Address of the region's first byte, for tests and debuggers; unmapped after a shutdown.
    #[must_use]
    pub fn region_address(&self) -> usize {
        self.region_address
    }

    /// A snapshot of the counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let (verify_checks, verify_failures) = self.shared.verifier.counts();
        Stats {
            verify_checks,
            verify_failures,
            ..self.shared.state.lock().stats
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Whoever has shut it down has waited already.
        if !self.shared.state.lock().closing {
            self.shutdown(self.shutdown_timeout);
        }
    }
}

impl Shared {
    /// Blocks until a job or thread has ended; false if the deadline passes first.
    fn wait_for_end(&self, state: &mut MutexGuard<'_, State>, deadline: Option<Instant>) -> bool {
        match deadline {
            Some(deadline) => !self.ended.wait_until(state, deadline).timed_out(),
            None => {
                self.ended.wait(state);
                true
            }
        }
    }

    /// Gives the oldest job in the inbox its place among those who use slots and blocks, and wakes
    /// the direction that can start it.
    fn place_next(&self) {
        let mut order = self.order.lock();
        // Jobs are taken out under the lock of `order`, so they get their places in order.
        let Some((job, kind, ids)) = self.state.lock().next_mail() else {
            return;
        };
        let (ticket, blockers) = order.enter(job, kind, &self.layout, &ids);
        // Whoever is in the way has not ended yet: that takes the lock of `order`.
        let mut state = self.state.lock();
        state.placed(job, ticket, blockers);
        self.unlock_and_wake(state);
    }

    /// Ends a job, and wakes whoever that concerns.
    fn finish(&self, job: u64, bytes: u64, seconds: f64, outcome: Result<(), CopyError>) {
        let mut order = self.order.lock();
        let mut state = self.state.lock();
        let place = state.place(job);
        state.finish(job, bytes, seconds, outcome);
        self.unlock_and_wake(state);
        self.ended.notify_all();
        // Nobody gets a place meanwhile, so nobody is told to wait for a job that is over.
        if let Some((ticket, ids)) = place {
            order.leave(ticket, &self.layout, &ids);
        }
    }

    /// Keeps a job's memory for another one, if nobody has it any more.
    fn recycle(&self, mut ids: Arc<JobIds>) {
        if Arc::get_mut(&mut ids).is_some_and(|ids| !ids.is_large()) {
            let mut spare = self.spare.lock();
            if spare.len() < SPARE_JOBS {
                spare.push(NewJob(ids));
            }
        }
    }

    /// Notes that all copies of these jobs are in the device's queues.
    fn enqueued(&self, jobs: &[u64]) {
        self.state.lock().enqueued(jobs);
        self.ended.notify_all();
    }

    /// Wakes the directions that have something to do, once the lock is free: a thread that wakes
    /// needs it, and callers should not wait for the system call.
    fn unlock_and_wake(&self, state: MutexGuard<'_, State>) {
        let kinds = [JobKind::Store, JobKind::Load];
        let work = kinds.map(|kind| state.has_work(kind));
        drop(state);
        for (kind, _) in kinds.into_iter().zip(work).filter(|(_, work)| *work) {
            self.wake[lane(kind)].notify_one();
        }
    }

    fn wake_all(&self) {
        for wake in &self.wake {
            wake.notify_one();
        }
    }

    fn abandoning(&self) -> bool {
        self.abandoning.load(Ordering::Relaxed)
    }
}
