//! What one request has done with chunks, and which pins it owns.

use crate::index::Index;
use crate::key::{Key, KeyHash};
use crate::policy::Access;
use crate::pool::{Generation, Slot};

/// One request's accesses and pins. The caller owns it and hands it to every manager call made for
/// that request; nobody else can release what it holds.
///
/// vLLM completes transfers by request and key, not by handle: the handles live here, by key.
#[derive(Debug)]
pub struct Request {
    manager: u64,
    epoch: u32,
    /// A reset emptied the pool while this request lived: completions of older jobs may still come.
    outlived_reset: bool,
    finished: bool,
    offer: u32,
    entries: Vec<Entry>,
    index: Index,
    /// Entries that count as accesses, in the order in which they were first seen.
    seen: Vec<u32>,
    held: usize,
    /// The entry after the one found last: most calls name keys in the order of the call before.
    cursor: usize,
}

/// The right to finish one write or to end one read of a slot's present content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Handle {
    pub(super) slot: Slot,
    pub(super) generation: Generation,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) key: Key,
    pub(super) hash: KeyHash,
    /// Where the key was last. A handle in use if the request is writing or reading the key; every
    /// pin of one key held by one request names the same content, so a count stands for the stack.
    pub(super) last: Option<Handle>,
    writing: bool,
    reads: u32,
    /// End of the chunk in tokens; orders the request's keys from head to tail.
    position: i64,
    /// The last offer (call of `prepare_store`) that named this key.
    pub(super) offer: u32,
    seen: bool,
    inserted: bool,
    reused: bool,
    pub(super) missed: bool,
}

/// No position is known.
const UNKNOWN: i64 = i64::MIN;

impl Request {
    pub(super) fn new(manager: u64, epoch: u32) -> Self {
        Self {
            manager,
            epoch,
            outlived_reset: false,
            finished: false,
            offer: 0,
            entries: Vec::new(),
            index: Index::growing(),
            seen: Vec::new(),
            held: 0,
            cursor: 0,
        }
    }

    /// Reads and writes in progress that this request must still complete.
    pub fn held(&self) -> usize {
        self.held
    }

    pub(super) fn manager(&self) -> u64 {
        self.manager
    }

    pub(super) fn outlived_reset(&self) -> bool {
        self.outlived_reset
    }

    /// Follows the manager to `epoch`: a reset since the last call has voided everything held.
    /// Answers the number of handles that became void.
    pub(super) fn follow(&mut self, epoch: u32) -> usize {
        if self.epoch == epoch {
            return 0;
        }
        let void = self.held;
        self.entries.clear();
        self.index.clear();
        self.seen.clear();
        self.cursor = 0;
        self.epoch = epoch;
        self.outlived_reset = true;
        self.finished = false;
        self.held = 0;
        void
    }

    pub(super) fn begin_offer(&mut self) -> u32 {
        self.offer = self.offer.wrapping_add(1).max(1);
        self.offer
    }

    /// Room for `keys` more, so that adding them allocates once.
    pub(super) fn reserve(&mut self, keys: usize) {
        self.entries.reserve(keys);
        self.index.reserve(keys);
        self.seen.reserve(keys);
    }

    pub(super) fn find(&mut self, key: &[u8]) -> Option<usize> {
        self.follow_cursor(key)
            .or_else(|| self.find_hashed(key, KeyHash::of(key)))
    }

    /// The entry that is `key`'s if this call goes on as the one before it.
    fn follow_cursor(&mut self, key: &[u8]) -> Option<usize> {
        let at = self.cursor;
        let found = self.entries.get(at)?.key.as_bytes() == key;
        found.then(|| {
            self.cursor += 1;
            at
        })
    }

    fn find_hashed(&mut self, key: &[u8], hash: KeyHash) -> Option<usize> {
        let entries = &self.entries;
        let at = self
            .index
            .get(hash, |at| entries[at as usize].key.as_bytes() == key)? as usize;
        self.cursor = at + 1;
        Some(at)
    }

    pub(super) fn find_or_add(&mut self, key: &[u8], hash: KeyHash) -> usize {
        if let Some(at) = self
            .follow_cursor(key)
            .or_else(|| self.find_hashed(key, hash))
        {
            return at;
        }
        let at = self.entries.len();
        self.entries.push(Entry {
            key: Key::new(key),
            hash,
            last: None,
            writing: false,
            reads: 0,
            position: UNKNOWN,
            offer: 0,
            seen: false,
            inserted: false,
            reused: false,
            missed: false,
        });
        self.index.insert_unique(hash, at as u32);
        at
    }

