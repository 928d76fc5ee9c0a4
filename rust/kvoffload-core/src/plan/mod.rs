//! From (blocks, slots) to the copies that move them: checked, then merged.
//!
//! The same copies serve both directions; the caller decides which side is read. A job of many blocks
//! has too many of them to keep, so a [`RunCursor`] makes them one by one when they are due.

mod cursor;

use thiserror::Error;

use crate::jobs::JobKind;
use crate::layout::KvLayout;
use crate::pool::Slot;
pub use cursor::RunCursor;

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

/// Why a job's geometry was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PlanError {
    /// Not one entry per group.
    #[error("{field} has {given} entries, the layout has {groups} groups")]
    GroupCount {
        /// `group_sizes` or `block_indices`.
        field: &'static str,
        /// Number of entries.
        given: usize,
        /// Number of groups.
        groups: usize,
    },
    /// `group_sizes` does not add up.
    #[error("group_sizes adds up to {needed} blocks, block_ids has {given}")]
    BlockCount {
        /// Sum of `group_sizes`.
        needed: u64,
        /// Number of block ids.
        given: usize,
    },
    /// The job has too many or too few slots.
    #[error("the blocks touch {needed} chunks, slots has {given} entries; one slot per chunk")]
    SlotCount {
        /// Number of chunks.
        needed: u64,
        /// Number of slots.
        given: usize,
    },
    /// A block outside the group's tensors.
    #[error("block_ids[{index}]: block {block} of group {group} is outside 0..{num_blocks}")]
    UnknownBlock {
        /// Position in `block_ids`.
        index: usize,
        /// The block's group.
        group: usize,
        /// The block.
        block: u32,
        /// Number of blocks of the group.
        num_blocks: u32,
    },
    /// A slot outside the region.
    #[error("slots[{index}]: slot {slot} is outside 0..{num_slots}")]
    UnknownSlot {
        /// Position in `slots`.
        index: usize,
        /// The slot.
        slot: Slot,
        /// Number of slots.
        num_slots: u32,
    },
    /// A load that writes the same bytes of a tensor twice.
    #[error(
        "block {block} is loaded twice, for group {first} and group {second}; a load's blocks must differ"
    )]
    BlockTwice {
        /// The block.
        block: u32,
        /// Group of one of them.
        first: usize,
        /// Group of the other, the same or one that shares a tensor with it.
        second: usize,
    },
    /// A store that writes the same slot twice.
    #[error("slot {slot} is stored twice; a store's slots must differ")]
    SlotTwice {
        /// The slot.
        slot: Slot,
    },
}

