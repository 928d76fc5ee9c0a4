//! Which chunk goes first: the order of chunks, seen as slots.
//!
//! A policy knows slots, keys only where it must remember what it evicted (ARC's ghosts). It never
//! sees pins or copies: the manager tells it when a slot becomes evictable and when it stops being so.
//! A slot keeps its place in the order while it is not evictable.

mod arc;
mod bitset;
mod ghost;
mod lru;
mod timeline;

pub use arc::Arc;
pub use lru::Lru;

use crate::key::{Key, KeyHash};
use crate::pool::Slot;

/// The most slots that a policy can order: positions and ghosts are numbered in 32 bits.
pub const MAX_SLOTS: u32 = 1 << 30;

/// What one request did with a chunk, told once per request when it finishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Only wrote it.
    Inserted,
    /// Read it, or offered it again while it was ready.
    Reused,
    /// Offered it for a store that was refused; somebody else stored it.
    Observed,
}

/// Answers the key, and its hash, of the chunk in a slot.
pub type KeyOf<'k> = dyn Fn(Slot) -> (&'k Key, KeyHash) + 'k;

/// Eviction order over the slots of one pool.
///
/// Everything is allocated by the constructor. No call allocates, except for keys longer than
/// [`Key::INLINE`] bytes that an implementation keeps after eviction.
pub trait Policy: Send {
    /// A chunk has been given `slot` and is being written: newest of all, not evictable.
    fn insert(&mut self, slot: Slot, key: &Key, hash: KeyHash);
    /// The chunk in `slot` is gone without having been evicted (a failed store).
    fn remove(&mut self, slot: Slot);
    /// Whether `slot` may be evicted now.
    fn is_evictable(&self, slot: Slot) -> bool;
    /// `slot` may be evicted from now on, from the place it has in the order.
    fn mark_evictable(&mut self, slot: Slot);
    /// `slot` may not be evicted until further notice. It keeps its place.
    fn mark_non_evictable(&mut self, slot: Slot);
    /// A use of the chunk in `slot`, which is readable if `ready`.
    fn touch(&mut self, slot: Slot, ready: bool);
    /// A call of [`Policy::on_store_miss`] for this key comes soon; see [`crate::index::Index::warm`].
    fn warm(&self, _hash: KeyHash) {}
    /// A request wants to store a key that is not present.
    fn on_store_miss(&mut self, key: &[u8], hash: KeyHash);
    /// A touch of a key that is not present.
    fn touch_absent(&mut self, key: &[u8], hash: KeyHash);
    /// A finished request's access to the chunk in `slot`.
    fn on_request_access(&mut self, slot: Slot, access: Access);
    /// Number of evictable slots.
    fn evictable(&self) -> usize;
    /// Removes `n` victims, first to go first, appends them to `victims`.
    ///
    /// `keys` answers the key and the hash of a slot's chunk. The caller has made sure that
    /// `n <= self.evictable()`, so this cannot fail half-way.
    fn evict(&mut self, n: usize, keys: &KeyOf<'_>, victims: &mut Vec<Slot>);
    /// Forgets everything, ghosts and learnt targets included.
    fn clear(&mut self);
    /// Bytes allocated for the policy's own bookkeeping.
    fn metadata_bytes(&self) -> usize;
    /// The whole state in order, for tests.
    fn dump(&self) -> PolicyDump;
}

/// A policy's state for tests: slots from first victim to last, and what is remembered of evicted keys.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PolicyDump {
    /// Named lists of resident slots, oldest first (`lru`; `t1`, `t2`).
    pub resident: Vec<(&'static str, Vec<Slot>)>,
    /// Named lists of evicted keys, oldest first (`b1`, `b2`).
    pub ghosts: Vec<(&'static str, Vec<Vec<u8>>)>,
    /// ARC's target size of `t1`.
    pub target: Option<f64>,
}
