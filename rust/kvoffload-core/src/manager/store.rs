//! Stores: make room for all keys of a call or for none, publish each when its bytes are there.

use crate::key::Key;
use crate::pool::{Pool, Slot, SlotState};

use super::request::Handle;
use super::state::Inner;
use super::{Manager, ManagerError, Missed, Request};

/// What a store must write, and where. Reused from call to call.
#[derive(Debug, Default)]
pub struct Prepared {
    /// Positions in the call's keys of those to be written, ascending.
    pub to_store: Vec<usize>,
    /// Their slots, in the same order.
    pub slots: Vec<Slot>,
    /// Keys that had to go, first victim first.
    pub evicted: Vec<Key>,
    /// Position of the first key that found no room; it and the keys after it that need a slot were
    /// left out.
    pub refused_from: Option<usize>,
    /// Entries of the request's record for `to_store`.
    entries: Vec<usize>,
}

impl Prepared {
    fn clear(&mut self) {
        self.to_store.clear();
        self.slots.clear();
        self.evicted.clear();
        self.entries.clear();
        self.refused_from = None;
    }
}

/// Where a store may get its slots from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// Free slots, and those of chunks that can be evicted.
    Evict,
    /// Free slots only.
    Free,
}

impl Manager {
    /// Takes slots for those of `keys` that are neither present nor being written, evicting others
    /// if need be but never one of `keys`. `Ok(false)` is a refusal: there is not enough to evict,
    /// and no chunk was moved. A key named twice is stored once.
    ///
    /// # Errors
    /// [`ManagerError::ForeignRequest`].
    pub fn prepare_store(
        &self,
        keys: &[&[u8]],
        request: &mut Request,
        out: &mut Prepared,
    ) -> Result<bool, ManagerError> {
        self.prepare_store_in(Room::Evict, keys, request, out)
    }

    /// As [`Manager::prepare_store`], with a say in where the slots come from.
    ///
    /// # Errors
    /// [`ManagerError::ForeignRequest`].
    pub fn prepare_store_in(
        &self,
        from: Room,
        keys: &[&[u8]],
        request: &mut Request,
        out: &mut Prepared,
    ) -> Result<bool, ManagerError> {
        out.clear();
        let mut inner = self.enter(request)?;
        inner.protected.clear();
        inner.admit(&self.pool, keys, request, out);
        if out.to_store.is_empty() {
            return Ok(true);
        }
        inner.note_allocation(out.to_store.len());
        let room = inner.make_room(&self.pool, out, self.partial_admission, from);
        if let Some(first) = out.refused_from {
            inner.why_refused(keys, first);
        }
        if !room {
            inner.stats.refused += 1;
            let first = out.refused_from;
            out.clear();
            out.refused_from = first;
            return Ok(false);
        }
        let taken = self.pool.alloc(out.to_store.len(), &mut out.slots);
        assert!(
            taken,
            "slots are taken under this lock only, and make_room has counted them"
        );
        inner.link(&self.pool, keys, request, out);
        Ok(true)
    }

    /// Ends the writes of `keys` by `request`: readable from now on, or gone if they failed.
    ///
    /// A key that this request is not writing changes nothing and is counted: after a reset,
    /// completions of older stores may still come, and a write is only ever ended by its owner. A
    /// completion names no job, so one from before a reset must not come once the same request
    /// writes the same key again (vLLM's scheduler drops them all).
    ///
    /// # Errors
    /// [`ManagerError::ForeignRequest`].
    pub fn complete_store<'k>(
        &self,
        keys: impl IntoIterator<Item = &'k [u8]>,
        request: &mut Request,
        success: bool,
    ) -> Result<(), ManagerError> {
        let mut inner = self.enter(request)?;
        let mut stored = Vec::new();
        for key in keys {
            let ended = request.find(key).and_then(|at| request.end_write(at));
            let Some(Handle { slot, generation }) = ended else {
                inner.stats.stale_completions += 1;
                continue;
            };
            inner.stats.writing -= 1;
            if success {
                self.pool
                    .publish(slot, generation)
                    .expect("the request holds this write");
                inner.policy.mark_evictable(slot);
                inner.stats.stored += 1;
                if inner.events.on() {
                    stored.push(Key::new(key));
                }
            } else {
                let key = inner.unlink(slot);
                let hash = inner.tags[slot.index()];
                inner.why(key.as_bytes(), hash, Missed::Failed);
                inner.policy.remove(slot);
                self.pool
                    .release(slot, generation)
                    .expect("the request holds this write");
                inner.stats.store_failures += 1;
            }
        }
        inner.events.push(stored, false);
        inner.changes += 1;
        Ok(())
    }
}

