//! The policies against models that follow their rules literally, compared in full after every step.
//!
//! The models speak of keys, the policies of slots; the harness between them plays the manager: it owns
//! slots, keys and pins.

mod models;

use kvoffload_core::key::{Key, KeyHash};
use kvoffload_core::policy::{Access, Arc, Lru, Policy};
use kvoffload_core::pool::Slot;
use proptest::prelude::*;

use models::{ArcModel, LruModel, Model, Name, bytes, hash};

#[derive(Clone, Copy, Debug, PartialEq)]
struct Chunk {
    key: Name,
    ready: bool,
    pinned: bool,
}

impl Chunk {
    fn evictable(self) -> bool {
        self.ready && !self.pinned
    }
}

#[derive(Clone, Debug)]
enum Op {
    /// Want a key; store it in a free slot if it is absent and there is one.
    Store(Name),
    /// The write of a chunk ends, well or not.
    FinishWrite(Name, bool),
    TogglePin(Name),
    Touch(Name),
    Access(Name, Access),
    /// Evict some, but none of the keys from the second number to the third.
    Evict(usize, Name, Name),
    Clear,
}

/// Numbers that mean little: reduced to the number of keys or slots at hand.
fn ops(longest: usize) -> impl Strategy<Value = Vec<Op>> {
    let key = || any::<Name>();
    let access = prop_oneof![
        Just(Access::Inserted),
        Just(Access::Reused),
        Just(Access::Observed)
    ];
    let op = prop_oneof![
        30 => key().prop_map(Op::Store),
        30 => (key(), prop::bool::weighted(0.9)).prop_map(|(key, ok)| Op::FinishWrite(key, ok)),
        8 => key().prop_map(Op::TogglePin),
        15 => key().prop_map(Op::Touch),
        15 => (key(), access).prop_map(|(key, access)| Op::Access(key, access)),
        12 => (1..8usize, key(), 0..6u16).prop_map(|(n, from, len)| Op::Evict(n, from, len)),
    ];
    prop::collection::vec(prop_oneof![800 => op, 1 => Just(Op::Clear)], 1..longest)
}

struct Harness<P, M> {
    policy: P,
    model: M,
    chunks: Vec<Option<Chunk>>,
    keys: Name,
}

impl<P: Policy, M: Model> Harness<P, M> {
    fn new(policy: P, model: M, num_slots: usize) -> Self {
        let keys = 2 * num_slots as Name + 3;
        Self {
            policy,
            model,
            chunks: vec![None; num_slots],
            keys,
        }
    }

    fn slot_of(&self, key: Name) -> Option<Slot> {
        let at = self
            .chunks
            .iter()
            .position(|chunk| chunk.is_some_and(|chunk| chunk.key == key));
        at.map(|at| Slot::new(at as u32))
    }

    fn chunk(&mut self, slot: Slot) -> &mut Chunk {
        self.chunks[slot.index()]
            .as_mut()
            .expect("a present key has a chunk")
    }

    /// Tells the policy when `change` lets the chunk go or holds it.
    fn change(&mut self, slot: Slot, change: impl FnOnce(&mut Chunk)) {
        let chunk = self.chunk(slot);
        let before = chunk.evictable();
        change(chunk);
        match (before, chunk.evictable()) {
            (false, true) => self.policy.mark_evictable(slot),
            (true, false) => self.policy.mark_non_evictable(slot),
            _ => {}
        }
    }

    fn step(&mut self, op: &Op) {
        match *op {
            Op::Store(name) => self.store(name % self.keys),
            Op::FinishWrite(name, ok) => {
                // Any chunk that is being written will do: most names would miss.
                let writing = |chunk: &Chunk| !chunk.ready;
                let all = self.chunks.len();
                let found = (0..all)
                    .map(|i| (usize::from(name) + i) % all)
                    .find(|&at| self.chunks[at].as_ref().is_some_and(writing));
                let Some(at) = found else { return };
                let slot = Slot::new(at as u32);
                let key = self.chunk(slot).key;
                if ok {
                    self.change(slot, |chunk| chunk.ready = true);
                } else {
                    self.policy.remove(slot);
                    self.model.remove(key);
                    self.chunks[slot.index()] = None;
                }
            }
            Op::TogglePin(name) => {
                if let Some(slot) = self.slot_of(name % self.keys) {
                    self.change(slot, |chunk| chunk.pinned = chunk.ready && !chunk.pinned);
                }
            }
            Op::Touch(name) => {
                let key = name % self.keys;
                match self.slot_of(key) {
                    Some(slot) => {
                        let ready = self.chunk(slot).ready;
                        self.policy.touch(slot, ready);
                        self.model.touch(key, ready);
                    }
                    None => {
                        self.policy.touch_absent(&bytes(key), hash(key));
                        self.model.wanted(key);
                    }
                }
            }
            Op::Access(name, access) => {
                let key = name % self.keys;
                if let Some(slot) = self.slot_of(key) {
                    self.policy.on_request_access(slot, access);
                    self.model.access(key, access);
                }
            }
            Op::Evict(n, from, len) => {
                let keys = self.keys;
                self.evict(n, &|key| (key + keys - from % keys) % keys < len);
            }
            Op::Clear => {
                self.policy.clear();
                self.model.clear();
                self.chunks.fill(None);
            }
        }
    }

