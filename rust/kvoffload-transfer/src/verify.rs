//! Whether a slot holds what a load wants from it.
//!
//! What was stored into each slot is noted always: the KV group, and which blocks of the chunk. A load
//! of anything else is refused, because it would read what a former chunk left behind. vLLM leaves
//! blocks out of a chunk when they have fallen out of a sliding window. On request one hash per slot
//! is made after a store and compared before a load, too.

use std::collections::{BTreeSet, HashSet};
use std::num::{NonZeroU32, NonZeroU64};
use std::sync::atomic::{AtomicU64, Ordering};

use kvoffload_core::layout::KvLayout;
use kvoffload_core::plan::ChunkUse;
use kvoffload_core::pool::Slot;
use parking_lot::{Mutex, MutexGuard};

use crate::error::{CopyError, VerifyReason};
use crate::region::Region;

/// How much is verified.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Verify {
    /// No bytes; only whether they were stored.
    #[default]
    Off,
    /// Every n-th use of a slot is hashed, starting at another use for each slot; loads compare
    /// where there is a hash. The choice depends on nothing but slot and use.
    Sample(NonZeroU32),
    /// Every store is hashed, every load compared.
    All,
}

/// What is known of all slots. Its methods are called by the job that the fence lets use the slots.
#[derive(Debug)]
pub(crate) struct Verifier {
    /// Every how many uses of a slot are hashed; 0: none.
    every: u32,
    /// Whether loads are looked at.
    on: bool,
    slots: Mutex<Slots>,
    checks: AtomicU64,
    failures: AtomicU64,
}

#[derive(Debug)]
struct Slots {
    records: Box<[Record]>,
    /// Stores that have not ended well: their slots hold nothing of use. So a store that ends well costs
    /// one step here, and one that ends in any other way needs none.
    unfinished: HashSet<u64>,
    /// Stores that were cancelled before they began, as (slot, store): but for those before the
    /// last one to the slot that did.
    void: BTreeSet<(u32, u64)>,
}

/// What is known about a slot.
#[derive(Debug, Clone, Copy, Default)]
struct Record {
    /// Number of the last store that began; 0: there was none.
    store: u64,
    hash: Option<NonZeroU64>,
    /// KV group of the chunk.
    group: u32,
    /// Blocks of the chunk that were stored: from the first, up to the end.
    first: u32,
    end: u32,
    /// How many times the slot was stored to.
    uses: u32,
}

/// In place of the number of a store that failed.
const FAILED: u64 = u64::MAX;

/// A store: its job's position in the order of submits, from 1 on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StoreNumber(u64);

impl StoreNumber {
    /// Of the job at this position.
    pub(crate) fn new(order: u64) -> Self {
        Self(order)
    }
}

impl Verifier {
    pub(crate) fn new(verify: Verify, stored_only: bool, num_slots: u32) -> Self {
        let every = match verify {
            Verify::Off => 0,
            Verify::Sample(every) => every.get(),
            Verify::All => 1,
        };
        Self {
            every,
            on: stored_only || every != 0,
            slots: Mutex::new(Slots {
                records: vec![Record::default(); num_slots as usize].into(),
                unfinished: HashSet::new(),
                void: BTreeSet::new(),
            }),
            checks: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        }
    }

