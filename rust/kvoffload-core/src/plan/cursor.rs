//! A job's copies one after the other, from wherever the last call stopped.

use std::mem;

use super::{CopyRun, Geometry, Span};
use crate::layout::{KvLayout, PlacedRef};
use crate::pool::Slot;

/// So few positions are sorted by comparison: it needs no memory of the number of all slots.
const FEW: usize = 64;

/// Pages of one block in the order in which they lie in its slot.
#[derive(Clone, Copy, Debug)]
pub struct Pages<'l> {
    refs: &'l [PlacedRef],
    block: u64,
    /// Where the slot starts, and which of its blocks this is.
    start: u64,
    sub_block: u64,
}

impl Pages<'_> {
    /// One copy for each page.
    #[inline]
    pub fn runs(&self) -> impl Iterator<Item = CopyRun> {
        self.refs.iter().map(|page| CopyRun {
            tensor: page.tensor,
            device_offset: self.block * page.block_stride,
            region_offset: self.start + page.offset + self.sub_block * page.page_bytes,
            bytes: page.page_bytes,
        })
    }
}

/// Where in a job's copies its reader is. The default is the start.
///
/// The order is group, chunk, ref, sub-block: inside a slot, region offsets ascend. A group's chunks come as
/// the geometry has them, or by slot ([`RunCursor::by_slot`]). A cursor belongs to one geometry and one
/// layout; pass the same ones every time.
#[derive(Clone, Debug, Default)]
pub struct RunCursor {
    /// Positions in the geometry's `slots`, each group's in an order of its own; empty: as they are.
    order: Box<[u32]>,
    /// How many chunks came before the next one.
    turn: usize,
    /// The group that the current chunk is of, how many chunks it and those before it have, and the group
    /// whose turn is next.
    span: Span,
    chunks: usize,
    next_group: usize,

    /// The current chunk: its first block's position in `block_ids`, the sub-blocks it copies, and
    /// where its slot starts.
    block: usize,
    first: u32,
    end: u32,
    start: u64,
    /// Whether a piece begins with the slot.
    border: bool,

    /// The current ref and how many the group has; the sub-block of it that is next.
    page: usize,
    pages: usize,
    sub_block: u32,

    /// Bytes of the current page that were handed out with an earlier run.
    cut: u64,
}

impl RunCursor {
    /// At the start of a job's copies in the order of each group's slots: region offsets ascend as long as
    /// they are of one group, except where a slot is named twice. Groups are not mixed, because the same
    /// tensor's blocks should come one after the other, too.
    ///
    /// Relies on [`Geometry::check`].
    #[must_use]
    pub fn by_slot(layout: &KvLayout, geometry: &Geometry<'_>) -> Self {
        let mut start = 0;
        let groups = geometry.spans(layout).map(|span| {
            let chunks = start..start + span.chunks as usize;
            start = chunks.end;
            chunks
        });
        let mut order = Vec::new();
        for chunks in groups {
            let sorted = geometry.slots[chunks.clone()].is_sorted();
            if order.is_empty() && !sorted {
                order = (0..geometry.slots.len() as u32).collect();
            }
            if !sorted {
                sort(&mut order[chunks], geometry.slots, layout.num_slots());
            }
        }
        Self {
            order: order.into(),
            ..Self::default()
        }
    }