    fn store(&mut self, key: Name) {
        if self.slot_of(key).is_some() {
            return;
        }
        self.policy.on_store_miss(&bytes(key), hash(key));
        self.model.wanted(key);
        if !self.chunks.contains(&None) {
            self.evict(1, &|_| false);
        }
        let Some(free) = self.chunks.iter().position(Option::is_none) else {
            return;
        };
        self.policy
            .insert(Slot::new(free as u32), &Key::new(&bytes(key)), hash(key));
        self.model.insert(key);
        self.chunks[free] = Some(Chunk {
            key,
            ready: false,
            pinned: false,
        });
    }

    fn evict(&mut self, n: usize, protected: &dyn Fn(Name) -> bool) {
        let chunks = self.chunks.clone();
        let chunk_of = |key: Name| chunks.iter().flatten().find(|chunk| chunk.key == key);
        let may_go = |key| chunk_of(key).is_some_and(|chunk| chunk.evictable()) && !protected(key);
        let expected = self.model.evict(n, &may_go);

        let held: Vec<Slot> = (0..chunks.len() as u32)
            .map(Slot::new)
            .filter(|slot| chunks[slot.index()].is_some_and(|c| c.evictable() && protected(c.key)))
            .collect();
        for &slot in &held {
            self.policy.mark_non_evictable(slot);
        }
        let name_at = |slot: Slot| chunks[slot.index()].map_or(0, |chunk| chunk.key);
        let keys: Vec<Key> = (0..chunks.len() as u32)
            .map(|slot| Key::new(&bytes(name_at(Slot::new(slot)))))
            .collect();
        let key_of = |slot: Slot| (&keys[slot.index()], hash(name_at(slot)));
        let victims = (n <= self.policy.evictable()).then(|| {
            let mut victims = Vec::new();
            self.policy.evict(n, &key_of, &mut victims);
            victims
        });
        for &slot in &held {
            self.policy.mark_evictable(slot);
        }

        for slot in victims.iter().flatten() {
            self.chunks[slot.index()] = None;
        }
        let victims = victims.map(|victims| victims.into_iter().map(name_at).collect());
        assert_eq!(victims, expected);
    }

    fn validate(&self) {
        let slot_of = |key| {
            self.slot_of(key)
                .expect("the model lists present keys only")
        };
        assert_eq!(self.policy.dump(), self.model.dump(&slot_of));
        let evictable: Vec<bool> = self
            .chunks
            .iter()
            .map(|chunk| chunk.is_some_and(Chunk::evictable))
            .collect();
        assert_eq!(
            self.policy.evictable(),
            evictable.iter().filter(|&&evictable| evictable).count()
        );
        for (slot, &evictable) in evictable.iter().enumerate() {
            assert_eq!(self.policy.is_evictable(Slot::new(slot as u32)), evictable);
        }
    }

