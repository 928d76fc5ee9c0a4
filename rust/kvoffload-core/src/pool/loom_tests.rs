//! Every interleaving of a few threads on a pool of at most four slots, which are two bitmap words
//! under loom. Run with
//! `RUSTFLAGS="--cfg loom" cargo test -p kvoffload-core --lib --release loom -- --nocapture`.
//!
//! The bytes of a slot are stood in for by a relaxed atomic: a reader that is not ordered after the
//! last owner may see an old value in the model, and then an assertion fails.

use loom::sync::Arc;
use loom::thread;

use super::*;
use crate::sync::atomic::{AtomicU32, Ordering};

/// Runs `model` in every interleaving, or in those with at most `preemptions` forced switches.
fn explore(name: &str, preemptions: Option<usize>, model: impl Fn() + Sync + Send + 'static) {
    use std::sync::atomic::AtomicUsize;
    let count = std::sync::Arc::new(AtomicUsize::new(0));
    let started = std::time::Instant::now();
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    let counter = count.clone();
    builder.check(move || {
        counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        model();
    });
    let count = count.load(std::sync::atomic::Ordering::Relaxed);
    println!(
        "{name}: {count} interleavings in {:.1} s, preemptions {preemptions:?}",
        started.elapsed().as_secs_f64()
    );
}

/// A pool and, for every slot, who is using its bytes (0: nobody).
struct Host {
    pool: Pool,
    bytes: Vec<AtomicU32>,
}

impl Host {
    fn new(num_slots: u32) -> Self {
        let bytes = (0..num_slots).map(|_| AtomicU32::new(0)).collect();
        Self {
            pool: Pool::new(num_slots),
            bytes,
        }
    }

    /// Allocates `n` slots, all or none, and writes the bytes of each.
    fn take(&self, n: usize, owner: u32) -> Option<Vec<(Slot, Generation)>> {
        let mut slots = Vec::new();
        let granted = self.pool.alloc(n, &mut slots);
        assert_eq!(slots.len(), if granted { n } else { 0 }, "n or nothing");
        for slot in &slots {
            let before = self.bytes[slot.index()].load(Ordering::Relaxed);
            assert_eq!(
                before, 0,
                "slot {slot} is in use, or its last use is not visible"
            );
            self.bytes[slot.index()].store(owner, Ordering::Relaxed);
        }
        granted.then(|| {
            slots
                .into_iter()
                .map(|slot| (slot, self.pool.generation(slot)))
                .collect()
        })
    }

    fn give(&self, slots: Vec<(Slot, Generation)>, owner: u32) {
        for (slot, generation) in slots {
            assert_eq!(
                self.bytes[slot.index()].load(Ordering::Relaxed),
                owner,
                "slot {slot}"
            );
            self.bytes[slot.index()].store(0, Ordering::Relaxed);
            self.pool.release(slot, generation).unwrap();
        }
    }

    /// How often a search passed over all words and came back short.
    fn fruitless_passes(&self) -> u32 {
        self.pool
            .bitmap
            .fruitless
            .load(std::sync::atomic::Ordering::Relaxed)
    }

    /// With nothing under way: the counter is exact, and every counted slot can be had.
    fn check(&self, free: u32) {
        assert_eq!(self.pool.free(), free);
        assert!(
            self.pool.bitmap.unnamed_words().is_empty(),
            "the summary has lost a word"
        );
        let mut slots = Vec::new();
        assert!(self.pool.alloc(free as usize, &mut slots));
        slots.sort_unstable();
        slots.dedup();
        assert_eq!(slots.len(), free as usize);
        assert!(!self.pool.alloc(1, &mut slots));
    }
}

/// Two threads want more together than there is: one gets all it wants, the other nothing.
#[test]
fn loom_n_or_nothing() {
    explore("n or nothing", None, || {
        let host = Arc::new(Host::new(4));
        let other = host.clone();
        let thread = thread::spawn(move || other.take(2, 1).is_some());
        let mine = host.take(3, 2).is_some();
        let theirs = thread.join().unwrap();
        assert!(
            mine != theirs,
            "three and two of four: the first reservation wins, one must"
        );
        host.check(if mine { 1 } else { 2 });
    });
}

