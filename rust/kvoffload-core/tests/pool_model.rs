//! The pool against a model that keeps every slot in a plain table, and several threads at once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread;

use kvoffload_core::pool::{Generation, Pool, PoolCounts, Slot, SlotError, SlotState};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Op {
    Alloc(usize),
    Publish(usize),
    Pin(usize),
    Unpin(usize),
    Release(usize),
    ReleaseAny(usize),
}

/// The number picks a handle among all that were ever given out, the newest ones more often.
fn op() -> impl Strategy<Value = Op> {
    let handle = prop_oneof![3 => 0..8usize, 1 => 0..1000usize];
    prop_oneof![
        2 => (0..12usize).prop_map(Op::Alloc),
        3 => handle.clone().prop_map(Op::Publish),
        3 => handle.clone().prop_map(Op::Pin),
        3 => handle.clone().prop_map(Op::Unpin),
        3 => handle.clone().prop_map(Op::Release),
        1 => handle.prop_map(Op::ReleaseAny),
    ]
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct ModelSlot {
    state: SlotState,
    pins: u32,
    generation: u32,
}

struct Model {
    slots: Vec<ModelSlot>,
}

impl Model {
    fn new(num_slots: u32) -> Self {
        let free = ModelSlot {
            state: SlotState::Free,
            pins: 0,
            generation: 0,
        };
        Self {
            slots: vec![free; num_slots as usize],
        }
    }

    fn counts(&self) -> PoolCounts {
        let count = |wanted: SlotState| {
            self.slots
                .iter()
                .filter(|slot| slot.state == wanted)
                .count() as u32
        };
        PoolCounts {
            free: count(SlotState::Free),
            writing: count(SlotState::Writing),
            ready: count(SlotState::Ready),
            pinned: self.slots.iter().filter(|slot| slot.pins > 0).count() as u32,
        }
    }

    /// The live use that a handle stands for.
    fn live(&mut self, slot: Slot, given: Generation) -> Result<&mut ModelSlot, SlotError> {
        let entry = &mut self.slots[slot.index()];
        if entry.state == SlotState::Free || entry.generation != given.get() {
            let current = Generation::new(entry.generation);
            return Err(SlotError::Stale {
                slot,
                given,
                current,
            });
        }
        Ok(entry)
    }

    fn publish(&mut self, slot: Slot, given: Generation) -> Result<(), SlotError> {
        let entry = self.live(slot, given)?;
        if entry.state == SlotState::Ready {
            return Err(SlotError::NotWriting { slot });
        }
        entry.state = SlotState::Ready;
        Ok(())
    }

    fn pin(&mut self, slot: Slot, given: Generation) -> Result<u32, SlotError> {
        let entry = self.live(slot, given)?;
        if entry.state == SlotState::Writing {
            return Err(SlotError::NotReady { slot });
        }
        entry.pins += 1;
        Ok(entry.pins)
    }

    fn unpin(&mut self, slot: Slot, given: Generation) -> Result<u32, SlotError> {
        let entry = self.live(slot, given)?;
        match entry.state {
            SlotState::Writing => Err(SlotError::NotReady { slot }),
            _ if entry.pins == 0 => Err(SlotError::NotPinned { slot }),
            _ => {
                entry.pins -= 1;
                Ok(entry.pins)
            }
        }
    }

    fn release(&mut self, slot: Slot, given: Generation) -> Result<(), SlotError> {
        let entry = self.live(slot, given)?;
        if entry.pins > 0 {
            return Err(SlotError::Pinned {
                slot,
                pins: entry.pins,
            });
        }
        entry.state = SlotState::Free;
        Ok(())
    }
}

fn check_equal(pool: &Pool, model: &Model) -> Result<(), TestCaseError> {
    prop_assert_eq!(pool.counts(), model.counts());
    prop_assert_eq!(pool.free(), model.counts().free);
    for (index, expected) in model.slots.iter().enumerate() {
        let slot = Slot::new(index as u32);
        let found = ModelSlot {
            state: pool.state(slot),
            pins: pool.pins(slot),
            generation: pool.generation(slot).get(),
        };
        prop_assert_eq!(found, *expected, "slot {}", slot);
    }
    Ok(())
}

proptest! {
    /// Every answer, every error and every slot as in the model, stale handles and double releases
    /// included; and at the end every slot can be had again.
    #[test]
    fn the_pool_does_what_the_model_does(
        num_slots in prop_oneof![0..10u32, 60..70u32, 120..140u32],
        ops in prop::collection::vec(op(), 0..200),
    ) {
        let pool = Pool::new(num_slots);
        let mut model = Model::new(num_slots);
        let mut handles: Vec<(Slot, Generation)> = Vec::new();
        for op in ops {
            let newest = |back: usize| {
                (!handles.is_empty()).then(|| handles[handles.len() - 1 - back % handles.len()])
            };
            match op {
                Op::Alloc(n) => {
                    let mut slots = vec![Slot::new(u32::MAX)];
                    let granted = pool.alloc(n, &mut slots);
                    prop_assert_eq!(slots.remove(0), Slot::new(u32::MAX), "appends only");
                    prop_assert_eq!(granted, n <= model.counts().free as usize);
                    prop_assert_eq!(slots.len(), if granted { n } else { 0 });
                    for slot in slots {
                        let entry = &mut model.slots[slot.index()];
                        prop_assert_eq!(entry.state, SlotState::Free, "handed out twice");
                        entry.state = SlotState::Writing;
                        entry.generation += 1;
                        handles.push((slot, pool.generation(slot)));
                    }
                }
                Op::Publish(at) => if let Some((slot, generation)) = newest(at) {
                    let expected = model.publish(slot, generation);
                    prop_assert_eq!(pool.publish(slot, generation), expected);
                },
                Op::Pin(at) => if let Some((slot, generation)) = newest(at) {
                    prop_assert_eq!(pool.pin(slot, generation), model.pin(slot, generation));
                },
                Op::Unpin(at) => if let Some((slot, generation)) = newest(at) {
                    prop_assert_eq!(pool.unpin(slot, generation), model.unpin(slot, generation));
                },
                Op::Release(at) => if let Some((slot, generation)) = newest(at) {
                    let expected = model.release(slot, generation);
                    prop_assert_eq!(pool.release(slot, generation), expected);
                },
                Op::ReleaseAny(at) => if let Some((slot, _)) = newest(at) {
                    let entry = &mut model.slots[slot.index()];
                    prop_assert_eq!(pool.release_any(slot), entry.state);
                    (entry.state, entry.pins) = (SlotState::Free, 0);
                },
            }
            check_equal(&pool, &model)?;
        }
        for slot in (0..num_slots).map(Slot::new) {
            pool.release_any(slot);
        }
        let expected = PoolCounts { free: num_slots, ..PoolCounts::default() };
        prop_assert_eq!(pool.counts(), expected);
        let mut all = Vec::new();
        prop_assert!(pool.alloc(num_slots as usize, &mut all));
        prop_assert!(!pool.alloc(1, &mut all));
        prop_assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), num_slots as usize);
    }
}

