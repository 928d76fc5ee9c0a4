//! Waiting until a job's copies are in the device's queues, which is sooner than their end.

mod common;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use common::{Job, LONG, SHORT, Shape, copies_only};
use kvoffload_core::layout::KvLayout;
use kvoffload_core::pool::Slot;
use kvoffload_transfer::backend::{Backend, Ended, Poll, Progress, Work};
use kvoffload_transfer::{CopyError, Engine, JobKind, Region, SubmitError};
use parking_lot::{Condvar, Mutex};

/// What a test and its device share.
#[derive(Default)]
struct Device {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Threads on which a backend was started.
    starts: Vec<thread::ThreadId>,
    /// Jobs in the order in which backends got them.
    submitted: Vec<u64>,
    rushed: Vec<u64>,
    /// Jobs may end.
    ends: bool,
}

/// A direction that puts a job into its queue only when it is rushed.
struct Lazy {
    device: Arc<Device>,
    depth: usize,
    takes_rushed: bool,
    waiting: Vec<Work>,
    enqueued: Vec<Work>,
    report: Vec<u64>,
    cancelled: Vec<Work>,
}

impl Backend for Lazy {
    fn start(&mut self) {
        let thread = thread::current().id();
        self.device.state.lock().starts.push(thread);
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn submit(&mut self, work: Work) -> Result<(), CopyError> {
        let mut state = self.device.state.lock();
        assert!(state.starts.contains(&thread::current().id()));
        state.submitted.push(work.job);
        self.device.changed.notify_all();
        self.waiting.push(work);
        Ok(())
    }

    fn poll(&mut self, progress: &mut Progress) -> Poll {
        progress.enqueued.append(&mut self.report);
        let cancelled = self.cancelled.drain(..);
        progress.ended.extend(cancelled.map(|work| Ended {
            outcome: Err(CopyError::Cancelled { job: work.job }),
            seconds: 0.0,
            work,
        }));
        if self.device.state.lock().ends {
            let works = self.waiting.drain(..).chain(self.enqueued.drain(..));
            progress.ended.extend(works.map(|work| Ended {
                work,
                seconds: 0.0,
                outcome: Ok(()),
            }));
        }
        Poll::After(Duration::from_millis(1))
    }

    fn takes_rushed(&self) -> bool {
        self.takes_rushed
    }

    fn rush(&mut self, job: u64) {
        self.device.state.lock().rushed.push(job);
        let at = self.waiting.iter().position(|work| work.job == job);
        self.enqueued
            .push(self.waiting.remove(at.expect("it is here")));
        self.report.push(job);
    }

    fn cancel(&mut self, job: u64) {
        let cancelled = self.waiting.extract_if(.., |work| work.job == job);
        self.cancelled.extend(cancelled);
    }

    fn abandon(&mut self) -> Vec<Work> {
        let held = [&mut self.waiting, &mut self.enqueued, &mut self.cancelled];
        held.into_iter().flat_map(std::mem::take).collect()
    }
}

struct Rig {
    device: Arc<Device>,
    engine: Engine,
}

impl Rig {
    fn new(depth: usize) -> Self {
        Self::with(depth, false)
    }

    fn with(depth: usize, takes_rushed: bool) -> Self {
        let shape = Shape::simple(8, 64, 8);
        let slot_bytes = shape.slot_bytes();
        let (tensors, groups) = (shape.tensors, shape.groups);
        let pieces = Region::slots_per_piece(slot_bytes);
        let layout = KvLayout::new(tensors, groups, 1, 8, slot_bytes, pieces).unwrap();
        let device = Arc::new(Device::default());
        let backends = [(); 2].map(|()| -> Box<dyn Backend> {
            Box::new(Lazy {
                device: Arc::clone(&device),
                depth,
                takes_rushed,
                waiting: Vec::new(),
                enqueued: Vec::new(),
                report: Vec::new(),
                cancelled: Vec::new(),
            })
        });
        let region = Arc::new(Region::new(8, slot_bytes).unwrap());
        let engine = Engine::start(Arc::new(layout), &region, backends, &copies_only()).unwrap();
        Self { device, engine }
    }

    fn submit(&self, kind: JobKind, job: u64, block: u32, slot: u32) -> Result<(), SubmitError> {
        let what = Job::simple(&[block], &[slot]);
        self.engine.submit(kind, job, what.geometry())
    }

    fn store(&self, job: u64, block: u32, slot: u32) {
        self.submit(JobKind::Store, job, block, slot).unwrap();
    }

    fn wait_submitted(&self, job: u64) {
        let mut state = self.device.state.lock();
        while !state.submitted.contains(&job) {
            assert!(!self.device.changed.wait_for(&mut state, LONG).timed_out());
        }
    }

    fn rushed(&self) -> Vec<u64> {
        self.device.state.lock().rushed.clone()
    }

