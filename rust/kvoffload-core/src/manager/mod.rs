//! Where every chunk is, who uses it, and what makes room for what.
//!
//! One short mutex guards index and policy: vLLM's scheduler is one thread, and one lock leaves no
//! gap in which a key could be reachable in one structure and gone from another. Slots and pins are
//! the lock-free [`Pool`]'s. Calls take batches; nothing allocates per key.

mod config;
mod error;
mod events;
mod load;
mod request;
mod state;
mod stats;
mod store;
mod why;

pub use config::{Clock, Config, PolicyKind};
pub use error::ManagerError;
pub use events::Event;
pub use request::Request;
pub use state::{KeyState, StateDump};
pub use stats::Stats;
pub use store::{Prepared, Room};
pub use why::Missed;

use std::sync::atomic::{AtomicU64, Ordering};

use crate::key::KeyHash;
use crate::pool::{Pool, SlotState};
use crate::sync::Mutex;
use state::Inner;

/// Tells a manager's requests from another's.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// The answer to a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The key is not in the pool.
    Miss,
    /// Every byte of the chunk is readable.
    Hit,
    /// The chunk is being written: ask again.
    Later,
}

/// What a look at a key finds, for a connector that decides what to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The key is not in the pool.
    Nothing,
    /// The chunk is being written.
    Writing,
    /// The chunk is readable.
    Ready,
    /// The chunk is readable, and somebody is loading it.
    Loading,
}

/// The host pool's bookkeeping.
///
/// Safe to share between threads; each call is atomic.
pub struct Manager {
    id: u64,
    partial_admission: bool,
    pool: Pool,
    inner: Mutex<Inner>,
}

