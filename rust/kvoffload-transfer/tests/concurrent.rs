//! Several threads at once: every job ends once, and nothing is left.

mod common;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use common::{LONG, Random, Rig, Shape, random_job};
use kvoffload_core::layout::PageRef;
use kvoffload_transfer::{FaultPlan, JobKind};

const JOBS: u64 = 1500;
const THREADS: u64 = 2;

#[test]
fn every_job_ends_once_under_load_from_two_threads() {
    let mut shape = Shape::simple(16, 256, 16);
    shape.blocks_per_chunk = 2;
    shape.groups.push(vec![PageRef {
        tensor: 0,
        page_bytes: 100,
    }]);
    let faults = FaultPlan {
        seed: 5,
        max_delay_us: 20,
        fail_every_store: 7,
        fail_every_load: 11,
        ..FaultPlan::default()
    };
    let rig = Rig::new(&shape, faults);
    let submitted = AtomicBool::new(false);
    let mut ends = HashMap::new();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (rig, shape) = (&rig, &shape);
                scope.spawn(move || {
                    let mut random = Random(thread);
                    for job in (0..JOBS).map(|job| job * THREADS + thread) {
                        let store = random.below(2) == 0;
                        let kind = if store { JobKind::Store } else { JobKind::Load };
                        rig.submit(kind, job, &random_job(shape, kind, &mut random))
                            .unwrap();
                        let some = [job, job.saturating_sub(8)];
                        match random.below(100) {
                            0 => rig.engine.wait(&some, LONG).unwrap(),
                            1..5 => rig.engine.wait_enqueued(&some, LONG).unwrap(),
                            _ => {}
                        }
                    }
                })
            })
            .collect();
        let taker = scope.spawn(|| {
            let mut taken = Vec::new();
            while !submitted.load(Ordering::Relaxed) {
                taken.extend(rig.engine.take_finished());
                thread::yield_now();
            }
            taken
        });
        for thread in threads {
            thread.join().unwrap();
        }
        let all: Vec<u64> = (0..JOBS * THREADS).collect();
        rig.engine.wait(&all, LONG).unwrap();
        submitted.store(true, Ordering::Relaxed);
        let mut taken = taker.join().unwrap();
        taken.extend(rig.engine.take_finished());
        for end in taken {
            let job = end.job;
            assert!(ends.insert(job, end).is_none(), "job {job} ended twice");
        }
    });
    assert_eq!(ends.len() as u64, JOBS * THREADS);
    let stats = rig.engine.stats();
    for (kind, stats, every) in [
        (JobKind::Store, stats.stores, 7),
        (JobKind::Load, stats.loads, 11),
    ] {
        let of_kind = || ends.values().filter(|end| end.kind == kind);
        assert_eq!(of_kind().map(|end| end.bytes).sum::<u64>(), stats.bytes);
        assert_eq!(
            of_kind().filter(|end| end.outcome.is_err()).count() as u64,
            stats.failures
        );
        // Jobs without bytes are not failed.
        assert!(stats.failures <= (stats.jobs + stats.failures) / every && stats.failures > 0);
        assert_eq!(stats.live, 0);
        assert!(stats.live_peak > 1);
    }
    assert_eq!(rig.engine.shutdown(LONG).abandoned, []);
}
