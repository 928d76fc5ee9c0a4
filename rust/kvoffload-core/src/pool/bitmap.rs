//! Which slots are free: one bit each, a count that is reserved before any bit is touched, and a
//! summary so that a nearly full pool is searched in steps of [`WORD_BITS`] words.
//!
//! # Why n or nothing needs no undo
//! `take(n)` first takes n from `free`. Only then it claims bits. `put` sets its bit first and adds
//! to `free` last. So at all times *set bits >= free + bits reserved but not yet claimed*: whoever
//! holds a reservation will find its bits, and nobody else can be short because of it.
//!
//! # Why the search ends, and the orderings
//! The reservation loads `free` with `Acquire`, every `put` adds with `Release`, and all writes of
//! `free` are read-modify-writes, which keep release sequences alive: a reservation sees the bits of
//! every `put` counted before it. They suffice for it and all reservations before it, so such a bit can
//! only be missing because a *later* reservation claimed it. Bits are loaded with `Acquire` and claimed
//! with `AcqRel`, so seeing that claim shows every bit that its reservation counted on, and the
//! argument holds again from there. Each fruitless pass over all words has thus met a claim by a later
//! reservation than any before: another thread has moved on (lock-freedom), and without other threads
//! the first pass finds everything.
//!
//! The claim's `Acquire` also pairs with the `Release` half of `put`'s bit: what the last owner did
//! to the slot (its word going to `Free` above all) is visible to the next owner.
//!
//! # The summary is a hint
//! Bit w of the summary says that word w may have free bits. A search that follows the summary and
//! comes back short looks at every word, so a summary that lags behind costs time, never a slot. Hence
//! it is read `Relaxed`. Only [`Bitmap::lower`] and [`Bitmap::raise`] must agree.

use super::Slot;
use crate::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use crate::sync::hint;

/// Slots per word, and words per summary word. Two under loom, so that four slots are two words.
pub(super) const WORD_BITS: usize = if cfg!(loom) { 2 } else { 64 };

/// The set of free slots of a pool.
#[derive(Debug)]
pub(super) struct Bitmap {
    /// Free and not reserved.
    free: AtomicU32,
    /// The word at which the next search starts: the last one that a search took from.
    hint: AtomicUsize,
    words: Box<[AtomicU64]>,
    summary: Box<[AtomicU64]>,
    /// Passes over all words that came back short, for the proof that the search ends.
    #[cfg(all(test, loom))]
    pub(super) fruitless: std::sync::atomic::AtomicU32,
}

impl Bitmap {
    /// All of `num_slots` slots are free.
    pub(super) fn new(num_slots: u32) -> Self {
        let words = full_words(num_slots as usize);
        let summary = full_words(words.len());
        Self {
            free: AtomicU32::new(num_slots),
            hint: AtomicUsize::new(0),
            words,
            summary,
            #[cfg(all(test, loom))]
            fruitless: Default::default(),
        }
    }

    /// Slots that are free and not promised to anybody.
    pub(super) fn free(&self) -> u32 {
        self.free.load(Ordering::Relaxed)
    }

    pub(super) fn metadata_bytes(&self) -> usize {
        size_of_val(&*self.words) + size_of_val(&*self.summary)
    }

