//! A slot that does not hold what was stored is never loaded.

mod common;

use std::num::NonZeroU32;

use common::gate::{GateRig, Place};
use common::{Job, LONG, Rig, Shape};
use kvoffload_core::layout::PageRef;
use kvoffload_core::pool::Slot;
use kvoffload_transfer::{CopyError, EngineConfig, FaultPlan, JobKind, Verify, VerifyReason};

/// Chunks of two blocks in two groups.
fn shape() -> Shape {
    let mut shape = Shape::simple(8, 64, 8);
    shape.blocks_per_chunk = 2;
    shape.groups.push(vec![PageRef {
        tensor: 0,
        page_bytes: 32,
    }]);
    shape
}

/// Blocks of one group, starting at a logical index.
fn job(group: usize, first: u64, blocks: &[u32], slots: &[u32]) -> Job {
    let mut job = Job::simple(blocks, slots);
    job.group_sizes = vec![0, 0];
    job.group_sizes[group] = blocks.len() as u32;
    job.block_indices = vec![first; 2];
    job
}

fn rig(verify: Verify, faults: FaultPlan) -> Rig {
    Rig::with(&shape(), faults, |config| config.verify = verify)
}

/// Runs one job to its end.
fn run(rig: &Rig, kind: JobKind, id: u64, what: &Job) -> Result<(), CopyError> {
    rig.submit(kind, id, what).unwrap();
    rig.engine.wait(&[id], LONG).unwrap();
    let ends = rig.engine.take_finished();
    assert_eq!(ends.len(), 1);
    ends[0].outcome.clone()
}

fn reason(outcome: Result<(), CopyError>) -> (u64, Slot, VerifyReason) {
    match outcome {
        Err(CopyError::Verify { job, slot, reason }) => (job, slot, reason),
        other => panic!("{other:?}"),
    }
}

#[test]
fn corruption_is_found_and_nothing_is_loaded() {
    let rig = rig(
        Verify::All,
        FaultPlan {
            corrupt_every_store: 2,
            ..FaultPlan::default()
        },
    );
    run(&rig, JobKind::Store, 1, &job(0, 0, &[0, 1], &[3])).unwrap();
    run(&rig, JobKind::Store, 2, &job(0, 0, &[2, 3], &[4])).unwrap();
    let old = rig.device.bytes(0);
    run(&rig, JobKind::Load, 3, &job(0, 0, &[0, 1], &[3])).unwrap();
    // The good chunk before the bad one is not loaded either.
    let outcome = run(&rig, JobKind::Load, 4, &job(0, 0, &[4, 5, 6, 7], &[3, 4]));
    let text = outcome.clone().unwrap_err().to_string();
    assert!(text.contains("job 4") && text.contains("slot 4"), "{text}");
    let (job_id, slot, reason) = reason(outcome);
    assert_eq!((job_id, slot), (4, Slot::new(4)));
    assert!(matches!(reason, VerifyReason::Changed { stored, found } if stored != found));
    assert_eq!(rig.device.bytes(0), old);
    let stats = rig.engine.stats();
    assert_eq!(
        (
            stats.verify_checks,
            stats.verify_failures,
            stats.loads.failures
        ),
        (3, 1, 1)
    );

    // A new store (the third, which is not damaged) makes the slot good again.
    run(&rig, JobKind::Store, 5, &job(0, 0, &[2, 3], &[4])).unwrap();
    run(&rig, JobKind::Load, 6, &job(0, 0, &[4, 5], &[4])).unwrap();
}

/// Also if not one of its copies was begun: whoever wants to load does not want what was there before.
#[test]
fn a_store_that_the_backend_never_took_leaves_nothing_to_load() {
    for place in [Some(Place::Submit), None] {
        let rig = GateRig::new(&Shape::simple(8, 64, 8), 1, &EngineConfig::default());
        rig.gates.open_all();
        match place {
            Some(place) => rig.gates.panic_in(2, place),
            None => rig.gates.refuse(2),
        }
        rig.store(1, 0, 3);
        rig.load(11, 3, 4);
        rig.store(2, 1, 3);
        rig.load(12, 3, 4);
        rig.engine.wait(&[1, 11, 2, 12], LONG).unwrap();
        let mut ends = rig.engine.take_finished();
        ends.sort_by_key(|end| end.job);
        let [first, second, before, after] = ends.try_into().unwrap();
        assert_eq!((first.outcome, before.outcome), (Ok(()), Ok(())));
        assert!(second.outcome.is_err());
        let wrong = (12, Slot::new(3), VerifyReason::StoreFailed);
        assert_eq!(reason(after.outcome), wrong);
    }
}

#[test]
fn without_verify_corruption_goes_through() {
    let rig = rig(
        Verify::Off,
        FaultPlan {
            corrupt_every_store: 1,
            ..FaultPlan::default()
        },
    );
    let old = rig.device.bytes(0);
    run(&rig, JobKind::Store, 1, &job(0, 0, &[0, 1], &[3])).unwrap();
    run(&rig, JobKind::Load, 2, &job(0, 0, &[0, 1], &[3])).unwrap();
    let new = rig.device.bytes(0);
    assert_eq!(old.iter().zip(&new).filter(|(a, b)| a != b).count(), 1);
    assert_eq!(rig.engine.stats().verify_checks, 0);
}

