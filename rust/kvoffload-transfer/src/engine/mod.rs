//! Queues, threads and completions: takes jobs, orders them, has them copied, reports their ends.
//!
//! - The caller's thread checks a job's numbers, notes what it uses and puts it into a queue. It
//!   never waits for a copy.
//! - Stores and loads have a thread each, so that no load queues behind a store it has nothing to do
//!   with. Which job may start when is decided in `state.rs`.
//! - A thread works in short steps (the host backend copies 8 MiB at most in one), between which a
//!   shutdown is noticed. Counters and completions need only a lock that is never held during a copy.
//! - What one job's code panics with ends that job (and what its backend held) with an error; the
//!   thread goes on.
//! - A wait that times out puts the slots of its jobs into quarantine: no new job may name them until
//!   the copies are known to be over.

mod lane;
mod state;
mod stats;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use kvoffload_core::jobs::JobKind;
use kvoffload_core::layout::KvLayout;
use kvoffload_core::plan::Geometry;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::backend::Backend;
use crate::error::{CopyError, StartError, SubmitError, WaitTimeout};
use crate::region::Region;
use crate::verify::{Verifier, Verify};
use lane::Lane;
pub use state::Completion;
pub(crate) use state::JobIds;
use state::{State, Until, lane};
pub use stats::{KindStats, Stats};

/// How long a shutdown waits for its threads once they have been told to give up. A step of the host
/// backend takes milliseconds; only a driver that hangs needs more.
const GRACE: Duration = Duration::from_secs(5);

/// Settings of an engine.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Whether slots are hashed.
    pub verify: Verify,
    /// The most jobs that may be live or ended but not taken.
    pub max_jobs: usize,
    /// How long a drop waits for live jobs.
    pub shutdown_timeout: Duration,
    /// False lets loads read slots, or blocks of a slot, that nothing was stored to: for tests of
    /// copies alone.
    #[doc(hidden)]
    pub stored_only: bool,
    /// False lets conflicting jobs run side by side: a test shows with it that the fence is needed.
    #[doc(hidden)]
    pub fences: bool,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            verify: Verify::Off,
            max_jobs: 65_536,
            shutdown_timeout: Duration::from_secs(10),
            stored_only: true,
            fences: true,
        }
    }
}

/// What a shutdown left behind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShutdownReport {
    /// Jobs that were given up at the deadline, in ascending order. Each is reported with an error.
    pub abandoned: Vec<u64>,
    /// Threads that did not end in time. The memory they may touch stays mapped, and their jobs stay
    /// unreported, until they do.
    pub stuck_threads: usize,
}

/// Moves the bytes of jobs, in both directions, over one backend.
#[derive(Debug)]
pub struct Engine {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Working memory of the checks at a submit.
    scratch: Mutex<Vec<u64>>,
    shutdown_timeout: Duration,
}

/// What callers and threads share. The region is not in it: the threads own it, so that it is
/// unmapped when they have ended.
#[derive(Debug)]
struct Shared {
    layout: Arc<KvLayout>,
    verifier: Verifier,
    state: Mutex<State>,
    /// Wakes a direction's thread: it has something to start, or the engine is closing.
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
        let shared = Arc::new(Shared {
            verifier: Verifier::new(config.verify, config.stored_only, layout.num_slots()),
            layout,
            state: Mutex::new(State::new(config.max_jobs, config.fences)),
            wake: Default::default(),
            ended: Condvar::new(),
            abandoning: AtomicBool::new(false),
        });
        let engine = Self {
            shared,
            threads: Mutex::default(),
            scratch: Mutex::default(),
            shutdown_timeout: config.shutdown_timeout,
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

    /// Queues a job. Its end will be reported once, by [`Engine::take_finished`].
    ///
    /// Costs time proportional to the blocks and slots named, and never waits for a copy. Jobs that
    /// conflict on a slot or a block run in the order of their submits.
    ///
    /// # Errors
    /// See [`SubmitError`]; nothing has changed then.
    pub fn submit(
        &self,
        kind: JobKind,
        job: u64,
        geometry: Geometry<'_>,
    ) -> Result<(), SubmitError> {
        let checked = geometry.check_job(kind, &self.shared.layout, &mut self.scratch.lock());
        checked.map_err(|source| SubmitError::Geometry { job, source })?;
        let ids = JobIds::new(&geometry);
        let can_start = self.shared.state.lock().submit(job, kind, ids)?;
        if can_start {
            self.shared.wake[lane(kind)].notify_one();
        }
        Ok(())
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

    fn wait_until(&self, jobs: &[u64], timeout: Duration, until: Until) -> Result<(), WaitTimeout> {
        let started = Instant::now();
        let mut left = jobs.to_vec();
        left.sort_unstable();
        left.dedup();
        let mut state = self.shared.state.lock();
        if until == Until::Enqueued && state.any_awaited(&mut left, until) {
            state.rush(&left);
            self.shared.wake_workers(&state);
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

    /// Ends a job, and wakes whoever that concerns.
    fn finish(&self, job: u64, bytes: u64, seconds: f64, outcome: Result<(), CopyError>) {
        let mut state = self.state.lock();
        state.finish(job, bytes, seconds, outcome);
        self.wake_workers(&state);
        drop(state);
        self.ended.notify_all();
    }

    /// Notes that all copies of these jobs are in the device's queues.
    fn enqueued(&self, jobs: &[u64]) {
        self.state.lock().enqueued(jobs);
        self.ended.notify_all();
    }

    /// Wakes the directions that have something to do.
    fn wake_workers(&self, state: &State) {
        for kind in [JobKind::Store, JobKind::Load] {
            if state.has_work(kind) {
                self.wake[lane(kind)].notify_one();
            }
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
