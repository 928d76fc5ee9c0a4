//! Adaptive replacement: what was used once, and what was used again, with a border that learns.

use super::ghost::{B1, B2, Ghosts};
use super::timeline::Timeline;
use super::{Access, KeyOf, Policy, PolicyDump};
use crate::key::{Key, KeyHash};
use crate::keylist::BATCH;
use crate::pool::Slot;

/// Keeps slots used once in `t1` and slots used again in `t2`, each in order of use.
///
/// Victims come from `t1` while it has at least as many slots as the target says, otherwise from `t2`;
/// if that list has nothing evictable, from the other. The target moves when an evicted key is wanted
/// again: up if it was evicted from `t1`, down if from `t2`.
pub struct Arc {
    t1: Timeline,
    t2: Timeline,
    ghosts: Ghosts,
}

impl Arc {
    /// An empty order over `num_slots` slots, at most [`super::MAX_SLOTS`].
    pub fn new(num_slots: u32) -> Self {
        Self {
            t1: Timeline::new(num_slots),
            t2: Timeline::new(num_slots),
            ghosts: Ghosts::new(num_slots),
        }
    }

    /// Makes `slot` the newest of `t2`, whichever list it was in.
    #[inline]
    fn promote(&mut self, slot: Slot) {
        match self.t1.remove(slot) {
            Some(evictable) => {
                self.t2.append(slot);
                if evictable {
                    self.t2.set_evictable(slot);
                }
            }
            None => self.t2.move_to_end(slot),
        }
    }

    /// Makes `slot` the newest of the list that it is in.
    #[inline]
    fn renew(&mut self, slot: Slot) {
        self.list_of(slot).move_to_end(slot);
    }

    #[inline]
    fn list_of(&mut self, slot: Slot) -> &mut Timeline {
        if self.t1.contains(slot) {
            &mut self.t1
        } else {
            &mut self.t2
        }
    }
}

impl Policy for Arc {
    fn insert(&mut self, slot: Slot, key: &Key, hash: KeyHash) {
        self.t1.append(slot);
        self.ghosts.forget(key.as_bytes(), hash);
    }

    fn remove(&mut self, slot: Slot) {
        self.list_of(slot).remove(slot);
    }

    fn is_evictable(&self, slot: Slot) -> bool {
        self.t1.is_evictable(slot) || self.t2.is_evictable(slot)
    }

    fn mark_evictable(&mut self, slot: Slot) {
        self.list_of(slot).set_evictable(slot);
    }

    fn mark_non_evictable(&mut self, slot: Slot) {
        self.list_of(slot).clear_evictable(slot);
    }

    fn touch(&mut self, slot: Slot, ready: bool) {
        // A chunk that is still being written has not been used a second time.
        if ready {
            self.promote(slot)
        } else {
            self.renew(slot)
        }
    }

    fn warm(&self, hash: KeyHash) {
        self.ghosts.warm(hash);
    }

    fn on_store_miss(&mut self, key: &[u8], hash: KeyHash) {
        self.ghosts.wanted(key, hash);
    }

    fn touch_absent(&mut self, key: &[u8], hash: KeyHash) {
        self.ghosts.wanted(key, hash);
    }

    fn on_request_access(&mut self, slot: Slot, access: Access) {
        match access {
            // To write a chunk is not to use it, but it says where the chunk stands among its kind.
            Access::Inserted => self.renew(slot),
            Access::Reused => self.promote(slot),
            Access::Observed => {}
        }
    }

    fn evictable(&self) -> usize {
        self.t1.evictable() + self.t2.evictable()
    }

    fn evict(&mut self, n: usize, keys: &KeyOf<'_>, victims: &mut Vec<Slot>) {
        debug_assert!(
            n <= self.evictable(),
            "{n} victims asked of {}",
            self.evictable()
        );
        // A fraction of a slot does not count.
        let target = self.ghosts.target() as usize;
        let (mut from_t1, mut from_t2) = (0, 0);
        let mut left = n;
        while left > 0 {
            let start = victims.len();
            let mut were_in_t2 = 0;
            for i in 0..left.min(BATCH) {
                let mut victim = None;
                if self.t1.len() >= target {
                    victim = self.t1.take_evictable(&mut from_t1);
                }
                if victim.is_none() {
                    victim = self.t2.take_evictable(&mut from_t2);
                    were_in_t2 |= u64::from(victim.is_some()) << i;
                }
                victims.extend(victim.or_else(|| self.t1.take_evictable(&mut from_t1)));
            }
            let batch = &victims[start..];
            if batch.is_empty() {
                return;
            }
            left -= batch.len();
            self.ghosts.remember(batch, were_in_t2, keys);
        }
    }

    fn clear(&mut self) {
        self.t1.clear();
        self.t2.clear();
        self.ghosts.clear();
    }

    fn metadata_bytes(&self) -> usize {
        self.t1.metadata_bytes() + self.t2.metadata_bytes() + self.ghosts.metadata_bytes()
    }

    fn dump(&self) -> PolicyDump {
        PolicyDump {
            resident: vec![
                ("t1", self.t1.iter().collect()),
                ("t2", self.t2.iter().collect()),
            ],
            ghosts: vec![("b1", self.ghosts.dump(B1)), ("b2", self.ghosts.dump(B2))],
            target: Some(self.ghosts.target()),
        }
    }
}