#[test]
fn slots_without_a_good_store_are_refused() {
    let rig = rig(
        Verify::All,
        FaultPlan {
            fail_every_store: 2,
            ..FaultPlan::default()
        },
    );
    let load = |id| run(&rig, JobKind::Load, id, &job(0, 0, &[4, 5], &[3]));
    assert_eq!(
        reason(load(1)),
        (1, Slot::new(3), VerifyReason::NeverStored)
    );
    run(&rig, JobKind::Store, 2, &job(0, 0, &[0, 1], &[3])).unwrap();
    load(3).unwrap();
    run(&rig, JobKind::Store, 4, &job(0, 0, &[0, 1], &[3])).unwrap_err();
    assert_eq!(reason(load(5)).2, VerifyReason::StoreFailed);
    run(&rig, JobKind::Store, 6, &job(1, 0, &[0, 1], &[3])).unwrap();
    assert_eq!(
        reason(load(7)).2,
        VerifyReason::OtherGroup {
            stored: 1,
            wanted: 0
        }
    );
}

#[test]
fn parts_of_chunks_are_verified_as_whole_chunks() {
    let rig = rig(Verify::All, FaultPlan::default());
    let old = rig.device.bytes(0);
    // The second half of a chunk comes back alone. A store of the first half is another chunk's:
    // a slot gets all it will ever hold of a chunk in one job.
    run(&rig, JobKind::Store, 1, &job(0, 5, &[1], &[3])).unwrap();
    rig.device.fill(0, 64..128, 0);
    run(&rig, JobKind::Load, 2, &job(0, 5, &[1], &[3])).unwrap();
    assert_eq!(rig.device.bytes(0), old);
    assert_eq!(rig.engine.stats().verify_checks, 1);
    run(&rig, JobKind::Store, 3, &job(0, 4, &[0], &[3])).unwrap();
    run(&rig, JobKind::Load, 4, &job(0, 4, &[0], &[3])).unwrap();
    let refused = run(&rig, JobKind::Load, 5, &job(0, 5, &[1], &[3]));
    let (stored, wanted) = ((0, 1), (1, 2));
    assert_eq!(
        reason(refused).2,
        VerifyReason::OtherBlocks { stored, wanted }
    );
}

#[test]
fn samples_depend_on_slot_and_use_alone() {
    let every = NonZeroU32::new(4).unwrap();
    let checks = |seed| {
        let faults = FaultPlan {
            seed,
            max_delay_us: 200,
            ..FaultPlan::default()
        };
        let rig = rig(Verify::Sample(every), faults);
        let mut checks = Vec::new();
        for round in 0..8u64 {
            for slot in 0..8u64 {
                let id = 2 * (8 * round + slot);
                let what = job(0, 0, &[0, 1], &[slot as u32]);
                run(&rig, JobKind::Store, id, &what).unwrap();
                run(&rig, JobKind::Load, id + 1, &what).unwrap();
                checks.push(rig.engine.stats().verify_checks);
            }
        }
        // Slots without a store are known whatever the sampling.
        checks
    };
    let first = checks(1);
    assert_eq!(first, checks(2));
    assert_eq!(first[63], 64 / 4);
    // Every slot has its turn, at another use than its neighbours.
    assert_eq!(first[7], 2);

    let rig = rig(Verify::Sample(every), FaultPlan::default());
    let never = run(&rig, JobKind::Load, 1, &job(0, 0, &[0, 1], &[0]));
    assert_eq!(reason(never).2, VerifyReason::NeverStored);
}

#[test]
fn a_control_that_reads_the_neighbour_is_not_stopped_by_it() {
    // The fault is in the copy, behind the check: whoever compares results must notice.
    let faults = FaultPlan {
        loads: kvoffload_transfer::LoadFault::Neighbour,
        ..FaultPlan::default()
    };
    let rig = rig(Verify::All, faults);
    run(&rig, JobKind::Store, 1, &job(0, 0, &[0, 1], &[0])).unwrap();
    run(&rig, JobKind::Load, 2, &job(0, 0, &[0, 1], &[0])).unwrap();
    assert_eq!(rig.device.bytes(0)[..128], [0; 128]);
}

#[test]
fn blocks_that_were_never_stored_are_not_loaded_whatever_is_verified() {
    for verify in [Verify::Off, Verify::All] {
        let rig = Rig::with(&shape(), FaultPlan::default(), |config| {
            config.verify = verify;
            config.stored_only = true;
        });
        let never = run(&rig, JobKind::Load, 1, &job(0, 0, &[4, 5], &[3]));
        assert_eq!(reason(never).2, VerifyReason::NeverStored);
        // Another chunk was there; now one is stored whose first block vLLM has dropped.
        run(&rig, JobKind::Store, 2, &job(0, 0, &[0, 1], &[3])).unwrap();
        run(&rig, JobKind::Store, 3, &job(0, 7, &[2], &[3])).unwrap();
        let before = rig.device.bytes(0);
        for (id, first, blocks) in [(4, 6, &[4, 5][..]), (5, 6, &[4])] {
            let refused = reason(run(&rig, JobKind::Load, id, &job(0, first, blocks, &[3])));
            let wanted = (0, blocks.len() as u32);
            let stored = (1, 2);
            let blocks_missing = VerifyReason::OtherBlocks { stored, wanted };
            assert_eq!(refused, (id, Slot::new(3), blocks_missing));
        }
        assert_eq!(rig.device.bytes(0), before, "nothing was loaded");
        run(&rig, JobKind::Load, 6, &job(0, 7, &[4], &[3])).unwrap();
        assert_eq!(rig.device.bytes(0)[4 * 64..5 * 64], before[2 * 64..3 * 64]);
    }
}