    fn run(mut self, ops: &[Op]) {
        for op in ops {
            self.step(op);
            self.validate();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn lru_follows_its_model(num_slots in 1..24usize, ops in ops(300)) {
        Harness::new(Lru::new(num_slots as u32), LruModel::default(), num_slots).run(&ops);
    }

    #[test]
    fn arc_follows_its_model(num_slots in 1..24usize, ops in ops(300)) {
        Harness::new(Arc::new(num_slots as u32), ArcModel::new(num_slots), num_slots).run(&ops);
    }
}

proptest! {
    // Few but long: the arrays behind the order are swept many times.
    #![proptest_config(ProptestConfig { max_shrink_iters: 500, ..ProptestConfig::with_cases(8) })]

    #[test]
    fn lru_follows_its_model_for_long(num_slots in 30..120usize, ops in ops(4000)) {
        Harness::new(Lru::new(num_slots as u32), LruModel::default(), num_slots).run(&ops);
    }

    #[test]
    fn arc_follows_its_model_for_long(num_slots in 30..120usize, ops in ops(4000)) {
        Harness::new(Arc::new(num_slots as u32), ArcModel::new(num_slots), num_slots).run(&ops);
    }
}

/// A key for each of some slots: the slot's number.
fn numbered(slots: Name) -> Vec<(Key, KeyHash)> {
    let key = |name| (Key::new(&bytes(name)), hash(name));
    (0..slots).map(key).collect()
}

#[test]
fn a_released_slot_returns_to_its_place_in_the_order() {
    let keys = numbered(4);
    let key_of = |slot: Slot| (&keys[slot.index()].0, keys[slot.index()].1);
    for policy in [&mut Lru::new(4) as &mut dyn Policy, &mut Arc::new(4)] {
        for slot in (0..4).map(Slot::new) {
            policy.insert(slot, key_of(slot).0, key_of(slot).1);
            policy.mark_evictable(slot);
        }
        policy.mark_non_evictable(Slot::new(0));
        let mut victims = Vec::new();
        policy.evict(1, &key_of, &mut victims);
        policy.mark_evictable(Slot::new(0));
        policy.evict(2, &key_of, &mut victims);
        assert_eq!(victims, [1, 0, 2].map(Slot::new));
    }
}

#[test]
fn a_large_eviction_is_as_many_small_ones() {
    // ARC handles its victims in batches: the borders must not show.
    let slots = 300;
    let keys = numbered(slots);
    let key_of = |slot: Slot| (&keys[slot.index()].0, keys[slot.index()].1);
    let evicted = |sizes: &[usize]| {
        let mut arc = Arc::new(u32::from(slots));
        let mut victims = Vec::new();
        // Three rounds: later ones find ghosts of earlier ones, and the target moves.
        for _ in 0..3 {
            for slot in (0..u32::from(slots)).map(Slot::new) {
                arc.on_store_miss(key_of(slot).0.as_bytes(), key_of(slot).1);
                arc.insert(slot, key_of(slot).0, key_of(slot).1);
                arc.mark_evictable(slot);
                if slot.index().is_multiple_of(3) {
                    arc.on_request_access(slot, Access::Reused);
                }
            }
            for &size in sizes {
                arc.evict(size, &key_of, &mut victims);
            }
            assert_eq!(arc.evictable(), 0);
        }
        (victims, arc.dump())
    };
    assert_eq!(evicted(&[300]), evicted(&[1; 300]));
    assert_eq!(evicted(&[300]), evicted(&[63, 64, 65, 108]));
}

#[test]
fn arc_learns_from_what_it_should_have_kept() {
    let keys = numbered(2);
    let key_of = |slot: Slot| (&keys[slot.index()].0, keys[slot.index()].1);
    let (once, again) = (Slot::new(0), Slot::new(1));
    let mut arc = Arc::new(2);
    for slot in [once, again] {
        arc.insert(slot, key_of(slot).0, key_of(slot).1);
        arc.mark_evictable(slot);
    }
    arc.on_request_access(again, Access::Reused);
    let mut victims = Vec::new();
    arc.evict(2, &key_of, &mut victims);
    assert_eq!(victims, [once, again], "what was used once goes first");

    arc.on_store_miss(&bytes(0), hash(0));
    arc.on_store_miss(&bytes(0), hash(0));
    assert_eq!(arc.dump().target, Some(2.0), "at most the pool's slots");
    arc.on_store_miss(&bytes(1), hash(1));
    assert_eq!(arc.dump().target, Some(1.0));
    arc.insert(once, key_of(once).0, key_of(once).1);
    assert_eq!(arc.dump().ghosts, [("b1", vec![]), ("b2", vec![bytes(1)])]);
    arc.clear();
    assert_eq!(arc.dump().target, Some(0.0));
}

#[test]
fn metadata_stays_within_its_budget() {
    let slots = 1_000_000;
    let per_slot = |bytes: usize| bytes as f64 / f64::from(slots);
    assert!(per_slot(Lru::new(slots).metadata_bytes()) < 13.0);
    assert!(per_slot(Arc::new(slots).metadata_bytes()) < 154.0);
}
