//! What ARC remembers of evicted keys, and what it learns when one of them is wanted again.

use std::hint::black_box;

use super::KeyOf;
use crate::key::KeyHash;
use crate::keylist::{BATCH, KeyLists};
use crate::pool::Slot;

/// The list of keys evicted from `t1`.
pub(super) const B1: usize = 0;
/// The list of keys evicted from `t2`.
pub(super) const B2: usize = 1;

/// The ghost lists `b1` and `b2`, and the target size of `t1` that hits in them have led to.
pub(super) struct Ghosts {
    lists: KeyLists,
    target: f64,
    num_slots: u32,
}

impl Ghosts {
    /// Nothing remembered; each list will hold up to `num_slots` keys.
    pub(super) fn new(num_slots: u32) -> Self {
        Self {
            lists: KeyLists::new(2, num_slots),
            target: 0.0,
            num_slots,
        }
    }

    /// The size above which `t1` gives the next victim; from 0 to the number of slots.
    pub(super) fn target(&self) -> f64 {
        self.target
    }

    /// Lets a call for a key with this hash wait less for memory.
    #[inline]
    pub(super) fn warm(&self, hash: KeyHash) {
        self.lists.warm(hash);
    }

    /// `key` is wanted and not present. If it is remembered, its list was too short: moves the target
    /// towards that list, the more the shorter the list is, and makes the key the list's newest.
    #[inline]
    pub(super) fn wanted(&mut self, key: &[u8], hash: KeyHash) {
        let Some(entry) = self.lists.find(key, hash) else {
            return;
        };
        let (b1, b2) = (self.lists.len(B1) as f64, self.lists.len(B2) as f64);
        self.target = if self.lists.list_of(entry) == B1 {
            (self.target + (b2 / b1).max(1.0)).min(f64::from(self.num_slots))
        } else {
            (self.target - (b1 / b2).max(1.0)).max(0.0)
        };
        self.lists.renew(entry);
    }

    /// Remembers the keys of up to [`BATCH`] evicted slots, first evicted first; a full list forgets its
    /// oldest. Bit i of `from_t2` says that the i-th goes to `b2`, otherwise it goes to `b1`.
    pub(super) fn remember(&mut self, evicted: &[Slot], from_t2: u64, keys: &KeyOf<'_>) {
        debug_assert!(evicted.len() <= BATCH);
        let to_b2 = from_t2.count_ones() as usize;
        self.lists.make_room(B1, evicted.len() - to_b2);
        self.lists.make_room(B2, to_b2);
        // All reads that wait for memory are started before the first one is needed.
        for &slot in evicted {
            let (key, hash) = keys(slot);
            self.lists.warm(hash);
            black_box(key.as_bytes().len());
        }
        for (i, &slot) in evicted.iter().enumerate() {
            let list = if from_t2 >> i & 1 == 0 { B1 } else { B2 };
            let (key, hash) = keys(slot);
            self.lists.push(list, key, hash);
        }
    }

    /// `key` is present again.
    #[inline]
    pub(super) fn forget(&mut self, key: &[u8], hash: KeyHash) {
        self.lists.remove(key, hash);
    }

    /// The keys of `list`, oldest first, for tests.
    pub(super) fn dump(&self, list: usize) -> Vec<Vec<u8>> {
        self.lists
            .iter(list)
            .map(|key| key.as_bytes().to_vec())
            .collect()
    }

    /// Forgets all keys and the target.
    pub(super) fn clear(&mut self) {
        self.lists.clear();
        self.target = 0.0;
    }

    /// Bytes allocated.
    pub(super) fn metadata_bytes(&self) -> usize {
        self.lists.metadata_bytes()
    }
}