    /// Slots compared, and how many of them were not what they should be.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (
            self.checks.load(Ordering::Relaxed),
            self.failures.load(Ordering::Relaxed),
        )
    }

    /// A store begins: until it ends well its slots hold nothing of use. To be called before any other
    /// job may use them.
    pub(crate) fn store_begins(
        &self,
        StoreNumber(store): StoreNumber,
        chunks: impl Iterator<Item = ChunkUse>,
    ) {
        let mut slots = self.slots.lock();
        let slots = &mut *slots;
        slots.unfinished.insert(store);
        let any_void = !slots.void.is_empty();
        for chunk in chunks {
            if any_void {
                let slot = chunk.slot.get();
                while let Some(&old) = slots.void.range((slot, 0)..(slot, store)).next() {
                    slots.void.remove(&old);
                }
            }
            let record = &mut slots.records[chunk.slot.index()];
            *record = Record {
                store,
                hash: None,
                group: chunk.group as u32,
                first: chunk.first,
                end: chunk.end,
                uses: record.uses.wrapping_add(1),
            };
        }
    }

    /// A store to these chunks has ended well. Each is hashed as a whole, whatever part was written;
    /// stops when `stop` says so.
    ///
    /// # Safety
    /// No other thread writes the slots during the call.
    pub(crate) unsafe fn stored(
        &self,
        layout: &KvLayout,
        region: &Region,
        store: StoreNumber,
        chunks: impl Iterator<Item = ChunkUse>,
        stop: impl Fn() -> bool,
    ) {
        if self.every != 0 {
            for chunk in chunks.take_while(|_| !stop()) {
                let uses = self.slots.lock().records[chunk.slot.index()].uses;
                if uses
                    .wrapping_add(chunk.slot.get())
                    .is_multiple_of(self.every)
                {
                    // SAFETY: passed on to the caller.
                    let hash = Some(unsafe { hash(layout, region, chunk) });
                    self.slots.lock().records[chunk.slot.index()].hash = hash;
                }
            }
        }
        self.slots.lock().unfinished.remove(&store.0);
    }

    /// A store to these chunks has failed: notes that with the slots, so that it need not be kept apart.
    pub(crate) fn failed(&self, store: StoreNumber, chunks: impl Iterator<Item = ChunkUse>) {
        let mut slots = self.slots.lock();
        chunks.for_each(|chunk| slots.records[chunk.slot.index()].store = FAILED);
        slots.unfinished.remove(&store.0);
    }

    /// A store was cancelled before it began. Loads submitted after it want what it was to write, so
    /// for them the slots hold nothing of use; those before it may still find what they want.
    pub(crate) fn cancelled(&self, store: u64, chunks: impl Iterator<Item = ChunkUse>) {
        let void = &mut self.slots.lock().void;
        void.extend(chunks.map(|chunk| (chunk.slot.get(), store)));
    }

    /// Compares slots with what was stored, before job `job` loads from them, which is the one at
    /// position `order` of all submits; the first that differs is an error. Stops when `stop` says so.
    ///
    /// # Safety
    /// No other thread writes the slots during the call.
    pub(crate) unsafe fn check(
        &self,
        layout: &KvLayout,
        region: &Region,
        (job, order): (u64, u64),
        chunks: impl Iterator<Item = ChunkUse>,
        stop: impl Fn() -> bool,
    ) -> Result<(), CopyError> {
        if !self.on {
            return Ok(());
        }
        let mut slots = self.slots.lock();
        for chunk in chunks {
            let slot = chunk.slot;
            let record = slots.records[slot.index()];
            let wrong = match (record.hash, slots.differs(record, chunk, order)) {
                (Some(stored), None) => {
                    if stop() {
                        return Err(CopyError::Abandoned { job });
                    }
                    self.checks.fetch_add(1, Ordering::Relaxed);
                    // A hash takes long, and the other direction needs the lock.
                    // SAFETY: passed on to the caller.
                    let found =
                        MutexGuard::unlocked(&mut slots, || unsafe { hash(layout, region, chunk) });
                    let (stored, found) = (stored.get(), found.get());
                    (found != stored).then_some(VerifyReason::Changed { stored, found })
                }
                (_, wrong) => wrong,
            };
            if let Some(reason) = wrong {
                self.failures.fetch_add(1, Ordering::Relaxed);
                return Err(CopyError::Verify { job, slot, reason });
            }
        }
        Ok(())
    }
}

impl Slots {
    fn is_unfinished(&self, store: u64) -> bool {
        !self.unfinished.is_empty() && self.unfinished.contains(&store)
    }

    /// Whether a store that came between the last one that began and a load was cancelled.
    fn is_void(&self, slot: Slot, store: u64, load: u64) -> bool {
        let slot = slot.get();
        // Without fences a later store may have begun.
        store < load
            && !self.void.is_empty()
            && self
                .void
                .range((slot, store)..(slot, load))
                .next()
                .is_some()
    }

    /// Why the slot does not hold what a load wants, whatever its bytes are.
    fn differs(&self, record: Record, chunk: ChunkUse, load: u64) -> Option<VerifyReason> {
        let wanted = chunk.group as u32;
        if record.store == 0 {
            Some(VerifyReason::NeverStored)
        } else if record.store == FAILED
            || self.is_unfinished(record.store)
            || self.is_void(chunk.slot, record.store, load)
        {
            Some(VerifyReason::StoreFailed)
        } else if record.group != wanted {
            Some(VerifyReason::OtherGroup {
                stored: record.group,
                wanted,
            })
        } else if chunk.first < record.first || chunk.end > record.end {
            Some(VerifyReason::OtherBlocks {
                stored: (record.first, record.end),
                wanted: (chunk.first, chunk.end),
            })
        } else {
            None
        }
    }
}

/// Hash of the bytes that the chunk has in its slot, all blocks of it.
///
/// # Safety
/// No other thread writes the slot during the call.
unsafe fn hash(layout: &KvLayout, region: &Region, chunk: ChunkUse) -> NonZeroU64 {
    let start = layout.slot_offset(chunk.slot);
    // SAFETY: passed on to the caller.
    let hash = unsafe { region.hash(start..start + layout.chunk_bytes(chunk.group)) };
    NonZeroU64::new(hash).unwrap_or(NonZeroU64::MIN)
}
