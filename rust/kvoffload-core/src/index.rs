//! From a key's hash to the number that was stored under it, without ever pausing.
//!
//! Open addressing with linear probing over one array of `u64` entries, `tag (32) | value (32)`: a
//! probe reads neighbours in one cache line, and a key is compared only where its whole hash agrees.
//!
//! Removal shifts the rest of the run back instead of leaving a tombstone. That matters more than the
//! few nanoseconds it costs: a table with tombstones (hashbrown, thus `HashMap`) rehashes in place
//! once they have used up its growth budget, so a cache that inserts and removes at a constant size
//! pauses for time in proportion to all its entries, in the middle of some scheduler step. Here the
//! worst call is as long as one run of neighbours, and at most half of the entries are ever used.

use crate::key::KeyHash;

/// An entry without a value. No value equals [`Index::NONE`], so no full entry looks like it.
const EMPTY: u64 = u64::MAX;

/// Entries per value that may be held: the table is at most half full.
const SPREAD: usize = 2;

/// A table from [`KeyHash`] to `u32` values; the caller holds the keys and compares them.
#[derive(Clone, Debug, Default)]
pub struct Index {
    entries: Box<[u64]>,
    len: usize,
    grows: bool,
}

impl Index {
    /// The one value that cannot be stored.
    pub const NONE: u32 = u32::MAX;

    /// A table for up to `capacity` values. Allocates now and never again; 16 bytes a value.
    pub fn with_capacity(capacity: usize) -> Self {
        Self {
            entries: vec![EMPTY; capacity * SPREAD].into(),
            len: 0,
            grows: false,
        }
    }

    /// An empty table that allocates nothing yet and doubles whenever it is half full.
    ///
    /// For tables that live as long as one request; doubling takes time in proportion to the size.
    pub fn growing() -> Self {
        Self {
            grows: true,
            ..Self::default()
        }
    }

    /// Number of values held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no value is held.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The value stored under `hash` for which `is_it` answers yes.
    #[inline]
    pub fn get(&self, hash: KeyHash, is_it: impl FnMut(u32) -> bool) -> Option<u32> {
        self.find(hash, is_it).map(|at| value(self.entries[at]))
    }

    /// Stores `value` under `hash`. The caller knows that its key is not in the table.
    ///
    /// # Panics
    /// If a table of fixed capacity is full: its owner has lost count, and to go on would lose keys.
    #[inline]
    pub fn insert_unique(&mut self, hash: KeyHash, value: u32) {
        debug_assert_ne!(value, Self::NONE, "this value means that an entry is empty");
        if self.len * SPREAD == self.entries.len() {
            self.grow();
        }
        self.len += 1;
        self.place(u64::from(hash.0) << 32 | u64::from(value));
    }

    /// Removes and returns the value stored under `hash` for which `is_it` answers yes.
    #[inline]
    pub fn remove(&mut self, hash: KeyHash, is_it: impl FnMut(u32) -> bool) -> Option<u32> {
        let mut hole = self.find(hash, is_it)?;
        let removed = value(self.entries[hole]);
        // Every later entry of the run that may stand in the hole moves there and leaves a new one.
        let mut at = hole;
        loop {
            at = self.after(at);
            let entry = self.entries[at];
            if entry == EMPTY {
                break;
            }
            if self.distance(self.home(tag(entry)), at) >= self.distance(hole, at) {
                self.entries[hole] = entry;
                hole = at;
            }
        }
        self.entries[hole] = EMPTY;
        self.len -= 1;
        Some(removed)
    }

    /// Makes room for `more` values at once, if the table may grow.
    pub fn reserve(&mut self, more: usize) {
        let size = (self.len + more) * SPREAD;
        if self.grows && size > self.entries.len() {
            self.resize(size.next_power_of_two());
        }
    }

    /// The values held, in no particular order.
    pub fn values(&self) -> impl Iterator<Item = u32> + '_ {
        self.entries
            .iter()
            .filter(|entry| **entry != EMPTY)
            .map(|entry| value(*entry))
    }

    /// Removes every value; keeps the memory. Takes time in proportion to the capacity.
    pub fn clear(&mut self) {
        self.entries.fill(EMPTY);
        self.len = 0;
    }

    /// Bytes allocated.
    pub fn metadata_bytes(&self) -> usize {
        size_of_val(&*self.entries)
    }

    #[inline]
    fn find(&self, hash: KeyHash, mut is_it: impl FnMut(u32) -> bool) -> Option<usize> {
        if self.entries.is_empty() {
            return None;
        }
        let mut at = self.home(hash.0);
        loop {
            let entry = self.entries[at];
            if entry == EMPTY {
                return None;
            }
            if tag(entry) == hash.0 && is_it(value(entry)) {
                return Some(at);
            }
            at = self.after(at);
        }
    }

    /// Writes `entry` into the first free place of its run. There is one: half of them are free.
    #[inline]
    fn place(&mut self, entry: u64) {
        let mut at = self.home(tag(entry));
        while self.entries[at] != EMPTY {
            at = self.after(at);
        }
        self.entries[at] = entry;
    }

    #[cold]
    fn grow(&mut self) {
        assert!(self.grows, "an index for {} values got one more", self.len);
        self.resize((self.entries.len() * 2).max(16));
    }

    fn resize(&mut self, size: usize) {
        let old = std::mem::replace(&mut self.entries, vec![EMPTY; size].into());
        for &entry in old.iter().filter(|&&entry| entry != EMPTY) {
            self.place(entry);
        }
    }

    /// Where the search for `tag` starts: the high bits scale to any table size, no power of two.
    #[inline]
    fn home(&self, tag: u32) -> usize {
        ((u64::from(tag) * self.entries.len() as u64) >> 32) as usize
    }

    #[inline]
    fn after(&self, at: usize) -> usize {
        if at + 1 == self.entries.len() {
            0
        } else {
            at + 1
        }
    }

    /// Steps from `from` forward to `to`, around the end if need be.
    #[inline]
    fn distance(&self, from: usize, to: usize) -> usize {
        if to >= from {
            to - from
        } else {
            to + self.entries.len() - from
        }
    }
}

