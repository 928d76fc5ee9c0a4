//! Jobs that are given up: they end soon, once, and as if those that had not started had never come.

mod common;

use std::collections::{BTreeMap, HashMap};
use std::thread;
use std::time::{Duration, Instant};

use common::gate::GateRig;
use common::{Job, LONG, Model, Random, Rig, SHORT, Shape, copies_only, random_job};
use kvoffload_core::layout::PageRef;
use kvoffload_transfer::JobKind::{self, Load, Store};
use kvoffload_transfer::{Completion, CopyError, FaultPlan, VerifyReason};

const PAGE: usize = 64;

fn shape() -> Shape {
    Shape::simple(8, PAGE as u64, 8)
}

/// An engine in which job 1 never ends by itself.
fn stalled() -> Rig {
    let faults = FaultPlan {
        stall_job: Some(1),
        ..FaultPlan::default()
    };
    Rig::new(&shape(), faults)
}

fn page(bytes: &[u8], block: usize) -> &[u8] {
    &bytes[block * PAGE..(block + 1) * PAGE]
}

/// The ends of these jobs, which must have been cancelled, all and only they.
fn all_cancelled(ends: &[Completion], jobs: &[u64]) {
    assert_eq!(ends.len(), jobs.len(), "{ends:?}");
    for (end, &job) in ends.iter().zip(jobs) {
        assert_eq!(end.outcome, Err(CopyError::Cancelled { job }));
        assert_eq!((end.job, end.bytes), (job, 0));
    }
}

#[test]
fn a_stalled_job_ends_and_its_thread_goes_on() {
    for kind in [Load, Store] {
        let rig = stalled();
        let old = rig.device.bytes(0);
        rig.submit(kind, 1, &Job::simple(&[0], &[3])).unwrap();
        assert!(rig.engine.wait(&[1], SHORT).is_err(), "it has started");
        assert_eq!(rig.engine.stats().quarantined_slots, 1);
        rig.engine.cancel(&[1]);
        all_cancelled(&rig.finish(&[1]), &[1]);
        assert_eq!(rig.device.bytes(0), old);
        let stats = rig.engine.stats();
        let of_kind = if kind == Load {
            stats.loads
        } else {
            stats.stores
        };
        assert_eq!(
            (of_kind.cancelled, of_kind.failures, of_kind.live),
            (1, 0, 0)
        );
        assert_eq!(stats.quarantined_slots, 0);
        rig.store(2, &[0], &[3]);
        rig.load(3, &[3], &[1]);
        rig.finish_well(&[2, 3]);
        assert_eq!(page(&rig.device.bytes(0), 1), page(&old, 0));
    }
}

#[test]
fn so_does_one_that_pauses() {
    let rig = Rig::new(
        &shape(),
        FaultPlan {
            max_delay_us: LONG.as_micros() as u64,
            ..FaultPlan::default()
        },
    );
    let old = rig.device.bytes(0);
    rig.load(1, &[3], &[0]);
    rig.store(2, &[1], &[4]);
    thread::sleep(SHORT);
    rig.engine.cancel(&[1, 2]);
    let started = Instant::now();
    all_cancelled(&rig.finish(&[1, 2]), &[1, 2]);
    assert!(started.elapsed() < LONG / 10);
    assert_eq!(rig.device.bytes(0), old);
}

