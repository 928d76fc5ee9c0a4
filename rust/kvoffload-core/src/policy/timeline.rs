//! The order of slots from oldest to newest, where the first evictable one is found at once.
//!
//! A slot owns a *position* in a long array; appending takes the next position, and removal leaves a
//! hole. A bitmap over positions says which are live, another (with summaries, see [`BitSet`]) which
//! are evictable. So a slot that is pinned and later released is back at its old place by setting one
//! bit, however many others are pinned, and a victim costs a few word reads.
//!
//! # Holes
//! The array has room for `8q` positions where `q = max(1, ceil(n / 4))`, about two for each of the `n`
//! slots. A *sweep* slides the live entries together, in place and in order, a little with each append:
//!
//! ```text
//! 0            compacted          read                    write        8q
//! | moved, with  |     empty       | not looked at yet, and  |   empty   |
//! | later holes  |                 | what is appended        |           |
//! ```
//!
//! It starts when `write = 7q` and looks at 8 positions before each append; once it has caught up with
//! `write`, the next append goes to `compacted`.
//!
//! **The array is never too short.** Before the i-th append of a sweep `write = 7q + i - 1` and the sweep
//! has read `8i` positions, so it has caught up when `8i >= 7q + i - 1`, at the latest with `i = q`: the
//! last position used is `8q - 2`. It has then moved at most the `n` slots that were live when it started
//! and the `q - 1` appended since (a slot that was moved and appended again counts twice: its first place
//! is a hole). So `compacted <= n + q - 1 <= 5q - 1 < 7q`, and at least `2q` appends pass before the next
//! sweep. No append moves more than 8 slots; on average it is fewer than two.

use super::bitset::BitSet;
use crate::pool::Slot;

/// The position of a slot that is not in the order.
const ABSENT: u32 = u32::MAX;

/// Positions that a sweep looks at before each append: a byte of the bitmaps.
const STEP: usize = 8;

/// An order over the slots `0..n` of a pool. Everything is allocated by [`Timeline::new`].
pub(super) struct Timeline {
    /// Who is at a position. Holds nothing meaningful where `live` has no bit.
    slots: Box<[Slot]>,
    /// Where a slot is, or [`ABSENT`].
    positions: Box<[u32]>,
    live: Box<[u64]>,
    evictable: BitSet,
    len: usize,
    evictable_len: usize,
    /// Where the next append goes.
    write: usize,
    /// Everything before it has been swept; 0 when no sweep is under way.
    read: usize,
    /// Where the sweep moves its next live entry.
    compacted: usize,
    /// The value of `write` that starts a sweep.
    sweep_at: usize,
}

impl Timeline {
    /// An empty order over `num_slots` slots.
    ///
    /// # Panics
    /// If `num_slots` exceeds [`super::MAX_SLOTS`], which the manager's settings do not let through.
    pub(super) fn new(num_slots: u32) -> Self {
        assert!(
            num_slots <= super::MAX_SLOTS,
            "{num_slots} slots have no 32-bit positions"
        );
        let quarter = (num_slots as usize).div_ceil(4).max(1);
        let size = STEP * quarter;
        Self {
            slots: vec![Slot::new(0); size].into(),
            positions: vec![ABSENT; num_slots as usize].into(),
            live: vec![0; size.div_ceil(64)].into(),
            evictable: BitSet::new(size),
            len: 0,
            evictable_len: 0,
            write: 0,
            read: 0,
            compacted: 0,
            sweep_at: (STEP - 1) * quarter,
        }
    }

    /// Number of slots in the order.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Number of evictable slots.
    pub(super) fn evictable(&self) -> usize {
        self.evictable_len
    }

    #[inline]
    pub(super) fn contains(&self, slot: Slot) -> bool {
        self.positions[slot.index()] != ABSENT
    }

    /// Makes `slot`, which is not in the order, the newest. It is not evictable.
    #[inline]
    pub(super) fn append(&mut self, slot: Slot) {
        debug_assert!(!self.contains(slot), "{slot:?} has a place in the order");
        if self.read > 0 || self.write == self.sweep_at {
            self.sweep();
        }
        let at = self.write;
        self.write += 1;
        self.place(slot, at);
        self.len += 1;
    }

    /// Removes `slot`; answers whether it was evictable, or `None` if it is not in the order.
    #[inline]
    pub(super) fn remove(&mut self, slot: Slot) -> Option<bool> {
        let at = self.position(slot)?;
        let was_evictable = self.evictable.contains(at);
        if was_evictable {
            self.evictable.remove(at);
            self.evictable_len -= 1;
        }
        self.vacate(slot, at);
        Some(was_evictable)
    }

