//! Why a key is not in the pool.
//!
//! A table of fixed size with one place per hash: a later reason overwrites an earlier one, and one
//! key in some billions may be given another key's reason. It is for people, not for decisions.

use crate::key::KeyHash;

/// Why a key that was looked up is not in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Missed {
    /// Nobody has stored it, as far as is remembered.
    NeverStored,
    /// It had to make room.
    Evicted,
    /// There was no room for it.
    Refused,
    /// A copy of it failed.
    Failed,
    /// It had been offered too rarely.
    Threshold,
}

/// Places per slot: as many chunks again as the pool holds are remembered, few of them overwritten.
const PLACES_PER_SLOT: usize = 2;

#[derive(Debug)]
pub(super) struct Whys {
    /// Hash, and the reason's number plus one; 0: nothing.
    places: Box<[(u32, u8)]>,
}

impl Whys {
    pub(super) fn new(num_slots: u32) -> Self {
        let places = (num_slots as usize * PLACES_PER_SLOT).next_power_of_two();
        Self {
            places: vec![(0, 0); places].into(),
        }
    }

    pub(super) fn note(&mut self, KeyHash(hash): KeyHash, reason: Missed) {
        let at = hash as usize & (self.places.len() - 1);
        self.places[at] = (hash, reason as u8 + 1);
    }

    pub(super) fn get(&self, KeyHash(hash): KeyHash) -> Missed {
        const REASONS: [Missed; 5] = [
            Missed::NeverStored,
            Missed::Evicted,
            Missed::Refused,
            Missed::Failed,
            Missed::Threshold,
        ];
        match self.places[hash as usize & (self.places.len() - 1)] {
            (other, reason) if other == hash && reason > 0 => REASONS[usize::from(reason) - 1],
            _ => Missed::NeverStored,
        }
    }

    pub(super) fn clear(&mut self) {
        self.places.fill((0, 0));
    }

    pub(super) fn metadata_bytes(&self) -> usize {
        size_of_val(&*self.places)
    }
}
