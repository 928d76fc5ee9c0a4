//! From a key's hash to the number that was stored under it, without ever pausing.
//!
//! Open addressing over buckets of one cache line, 8 tags (a key's whole hash) and 8 values: a look-up
//! compares all tags of its home bucket at once and goes on to the next bucket only past a full one,
//! one in twenty when the table is at its limit of half full. So its branches go the same way nearly
//! always, and the processor starts the next look-up while this one waits for memory. A key is compared
//! only where its whole hash agrees.
//!
//! Removal pulls an entry that had to go past a full bucket back into it instead of leaving a tombstone.
//! A table with tombstones (hashbrown, thus `HashMap`) rehashes in place once they have used up its
//! growth budget, so a cache that inserts and removes at a constant size pauses for time in proportion
//! to all its entries, in the middle of some scheduler step. Here the worst call is as long as one run
//! of full buckets.

use std::hint::black_box;

use crate::key::KeyHash;

/// Entries of a bucket.
const WIDTH: usize = 8;

/// Entries per value that may be held: the table is at most half full.
const SPREAD: usize = 2;

/// A bit for each entry of a bucket. Not from 1 up: then the compiler turns `true` into the bit one by
/// one, instead of comparing and masking four entries with each instruction.
const MARKS: [u32; WIDTH] = [2, 4, 8, 16, 32, 64, 128, 256];

/// The tag of an entry without a value.
const EMPTY: u32 = 0;

/// One cache line of entries. The free ones are anywhere among them.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Bucket {
    tags: [u32; WIDTH],
    values: [u32; WIDTH],
}

impl Bucket {
    const EMPTY: Self = Self {
        tags: [EMPTY; WIDTH],
        values: [0; WIDTH],
    };

    /// Which entries have `tag`: the sum of their [`MARKS`].
    #[inline]
    fn having(&self, tag: u32) -> u32 {
        let marks = self.tags.iter().zip(MARKS);
        marks.fold(0, |sum, (&held, mark)| {
            sum | if held == tag { mark } else { 0 }
        })
    }

    #[inline]
    fn is_full(&self) -> bool {
        self.having(EMPTY) == 0
    }
}

/// A table from [`KeyHash`] to `u32` values; the caller holds the keys and compares them.
#[derive(Clone, Debug, Default)]
pub struct Index {
    buckets: Box<[Bucket]>,
    len: usize,
    grows: bool,
}

impl Index {
    /// A table for up to `capacity` values. Allocates now and never again; 16 bytes a value.
    pub fn with_capacity(capacity: usize) -> Self {
        let buckets = (capacity * SPREAD).div_ceil(WIDTH);
        Self {
            buckets: vec![Bucket::EMPTY; buckets].into(),
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
        self.find(tag(hash), is_it)
            .map(|(at, i)| self.buckets[at].values[i])
    }

    /// Stores `value` under `hash`. The caller knows that its key is not in the table.
    ///
    /// # Panics
    /// If a table of fixed capacity is full: its owner has lost count, and to go on would lose keys.
    #[inline]
    pub fn insert_unique(&mut self, hash: KeyHash, value: u32) {
        if self.len * SPREAD >= self.buckets.len() * WIDTH {
            self.grow();
        }
        self.len += 1;
        self.place(tag(hash), value);
    }

    /// Removes and returns the value stored under `hash` for which `is_it` answers yes.
    #[inline]
    pub fn remove(&mut self, hash: KeyHash, is_it: impl FnMut(u32) -> bool) -> Option<u32> {
        let (at, i) = self.find(tag(hash), is_it)?;
        let bucket = &mut self.buckets[at];
        let was_full = bucket.is_full();
        let removed = bucket.values[i];
        bucket.tags[i] = EMPTY;
        self.len -= 1;
        if was_full {
            self.pull_back(at, i);
        }
        Some(removed)
    }

    /// Reads the place where a search for `hash` starts, so that the search itself need not wait.
    ///
    /// In a large table nearly every call waits for memory. Calling this for a whole batch first lets
    /// those waits overlap, whatever else the calls do.
    #[inline]
    pub fn warm(&self, hash: KeyHash) {
        if let Some(bucket) = self.buckets.get(self.home(tag(hash))) {
            black_box(bucket.tags[0]);
        }
    }

    /// Makes room for `more` values at once, if the table may grow.
    pub fn reserve(&mut self, more: usize) {
        let buckets = ((self.len + more) * SPREAD).div_ceil(WIDTH);
        if self.grows && buckets > self.buckets.len() {
            self.resize(buckets.next_power_of_two());
        }
    }

    /// The values held, in no particular order.
    pub fn values(&self) -> impl Iterator<Item = u32> + '_ {
        self.buckets.iter().flat_map(|bucket| {
            let entries = bucket.tags.iter().zip(&bucket.values);
            entries
                .filter(|(tag, _)| **tag != EMPTY)
                .map(|(_, value)| *value)
        })
    }