impl Manager {
    /// Allocates everything for `config.num_slots` slots.
    ///
    /// # Errors
    /// [`ManagerError::NoSlots`] or [`ManagerError::TooManySlots`].
    pub fn new(config: Config) -> Result<Self, ManagerError> {
        config.check()?;
        Ok(Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            partial_admission: config.partial_admission,
            pool: Pool::new(config.num_slots),
            inner: Mutex::new(Inner::new(config)),
        })
    }

    /// Slots in the pool.
    pub fn num_slots(&self) -> u32 {
        self.pool.num_slots()
    }

    /// A record for one request's accesses and pins.
    pub fn new_request(&self) -> Request {
        Request::new(self.id, self.inner.lock().epoch)
    }

    /// Whether the chunk named `key` can be read now.
    pub fn lookup(&self, key: &[u8]) -> Answer {
        let hash = KeyHash::of(key);
        self.inner.lock().answer(&self.pool, key, hash)
    }

    /// The number of leading `keys` that hit, and the answer for the key after them (a hit when
    /// there is none).
    pub fn lookup_run<'k>(&self, keys: impl IntoIterator<Item = &'k [u8]>) -> (usize, Answer) {
        let mut inner = self.inner.lock();
        let mut hits = 0;
        for key in keys {
            match inner.answer(&self.pool, key, KeyHash::of(key)) {
                Answer::Hit => hits += 1,
                other => return (hits, other),
            }
        }
        (hits, Answer::Hit)
    }

    /// What each of `keys` is, appended to `found`; ends after the first that is not in the pool.
    pub fn probe<'k>(&self, keys: impl IntoIterator<Item = &'k [u8]>, found: &mut Vec<Found>) {
        let mut inner = self.inner.lock();
        for key in keys {
            let slot = inner.find(key, KeyHash::of(key));
            let one = match inner.answer_for(&self.pool, slot) {
                Answer::Miss => Found::Nothing,
                Answer::Later => Found::Writing,
                Answer::Hit => match slot {
                    Some(slot) if self.pool.pins(slot) > 0 => Found::Loading,
                    _ => Found::Ready,
                },
            };
            found.push(one);
            if one == Found::Nothing {
                return;
            }
        }
    }

    /// Why a key that is not in the pool is not; [`Missed::NeverStored`] unless
    /// [`Config::reasons`] is on.
    pub fn why_missed(&self, key: &[u8]) -> Missed {
        let inner = self.inner.lock();
        let whys = inner.whys.as_ref();
        whys.map_or(Missed::NeverStored, |whys| whys.get(KeyHash::of(key)))
    }

    /// Slots that a store could have now.
    pub fn room(&self, from: Room) -> usize {
        let free = self.pool.free() as usize;
        match from {
            Room::Evict => free + self.inner.lock().policy.evictable(),
            Room::Free => free,
        }
    }

    /// A number that grows with everything that can change the answer to a lookup: stores and loads
    /// that end, evictions, resets.
    pub fn changes(&self) -> u64 {
        self.inner.lock().changes
    }

    /// Marks `keys` as used, last one first so that the head of the prefix ends up youngest.
    ///
    /// For vLLM up to 0.31; later versions count one access per request when it finishes.
    pub fn touch<'k>(&self, keys: impl DoubleEndedIterator<Item = &'k [u8]>) {
        let mut inner = self.inner.lock();
        for key in keys.rev() {
            let hash = KeyHash::of(key);
            match inner.find(key, hash) {
                Some(slot) => {
                    let ready = self.pool.state(slot) == SlotState::Ready;
                    inner.policy.touch(slot, ready);
                }
                None => inner.policy.touch_absent(key, hash),
            }
        }
    }

    /// The request issues no more stores and loads: its accesses count now, once per key, tail of
    /// the prefix first. `positions` gives the end of chunks in tokens, where known. Completions of
    /// work in progress may still follow. Finishing twice changes nothing.
    ///
    /// # Errors
    /// [`ManagerError::ForeignRequest`].
    pub fn finish_request<'k>(
        &self,
        request: &mut Request,
        positions: impl IntoIterator<Item = (&'k [u8], i64)>,
    ) -> Result<(), ManagerError> {
        let mut inner = self.enter(request)?;
        for (key, position) in positions {
            request.set_position(key, position);
        }
        for (at, access) in request.finish() {
            let entry = request.entry(at);
            if let Some(slot) = inner.locate(&self.pool, entry) {
                inner.policy.on_request_access(slot, access);
            }
        }
        Ok(())
    }

    /// Empties the pool whatever is being read or written, and voids every handle.
    ///
    /// The caller must make sure that copies still running into or out of the old slots end before
    /// new ones begin (vLLM flushes them; the transfer engine orders jobs by slot besides).
    pub fn reset(&self) {
        let mut inner = self.inner.lock();
        for slot in inner.clear() {
            self.pool.release_any(slot);
        }
        debug_assert_eq!(self.pool.free(), self.pool.num_slots());
    }

    /// What was stored, evicted and discarded since the last call; empty unless events are on.
    pub fn take_events(&self) -> Vec<Event> {
        self.inner.lock().events.take()
    }

    /// Counts since the start, and sizes now, all of one moment.
    pub fn stats(&self) -> Stats {
        let inner = self.inner.lock();
        inner.stats_of(&self.pool)
    }

    /// Chunks asked for by each store since the last call, for vLLM's histogram.
    pub fn take_allocation_sizes(&self) -> Vec<u32> {
        std::mem::take(&mut self.inner.lock().allocation_sizes)
    }

    /// Chunks not stored because they had been offered too rarely, since the last call.
    pub fn take_stores_skipped(&self) -> u64 {
        std::mem::take(&mut self.inner.lock().stores_skipped)
    }

    /// Bytes of bookkeeping, which never grow: pool, index, keys and policy.
    pub fn metadata_bytes(&self) -> usize {
        self.pool.metadata_bytes() + self.inner.lock().metadata_bytes()
    }

    /// The whole state, for tests.
    pub fn dump(&self) -> StateDump {
        self.inner.lock().dump(&self.pool)
    }

    /// Checks every invariant that ties index, policy and pool together; for tests.
    ///
    /// # Panics
    /// When one does not hold.
    pub fn validate(&self) {
        self.inner.lock().validate(&self.pool);
    }
}

impl std::fmt::Debug for Manager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Manager")
            .field("id", &self.id)
            .field("stats", &self.stats())
            .finish()
    }
}
