//! Bounded lists of keys in recency order, which forget their oldest key when they are full.

use crate::index::Index;
use crate::key::{Key, KeyHash};

/// No entry: the end of a list.
const NONE: u32 = u32::MAX;

/// The most keys that are worth handling together.
pub(crate) const BATCH: usize = 64;

/// `lists` lists of up to `capacity` keys each; a key is in one of them at most.
///
/// They share one index, so one look-up answers for all. Every list owns a range of entries, and an
/// entry's number says which list it is in. 64 bytes an entry, all allocated by the constructor.
pub(crate) struct KeyLists {
    keys: Box<[Key]>,
    links: Box<[Link]>,
    index: Index,
    lists: Box<[List]>,
    capacity: u32,
}

/// An entry's neighbours. A free entry's `newer` is the next free one.
#[derive(Clone, Copy)]
struct Link {
    older: u32,
    newer: u32,
}

#[derive(Clone, Copy)]
struct List {
    oldest: u32,
    newest: u32,
    len: u32,
    /// The first entry that had a key and lost it.
    free: u32,
    /// The first entry that never had a key.
    fresh: u32,
}

impl List {
    fn starting_at(first: u32) -> Self {
        Self {
            oldest: NONE,
            newest: NONE,
            len: 0,
            free: NONE,
            fresh: first,
        }
    }
}

impl KeyLists {
    /// `lists` empty lists of up to `capacity` keys each.
    ///
    /// # Panics
    /// If `lists * capacity` does not fit in 32 bits.
    pub(crate) fn new(lists: u32, capacity: u32) -> Self {
        let entries = lists
            .checked_mul(capacity)
            .expect("the lists' entries have 32-bit numbers");
        Self {
            keys: vec![Key::default(); entries as usize].into(),
            links: vec![
                Link {
                    older: NONE,
                    newer: NONE
                };
                entries as usize
            ]
            .into(),
            index: Index::with_capacity(entries as usize),
            lists: (0..lists)
                .map(|list| List::starting_at(list * capacity))
                .collect(),
            capacity,
        }
    }

    /// The entry of `key`.
    #[inline]
    pub(crate) fn find(&self, key: &[u8], hash: KeyHash) -> Option<u32> {
        self.index
            .get(hash, |entry| self.keys[entry as usize].as_bytes() == key)
    }

    /// Which list `entry` is in.
    #[inline]
    pub(crate) fn list_of(&self, entry: u32) -> usize {
        (entry / self.capacity) as usize
    }

    /// Number of keys in `list`.
    #[inline]
    pub(crate) fn len(&self, list: usize) -> usize {
        self.lists[list].len as usize
    }

    /// Adds `key`, which is in no list, as the newest of `list`; a full list forgets its oldest key.
    ///
    /// Returns the key's entry, or `None` if lists of no capacity cannot hold it.
    #[inline]
    pub(crate) fn push(&mut self, list: usize, key: &Key, hash: KeyHash) -> Option<u32> {
        if self.capacity == 0 {
            return None;
        }
        self.make_room(list, 1);
        let state = &mut self.lists[list];
        let entry = state.free;
        let entry = if entry == NONE {
            state.fresh += 1;
            state.fresh - 1
        } else {
            state.free = self.links[entry as usize].newer;
            entry
        };
        self.keys[entry as usize].clone_from(key);
        self.index.insert_unique(hash, entry);
        self.link_newest(list, entry);
        Some(entry)
    }

    /// Forgets the oldest keys of `list` until `count` more fit; at most [`BATCH`] of them.
    pub(crate) fn make_room(&mut self, list: usize, count: usize) {
        let List { oldest, len, .. } = self.lists[list];
        let excess = (len as usize + count).saturating_sub(self.capacity as usize);
        if excess == 0 {
            return;
        }
        // All look-ups are started before the first one is needed.
        let mut forgotten = [(NONE, KeyHash(0)); BATCH];
        let mut next = oldest;
        let mut found = 0;
        while found < excess.min(BATCH) && next != NONE {
            let hash = KeyHash::of(self.keys[next as usize].as_bytes());
            self.index.warm(hash);
            forgotten[found] = (next, hash);
            found += 1;
            next = self.links[next as usize].newer;
        }
        // The oldest entry is freed last, to be used first: entries stay in the order of memory.
        for &(entry, hash) in forgotten[..found].iter().rev() {
            self.remove_entry(entry, hash);
        }
    }

    /// Lets a call for a key with this hash wait less for memory: see [`Index::warm`].
    #[inline]
    pub(crate) fn warm(&self, hash: KeyHash) {
        self.index.warm(hash);
    }

    /// Makes the key of `entry` the newest of its list.
    #[inline]
    pub(crate) fn renew(&mut self, entry: u32) {
        let list = self.list_of(entry);
        self.unlink(list, entry);
        self.link_newest(list, entry);
    }