    /// Takes exactly `n` slots and hands each to `each`, or takes none and returns false.
    pub(super) fn take(&self, n: u32, mut each: impl FnMut(Slot)) -> bool {
        // Acquire: see the module's text. Nothing is published by taking, so no Release.
        let reserved = self
            .free
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, |free| {
                free.checked_sub(n)
            })
            .is_ok();
        if !reserved {
            return false;
        }
        let mut left = n;
        while left > 0 {
            left = self.take_by_summary(left, &mut each);
            if left > 0 {
                left = self.take_by_words(left, &mut each);
            }
            if left > 0 {
                #[cfg(all(test, loom))]
                self.fruitless
                    .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                hint::spin_loop();
            }
        }
        true
    }

    /// Gives slots back. The caller owns them and has already made their words `Free`. Neighbours in
    /// the order given share one write if they share a word.
    pub(super) fn put(&self, slots: &[Slot]) {
        let word_of = |slot: &Slot| slot.index() / WORD_BITS;
        for run in slots.chunk_by(|a, b| word_of(a) == word_of(b)) {
            let word = word_of(&run[0]);
            let bits = run
                .iter()
                .fold(0, |bits, slot| bits | 1 << (slot.index() % WORD_BITS));
            let before = self.words[word].fetch_or(bits, Ordering::AcqRel);
            debug_assert_eq!(before & bits, 0, "a slot of {run:?} was free already");
            if before == 0 {
                // Not if a bit was set before: whoever set it has raised the word or is about to.
                self.raise(word);
            }
        }
        self.free.fetch_add(slots.len() as u32, Ordering::Release);
    }

    /// Goes once round the words that the summary names, from the hint on. Returns how many slots
    /// are still to be taken.
    fn take_by_summary(&self, mut left: u32, each: &mut impl FnMut(Slot)) -> u32 {
        let start = self.hint.load(Ordering::Relaxed);
        let (first, high) = (start / WORD_BITS, u64::MAX << (start % WORD_BITS));
        let mut enough = |group: usize, mask: u64| {
            let mut named = self.summary[group].load(Ordering::Relaxed) & mask;
            while named != 0 && left > 0 {
                let word = group * WORD_BITS + named.trailing_zeros() as usize;
                left = self.take_from(word, left, each);
                named &= named - 1;
            }
            left == 0
        };
        // The first group of words is visited twice: from the hint up now, below the hint at the end.
        let _ = enough(first, high)
            || (first + 1..self.summary.len()).any(|group| enough(group, u64::MAX))
            || (0..first).any(|group| enough(group, u64::MAX))
            || enough(first, !high);
        left
    }

    /// Goes once over every word, whatever the summary says.
    fn take_by_words(&self, mut left: u32, each: &mut impl FnMut(Slot)) -> u32 {
        for word in 0..self.words.len() {
            left = self.take_from(word, left, each);
            if left == 0 {
                break;
            }
        }
        left
    }

    /// Claims up to `left` bits of one word with one compare-and-swap; returns how many are missing.
    fn take_from(&self, word: usize, left: u32, each: &mut impl FnMut(Slot)) -> u32 {
        let mut bits = self.words[word].load(Ordering::Acquire);
        let claimed = loop {
            if bits == 0 {
                self.lower(word);
                return left;
            }
            let mask = choose(bits, left);
            match self.words[word].compare_exchange_weak(
                bits,
                bits & !mask,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => break mask,
                Err(now) => bits = now,
            }
        };
        if claimed == bits {
            self.lower(word);
        }
        self.hint.store(word, Ordering::Relaxed);
        let mut rest = claimed;
        while rest != 0 {
            each(Slot((word * WORD_BITS) as u32 + rest.trailing_zeros()));
            rest &= rest - 1;
        }
        left - claimed.count_ones()
    }

    /// Says in the summary that `word` has free bits.
    fn raise(&self, word: usize) {
        let bit = 1 << (word % WORD_BITS);
        self.summary[word / WORD_BITS].fetch_or(bit, Ordering::AcqRel);
    }

    /// Says in the summary that `word` is used up, and takes it back if that is no longer so.
    ///
    /// A `put` that raised before this clears is in the release sequence that the `fetch_and` reads,
    /// so the load after it sees that `put`'s bit; a `put` that raises later wins by itself. Either
    /// way the summary names the word in the end.
    fn lower(&self, word: usize) {
        let bit = 1 << (word % WORD_BITS);
        let summary = &self.summary[word / WORD_BITS];
        if summary.load(Ordering::Relaxed) & bit == 0 {
            return;
        }
        summary.fetch_and(!bit, Ordering::AcqRel);
        if self.words[word].load(Ordering::Relaxed) != 0 {
            self.raise(word);
        }
    }
}

/// Bits of `bits` to take when `left` are wanted: all of them if that is not too many, else whole runs,
/// longest first, until a run is long enough to give the rest; of such runs the shortest.
fn choose(bits: u64, left: u32) -> u64 {
    if bits.count_ones() <= left {
        return bits;
    }
    let (mut chosen, mut left) = (0, left);
    loop {
        let (start, len) = best_run(bits & !chosen, left);
        let take = len.min(left);
        chosen |= (u64::MAX >> (64 - take)) << start;
        left -= take;
        if left == 0 {
            return chosen;
        }
    }
}

/// The shortest run of set bits with at least `wanted`, else the longest: (first bit, length).
/// Of equals the lowest. `bits` is not 0.
fn best_run(bits: u64, wanted: u32) -> (u32, u32) {
    let (mut best, mut rest, mut base) = ((0, 0), bits, 0);
    while rest != 0 {
        let skip = rest.trailing_zeros();
        let len = (rest >> skip).trailing_ones();
        let start = base + skip;
        let better = if best.1 >= wanted {
            len >= wanted && len < best.1
        } else {
            len > best.1
        };
        if better {
            best = (start, len);
        }
        // Shifting by 64 is not defined; such a run is the last one anyway.
        rest = rest.checked_shr(skip + len).unwrap_or(0);
        base = start + len;
    }
    best
}

/// Words whose first `bits` bits are set.
fn full_words(bits: usize) -> Box<[AtomicU64]> {
    let word = |start: usize| match bits - start {
        rest if rest >= WORD_BITS => u64::MAX >> (64 - WORD_BITS),
        rest => (1 << rest) - 1,
    };
    (0..bits)
        .step_by(WORD_BITS)
        .map(|start| AtomicU64::new(word(start)))
        .collect()
}