#[test]
fn one_that_is_blocked_ends_before_its_blocker_and_leaves_what_it_named() {
    let rig = stalled();
    let old = rig.device.bytes(0);
    rig.load(1, &[3], &[0]);
    rig.store(2, &[0, 2], &[4, 5]); // behind job 1, by block 0
    rig.store(3, &[6], &[5]); // behind job 2, by slot 5
    rig.store(4, &[0], &[6]); // behind job 1, by block 0
    assert!(rig.engine.wait(&[3], SHORT).is_err());
    rig.engine.cancel(&[2]);
    // What it held back goes on, and so does what comes now; what conflicts with job 1 does not.
    let ends = rig.finish(&[2, 3]);
    all_cancelled(&ends[..1], &[2]);
    assert_eq!(ends[1].outcome, Ok(()));
    rig.store(5, &[1], &[4]);
    rig.store(2, &[7], &[2]); // its id again
    let well = rig.finish(&[2, 5]);
    assert!(well.iter().all(|end| end.outcome.is_ok()), "{well:?}");
    rig.store(6, &[0], &[7]);
    assert_eq!(rig.engine.wait(&[4, 6], SHORT).unwrap_err().jobs, [4, 6]);
    rig.engine.cancel(&[1]);
    let ends = rig.finish(&[1, 4, 6]);
    all_cancelled(&ends[..1], &[1]);
    assert!(ends[1..].iter().all(|end| end.outcome.is_ok()));
    assert_eq!(rig.device.bytes(0), old);
    rig.load(7, &[4, 5, 2], &[3, 4, 5]);
    rig.finish_well(&[7]);
    let new = rig.device.bytes(0);
    assert_eq!(
        [3, 4, 5].map(|at| page(&new, at)),
        [1, 6, 7].map(|at| page(&old, at))
    );
}

/// Its coming has hidden the first store from the last: whoever is let out must not take that along.
#[test]
fn those_it_hid_are_still_waited_for() {
    let rig = GateRig::new(&shape(), 4, &copies_only());
    rig.store(1, 0, 3);
    rig.store(2, 1, 3);
    rig.load(3, 3, 2); // behind job 2, and only by it behind job 1
    rig.gates.wait_started(1);
    rig.engine.cancel(&[2]);
    rig.engine.wait(&[2], LONG).unwrap();
    rig.load(4, 3, 4);
    rig.store(5, 5, 5);
    rig.gates.open(&[5]);
    rig.engine.wait(&[5], LONG).unwrap();
    assert_eq!(rig.gates.started(), [1, 5]);
    rig.gates.open(&[1]);
    rig.gates.wait_started(4);
    assert_eq!(rig.gates.started(), [1, 5, 3, 4]);
    rig.gates.open_all();
}

#[test]
fn queued_ones_never_start() {
    let rig = GateRig::new(&shape(), 1, &copies_only());
    rig.store(1, 0, 0);
    rig.gates.wait_started(1);
    for job in 2..100 {
        rig.store(job, 0, (job % 7) as u32 + 1);
    }
    let some: Vec<u64> = (2..100).filter(|job| job % 3 > 0).collect();
    rig.engine.cancel(&some);
    rig.engine.wait(&some, LONG).unwrap();
    let mut ends = rig.engine.take_finished();
    ends.sort_by_key(|end| end.job);
    all_cancelled(&ends, &some);
    rig.gates.open_all();
    rig.engine.drain(LONG).unwrap();
    let started = rig.gates.started();
    assert_eq!(started.len(), 1 + 98 - some.len());
    assert!(started.is_sorted() && !started.iter().any(|job| some.contains(job)));
}

#[test]
fn what_is_over_or_unknown_is_left_alone() {
    let rig = stalled();
    rig.store(2, &[0], &[0]);
    rig.engine.wait(&[2], LONG).unwrap();
    rig.engine.cancel(&[2, 17, 2]);
    rig.finish_well(&[2]);
    rig.engine.cancel(&[2]);
    rig.store(2, &[0], &[0]); // a later job of the same id
    rig.finish_well(&[2]);
    assert_eq!(rig.engine.stats().stores.cancelled, 0);
    rig.engine.shutdown(SHORT);
    rig.engine.cancel(&[2]);
}

#[test]
fn a_cancelled_job_is_not_reported_by_a_shutdown() {
    let rig = stalled();
    rig.store(1, &[0], &[0]);
    rig.load(2, &[0], &[1]);
    rig.engine.cancel(&[1, 2]);
    let report = rig.engine.shutdown(LONG);
    assert_eq!((report.abandoned, report.stuck_threads), (vec![], 0));
    all_cancelled(&rig.finish(&[1, 2]), &[1, 2]);
}