    /// The job's slots in the order of this cursor's copies, those without bytes among them.
    pub fn slots<'g>(&'g self, geometry: Geometry<'g>) -> impl Iterator<Item = Slot> {
        let slots = geometry.slots;
        (0..slots.len()).map(|turn| slots[self.position(turn)])
    }

    /// Goes back to the first copy.
    pub fn restart(&mut self) {
        *self = Self {
            order: mem::take(&mut self.order),
            ..Self::default()
        };
    }

    /// The next copy, `None` after the last: all that is adjacent on both sides, up to `limit` bytes
    /// and up to the next border between two pieces. What the limit cuts off comes with the next call.
    ///
    /// Relies on [`Geometry::check`]. `limit` must be at least 1.
    #[inline]
    pub fn next(
        &mut self,
        layout: &KvLayout,
        geometry: &Geometry<'_>,
        limit: u64,
    ) -> Option<CopyRun> {
        debug_assert!(limit > 0, "a run has at least one byte");
        self.settle(layout, geometry)?;
        let mut page = self.page(&layout.refs(self.span.group)[self.page], geometry);
        let mut run = CopyRun {
            tensor: page.tensor,
            device_offset: page.device_offset + self.cut,
            region_offset: page.region_offset + self.cut,
            bytes: page.bytes - self.cut,
        };
        loop {
            if run.bytes > limit {
                self.cut = page.bytes - (run.bytes - limit);
                run.bytes = limit;
                return Some(run);
            }
            self.cut = 0;
            self.sub_block += 1;
            if run.bytes == limit || self.settle(layout, geometry).is_none() {
                return Some(run);
            }
            let placed = &layout.refs(self.span.group)[self.page];
            // Most often so when refs have tensors of their own, and cheap to find out.
            if placed.tensor != run.tensor {
                return Some(run);
            }
            page = self.page(placed, geometry);
            let adjacent = run.device_offset + run.bytes == page.device_offset
                && run.region_offset + run.bytes == page.region_offset;
            // A page lies in one slot and a slot in one piece, so only a slot's start can be a border.
            if !adjacent || (self.border && page.region_offset == self.start) {
                return Some(run);
            }
            run.bytes += page.bytes;
        }
    }

    /// What is left of the current block, if each of its pages is a copy by itself: [`RunCursor::next`]
    /// gives the same copies, only one by one, or longer ones where one KV group follows on another.
    /// `None` where that has to be asked: where pages may be adjacent, or are cut, and at the end.
    ///
    /// Takes nothing; see [`RunCursor::skip`].
    #[inline]
    pub fn pages<'l>(
        &mut self,
        layout: &'l KvLayout,
        geometry: &Geometry<'_>,
    ) -> Option<Pages<'l>> {
        self.settle(layout, geometry)?;
        let apart = self.end - self.first == 1 && layout.is_apart(self.span.group);
        (apart && self.cut == 0).then(|| Pages {
            refs: &layout.refs(self.span.group)[self.page..],
            block: geometry.block_ids[self.block].into(),
            start: self.start,
            sub_block: self.sub_block.into(),
        })
    }

    /// Goes on behind this many of the pages that [`RunCursor::pages`] has just given, at least 1.
    #[inline]
    pub fn skip(&mut self, pages: usize) {
        debug_assert!((1..=self.pages - self.page).contains(&pages));
        self.page += pages - 1;
        self.sub_block = self.end;
    }

    /// Makes `page` and `sub_block` those of the next page, if there is one.
    #[inline]
    fn settle(&mut self, layout: &KvLayout, geometry: &Geometry<'_>) -> Option<()> {
        if self.sub_block == self.end {
            self.page += 1;
            if self.page >= self.pages {
                self.next_chunk(layout, geometry)?;
            }
            self.sub_block = self.first;
        }
        Some(())
    }

    /// The current block's page of this ref.
    #[inline]
    fn page(&self, page: &PlacedRef, geometry: &Geometry<'_>) -> CopyRun {
        let block = geometry.block_ids[self.block + (self.sub_block - self.first) as usize];
        CopyRun {
            tensor: page.tensor,
            device_offset: u64::from(block) * page.block_stride,
            region_offset: self.start + page.offset + u64::from(self.sub_block) * page.page_bytes,
            bytes: page.page_bytes,
        }
    }

    /// Goes to the next chunk that has bytes; at the job's end it stays where it is.
    fn next_chunk(&mut self, layout: &KvLayout, geometry: &Geometry<'_>) -> Option<()> {
        // Should there be none, the next call comes here again.
        self.pages = 0;
        while self.turn == self.chunks {
            self.span = geometry.span(self.next_group, self.span.blocks.end, layout)?;
            self.next_group += 1;
            self.chunks += self.span.chunks as usize;
            if layout.refs(self.span.group).is_empty() {
                self.turn = self.chunks;
            }
        }
        let at = self.position(self.turn);
        self.turn += 1;
        let per_chunk = layout.blocks_per_chunk();
        let span = &self.span;
        // Blocks of the group up to this chunk, with those that its first chunk leaves out.
        let before = (at + span.chunks as usize - self.chunks) * per_chunk as usize;
        let stop = span.skip + span.blocks.len() - before;
        // All of them fit, because they are at most `per_chunk`.
        self.first = span.skip.saturating_sub(before) as u32;
        self.end = stop.min(per_chunk as usize) as u32;
        self.block = span.blocks.start + before.saturating_sub(span.skip);
        let slot = geometry.slots[at];
        self.start = layout.slot_offset(slot);
        self.border = slot.get().is_multiple_of(layout.slots_per_piece());
        (self.page, self.pages) = (0, layout.refs(span.group).len());
        Some(())
    }

    /// Where in `slots` the chunk of a turn is.
    #[inline]
    fn position(&self, turn: usize) -> usize {
        match self.order.is_empty() {
            true => turn,
            false => self.order[turn] as usize,
        }
    }
}

