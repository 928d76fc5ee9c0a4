//! What the policies cost: one call of 256 slots, with 0, 50 or 90 % of the pool pinned.
//!
//! `cargo bench -p kvoffload-core --bench policy`. Criterion's `thrpt` is slots per second. Names are
//! `policy/slots/pinned/operation`, where pinned slots are the oldest of all (`oldest`) or anywhere in
//! the order (`spread`). The operations leave the pool as full and as pinned as it was:
//!
//! - `replace`: evict 256, insert 256 new keys into their slots, mark them evictable (making and hashing
//!   the keys, and the table that holds them, included);
//! - `access`: a finished request read 256 random slots;
//! - `mark`: 256 random unpinned slots stop being evictable and become evictable again.
//!
//! Not measured here: keys on their way to slots (the index) and the manager's own work.
//!
//! Nanoseconds per slot, 2026-11-29, Intel Xeon (family 6, model 207, 2 cores, 2 MiB L2 each), a virtual
//! machine with other work on it: the lower median of two runs, so these are upper bounds. What is
//! pinned makes no difference beyond the noise.
//!
//! |             |      slots |   0 % | 50 % oldest | 50 % spread | 90 % oldest | 90 % spread |
//! |-------------|-----------:|------:|------------:|------------:|------------:|------------:|
//! | lru replace |     10,000 |    44 |          60 |          51 |          56 |          65 |
//! | lru access  |     10,000 |    19 |          24 |          19 |          20 |          19 |
//! | lru mark    |     10,000 |    10 |          10 |          11 |          13 |          12 |
//! | lru replace |    100,000 |    87 |          71 |          72 |          64 |          67 |
//! | lru access  |    100,000 |    22 |          22 |          22 |          21 |          20 |
//! | lru mark    |    100,000 |    10 |          13 |          10 |           9 |          12 |
//! | lru replace |  1,000,000 |   171 |         237 |         184 |         150 |         161 |
//! | lru access  |  1,000,000 |    58 |          64 |          66 |          48 |          50 |
//! | lru mark    |  1,000,000 |    22 |          32 |          23 |          18 |          18 |
//! | arc replace |     10,000 |   118 |          99 |          99 |         103 |          99 |
//! | arc access  |     10,000 |    23 |          20 |          21 |          17 |          20 |
//! | arc mark    |     10,000 |    13 |          11 |          13 |          15 |          14 |
//! | arc replace |    100,000 |   149 |         145 |         151 |         114 |         132 |
//! | arc access  |    100,000 |    26 |          26 |          18 |          15 |          16 |
//! | arc mark    |    100,000 |    14 |          13 |          14 |          10 |          10 |
//! | arc replace |  1,000,000 |   292 |         317 |         423 |         345 |         396 |
//! | arc access  |  1,000,000 |    40 |          36 |          48 |          40 |          49 |
//! | arc mark    |  1,000,000 |    23 |          22 |          31 |          33 |          38 |

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvoffload_core::key::{Key, KeyHash};
use kvoffload_core::policy::{Access, Arc, Lru, Policy};
use kvoffload_core::pool::Slot;

const BATCH: usize = 256;

/// xorshift64*: the same sequence in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % end
    }
}

#[derive(Clone, Copy)]
enum Pinned {
    None,
    Oldest(usize),
    Spread(usize),
}

impl Pinned {
    const ALL: [Self; 5] = [
        Self::None,
        Self::Oldest(50),
        Self::Spread(50),
        Self::Oldest(90),
        Self::Spread(90),
    ];

    fn name(self) -> String {
        match self {
            Self::None => "0".into(),
            Self::Oldest(percent) => format!("{percent}_oldest"),
            Self::Spread(percent) => format!("{percent}_spread"),
        }
    }
}

struct Pool {
    policy: Box<dyn Policy>,
    keys: Vec<(Key, KeyHash)>,
    /// Slots that are not pinned.
    loose: Vec<Slot>,
    victims: Vec<Slot>,
    next_key: u64,
    random: Random,
}

