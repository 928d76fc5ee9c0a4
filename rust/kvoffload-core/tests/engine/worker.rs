//! One rank: the content of its GPU blocks and slots, and copies that run some time after their order.

use std::collections::HashSet;

use kvoffload_core::jobs::{JobId, JobKind};
use kvoffload_core::requests::{JobOrder, Orders};

use super::Random;

/// What a block holds: KV of the tokens up to the one whose prefix has the hash `end`, the last
/// `filled` of them, computed with the weights of an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Content {
    pub(crate) group: usize,
    pub(crate) end: u64,
    pub(crate) filled: u64,
    pub(crate) epoch: u32,
}

pub(crate) struct Copy {
    order: JobOrder,
    delay: u64,
    fails: bool,
}

pub(crate) struct Worker {
    pub(crate) gpu: Vec<Option<Content>>,
    pub(crate) host: Vec<Vec<Option<Content>>>,
    blocks_per_chunk: usize,
    /// Stores of the step that runs: they start when the next one begins.
    deferred: Vec<Copy>,
    /// In the order in which they were submitted.
    running: Vec<Copy>,
    void: HashSet<JobId>,
    pub(crate) reports: Vec<(JobId, Result<(), String>)>,
}

impl Worker {
    pub(crate) fn new(blocks: u32, slots: u32, blocks_per_chunk: u32) -> Self {
        let blocks_per_chunk = blocks_per_chunk as usize;
        Self {
            gpu: vec![None; blocks as usize + 1],
            host: vec![vec![None; blocks_per_chunk]; slots as usize],
            blocks_per_chunk,
            deferred: Vec::new(),
            running: Vec::new(),
            void: HashSet::new(),
            reports: Vec::new(),
        }
    }

    /// What happens before a step computes.
    pub(crate) fn begin_step(&mut self, orders: &Orders, random: &mut Random, failures: u64) {
        let mut copy = |order: &JobOrder| Copy {
            order: order.clone(),
            delay: random.below(5),
            fails: random.chance(failures),
        };
        self.running.append(&mut self.deferred);
        for store in orders.stores.iter().map(&mut copy) {
            if orders.flush.contains(&store.order.id) {
                self.running.push(store);
            } else {
                self.deferred.push(store);
            }
        }
        for &id in &orders.flush {
            self.force(id);
        }
        self.running.extend(orders.loads.iter().map(&mut copy));
        self.void.extend(&orders.void);
        self.progress();
    }

    /// Time passes: copies whose time has come are made.
    pub(crate) fn progress(&mut self) {
        let mut at = 0;
        while at < self.running.len() {
            let copy = &mut self.running[at];
            if copy.delay > 0 {
                copy.delay -= 1;
            } else if self.blocker(at).is_none() {
                self.execute(at);
                continue;
            }
            at += 1;
        }
    }

    /// The store that has not yet read `block`, among those begun before `before`.
    pub(crate) fn reader(&self, block: u32, before: JobId) -> Option<JobId> {
        let copies = self.running.iter().chain(&self.deferred);
        copies
            .map(|copy| &copy.order)
            .find(|order| {
                order.kind == JobKind::Store && order.id < before && order.blocks.contains(&block)
            })
            .map(|order| order.id)
    }

    /// An earlier copy that uses a slot of this one: slots are used in the order of submission.
    fn blocker(&self, at: usize) -> Option<usize> {
        let this = &self.running[at].order;
        self.running[..at].iter().position(|earlier| {
            let earlier = &earlier.order;
            let write = earlier.kind == JobKind::Store || this.kind == JobKind::Store;
            write && earlier.slots.iter().any(|slot| this.slots.contains(slot))
        })
    }

    fn force(&mut self, id: JobId) {
        while let Some(at) = self.running.iter().position(|copy| copy.order.id == id) {
            match self.blocker(at) {
                Some(earlier) => self.force(self.running[earlier].order.id),
                None => self.execute(at),
            }
        }
    }

    fn execute(&mut self, at: usize) {
        let Copy { order, fails, .. } = self.running.remove(at);
        let outcome = if order.is_hollow() {
            Err("hollow".to_owned())
        } else if fails {
            Err("injected".to_owned())
        } else if self.void.remove(&order.id) {
            Err("void".to_owned())
        } else {
            Ok(())
        };
        if !order.is_hollow() {
            self.copy(&order, fails);
        }
        self.reports.push((order.id, outcome));
    }

    fn copy(&mut self, order: &JobOrder, fails: bool) {
        let per_chunk = self.blocks_per_chunk;
        let mut blocks = order.blocks.iter();
        let mut slots = order.slots.iter();
        for (&size, &first) in order.group_sizes.iter().zip(&order.first_blocks) {
            let skip = first as usize % per_chunk;
            let mut slot = None;
            for nth in skip..skip + size as usize {
                if nth % per_chunk == 0 || slot.is_none() {
                    slot = slots.next().map(|slot| slot.index());
                }
                let slot = slot.expect("a slot for each chunk");
                let block = *blocks.next().expect("as many as the sizes say");
                let (gpu, host) = (
                    &mut self.gpu[block as usize],
                    &mut self.host[slot][nth % per_chunk],
                );
                match order.kind {
                    JobKind::Store => *host = gpu.filter(|_| !fails),
                    JobKind::Load => {
                        *gpu = host.filter(|_| !fails);
                        let reader = self.reader(block, order.id);
                        assert_eq!(reader, None, "a load writes block {block}");
                    }
                }
            }
        }
        assert!(slots.next().is_none() && blocks.next().is_none());
    }
}