/// What alloc returned and how: runs are ascending, and a free run that fits is not broken up.
#[test]
fn runs_of_adjacent_slots_stay_together() {
    let pool = Pool::new(1000);
    let mut slots = Vec::new();
    assert!(pool.alloc(1000, &mut slots));
    assert!(
        slots
            .windows(2)
            .all(|pair| pair[1].get() == pair[0].get() + 1)
    );
    for index in [700, 702, 704, 710, 711, 712, 713, 720, 721] {
        let slot = Slot::new(index);
        pool.release(slot, pool.generation(slot)).unwrap();
    }
    let numbers = |n: usize| {
        let mut out = Vec::new();
        assert!(pool.alloc(n, &mut out));
        out.into_iter().map(Slot::get).collect::<Vec<_>>()
    };
    // 700 and 702 are in the word before the others.
    assert_eq!(numbers(2), [700, 702]);
    assert_eq!(numbers(2), [720, 721]);
    assert_eq!(numbers(4), [710, 711, 712, 713]);
    assert_eq!(numbers(1), [704]);
}

#[test]
fn slots_outside_the_pool_are_errors_or_free() {
    let pool = Pool::new(2);
    let (slot, generation) = (Slot::new(2), Generation::new(0));
    let unknown = SlotError::UnknownSlot { slot, num_slots: 2 };
    assert_eq!(pool.publish(slot, generation), Err(unknown));
    assert_eq!(pool.pin(slot, generation), Err(unknown));
    assert_eq!(pool.unpin(slot, generation), Err(unknown));
    assert_eq!(pool.release(slot, generation), Err(unknown));
    assert_eq!(pool.release_any(slot), SlotState::Free);
    assert_eq!((pool.state(slot), pool.pins(slot)), (SlotState::Free, 0));
    assert_eq!(
        pool.counts(),
        PoolCounts {
            free: 2,
            ..PoolCounts::default()
        }
    );
    let mut out = Vec::new();
    assert!(!pool.alloc(usize::MAX, &mut out));
    assert!(!pool.alloc(3, &mut out));
    assert!(out.is_empty() && out.capacity() == 0);
}

