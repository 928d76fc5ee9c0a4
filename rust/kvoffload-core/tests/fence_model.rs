//! The fence against a list of all uses: whoever conflicts with an earlier job waits for it, itself or
//! by way of others, and nobody waits without a conflict.

use std::collections::{BTreeMap, BTreeSet};

use kvoffload_core::fence::{Fence, Ticket, Use};
use proptest::prelude::*;

const RESOURCES: usize = 6;

#[derive(Clone, Debug)]
enum Step {
    /// A job that reads some resources of the first half and writes some of the second, or the other
    /// way round.
    Join(bool, Vec<usize>, Vec<usize>),
    /// One of the jobs that wait for nobody leaves.
    Leave(prop::sample::Index),
}

struct Live {
    ticket: Ticket,
    modes: [Use; 2],
    uses: [Vec<usize>; 2],
    waits: BTreeSet<u64>,
}

impl Live {
    fn all(&self) -> impl Iterator<Item = (usize, Use)> {
        (0..2).flat_map(move |half| {
            self.uses[half]
                .iter()
                .map(move |&id| (id, self.modes[half]))
        })
    }

    fn conflicts(&self, other: &Self) -> bool {
        self.all().any(|(id, mode)| {
            let both = |(a, m): (usize, Use)| a == id && (m == Use::Write || mode == Use::Write);
            other.all().any(both)
        })
    }
}

fn step() -> impl Strategy<Value = Step> {
    let ids = |from: usize| prop::collection::vec(from..from + RESOURCES / 2, 0..4);
    prop_oneof![
        3 => (any::<bool>(), ids(0), ids(RESOURCES / 2))
            .prop_map(|(store, a, b)| Step::Join(store, a, b)),
        2 => any::<prop::sample::Index>().prop_map(Step::Leave),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn jobs_wait_for_those_they_conflict_with(steps in prop::collection::vec(step(), 1..60)) {
        let mut fence = Fence::new(RESOURCES);
        let mut live: BTreeMap<u64, Live> = BTreeMap::new();
        for (job, step) in (0..).zip(steps) {
            match step {
                Step::Join(store, first, second) => {
                    let modes = if store { [Use::Write, Use::Read] } else { [Use::Read, Use::Write] };
                    let ticket = fence.join(job);
                    let mut found = Vec::new();
                    fence.enter(ticket, modes[0], first.iter().copied(), &mut found);
                    fence.enter(ticket, modes[1], second.iter().copied(), &mut found);
                    let waits: BTreeSet<u64> = found.iter().copied().collect();
                    prop_assert!(found.is_sorted() && waits.len() == found.len());
                    let new = Live { ticket, modes, uses: [first, second], waits };
                    // All whom it waits for in the end.
                    let mut reached = new.waits.clone();
                    while let Some(more) = reached
                        .iter()
                        .flat_map(|job| &live[job].waits)
                        .find(|job| !reached.contains(job))
                    {
                        reached.insert(*more);
                    }
                    for (id, other) in &live {
                        let conflicts = new.conflicts(other);
                        prop_assert!(!conflicts || reached.contains(id), "{job} and {id}");
                        prop_assert!(conflicts || !new.waits.contains(id), "{job} and {id}");
                    }
                    live.insert(job, new);
                }
                Step::Leave(which) => {
                    let free: Vec<u64> = live
                        .iter()
                        .filter(|(_, job)| job.waits.is_empty())
                        .map(|(&id, _)| id)
                        .collect();
                    if free.is_empty() {
                        continue;
                    }
                    let id = free[which.index(free.len())];
                    let gone = live.remove(&id).unwrap();
                    fence.leave(gone.ticket, gone.uses.into_iter().flatten());
                    for job in live.values_mut() {
                        job.waits.remove(&id);
                    }
                }
            }
            prop_assert_eq!(fence.num_jobs(), live.len());
        }
    }
}
