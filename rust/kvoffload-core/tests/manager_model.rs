//! The manager against a model that knows the rules but no order: whatever the policy decides, a key
//! answers *hit* only while its bytes are there, nothing in use is evicted, and nothing leaks.

use std::collections::{BTreeMap, BTreeSet};

use kvoffload_core::manager::{
    Answer, Config, Found, Manager, ManagerError, PolicyKind, Prepared, Request, Room,
};
use proptest::prelude::*;

const KEYS: u8 = 24;
const REQUESTS: usize = 4;

#[derive(Clone, Debug)]
enum Op {
    Lookup(Vec<u8>),
    Probe(Vec<u8>),
    Store {
        request: usize,
        keys: Vec<u8>,
        from: Room,
    },
    Stored {
        request: usize,
        pick: usize,
        success: bool,
    },
    Load {
        request: usize,
        keys: Vec<u8>,
    },
    Loaded {
        request: usize,
        pick: usize,
        discard: bool,
    },
    LoadedTwice {
        request: usize,
        key: u8,
    },
    Touch(Vec<u8>),
    Finish {
        request: usize,
        positions: bool,
    },
    Replace {
        request: usize,
    },
    Reset,
}

fn op() -> impl Strategy<Value = Op> {
    // Often few keys, so that requests meet.
    let keys = || {
        prop_oneof![
            prop::collection::vec(0..KEYS, 1..7),
            prop::collection::vec(0..4u8, 1..3),
        ]
    };
    let request = 0..REQUESTS;
    prop_oneof![
        4 => keys().prop_map(Op::Lookup),
        1 => keys().prop_map(Op::Probe),
        6 => (request.clone(), keys(), prop::bool::weighted(0.2)).prop_map(|(request, keys, free)| {
            let from = if free { Room::Free } else { Room::Evict };
            Op::Store { request, keys, from }
        }),
        6 => (request.clone(), any::<usize>(), prop::bool::weighted(0.8))
            .prop_map(|(request, pick, success)| Op::Stored { request, pick, success }),
        4 => (request.clone(), keys()).prop_map(|(request, keys)| Op::Load { request, keys }),
        4 => (request.clone(), any::<usize>(), prop::bool::weighted(0.3))
            .prop_map(|(request, pick, discard)| Op::Loaded { request, pick, discard }),
        1 => (request.clone(), 0..KEYS).prop_map(|(request, key)| Op::LoadedTwice { request, key }),
        1 => keys().prop_map(Op::Touch),
        2 => (request.clone(), any::<bool>())
            .prop_map(|(request, positions)| Op::Finish { request, positions }),
        2 => request.prop_map(|request| Op::Replace { request }),
        1 => Just(Op::Reset),
    ]
}