    pub(super) fn entry(&self, at: usize) -> &Entry {
        &self.entries[at]
    }

    pub(super) fn entry_mut(&mut self, at: usize) -> &mut Entry {
        &mut self.entries[at]
    }

    /// Counts the key as accessed. A finished request's accesses have been applied already.
    pub(super) fn see(&mut self, at: usize) {
        let entry = &mut self.entries[at];
        if !entry.seen && !self.finished {
            entry.seen = true;
            self.seen.push(at as u32);
        }
    }

    /// The key was ready when the request named it. Reading back what the request itself wrote is
    /// not a second access.
    pub(super) fn reuse(&mut self, at: usize) {
        self.see(at);
        let entry = &mut self.entries[at];
        entry.reused |= !entry.inserted;
    }

    pub(super) fn begin_write(&mut self, at: usize, handle: Handle) {
        let entry = &mut self.entries[at];
        debug_assert!(
            !entry.writing && entry.reads == 0,
            "an absent key is not in use"
        );
        entry.inserted = true;
        entry.last = Some(handle);
        entry.writing = true;
        self.held += 1;
    }

    /// Whether the request is writing or reading the key. Of a key that is not in the pool, it is what
    /// is left of a chunk that was discarded under its readers.
    pub(super) fn uses(&self, at: usize) -> bool {
        let entry = &self.entries[at];
        entry.writing || entry.reads > 0
    }

    /// Whether the request is reading `key` where it was before it was discarded and stored again.
    pub(super) fn reads_other(&mut self, key: &[u8], hash: KeyHash, handle: Handle) -> bool {
        self.find_hashed(key, hash).is_some_and(|at| {
            let entry = &self.entries[at];
            entry.reads > 0 && entry.last != Some(handle)
        })
    }

    pub(super) fn end_write(&mut self, at: usize) -> Option<Handle> {
        let entry = &mut self.entries[at];
        if !std::mem::take(&mut entry.writing) {
            return None;
        }
        self.held -= 1;
        entry.last
    }

    pub(super) fn begin_read(&mut self, at: usize, handle: Handle) {
        let entry = &mut self.entries[at];
        debug_assert!(!entry.writing && (entry.reads == 0 || entry.last == Some(handle)));
        entry.last = Some(handle);
        entry.reads += 1;
        self.held += 1;
    }

    pub(super) fn end_read(&mut self, at: usize) -> Option<Handle> {
        let entry = &mut self.entries[at];
        entry.reads = entry.reads.checked_sub(1)?;
        self.held -= 1;
        entry.last
    }

    /// Undoes [`Request::end_read`].
    pub(super) fn resume_read(&mut self, at: usize) {
        self.entries[at].reads += 1;
        self.held += 1;
    }

    pub(super) fn set_position(&mut self, key: &[u8], position: i64) {
        if let Some(at) = self.find(key) {
            self.entries[at].position = position;
        }
    }

    /// Ends the recording. The accessed keys, tail of the prefix first, or nothing when the request
    /// had finished before.
    ///
    /// With positions for all keys that is their order across groups; a group whose positions are
    /// incomplete keeps the order of first sight, groups after one another.
    pub(super) fn finish(&mut self) -> Vec<(usize, Access)> {
        if std::mem::replace(&mut self.finished, true) {
            return Vec::new();
        }
        let entries = &self.entries;
        let mut order = std::mem::take(&mut self.seen);
        let position = |at: &u32| entries[*at as usize].position;
        let group = |at: &u32| group_of(entries[*at as usize].key.as_bytes());
        let known = |keys: &[u32]| keys.iter().all(|at| position(at) != UNKNOWN);
        if known(&order) {
            // One order for all: groups decide between equal positions only.
            order.sort_by_key(|at| (position(at), group(at)));
        } else {
            order.sort_by_key(group);
            for keys in order.chunk_by_mut(|a, b| group(a) == group(b)) {
                if known(keys) {
                    keys.sort_by_key(position);
                }
            }
        }
        order
            .into_iter()
            .rev()
            .map(|at| {
                let entry = &entries[at as usize];
                let access = match (entry.reused, entry.inserted) {
                    (true, _) => Access::Reused,
                    (false, true) => Access::Inserted,
                    (false, false) => Access::Observed,
                };
                (at as usize, access)
            })
            .collect()
    }
}

/// The KV cache group in a key's last four bytes, big endian; 0 for shorter keys.
fn group_of(key: &[u8]) -> u32 {
    key.last_chunk().map_or(0, |tail| u32::from_be_bytes(*tail))
}
