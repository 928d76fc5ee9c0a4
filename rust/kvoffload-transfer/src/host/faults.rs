//! Delays and faults that the host backend makes on purpose: for tests only.

use std::time::Duration;

use kvoffload_core::jobs::JobKind;

/// What loads copy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LoadFault {
    /// What they should.
    #[default]
    Copy,
    /// Nothing, and report success: a control that must be noticed.
    Nothing,
    /// The bytes of the next slot, the first for the last.
    Neighbour,
}

/// Which faults to make. The default makes none. All choices follow from the seed and from how many
/// jobs of a direction have started, never from the clock.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FaultPlan {
    /// Seed of the delays.
    pub seed: u64,
    /// Longest pause, in microseconds, before a job's first byte and again half-way; 0: no pauses.
    pub max_delay_us: u64,
    /// What loads copy.
    pub loads: LoadFault,
    /// Every n-th store fails half-way (if it copies anything); 0: none.
    pub fail_every_store: u64,
    /// Every n-th load fails half-way (if it copies anything); 0: none.
    pub fail_every_load: u64,
    /// This job never ends, unless it is cancelled; only the end of a shutdown's deadline frees its
    /// thread.
    pub stall_job: Option<u64>,
    /// Every n-th store is followed by the flip of one bit in its first slot; 0: none.
    pub corrupt_every_store: u64,
}

/// The faults of one job.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct JobFaults {
    pub(crate) pause_before: Duration,
    pub(crate) pause_half_way: Duration,
    pub(crate) fail: bool,
    pub(crate) stall: bool,
    pub(crate) corrupt: bool,
}

/// Deals out the faults of one direction, job by job.
#[derive(Debug)]
pub(crate) struct Injector {
    kind: JobKind,
    plan: FaultPlan,
    random: u64,
    jobs: u64,
}

impl Injector {
    pub(crate) fn new(kind: JobKind, plan: FaultPlan) -> Self {
        // The two directions draw different numbers from one seed.
        let random = plan.seed ^ u64::from(kind == JobKind::Load) << 63;
        Self {
            kind,
            plan,
            random,
            jobs: 0,
        }
    }

    /// The faults of the next job.
    pub(crate) fn next(&mut self, job: u64) -> JobFaults {
        self.jobs += 1;
        let every = |n: u64| n != 0 && self.jobs.is_multiple_of(n);
        let (fail, corrupt) = match self.kind {
            JobKind::Store => (
                every(self.plan.fail_every_store),
                every(self.plan.corrupt_every_store),
            ),
            JobKind::Load => (every(self.plan.fail_every_load), false),
        };
        JobFaults {
            fail,
            corrupt,
            stall: self.plan.stall_job == Some(job),
            pause_before: self.pause(),
            pause_half_way: self.pause(),
        }
    }

    /// Between nothing and the longest pause.
    fn pause(&mut self) -> Duration {
        if self.plan.max_delay_us == 0 {
            return Duration::ZERO;
        }
        // splitmix64
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Duration::from_micros((z ^ (z >> 31)) % self.plan.max_delay_us.saturating_add(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_faults() {
        let plan = FaultPlan {
            seed: 7,
            max_delay_us: 500,
            fail_every_store: 3,
            ..Default::default()
        };
        let deal = |kind| -> Vec<JobFaults> {
            let mut injector = Injector::new(kind, plan.clone());
            (0..9).map(|job| injector.next(job)).collect()
        };
        assert_eq!(deal(JobKind::Store), deal(JobKind::Store));
        assert_ne!(deal(JobKind::Store), deal(JobKind::Load));
        let stores = deal(JobKind::Store);
        let failing: Vec<_> = (1..=9).filter(|n| stores[n - 1].fail).collect();
        assert_eq!(failing, [3, 6, 9]);
        assert!(
            stores
                .iter()
                .all(|faults| faults.pause_before <= Duration::from_micros(500))
        );
        assert!(stores.iter().any(|faults| !faults.pause_half_way.is_zero()));
        assert!(deal(JobKind::Load).iter().all(|faults| !faults.fail));
    }

    #[test]
    fn no_plan_no_faults() {
        let mut injector = Injector::new(JobKind::Store, FaultPlan::default());
        assert!((0..100).all(|job| injector.next(job) == JobFaults::default()));
    }
}
