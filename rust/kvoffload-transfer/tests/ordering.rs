//! Which jobs wait for which, and who never waits.

mod common;

use std::thread;

use common::gate::GateRig;
use common::{Job, LONG, Rig, Shape, copies_only};
use kvoffload_transfer::FaultPlan;
use kvoffload_transfer::JobKind::{self, Load, Store};

const PAGE: usize = 64;

/// Kind, block and slot of a job of one block.
type One = (JobKind, u32, u32);

fn shape() -> Shape {
    Shape::simple(8, PAGE as u64, 8)
}

/// An engine in which job 1 never ends.
fn stalled(fences: bool) -> Rig {
    let faults = FaultPlan {
        stall_job: Some(1),
        ..FaultPlan::default()
    };
    Rig::with(&shape(), faults, |config| config.fences = fences)
}

fn submit(rig: &Rig, job: u64, (kind, block, slot): One) {
    rig.submit(kind, job, &Job::simple(&[block], &[slot]))
        .unwrap();
}

/// Job 1 is `first` and never ends; says whether `second`, submitted after it, does.
fn passes(fences: bool, first: One, second: One) -> bool {
    let rig = stalled(fences);
    submit(&rig, 1, first);
    submit(&rig, 2, second);
    // Job 3 conflicts with nobody. It is behind job 2, so job 2 has ended before it or is held back.
    submit(&rig, 3, (second.0, 7, 7));
    let ends: Vec<u64> = rig.finish(&[3]).iter().map(|end| end.job).collect();
    let waits = rig.engine.stats().fence_waits;
    match ends[..] {
        [3] => {
            assert_eq!(waits, 1);
            false
        }
        [2, 3] => true,
        _ => panic!("{ends:?}"),
    }
}

/// A load must see what an earlier store writes (C1), must not touch a block that an earlier store
/// still reads (C3), a store must not touch a slot that an earlier load still reads, and must see
/// what an earlier load writes.
const CONFLICTS: [(One, One); 4] = [
    ((Store, 0, 3), (Load, 1, 3)),
    ((Store, 0, 3), (Load, 0, 2)),
    ((Load, 1, 3), (Store, 0, 3)),
    ((Load, 0, 3), (Store, 0, 2)),
];

#[test]
fn c1_c3_a_job_waits_for_earlier_jobs_on_its_slots_and_blocks() {
    for (first, second) in CONFLICTS {
        assert!(!passes(true, first, second), "{first:?} {second:?}");
    }
}

#[test]
fn without_the_fence_they_would_not_wait() {
    for (first, second) in CONFLICTS {
        assert!(passes(false, first, second), "{first:?} {second:?}");
    }
}

#[test]
fn jobs_that_share_nothing_do_not_wait() {
    assert!(passes(true, (Store, 0, 3), (Load, 1, 2)));
    assert!(passes(true, (Load, 0, 3), (Store, 1, 2)));
}

#[test]
fn without_the_fence_the_bytes_would_be_wrong() {
    let rig = stalled(false);
    let old = rig.device.bytes(0);
    submit(&rig, 1, (Store, 0, 3));
    submit(&rig, 2, (Load, 1, 3));
    rig.finish_well(&[2]);
    let new = rig.device.bytes(0);
    assert_ne!(new[PAGE..2 * PAGE], old[..PAGE], "the store had not run");
    assert_eq!(new[PAGE..2 * PAGE], [0; PAGE]);
}

