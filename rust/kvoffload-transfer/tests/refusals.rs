//! Bad jobs and bad settings: each is refused by name and changes nothing.

mod common;

use common::gate::GateRig;
use common::{Device, Job, LONG, Rig, Shape, config, copies_only};
use kvoffload_core::layout::LayoutError;
use kvoffload_core::plan::PlanError;
use kvoffload_core::pool::Slot;
use kvoffload_transfer::{
    EngineConfig, FaultPlan, HostConfig, HostEngine, JobKind, StartError, SubmitError,
};

fn shape() -> Shape {
    Shape::simple(8, 64, 8)
}

#[test]
fn jobs_the_layout_does_not_have_are_refused() {
    let rig = Rig::new(&shape(), FaultPlan::default());
    let refused = |kind, job: &Job| match rig.submit(kind, 7, job) {
        Err(SubmitError::Geometry { job: 7, source }) => source,
        other => panic!("{other:?}"),
    };
    for kind in [JobKind::Store, JobKind::Load] {
        let slot = refused(kind, &Job::simple(&[0, 1], &[0, 8]));
        assert!(matches!(slot, PlanError::UnknownSlot { slot, .. } if slot == Slot::new(8)));
        let block = refused(kind, &Job::simple(&[0, 8], &[0, 1]));
        assert!(matches!(block, PlanError::UnknownBlock { block: 8, .. }));
        let mut groups = Job::simple(&[0], &[0]);
        groups.group_sizes.push(0);
        assert!(matches!(
            refused(kind, &groups),
            PlanError::GroupCount { .. }
        ));
        let few = refused(kind, &Job::simple(&[0, 1], &[0]));
        assert!(matches!(few, PlanError::SlotCount { .. }));
        let mut sizes = Job::simple(&[0], &[0]);
        sizes.group_sizes[0] = 2;
        assert!(matches!(
            refused(kind, &sizes),
            PlanError::BlockCount { .. }
        ));
    }
    let twice = refused(JobKind::Store, &Job::simple(&[0, 1], &[2, 2]));
    assert!(matches!(twice, PlanError::SlotTwice { .. }));
    let twice = refused(JobKind::Load, &Job::simple(&[1, 1], &[2, 3]));
    assert!(matches!(twice, PlanError::BlockTwice { .. }));

    // The id was not used up, and nothing is live.
    assert_eq!(rig.engine.stats().stores.live_peak, 0);
    rig.store(7, &[0], &[0]);
    rig.finish_well(&[7]);
}

#[test]
fn an_id_is_in_use_until_its_end_is_taken() {
    let rig = Rig::new(
        &shape(),
        FaultPlan {
            stall_job: Some(1),
            ..FaultPlan::default()
        },
    );
    rig.store(1, &[0], &[0]);
    rig.load(2, &[3], &[3]);
    let job = Job::simple(&[5], &[5]);
    for kind in [JobKind::Store, JobKind::Load] {
        assert_eq!(
            rig.submit(kind, 1, &job),
            Err(SubmitError::Duplicate { job: 1 })
        );
    }
    rig.engine.wait(&[2], LONG).unwrap();
    assert_eq!(
        rig.submit(JobKind::Load, 2, &job),
        Err(SubmitError::Duplicate { job: 2 })
    );
    assert_eq!(rig.engine.take_finished().len(), 1);
    rig.load(2, &[5], &[5]);
    rig.finish_well(&[2]);
}

#[test]
fn queued_and_untaken_jobs_are_limited() {
    let limit = EngineConfig {
        max_jobs: 3,
        ..copies_only()
    };
    let rig = GateRig::new(&shape(), 1, &limit);
    for job in 1..=3 {
        rig.store(job, 0, job as u32);
    }
    let job = Job::simple(&[0], &[0]);
    let submit = || rig.engine.submit(JobKind::Load, 4, job.geometry());
    assert_eq!(submit(), Err(SubmitError::QueueFull { job: 4, limit: 3 }));
    rig.gates.open_all();
    rig.engine.wait(&[1, 2, 3], LONG).unwrap();
    assert_eq!(submit(), Err(SubmitError::QueueFull { job: 4, limit: 3 }));
    assert_eq!(rig.engine.take_finished().len(), 3);
    submit().unwrap();
}

#[test]
fn a_closed_engine_takes_nothing() {
    let rig = Rig::new(&shape(), FaultPlan::default());
    rig.engine.shutdown(LONG);
    let job = Job::simple(&[0], &[0]);
    let refused = rig.submit(JobKind::Store, 4, &job).unwrap_err();
    assert_eq!(refused, SubmitError::Closed { job: 4 });
    assert_eq!(refused.job(), 4);
    assert!(refused.to_string().contains("job 4"));
}

#[test]
fn bad_settings_are_refused_by_name() {
    let device = Device::new(&shape());
    let start = |change: &dyn Fn(&mut HostConfig)| {
        let mut config = config(&shape(), &device, FaultPlan::default());
        change(&mut config);
        // SAFETY: the device is kept alive by the configuration; no job is submitted.
        unsafe { HostEngine::new(config) }.map(drop)
    };
    start(&|_| {}).unwrap();
    let error = start(&|config| config.num_slots = 0).unwrap_err();
    assert!(
        matches!(&error, StartError::Layout(LayoutError::Zero { field }) if field == "num_slots")
    );
    let error = start(&|config| config.slot_bytes = 8).unwrap_err();
    assert!(matches!(
        error,
        StartError::Layout(LayoutError::SlotTooSmall { needed: 64, .. })
    ));
    let error = start(&|config| config.tensors[0].address = 0).unwrap_err();
    assert!(matches!(
        error,
        StartError::Address {
            tensor: 0,
            bytes: 512,
            ..
        }
    ));
    let error = start(&|config| config.tensors[0].address = usize::MAX - 100).unwrap_err();
    assert!(matches!(error, StartError::Address { tensor: 0, .. }));
    let error = start(&|config| config.engine.max_jobs = 0).unwrap_err();
    assert!(matches!(error, StartError::Zero { field: "max_jobs" }));
    let error = start(&|config| config.slot_bytes = 1 << 50).unwrap_err();
    let StartError::TooLarge {
        needed, available, ..
    } = &error
    else {
        panic!("{error:?}")
    };
    assert!(*needed == 8 << 50 && available < needed);
    assert!(error.to_string().contains("cpu_bytes_to_use"), "{error}");
}
