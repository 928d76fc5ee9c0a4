//! From (blocks, slots) to the copies that move them: checked, then merged.
//!
//! The same copies serve both directions; the caller decides which side is read. A job of many blocks
//! has too many of them to keep, so a [`RunCursor`] makes them when they are due, one by one or, where that
//! can be, all of a block ([`Pages`]).

mod check;
mod cursor;

use std::ops::Range;

use crate::layout::KvLayout;
use crate::pool::Slot;
pub use check::{CheckScratch, PlanError};
pub use cursor::{Pages, RunCursor};

/// Which blocks and which slots one job is about, in vLLM's shape.
///
/// Group after group, each group's blocks are logically consecutive; its first block has the logical
/// index `block_indices[g]`. If that is not a multiple of the blocks per chunk, the group starts
/// inside its first chunk. Each group uses as many slots as chunks it touches, in the same order.
#[derive(Clone, Copy, Debug)]
pub struct Geometry<'a> {
    /// Blocks of all groups, one group after the other.
    pub block_ids: &'a [u32],
    /// Number of blocks of each group.
    pub group_sizes: &'a [u32],
    /// Logical index of the first block of each group.
    pub block_indices: &'a [u64],
    /// Slots of all groups, one group after the other.
    pub slots: &'a [Slot],
}

impl<'a> Geometry<'a> {
    /// Bytes that the job copies; the geometry must have been checked.
    pub fn bytes(&self, layout: &KvLayout) -> u64 {
        let per_chunk = u64::from(layout.blocks_per_chunk());
        let block_bytes = |group| layout.chunk_bytes(group) / per_chunk;
        let sizes = self.group_sizes.iter().enumerate();
        sizes
            .map(|(group, &size)| u64::from(size) * block_bytes(group))
            .sum()
    }

    /// The blocks that have bytes to copy, some at a time: those of groups with refs.
    pub fn copied_blocks(self, layout: &KvLayout) -> impl Iterator<Item = &'a [u32]> {
        let spans = self.spans(layout);
        let copied = spans.filter(|span| !layout.refs(span.group).is_empty());
        copied.map(move |span| &self.block_ids[span.blocks])
    }

    /// What the job does with each of its chunks, in the order of `slots`.
    pub fn chunks(&self, layout: &KvLayout) -> impl Iterator<Item = ChunkUse> {
        let per_chunk = layout.blocks_per_chunk() as usize;
        let parts = self.spans(layout).flat_map(move |span| {
            let stop = span.skip + span.blocks.len();
            (0..span.chunks as usize).map(move |chunk| {
                let before = chunk * per_chunk;
                let first = if chunk == 0 { span.skip } else { 0 };
                (span.group, first, per_chunk.min(stop - before))
            })
        });
        let uses = parts.zip(self.slots.iter().copied());
        uses.map(|((group, first, end), slot)| ChunkUse {
            group,
            slot,
            first: first as u32,
            end: end as u32,
        })
    }

    /// The groups' parts of the job. Stops at the end of the shorter list if the lists disagree.
    fn spans(self, layout: &KvLayout) -> impl Iterator<Item = Span> {
        let mut start = 0;
        (0..).map_while(move |group| {
            let span = self.span(group, start, layout)?;
            start = span.blocks.end;
            Some(span)
        })
    }

    /// One group's part, which begins at a position in `block_ids`; `None` behind the last group.
    fn span(&self, group: usize, start: usize, layout: &KvLayout) -> Option<Span> {
        let per_chunk = u64::from(layout.blocks_per_chunk());
        let (&size, &first) = (self.group_sizes.get(group)?, self.block_indices.get(group)?);
        let skip = if size == 0 { 0 } else { first % per_chunk };
        Some(Span {
            group,
            blocks: start..start.saturating_add(size as usize),
            skip: skip as usize,
            chunks: (u64::from(size) + skip).div_ceil(per_chunk),
        })
    }
}

/// A job's part of one chunk: blocks `first..end` of it, counted from the chunk's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkUse {
    /// The chunk's KV group.
    pub group: usize,
    /// Where the chunk is.
    pub slot: Slot,
    /// First block that the job copies.
    pub first: u32,
    /// One past the last.
    pub end: u32,
}

/// One group's part of a job.
#[derive(Clone, Debug, Default)]
struct Span {
    group: usize,
    /// Positions in `block_ids`.
    blocks: Range<usize>,
    /// Sub-blocks of the first chunk that the job leaves out.
    skip: usize,
    /// Number of chunks, thus of slots.
    chunks: u64,
}

/// One copy: contiguous on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRun {
    /// Index of the device tensor.
    pub tensor: u32,
    /// Bytes from the tensor's start.
    pub device_offset: u64,
    /// Bytes from the region's start.
    pub region_offset: u64,
    /// Bytes to copy; never 0.
    pub bytes: u64,
}

impl CopyRun {
    /// Its first `bytes` bytes and the rest; `bytes` is less than it has.
    #[must_use]
    pub fn split_at(self, bytes: u64) -> (Self, Self) {
        let first = Self { bytes, ..self };
        let rest = Self {
            device_offset: self.device_offset + bytes,
            region_offset: self.region_offset + bytes,
            bytes: self.bytes - bytes,
            ..self
        };
        (first, rest)
    }
}

/// The copies of one job, all at once: for tests and whoever wants to look at them.
#[derive(Clone, Debug, Default)]
pub struct CopyPlan {
    /// In the order of a [`RunCursor`], each as long as can be.
    pub runs: Vec<CopyRun>,
    /// Sum of the runs' bytes.
    pub bytes: u64,
}

impl CopyPlan {
    /// Replaces this plan by that of `geometry`; an error leaves it empty. Keeps its memory.
    pub fn build_into(
        &mut self,
        layout: &KvLayout,
        geometry: &Geometry<'_>,
    ) -> Result<(), PlanError> {
        self.runs.clear();
        self.bytes = 0;
        geometry.check(layout)?;
        let mut cursor = RunCursor::default();
        let runs = std::iter::from_fn(|| cursor.next(layout, geometry, u64::MAX));
        self.runs.extend(runs);
        self.bytes = geometry.bytes(layout);
        Ok(())
    }
}
