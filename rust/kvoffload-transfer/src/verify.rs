//! Whether a slot still holds what was stored there: one hash per slot, made after a store and
//! compared before a load.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};

use kvoffload_core::layout::KvLayout;
use kvoffload_core::pool::Slot;
use parking_lot::Mutex;

use crate::error::{CopyError, VerifyReason};
use crate::region::Region;

/// How much is verified.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Verify {
    /// Nothing; no memory is spent either.
    #[default]
    Off,
    /// Every n-th use of a slot is hashed, starting at another use for each slot; loads compare
    /// where there is a hash. The choice depends on nothing but slot and use.
    Sample(NonZeroU32),
    /// Every store is hashed, every load compared.
    All,
}

/// The hashes of all slots. Its methods are called by the job that the fence lets use the slots.
#[derive(Debug)]
pub(crate) struct Verifier {
    every: u32,
    /// Empty if nothing is verified.
    slots: Mutex<Box<[Record]>>,
    checks: AtomicU64,
    failures: AtomicU64,
}

/// What is known about a slot.
#[derive(Debug, Clone, Copy)]
struct Record {
    state: State,
    /// KV group of the chunk.
    group: u32,
    /// How many times the slot was stored to.
    uses: u32,
}

#[derive(Debug, Clone, Copy)]
enum State {
    NeverStored,
    /// A store has begun and not ended well.
    Unfinished,
    /// Stored; not hashed, because of sampling.
    Unhashed,
    Hashed(u64),
}

impl Verifier {
    pub(crate) fn new(verify: Verify, num_slots: u32) -> Self {
        let every = match verify {
            Verify::Off => 0,
            Verify::Sample(every) => every.get(),
            Verify::All => 1,
        };
        let record = Record {
            state: State::NeverStored,
            group: 0,
            uses: 0,
        };
        let records = if every == 0 { 0 } else { num_slots as usize };
        Self {
            every,
            slots: Mutex::new(vec![record; records].into()),
            checks: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        }
    }

    pub(crate) fn is_off(&self) -> bool {
        self.every == 0
    }

    /// Slots compared, and how many of them were not what they should be.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (
            self.checks.load(Ordering::Relaxed),
            self.failures.load(Ordering::Relaxed),
        )
    }

    /// A store to these slots begins: until it ends well they hold nothing of use.
    pub(crate) fn store_begins(&self, chunks: impl Iterator<Item = (usize, Slot)>) {
        let mut slots = self.slots.lock();
        for (group, slot) in chunks {
            let record = &mut slots[slot.index()];
            record.state = State::Unfinished;
            record.group = group as u32;
            record.uses = record.uses.wrapping_add(1);
        }
    }

    /// A store to this slot has ended well. The whole chunk is hashed, whatever part was written.
    ///
    /// # Safety
    /// No other thread writes the slot during the call.
    pub(crate) unsafe fn stored(
        &self,
        layout: &KvLayout,
        region: &Region,
        group: usize,
        slot: Slot,
    ) {
        let uses = self.slots.lock()[slot.index()].uses;
        let state = if uses.wrapping_add(slot.get()).is_multiple_of(self.every) {
            // SAFETY: passed on to the caller.
            State::Hashed(unsafe { hash(layout, region, group, slot) })
        } else {
            State::Unhashed
        };
        self.slots.lock()[slot.index()].state = state;
    }

    /// Compares the slot with what was stored, before job `job` loads it.
    ///
    /// # Safety
    /// No other thread writes the slot during the call.
    pub(crate) unsafe fn check(
        &self,
        layout: &KvLayout,
        region: &Region,
        job: u64,
        group: usize,
        slot: Slot,
    ) -> Result<(), CopyError> {
        let record = self.slots.lock()[slot.index()];
        let wanted = group as u32;
        let wrong = match record.state {
            State::NeverStored => Some(VerifyReason::NeverStored),
            State::Unfinished => Some(VerifyReason::StoreFailed),
            _ if record.group != wanted => Some(VerifyReason::OtherGroup {
                stored: record.group,
                wanted,
            }),
            State::Unhashed => None,
            State::Hashed(stored) => {
                self.checks.fetch_add(1, Ordering::Relaxed);
                // SAFETY: passed on to the caller.
                let found = unsafe { hash(layout, region, group, slot) };
                (found != stored).then_some(VerifyReason::Changed { stored, found })
            }
        };
        let Some(reason) = wrong else { return Ok(()) };
        self.failures.fetch_add(1, Ordering::Relaxed);
        Err(CopyError::Verify { job, slot, reason })
    }
}

/// Hash of the bytes that a chunk of the group has in the slot.
///
/// # Safety
/// No other thread writes the slot during the call.
unsafe fn hash(layout: &KvLayout, region: &Region, group: usize, slot: Slot) -> u64 {
    let start = layout.slot_offset(slot);
    // SAFETY: passed on to the caller.
    unsafe { region.hash(start..start + layout.chunk_bytes(group)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvoffload_core::layout::{PageRef, TensorLayout};

    #[test]
    fn the_hash_covers_the_chunk_and_nothing_else() {
        let tensor = TensorLayout {
            num_blocks: 4,
            block_stride: 40,
            page_bytes: 40,
        };
        let page = |page_bytes| PageRef {
            tensor: 0,
            page_bytes,
        };
        let groups = vec![vec![page(40), page(8)], vec![page(24)]];
        let layout = KvLayout::new(vec![tensor], groups, 2, 4, 128, 4).unwrap();
        let region = Region::new(4, 128).unwrap();
        let verifier = Verifier::new(Verify::All, 4);
        let slot = Slot::new(2);
        for (group, used) in [(0, 96), (1, 48)] {
            for byte in 0..128 {
                verifier.store_begins(std::iter::once((group, slot)));
                // SAFETY: nobody else knows the region.
                let same = unsafe {
                    verifier.stored(&layout, &region, group, slot);
                    *region.base_ptr().add(2 * 128 + byte) ^= 1;
                    verifier.check(&layout, &region, 9, group, slot)
                };
                assert_eq!(same.is_ok(), byte >= used, "byte {byte} of group {group}");
            }
        }
    }
}