/// One thread gives back while another takes: whatever the counter grants is found.
#[test]
fn loom_release_races_alloc() {
    explore("release races alloc", None, || {
        let host = Arc::new(Host::new(3));
        let all = host.take(3, 1).unwrap();
        let other = host.clone();
        let thread = thread::spawn(move || other.give(all, 1));
        let mine = host.take(1, 2);
        thread.join().unwrap();
        assert_eq!(
            host.fruitless_passes(),
            0,
            "nobody else claims, so the first pass finds it"
        );
        host.check(3 - mine.map_or(0, |slots| slots.len() as u32));
    });
}

/// Two threads take and give back around a word that keeps running empty.
#[test]
fn loom_take_and_give() {
    explore("take and give", Some(4), || {
        let host = Arc::new(Host::new(3));
        let other = host.clone();
        let thread = thread::spawn(move || {
            if let Some(slots) = other.take(2, 1) {
                other.give(slots, 1);
            }
        });
        if let Some(slots) = host.take(2, 2) {
            host.give(slots, 2);
        }
        thread.join().unwrap();
        host.check(3);
    });
}

/// A word that keeps being emptied and filled by one thread while another claims from it: the value
/// that the claim compares with may have come back by way of another use of the slot.
#[test]
fn loom_take_and_give_one() {
    explore("take and give one", Some(3), || {
        let host = Arc::new(Host::new(2));
        let other = host.clone();
        let thread = thread::spawn(move || {
            let slots = other.take(1, 1).unwrap();
            other.give(slots, 1);
        });
        let slots = host.take(1, 2).unwrap();
        host.give(slots, 2);
        thread.join().unwrap();
        host.check(2);
    });
}

/// Two threads give back to one word while a third takes. The one that set the word's first bit may
/// not have raised the summary yet when the other one's slot is already counted.
#[test]
fn loom_two_give_one_takes() {
    explore("two give, one takes", Some(4), || {
        let host = Arc::new(Host::new(2));
        let mut slots = host.take(2, 1).unwrap();
        let last = vec![slots.remove(1)];
        let givers = [slots, last].map(|slots| {
            let host = host.clone();
            thread::spawn(move || host.give(slots, 1))
        });
        let mine = host.take(1, 2).map_or(0, |slots| slots.len() as u32);
        for giver in givers {
            giver.join().unwrap();
        }
        assert_eq!(
            host.fruitless_passes(),
            0,
            "nobody else claims, so the first pass finds it"
        );
        host.check(2 - mine);
    });
}

/// Two threads compete for a free slot and for one that a third is giving back. Whoever counted on
/// the first and finds it gone must, from then on, see the second.
#[test]
fn loom_two_take_one_gives() {
    explore("two take, one gives", Some(3), || {
        let host = Arc::new(Host::new(3));
        let mut slots = host.take(2, 1).unwrap();
        slots.truncate(1);
        let giver = {
            let host = host.clone();
            thread::spawn(move || host.give(slots, 1))
        };
        let taker = {
            let host = host.clone();
            thread::spawn(move || host.take(1, 2).map_or(0, |slots| slots.len() as u32))
        };
        let mine = host.take(1, 3).map_or(0, |slots| slots.len() as u32);
        giver.join().unwrap();
        let theirs = taker.join().unwrap();
        assert!(theirs + mine > 0, "one slot was free all along");
        // A fruitless pass has met the other's claim. The first claimer met none.
        assert!(
            host.fruitless_passes() <= 1,
            "{} passes",
            host.fruitless_passes()
        );
        host.check(2 - mine - theirs);
    });
}

