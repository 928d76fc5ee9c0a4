//! The host pool's slots: which are free, being written or readable, and who holds them.
//!
//! Everything is allocated by [`Pool::new`]; no call allocates or waits, any number of threads may
//! call at once. A slot's life is free -> writing -> ready -> free. Each use has its own
//! [`Generation`], so a handle that outlived its use is an error that changes nothing.
//!
//! `bitmap` holds which slots are free, `word` each slot's state, pins and generation. The bitmap is
//! the only way in: a slot is used by whoever claimed its bit. The one thread whose compare-and-swap
//! makes the word free then returns the bit.

mod bitmap;
#[cfg(all(test, loom))]
mod loom_tests;
mod word;

use std::fmt;

use thiserror::Error;

use self::bitmap::Bitmap;
use self::word::{MAX_PINS, SlotWord, View};

/// A chunk's number in the host pool, the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(u32);

impl Slot {
    /// The slot with this number.
    pub const fn new(slot: u32) -> Self {
        Self(slot)
    }

    /// The slot's number, for indexing.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// The slot's number.
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Which use of a slot a handle belongs to. Counts from 1 and wraps after 2^32 uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Generation(u32);

impl Generation {
    /// The generation with this number, as [`Generation::get`] gave it.
    pub const fn new(generation: u32) -> Self {
        Self(generation)
    }

    /// The number.
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What a slot is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotState {
    /// Nobody's.
    Free,
    /// Its bytes are being written: not readable, not evictable.
    Writing,
    /// All its bytes are there.
    Ready,
}

/// Why a call on a slot was refused. The slot is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SlotError {
    /// The handle's use of the slot is over.
    #[error(
        "stale handle of slot {slot}: generation {given} is over, the slot is at {current}; drop the handle"
    )]
    Stale {
        /// The slot.
        slot: Slot,
        /// The handle's generation.
        given: Generation,
        /// The slot's generation now (of its last use, if it is free).
        current: Generation,
    },
    /// Published twice.
    #[error("slot {slot} is ready already: its write was completed before")]
    NotWriting {
        /// The slot.
        slot: Slot,
    },
    /// Pinned or unpinned before it was published.
    #[error("slot {slot} is still being written: only a published slot can be pinned")]
    NotReady {
        /// The slot.
        slot: Slot,
    },
    /// Released while somebody reads it.
    #[error("slot {slot} has {pins} pins: release it after the last unpin")]
    Pinned {
        /// The slot.
        slot: Slot,
        /// How many.
        pins: u32,
    },
    /// Unpinned more often than pinned.
    #[error("slot {slot} has no pin to release")]
    NotPinned {
        /// The slot.
        slot: Slot,
    },
    /// One pin more than the slot's word can count.
    #[error("slot {slot} has {MAX_PINS} pins, the most there can be: a caller is leaking pins")]
    PinLimit {
        /// The slot.
        slot: Slot,
    },
    /// A slot of another pool.
    #[error("slot {slot} is outside this pool of {num_slots} slots")]
    UnknownSlot {
        /// The slot.
        slot: Slot,
        /// Number of slots of the pool.
        num_slots: u32,
    },
}

/// How many slots are in which state. `free + writing + ready` is the number of slots; each slot is
/// counted as it was when the count came by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolCounts {
    /// Slots that can be allocated.
    pub free: u32,
    /// Slots being written.
    pub writing: u32,
    /// Readable slots, pinned ones included.
    pub ready: u32,
    /// Readable slots with at least one pin.
    pub pinned: u32,
}

/// A fixed number of slots.
#[derive(Debug)]
pub struct Pool {
    bitmap: Bitmap,
    slots: Box<[SlotWord]>,
}

impl Pool {
    /// A pool whose `num_slots` slots are all free.
    pub fn new(num_slots: u32) -> Self {
        Self {
            bitmap: Bitmap::new(num_slots),
            slots: (0..num_slots).map(|_| SlotWord::new()).collect(),
        }
    }

