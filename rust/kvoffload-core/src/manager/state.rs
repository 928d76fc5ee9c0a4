//! What the mutex guards.

use crate::admission::Tracker;
use crate::index::Index;
use crate::key::{Key, KeyHash};
use crate::policy::{Arc, Lru, Policy, PolicyDump};
use crate::pool::{Pool, Slot, SlotState};
use crate::sync::MutexGuard;

use super::config::Tenths;
use super::events::Events;
use super::request::Entry;
use super::why::{Missed, Whys};
use super::{Answer, Clock, Config, Manager, ManagerError, PolicyKind, Request, Stats};

/// Sizes of stores kept for a histogram that nobody fetches.
const ALLOCATION_SIZES_MAX: usize = 1 << 16;

pub(super) struct Inner {
    pub(super) epoch: u32,
    pub(super) index: Index,
    /// The key of the chunk in each slot; empty where there is none.
    pub(super) keys: Box<[Key]>,
    /// Its key's hash.
    pub(super) tags: Box<[KeyHash]>,
    /// When the write into each slot began.
    pub(super) written_at: Box<[Tenths]>,
    pub(super) policy: Box<dyn Policy>,
    pub(super) tracker: Option<Tracker>,
    pub(super) events: Events,
    pub(super) allocation_sizes: Vec<u32>,
    pub(super) stores_skipped: u64,
    pub(super) stats: Stats,
    pub(super) clock: Clock,
    write_deadline: Tenths,
    /// Pinned slots whose chunk must not be read again.
    pub(super) condemned: Vec<Slot>,
    /// Why keys are not here.
    pub(super) whys: Option<Whys>,
    /// Grows with everything that can change the answer to a lookup.
    pub(super) changes: u64,
    /// Reused by each store: victims, and slots held back from eviction.
    pub(super) victims: Vec<Slot>,
    pub(super) protected: Vec<Slot>,
    /// Reused by each call: its keys' hashes.
    pub(super) hashes: Vec<KeyHash>,
}

impl Inner {
    pub(super) fn new(config: Config) -> Self {
        let slots = config.num_slots as usize;
        Self {
            epoch: 0,
            index: Index::with_capacity(slots),
            keys: vec![Key::default(); slots].into(),
            tags: vec![KeyHash(0); slots].into(),
            written_at: vec![Tenths::default(); slots].into(),
            policy: match config.policy {
                PolicyKind::Lru => Box::new(Lru::new(config.num_slots)),
                PolicyKind::Arc => Box::new(Arc::new(config.num_slots)),
            },
            tracker: (config.store_threshold >= 2)
                .then(|| Tracker::new(config.store_threshold, config.max_tracker_size)),
            events: Events::new(config.events),
            allocation_sizes: Vec::new(),
            stores_skipped: 0,
            stats: Stats {
                slots: u64::from(config.num_slots),
                ..Stats::default()
            },
            clock: config.clock,
            write_deadline: Tenths::of(config.write_deadline),
            condemned: Vec::new(),
            whys: config.reasons.then(|| Whys::new(config.num_slots)),
            changes: 0,
            victims: Vec::new(),
            protected: Vec::new(),
            hashes: Vec::new(),
        }
    }

    pub(super) fn find(&self, key: &[u8], hash: KeyHash) -> Option<Slot> {
        self.index
            .get(hash, |slot| self.keys[slot as usize].as_bytes() == key)
            .map(Slot::new)
    }