    /// Removes every value; keeps the memory. Takes time in proportion to the capacity.
    pub fn clear(&mut self) {
        self.buckets.fill(Bucket::EMPTY);
        self.len = 0;
    }

    /// Bytes allocated.
    pub fn metadata_bytes(&self) -> usize {
        size_of_val(&*self.buckets)
    }

    /// The bucket and the entry of a value.
    #[inline]
    fn find(&self, tag: u32, mut is_it: impl FnMut(u32) -> bool) -> Option<(usize, usize)> {
        let mut at = self.home(tag);
        loop {
            let bucket = self.buckets.get(at)?;
            let mut found = bucket.having(tag);
            while found != 0 {
                let i = entry(found);
                if is_it(bucket.values[i]) {
                    return Some((at, i));
                }
                found &= found - 1;
            }
            if !bucket.is_full() {
                return None;
            }
            at = self.after(at);
        }
    }

    /// Writes an entry into the first bucket that is not full. There is one: half of all are free.
    #[inline]
    fn place(&mut self, tag: u32, value: u32) {
        let mut at = self.home(tag);
        loop {
            let bucket = &mut self.buckets[at];
            let free = bucket.having(EMPTY);
            if free != 0 {
                let i = entry(free);
                bucket.tags[i] = tag;
                bucket.values[i] = value;
                return;
            }
            at = self.after(at);
        }
    }

    /// Fills the hole at `hole`, `i` in a bucket that was full with a later entry that had to go past
    /// that bucket, and so on with the hole that this one leaves.
    #[cold]
    fn pull_back(&mut self, mut hole: usize, mut i: usize) {
        let mut at = hole;
        loop {
            at = self.after(at);
            let bucket = self.buckets[at];
            let past = (0..WIDTH).find(|&from| {
                let tag = bucket.tags[from];
                tag != EMPTY && self.distance(self.home(tag), at) >= self.distance(hole, at)
            });
            if let Some(from) = past {
                self.buckets[hole].tags[i] = bucket.tags[from];
                self.buckets[hole].values[i] = bucket.values[from];
                self.buckets[at].tags[from] = EMPTY;
                (hole, i) = (at, from);
            }
            if !bucket.is_full() {
                return;
            }
        }
    }

    #[cold]
    fn grow(&mut self) {
        assert!(self.grows, "an index for {} values got one more", self.len);
        self.resize((self.buckets.len() * 2).max(1));
    }

    fn resize(&mut self, buckets: usize) {
        let old = std::mem::replace(&mut self.buckets, vec![Bucket::EMPTY; buckets].into());
        for bucket in &old {
            for (&tag, &value) in bucket.tags.iter().zip(&bucket.values) {
                if tag != EMPTY {
                    self.place(tag, value);
                }
            }
        }
    }

    /// Where the search for `tag` starts: the high bits scale to any table size, no power of two.
    #[inline]
    fn home(&self, tag: u32) -> usize {
        ((u64::from(tag) * self.buckets.len() as u64) >> 32) as usize
    }

    #[inline]
    fn after(&self, at: usize) -> usize {
        if at + 1 == self.buckets.len() {
            0
        } else {
            at + 1
        }
    }

    /// Steps from `from` forward to `to`, around the end if need be.
    fn distance(&self, from: usize, to: usize) -> usize {
        if to >= from {
            to - from
        } else {
            to + self.buckets.len() - from
        }
    }
}

/// The first entry of some [`MARKS`].
#[inline]
fn entry(marks: u32) -> usize {
    marks.trailing_zeros() as usize - 1
}

/// The hash, but never that of an empty entry.
#[inline]
fn tag(hash: KeyHash) -> u32 {
    hash.0.max(EMPTY + 1)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    /// Every entry is behind full buckets only, from its home on, so that a search finds it.
    fn validate(index: &Index) {
        let mut len = 0;
        for (at, bucket) in index.buckets.iter().enumerate() {
            for &tag in bucket.tags.iter().filter(|&&tag| tag != EMPTY) {
                len += 1;
                let mut step = index.home(tag);
                while step != at {
                    assert!(
                        index.buckets[step].is_full(),
                        "a gap between an entry and its home"
                    );
                    step = index.after(step);
                }
            }
        }
        assert_eq!(len, index.len);
        assert!(len * SPREAD <= index.buckets.len() * WIDTH);
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
            prop_assert_eq!(index.metadata_bytes(), (capacity * 16).next_multiple_of(64));
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
    #[should_panic(expected = "an index for 4 values got one more")]
    fn a_fixed_index_refuses_to_overflow() {
        let mut index = Index::with_capacity(4);
        (0..5).for_each(|value| index.insert_unique(KeyHash(value), value));
    }
}