#[cfg(test)]
impl Bitmap {
    /// Words with free bits that the summary does not name. None while no call is under way.
    pub(super) fn unnamed_words(&self) -> Vec<usize> {
        let named = |word: usize| {
            let summary = self.summary[word / WORD_BITS].load(Ordering::Acquire);
            summary >> (word % WORD_BITS) & 1 == 1
        };
        let free = |word: &usize| self.words[*word].load(Ordering::Acquire) != 0;
        (0..self.words.len())
            .filter(free)
            .filter(|&word| !named(word))
            .collect()
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use std::sync::Mutex;
    use std::thread;

    use super::*;

    fn take(bitmap: &Bitmap, n: u32) -> Option<Vec<u32>> {
        let mut out = Vec::new();
        bitmap.take(n, |slot| out.push(slot.get())).then_some(out)
    }

    #[test]
    fn the_chosen_bits_are_whole_runs() {
        assert_eq!(choose(0b1011, 3), 0b1011, "all that is there");
        assert_eq!(
            choose(0b1110_0110_1111, 2),
            0b0110_0000,
            "the shortest run that is long enough"
        );
        assert_eq!(choose(0b1110_0110_1111, 4), 0b1111, "an exact fit");
        assert_eq!(
            choose(0b1110_0110_0111, 5),
            0b0110_0111,
            "the longest, then the rest in one"
        );
        assert_eq!(
            choose(0b1011_0101, 3),
            0b0011_0001,
            "the longest first, then the lowest single"
        );
        assert_eq!(choose(u64::MAX, 63), u64::MAX >> 1);
        assert_eq!(choose(1 << 63, 1), 1 << 63);
        assert_eq!(choose(u64::MAX << 1, 63), u64::MAX << 1);
    }

    #[test]
    fn every_size_has_exactly_its_slots_in_order() {
        for num_slots in [0, 1, 63, 64, 65, 128, 4095, 4096, 4097, 70_000] {
            let bitmap = Bitmap::new(num_slots);
            assert_eq!(take(&bitmap, num_slots + 1), None);
            assert_eq!(take(&bitmap, num_slots), Some((0..num_slots).collect()));
            assert_eq!((bitmap.free(), take(&bitmap, 1)), (0, None));
            assert_eq!(take(&bitmap, 0), Some(vec![]));
        }
    }

    #[test]
    fn the_search_goes_on_from_the_hint_and_comes_round() {
        let bitmap = Bitmap::new(200);
        assert_eq!(take(&bitmap, 130), Some((0..130).collect()));
        bitmap.put(&[Slot(3)]);
        assert_eq!(take(&bitmap, 71), Some((130..200).chain([3]).collect()));
    }

    #[test]
    fn a_search_in_a_nearly_full_pool_finds_the_only_free_slot() {
        let bitmap = Bitmap::new(1 << 20);
        take(&bitmap, 1 << 20);
        for slot in [0, 1, (1 << 20) - 1, 64 * 64, 64 * 64 - 1, 777_777] {
            bitmap.put(&[Slot(slot)]);
            assert_eq!(take(&bitmap, 1), Some(vec![slot]));
            assert_eq!(bitmap.unnamed_words(), []);
        }
    }

    #[test]
    fn a_wrong_summary_costs_no_slot() {
        let bitmap = Bitmap::new(1000);
        for word in &bitmap.summary {
            word.store(0, Ordering::Relaxed);
        }
        assert_eq!(take(&bitmap, 1000), Some((0..1000).collect()));
        for word in &bitmap.summary {
            word.store(u64::MAX >> 48, Ordering::Relaxed);
        }
        bitmap.put(&[Slot(500)]);
        assert_eq!(take(&bitmap, 1), Some(vec![500]));
    }

    #[test]
    fn threads_never_share_a_slot_and_leave_a_true_summary() {
        const SLOTS: u32 = 300;
        let bitmap = Bitmap::new(SLOTS);
        let owned = Mutex::new(vec![false; SLOTS as usize]);
        thread::scope(|scope| {
            for thread in 0..4u32 {
                let (bitmap, owned) = (&bitmap, &owned);
                scope.spawn(move || {
                    for round in 0..2000 {
                        let n = 1 + (round * 7 + thread * 13) % 90;
                        let Some(slots) = take(bitmap, n) else {
                            continue;
                        };
                        assert_eq!(slots.len(), n as usize);
                        let mut table = owned.lock().unwrap();
                        for &slot in &slots {
                            assert!(!std::mem::replace(&mut table[slot as usize], true));
                        }
                        for &slot in &slots {
                            table[slot as usize] = false;
                        }
                        drop(table);
                        slots.iter().for_each(|&slot| bitmap.put(&[Slot(slot)]));
                    }
                });
            }
        });
        assert_eq!((bitmap.free(), bitmap.unnamed_words()), (SLOTS, vec![]));
    }
}
