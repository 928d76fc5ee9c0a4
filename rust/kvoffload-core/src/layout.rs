//! Where the bytes are: pages in device tensors, chunks in slots of a region.
//!
//! A chunk of group g is `blocks_per_chunk` consecutive blocks of that group. Its slot holds, ref by
//! ref of the group, that ref's pages of all blocks of the chunk back to back (layer-major):
//! sub-block j of ref r starts `blocks_per_chunk * (pages of the refs before r) + j * page of r`
//! bytes into the slot. Pages are stored without the tensor's padding.

use thiserror::Error;

use crate::pool::Slot;

/// Slots start at multiples of this many bytes (if the region does): whole cache lines.
pub const SLOT_ALIGN: u64 = 64;

/// Large slots are whole pages, so that a piece of the region, which is whole pages, can be made of
/// few slots. Costs them less than 1.6 %.
pub const PAGE_ALIGN: u64 = 4096;

/// From this size on a slot is large.
pub const LARGE_SLOT: u64 = 256 << 10;

/// One device tensor, seen as rows of bytes: block b is the `page_bytes` bytes from
/// `b * block_stride` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorLayout {
    /// Number of blocks.
    pub num_blocks: u32,
    /// Bytes from one block to the next.
    pub block_stride: u64,
    /// Bytes of one block, padding included; at most `block_stride`.
    pub page_bytes: u64,
}

/// One part of every block of a group: the first `page_bytes` bytes of a tensor's page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRef {
    /// Index of the tensor.
    pub tensor: u32,
    /// Bytes to copy per block, padding excluded; at most the tensor's `page_bytes`.
    pub page_bytes: u64,
}

/// Why a layout was refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// A size that must be at least 1 is 0.
    #[error("{field} is 0, it must be at least 1")]
    Zero {
        /// Which one, for example `tensors[3].num_blocks`.
        field: String,
    },
    /// There is nothing to offload.
    #[error("groups is empty, there must be at least one KV-cache group")]
    NoGroups,
    /// Blocks of a tensor overlap.
    #[error(
        "tensors[{tensor}]: page_bytes is {page_bytes}, more than the block stride of {block_stride}"
    )]
    PageExceedsStride {
        /// Index of the tensor.
        tensor: usize,
        /// Bytes of one block.
        page_bytes: u64,
        /// Bytes from one block to the next.
        block_stride: u64,
    },
    /// A group refers to a tensor that does not exist.
    #[error(
        "groups[{group}][{index}]: tensor {tensor} is unknown, there are {num_tensors} tensors"
    )]
    UnknownTensor {
        /// Index of the group.
        group: usize,
        /// Index of the ref within the group.
        index: usize,
        /// The ref's tensor.
        tensor: u32,
        /// Number of tensors.
        num_tensors: usize,
    },
    /// A ref is larger than the page it refers to.
    #[error(
        "groups[{group}][{index}]: page_bytes is {page_bytes}, a page of tensor {tensor} has {limit}"
    )]
    RefExceedsPage {
        /// Index of the group.
        group: usize,
        /// Index of the ref within the group.
        index: usize,
        /// The ref's tensor.
        tensor: u32,
        /// Bytes of the ref.
        page_bytes: u64,
        /// Bytes of the tensor's page.
        limit: u64,
    },
    /// A chunk of a group does not fit in a slot.
    #[error(
        "slot_bytes is {slot_bytes}, a chunk of group {group} needs {needed}; set it to {needed} or more"
    )]
    SlotTooSmall {
        /// Index of the first such group.
        group: usize,
        /// Bytes of a slot.
        slot_bytes: u64,
        /// Bytes that a chunk of the group has.
        needed: u64,
    },
    /// An extent is larger than an address space.
    #[error("{what} has more than {} bytes, no memory is that large", isize::MAX)]
    TooLarge {
        /// What, for example `tensors[3]`.
        what: String,
    },
}

/// Shape of all device tensors and of the region, checked once so that plans need not.
#[derive(Clone, Debug)]
pub struct KvLayout {
    tensors: Vec<TensorLayout>,
    groups: Vec<Group>,
    blocks_per_chunk: u32,
    num_slots: u32,
    slot_bytes: u64,
    slots_per_piece: u32,
}

#[derive(Clone, Debug)]
struct Group {
    refs: Vec<PlacedRef>,
    /// The smallest `num_blocks` of the tensors that the group refers to.
    num_blocks: u32,
    /// Sorted, each once.
    tensors: Vec<u32>,
    /// No ref has the tensor of the one before it; the last one is before the first.
    is_apart: bool,
}

/// A ref and where its pages start in a slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlacedRef {
    pub(crate) tensor: u32,
    pub(crate) page_bytes: u64,
    pub(crate) block_stride: u64,
    /// Bytes from the slot's start to this ref's sub-block 0.
    pub(crate) offset: u64,
}

