//! The manager's whole cycle for 256 chunks on a full pool: 256 lookups that miss, a store that
//! evicts 256 others, its completion, 256 lookups that hit, a load and its completion, the end of the
//! request. Time is per chunk. Some slots may be pinned by loads that stay, spread over the pool.
//!
//! `cargo bench -p kvoffload-core --bench manager`. Results: `results/2026-11-29-manager-vs-vllm.md`.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvoffload_core::manager::{Answer, Config, Manager, PolicyKind, Prepared, Request};

const BATCH: usize = 256;

/// Random-looking 36-byte keys, as SHA-256 and a group index make them.
struct Keys(u64);

impl Keys {
    fn next(&mut self) -> Vec<u8> {
        let mut key = Vec::with_capacity(36);
        for _ in 0..4 {
            // splitmix64
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut x = self.0;
            x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            key.extend((x ^ (x >> 31)).to_le_bytes());
        }
        key.extend([0; 4]);
        key
    }

    fn batch(&mut self) -> Vec<Vec<u8>> {
        (0..BATCH).map(|_| self.next()).collect()
    }
}

/// A full pool in which `pinned` percent of the chunks are being read.
fn full(slots: u32, policy: PolicyKind, pinned: u64, keys: &mut Keys) -> (Manager, Request) {
    let manager = Manager::new(Config {
        policy,
        ..Config::new(slots)
    })
    .unwrap();
    let mut holder = manager.new_request();
    let mut prepared = Prepared::default();
    let mut taken = Vec::new();
    let mut count = 0;
    while count < u64::from(slots) {
        let batch: Vec<_> = keys
            .batch()
            .into_iter()
            .take((u64::from(slots) - count) as usize)
            .collect();
        let names: Vec<&[u8]> = batch.iter().map(Vec::as_slice).collect();
        let mut request = manager.new_request();
        assert!(
            manager
                .prepare_store(&names, &mut request, &mut prepared)
                .unwrap()
        );
        manager
            .complete_store(names.iter().copied(), &mut request, true)
            .unwrap();
        let held = names
            .iter()
            .enumerate()
            .filter(|(at, _)| (*at as u64 * 37) % 100 < pinned);
        taken.clear();
        manager
            .prepare_load(held.map(|(_, key)| *key), &mut holder, &mut taken)
            .unwrap();
        count += names.len() as u64;
    }
    (manager, holder)
}

fn cycle(
    manager: &Manager,
    batch: &[Vec<u8>],
    work: &mut (Prepared, Vec<kvoffload_core::pool::Slot>),
) {
    let names: Vec<&[u8]> = batch.iter().map(Vec::as_slice).collect();
    let mut request = manager.new_request();
    for key in &names {
        assert_eq!(manager.lookup(key), Answer::Miss);
    }
    assert!(
        manager
            .prepare_store(&names, &mut request, &mut work.0)
            .unwrap()
    );
    manager
        .complete_store(names.iter().copied(), &mut request, true)
        .unwrap();
    for key in &names {
        assert_eq!(manager.lookup(key), Answer::Hit);
    }
    work.1.clear();
    manager
        .prepare_load(names.iter().copied(), &mut request, &mut work.1)
        .unwrap();
    manager
        .complete_load(names.iter().copied(), &mut request)
        .unwrap();
    let positions = names.iter().copied().zip((16..).step_by(16));
    manager.finish_request(&mut request, positions).unwrap();
}

fn full_cycle(c: &mut Criterion) {
    let mut group = c.benchmark_group("full_cycle");
    group.throughput(Throughput::Elements(BATCH as u64));
    for policy in [PolicyKind::Lru, PolicyKind::Arc] {
        for slots in [10_000, 100_000, 1_000_000] {
            for pinned in [0, 50, 90] {
                let mut keys = Keys(u64::from(slots) + pinned);
                let (manager, _holder) = full(slots, policy, pinned, &mut keys);
                // Enough batches that none is in a CPU cache when its turn comes again; by then its
                // chunks have been evicted.
                let batches: Vec<_> = (0..slots as usize / BATCH + 64)
                    .map(|_| keys.batch())
                    .collect();
                let mut work = (Prepared::default(), Vec::new());
                let mut next = 0;
                let id = BenchmarkId::new(policy.name(), format!("{slots}/{pinned}%"));
                group.bench_function(id, |b| {
                    b.iter(|| {
                        cycle(&manager, &batches[next % batches.len()], &mut work);
                        next += 1;
                    });
                });
            }
        }
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(std::time::Duration::from_millis(500))
        .measurement_time(std::time::Duration::from_secs(2));
    targets = full_cycle
}
criterion_main!(benches);
