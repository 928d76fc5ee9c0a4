//! The state of one slot in one atomic word: `state (2 bits) | pins (30 bits) | generation (32 bits)`.
//!
//! One word, so that "is this handle still good, is the slot ready, count me in" is one
//! compare-and-swap. A failed call has written nothing.
//!
//! Orderings: every successful transition is `AcqRel`. What a thread did to a slot before it
//! published, unpinned or released it (its copies, for instance) is therefore visible to whoever
//! pins, releases or takes the slot after that. Failed attempts load with `Acquire` too, so that the
//! error they report is at least as new as anything the caller has already seen.

use super::{Generation, Slot, SlotError, SlotState};
use crate::sync::atomic::{AtomicU64, Ordering};

const STATE_SHIFT: u32 = 62;
const PINS_SHIFT: u32 = 32;
const ONE_PIN: u64 = 1 << PINS_SHIFT;

/// The largest number of pins that one slot can have.
pub(super) const MAX_PINS: u32 = (1 << 30) - 1;

/// A decoded slot word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct View {
    pub(super) state: SlotState,
    pub(super) pins: u32,
    pub(super) generation: Generation,
}

impl View {
    fn decode(raw: u64) -> Self {
        let state = match raw >> STATE_SHIFT {
            0 => SlotState::Free,
            1 => SlotState::Writing,
            // Nobody ever stores a third value.
            _ => SlotState::Ready,
        };
        let pins = (raw >> PINS_SHIFT) as u32 & MAX_PINS;
        Self {
            state,
            pins,
            generation: Generation(raw as u32),
        }
    }

    fn encode(self) -> u64 {
        let state = match self.state {
            SlotState::Free => 0,
            SlotState::Writing => 1,
            SlotState::Ready => 2,
        };
        (state << STATE_SHIFT) | (u64::from(self.pins) * ONE_PIN) | u64::from(self.generation.0)
    }
}

/// One slot's atomic word.
#[derive(Debug)]
pub(super) struct SlotWord(AtomicU64);

impl SlotWord {
    /// A free slot that has never been used: generation 0.
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    pub(super) fn view(&self) -> View {
        View::decode(self.0.load(Ordering::Acquire))
    }

    /// Free -> Writing under a new generation. Only for the thread that has just claimed the slot's
    /// bit in the bitmap.
    ///
    /// A load and a store are enough. Claiming the bit synchronised with the release that set it, so
    /// the load sees that release's `Free`; and nobody else writes a free word: handles are stale,
    /// and `release_any` leaves free slots alone.
    pub(super) fn begin(&self) {
        let free = self.view();
        debug_assert_eq!(
            (free.state, free.pins),
            (SlotState::Free, 0),
            "claimed a used slot"
        );
        let generation = Generation(free.generation.0.wrapping_add(1));
        let begun = View {
            state: SlotState::Writing,
            pins: 0,
            generation,
        };
        self.0.store(begun.encode(), Ordering::Release);
    }

    /// Applies `step` to the live use `generation` of the slot, or reports why it cannot.
    /// Returns the word after.
    pub(super) fn update(
        &self,
        slot: Slot,
        generation: Generation,
        step: impl Fn(View) -> Result<View, SlotError>,
    ) -> Result<View, SlotError> {
        let mut raw = self.0.load(Ordering::Acquire);
        loop {
            let before = View::decode(raw);
            if before.generation != generation || before.state == SlotState::Free {
                let current = before.generation;
                return Err(SlotError::Stale {
                    slot,
                    given: generation,
                    current,
                });
            }
            let after = step(before)?;
            match self.0.compare_exchange_weak(
                raw,
                after.encode(),
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => return Ok(after),
                Err(now) => raw = now,
            }
        }
    }

    /// Any state -> Free, pinned or not. Returns the word before; a free slot is left alone.
    ///
    /// The generation stays: handles are void because the slot is free, and stay void because its
    /// next use has the next generation.
    pub(super) fn force_free(&self) -> View {
        let mut raw = self.0.load(Ordering::Acquire);
        loop {
            let before = View::decode(raw);
            if before.state == SlotState::Free {
                return before;
            }
            let free = View {
                state: SlotState::Free,
                pins: 0,
                generation: before.generation,
            };
            match self.0.compare_exchange_weak(
                raw,
                free.encode(),
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => return before,
                Err(now) => raw = now,
            }
        }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn every_field_survives_encoding_at_its_limits() {
        for state in [SlotState::Free, SlotState::Writing, SlotState::Ready] {
            for pins in [0, 1, MAX_PINS] {
                for generation in [0, 1, u32::MAX].map(Generation) {
                    let view = View {
                        state,
                        pins,
                        generation,
                    };
                    assert_eq!(View::decode(view.encode()), view);
                }
            }
        }
    }

    #[test]
    fn the_generation_wraps_without_touching_state_or_pins() {
        let last = View {
            state: SlotState::Free,
            pins: 0,
            generation: Generation(u32::MAX),
        };
        let word = SlotWord(AtomicU64::new(last.encode()));
        word.begin();
        let view = word.view();
        assert_eq!((view.state, view.pins), (SlotState::Writing, 0));
        assert_eq!(view.generation, Generation(0));
    }
}
