//! A set of small numbers that finds its next member in O(log64 n).

/// Enough levels of 64-bit words for every `u32`.
const MAX_LEVELS: usize = 6;

/// A bitmap under summaries of itself: a bit of one level says that a word of the level below it has
/// a bit set. The lowest level comes first in `words`, the highest is one word.
pub(super) struct BitSet {
    words: Box<[u64]>,
    /// Where each level starts in `words`.
    starts: [usize; MAX_LEVELS],
    levels: usize,
}

impl BitSet {
    /// An empty set for numbers below `size`.
    pub(super) fn new(size: usize) -> Self {
        let mut starts = [0; MAX_LEVELS];
        let mut total = 0;
        let mut levels = 0;
        let mut bits = size.max(1);
        loop {
            starts[levels] = total;
            levels += 1;
            bits = bits.div_ceil(64);
            total += bits;
            if bits == 1 {
                break;
            }
        }
        Self {
            words: vec![0; total].into(),
            starts,
            levels,
        }
    }

    #[inline]
    pub(super) fn contains(&self, member: usize) -> bool {
        self.words[member / 64] >> (member % 64) & 1 == 1
    }

    #[inline]
    pub(super) fn insert(&mut self, mut member: usize) {
        for &start in &self.starts[..self.levels] {
            let word = &mut self.words[start + member / 64];
            let known_above = *word != 0;
            *word |= 1 << (member % 64);
            if known_above {
                return;
            }
            member /= 64;
        }
    }

    #[inline]
    pub(super) fn remove(&mut self, member: usize) {
        self.remove_all(member / 64, 1 << (member % 64));
    }

    /// Removes the eight numbers from `first`, a multiple of 8, and returns who was there, lowest bit
    /// first.
    #[inline]
    pub(super) fn take_eight(&mut self, first: usize) -> u8 {
        debug_assert_eq!(first % 8, 0);
        let taken = (self.words[first / 64] >> (first % 64)) as u8;
        if taken != 0 {
            self.remove_all(first / 64, u64::from(taken) << (first % 64));
        }
        taken
    }

    /// Removes the members `bits` of the lowest level's word `at`.
    #[inline]
    fn remove_all(&mut self, mut at: usize, mut bits: u64) {
        for &start in &self.starts[..self.levels] {
            let word = &mut self.words[start + at];
            *word &= !bits;
            if *word != 0 {
                return;
            }
            bits = 1 << (at % 64);
            at /= 64;
        }
    }

    /// The smallest member that is at least `from`.
    #[inline]
    pub(super) fn next(&self, from: usize) -> Option<usize> {
        // Up to the first level that knows of a member at or after `from`, then down to that member.
        let mut at = from;
        for level in 0..self.levels {
            let end = self
                .starts
                .get(level + 1)
                .copied()
                .filter(|_| level + 1 < self.levels);
            let word = self.starts[level] + at / 64;
            if word >= end.unwrap_or(self.words.len()) {
                return None;
            }
            let found = self.words[word] & (u64::MAX << (at % 64));
            if found != 0 {
                at = at / 64 * 64 + found.trailing_zeros() as usize;
                return Some(self.descend(level, at));
            }
            at = at / 64 + 1;
        }
        None
    }

    #[inline]
    fn descend(&self, level: usize, mut at: usize) -> usize {
        for &start in self.starts[..level].iter().rev() {
            at = at * 64 + self.words[start + at].trailing_zeros() as usize;
        }
        at
    }

    pub(super) fn clear(&mut self) {
        self.words.fill(0);
    }

    /// Bytes allocated.
    pub(super) fn metadata_bytes(&self) -> usize {
        size_of_val(&*self.words)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Every summary bit agrees with the word below it.
    fn validate(set: &BitSet) {
        for level in 1..set.levels {
            let below = &set.words[set.starts[level - 1]..set.starts[level]];
            for (at, word) in below.iter().enumerate() {
                let summary = set.words[set.starts[level] + at / 64] >> (at % 64) & 1;
                assert_eq!(summary == 1, *word != 0, "level {level}, word {at}");
            }
        }
    }

    proptest! {
        #[test]
        fn it_is_a_set(
            size in prop_oneof![Just(1usize), Just(64), Just(65), Just(4096), Just(4097), 1..300_000usize],
            ops in prop::collection::vec((0..4u8, any::<prop::sample::Index>()), 1..200),
        ) {
            let mut set = BitSet::new(size);
            let mut model = BTreeSet::new();
            for (op, which) in ops {
                let member = which.index(size);
                match op {
                    0 => {
                        set.remove(member);
                        model.remove(&member);
                    }
                    1 => {
                        let first = member / 8 * 8;
                        let taken = set.take_eight(first);
                        for bit in 0..8 {
                            prop_assert_eq!(taken >> bit & 1 == 1, model.remove(&(first + bit)));
                        }
                    }
                    _ => {
                        set.insert(member);
                        model.insert(member);
                    }
                }
                validate(&set);
                prop_assert_eq!(set.contains(member), model.contains(&member));
                for from in [0, member, member + 1, size] {
                    prop_assert_eq!(set.next(from), model.range(from..).next().copied());
                }
            }
            set.clear();
            prop_assert_eq!(set.next(0), None);
        }
    }
}
