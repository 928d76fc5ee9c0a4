//! Which keys have been offered often enough to be worth a slot.

use crate::key::{Key, KeyHash};
use crate::keylist::KeyLists;

/// Counts how often each key was offered for a store, for the setting `store_threshold`.
///
/// It remembers a bounded number of keys and forgets the one that was offered the longest ago, but an
/// offer never makes it forget a key of the same offer: if every remembered key is one, the rest of the
/// offer is not counted. Below a threshold of 2 it counts nothing, allocates nothing, and admits every
/// key. What it knows is about requests, not about the pool: a reset of the pool leaves it alone.
pub struct Tracker {
    threshold: u32,
    /// The keys, oldest offer first. One list.
    keys: KeyLists,
    counts: Box<[Count]>,
    /// The number of the current offer; never 0.
    offer: u32,
}

#[derive(Clone, Copy, Default)]
struct Count {
    offers: u32,
    /// The last offer that found the key remembered, so that a key counts once as protected.
    last_offer: u32,
}

impl Tracker {
    /// A tracker that admits a key at its `threshold`-th offer and remembers up to `max_entries` keys,
    /// 72 bytes each.
    pub fn new(threshold: u32, max_entries: u32) -> Self {
        let max_entries = if threshold < 2 { 0 } else { max_entries };
        Self {
            threshold,
            keys: KeyLists::new(1, max_entries),
            counts: vec![Count::default(); max_entries as usize].into(),
            offer: 0,
        }
    }

    /// Whether it counts at all.
    pub fn is_enabled(&self) -> bool {
        self.threshold >= 2
    }

    /// Counts one offer of `keys`.
    pub fn record(&mut self, keys: &[(&[u8], KeyHash)]) {
        if self.counts.is_empty() {
            return;
        }
        self.start_offer();
        let mut unprotected = self.keys.len(0);
        for &(key, hash) in keys {
            if let Some(entry) = self.keys.find(key, hash) {
                self.keys.renew(entry);
                let count = &mut self.counts[entry as usize];
                count.offers = count.offers.saturating_add(1);
                if count.last_offer != self.offer {
                    count.last_offer = self.offer;
                    unprotected -= 1;
                }
            }
        }
        // The protected keys are the newest now, so the oldest is unprotected while there is any.
        for &(key, hash) in keys {
            if self.keys.find(key, hash).is_some() {
                continue;
            }
            if self.keys.len(0) == self.counts.len() {
                if unprotected == 0 {
                    continue;
                }
                unprotected -= 1;
            }
            if let Some(entry) = self.keys.push(0, &Key::new(key), hash) {
                self.counts[entry as usize] = Count {
                    offers: 1,
                    last_offer: self.offer,
                };
            }
        }
    }

    /// Whether `key` has been offered often enough.
    pub fn admits(&self, key: &[u8], hash: KeyHash) -> bool {
        !self.is_enabled() || self.count(key, hash) >= self.threshold
    }

    /// Bytes allocated, without the memory of keys longer than [`Key::INLINE`].
    pub fn metadata_bytes(&self) -> usize {
        self.keys.metadata_bytes() + size_of_val(&*self.counts)
    }

    fn count(&self, key: &[u8], hash: KeyHash) -> u32 {
        self.keys
            .find(key, hash)
            .map_or(0, |entry| self.counts[entry as usize].offers)
    }

    fn start_offer(&mut self) {
        self.offer = self.offer.wrapping_add(1);
        if self.offer == 0 {
            // The numbers start again: no old one may look like a new one.
            self.counts
                .iter_mut()
                .for_each(|count| count.last_offer = 0);
            self.offer = 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Keys with their counts, oldest offer first: the rules written down literally.
    #[derive(Default)]
    struct Model(Vec<(u8, u32)>);

    impl Model {
        fn record(&mut self, keys: &[u8], max_entries: usize) {
            let mut protected: Vec<u8> = Vec::new();
            for &key in keys {
                if let Some(at) = self.0.iter().position(|entry| entry.0 == key) {
                    let (_, count) = self.0.remove(at);
                    self.0.push((key, count + 1));
                    protected.push(key);
                }
            }
            protected.sort_unstable();
            protected.dedup();
            let mut unprotected = self.0.len() - protected.len();
            for &key in keys {
                if self.0.iter().any(|entry| entry.0 == key) {
                    continue;
                }
                if self.0.len() >= max_entries {
                    if unprotected == 0 {
                        continue;
                    }
                    self.0.remove(0);
                    unprotected -= 1;
                }
                self.0.push((key, 1));
            }
        }
    }

    fn record(tracker: &mut Tracker, keys: &[u8]) {
        let keys: Vec<[u8; 1]> = keys.iter().map(|&key| [key]).collect();
        let offer: Vec<_> = keys
            .iter()
            .map(|key| (&key[..], KeyHash::of(key)))
            .collect();
        tracker.record(&offer);
    }

    fn dump(tracker: &Tracker) -> Vec<(u8, u32)> {
        let keys = tracker.keys.iter(0).map(Key::as_bytes);
        keys.map(|key| (key[0], tracker.count(key, KeyHash::of(key))))
            .collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn it_counts_offers(
            threshold in 2..5u32,
            max_entries in 0..12u32,
            offers in prop::collection::vec(prop::collection::vec(0..20u8, 0..16), 1..40),
            near_the_last_number in any::<bool>(),
        ) {
            let mut tracker = Tracker::new(threshold, max_entries);
            tracker.offer = if near_the_last_number { u32::MAX - 5 } else { 0 };
            let mut model = Model::default();
            for offer in offers {
                record(&mut tracker, &offer);
                model.record(&offer, max_entries as usize);
                prop_assert_eq!(dump(&tracker), &model.0[..]);
                for key in 0..20 {
                    let count = model.0.iter().find(|entry| entry.0 == key).map_or(0, |e| e.1);
                    let admitted = tracker.admits(&[key], KeyHash::of(&[key]));
                    prop_assert_eq!(admitted, count >= threshold);
                }
            }
        }
    }

    #[test]
    fn an_offer_larger_than_the_tracker_keeps_what_it_had() {
        let mut tracker = Tracker::new(2, 2);
        record(&mut tracker, &[1, 2]);
        record(&mut tracker, &[3, 2, 4, 5, 1]);
        assert_eq!(dump(&tracker), [(2, 2), (1, 2)]);
    }

    #[test]
    fn without_a_threshold_it_costs_nothing_and_admits_everything() {
        for threshold in [0, 1] {
            let mut tracker = Tracker::new(threshold, u32::MAX);
            record(&mut tracker, &[1, 2, 3]);
            assert!(!tracker.is_enabled() && tracker.admits(b"new", KeyHash::of(b"new")));
            assert!(tracker.metadata_bytes() < 64);
        }
    }
}