impl Pool {
    /// A full pool that has been in use for a while: `num_slots` random accesses ago it was filled.
    fn new(policy: Box<dyn Policy>, num_slots: usize, pinned: Pinned) -> Self {
        let mut pool = Self {
            policy,
            keys: vec![(Key::default(), KeyHash::of(&[])); num_slots],
            loose: Vec::new(),
            victims: Vec::with_capacity(BATCH),
            next_key: 0,
            random: Random(0x9e37_79b9_7f4a_7c15),
        };
        let mut order: Vec<Slot> = (0..num_slots as u32).map(Slot::new).collect();
        for last in (1..num_slots).rev() {
            order.swap(last, pool.random.below(last + 1));
        }
        let pinned_oldest = match pinned {
            Pinned::Oldest(percent) => num_slots * percent / 100,
            _ => 0,
        };
        for (age, &slot) in order.iter().enumerate() {
            pool.insert(slot);
            let is_pinned = match pinned {
                Pinned::Spread(percent) => pool.random.below(100) < percent,
                _ => age < pinned_oldest,
            };
            if !is_pinned {
                pool.loose.push(slot);
                pool.policy.mark_evictable(slot);
            }
        }
        // Those that are pinned as the oldest of all must stay so.
        let accessed = if pinned_oldest > 0 {
            pool.loose.clone()
        } else {
            order
        };
        for _ in 0..num_slots {
            let slot = accessed[pool.random.below(accessed.len())];
            pool.policy.on_request_access(slot, Access::Inserted);
            let slot = accessed[pool.random.below(accessed.len())];
            pool.policy.on_request_access(slot, Access::Reused);
        }
        for _ in 0..pool.loose.len() / BATCH {
            pool.replace();
        }
        pool
    }

    fn insert(&mut self, slot: Slot) {
        let mut bytes = [0; 36];
        let number = self.next_key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        self.next_key += 1;
        let key = (Key::new(&bytes), KeyHash::of(&bytes));
        self.policy.insert(slot, &key.0, key.1);
        self.keys[slot.index()] = key;
    }

    fn replace(&mut self) {
        let mut victims = std::mem::take(&mut self.victims);
        victims.clear();
        let keys = &self.keys;
        let key_of = |slot: Slot| (&keys[slot.index()].0, keys[slot.index()].1);
        self.policy.evict(BATCH, &key_of, &mut victims);
        for &slot in &victims {
            self.insert(slot);
        }
        for &slot in &victims {
            self.policy.mark_evictable(slot);
        }
        self.victims = victims;
    }

    fn random_loose(&mut self) -> Vec<Slot> {
        (0..BATCH)
            .map(|_| self.loose[self.random.below(self.loose.len())])
            .collect()
    }
}

fn policies(criterion: &mut Criterion) {
    type Make = fn(u32) -> Box<dyn Policy>;
    let makes: [(&str, Make); 2] = [
        ("lru", |slots| Box::new(Lru::new(slots))),
        ("arc", |slots| Box::new(Arc::new(slots))),
    ];
    for (name, make) in makes {
        for num_slots in [10_000, 100_000, 1_000_000] {
            for pinned in Pinned::ALL {
                let mut pool = Pool::new(make(num_slots as u32), num_slots, pinned);
                let mut group = criterion.benchmark_group(format!("{name}/{num_slots}"));
                group.throughput(Throughput::Elements(BATCH as u64));
                let id = |operation: &str| BenchmarkId::new(pinned.name(), operation);

                group.bench_function(id("replace"), |bencher| bencher.iter(|| pool.replace()));
                // Enough of them that caches do not learn them by heart.
                let picks: Vec<_> = (0..num_slots / BATCH + 16)
                    .map(|_| pool.random_loose())
                    .collect();
                let mut next = picks.iter().cycle();
                group.bench_function(id("access"), |bencher| {
                    bencher.iter(|| {
                        for &slot in next.next().expect("it cycles") {
                            pool.policy.on_request_access(slot, Access::Reused);
                        }
                    })
                });
                group.bench_function(id("mark"), |bencher| {
                    bencher.iter(|| {
                        let slots = next.next().expect("it cycles");
                        slots
                            .iter()
                            .for_each(|&slot| pool.policy.mark_non_evictable(slot));
                        slots
                            .iter()
                            .for_each(|&slot| pool.policy.mark_evictable(slot));
                    })
                });
                black_box(pool.policy.evictable());
                group.finish();
            }
        }
    }
}

criterion_group!(benches, policies);
criterion_main!(benches);