impl KvLayout {
    /// Checks and keeps the layout of one rank.
    ///
    /// A group without refs is legal: this rank has none of its layers. Its chunks have slots, and
    /// nothing is copied for them. Two refs of a group may name the same tensor (layers that share
    /// their cache); each has its own place in the slot.
    ///
    /// `slots_per_piece` may exceed `num_slots`: then the region is one piece.
    pub fn new(
        tensors: Vec<TensorLayout>,
        groups: Vec<Vec<PageRef>>,
        blocks_per_chunk: u32,
        num_slots: u32,
        slot_bytes: u64,
        slots_per_piece: u32,
    ) -> Result<Self, LayoutError> {
        at_least_one("blocks_per_chunk", blocks_per_chunk.into())?;
        at_least_one("num_slots", num_slots.into())?;
        at_least_one("slot_bytes", slot_bytes)?;
        at_least_one("slots_per_piece", slots_per_piece.into())?;
        if groups.is_empty() {
            return Err(LayoutError::NoGroups);
        }
        for (index, tensor) in tensors.iter().enumerate() {
            check_tensor(index, tensor)?;
        }
        addressable(u64::from(num_slots).checked_mul(slot_bytes), || {
            "the region".into()
        })?;
        let groups = groups
            .iter()
            .enumerate()
            .map(|(index, refs)| place(index, refs, &tensors, blocks_per_chunk, slot_bytes))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            tensors,
            groups,
            blocks_per_chunk,
            num_slots,
            slot_bytes,
            slots_per_piece,
        })
    }

    /// The device tensors.
    pub fn tensors(&self) -> &[TensorLayout] {
        &self.tensors
    }

    /// Number of KV-cache groups.
    pub fn num_groups(&self) -> usize {
        self.groups.len()
    }

    /// Number of blocks that group `group` can address: the smallest of its tensors', `u32::MAX`
    /// without refs. 0 if there is no such group.
    pub fn num_blocks(&self, group: usize) -> u32 {
        self.groups.get(group).map_or(0, |group| group.num_blocks)
    }

    /// One more than the largest number of a block that has bytes: the largest
    /// [`KvLayout::num_blocks`] of the groups with refs, 0 if there are none.
    pub fn max_blocks(&self) -> u32 {
        let groups = self.groups.iter().filter(|group| !group.refs.is_empty());
        groups.map(|group| group.num_blocks).max().unwrap_or(0)
    }

    /// Blocks in a chunk.
    pub fn blocks_per_chunk(&self) -> u32 {
        self.blocks_per_chunk
    }

    /// Number of slots.
    pub fn num_slots(&self) -> u32 {
        self.num_slots
    }

    /// Bytes of a slot.
    pub fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// Bytes of a slot that a chunk of group `group` uses, from the slot's start; 0 if there is no
    /// such group.
    pub fn chunk_bytes(&self, group: usize) -> u64 {
        let last = self.refs(group).last();
        last.map_or(0, |page| {
            page.offset + page.page_bytes * u64::from(self.blocks_per_chunk)
        })
    }

    /// Bytes of the region.
    pub fn region_bytes(&self) -> u64 {
        u64::from(self.num_slots) * self.slot_bytes
    }

    /// Slots in a piece; the last piece may have fewer.
    pub fn slots_per_piece(&self) -> u32 {
        self.slots_per_piece
    }

    /// Bytes of a piece; the last piece may have fewer.
    pub fn piece_bytes(&self) -> u64 {
        u64::from(self.slots_per_piece.min(self.num_slots)) * self.slot_bytes
    }

    /// Number of pieces.
    pub fn num_pieces(&self) -> u32 {
        self.num_slots.div_ceil(self.slots_per_piece)
    }

    /// The piece that holds `slot`.
    pub fn piece_of(&self, slot: Slot) -> u32 {
        slot.get() / self.slots_per_piece
    }

    /// Bytes from the region's start to `slot`.
    pub fn slot_offset(&self, slot: Slot) -> u64 {
        u64::from(slot.get()) * self.slot_bytes
    }

    pub(crate) fn refs(&self, group: usize) -> &[PlacedRef] {
        self.groups.get(group).map_or(&[], |group| &group.refs)
    }

    /// Whether pages that follow one another in the slots of this group never do so in a tensor, if a
    /// chunk has one block of it.
    pub(crate) fn is_apart(&self, group: usize) -> bool {
        self.groups.get(group).is_some_and(|group| group.is_apart)
    }

    /// Whether a block of group `a` and the block of the same number of group `b` have bytes in common.
    pub(crate) fn share_tensor(&self, a: usize, b: usize) -> bool {
        self.groups[a]
            .tensors
            .iter()
            .any(|tensor| self.groups[b].tensors.binary_search(tensor).is_ok())
    }
}

