//! In which order jobs may use slots and blocks.
//!
//! A job's submit takes no longer than it must, so it only puts the job into the state's inbox. The
//! threads take jobs out of it, oldest first, and find out whom each has to wait for. That is done
//! under a lock of its own, which no caller ever takes: it is held for a time proportional to a job's
//! blocks and slots. **Lock order: this one, then the state's.**
//!
//! A job that comes while there is no other has nobody to wait for. What it uses is not noted before
//! another one comes: that takes 50 to 200 us for 4,096 blocks and slots (two virtual cores), in which
//! its copies could not start. The other one waits until both are noted.

use std::collections::HashMap;
use std::sync::Arc;

use kvoffload_core::fence::{Fence, Ticket, Use};
use kvoffload_core::jobs::JobKind;
use kvoffload_core::layout::KvLayout;
use kvoffload_core::pool::Slot;

use super::cancel::Party;
use super::job::JobIds;

/// Who uses which slot and which block.
#[derive(Debug)]
pub(super) struct Order {
    /// Of the slots, and behind them of the blocks.
    fence: Fence,
    num_slots: usize,
    /// A job of which the fence knows nothing but the ticket, because it is the only one.
    alone: Option<(Ticket, JobKind, Arc<JobIds>)>,
    /// False only in a test that shows what the fence is for.
    fences: bool,
    /// Working memory.
    blockers: Vec<u64>,
}

impl Order {
    pub(super) fn new(layout: &KvLayout, fences: bool) -> Self {
        let num_slots = layout.num_slots() as usize;
        Self {
            fence: Fence::new(num_slots + layout.max_blocks() as usize),
            num_slots,
            alone: None,
            fences,
            blockers: Vec::new(),
        }
    }

    /// A job takes its place behind all that came before; says whom it has to wait for.
    pub(super) fn enter(
        &mut self,
        job: u64,
        kind: JobKind,
        layout: &KvLayout,
        ids: &Arc<JobIds>,
    ) -> (Ticket, &[u64]) {
        self.blockers.clear();
        if let Some((ticket, kind, ids)) = self.alone.take() {
            self.note(ticket, kind, layout, &ids);
            debug_assert_eq!(self.blockers, [], "nobody was there before it");
        }
        let is_alone = self.fence.num_jobs() == 0;
        let ticket = self.fence.join(job);
        if is_alone {
            self.alone = Some((ticket, kind, Arc::clone(ids)));
        } else {
            self.note(ticket, kind, layout, ids);
        }
        if !self.fences {
            self.blockers.clear();
        }
        (ticket, &self.blockers)
    }

    /// Notes what a job uses, and whom it has to wait for.
    fn note(&mut self, ticket: Ticket, kind: JobKind, layout: &KvLayout, ids: &JobIds) {
        let [slot_use, block_use] = [JobKind::Store, JobKind::Load].map(|of| use_of(kind, of));
        let blocks = blocks(ids, layout, self.num_slots);
        let blockers = &mut self.blockers;
        self.fence.enter(ticket, slot_use, slots(ids), blockers);
        self.fence.enter(ticket, block_use, blocks, blockers);
    }

    /// A job is over.
    pub(super) fn leave(&mut self, ticket: Ticket, layout: &KvLayout, ids: &JobIds) {
        if self.alone.take_if(|(alone, ..)| *alone == ticket).is_some() {
            return self.fence.leave(ticket, []);
        }
        let blocks = blocks(ids, layout, self.num_slots);
        self.fence.leave(ticket, slots(ids).chain(blocks));
    }

