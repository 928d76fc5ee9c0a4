//! A fault is reported once, under its job's name, and hurts nobody else.

mod common;

use common::gate::{GateRig, Place};
use common::{Job, LONG, Rig, Shape, config, copies_only};
use kvoffload_core::pool::Slot;
use kvoffload_transfer::{CopyError, FaultPlan, HostEngine, JobKind, LoadFault, StartError};

const PAGE: usize = 64;

fn shape() -> Shape {
    Shape::simple(8, PAGE as u64, 8)
}

fn page(bytes: &[u8], block: usize) -> &[u8] {
    &bytes[block * PAGE..(block + 1) * PAGE]
}

#[test]
fn g5_each_failure_is_reported_once_and_the_rest_goes_on() {
    let rig = Rig::new(
        &shape(),
        FaultPlan {
            fail_every_store: 2,
            ..FaultPlan::default()
        },
    );
    let old = rig.device.bytes(0);
    for job in 0..6 {
        rig.store(job, &[job as u32], &[job as u32]);
    }
    let ends = rig.finish(&[0, 1, 2, 3, 4, 5]);
    for (job, end) in (0..).zip(&ends) {
        if job % 2 == 1 {
            let error = end.outcome.clone().unwrap_err();
            assert_eq!(
                (error.job(), error.slot()),
                (job, Some(Slot::new(job as u32)))
            );
            assert!(error.to_string().contains("injected"), "{error}");
            assert_eq!(end.bytes, 0);
        } else {
            assert_eq!((end.outcome.clone(), end.bytes), (Ok(()), PAGE as u64));
        }
    }
    assert!(rig.engine.take_finished().is_empty());
    let stats = rig.engine.stats();
    assert_eq!(
        (stats.stores.jobs, stats.stores.failures, stats.stores.live),
        (3, 3, 0)
    );
    assert_eq!(stats.stores.bytes, 3 * PAGE as u64);

    // What was stored comes back; half of what was not did get there.
    rig.load(10, &[4, 5], &[0, 1]);
    rig.finish_well(&[10]);
    let new = rig.device.bytes(0);
    assert_eq!(page(&new, 0), page(&old, 4));
    assert_eq!(page(&new, 1)[..PAGE / 2], page(&old, 5)[..PAGE / 2]);
    assert_eq!(page(&new, 1)[PAGE / 2..], [0; PAGE / 2]);
}

#[test]
fn failures_can_be_taken_one_at_a_time() {
    let rig = Rig::new(
        &shape(),
        FaultPlan {
            fail_every_load: 3,
            ..FaultPlan::default()
        },
    );
    for job in 1..=7 {
        rig.load(job, &[0], &[job as u32]);
    }
    rig.engine.wait(&[1, 2, 3, 4, 5, 6, 7], LONG).unwrap();
    assert_eq!(rig.engine.take_finished_or_failure().unwrap_err().job, 3);
    // The id of a failure that was taken is free, those of ends that were not are in use.
    let job = Job::simple(&[1], &[1]);
    assert!(rig.engine.submit_store(3, job.geometry()).is_ok());
    assert!(rig.engine.submit_store(6, job.geometry()).is_err());
    rig.engine.wait(&[3], LONG).unwrap();
    assert_eq!(rig.engine.take_finished_or_failure().unwrap_err().job, 6);
    let ends = rig.engine.take_finished_or_failure().unwrap();
    assert_eq!(
        ends.iter().map(|end| end.job).collect::<Vec<_>>(),
        [1, 2, 4, 5, 7, 3]
    );
    assert!(rig.engine.take_finished_or_failure().unwrap().is_empty());
}

#[test]
fn loads_that_copy_nothing_report_success() {
    let rig = Rig::new(
        &shape(),
        FaultPlan {
            loads: LoadFault::Nothing,
            ..FaultPlan::default()
        },
    );
    let old = rig.device.bytes(0);
    rig.store(1, &[0], &[0]);
    rig.load(2, &[0], &[5]);
    rig.finish_well(&[1, 2]);
    assert_eq!(rig.device.bytes(0), old);
}