#[inline]
fn tag(entry: u64) -> u32 {
    (entry >> 32) as u32
}

#[inline]
fn value(entry: u64) -> u32 {
    entry as u32
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    /// Every value sits in an unbroken run from its home, so that a search finds it.
    fn validate(index: &Index) {
        let full = index
            .entries
            .iter()
            .filter(|&&entry| entry != EMPTY)
            .count();
        assert_eq!(full, index.len);
        assert!(full * SPREAD <= index.entries.len());
        for (at, &entry) in index.entries.iter().enumerate() {
            let mut step = index.home(tag(entry));
            while entry != EMPTY && step != at {
                assert_ne!(
                    index.entries[step], EMPTY,
                    "a gap between an entry and its home"
                );
                step = index.after(step);
            }
        }
    }

    /// Tags that collide: equal ones, neighbours in one run, and runs that wrap around the end.
    fn tags() -> impl Strategy<Value = u32> {
        prop_oneof![
            Just(0),
            Just(u32::MAX),
            (0..4u32).prop_map(|high| high << 30),
            (0..8u32).prop_map(|low| u32::MAX - (low << 26)),
            any::<u32>(),
        ]
    }

    #[derive(Clone, Debug)]
    enum Op {
        Insert(u32),
        Remove(prop::sample::Index),
        RemoveAbsent(u32),
        Clear,
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let op = prop_oneof![
            60 => tags().prop_map(Op::Insert),
            40 => any::<prop::sample::Index>().prop_map(Op::Remove),
            10 => tags().prop_map(Op::RemoveAbsent),
            1 => Just(Op::Clear),
        ];
        prop::collection::vec(op, 1..300)
    }

    fn run(index: &mut Index, capacity: usize, ops: &[Op]) {
        let mut model: HashMap<u32, u32> = HashMap::new(); // value -> tag
        let mut next_value = 0;
        for op in ops {
            match *op {
                Op::Insert(tag) if model.len() < capacity => {
                    index.insert_unique(KeyHash(tag), next_value);
                    model.insert(next_value, tag);
                    next_value += 1;
                }
                Op::Insert(_) => {}
                Op::Remove(ref which) => {
                    let mut values: Vec<u32> = model.keys().copied().collect();
                    values.sort_unstable();
                    if !values.is_empty() {
                        let value = values[which.index(values.len())];
                        let tag = model.remove(&value).expect("the model holds it");
                        assert_eq!(index.remove(KeyHash(tag), |v| v == value), Some(value));
                    }
                }
                Op::RemoveAbsent(tag) => {
                    assert_eq!(index.remove(KeyHash(tag), |_| false), None);
                }
                Op::Clear => {
                    index.clear();
                    model.clear();
                }
            }
            validate(index);
            assert_eq!(
                (index.len(), index.is_empty()),
                (model.len(), model.is_empty())
            );
            for value in 0..next_value {
                let tag = model.get(&value);
                let asked = tag.copied().unwrap_or(value);
                assert_eq!(
                    index.get(KeyHash(asked), |v| v == value),
                    tag.map(|_| value)
                );
            }
        }
    }

    proptest! {
        #[test]
        fn a_fixed_index_is_a_map(capacity in 0..40usize, ops in ops()) {
            let mut index = Index::with_capacity(capacity);
            run(&mut index, capacity, &ops);
            prop_assert_eq!(index.metadata_bytes(), capacity * 16);
        }

        #[test]
        fn a_growing_index_is_a_map(ops in ops()) {
            run(&mut Index::growing(), usize::MAX, &ops);
        }
    }

    #[test]
    fn a_search_in_a_table_without_room_ends() {
        assert_eq!(Index::with_capacity(0).get(KeyHash(7), |_| true), None);
        assert_eq!(Index::growing().remove(KeyHash(7), |_| true), None);
        assert_eq!(Index::growing().metadata_bytes(), 0);
    }

    #[test]
    #[should_panic(expected = "an index for 1 values got one more")]
    fn a_fixed_index_refuses_to_overflow() {
        let mut index = Index::with_capacity(1);
        index.insert_unique(KeyHash(1), 1);
        index.insert_unique(KeyHash(2), 2);
    }
}