/// A reader that has its pin sees the bytes it was promised until it unpins; a release succeeds
/// before the pin or after the unpin, never between.
#[test]
fn loom_pin_races_release() {
    explore("pin races release", None, || {
        let host = Arc::new(Host::new(1));
        let (slot, generation) = host.take(1, 1).unwrap()[0];
        host.pool.publish(slot, generation).unwrap();
        let reader = {
            let host = host.clone();
            thread::spawn(move || match host.pool.pin(slot, generation) {
                Ok(pins) => {
                    assert_eq!(pins, 1);
                    assert_eq!(
                        host.bytes[0].load(Ordering::Relaxed),
                        1,
                        "evicted under a reader"
                    );
                    assert_eq!(host.pool.unpin(slot, generation), Ok(0));
                }
                Err(error) => assert!(matches!(error, SlotError::Stale { .. })),
            })
        };
        let released = match host.pool.release(slot, generation) {
            Ok(()) => {
                host.bytes[0].store(0, Ordering::Relaxed);
                assert!(host.take(1, 2).is_some());
                true
            }
            Err(error) => {
                assert_eq!(error, SlotError::Pinned { slot, pins: 1 });
                false
            }
        };
        reader.join().unwrap();
        let counts = host.pool.counts();
        assert_eq!((counts.ready, counts.pinned), (u32::from(!released), 0));
    });
}

/// Two pins on one slot are two pins.
#[test]
fn loom_pins_add_up() {
    explore("pins add up", None, || {
        let host = Arc::new(Host::new(1));
        let (slot, generation) = host.take(1, 1).unwrap()[0];
        host.pool.publish(slot, generation).unwrap();
        let other = host.clone();
        let thread = thread::spawn(move || other.pool.pin(slot, generation).unwrap());
        let mine = host.pool.pin(slot, generation).unwrap();
        assert_eq!(mine + thread.join().unwrap(), 3);
        assert_eq!(host.pool.pins(slot), 2);
        let other = host.clone();
        let thread = thread::spawn(move || other.pool.unpin(slot, generation).unwrap());
        let mine = host.pool.unpin(slot, generation).unwrap();
        assert_eq!(mine + thread.join().unwrap(), 1);
        assert_eq!(host.pool.counts().pinned, 0);
        host.pool.release(slot, generation).unwrap();
    });
}

/// A writer publishes while the slot is reset and given to somebody else: its publish lands on its
/// own use or on none, and readers of a published slot see its bytes.
#[test]
fn loom_publish_races_reset() {
    explore("publish races reset", None, || {
        let host = Arc::new(Host::new(1));
        let mut slots = Vec::new();
        assert!(host.pool.alloc(1, &mut slots));
        let (slot, old) = (slots[0], host.pool.generation(slots[0]));
        let writer = {
            let host = host.clone();
            thread::spawn(move || {
                host.bytes[0].store(7, Ordering::Relaxed);
                host.pool.publish(slot, old)
            })
        };
        if host.pool.pin(slot, old).is_ok() {
            assert_eq!(
                host.bytes[0].load(Ordering::Relaxed),
                7,
                "readable without its bytes"
            );
        }
        assert_ne!(host.pool.release_any(slot), SlotState::Free);
        assert!(host.pool.alloc(1, &mut slots));
        let new = host.pool.generation(slot);
        assert_ne!(new, old);
        let published = writer.join().unwrap();
        let stale = Err(SlotError::Stale {
            slot,
            given: old,
            current: old,
        });
        let stale_new = Err(SlotError::Stale {
            slot,
            given: old,
            current: new,
        });
        assert!(published == Ok(()) || published == stale || published == stale_new);
        assert_eq!(
            host.pool.state(slot),
            SlotState::Writing,
            "published for somebody else"
        );
        assert_eq!(
            host.pool.counts(),
            PoolCounts {
                writing: 1,
                ..PoolCounts::default()
            }
        );
    });
}

/// Two threads free the same use of a slot: its bit goes back once.
#[test]
fn loom_double_release() {
    explore("double release", None, || {
        let host = Arc::new(Host::new(2));
        let (slot, generation) = host.take(1, 0).unwrap()[0];
        let other = host.clone();
        let thread = thread::spawn(move || other.pool.release(slot, generation).is_ok());
        let mine = host.pool.release_any(slot) != SlotState::Free;
        assert!(mine != thread.join().unwrap(), "freed by exactly one");
        host.check(2);
    });
}
