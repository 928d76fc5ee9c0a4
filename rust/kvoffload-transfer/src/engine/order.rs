//! In which order jobs may use slots and blocks.
//!
//! A job's submit takes no longer than it must, so it only puts the job into the state's inbox. The
//! threads take jobs out of it, oldest first, and find out whom each has to wait for. That is done
//! under a lock of its own, which no caller ever takes: it is held for a time proportional to a job's
//! blocks and slots. **Lock order: this one, then the state's.**

use kvoffload_core::fence::{Fence, Ticket, Use};
use kvoffload_core::jobs::JobKind;
use kvoffload_core::layout::KvLayout;
use kvoffload_core::pool::Slot;

use super::job::JobIds;

/// Who uses which slot and which block.
#[derive(Debug)]
pub(super) struct Order {
    /// Of the slots, and behind them of the blocks.
    fence: Fence,
    num_slots: usize,
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
        ids: &JobIds,
    ) -> (Ticket, &[u64]) {
        let (slot_use, block_use) = match kind {
            JobKind::Store => (Use::Write, Use::Read),
            JobKind::Load => (Use::Read, Use::Write),
        };
        let Self {
            fence, blockers, ..
        } = self;
        blockers.clear();
        let ticket = fence.join(job);
        fence.enter(ticket, slot_use, slots(ids), blockers);
        fence.enter(
            ticket,
            block_use,
            blocks(ids, layout, self.num_slots),
            blockers,
        );
        if !self.fences {
            blockers.clear();
        }
        (ticket, blockers)
    }

    /// A job is over.
    pub(super) fn leave(&mut self, ticket: Ticket, layout: &KvLayout, ids: &JobIds) {
        let blocks = blocks(ids, layout, self.num_slots);
        self.fence.leave(ticket, slots(ids).chain(blocks));
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