/// Bytes that a slot needs: the largest chunk of all `groups`, rounded up to [`SLOT_ALIGN`], or to
/// [`PAGE_ALIGN`] from [`LARGE_SLOT`] on.
///
/// `u64::MAX` if that does not fit; [`KvLayout::new`] refuses such a slot.
pub fn slot_bytes(groups: &[Vec<PageRef>], blocks_per_chunk: u32) -> u64 {
    let chunk = |refs: &Vec<PageRef>| {
        let block = refs
            .iter()
            .try_fold(0u64, |sum, r| sum.checked_add(r.page_bytes));
        block.and_then(|bytes| bytes.checked_mul(blocks_per_chunk.into()))
    };
    let largest = groups
        .iter()
        .map(chunk)
        .try_fold(0, |max, bytes| Some(bytes?.max(max)));
    largest
        .and_then(|bytes: u64| {
            let align = if bytes >= LARGE_SLOT {
                PAGE_ALIGN
            } else {
                SLOT_ALIGN
            };
            bytes.checked_next_multiple_of(align)
        })
        .unwrap_or(u64::MAX)
}

fn check_tensor(index: usize, tensor: &TensorLayout) -> Result<(), LayoutError> {
    let TensorLayout {
        num_blocks,
        block_stride,
        page_bytes,
    } = *tensor;
    at_least_one(
        format_args!("tensors[{index}].num_blocks"),
        num_blocks.into(),
    )?;
    at_least_one(format_args!("tensors[{index}].page_bytes"), page_bytes)?;
    if page_bytes > block_stride {
        return Err(LayoutError::PageExceedsStride {
            tensor: index,
            page_bytes,
            block_stride,
        });
    }
    let last = u64::from(num_blocks - 1).checked_mul(block_stride);
    let end = last.and_then(|start| start.checked_add(page_bytes));
    addressable(end, || format!("tensors[{index}]"))?;
    Ok(())
}

fn place(
    group: usize,
    refs: &[PageRef],
    tensors: &[TensorLayout],
    blocks_per_chunk: u32,
    slot_bytes: u64,
) -> Result<Group, LayoutError> {
    let mut placed = Vec::with_capacity(refs.len());
    let mut num_blocks = u32::MAX;
    let mut chunk_bytes = 0;
    for (index, &PageRef { tensor, page_bytes }) in refs.iter().enumerate() {
        let Some(target) = tensors.get(tensor as usize) else {
            let num_tensors = tensors.len();
            return Err(LayoutError::UnknownTensor {
                group,
                index,
                tensor,
                num_tensors,
            });
        };
        at_least_one(
            format_args!("groups[{group}][{index}].page_bytes"),
            page_bytes,
        )?;
        if page_bytes > target.page_bytes {
            let limit = target.page_bytes;
            return Err(LayoutError::RefExceedsPage {
                group,
                index,
                tensor,
                page_bytes,
                limit,
            });
        }
        let block_stride = target.block_stride;
        placed.push(PlacedRef {
            tensor,
            page_bytes,
            block_stride,
            offset: chunk_bytes,
        });
        num_blocks = num_blocks.min(target.num_blocks);
        let pages = page_bytes.checked_mul(blocks_per_chunk.into());
        let end = pages.and_then(|bytes| bytes.checked_add(chunk_bytes));
        chunk_bytes = addressable(end, || format!("a chunk of groups[{group}]"))?;
    }
    if chunk_bytes > slot_bytes {
        return Err(LayoutError::SlotTooSmall {
            group,
            slot_bytes,
            needed: chunk_bytes,
        });
    }
    let mut tensors: Vec<u32> = refs.iter().map(|r| r.tensor).collect();
    let next = tensors.iter().cycle().skip(1);
    let is_apart = tensors
        .iter()
        .zip(next)
        .all(|(tensor, next)| tensor != next);
    tensors.sort_unstable();
    tensors.dedup();
    Ok(Group {
        refs: placed,
        num_blocks,
        tensors,
        is_apart,
    })
}

fn at_least_one(field: impl ToString, value: u64) -> Result<(), LayoutError> {
    if value == 0 {
        Err(LayoutError::Zero {
            field: field.to_string(),
        })
    } else {
        Ok(())
    }
}

/// `bytes` if one address space can hold them.
fn addressable(bytes: Option<u64>, what: impl Fn() -> String) -> Result<u64, LayoutError> {
    bytes
        .filter(|&bytes| bytes <= isize::MAX as u64)
        .ok_or_else(|| LayoutError::TooLarge { what: what() })
}
