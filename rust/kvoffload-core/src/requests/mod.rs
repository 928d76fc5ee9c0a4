//! What a connector's scheduler side knows of its requests, and what it decides for them.
//!
//! For each request and KV group: the keys of its chunks, the GPU blocks it has, how far it has been
//! stored. One engine step makes these calls, in this order:
//!
//! 1. for a request that waits: [`Requests::lookup`], and if it gets blocks [`Requests::allocated`],
//!    which may begin a load;
//! 2. [`Requests::preempted`] and [`Requests::rewritten`], then for each request that runs [`Requests::scheduled`] (its new
//!    blocks), then for each of them [`Requests::store`], which may begin a store of what this step
//!    computes: the workers copy when the step after it begins;
//! 3. [`Requests::take_orders`]: what the workers are told;
//! 4. [`Requests::report`] for what the workers did, and [`Requests::finish`] for requests that end.
//!
//! Nothing here waits, and nothing is an assertion about what engine or workers do: what cannot be
//! is an error that changes nothing, or a load that fails, which costs a recompute.
//!
//! A block that a store still reads may be given to another request by the engine, which knows nothing
//! of the copy. Each block carries the number of stores that read it, so that this is seen when its
//! new owner is announced ([`Orders::flush`]); and a stamp of its last allocation, so that a
//! request that lost it (a sliding window moves on) never stores another one's data.

mod blocks;
mod config;
mod group;
mod hit;
mod load;
mod lookup;
mod orders;
mod report;
mod stats;
mod store;
mod table;

pub use config::{GroupConfig, RequestError, RequestsConfig, Span};
pub use load::GivenBlocks;
pub use lookup::Lookup;
pub use orders::{JobOrder, Orders};
pub use report::Ended;
pub use stats::{Deferral, MissReason, RequestStats};
pub use table::{NewRequest, RequestId};

use crate::jobs::{JobId, JobKind, JobTable};
use crate::manager::{Manager, Prepared};
use crate::pool::Slot;
use blocks::Blocks;
use group::Group;
use orders::JobBody;
use stats::Pace;
use table::Table;

/// The requests of one engine, with its manager and its jobs.
#[derive(Debug)]
pub struct Requests {
    config: RequestsConfig,
    groups: Vec<Group>,
    manager: Manager,
    table: Table,
    jobs: JobTable<JobBody>,
    blocks: Blocks,
    orders: Orders,
    stats: RequestStats,
    pace: Pace,
    /// Working memory, so that a step allocates little.
    prepared: Prepared,
    slots: Vec<Slot>,
    /// Loads that a reset has voided and that some rank may still make. It has freed their slots. A
    /// rank orders its own copies, but of ranks that share one region one may store to a slot while
    /// another still reads it: those store nothing until such loads are over.
    void_loads: usize,
}

impl Requests {
    /// An empty table over `manager`, which should admit stores in part and remember reasons.
    ///
    /// # Errors
    /// A setting that makes no sense, with its name.
    pub fn new(config: RequestsConfig, manager: Manager) -> Result<Self, RequestError> {
        config.check()?;
        let groups = config
            .groups
            .iter()
            .map(|group| Group::new(*group, config.blocks_per_chunk, config.tokens_per_hash))
            .collect();
        Ok(Self {
            // Only stores are limited: a request that waits for a load must get one.
            jobs: JobTable::new(config.num_ranks, usize::MAX)?,
            groups,
            manager,
            table: Table::default(),
            blocks: Blocks::default(),
            orders: Orders::default(),
            stats: RequestStats::default(),
            pace: Pace::default(),
            prepared: Prepared::default(),
            void_loads: 0,
            slots: Vec::new(),
            config,
        })
    }

    /// The host pool's bookkeeping.
    pub fn manager(&self) -> &Manager {
        &self.manager
    }

    /// Number of KV groups.
    pub fn num_groups(&self) -> usize {
        self.groups.len()
    }

    /// Counts since the start.
    pub fn stats(&self) -> &RequestStats {
        &self.stats
    }

    /// Whether something is under way that needs the engine to go on stepping.
    pub fn has_work(&self) -> bool {
        !self.jobs.is_empty() || !self.orders.is_empty()
    }

    /// Requests that have not ended, and those that have, but not their jobs.
    pub fn num_requests(&self) -> usize {
        self.table.len()
    }

    /// Jobs that some rank has still to report.
    pub fn num_jobs(&self) -> usize {
        self.jobs.len()
    }

    /// What the workers are to be told with this step.
    pub fn take_orders(&mut self) -> Orders {
        std::mem::take(&mut self.orders)
    }

    /// Empties the pool: the model's weights changed, say. Nothing that was computed or loaded before
    /// is stored from now on, or found in the pool.
    ///
    /// Loads under way will fail, and their requests recompute, unless a worker has reported them
    /// meanwhile; without `fail_loads`, for engines that cannot do that, they end as they would have.
    /// Answers how many loads there are.
    pub fn reset(&mut self, fail_loads: bool) -> usize {
        self.manager.reset();
        let loads = self
            .jobs
            .iter()
            .filter(|job| !job.void && job.kind == JobKind::Load);
        let loads: Vec<JobId> = loads.map(|job| job.id).collect();
        self.jobs.void_all();
        self.table.taint();
        let under_way = loads.len();
        self.void_loads += under_way;
        if fail_loads {
            self.orders.void.extend(loads);
            self.orders.void.sort_unstable();
        }
        under_way
    }

    /// Checks what ties requests, jobs and blocks together; for tests.
    ///
    /// # Panics
    /// When something does not hold.
    pub fn validate(&self) {
        self.manager.validate();
        self.table.validate(&self.jobs);
        self.blocks.validate(&self.jobs);
    }
}