/// A10, A11: pins are counted per use. A second unpin is an error, never somebody else's unpin.
#[test]
fn a_pin_is_released_once_and_only_in_its_own_use() {
    let pool = Pool::new(1);
    let mut out = Vec::new();
    assert!(pool.alloc(1, &mut out));
    let slot = out[0];
    let first = pool.generation(slot);
    pool.publish(slot, first).unwrap();
    assert_eq!(pool.pin(slot, first), Ok(1));
    assert_eq!(pool.unpin(slot, first), Ok(0));
    assert_eq!(pool.unpin(slot, first), Err(SlotError::NotPinned { slot }));
    pool.release(slot, first).unwrap();
    assert!(pool.alloc(1, &mut out));
    let second = pool.generation(slot);
    pool.publish(slot, second).unwrap();
    assert_eq!(pool.pin(slot, second), Ok(1));
    let stale = SlotError::Stale {
        slot,
        given: first,
        current: second,
    };
    assert_eq!(pool.unpin(slot, first), Err(stale));
    assert_eq!(pool.release(slot, first), Err(stale));
    assert_eq!(
        pool.release(slot, second),
        Err(SlotError::Pinned { slot, pins: 1 })
    );
    assert_eq!(pool.pins(slot), 1);
}

#[test]
fn bookkeeping_is_a_little_more_than_eight_bytes_a_slot() {
    let slots = 1 << 20;
    let bytes = Pool::new(slots).metadata_bytes();
    assert!(bytes <= slots as usize * 82 / 10, "{bytes} bytes");
}

/// Four threads take, use and give back slots; every slot's bytes are its owner's throughout.
#[test]
fn threads_never_share_a_slot() {
    const SLOTS: u32 = 257;
    let pool = Pool::new(SLOTS);
    let owner: Vec<AtomicU32> = (0..SLOTS).map(|_| AtomicU32::new(0)).collect();
    let granted = AtomicU64::new(0);
    thread::scope(|scope| {
        for thread in 1..=4u32 {
            let (pool, owner, granted) = (&pool, &owner, &granted);
            scope.spawn(move || {
                let mut held: BTreeMap<u32, Vec<Slot>> = BTreeMap::new();
                for round in 0..4000u32 {
                    let mut slots = Vec::new();
                    let n = 1 + (round * 31 + thread * 17) % 50;
                    if pool.alloc(n as usize, &mut slots) {
                        assert_eq!(slots.len(), n as usize);
                        granted.fetch_add(1, Ordering::Relaxed);
                        for slot in &slots {
                            let before = owner[slot.index()].swap(thread, Ordering::Relaxed);
                            assert_eq!(before, 0, "slot {slot} handed out twice");
                        }
                        held.insert(round, slots);
                    }
                    let keep = if held.len() > 3 {
                        round.saturating_sub(2)
                    } else {
                        0
                    };
                    let recent = held.split_off(&keep);
                    for slot in std::mem::replace(&mut held, recent).into_values().flatten() {
                        give_back(pool, owner, slot, thread);
                    }
                }
                for slot in held.into_values().flatten() {
                    give_back(pool, owner, slot, thread);
                }
            });
        }
    });
    assert!(granted.into_inner() > 0);
    assert_eq!(
        pool.counts(),
        PoolCounts {
            free: SLOTS,
            ..PoolCounts::default()
        }
    );
}

fn give_back(pool: &Pool, owner: &[AtomicU32], slot: Slot, thread: u32) {
    let generation = pool.generation(slot);
    assert_eq!(owner[slot.index()].swap(0, Ordering::Relaxed), thread);
    pool.publish(slot, generation).unwrap();
    assert_eq!(pool.pin(slot, generation), Ok(1));
    assert_eq!(pool.unpin(slot, generation), Ok(0));
    pool.release(slot, generation).unwrap();
    assert!(matches!(
        pool.pin(slot, generation),
        Err(SlotError::Stale { .. })
    ));
}

#[test]
fn releasing_several_stops_at_the_first_that_is_in_use() {
    let pool = Pool::new(200);
    let mut slots = Vec::new();
    assert!(pool.alloc(150, &mut slots));
    let pinned = slots[100];
    for &slot in &slots {
        pool.publish(slot, pool.generation(slot)).unwrap();
    }
    pool.pin(pinned, pool.generation(pinned)).unwrap();
    let refused = SlotError::Pinned {
        slot: pinned,
        pins: 1,
    };
    assert_eq!(pool.release_all(&slots), Err(refused));
    assert_eq!(pool.free(), 150);
    assert_eq!(pool.counts().pinned, 1);
    pool.release_all(&slots[101..]).unwrap();
    pool.unpin(pinned, pool.generation(pinned)).unwrap();
    pool.release_all(&[pinned]).unwrap();
    assert_eq!(pool.free(), 200);
    assert!(pool.release_all(&[pinned]).is_err(), "it is free already");
    let mut again = Vec::new();
    assert!(pool.alloc(200, &mut again), "every slot can be had again");
    again.sort_unstable();
    again.dedup();
    assert_eq!(again.len(), 200);
}