#[test]
fn loads_of_the_neighbour_get_another_slot() {
    let rig = Rig::new(
        &shape(),
        FaultPlan {
            loads: LoadFault::Neighbour,
            ..FaultPlan::default()
        },
    );
    let old = rig.device.bytes(0);
    let all: Vec<u32> = (0..8).collect();
    rig.store(1, &all, &all);
    rig.load(2, &all, &all);
    rig.finish_well(&[1, 2]);
    let new = rig.device.bytes(0);
    for block in 0..8 {
        assert_eq!(page(&new, block), page(&old, (block + 1) % 8));
    }

    let one_slot = Shape::simple(8, 64, 1);
    let device = common::Device::new(&one_slot);
    let faults = FaultPlan {
        loads: LoadFault::Neighbour,
        ..FaultPlan::default()
    };
    // SAFETY: the device is kept alive by the configuration.
    let refused = unsafe { HostEngine::new(config(&one_slot, &device, faults)) };
    assert!(
        matches!(refused, Err(StartError::Setting { field: "loads", .. })),
        "{refused:?}"
    );
}

#[test]
fn a_panic_ends_its_job_with_an_error_and_not_the_thread() {
    for place in [Place::Submit, Place::Retire] {
        let rig = GateRig::new(&shape(), 1, &copies_only());
        rig.gates.open_all();
        for job in [2, 12] {
            rig.gates.panic_in(job, place);
        }
        for job in 1..=3 {
            rig.store(job, job as u32, job as u32);
            rig.load(10 + job, 4, 4);
        }
        rig.engine.wait(&[1, 2, 3, 11, 12, 13], LONG).unwrap();
        let mut ends = rig.engine.take_finished();
        ends.sort_by_key(|end| end.job);
        assert_eq!(ends.len(), 6);
        for end in ends {
            if [2, 12].contains(&end.job) {
                let Err(CopyError::Panicked { job, message }) = end.outcome else {
                    panic!("{end:?}")
                };
                assert_eq!(job, end.job);
                assert!(message.contains("on purpose"), "{message}");
            } else {
                assert_eq!(end.outcome, Ok(()));
            }
        }
        assert_eq!(rig.engine.stats().panics, 2);
    }
}

#[test]
fn a_panic_in_a_poll_ends_the_jobs_the_backend_holds() {
    let rig = GateRig::new(&shape(), 3, &copies_only());
    rig.gates.panic_in(1, Place::Poll);
    for job in 1..=4 {
        rig.store(job, job as u32, job as u32);
    }
    rig.gates.wait_started(3);
    rig.gates.open(&[1, 4]);
    rig.engine.wait(&[1, 2, 3, 4], LONG).unwrap();
    let mut ends = rig.engine.take_finished();
    ends.sort_by_key(|end| end.job);
    let failed: Vec<u64> = ends
        .iter()
        .filter(|end| end.outcome.is_err())
        .map(|end| end.job)
        .collect();
    // Job 1 had ended before the panic, job 4 had not started.
    assert_eq!(failed, [2, 3]);
    assert_eq!(ends.len(), 4);
    assert_eq!(rig.engine.stats().stores.live, 0);
}

#[test]
fn a_failed_job_lets_those_that_waited_for_it_go_on() {
    let rig = Rig::new(
        &shape(),
        FaultPlan {
            fail_every_store: 1,
            max_delay_us: 3000,
            ..FaultPlan::default()
        },
    );
    rig.store(1, &[0], &[3]);
    rig.load(2, &[3], &[1]);
    let ends = rig.finish(&[1, 2]);
    assert!(ends[0].outcome.is_err() && ends[1].outcome.is_ok());
    assert_eq!(ends[1].kind, JobKind::Load);
}
