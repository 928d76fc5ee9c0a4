//! An engine that does what vLLM's does, with content instead of numbers: what a block or a slot holds
//! says which tokens of which group it is the KV of, and with which weights it was computed.

mod gpu;
mod reference;
mod requests;
mod schedule;
mod worker;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvoffload_core::jobs::{JobId, JobKind};
use kvoffload_core::manager::{Clock, Config, Manager, PolicyKind};
use kvoffload_core::pool::{Slot, SlotState};
use kvoffload_core::requests::{GroupConfig, RequestStats, Requests, RequestsConfig};

use gpu::Gpu;
use requests::Request;
use worker::{Content, Worker};

pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (word ^ (word >> 31)) % n
    }

    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) groups: Vec<GroupConfig>,
    pub(crate) blocks_per_chunk: u32,
    pub(crate) ranks: u32,
    pub(crate) one_region: bool,
    pub(crate) blocks: u32,
    pub(crate) slots: u32,
    pub(crate) prompt_only: bool,
    pub(crate) share_loads: bool,
    pub(crate) arc: bool,
    pub(crate) max_jobs: usize,
    /// Copies that fail, in percent.
    pub(crate) failures: u64,
    pub(crate) seed: u64,
}

/// A job that some rank has not reported.
struct Live {
    kind: JobKind,
    slots: Vec<Slot>,
    void: bool,
}

pub(crate) struct Engine {
    setup: Setup,
    groups: Vec<GroupConfig>,
    pub(crate) offload: Requests,
    random: Random,
    clock: Arc<AtomicU64>,
    epoch: u32,
    gpu: Gpu,
    workers: Vec<Worker>,
    live: HashMap<JobId, Live>,
    /// Reports on their way, with the steps they take.
    reports: Vec<(JobId, u32, Result<(), String>, u64)>,
    reported: Vec<(JobId, u32)>,
    requests: Vec<Request>,
    running: Vec<u64>,
    waiting: VecDeque<u64>,
    /// Preempted, but not yet said.
    preempted: Vec<u64>,
    /// Blocks of requests that were aborted while they were loaded.
    held: HashMap<u64, Vec<Vec<u32>>>,
    next: u64,
    /// The hash of a prefix, to the one that is a unit shorter, and its length.
    prefixes: HashMap<u64, (u64, u64)>,
    /// The load that is asked for is not what was promised: it may need other chunks.
    shrunk: HashSet<u64>,
    /// The first job since the last reset.
    valid_from: u64,
    pub(crate) preemptions: u64,
}

impl Engine {
    pub(crate) fn new(setup: Setup) -> Self {
        let clock = Arc::new(AtomicU64::new(0));
        let millis = Arc::clone(&clock);
        let clock_of = Clock::new(move || Duration::from_millis(millis.load(Ordering::Relaxed)));
        let manager = Manager::new(Config {
            policy: if setup.arc {
                PolicyKind::Arc
            } else {
                PolicyKind::Lru
            },
            partial_admission: true,
            reasons: true,
            events: true,
            clock: clock_of.clone(),
            ..Config::new(setup.slots)
        })
        .unwrap();
        let unit = setup.groups.iter().map(|group| group.tokens_per_block);
        let unit = unit.min().unwrap();
        let config = RequestsConfig {
            groups: setup.groups.clone(),
            blocks_per_chunk: setup.blocks_per_chunk,
            tokens_per_hash: unit,
            num_ranks: setup.ranks,
            one_region: setup.one_region,
            max_jobs: setup.max_jobs,
            prompt_only: setup.prompt_only,
            share_loads: setup.share_loads,
            defer_deadline: Duration::from_secs(3),
            clock: clock_of,
        };
        Self {
            groups: setup.groups.clone(),
            offload: Requests::new(config, manager).unwrap(),
            random: Random(setup.seed),
            clock,
            epoch: 0,
            gpu: Gpu::new(setup.blocks),
            workers: (0..setup.ranks)
                .map(|_| Worker::new(setup.blocks, setup.slots, setup.blocks_per_chunk))
                .collect(),
            live: HashMap::new(),
            reports: Vec::new(),
            reported: Vec::new(),
            requests: Vec::new(),
            running: Vec::new(),
            waiting: VecDeque::new(),
            preempted: Vec::new(),
            held: HashMap::new(),
            next: 0,
            prefixes: HashMap::new(),
            shrunk: HashSet::new(),
            valid_from: 0,
            preemptions: 0,
            setup,
        }
    }

    pub(crate) fn uids(&self) -> Vec<u64> {
        self.requests.iter().map(|request| request.uid).collect()
    }

    pub(crate) fn stats(&self) -> RequestStats {
        *self.offload.stats()
    }

    /// The number of the next job.
    fn next_job(&self) -> u64 {
        self.stats().loads.begun + self.stats().stores.begun
    }

    /// Tokens under one hash.
    fn unit(&self) -> u64 {
        let sizes = self.groups.iter().map(|group| group.tokens_per_block);
        sizes.min().unwrap().into()
    }

    fn size(&self, group: usize) -> u64 {
        self.groups[group].tokens_per_block.into()
    }

    /// The prefix cache is emptied; what is in the pool stays.
    pub(crate) fn forget(&mut self) {
        self.gpu.reset();
    }

    /// The weights change. With `preempt`, running requests start again.
    pub(crate) fn reset(&mut self, preempt: bool) {
        self.epoch += 1;
        self.gpu.reset();
        if preempt {
            while let Some(&last) = self.running.last() {
                self.preempt(last);
            }
        }
        for request in &mut self.requests {
            request.epoch = None;
        }
        self.live.values_mut().for_each(|job| job.void = true);
        self.valid_from = self.next_job();
        self.offload.reset(true);
        assert!(self.offload.manager().dump().keys.is_empty());
        self.check();
    }