    /// Forgets `key`; answers whether it was there.
    #[inline]
    pub(crate) fn remove(&mut self, key: &[u8], hash: KeyHash) -> bool {
        let entry = self.find(key, hash);
        if let Some(entry) = entry {
            self.remove_entry(entry, hash);
            // A long key's memory should not outlive it.
            self.keys[entry as usize] = Key::default();
        }
        entry.is_some()
    }

    /// The keys of `list`, oldest first.
    pub(crate) fn iter(&self, list: usize) -> impl Iterator<Item = &Key> {
        let mut next = self.lists[list].oldest;
        std::iter::from_fn(move || {
            let link = self.links.get(next as usize)?;
            let key = &self.keys[next as usize];
            next = link.newer;
            Some(key)
        })
    }

    /// Forgets everything. Takes time in proportion to the capacity.
    pub(crate) fn clear(&mut self) {
        self.keys.fill(Key::default());
        self.index.clear();
        for (list, state) in self.lists.iter_mut().enumerate() {
            *state = List::starting_at(list as u32 * self.capacity);
        }
    }

    /// Bytes allocated, without the memory of long keys.
    pub(crate) fn metadata_bytes(&self) -> usize {
        size_of_val(&*self.keys)
            + size_of_val(&*self.links)
            + size_of_val(&*self.lists)
            + self.index.metadata_bytes()
    }

    /// Takes `entry` out of the index and its list; its key stays behind, to be overwritten.
    #[inline]
    fn remove_entry(&mut self, entry: u32, hash: KeyHash) {
        let removed = self.index.remove(hash, |value| value == entry);
        debug_assert_eq!(removed, Some(entry), "a listed key is indexed");
        let list = self.list_of(entry);
        self.unlink(list, entry);
        self.links[entry as usize].newer = self.lists[list].free;
        self.lists[list].free = entry;
    }

    #[inline]
    fn link_newest(&mut self, list: usize, entry: u32) {
        let state = &mut self.lists[list];
        self.links[entry as usize] = Link {
            older: state.newest,
            newer: NONE,
        };
        match self.links.get_mut(state.newest as usize) {
            Some(newest) => newest.newer = entry,
            None => state.oldest = entry,
        }
        state.newest = entry;
        state.len += 1;
    }

    #[inline]
    fn unlink(&mut self, list: usize, entry: u32) {
        let Link { older, newer } = self.links[entry as usize];
        let state = &mut self.lists[list];
        match self.links.get_mut(older as usize) {
            Some(older) => older.newer = newer,
            None => state.oldest = newer,
        }
        match self.links.get_mut(newer as usize) {
            Some(newer) => newer.older = older,
            None => state.newest = older,
        }
        state.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    /// Keys with equal beginnings, some too long to be held in place.
    fn key(number: u8) -> Vec<u8> {
        vec![number; 1 + usize::from(number) * 5]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        #[test]
        fn they_are_bounded_lists(
            capacity in 0..8u32,
            ops in prop::collection::vec((0..6u8, 0..20u8, 0..2usize), 1..200),
        ) {
            let mut lists = KeyLists::new(2, capacity);
            let mut model = [VecDeque::new(), VecDeque::new()];
            for (op, number, list) in ops {
                let bytes = key(number);
                let hash = KeyHash::of(&bytes);
                let held = (0..2).find(|&list| model[list].contains(&bytes));
                let found = lists.find(&bytes, hash);
                prop_assert_eq!(found.map(|entry| lists.list_of(entry)), held);
                match (op, held) {
                    (0, _) => {
                        prop_assert_eq!(lists.remove(&bytes, hash), held.is_some());
                        model.iter_mut().for_each(|list| list.retain(|held| *held != bytes));
                    }
                    (1, _) if number == 0 => {
                        lists.clear();
                        model.iter_mut().for_each(VecDeque::clear);
                    }
                    (_, Some(list)) => {
                        lists.renew(found.expect("held"));
                        model[list].retain(|held| *held != bytes);
                        model[list].push_back(bytes);
                    }
                    (_, None) => {
                        let pushed = lists.push(list, &Key::new(&bytes), hash);
                        prop_assert_eq!(pushed.is_some(), capacity > 0);
                        model[list].push_back(bytes);
                        if model[list].len() > capacity as usize {
                            model[list].pop_front();
                        }
                    }
                }
                for (list, keys) in model.iter().enumerate() {
                    prop_assert_eq!(lists.len(list), keys.len());
                    prop_assert!(lists.iter(list).map(Key::as_bytes).eq(keys));
                }
                let held = model[0].len() + model[1].len();
                prop_assert_eq!(lists.index.len(), held);
                let kept = lists.keys.iter().filter(|&key| *key != Key::default());
                prop_assert_eq!(kept.count(), held, "a forgotten key is still in memory");
            }
        }
    }

    #[test]
    fn an_entry_is_64_bytes() {
        let lists = KeyLists::new(2, 1000);
        assert_eq!(
            lists.metadata_bytes(),
            2 * 1000 * 64 + 2 * size_of::<List>()
        );
    }
}
