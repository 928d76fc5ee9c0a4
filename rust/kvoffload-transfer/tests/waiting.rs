//! Waiting, deadlines, quarantine.

mod common;

use std::thread;
use std::time::Duration;

use common::gate::GateRig;
use common::{Job, LONG, Rig, SHORT, Shape, copies_only};
use kvoffload_core::pool::Slot;
use kvoffload_transfer::{CopyError, FaultPlan, JobKind, SubmitError};

fn shape() -> Shape {
    Shape::simple(8, 64, 8)
}

#[test]
fn c11_a_timeout_is_never_success_and_frees_nothing() {
    let rig = Rig::new(
        &shape(),
        FaultPlan {
            stall_job: Some(1),
            ..FaultPlan::default()
        },
    );
    rig.store(1, &[0, 1], &[3, 4]);
    rig.load(2, &[0], &[5]);
    rig.engine.wait(&[2], LONG).unwrap();
    let timeout = rig.engine.wait(&[2, 1, 1, 99], SHORT).unwrap_err();
    assert_eq!(timeout.jobs, [1]);
    assert!(timeout.waited >= SHORT);
    assert!(timeout.to_string().contains("first: 1"), "{timeout}");
    // The other job is reported, the one that timed out is not.
    let ends = rig.engine.take_finished();
    assert_eq!(ends.iter().map(|end| end.job).collect::<Vec<_>>(), [2]);

    for slot in [3, 4] {
        for kind in [JobKind::Store, JobKind::Load] {
            let refused = rig.submit(kind, 3, &Job::simple(&[6, 7], &[1, slot]));
            let slot = Slot::new(slot);
            assert_eq!(refused, Err(SubmitError::Quarantined { job: 3, slot }));
        }
    }
    // A refused job has left nothing behind.
    rig.load(3, &[1], &[7]);
    rig.finish_well(&[3]);
    // Waiting again changes nothing.
    assert_eq!(rig.engine.wait(&[1], Duration::ZERO).unwrap_err().jobs, [1]);
    let stats = rig.engine.stats();
    assert_eq!((stats.quarantined_slots, stats.quarantine_released), (2, 0));
    assert_eq!(stats.wait_timeouts, 2);

    let report = rig.engine.shutdown(SHORT);
    assert_eq!((report.abandoned, report.stuck_threads), (vec![1], 0));
    let ends = rig.engine.take_finished();
    assert_eq!(ends.len(), 1);
    assert_eq!(ends[0].outcome, Err(CopyError::Abandoned { job: 1 }));
    rig.engine.wait(&[1], Duration::ZERO).unwrap();
    assert_eq!(rig.engine.stats().quarantined_slots, 0);
}

#[test]
fn c11_slots_leave_quarantine_when_the_copy_is_over() {
    let rig = GateRig::new(&shape(), 1, &copies_only());
    rig.load(1, 3, 0);
    rig.load(2, 3, 1); // queued behind it, on the same slot
    assert_eq!(rig.engine.wait(&[1, 2], SHORT).unwrap_err().jobs, [1, 2]);
    let again = Job::simple(&[5], &[3]);
    let submit = |job| rig.engine.submit(JobKind::Store, job, again.geometry());
    assert!(submit(3).is_err());
    rig.gates.open(&[1]);
    rig.engine.wait(&[1], LONG).unwrap();
    // Job 2 has timed out too and is not over.
    assert!(matches!(submit(3), Err(SubmitError::Quarantined { .. })));
    assert_eq!(rig.engine.stats().quarantined_slots, 1);
    rig.gates.open_all();
    rig.engine.wait(&[2], LONG).unwrap();
    submit(3).unwrap();
    rig.engine.wait(&[3], LONG).unwrap();
    // Their ends came late, and each came once.
    let ends = rig.engine.take_finished();
    assert_eq!(
        ends.iter().map(|end| end.job).collect::<Vec<_>>(),
        [1, 2, 3]
    );
    assert!(ends.iter().all(|end| end.outcome.is_ok()));
    let stats = rig.engine.stats();
    assert_eq!((stats.quarantined_slots, stats.quarantine_released), (0, 1));
}

#[test]
fn a_job_queued_before_the_timeout_is_kept_and_waits() {
    let rig = GateRig::new(&shape(), 1, &copies_only());
    rig.store(1, 0, 3);
    rig.load(2, 3, 1);
    assert!(rig.engine.wait(&[1], SHORT).is_err());
    rig.gates.open_all();
    rig.engine.wait(&[2], LONG).unwrap();
    assert_eq!(rig.gates.started(), [1, 2]);
}

#[test]
fn unknown_and_ended_jobs_are_not_waited_for() {
    let rig = Rig::new(&shape(), FaultPlan::default());
    rig.engine.wait(&[], Duration::ZERO).unwrap();
    rig.engine.wait(&[5, 6], Duration::ZERO).unwrap();
    rig.store(1, &[0], &[0]);
    rig.engine.wait(&[1], LONG).unwrap();
    rig.engine.wait(&[1], Duration::ZERO).unwrap();
    assert_eq!(rig.engine.take_finished().len(), 1);
    rig.engine.wait(&[1], Duration::MAX).unwrap();
}

#[test]
fn a_wait_ends_when_another_thread_shuts_down() {
    let rig = Rig::new(
        &shape(),
        FaultPlan {
            stall_job: Some(1),
            ..FaultPlan::default()
        },
    );
    rig.store(1, &[0], &[0]);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| rig.engine.wait(&[1], LONG));
        assert_eq!(rig.engine.shutdown(SHORT).abandoned, [1]);
        waiter.join().unwrap().unwrap();
    });
    assert!(rig.engine.take_finished()[0].outcome.is_err());
}
