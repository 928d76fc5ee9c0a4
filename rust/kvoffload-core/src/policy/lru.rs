//! Least recently used first.

use super::timeline::Timeline;
use super::{Access, KeyOf, Policy, PolicyDump};
use crate::key::{Key, KeyHash};
use crate::pool::Slot;

/// Evicts the slot whose last insertion, touch or access by a finished request is the longest ago.
///
/// Any access counts, even of a request that only offered the chunk or wrote it.
pub struct Lru {
    order: Timeline,
}

impl Lru {
    /// An empty order over `num_slots` slots, at most [`super::MAX_SLOTS`].
    pub fn new(num_slots: u32) -> Self {
        Self {
            order: Timeline::new(num_slots),
        }
    }
}

impl Policy for Lru {
    fn insert(&mut self, slot: Slot, _key: &Key, _hash: KeyHash) {
        self.order.append(slot);
    }

    fn remove(&mut self, slot: Slot) {
        self.order.remove(slot);
    }

    fn is_evictable(&self, slot: Slot) -> bool {
        self.order.is_evictable(slot)
    }

    fn mark_evictable(&mut self, slot: Slot) {
        self.order.set_evictable(slot);
    }

    fn mark_non_evictable(&mut self, slot: Slot) {
        self.order.clear_evictable(slot);
    }

    fn touch(&mut self, slot: Slot, _ready: bool) {
        self.order.move_to_end(slot);
    }

    fn on_store_miss(&mut self, _key: &[u8], _hash: KeyHash) {}

    fn touch_absent(&mut self, _key: &[u8], _hash: KeyHash) {}

    fn on_request_access(&mut self, slot: Slot, _access: Access) {
        self.order.move_to_end(slot);
    }

    fn evictable(&self) -> usize {
        self.order.evictable()
    }

    fn evict(&mut self, n: usize, _keys: &KeyOf<'_>, victims: &mut Vec<Slot>) {
        debug_assert!(
            n <= self.evictable(),
            "{n} victims asked of {}",
            self.evictable()
        );
        let mut from = 0;
        victims.extend(std::iter::from_fn(|| self.order.take_evictable(&mut from)).take(n));
    }

    fn clear(&mut self) {
        self.order.clear();
    }

    fn metadata_bytes(&self) -> usize {
        self.order.metadata_bytes()
    }

    fn dump(&self) -> PolicyDump {
        PolicyDump {
            resident: vec![("lru", self.order.iter().collect())],
            ghosts: Vec::new(),
            target: None,
        }
    }
}