    /// Number of slots, in use or not.
    pub fn num_slots(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Number of slots that can be allocated now.
    pub fn free(&self) -> u32 {
        self.bitmap.free()
    }

    /// Allocates `n` slots and appends them to `out`, or allocates none and returns false.
    ///
    /// Each is then [`SlotState::Writing`] under a new [`Pool::generation`]. Adjacent slots are
    /// preferred and come in ascending order, so that their copies merge.
    pub fn alloc(&self, n: usize, out: &mut Vec<Slot>) -> bool {
        let Ok(n) = u32::try_from(n) else {
            return false;
        };
        if n > self.num_slots() {
            return false;
        }
        // Before anything is taken: growing the vector may fail.
        out.reserve(n as usize);
        self.bitmap.take(n, |slot| {
            self.slots[slot.index()].begin();
            out.push(slot);
        })
    }

    /// The slot's state. A slot outside the pool counts as free.
    pub fn state(&self, slot: Slot) -> SlotState {
        self.view(slot).state
    }

    /// How many pins the slot has.
    pub fn pins(&self, slot: Slot) -> u32 {
        self.view(slot).pins
    }

    /// The generation of the slot's current use (of the last one, if it is free; 0 before the first).
    pub fn generation(&self, slot: Slot) -> Generation {
        self.view(slot).generation
    }

    /// Writing -> Ready: every byte is there. Returns [`SlotError::NotWriting`] the second time.
    pub fn publish(&self, slot: Slot, generation: Generation) -> Result<(), SlotError> {
        self.word(slot)?
            .update(slot, generation, |view| match view.state {
                SlotState::Writing => Ok(View {
                    state: SlotState::Ready,
                    ..view
                }),
                _ => Err(SlotError::NotWriting { slot }),
            })?;
        Ok(())
    }

    /// Forbids the release of a ready slot, once more. Returns its pins, this one included.
    pub fn pin(&self, slot: Slot, generation: Generation) -> Result<u32, SlotError> {
        let after = self
            .word(slot)?
            .update(slot, generation, |view| match view {
                View {
                    state: SlotState::Writing,
                    ..
                } => Err(SlotError::NotReady { slot }),
                View { pins: MAX_PINS, .. } => Err(SlotError::PinLimit { slot }),
                _ => Ok(View {
                    pins: view.pins + 1,
                    ..view
                }),
            })?;
        Ok(after.pins)
    }

    /// Gives one pin back. Returns how many are left.
    pub fn unpin(&self, slot: Slot, generation: Generation) -> Result<u32, SlotError> {
        let after = self
            .word(slot)?
            .update(slot, generation, |view| match view {
                View {
                    state: SlotState::Writing,
                    ..
                } => Err(SlotError::NotReady { slot }),
                View { pins: 0, .. } => Err(SlotError::NotPinned { slot }),
                _ => Ok(View {
                    pins: view.pins - 1,
                    ..view
                }),
            })?;
        Ok(after.pins)
    }

    /// Frees a slot that is being written or is ready and not pinned.
    pub fn release(&self, slot: Slot, generation: Generation) -> Result<(), SlotError> {
        self.free_word(slot, generation)?;
        self.bitmap.put(&[slot]);
        Ok(())
    }

    /// Frees several slots that are in use and not pinned, whatever their generations, cheaper than
    /// one by one. For their only owner: it must know that nobody else uses them.
    ///
    /// # Errors
    /// The first slot that cannot be freed; those before it are free then.
    pub fn release_all(&self, slots: &[Slot]) -> Result<(), SlotError> {
        for (at, &slot) in slots.iter().enumerate() {
            if let Err(error) = self.free_word(slot, self.generation(slot)) {
                self.bitmap.put(&slots[..at]);
                return Err(error);
            }
        }
        self.bitmap.put(slots);
        Ok(())
    }

    fn free_word(&self, slot: Slot, generation: Generation) -> Result<(), SlotError> {
        self.word(slot)?
            .update(slot, generation, |view| match view.pins {
                0 => Ok(View {
                    state: SlotState::Free,
                    ..view
                }),
                pins => Err(SlotError::Pinned { slot, pins }),
            })?;
        Ok(())
    }

    /// Frees a slot whatever it is used for, pins included, and voids every handle of it.
    /// Returns the state it was in; a free slot stays as it is, and so does one outside the pool.
    ///
    /// For resets: the caller answers for copies that are still under way.
    pub fn release_any(&self, slot: Slot) -> SlotState {
        let Ok(word) = self.word(slot) else {
            return SlotState::Free;
        };
        let before = word.force_free();
        if before.state != SlotState::Free {
            self.bitmap.put(&[slot]);
        }
        before.state
    }

    /// How many slots are in which state. Looks at every slot: for tests and diagnostics.
    pub fn counts(&self) -> PoolCounts {
        let mut counts = PoolCounts::default();
        for view in self.slots.iter().map(SlotWord::view) {
            match view.state {
                SlotState::Free => counts.free += 1,
                SlotState::Writing => counts.writing += 1,
                SlotState::Ready => counts.ready += 1,
            }
            counts.pinned += u32::from(view.pins > 0);
        }
        counts
    }

    /// Bytes allocated for the pool's own bookkeeping.
    pub fn metadata_bytes(&self) -> usize {
        size_of_val(&*self.slots) + self.bitmap.metadata_bytes()
    }

    fn word(&self, slot: Slot) -> Result<&SlotWord, SlotError> {
        let unknown = SlotError::UnknownSlot {
            slot,
            num_slots: self.num_slots(),
        };
        self.slots.get(slot.index()).ok_or(unknown)
    }

    fn view(&self, slot: Slot) -> View {
        let none = View {
            state: SlotState::Free,
            pins: 0,
            generation: Generation(0),
        };
        self.slots.get(slot.index()).map_or(none, SlotWord::view)
    }
}