#[test]
fn with_the_fence_they_are_right_whatever_the_delays() {
    let mut waits = 0;
    for seed in 0..20 {
        let rig = Rig::new(
            &shape(),
            FaultPlan {
                seed,
                max_delay_us: 2000,
                ..FaultPlan::default()
            },
        );
        let old = rig.device.bytes(0);
        let page = |bytes: &[u8], block: usize| bytes[block * PAGE..(block + 1) * PAGE].to_vec();
        submit(&rig, 1, (Store, 0, 3)); // slot 3 = block 0
        submit(&rig, 2, (Load, 1, 3)); // block 1 = old block 0
        submit(&rig, 3, (Store, 2, 3)); // slot 3 = block 2, but not before job 2 has read it
        submit(&rig, 4, (Load, 0, 3)); // block 0 = old block 2, but not before job 1 has read it
        submit(&rig, 5, (Store, 0, 4)); // slot 4 = block 0 as job 4 leaves it
        submit(&rig, 6, (Load, 5, 4)); // block 5 = old block 2
        rig.finish_well(&[1, 2, 3, 4, 5, 6]);
        let new = rig.device.bytes(0);
        assert_eq!(page(&new, 1), page(&old, 0), "seed {seed}");
        assert_eq!(page(&new, 0), page(&old, 2), "seed {seed}");
        assert_eq!(page(&new, 5), page(&old, 2), "seed {seed}");
        waits += rig.engine.stats().fence_waits;
    }
    // A job whose delays are short may be over before the next one's turn comes.
    assert!(waits > 20 && waits <= 5 * 20, "{waits}");
}

#[test]
fn conflicts_within_a_direction_wait_too() {
    // A backend that takes four jobs at a time: the queue's order alone would not keep them apart.
    let rig = GateRig::new(&shape(), 4, &copies_only());
    rig.store(1, 0, 3);
    rig.store(2, 1, 3); // same slot
    rig.store(3, 0, 4); // same block, which both only read
    rig.load(4, 5, 6);
    rig.load(5, 7, 6); // same block
    rig.load(6, 5, 7); // same slot, which both only read
    rig.gates.open(&[3, 6]);
    rig.engine.wait(&[3, 6], LONG).unwrap();
    let mut started = rig.gates.started();
    started.sort_unstable();
    assert_eq!(started, [1, 3, 4, 6]);
    rig.gates.open_all();
    rig.engine.wait(&[1, 2, 3, 4, 5, 6], LONG).unwrap();
    assert_eq!(rig.engine.take_finished().len(), 6);
}

#[test]
fn jobs_start_in_order_and_pass_those_held_back() {
    let rig = GateRig::new(&shape(), 1, &copies_only());
    rig.load(1, 3, 0);
    rig.gates.wait_started(1);
    rig.store(2, 1, 3); // held back by job 1
    rig.store(3, 2, 2);
    rig.store(4, 2, 1);
    rig.store(5, 1, 3); // held back by jobs 1 and 2
    rig.store(6, 3, 4);
    rig.gates.open(&[3, 4, 6]);
    rig.engine.wait(&[3, 4, 6], LONG).unwrap();
    assert_eq!(rig.gates.started(), [1, 3, 4, 6]);
    rig.gates.open_all();
    rig.engine.wait(&[2, 5], LONG).unwrap();
    assert_eq!(rig.gates.started(), [1, 3, 4, 6, 2, 5]);
    let ends: Vec<u64> = rig
        .engine
        .take_finished()
        .iter()
        .map(|end| end.job)
        .collect();
    assert_eq!(ends.len(), 6);
    assert_eq!(ends[4..], [2, 5]);
}

#[test]
fn j7_loads_do_not_queue_behind_stores() {
    let rig = stalled(true);
    submit(&rig, 1, (Store, 0, 0));
    for job in 100..1100 {
        submit(&rig, job, (Store, 0, 1));
    }
    submit(&rig, 2, (Load, 1, 2));
    let ends = rig.finish(&[2]);
    assert_eq!(ends.len(), 1);
    assert_eq!(rig.engine.stats().stores.live, 1001);
}

#[test]
fn a_submit_never_copies_and_never_waits() {
    let rig = GateRig::new(&shape(), 1, &copies_only());
    // Both threads are busy with jobs that do not end, and everything else is held back.
    rig.store(1, 0, 0);
    rig.load(2, 1, 1);
    rig.gates.wait_started(1);
    rig.gates.wait_started(2);
    for job in 3..300 {
        rig.store(job, 0, 0);
    }
    let stats = rig.engine.stats();
    assert_eq!(
        (stats.stores.live, stats.stores.live_peak, stats.loads.live),
        (298, 298, 1)
    );
    rig.gates.open_all();
    let jobs: Vec<u64> = (1..300).collect();
    rig.engine.wait(&jobs, LONG).unwrap();
    let threads = rig.gates.threads();
    assert!(threads.len() == 2 && !threads.contains(&thread::current().id()));
}
