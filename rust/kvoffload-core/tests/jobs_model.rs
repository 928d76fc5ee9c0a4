//! The job table against a plain model.

use std::collections::{BTreeMap, BTreeSet};

use kvoffload_core::jobs::{Failure, Finished, Job, JobError, JobId, JobKind, JobTable, Report};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Op {
    Begin { load: bool, body: u32 },
    Report { job: u64, rank: u32, fails: bool },
    VoidAll,
}

fn op(num_ranks: u32) -> impl Strategy<Value = Op> {
    let begin = (any::<bool>(), any::<u32>());
    prop_oneof![
        3 => begin.prop_map(|(load, body)| Op::Begin { load, body }),
        // Few jobs are under way, so most reports are of these; some of unknown jobs and ranks.
        12 => (0..12u64, 0..num_ranks + 1, prop::bool::weighted(0.2))
            .prop_map(|(job, rank, fails)| Op::Report { job, rank, fails }),
        1 => Just(Op::VoidAll),
    ]
}

struct ModelJob {
    job: Job<u32>,
    left: BTreeSet<u32>,
    failures: Vec<Failure>,
}

proptest! {
    /// Every answer as in the model: reports in any order, twice, by unknown ranks, of unknown, of
    /// finished and of void jobs. An error changes nothing.
    #[test]
    fn the_table_does_what_the_model_does(
        (num_ranks, ops) in prop_oneof![1..4u32, 63..66u32, Just(130u32)]
            .prop_flat_map(|ranks| (Just(ranks), prop::collection::vec(op(ranks), 0..300))),
        limit in 1..6usize,
    ) {
        let mut table = JobTable::new(num_ranks, limit).unwrap();
        let mut live: BTreeMap<u64, ModelJob> = BTreeMap::new();
        let mut next = 0u64;
        for op in ops {
            match op {
                Op::Begin { load, body } => {
                    let kind = if load { JobKind::Load } else { JobKind::Store };
                    let job = Job { id: JobId(next), kind, void: false, body };
                    prop_assert_eq!(table.is_full(), live.len() == limit);
                    let begun = table.begin(kind, body);
                    if live.len() == limit {
                        prop_assert_eq!(begun, Err(JobError::Full { limit }));
                    } else {
                        prop_assert_eq!(begun, Ok(JobId(next)));
                        prop_assert_eq!(table.get(JobId(next)), Some(&job));
                        let left = (0..num_ranks).collect();
                        live.insert(next, ModelJob { job, left, failures: vec![] });
                        next += 1;
                    }
                }
                Op::Report { job, rank, fails } => {
                    let id = JobId((next + 2).saturating_sub(job));
                    let reason = format!("rank {rank} of job {id}");
                    let outcome = if fails { Err(reason.clone()) } else { Ok(()) };
                    let given = table.report(id, rank, outcome);
                    let expected = if rank >= num_ranks {
                        Err(JobError::UnknownRank { job: id, rank, num_ranks })
                    } else if let Some(entry) = live.get_mut(&id.0) {
                        if entry.left.remove(&rank) {
                            if fails {
                                entry.failures.push(Failure { rank, reason });
                            }
                            if entry.left.is_empty() {
                                let ModelJob { job, failures, .. } = live.remove(&id.0).unwrap();
                                Ok(Report::Finished(Finished { job, failures }))
                            } else {
                                Ok(Report::Pending { ranks_left: entry.left.len() as u32 })
                            }
                        } else {
                            Err(JobError::AlreadyReported { job: id, rank })
                        }
                    } else {
                        Err(JobError::UnknownJob { job: id })
                    };
                    prop_assert_eq!(given, expected);
                }
                Op::VoidAll => {
                    table.void_all();
                    live.values_mut().for_each(|entry| entry.job.void = true);
                }
            }
            prop_assert_eq!(table.len(), live.len());
            prop_assert_eq!(table.is_empty(), live.is_empty());
        }
        // Whatever happened, the jobs that are left end with the reports that are left.
        for (id, entry) in live {
            let mut last = None;
            for rank in entry.left {
                last = Some(table.report(JobId(id), rank, Ok(())).unwrap());
            }
            let expected = Finished { job: entry.job, failures: entry.failures };
            prop_assert_eq!(last, Some(Report::Finished(expected)));
        }
        prop_assert!(table.is_empty());
    }
}

#[test]
fn impossible_tables_and_jobs_are_refused() {
    assert_eq!(JobTable::<()>::new(0, 1).unwrap_err(), JobError::NoRanks);
    let none = JobTable::new(1, 0).unwrap().begin(JobKind::Load, ());
    assert_eq!(none, Err(JobError::Full { limit: 0 }));
}

/// E2: the first rank's report is not everybody's, and one rank's report twice is not two ranks'.
#[test]
fn a_job_is_over_when_every_rank_has_reported_it() {
    let mut table = JobTable::new(4, 8).unwrap();
    let job = table.begin(JobKind::Store, ()).unwrap();
    for (rank, ranks_left) in [(2, 3), (0, 2), (3, 1)] {
        assert_eq!(
            table.report(job, rank, Ok(())),
            Ok(Report::Pending { ranks_left })
        );
        let again = JobError::AlreadyReported { job, rank };
        assert_eq!(table.report(job, rank, Ok(())), Err(again));
    }
    let Ok(Report::Finished(finished)) = table.report(job, 1, Err("no driver".into())) else {
        panic!("all four have reported");
    };
    assert_eq!(
        finished.failures,
        [Failure {
            rank: 1,
            reason: "no driver".into()
        }]
    );
    assert_eq!(
        table.report(job, 1, Ok(())),
        Err(JobError::UnknownJob { job })
    );
}