    fn end_all(&self, jobs: &[u64]) {
        self.device.state.lock().ends = true;
        self.engine.wait(jobs, LONG).unwrap();
    }
}

#[test]
fn a_wait_for_the_queues_hurries_a_job_the_backend_has() {
    let rig = Rig::new(4);
    rig.store(1, 0, 0);
    rig.store(2, 1, 1);
    rig.wait_submitted(2);
    assert_eq!(rig.rushed(), []);
    rig.engine.wait_enqueued(&[1, 99], LONG).unwrap();
    rig.engine.wait_enqueued(&[1], Duration::ZERO).unwrap();
    assert_eq!(rig.rushed(), [1], "nobody waits for job 2");
    // It is not over.
    assert_eq!(rig.engine.stats().stores.live, 2);
    assert_eq!(rig.engine.wait(&[1], Duration::ZERO).unwrap_err().jobs, [1]);
    rig.end_all(&[1, 2]);
    rig.engine.wait_enqueued(&[1, 2], Duration::ZERO).unwrap();
    assert_eq!(rig.engine.take_finished().len(), 2);
    let starts = || rig.device.state.lock().starts.clone();
    // The direction without a job may start later.
    let deadline = Instant::now() + LONG;
    while starts().len() < 2 && Instant::now() < deadline {
        thread::yield_now();
    }
    let mut starts = starts();
    starts.dedup();
    assert_eq!(starts.len(), 2, "each direction once, on its own thread");
}

/// Nobody waits for a backend full of jobs that have their time, such as those behind a long step.
#[test]
fn a_job_that_is_waited_for_need_not_fit_into_the_depth() {
    let rig = Rig::with(1, true);
    rig.store(1, 0, 0);
    rig.wait_submitted(1);
    rig.store(2, 1, 1);
    rig.store(3, 2, 2);
    rig.engine.wait_enqueued(&[3], LONG).unwrap();
    assert_eq!(rig.rushed(), [3]);
    assert_eq!(rig.engine.stats().stores.live, 3, "none has ended");
    rig.end_all(&[1, 2, 3]);
}

#[test]
fn a_queued_job_that_is_waited_for_goes_first() {
    let rig = Rig::new(1);
    rig.store(1, 0, 0);
    rig.wait_submitted(1);
    for job in 2..6 {
        rig.store(job, job as u32, job as u32);
    }
    thread::scope(|scope| {
        let waiter = scope.spawn(|| rig.engine.wait_enqueued(&[5], LONG));
        // Nothing can start while the backend is full; job 1 itself is not hurried.
        thread::sleep(SHORT);
        assert_eq!(rig.rushed(), []);
        rig.device.state.lock().ends = true;
        waiter.join().unwrap().unwrap();
    });
    rig.end_all(&[1, 2, 3, 4, 5]);
    let state = rig.device.state.lock();
    assert_eq!(state.submitted, [1, 5, 2, 3, 4]);
    assert_eq!(state.rushed, [5]);
}

#[test]
fn those_that_hold_it_back_are_hurried_too() {
    let rig = Rig::new(8);
    rig.store(1, 0, 0);
    rig.store(2, 1, 1);
    rig.submit(JobKind::Load, 3, 2, 0).unwrap(); // reads what job 1 writes
    rig.store(4, 2, 3); // reads what job 3 writes
    rig.wait_submitted(2);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| rig.engine.wait_enqueued(&[4], LONG));
        while rig.rushed().is_empty() {
            thread::yield_now();
        }
        assert_eq!(rig.rushed(), [1]);
        rig.device.state.lock().ends = true;
        waiter.join().unwrap().unwrap();
    });
    rig.end_all(&[1, 2, 3, 4]);
    assert_eq!(rig.rushed(), [1, 3, 4]);
}

#[test]
fn a_wait_for_the_queues_that_times_out_quarantines() {
    let rig = Rig::new(1);
    rig.store(1, 0, 0);
    rig.wait_submitted(1);
    rig.store(2, 1, 5); // never gets into the backend
    let timeout = rig.engine.wait_enqueued(&[1, 2], SHORT).unwrap_err();
    assert_eq!(timeout.jobs, [2]);
    let slot = Slot::new(5);
    assert_eq!(
        rig.submit(JobKind::Load, 3, 7, 5),
        Err(SubmitError::Quarantined { job: 3, slot })
    );
    rig.submit(JobKind::Load, 4, 7, 6).unwrap();
    rig.end_all(&[1, 2, 4]);
    assert_eq!(rig.engine.stats().quarantined_slots, 0);
}

#[test]
fn an_engine_that_gives_up_ends_the_wait() {
    let rig = Rig::new(1);
    rig.store(1, 0, 0);
    rig.store(2, 1, 1);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| rig.engine.wait_enqueued(&[2], LONG));
        assert_eq!(rig.engine.shutdown(SHORT).abandoned, [1, 2]);
        waiter.join().unwrap().unwrap();
    });
}