    /// Hashes a call's keys, and lets their look-ups wait for memory together.
    pub(super) fn hash_all<'k>(
        &self,
        keys: impl Iterator<Item = &'k [u8]>,
        hashes: &mut Vec<KeyHash>,
    ) {
        hashes.clear();
        hashes.extend(keys.map(KeyHash::of));
        for hash in hashes.iter() {
            self.index.warm(*hash);
        }
    }

    /// Like [`Inner::find`], for a request that remembers where the key was.
    pub(super) fn locate(&self, pool: &Pool, entry: &Entry) -> Option<Slot> {
        entry
            .last
            .filter(|last| {
                pool.generation(last.slot) == last.generation
                    && pool.state(last.slot) != SlotState::Free
            })
            .map(|last| last.slot)
            .or_else(|| self.find(entry.key.as_bytes(), entry.hash))
    }

    pub(super) fn answer(&mut self, pool: &Pool, key: &[u8], hash: KeyHash) -> Answer {
        let slot = self.find(key, hash);
        self.answer_for(pool, slot)
    }

    /// The answer for a key that was found in `slot`, or not.
    pub(super) fn answer_for(&mut self, pool: &Pool, slot: Option<Slot>) -> Answer {
        let Some(slot) = slot else {
            self.stats.misses += 1;
            return Answer::Miss;
        };
        if pool.state(slot) == SlotState::Ready {
            self.stats.hits += 1;
            return Answer::Hit;
        }
        let age = self.clock.now().since(self.written_at[slot.index()]);
        if age > self.write_deadline {
            self.stats.misses += 1;
            self.stats.overdue += 1;
            return Answer::Miss;
        }
        self.stats.laters += 1;
        Answer::Later
    }

    /// Takes the chunk in `slot` out of the index and answers its key.
    pub(super) fn unlink(&mut self, slot: Slot) -> Key {
        let key = std::mem::take(&mut self.keys[slot.index()]);
        let removed = self
            .index
            .remove(self.tags[slot.index()], |at| at == slot.get());
        debug_assert_eq!(
            removed,
            Some(slot.get()),
            "every slot in use is in the index"
        );
        key
    }

    /// Notes why a key is not in the pool.
    pub(super) fn why(&mut self, key: &[u8], hash: KeyHash, reason: Missed) {
        debug_assert_eq!(KeyHash::of(key), hash);
        if let Some(whys) = &mut self.whys {
            whys.note(hash, reason);
        }
    }

    /// Notes that a store's keys from the position `first` on found no room, unless they are here.
    pub(super) fn why_refused(&mut self, keys: &[&[u8]], first: usize) {
        if self.whys.is_none() {
            return;
        }
        for key in keys.iter().skip(first) {
            let hash = KeyHash::of(key);
            if self.find(key, hash).is_none() {
                self.why(key, hash, Missed::Refused);
            }
        }
    }

    pub(super) fn note_allocation(&mut self, chunks: usize) {
        if self.allocation_sizes.len() < ALLOCATION_SIZES_MAX {
            self.allocation_sizes
                .push(u32::try_from(chunks).unwrap_or(u32::MAX));
        }
    }

    /// Forgets every chunk; answers the slots that were in use.
    pub(super) fn clear(&mut self) -> Vec<Slot> {
        let mut used = self.index.values().map(Slot::new).collect::<Vec<_>>();
        used.append(&mut self.condemned);
        for slot in &used {
            self.keys[slot.index()] = Key::default();
        }
        self.index.clear();
        self.policy.clear();
        self.epoch = self.epoch.wrapping_add(1);
        if let Some(whys) = &mut self.whys {
            whys.clear();
        }
        self.changes += 1;
        self.stats.resets += 1;
        self.stats.writing = 0;
        used
    }

    pub(super) fn stats_of(&self, pool: &Pool) -> Stats {
        let free = u64::from(pool.free());
        let evictable = self.policy.evictable() as u64;
        let ready = self.stats.slots - free - self.stats.writing;
        Stats {
            free,
            ready,
            evictable,
            pinned: ready - evictable,
            events_dropped: self.events.dropped(),
            ..self.stats
        }
    }

    pub(super) fn metadata_bytes(&self) -> usize {
        self.index.metadata_bytes()
            + size_of_val::<[Key]>(&self.keys)
            + size_of_val::<[KeyHash]>(&self.tags)
            + size_of_val::<[Tenths]>(&self.written_at)
            + self.policy.metadata_bytes()
            + self.tracker.as_ref().map_or(0, Tracker::metadata_bytes)
            + self.whys.as_ref().map_or(0, Whys::metadata_bytes)
    }

    pub(super) fn dump(&self, pool: &Pool) -> StateDump {
        let mut keys: Vec<KeyState> = self
            .index
            .values()
            .map(|slot| {
                let slot = Slot::new(slot);
                KeyState {
                    key: self.keys[slot.index()].clone(),
                    slot,
                    state: pool.state(slot),
                    pins: pool.pins(slot),
                }
            })
            .collect();
        keys.sort_by_key(|state| state.slot.get());
        StateDump {
            keys,
            policy: self.policy.dump(),
        }
    }

    pub(super) fn validate(&self, pool: &Pool) {
        let dump = self.dump(pool);
        assert_eq!(dump.keys.len(), self.index.len());
        assert_eq!(
            dump.keys.len() + self.condemned.len() + pool.free() as usize,
            pool.num_slots() as usize
        );
        let mut writing = 0;
        let mut evictable = 0;
        for chunk in &dump.keys {
            let hash = KeyHash::of(chunk.key.as_bytes());
            assert_eq!(self.find(chunk.key.as_bytes(), hash), Some(chunk.slot));
            assert_ne!(chunk.state, SlotState::Free, "{chunk:?}");
            let idle = chunk.state == SlotState::Ready && chunk.pins == 0;
            assert_eq!(self.policy.is_evictable(chunk.slot), idle, "{chunk:?}");
            writing += u64::from(chunk.state == SlotState::Writing);
            evictable += usize::from(idle);
        }
        assert_eq!(self.stats.writing, writing);
        assert_eq!(self.policy.evictable(), evictable);
        let ordered: usize = dump
            .policy
            .resident
            .iter()
            .map(|(_, slots)| slots.len())
            .sum();
        assert_eq!(
            ordered,
            dump.keys.len() + self.condemned.len(),
            "the policy orders exactly what the index holds"
        );
    }
}

impl Manager {
    /// Locks for a call on behalf of `request`, which learns of resets here.
    pub(super) fn enter(
        &self,
        request: &mut Request,
    ) -> Result<MutexGuard<'_, Inner>, ManagerError> {
        if request.manager() != self.id {
            return Err(ManagerError::ForeignRequest);
        }
        let inner = self.inner.lock();
        request.follow(inner.epoch);
        Ok(inner)
    }
}

/// One chunk of the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyState {
    /// Its name.
    pub key: Key,
    /// Where it is.
    pub slot: Slot,
    /// Being written, or readable.
    pub state: SlotState,
    /// Reads in progress.
    pub pins: u32,
}

/// Everything that decides what happens next, for tests.
#[derive(Clone, Debug, PartialEq)]
pub struct StateDump {
    /// The chunks, by slot.
    pub keys: Vec<KeyState>,
    /// Their order.
    pub policy: PolicyDump,
}
