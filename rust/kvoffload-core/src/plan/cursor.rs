//! A job's copies one after the other, from wherever the last call stopped.

use std::mem;
use std::ops::Range;

use super::{CopyRun, Geometry, Span};
use crate::layout::{KvLayout, PlacedRef};
use crate::pool::Slot;

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
/// The order is chunk, ref, sub-block: inside a slot, region offsets ascend. Chunks come as the geometry
/// has them, group by group, or by slot ([`RunCursor::by_slot`]). A cursor belongs to one geometry and
/// one layout; pass the same ones every time.
#[derive(Clone, Debug, Default)]
pub struct RunCursor {
    /// Positions in the geometry's `slots`, in an order of their own; empty: as they are.
    order: Vec<u32>,
    /// How many chunks came before the next one.
    turn: usize,
    /// The group that the current chunk is of, and the positions of all its chunks in `slots`.
    span: Span,
    chunks: Range<usize>,

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
    /// At the start of a job's copies in the order of its slots, so that region offsets ascend from the
    /// first copy to the last, except where a slot is named twice.
    ///
    /// Relies on [`Geometry::check`].
    #[must_use]
    pub fn by_slot(layout: &KvLayout, geometry: &Geometry<'_>) -> Self {
        let order = match geometry.slots.is_sorted() {
            true => Vec::new(),
            false => ascending(geometry.slots, layout.num_slots()),
        };
        Self {
            order,
            ..Self::default()
        }
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
        let at = loop {
            let at = match self.order.is_empty() {
                true => self.turn,
                false => *self.order.get(self.turn)? as usize,
            };
            if !self.chunks.contains(&at) {
                (self.chunks, self.span) = geometry.span_at(at, layout)?;
            }
            self.turn += 1;
            if !layout.refs(self.span.group).is_empty() {
                break at;
            }
        };
        let per_chunk = layout.blocks_per_chunk();
        let span = &self.span;
        // Blocks of the group up to this chunk, with those that its first chunk leaves out.
        let before = (at - self.chunks.start) * per_chunk as usize;
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
}

/// Positions of slots in the ascending order of the slots, all below `limit`: a counting sort by the lower
/// half of their bits and one by the upper half. Sorting by comparison takes two to three times as long.
fn ascending(slots: &[Slot], limit: u32) -> Vec<u32> {
    let bits = (u32::BITS - limit.leading_zeros()).div_ceil(2);
    let mut order: Vec<u32> = (0..slots.len() as u32).collect();
    let mut sorted = vec![0; slots.len()];
    let mut places = vec![0u32; 1 << bits];
    for shift in [0, bits] {
        let digit = |slot: Slot| (slot.get() >> shift) as usize & ((1 << bits) - 1);
        places.fill(0);
        for &slot in slots {
            places[digit(slot)] += 1;
        }
        let mut next = 0;
        for place in &mut places {
            next += mem::replace(place, next);
        }
        for &at in &order {
            let place = &mut places[digit(slots[at as usize])];
            sorted[*place as usize] = at;
            *place += 1;
        }
        mem::swap(&mut order, &mut sorted);
    }
    order
}