    /// Makes `slot` the newest; it stays as evictable as it was.
    #[inline]
    pub(super) fn move_to_end(&mut self, slot: Slot) {
        if let Some(was_evictable) = self.remove(slot) {
            self.append(slot);
            if was_evictable {
                self.set_evictable(slot);
            }
        }
    }

    #[inline]
    pub(super) fn is_evictable(&self, slot: Slot) -> bool {
        self.position(slot)
            .is_some_and(|at| self.evictable.contains(at))
    }

    /// From now on `slot` may be taken. Nothing happens if it is not in the order.
    #[inline]
    pub(super) fn set_evictable(&mut self, slot: Slot) {
        if let Some(at) = self.position(slot)
            && !self.evictable.contains(at)
        {
            self.evictable.insert(at);
            self.evictable_len += 1;
        }
    }

    /// From now on `slot` may not be taken. Nothing happens if it is not in the order.
    #[inline]
    pub(super) fn clear_evictable(&mut self, slot: Slot) {
        if let Some(at) = self.position(slot)
            && self.evictable.contains(at)
        {
            self.evictable.remove(at);
            self.evictable_len -= 1;
        }
    }

    /// Removes the oldest evictable slot at or after the position `from`, and moves `from` past it.
    ///
    /// Positions hold until the next append: to take many, start with 0 and pass the same `from`.
    #[inline]
    pub(super) fn take_evictable(&mut self, from: &mut usize) -> Option<Slot> {
        let at = self.evictable.next(*from)?;
        *from = at + 1;
        self.evictable.remove(at);
        self.evictable_len -= 1;
        let slot = self.slots[at];
        self.vacate(slot, at);
        Some(slot)
    }

    /// The slots from oldest to newest.
    pub(super) fn iter(&self) -> impl Iterator<Item = Slot> + '_ {
        // Live bits exist only in the two parts that hold entries, and those are in order.
        self.live
            .iter()
            .enumerate()
            .flat_map(move |(at, &word)| bits(word).map(move |bit| self.slots[at * 64 + bit]))
    }

    /// Removes all slots. Takes time in proportion to the pool.
    pub(super) fn clear(&mut self) {
        self.positions.fill(ABSENT);
        self.live.fill(0);
        self.evictable.clear();
        (self.len, self.evictable_len) = (0, 0);
        (self.write, self.read, self.compacted) = (0, 0, 0);
    }

    /// Bytes allocated.
    pub(super) fn metadata_bytes(&self) -> usize {
        size_of_val(&*self.slots)
            + size_of_val(&*self.positions)
            + size_of_val(&*self.live)
            + self.evictable.metadata_bytes()
    }

    #[inline]
    fn position(&self, slot: Slot) -> Option<usize> {
        let at = self.positions[slot.index()];
        (at != ABSENT).then_some(at as usize)
    }

    #[inline]
    fn place(&mut self, slot: Slot, at: usize) {
        self.slots[at] = slot;
        self.positions[slot.index()] = at as u32;
        self.live[at / 64] |= 1 << (at % 64);
    }

    /// Makes the position `at` of `slot`, no longer marked evictable, a hole.
    #[inline]
    fn vacate(&mut self, slot: Slot, at: usize) {
        self.positions[slot.index()] = ABSENT;
        self.live[at / 64] &= !(1 << (at % 64));
        self.len -= 1;
    }

    /// Slides the live entries among the next 8 positions; ends the sweep if none are left.
    #[inline(never)]
    fn sweep(&mut self) {
        let from = self.read;
        let (word, shift) = (from / 64, from % 64);
        let live = self.live[word] >> shift & 0xff;
        // Cleared first: the new places may be among these eight.
        self.live[word] &= !(0xff << shift);
        let evictable = self.evictable.take_eight(from);
        for bit in bits(live) {
            self.place(self.slots[from + bit], self.compacted);
            if evictable >> bit & 1 == 1 {
                self.evictable.insert(self.compacted);
            }
            self.compacted += 1;
        }
        self.read += STEP;
        if self.read >= self.write {
            self.write = self.compacted;
            (self.read, self.compacted) = (0, 0);
        }
    }
}

/// The numbers of the bits set in `word`, lowest first.
#[inline]
fn bits(mut word: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = word.trailing_zeros() as usize;
        word &= word.wrapping_sub(1);
        (bit < 64).then_some(bit)
    })
}

#[cfg(test)]
mod tests;