impl Geometry<'_> {
    /// Checks shape and bounds: everything that a [`RunCursor`] relies on.
    pub fn check(&self, layout: &KvLayout) -> Result<(), PlanError> {
        let groups = layout.num_groups();
        for (field, given) in [
            ("group_sizes", self.group_sizes.len()),
            ("block_indices", self.block_indices.len()),
        ] {
            if given != groups {
                return Err(PlanError::GroupCount {
                    field,
                    given,
                    groups,
                });
            }
        }
        // u32 times a slice's length: neither sum can exceed u64.
        let needed: u64 = self.group_sizes.iter().map(|&size| u64::from(size)).sum();
        if needed != self.block_ids.len() as u64 {
            return Err(PlanError::BlockCount {
                needed,
                given: self.block_ids.len(),
            });
        }
        let needed: u64 = self.spans(layout).map(|span| span.chunks).sum();
        if needed != self.slots.len() as u64 {
            return Err(PlanError::SlotCount {
                needed,
                given: self.slots.len(),
            });
        }
        for span in self.spans(layout) {
            let (group, num_blocks) = (span.group, layout.num_blocks(span.group));
            let blocks = &self.block_ids[span.blocks.clone()];
            if let Some(at) = blocks.iter().position(|&block| block >= num_blocks) {
                let (index, block) = (span.blocks.start + at, blocks[at]);
                return Err(PlanError::UnknownBlock {
                    index,
                    group,
                    block,
                    num_blocks,
                });
            }
        }
        let num_slots = layout.num_slots();
        match self.slots.iter().position(|slot| slot.get() >= num_slots) {
            None => Ok(()),
            Some(index) => Err(PlanError::UnknownSlot {
                index,
                slot: self.slots[index],
                num_slots,
            }),
        }
    }

    /// Checks shape and bounds, and that no byte is written twice: a load's blocks and a store's
    /// slots must differ. (What is read may repeat: two blocks of one load may come from one slot,
    /// one block may be stored to two slots.)
    ///
    /// The same block in two groups is legal unless the groups share a tensor. `scratch` is
    /// overwritten; keep it for the next call.
    pub fn check_job(
        &self,
        kind: JobKind,
        layout: &KvLayout,
        scratch: &mut Vec<u64>,
    ) -> Result<(), PlanError> {
        self.check(layout)?;
        scratch.clear();
        match kind {
            JobKind::Store => {
                scratch.extend(self.slots.iter().map(|slot| u64::from(slot.get())));
                scratch.sort_unstable();
                match scratch.windows(2).find(|pair| pair[0] == pair[1]) {
                    None => Ok(()),
                    Some(pair) => Err(PlanError::SlotTwice {
                        slot: Slot::new(pair[0] as u32),
                    }),
                }
            }
            JobKind::Load => {
                for span in self.spans(layout) {
                    if !layout.refs(span.group).is_empty() {
                        let blocks = self.block_ids[span.blocks].iter();
                        let named = |&block| u64::from(block) << 32 | span.group as u64;
                        scratch.extend(blocks.map(named));
                    }
                }
                scratch.sort_unstable();
                blocks_differ(layout, scratch)
            }
        }
    }

    /// Bytes that the job copies; the geometry must have been checked.
    pub fn bytes(&self, layout: &KvLayout) -> u64 {
        let per_chunk = u64::from(layout.blocks_per_chunk());
        let block_bytes = |group| layout.chunk_bytes(group) / per_chunk;
        let sizes = self.group_sizes.iter().enumerate();
        sizes
            .map(|(group, &size)| u64::from(size) * block_bytes(group))
            .sum()
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
    fn spans(&self, layout: &KvLayout) -> impl Iterator<Item = Span> {
        let per_chunk = u64::from(layout.blocks_per_chunk());
        let mut start = 0usize;
        let sizes = self.group_sizes.iter().zip(self.block_indices);
        sizes.enumerate().map(move |(group, (&size, &first))| {
            let skip = if size == 0 { 0 } else { first % per_chunk };
            let end = start.saturating_add(size as usize);
            let span = Span {
                group,
                blocks: start..end,
                skip: skip as usize,
                chunks: (u64::from(size) + skip).div_ceil(per_chunk),
            };
            start = end;
            span
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
struct Span {
    group: usize,
    /// Positions in `block_ids`.
    blocks: std::ops::Range<usize>,
    /// Sub-blocks of the first chunk that the job leaves out.
    skip: usize,
    /// Number of chunks, thus of slots.
    chunks: u64,
}

/// `named` holds `block << 32 | group`, sorted.
fn blocks_differ(layout: &KvLayout, named: &[u64]) -> Result<(), PlanError> {
    for same_block in named.chunk_by(|a, b| a >> 32 == b >> 32) {
        for (at, &a) in same_block.iter().enumerate() {
            let first = a as u32 as usize;
            for &b in &same_block[at + 1..] {
                let second = b as u32 as usize;
                // Sorted: a group that has the block twice is found at its first pair, so this is
                // at most groups x groups steps per block.
                if first == second || layout.share_tensor(first, second) {
                    let block = (a >> 32) as u32;
                    return Err(PlanError::BlockTwice {
                        block,
                        first,
                        second,
                    });
                }
            }
        }
    }
    Ok(())
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
