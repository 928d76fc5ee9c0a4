//! The end of an engine: nothing is lost, nothing hangs, nothing stays mapped.
//!
//! All in one test: it counts the mappings, threads and descriptors of the whole process.

mod common;

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use common::{Device, Job, LONG, Rig, SHORT, Shape, config, copies_only};
use kvoffload_core::layout::KvLayout;
use kvoffload_transfer::backend::{Backend, Poll, Progress, Work};
use kvoffload_transfer::{CopyError, Engine, FaultPlan, HostEngine, JobKind, Region, StartError};
use parking_lot::Mutex;

const PAGE: usize = 64 << 10;

/// Mappings that are kept out of forked children and out of core dumps: nothing else here is.
fn regions() -> usize {
    let maps = fs::read_to_string("/proc/self/smaps").unwrap();
    maps.lines()
        .filter_map(|line| line.strip_prefix("VmFlags:"))
        .filter(|flags| [" dc", " dd"].iter().all(|flag| flags.contains(flag)))
        .count()
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Whether this many of our threads are left; one that was joined may be listed a moment longer.
fn lanes_are(expected: usize) -> bool {
    let count = || {
        let tasks = fs::read_dir("/proc/self/task").unwrap();
        let names =
            tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
        names.filter(|name| name.starts_with("kvoffload")).count()
    };
    let deadline = Instant::now() + LONG;
    while count() != expected && Instant::now() < deadline {
        thread::yield_now();
    }
    count() == expected
}

/// Nothing is mapped, no thread is left, and nothing else knows the device.
fn assert_gone(device: &Arc<Device>) {
    assert_eq!((regions(), Arc::strong_count(device)), (0, 1));
    assert!(lanes_are(0));
}

fn shape() -> Shape {
    Shape::simple(8, PAGE as u64, 8)
}

/// K1, K2, K3.
#[test]
fn k1_k2_k3_shutdown() {
    let before = descriptors();
    live_jobs_end_first();
    what_does_not_end_is_given_up();
    many_may_shut_down();
    a_drop_is_a_shutdown();
    nothing_of_a_failed_start_remains();
    memory_outlives_a_copy_that_hangs();
    assert!(lanes_are(0));
    assert_eq!((regions(), descriptors()), (0, before));
}

fn live_jobs_end_first() {
    let faults = FaultPlan {
        seed: 3,
        max_delay_us: 2000,
        ..FaultPlan::default()
    };
    let rig = Rig::new(&shape(), faults);
    let old = rig.device.bytes(0);
    for job in 0..8 {
        rig.store(job, &[job as u32], &[job as u32]);
    }
    for job in 8..16 {
        rig.load(job, &[job as u32 - 8], &[(job as u32 + 1) % 8]);
    }
    assert_eq!(regions(), 1);
    assert!(lanes_are(2));
    let report = rig.engine.shutdown(LONG);
    assert_eq!((report.abandoned.len(), report.stuck_threads), (0, 0));
    assert_gone(&rig.device);
    // The ends outlive the threads.
    let ends = rig.engine.take_finished();
    assert_eq!(ends.len(), 16);
    assert!(ends.iter().all(|end| end.outcome.is_ok()));
    assert_eq!(rig.device.bytes(0)[PAGE..2 * PAGE], old[..PAGE]);
    assert_eq!(rig.engine.shutdown(LONG), report);
    assert_eq!(rig.engine.stats().loads.jobs, 8);
}

fn what_does_not_end_is_given_up() {
    let rig = Rig::new(
        &shape(),
        FaultPlan {
            stall_job: Some(2),
            ..FaultPlan::default()
        },
    );
    rig.store(1, &[1], &[1]);
    rig.store(2, &[2], &[2]); // stalls
    rig.store(3, &[3], &[3]); // behind it
    rig.load(4, &[2], &[2]); // held back by it
    rig.load(5, &[5], &[5]);
    rig.engine.wait(&[1, 5], LONG).unwrap();
    let report = rig.engine.shutdown(SHORT);
    assert_eq!(
        (&report.abandoned[..], report.stuck_threads),
        (&[2, 3, 4][..], 0)
    );
    assert_gone(&rig.device);
    let mut ends = rig.engine.take_finished();
    ends.sort_by_key(|end| end.job);
    let outcome = |job: u64| match job {
        1 | 5 => Ok(()),
        job => Err(CopyError::Abandoned { job }),
    };
    assert_eq!(ends.len(), 5);
    assert!(
        ends.iter().all(|end| end.outcome == outcome(end.job)),
        "{ends:?}"
    );
    assert_eq!(rig.engine.shutdown(SHORT), report);
    assert!(rig.engine.take_finished().is_empty());
}

fn many_may_shut_down() {
    let rig = Rig::new(
        &shape(),
        FaultPlan {
            stall_job: Some(1),
            ..FaultPlan::default()
        },
    );
    rig.store(1, &[1], &[1]);
    rig.load(2, &[2], &[2]);
    rig.engine.wait(&[2], LONG).unwrap();
    thread::scope(|scope| {
        let reports = [(); 4].map(|()| scope.spawn(|| rig.engine.shutdown(SHORT)));
        for report in reports {
            assert_eq!(report.join().unwrap().abandoned, [1]);
        }
    });
    assert_gone(&rig.device);
    assert_eq!(rig.engine.take_finished().len(), 2);
}

fn a_drop_is_a_shutdown() {
    let rig = Rig::new(
        &shape(),
        FaultPlan {
            stall_job: Some(1),
            ..FaultPlan::default()
        },
    );
    rig.load(1, &[1], &[1]);
    let Rig { device, engine } = rig;
    drop(engine);
    assert_gone(&device);
}

fn nothing_of_a_failed_start_remains() {
    let too_large = Region::new(u32::MAX, 1 << 40).unwrap_err();
    assert!(matches!(too_large, StartError::TooLarge { .. }));
    assert!(matches!(
        Region::new(0, 64),
        Err(StartError::Zero { field: "num_slots" })
    ));
    assert!(matches!(
        Region::new(1, 0),
        Err(StartError::Zero {
            field: "slot_bytes"
        })
    ));
    let device = Device::new(&shape());
    let mut config = config(&shape(), &device, FaultPlan::default());
    config.tensors[0].address = 0;
    // SAFETY: it is refused.
    assert!(unsafe { HostEngine::new(config) }.is_err());
    assert_gone(&device);
}

/// A backend that hangs while the lock is held, as a driver may.
struct Hanging {
    lock: Arc<Mutex<()>>,
    inside: Arc<AtomicBool>,
    held: Option<Work>,
}

impl Backend for Hanging {
    fn submit(&mut self, work: Work) -> Result<(), CopyError> {
        self.held = Some(work);
        Ok(())
    }

    fn poll(&mut self, _progress: &mut Progress) -> Poll {
        self.inside.store(true, Ordering::Relaxed);
        drop(self.lock.lock());
        Poll::After(LONG)
    }

    fn cancel(&mut self, _job: u64) {}

    fn abandon(&mut self) -> Vec<Work> {
        self.held.take().into_iter().collect()
    }
}

fn memory_outlives_a_copy_that_hangs() {
    let shape = shape();
    let slots_per_piece = Region::slots_per_piece(shape.slot_bytes());
    let layout = KvLayout::new(
        shape.tensors.clone(),
        shape.groups.clone(),
        1,
        8,
        shape.slot_bytes(),
        slots_per_piece,
    );
    let region = Arc::new(Region::new(8, shape.slot_bytes()).unwrap());
    let lock = Arc::new(Mutex::new(()));
    let inside = Arc::new(AtomicBool::new(false));
    let backends = [(); 2].map(|()| -> Box<dyn Backend> {
        Box::new(Hanging {
            lock: Arc::clone(&lock),
            inside: Arc::clone(&inside),
            held: None,
        })
    });
    let engine =
        Engine::start(Arc::new(layout.unwrap()), &region, backends, &copies_only()).unwrap();
    drop(region);
    let hanging = lock.lock();
    let store = Job::simple(&[0], &[0]);
    engine.submit(JobKind::Store, 1, store.geometry()).unwrap();
    while !inside.load(Ordering::Relaxed) {
        thread::yield_now();
    }
    let report = engine.shutdown(SHORT);
    assert_eq!((report.abandoned, report.stuck_threads), (vec![], 1));
    assert!(
        engine.take_finished().is_empty(),
        "it is not known to be over"
    );
    assert_eq!(regions(), 1);

    drop(hanging);
    let report = engine.shutdown(LONG);
    assert_eq!((report.abandoned, report.stuck_threads), (vec![1], 0));
    assert!(engine.take_finished()[0].outcome.is_err());
    assert!(lanes_are(0));
    assert_eq!(regions(), 0);
}