    /// Reports arrive: in any order, some late, some twice.
    fn take_reports(&mut self) {
        for (rank, worker) in (0..).zip(&mut self.workers) {
            for (job, outcome) in worker.reports.drain(..) {
                let late = self.random.below(3);
                self.reports.push((job, rank, outcome, late));
            }
        }
        let mut at = 0;
        while at < self.reports.len() {
            let pick = at + self.random.below((self.reports.len() - at) as u64) as usize;
            self.reports.swap(at, pick);
            if self.reports[at].3 > 0 {
                self.reports[at].3 -= 1;
                at += 1;
                continue;
            }
            let (job, rank, outcome, _) = self.reports.swap_remove(at);
            self.report(job, rank, outcome);
            if self.random.chance(10) {
                self.reported.push((job, rank));
            }
        }
        if self.random.chance(20)
            && let Some((job, rank)) = self.reported.pop()
        {
            let before = self.offload.stats().stray_reports;
            assert!(self.offload.report(job, rank, Ok(())).is_err());
            assert_eq!(self.offload.stats().stray_reports, before + 1);
        }
    }

    fn report(&mut self, job: JobId, rank: u32, outcome: Result<(), String>) {
        let ended = self.offload.report(job, rank, outcome).unwrap();
        self.offload.validate();
        let Some(ended) = ended else {
            return;
        };
        let live = self.live.remove(&job).expect("ends once");
        assert_eq!((ended.kind, ended.void), (live.kind, live.void));
        if ended.kind == JobKind::Load {
            let failed = ended.void || !ended.failures.is_empty();
            self.loaded(job, ended.request.as_deref(), failed);
        }
    }

    /// Rule 1: whatever can be read holds what its key says, on every rank.
    fn check(&self) {
        self.offload.validate();
        for chunk in self.offload.manager().dump().keys {
            if chunk.state != SlotState::Ready {
                continue;
            }
            let (hash, id) = chunk.key.as_bytes().split_at(8);
            let hash = u64::from_le_bytes(hash.try_into().unwrap());
            let id = u32::from_be_bytes(id.try_into().unwrap());
            let group = self.groups.iter().position(|group| group.id == id).unwrap();
            let mut ends = vec![hash];
            for _ in 1..self.setup.blocks_per_chunk {
                let mut end = ends[ends.len() - 1];
                for _ in 0..self.size(group) / self.unit() {
                    end = self.prefixes[&end].0;
                }
                ends.push(end);
            }
            for (rank, worker) in self.workers.iter().enumerate() {
                let held = worker.host[chunk.slot.index()].iter().rev();
                for (held, &end) in held.zip(&ends) {
                    let right = Content {
                        group,
                        end,
                        filled: self.size(group),
                        epoch: self.epoch,
                    };
                    assert_eq!(
                        *held,
                        Some(right),
                        "slot {:?} of rank {rank}, {} tokens",
                        chunk.slot,
                        self.prefixes[&hash].1
                    );
                }
            }
        }
    }

    /// New jobs share no slot with one under way that this could disturb, and store what is wanted.
    fn begun(&mut self, orders: &kvoffload_core::requests::Orders) {
        let keys = self.offload.manager().dump().keys;
        for order in orders.loads.iter().chain(&orders.stores) {
            let slots = order.slots.to_vec();
            let expected = !self.shrunk.remove(&order.id.0) && order.id.0 >= self.valid_from;
            assert!(!order.is_hollow() || !expected, "what hits can be loaded");
            if order.is_hollow() {
                self.hollowed(order.id, &order.request);
            }
            let distinct: HashSet<_> = slots.iter().collect();
            assert_eq!(distinct.len(), slots.len());
            for other in self.live.values() {
                let stores = other.kind == JobKind::Store || order.kind == JobKind::Store;
                // A rank orders a job after those that a reset has voided, but only its own.
                let read_by_others = self.setup.one_region && other.kind == JobKind::Load;
                if stores && (!other.void || read_by_others) {
                    assert!(!other.slots.iter().any(|slot| slots.contains(slot)));
                }
            }
            // Jobs from before a reset may be in the first orders after it.
            let void = order.id.0 < self.valid_from;
            if order.kind == JobKind::Store && !void {
                for slot in &slots {
                    let key = keys.iter().find(|key| key.slot == *slot).unwrap();
                    let hash = u64::from_le_bytes(key.key.as_bytes()[..8].try_into().unwrap());
                    self.stored(order.id, &order.request, self.prefixes[&hash].1);
                }
            }
            self.live.insert(
                order.id,
                Live {
                    kind: order.kind,
                    slots,
                    void,
                },
            );
        }
    }

    /// Everything ends; what is then in use is in use for ever.
    pub(crate) fn drain(&mut self) {
        while let Some(request) = self.requests.first().map(|request| request.uid) {
            self.abort(request);
        }
        let mut steps = 0;
        while self.offload.has_work() {
            self.step();
            steps += 1;
            assert!(steps < 100, "jobs never end");
        }
        assert!(self.live.is_empty() && self.held.is_empty());
        assert_eq!(
            (self.offload.num_jobs(), self.offload.num_requests()),
            (0, 0)
        );
        let stats = self.offload.manager().stats();
        assert_eq!((stats.pinned, stats.writing), (0, 0));
        assert_eq!(stats.free + stats.ready, stats.slots);
        assert_eq!(stats.stale_completions, 0);
        assert_eq!(self.gpu.num_free(), self.setup.blocks as usize);
        let ends = [self.stats().loads, self.stats().stores];
        for counts in ends {
            assert_eq!(counts.begun, counts.done + counts.failed + counts.voided);
        }
        self.check();
    }
}
