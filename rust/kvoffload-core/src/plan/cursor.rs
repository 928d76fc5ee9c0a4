//! A job's copies one after the other, from wherever the last call stopped.

use super::{CopyRun, Geometry};
use crate::layout::{KvLayout, PlacedRef};

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
/// The order is group, slot, ref, sub-block: inside a slot, region offsets ascend. A cursor belongs to
/// one geometry and one layout; it keeps nothing of either, so pass the same ones every time.
#[derive(Clone, Debug, Default)]
pub struct RunCursor {
    /// The group of the current chunk, and the one whose turn is next.
    group: usize,
    next_group: usize,
    /// Blocks of the group that are in no chunk yet.
    left: u32,
    /// Sub-blocks of the next chunk that the job leaves out.
    skip: u32,
    /// Position of the next chunk in `slots`, and of its first block in `block_ids`.
    next_slot: usize,
    next_block: usize,

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
        let mut page = self.page(&layout.refs(self.group)[self.page], geometry);
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
            let placed = &layout.refs(self.group)[self.page];
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
        let apart = self.end - self.first == 1 && layout.is_apart(self.group);
        (apart && self.cut == 0).then(|| Pages {
            refs: &layout.refs(self.group)[self.page..],
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
        let per_chunk = layout.blocks_per_chunk();
        // Should there be none, the next call comes here again.
        self.pages = 0;
        while self.left == 0 {
            let &size = geometry.group_sizes.get(self.next_group)?;
            self.group = self.next_group;
            self.next_group += 1;
            // The remainder fits, because the divisor is a u32.
            let skip = (geometry.block_indices[self.group] % u64::from(per_chunk)) as u32;
            if !layout.refs(self.group).is_empty() {
                (self.left, self.skip) = (size, skip);
            } else if size > 0 {
                let chunks = (u64::from(size) + u64::from(skip)).div_ceil(per_chunk.into());
                self.next_block += size as usize;
                self.next_slot += chunks as usize;
            }
        }
        let slot = geometry.slots[self.next_slot];
        let here = self.left.min(per_chunk - self.skip);
        self.block = self.next_block;
        self.first = self.skip;
        self.end = self.skip + here;
        self.start = layout.slot_offset(slot);
        self.border = slot.get().is_multiple_of(layout.slots_per_piece());
        (self.page, self.pages) = (0, layout.refs(self.group).len());
        self.next_slot += 1;
        self.next_block += here as usize;
        self.left -= here;
        self.skip = 0;
        Some(())
    }
}