/// Whether it had started or not: nobody may load what it was to write.
#[test]
fn the_slots_of_a_cancelled_store_hold_nothing() {
    let faults = || FaultPlan {
        stall_job: Some(1),
        ..FaultPlan::default()
    };
    let refused = |end: &Completion, job| {
        let reason = VerifyReason::StoreFailed;
        assert!(
            matches!(end.outcome, Err(CopyError::Verify { job: j, reason: r, .. }) if (j, r) == (job, reason)),
            "{end:?}"
        );
    };
    let rig = Rig::with(&shape(), faults(), |config| config.stored_only = true);
    rig.store(10, &[0, 2], &[3, 4]);
    rig.finish_well(&[10]);
    rig.store(1, &[1], &[4]);
    rig.load(11, &[3], &[5]); // wants the old bytes of slot 3
    rig.store(12, &[1], &[3]); // queued behind job 1
    rig.load(13, &[3], &[6]); // wants the new ones
    rig.engine.cancel(&[12]);
    let ends = rig.finish(&[11, 12, 13]);
    assert_eq!(ends[0].outcome, Ok(()));
    all_cancelled(&ends[1..2], &[12]);
    refused(&ends[2], 13);
    rig.engine.cancel(&[1]);
    rig.load(14, &[4], &[6]);
    refused(&rig.finish(&[1, 14])[1], 14);
    rig.store(15, &[1], &[3]);
    rig.load(16, &[3], &[6]);
    rig.finish_well(&[15, 16]);
}

/// What may be in a byte.
#[derive(Clone, Debug)]
struct Byte(Vec<u8>);

impl From<u8> for Byte {
    fn from(byte: u8) -> Self {
        Self(vec![byte])
    }
}

#[test]
fn random_cancels_leave_the_bytes_of_all_others_right() {
    let mut shape = Shape::simple(16, 250, 10);
    shape.blocks_per_chunk = 2;
    shape.groups.push(vec![PageRef {
        tensor: 0,
        page_bytes: 100,
    }]);
    let (mut cancelled, mut waited, mut unsure) = (0, 0, 0);
    for seed in 0..60 {
        let faults = FaultPlan {
            seed,
            max_delay_us: 300,
            ..FaultPlan::default()
        };
        let rig = Rig::new(&shape, faults);
        let mut model: Model<Byte> = Model::new(&shape, &rig.device);
        let mut random = Random(seed);
        let (mut jobs, mut ends) = (Vec::new(), HashMap::new());
        let mut take = || {
            for end in rig.engine.take_finished() {
                let (job, outcome) = (end.job, end.outcome);
                assert!(ends.insert(job, outcome).is_none(), "job {job} ended twice");
            }
        };
        for id in 0..40 {
            let kind = if random.below(2) == 0 { Store } else { Load };
            let job = random_job(&shape, kind, &mut random);
            rig.submit(kind, id, &job).unwrap();
            jobs.push((kind, job));
            if random.below(8) == 0 {
                let back = random.below(8) as u64;
                rig.engine.cancel(&[id.saturating_sub(back), id + 1]);
            }
            if random.below(8) == 0 {
                thread::sleep(Duration::from_micros(random.below(500) as u64));
            }
            take();
        }
        rig.engine.drain(LONG).unwrap();
        take();
        assert_eq!(ends.len(), jobs.len());
        for (id, (kind, job)) in (0..).zip(&jobs) {
            match &ends[&id] {
                Ok(()) => model.run(*kind, job),
                Err(CopyError::Cancelled { job: named }) => {
                    assert_eq!(*named, id);
                    cancelled += 1;
                    model.copy(*kind, job, |target, source| {
                        target.0.extend(&source.0);
                        target.0.sort_unstable();
                        target.0.dedup();
                    });
                }
                Err(error) => panic!("{error}"),
            }
        }
        for (tensor, bytes) in rig.device.all_bytes().into_iter().enumerate() {
            for (at, (byte, may_be)) in bytes.iter().zip(&model.tensors[tensor]).enumerate() {
                assert!(
                    may_be.0.contains(byte),
                    "seed {seed}, byte {at}: {byte}, {may_be:?}"
                );
                unsure += usize::from(may_be.0.len() > 1);
            }
        }
        waited += usize::from(rig.engine.stats().fence_waits > 0);
        assert_eq!(rig.engine.shutdown(LONG).abandoned, []);
    }
    let bytes = 60 * 16 * 250;
    assert!(cancelled > 100 && waited > 30, "{cancelled}, {waited}");
    assert!(unsure < bytes / 2, "{unsure} of {bytes} bytes say nothing");
}

