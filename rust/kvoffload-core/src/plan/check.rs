//! What makes a job a good one.

use thiserror::Error;

use super::Geometry;
use crate::jobs::JobKind;
use crate::layout::KvLayout;
use crate::pool::Slot;

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
    /// Checks shape and bounds: everything that a [`RunCursor`](super::RunCursor) relies on.
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
            if all_below(num_blocks, blocks.iter().copied()) {
                continue;
            }
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
        if all_below(num_slots, self.slots.iter().map(|slot| slot.get())) {
            return Ok(());
        }
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
    /// The same block in two groups is legal unless the groups share a tensor. `scratch` must have
    /// been made for this layout.
    pub fn check_job(
        &self,
        kind: JobKind,
        layout: &KvLayout,
        scratch: &mut CheckScratch,
    ) -> Result<(), PlanError> {
        self.check(layout)?;
        match kind {
            JobKind::Store => {
                if scratch.slots.differ(|| [self.slots], Slot::get) {
                    return Ok(());
                }
                let mut slots = self.slots.to_vec();
                slots.sort_unstable();
                match slots.windows(2).find(|pair| pair[0] == pair[1]) {
                    None => Ok(()),
                    Some(pair) => Err(PlanError::SlotTwice { slot: pair[0] }),
                }
            }
            JobKind::Load => {
                if scratch
                    .blocks
                    .differ(|| self.copied_blocks(layout), |block| block)
                {
                    return Ok(());
                }
                // Two groups may have the same block, so that is not an error yet.
                let mut named = Vec::with_capacity(self.block_ids.len());
                for span in self.spans(layout) {
                    if !layout.refs(span.group).is_empty() {
                        let blocks = self.block_ids[span.blocks].iter();
                        let group = span.group as u64;
                        named.extend(blocks.map(|&block| u64::from(block) << 32 | group));
                    }
                }
                named.sort_unstable();
                blocks_differ(layout, &named)
            }
        }
    }
}

/// Whether all ids are below `end`. Looks at all of them, which compiles to a few instructions for
/// several ids and takes a fraction of the time of a search.
fn all_below(end: u32, ids: impl Iterator<Item = u32>) -> bool {
    ids.fold(true, |all, id| all & (id < end))
}

/// Working memory of [`Geometry::check_job`]: a bit per slot and a bit per block.
#[derive(Clone, Debug)]
pub struct CheckScratch {
    slots: Seen,
    blocks: Seen,
}

impl CheckScratch {
    /// Working memory for jobs of this layout.
    pub fn new(layout: &KvLayout) -> Self {
        Self {
            slots: Seen::new(layout.num_slots()),
            blocks: Seen::new(layout.max_blocks()),
        }
    }
}

/// Which ids were seen; all bits are 0 between two calls.
#[derive(Clone, Debug)]
struct Seen(Box<[u64]>);

impl Seen {
    fn new(ids: u32) -> Self {
        Self(vec![0; ids.div_ceil(64) as usize].into())
    }

    /// Whether no id comes twice in the lists, which must be the same at every call of `lists`.
    fn differ<'a, T: Copy + 'a, I: IntoIterator<Item = &'a [T]>>(
        &mut self,
        lists: impl Fn() -> I,
        id: impl Fn(T) -> u32,
    ) -> bool {
        let (mut count, mut twice) = (0, 0);
        for list in lists() {
            count += list.len();
            for &item in list {
                let id = id(item);
                let (word, bit) = (&mut self.0[id as usize / 64], 1 << (id % 64));
                twice |= *word & bit;
                *word |= bit;
            }
        }
        if count >= self.0.len() / 16 {
            self.0.fill(0);
        } else {
            for &item in lists().into_iter().flatten() {
                self.0[id(item) as usize / 64] = 0;
            }
        }
        twice == 0
    }
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