    /// A job that has not started gives its place up, although those in `before`, which it waited for,
    /// are live: from now on everybody waits as if it had never come. `before` is in the order of
    /// submits; `after` are those who wait for it. Answers who of these has to wait for whom of those,
    /// each pair once.
    ///
    /// Only what it was to write matters. There its coming has hidden those before it from those after
    /// it, while a reader hides nobody.
    pub(super) fn withdraw(
        &mut self,
        party: &Party,
        before: &[Party],
        after: &[Party],
        layout: &KvLayout,
    ) -> Vec<(u64, u64)> {
        let Some(ticket) = party.ticket else {
            return Vec::new(); // Nobody has seen it.
        };
        let num_slots = self.num_slots;
        let kind = party.kind;
        let written = |ids: &JobIds, visit: &mut dyn FnMut(usize)| match kind {
            JobKind::Store => slots(ids).for_each(visit),
            JobKind::Load => blocks(ids, layout, num_slots).for_each(visit),
        };
        // Of all that it was to write: who of those before uses it, as positions in ascending order.
        let mut users: HashMap<usize, Vec<usize>> = HashMap::new();
        if !before.is_empty() {
            written(&party.ids, &mut |id| {
                users.entry(id).or_default();
            });
        }
        for (at, earlier) in before.iter().enumerate() {
            written(&earlier.ids, &mut |id| {
                if let Some(users) = users.get_mut(&id)
                    && users.last() != Some(&at)
                {
                    users.push(at);
                }
            });
        }
        let hidden = users.iter();
        let hidden: Vec<(&usize, &Vec<usize>)> = hidden
            .filter(|(id, _)| self.fence.is_last_writer(ticket, **id))
            .collect();
        self.leave(ticket, layout, &party.ids);
        for (&id, earlier) in hidden {
            for earlier in earlier.iter().map(|&at| &before[at]) {
                if let Some(ticket) = earlier.ticket {
                    self.fence.restore(ticket, use_of(earlier.kind, kind), id);
                }
            }
        }
        let mut waits = Vec::new();
        for later in after.iter().filter(|_| !before.is_empty()) {
            written(&later.ids, &mut |id| {
                let earlier = users.get(&id).into_iter().flatten().map(|&at| &before[at]);
                // Two that only read do not conflict.
                let conflicts =
                    earlier.filter(|earlier| earlier.kind == kind || later.kind == kind);
                waits.extend(conflicts.map(|earlier| (later.job, earlier.job)));
            });
        }
        waits.sort_unstable();
        waits.dedup();
        waits
    }
}

/// What a job of a kind does with that which jobs of kind `of` write: slots for stores, blocks for loads.
fn use_of(kind: JobKind, of: JobKind) -> Use {
    match kind == of {
        true => Use::Write,
        false => Use::Read,
    }
}

fn slots(ids: &JobIds) -> impl Iterator<Item = usize> {
    ids.slots.iter().copied().map(Slot::index)
}

/// Only blocks that have bytes: nothing happens to the others.
fn blocks(ids: &JobIds, layout: &KvLayout, num_slots: usize) -> impl Iterator<Item = usize> {
    let lists = ids.geometry().copied_blocks(layout);
    lists
        .flatten()
        .map(move |&block| num_slots + block as usize)
}

#[cfg(test)]
mod tests {
    use kvoffload_core::layout::{PageRef, TensorLayout};

    use super::*;

    fn layout() -> KvLayout {
        let tensor = TensorLayout {
            num_blocks: 8,
            block_stride: 64,
            page_bytes: 64,
        };
        let page = PageRef {
            tensor: 0,
            page_bytes: 64,
        };
        KvLayout::new(vec![tensor], vec![vec![page]], 1, 8, 64, 8).unwrap()
    }

    fn ids(blocks: &[u32], slots: &[u32]) -> Arc<JobIds> {
        Arc::new(JobIds {
            block_ids: blocks.to_vec(),
            group_sizes: vec![blocks.len() as u32],
            block_indices: vec![0],
            slots: slots.iter().map(|&slot| Slot::new(slot)).collect(),
        })
    }

    #[test]
    fn a_job_is_noted_when_it_is_no_longer_alone() {
        let layout = layout();
        let mut order = Order::new(&layout, true);
        let (first, second) = (ids(&[1, 2], &[3, 4]), ids(&[5, 1], &[6, 4]));
        let (one, blockers) = order.enter(1, JobKind::Store, &layout, &first);
        assert_eq!(blockers, []);
        assert!(!order.fence.is_last_writer(one, 3));
        let (two, blockers) = order.enter(2, JobKind::Load, &layout, &second);
        assert_eq!(blockers, [1]);
        assert!(order.fence.is_last_writer(one, 3) && order.fence.is_last_writer(two, 8 + 5));
        order.leave(one, &layout, &first);
        order.leave(two, &layout, &second);
        assert_eq!(order.fence.num_jobs(), 0);
        assert!(!order.fence.is_last_writer(two, 8 + 5));
    }

    #[test]
    fn a_job_that_was_alone_leaves_nothing_behind() {
        let layout = layout();
        let mut order = Order::new(&layout, true);
        let mut ids = ids(&[1, 2], &[3, 4]);
        for job in 1..9 {
            let (ticket, blockers) = order.enter(job, JobKind::Store, &layout, &ids);
            assert_eq!(blockers, []);
            order.leave(ticket, &layout, &ids);
            assert!(
                Arc::get_mut(&mut ids).is_some(),
                "its memory serves another job"
            );
        }
        assert_eq!(order.fence.num_jobs(), 0);
    }
}