/// Sorts positions by their slots, all of which are below `limit`: where there are many, in two passes of a
/// counting sort, by the lower half of the bits and by the upper. That takes 15 us for 4,096 random ones, a
/// sort by comparison 60.
fn sort(order: &mut [u32], slots: &[Slot], limit: u32) {
    let slot = |at: u32| slots[at as usize].get();
    if order.len() < FEW {
        order.sort_by_key(|&at| slot(at));
        return;
    }
    let bits = (u32::BITS - limit.leading_zeros()).div_ceil(2);
    let mut sorted = vec![0; order.len()];
    let mut places = vec![0u32; 1 << bits];
    let mut pass = |from: &[u32], to: &mut [u32], shift: u32| {
        let digit = |at: u32| (slot(at) >> shift) as usize & ((1 << bits) - 1);
        places.fill(0);
        for &at in from {
            places[digit(at)] += 1;
        }
        let mut next = 0;
        for place in &mut places {
            next += mem::replace(place, next);
        }
        for &at in from {
            let place = &mut places[digit(at)];
            to[*place as usize] = at;
            *place += 1;
        }
    };
    pass(order, &mut sorted, 0);
    pass(&sorted, order, bits);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Few and many, whole lists and parts of them, small slots and the largest.
    #[test]
    fn positions_are_sorted_by_their_slots() {
        let mut state = 1u64;
        let mut random = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 32) as u32
        };
        for limit in [1, 2, 3, 200, 65_536, 65_537, 1 << 22, 3 << 22] {
            for count in [0, 1, 2, FEW - 1, FEW, FEW + 1, 1000] {
                let slots: Vec<Slot> = (0..count + 7)
                    .map(|_| Slot::new(random() % limit))
                    .collect();
                let mut order: Vec<u32> = (0..slots.len() as u32).collect();
                let part = 3..3 + count;
                sort(&mut order[part.clone()], &slots, limit);
                let mut expected: Vec<u32> = (0..slots.len() as u32).collect();
                expected[part].sort_by_key(|&at| slots[at as usize]);
                assert_eq!(order, expected, "{count} below {limit}");
            }
        }
        let slots = [Slot::new(u32::MAX - 1), Slot::new(0)].repeat(FEW);
        let mut order: Vec<u32> = (0..slots.len() as u32).collect();
        sort(&mut order, &slots, u32::MAX);
        assert!(order.is_sorted_by_key(|&at| (slots[at as usize], at)));
    }
}