impl Inner {
    /// Sorts out which keys need a slot (into `out`) and which are ready already (their evictable
    /// slots into `self.protected`), and lets tracker, policy and request learn from the offer.
    fn admit(&mut self, pool: &Pool, keys: &[&[u8]], request: &mut Request, out: &mut Prepared) {
        let offer = request.begin_offer();
        request.reserve(keys.len());
        let mut hashes = std::mem::take(&mut self.hashes);
        self.hash_all(keys.iter().copied(), &mut hashes);
        if let Some(tracker) = &mut self.tracker {
            let offered: Vec<_> = keys.iter().copied().zip(hashes.iter().copied()).collect();
            tracker.record(&offered);
        }
        for (position, (key, &hash)) in keys.iter().zip(&hashes).enumerate() {
            let Some(slot) = self.find(key, hash) else {
                if self
                    .tracker
                    .as_ref()
                    .is_some_and(|tracker| !tracker.admits(key, hash))
                {
                    self.stores_skipped += 1;
                    self.stats.skipped += 1;
                    self.why(key, hash, Missed::Threshold);
                    continue;
                }
                let at = request.find_or_add(key, hash);
                // What it still reads was discarded: it can write the key again once it has read.
                if request.uses(at) {
                    continue;
                }
                if request.entry(at).offer != offer {
                    request.entry_mut(at).offer = offer;
                    request.see(at);
                    out.to_store.push(position);
                    out.entries.push(at);
                }
                continue;
            };
            if pool.state(slot) == SlotState::Ready {
                let at = request.find_or_add(key, hash);
                request.reuse(at);
                if !request.uses(at) {
                    request.entry_mut(at).last = Some(Handle {
                        slot,
                        generation: pool.generation(slot),
                    });
                }
                self.protected.push(slot);
            }
        }
        self.hashes = hashes;
        for &at in &out.entries {
            self.policy.warm(request.entry(at).hash);
        }
        // Tail first, as every other access; once per request, however often it offers the key.
        for &at in out.entries.iter().rev() {
            let entry = request.entry_mut(at);
            if !entry.missed {
                entry.missed = true;
                self.policy.on_store_miss(entry.key.as_bytes(), entry.hash);
            }
        }
    }

    /// Evicts until every key of `out` has a free slot, or (in part) as many of the first keys as
    /// can have one. False, with nothing evicted, where there is no room.
    fn make_room(&mut self, pool: &Pool, out: &mut Prepared, partial: bool, from: Room) -> bool {
        let free = pool.free() as usize;
        if out.to_store.len() <= free {
            return true;
        }
        // What the call names must survive it. Keys named twice are held once.
        let policy = &mut self.policy;
        self.protected.retain(|&slot| {
            let hold = policy.is_evictable(slot);
            if hold {
                policy.mark_non_evictable(slot);
            }
            hold
        });
        let evictable = match from {
            Room::Evict => self.policy.evictable(),
            Room::Free => 0,
        };
        let room = if out.to_store.len() <= free + evictable {
            true
        } else if partial && free + evictable > 0 {
            self.stats.left_out += (out.to_store.len() - free - evictable) as u64;
            out.refused_from = Some(out.to_store[free + evictable]);
            out.to_store.truncate(free + evictable);
            out.entries.truncate(free + evictable);
            true
        } else {
            out.refused_from = out.to_store.first().copied();
            false
        };
        if room {
            self.evict(
                pool,
                out.to_store.len().saturating_sub(free),
                &mut out.evicted,
            );
        }
        for &slot in &self.protected {
            self.policy.mark_evictable(slot);
        }
        room
    }

    fn evict(&mut self, pool: &Pool, n: usize, evicted: &mut Vec<Key>) {
        let mut victims = std::mem::take(&mut self.victims);
        victims.clear();
        let (keys, tags) = (&self.keys, &self.tags);
        self.policy.evict(
            n,
            &|slot| (&keys[slot.index()], tags[slot.index()]),
            &mut victims,
        );
        debug_assert_eq!(
            victims.len(),
            n,
            "the caller has counted what can be evicted"
        );
        // Look-ups that wait for memory are started together, before the first is needed.
        for slot in &victims {
            self.index.warm(self.tags[slot.index()]);
        }
        for &slot in &victims {
            let key = self.unlink(slot);
            self.why(key.as_bytes(), self.tags[slot.index()], Missed::Evicted);
            evicted.push(key);
        }
        self.changes += 1;
        pool.release_all(&victims)
            .expect("victims are ready and unpinned");
        self.stats.evicted += n as u64;
        if self.events.on() {
            self.events.push(evicted.clone(), true);
        }
        self.victims = victims;
    }

    fn link(&mut self, pool: &Pool, keys: &[&[u8]], request: &mut Request, out: &Prepared) {
        let now = self.clock.now();
        for ((&position, &at), &slot) in out.to_store.iter().zip(&out.entries).zip(&out.slots) {
            let key = Key::new(keys[position]);
            let hash = request.entry(at).hash;
            self.index.insert_unique(hash, slot.get());
            self.policy.insert(slot, &key, hash);
            self.keys[slot.index()] = key;
            self.tags[slot.index()] = hash;
            self.written_at[slot.index()] = now;
            request.begin_write(
                at,
                Handle {
                    slot,
                    generation: pool.generation(slot),
                },
            );
        }
        self.stats.writing += out.to_store.len() as u64;
    }
}