/// At any time exactly those jobs are with the backend that conflict with no earlier live one: nobody goes
/// too soon, and nobody waits for one that is gone or that it has nothing to do with.
#[test]
fn after_random_cancels_everybody_waits_for_whom_they_conflict_with() {
    type Named = (JobKind, Vec<u32>, Vec<u32>);
    fn conflict((kind, blocks, slots): &Named, (other, its_blocks, its_slots): &Named) -> bool {
        let share = |ours: &[u32], theirs: &[u32]| ours.iter().any(|id| theirs.contains(id));
        let either = |of: JobKind| *kind == of || *other == of;
        either(Store) && share(slots, its_slots) || either(Load) && share(blocks, its_blocks)
    }
    for seed in 0..40 {
        let rig = GateRig::new(&shape(), 100, &copies_only());
        let mut random = Random(seed);
        let mut live: BTreeMap<u64, Named> = BTreeMap::new();
        for job in 0..80 {
            let kind = if random.below(2) == 0 { Store } else { Load };
            let size = 1 + random.below(3);
            let (blocks, slots) = (random.distinct(size, 8), random.distinct(size, 8));
            let what = Job::simple(&blocks, &slots);
            rig.engine.submit(kind, job, what.geometry()).unwrap();
            live.insert(job, (kind, blocks, slots));
            let ids: Vec<u64> = live.keys().copied().collect();
            let mut gone = Vec::new();
            match random.below(3) {
                0 => {}
                1 => {
                    let some = |_: &&u64| random.below(4) == 0;
                    gone.extend(ids.iter().filter(some).copied());
                    rig.engine.cancel(&gone);
                }
                _ => {
                    let free = |job: &u64| live.range(..job).all(|(_, o)| !conflict(o, &live[job]));
                    let free: Vec<u64> = ids.iter().filter(|job| free(job)).copied().collect();
                    gone.push(free[random.below(free.len())]);
                    rig.gates.open(&gone);
                }
            }
            rig.engine.wait(&gone, LONG).unwrap();
            live.retain(|job, _| !gone.contains(job));
            let waits_for_none = |(job, named): &(&u64, &Named)| {
                live.range(..*job)
                    .all(|(_, earlier)| !conflict(earlier, named))
            };
            let free: Vec<u64> = live
                .iter()
                .filter(waits_for_none)
                .map(|(&job, _)| job)
                .collect();
            let held = || {
                let mut held = rig.gates.started();
                held.retain(|job| live.contains_key(job));
                held.sort_unstable();
                held
            };
            let deadline = Instant::now() + LONG;
            while held().len() < free.len() && Instant::now() < deadline {
                thread::yield_now();
            }
            assert_eq!(held(), free, "seed {seed}, after job {job}");
        }
        rig.gates.open_all();
        rig.engine.drain(LONG).unwrap();
        assert_eq!(rig.engine.take_finished().len(), 80);
        assert_eq!(rig.engine.stats().stores.live, 0);
    }
}