/// Long keys now and then: they live on the heap.
fn name(key: u8) -> Vec<u8> {
    let mut name = vec![key; if key.is_multiple_of(5) { 60 } else { 32 }];
    name.extend(u32::from(key % 3).to_be_bytes());
    name
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Chunk {
    Writing { by: usize },
    Ready { pins: u32, version: u32 },
}

struct World {
    manager: Manager,
    requests: Vec<Request>,
    chunks: BTreeMap<u8, Chunk>,
    stores: Vec<Vec<Vec<u8>>>,
    /// Keys, and the versions of their chunks.
    loads: Vec<Vec<Vec<(u8, u32)>>>,
    /// Pins of versions that are discarded.
    condemned: BTreeMap<u32, u32>,
    versions: u32,
    /// What the events say can be read.
    visible: BTreeSet<Vec<u8>>,
    outlived: Vec<bool>,
    prepared: Prepared,
    partial: bool,
    slots: usize,
}

impl World {
    fn new(config: Config) -> Self {
        let (partial, slots) = (config.partial_admission, config.num_slots as usize);
        let manager = Manager::new(config).unwrap();
        Self {
            requests: (0..REQUESTS).map(|_| manager.new_request()).collect(),
            manager,
            chunks: BTreeMap::new(),
            stores: vec![Vec::new(); REQUESTS],
            loads: vec![Vec::new(); REQUESTS],
            condemned: BTreeMap::new(),
            versions: 0,
            visible: BTreeSet::new(),
            outlived: vec![false; REQUESTS],
            prepared: Prepared::default(),
            partial,
            slots,
        }
    }

    fn run(&mut self, op: Op) {
        match op {
            Op::Lookup(keys) => {
                for key in keys {
                    let expected = match self.chunks.get(&key) {
                        None => Answer::Miss,
                        Some(Chunk::Writing { .. }) => Answer::Later,
                        Some(Chunk::Ready { .. }) => Answer::Hit,
                    };
                    assert_eq!(self.manager.lookup(&name(key)), expected);
                }
            }
            Op::Probe(keys) => self.probe(&keys),
            Op::Store {
                request,
                keys,
                from,
            } => self.store(request, &keys, from),
            Op::Stored {
                request,
                pick,
                success,
            } => self.stored(request, pick, success),
            Op::Load { request, keys } => self.load(request, &keys),
            Op::Loaded {
                request,
                pick,
                discard,
            } => self.loaded(request, pick, discard),
            Op::LoadedTwice { request, key } => {
                if !self.loads[request]
                    .iter()
                    .flatten()
                    .any(|held| held.0 == key)
                {
                    let ended = self
                        .manager
                        .complete_load([&*name(key)], &mut self.requests[request]);
                    let stale = Err(ManagerError::StaleHandle { position: 0 });
                    assert_eq!(
                        ended,
                        if self.outlived[request] {
                            Ok(())
                        } else {
                            stale
                        }
                    );
                }
            }
            Op::Touch(keys) => {
                let names: Vec<_> = keys.iter().map(|key| name(*key)).collect();
                self.manager.touch(names.iter().map(Vec::as_slice));
            }
            Op::Finish { request, positions } => {
                let names: Vec<_> = (0..KEYS).map(name).collect();
                let at = names
                    .iter()
                    .map(Vec::as_slice)
                    .zip(0..)
                    .filter(|_| positions);
                self.manager
                    .finish_request(&mut self.requests[request], at)
                    .unwrap();
            }
            Op::Replace { request } => {
                if self.stores[request].is_empty() && self.loads[request].is_empty() {
                    self.requests[request] = self.manager.new_request();
                    self.outlived[request] = false;
                }
            }
            Op::Reset => {
                self.manager.reset();
                self.chunks.clear();
                self.stores.iter_mut().for_each(Vec::clear);
                self.loads.iter_mut().for_each(Vec::clear);
                self.condemned.clear();
                self.manager.take_events();
                self.visible.clear();
                self.outlived = vec![true; REQUESTS];
            }
        }
        self.manager.validate();
        self.follow_events();
    }

    /// Events tell exactly which keys can be read.
    fn follow_events(&mut self) {
        for event in self.manager.take_events() {
            for key in event.keys {
                let key = key.as_bytes().to_vec();
                if event.removed {
                    assert!(self.visible.remove(&key));
                } else {
                    assert!(self.visible.insert(key));
                }
            }
        }
        let ready =
            |(key, chunk): (&u8, &Chunk)| matches!(chunk, Chunk::Ready { .. }).then(|| name(*key));
        assert_eq!(self.visible, self.chunks.iter().filter_map(ready).collect());
    }

    fn probe(&self, keys: &[u8]) {
        let mut expected = Vec::new();
        for key in keys {
            expected.push(match self.chunks.get(key) {
                None => Found::Nothing,
                Some(Chunk::Writing { .. }) => Found::Writing,
                Some(Chunk::Ready { pins: 0, .. }) => Found::Ready,
                Some(Chunk::Ready { .. }) => Found::Loading,
            });
            if expected.ends_with(&[Found::Nothing]) {
                break;
            }
        }
        let names: Vec<_> = keys.iter().map(|key| name(*key)).collect();
        let mut found = Vec::new();
        self.manager
            .probe(names.iter().map(Vec::as_slice), &mut found);
        assert_eq!(found, expected);
    }

    /// Whether a request reads a version of a key that is not (any more) in the pool.
    fn reads_other(&self, request: usize, key: u8) -> bool {
        self.loads[request]
            .iter()
            .flatten()
            .any(|held| held.0 == key && self.condemned.contains_key(&held.1))
    }

    fn store(&mut self, request: usize, keys: &[u8], from: Room) {
        let names: Vec<_> = keys.iter().map(|key| name(*key)).collect();
        let names: Vec<&[u8]> = names.iter().map(Vec::as_slice).collect();
        let mut absent: Vec<usize> = Vec::new();
        for (at, key) in keys.iter().enumerate() {
            if !self.chunks.contains_key(key)
                && !keys[..at].contains(key)
                && !self.reads_other(request, *key)
            {
                absent.push(at);
            }
        }
        let idle = self
            .chunks
            .iter()
            .filter(|(key, chunk)| {
                matches!(chunk, Chunk::Ready { pins: 0, .. }) && !keys.contains(key)
            })
            .count();
        let free = self.slots - self.chunks.len() - self.condemned.len();
        let room = free + if from == Room::Free { 0 } else { idle };
        let refused_from = match absent.get(room) {
            Some(first) if self.partial && room > 0 => Some(*first),
            Some(_) => Some(absent[0]),
            None => None,
        };
        if self.partial && room > 0 {
            absent.truncate(room);
        }
        let before = self.manager.dump();
        let ok = self
            .manager
            .prepare_store_in(
                from,
                &names,
                &mut self.requests[request],
                &mut self.prepared,
            )
            .unwrap();
        assert_eq!(self.prepared.refused_from, refused_from);
        assert_eq!(ok, absent.len() <= room);
        if !ok {
            assert_eq!(
                self.manager.dump().keys,
                before.keys,
                "a refusal moves no chunk"
            );
            return;
        }
        assert_eq!(
            self.prepared.to_store, absent,
            "the caller's order, each absent key once"
        );
        let evicted = absent.len().saturating_sub(free);
        assert_eq!(self.prepared.evicted.len(), evicted);
        for victim in &self.prepared.evicted {
            let key = victim.as_bytes()[0];
            assert_eq!(victim.as_bytes(), name(key));
            assert!(!keys.contains(&key), "a store never evicts its own input");
            let gone = self.chunks.remove(&key);
            assert!(matches!(gone, Some(Chunk::Ready { pins: 0, .. })));
        }
        let distinct: BTreeSet<_> = self.prepared.slots.iter().collect();
        assert_eq!(distinct.len(), absent.len());
        let stored: Vec<u8> = absent.iter().map(|at| keys[*at]).collect();
        for key in &stored {
            self.chunks.insert(*key, Chunk::Writing { by: request });
        }
        if !stored.is_empty() {
            self.stores[request].push(stored);
        }
    }

    fn stored(&mut self, request: usize, pick: usize, success: bool) {
        if self.stores[request].is_empty() {
            return;
        }
        let pick = pick % self.stores[request].len();
        let keys = self.stores[request].swap_remove(pick);
        let names: Vec<_> = keys.iter().map(|key| name(*key)).collect();
        let other = (request + 1) % REQUESTS;
        let names = || names.iter().map(Vec::as_slice);
        // A write is ended by its owner only.
        self.manager
            .complete_store(names(), &mut self.requests[other], true)
            .unwrap();
        assert_eq!(self.manager.lookup(names().next().unwrap()), Answer::Later);
        self.manager
            .complete_store(names(), &mut self.requests[request], success)
            .unwrap();
        for key in keys {
            assert_eq!(
                self.chunks.remove(&key),
                Some(Chunk::Writing { by: request })
            );
            if success {
                self.versions += 1;
                let version = self.versions;
                self.chunks.insert(key, Chunk::Ready { pins: 0, version });
            }
        }
    }

    fn load(&mut self, request: usize, keys: &[u8]) {
        let names: Vec<_> = keys.iter().map(|key| name(*key)).collect();
        let names = names.iter().map(Vec::as_slice);
        let bad = keys.iter().position(|key| {
            !matches!(self.chunks.get(key), Some(Chunk::Ready { .. }))
                || self.reads_other(request, *key)
        });
        let mut slots = Vec::new();
        let pinned = self
            .manager
            .prepare_load(names, &mut self.requests[request], &mut slots);
        if let Some(position) = bad {
            let chunk = self.chunks.get(&keys[position]);
            let writing = matches!(chunk, Some(Chunk::Writing { .. }));
            assert_eq!(pinned, Err(ManagerError::KeyNotReady { position, writing }));
            assert!(slots.is_empty());
            return;
        }
        pinned.unwrap();
        let dump = self.manager.dump();
        let mut held = Vec::new();
        for (key, slot) in keys.iter().zip(&slots) {
            let at = dump.keys.iter().find(|chunk| chunk.slot == *slot).unwrap();
            assert_eq!(
                at.key.as_bytes(),
                name(*key),
                "slots come in the order of the keys"
            );
            match self.chunks.get_mut(key) {
                Some(Chunk::Ready { pins, version }) => {
                    *pins += 1;
                    held.push((*key, *version));
                }
                other => panic!("{other:?}"),
            }
        }
        self.loads[request].push(held);
    }

    fn loaded(&mut self, request: usize, pick: usize, discard: bool) {
        if self.loads[request].is_empty() {
            return;
        }
        let pick = pick % self.loads[request].len();
        let held = self.loads[request].swap_remove(pick);
        let names: Vec<_> = held.iter().map(|held| name(held.0)).collect();
        let names = names.iter().map(Vec::as_slice);
        let owner = &mut self.requests[request];
        if discard {
            self.manager.discard_load(names, owner).unwrap();
        } else {
            self.manager.complete_load(names, owner).unwrap();
        }
        for (key, held) in held {
            match self.chunks.get_mut(&key) {
                Some(Chunk::Ready { pins, version }) if *version == held => {
                    *pins -= 1;
                    if discard {
                        self.condemned.insert(held, *pins);
                        self.chunks.remove(&key);
                    }
                }
                _ => *self.condemned.get_mut(&held).expect("it is somewhere") -= 1,
            }
            self.condemned.retain(|_, pins| *pins > 0);
        }
    }

    /// Ends what is in progress; afterwards every slot is free or ready.
    fn drain(&mut self) {
        for request in 0..REQUESTS {
            while !self.stores[request].is_empty() {
                self.stored(request, 0, true);
            }
            while !self.loads[request].is_empty() {
                self.loaded(request, 0, false);
            }
            // A request learns of a reset at its next call.
            self.manager
                .finish_request(&mut self.requests[request], [])
                .unwrap();
            assert_eq!(self.requests[request].held(), 0);
        }
        let stats = self.manager.stats();
        assert_eq!((stats.pinned, stats.writing), (0, 0));
        assert_eq!(stats.free + stats.ready, stats.slots);
        self.manager.validate();
    }
}

fn config(slots: u32, arc: bool, partial: bool) -> Config {
    Config {
        policy: if arc {
            PolicyKind::Arc
        } else {
            PolicyKind::Lru
        },
        partial_admission: partial,
        events: true,
        ..Config::new(slots)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn every_life_cycle_keeps_the_rules(
        slots in 1u32..20,
        arc in any::<bool>(),
        partial in any::<bool>(),
        ops in prop::collection::vec(op(), 1..150),
    ) {
        let mut world = World::new(config(slots, arc, partial));
        for op in ops {
            world.run(op);
        }
        world.drain();
    }
}
