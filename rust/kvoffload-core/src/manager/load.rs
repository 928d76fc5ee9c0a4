//! Loads: pin every chunk or none, release each pin once.

use crate::key::Key;
use crate::pool::{Pool, Slot, SlotState};

use super::request::Handle;
use super::state::Inner;
use super::{Manager, ManagerError, Missed, Request};

impl Manager {
    /// Pins the chunks named `keys` for one load, and appends their slots to `slots` in the order
    /// of `keys`. The pins belong to `request` until [`Manager::complete_load`].
    ///
    /// # Errors
    /// [`ManagerError::KeyNotReady`] if one of them cannot be read, or was discarded and stored again
    /// while `request` goes on reading what it was; then none is pinned.
    pub fn prepare_load<'k, I>(
        &self,
        keys: I,
        request: &mut Request,
        slots: &mut Vec<Slot>,
    ) -> Result<(), ManagerError>
    where
        I: IntoIterator<Item = &'k [u8]>,
        I::IntoIter: Clone,
    {
        let mut inner = self.enter(request)?;
        let keys = keys.into_iter();
        let first = slots.len();
        let mut hashes = std::mem::take(&mut inner.hashes);
        inner.hash_all(keys.clone(), &mut hashes);
        for (position, (key, &hash)) in keys.clone().zip(&hashes).enumerate() {
            let slot = inner.find(key, hash);
            match slot.map(|slot| (slot, self.pool.state(slot))) {
                Some((slot, SlotState::Ready))
                    if inner.condemned.is_empty()
                        || !request.reads_other(key, hash, self.handle(slot)) =>
                {
                    slots.push(slot);
                }
                found => {
                    slots.truncate(first);
                    inner.hashes = hashes;
                    return Err(ManagerError::KeyNotReady {
                        position,
                        writing: matches!(found, Some((_, SlotState::Writing))),
                    });
                }
            }
        }
        for ((key, &slot), &hash) in keys.zip(&slots[first..]).zip(&hashes) {
            let handle = self.handle(slot);
            let pins = self
                .pool
                .pin(slot, handle.generation)
                .expect("ready, and only this lock unmakes it");
            if pins == 1 {
                inner.policy.mark_non_evictable(slot);
            }
            let at = request.find_or_add(key, hash);
            request.begin_read(at, handle);
            request.reuse(at);
        }
        inner.hashes = hashes;
        inner.stats.loaded += (slots.len() - first) as u64;
        Ok(())
    }

    /// Ends one load of each of `keys` by `request`. After a reset, completions of older loads are
    /// counted and otherwise ignored;
    /// they must not come once the same request loads the same key again.
    ///
    /// # Errors
    /// [`ManagerError::StaleHandle`] if the request is not loading one of them; then none is released.
    pub fn complete_load<'k>(
        &self,
        keys: impl IntoIterator<Item = &'k [u8]>,
        request: &mut Request,
    ) -> Result<(), ManagerError> {
        self.end_load(keys, request, false)
    }

    /// As [`Manager::complete_load`], for a load that failed: its chunks leave the pool, because what
    /// could not be read once is not worth another try. A key misses from now on; a slot that others
    /// are reading is free when the last of them has ended.
    ///
    /// # Errors
    /// As [`Manager::complete_load`].
    pub fn discard_load<'k>(
        &self,
        keys: impl IntoIterator<Item = &'k [u8]>,
        request: &mut Request,
    ) -> Result<(), ManagerError> {
        self.end_load(keys, request, true)
    }

    fn handle(&self, slot: Slot) -> Handle {
        let generation = self.pool.generation(slot);
        Handle { slot, generation }
    }

    fn end_load<'k>(
        &self,
        keys: impl IntoIterator<Item = &'k [u8]>,
        request: &mut Request,
        discard: bool,
    ) -> Result<(), ManagerError> {
        let mut inner = self.enter(request)?;
        let mut ended: Vec<(usize, Handle)> = Vec::new();
        for (position, key) in keys.into_iter().enumerate() {
            let found = request
                .find(key)
                .and_then(|at| request.end_read(at).map(|handle| (at, handle)));
            match found {
                Some(pin) => ended.push(pin),
                None if request.outlived_reset() => inner.stats.stale_completions += 1,
                None => {
                    for (at, _) in ended {
                        request.resume_read(at);
                    }
                    return Err(ManagerError::StaleHandle { position });
                }
            }
        }
        let mut discarded = Vec::new();
        for (_, Handle { slot, generation }) in ended {
            let left = self
                .pool
                .unpin(slot, generation)
                .expect("the request holds this pin");
            if discard {
                inner.condemn(slot, &mut discarded);
            }
            if left == 0 && !inner.bury(&self.pool, slot) {
                inner.policy.mark_evictable(slot);
            }
        }
        inner.events.push(discarded, true);
        inner.changes += 1;
        Ok(())
    }
}

impl Inner {
    /// Makes the chunk in a pinned slot unreachable; the slot is freed with its last pin.
    fn condemn(&mut self, slot: Slot, discarded: &mut Vec<Key>) {
        if !self.condemned.contains(&slot) {
            let key = self.unlink(slot);
            self.why(key.as_bytes(), self.tags[slot.index()], Missed::Failed);
            self.condemned.push(slot);
            self.stats.discarded += 1;
            discarded.push(key);
        }
    }

    /// Frees an unpinned slot if its chunk was condemned.
    fn bury(&mut self, pool: &Pool, slot: Slot) -> bool {
        let Some(at) = self.condemned.iter().position(|&other| other == slot) else {
            return false;
        };
        self.condemned.swap_remove(at);
        self.policy.remove(slot);
        pool.release(slot, pool.generation(slot))
            .expect("its last pin was just released");
        true
    }
}
