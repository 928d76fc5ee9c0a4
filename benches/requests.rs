//! What a scheduler step costs inside Rust: `cargo bench -p kvoffload-core --bench requests`.

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use kvoffload_core::jobs::JobId;
use kvoffload_core::manager::{Config, Manager};
use kvoffload_core::requests::{
    GivenBlocks, GroupConfig, NewRequest, RequestId, Requests, RequestsConfig, Span,
};

const CHUNKS: u32 = 2000;
const BLOCK: u32 = 16;
const SLOTS: u32 = 100_000;

fn requests(slots: u32) -> Requests {
    let group = GroupConfig {
        id: 0,
        tokens_per_block: BLOCK,
        span: Span::Full,
        draft: false,
    };
    let manager = Manager::new(Config {
        partial_admission: true,
        reasons: true,
        ..Config::new(slots)
    });
    Requests::new(RequestsConfig::new(group), manager.unwrap()).unwrap()
}

/// A request with as many hashes as it has chunks, all its own.
fn add(requests: &mut Requests, number: u64) -> RequestId {
    let about = NewRequest {
        prompt_tokens: u64::from(CHUNKS * BLOCK),
        ..NewRequest::default()
    };
    let id = requests.add(&number.to_string(), about).unwrap();
    let hashes: Vec<[u8; 32]> = (0..u64::from(CHUNKS))
        .map(|chunk| {
            let mut hash = [0; 32];
            hash[..8].copy_from_slice(&number.to_le_bytes());
            hash[8..16].copy_from_slice(&chunk.to_le_bytes());
            hash
        })
        .collect();
    requests
        .add_hashes(id, hashes.iter().map(|hash| &hash[..]))
        .unwrap();
    id
}

fn schedule(requests: &mut Requests, id: RequestId) {
    let tokens = u64::from(CHUNKS * BLOCK);
    let blocks: Vec<u32> = (1..=CHUNKS).collect();
    requests.scheduled(id, &[&blocks], true, 0).unwrap();
    requests.store(id, tokens).unwrap();
}

/// Reports everything that was ordered, and answers the number of jobs.
fn report(requests: &mut Requests) -> usize {
    let orders = requests.take_orders();
    let jobs: Vec<JobId> = orders
        .loads
        .iter()
        .chain(&orders.stores)
        .map(|order| order.id)
        .collect();
    for &job in &jobs {
        requests.report(job, 0, Ok(())).unwrap();
    }
    jobs.len()
}

/// A pool whose every slot holds a chunk.
fn full_pool() -> Requests {
    let mut requests = requests(SLOTS);
    for number in 0..u64::from(SLOTS / CHUNKS) {
        let id = add(&mut requests, number);
        requests.lookup(id, 0, u64::from(CHUNKS * BLOCK) + 1);
        schedule(&mut requests, id);
        report(&mut requests);
        requests.finish(id, u64::from(CHUNKS * BLOCK)).unwrap();
    }
    requests
}

fn benches(c: &mut Criterion) {
    let mut group = c.benchmark_group("requests");
    group.sample_size(30);

    let mut pool = full_pool();
    let mut number = 1000;
    group.bench_function("store of 2,000 chunks, full pool", |b| {
        b.iter_batched_ref(
            || {
                number += 1;
                // Whatever the one before it left is reported and forgotten first.
                (number, None::<RequestId>)
            },
            |(number, _)| {
                let id = add(&mut pool, *number);
                schedule(&mut pool, id);
                report(&mut pool);
                pool.finish(id, 0).unwrap();
            },
            BatchSize::PerIteration,
        );
    });

    let mut pool = full_pool();
    let tokens = u64::from(CHUNKS * BLOCK);
    let last = u64::from(SLOTS / CHUNKS) - 1;
    let blocks: Vec<u32> = (1..=CHUNKS).collect();
    group.bench_function("hit of 2,000 chunks", |b| {
        b.iter(|| {
            let id = add(&mut pool, last);
            pool.lookup(id, 0, tokens + 1);
            let given = GivenBlocks {
                ids: &blocks,
                first: 0,
                fresh: 0,
            };
            pool.allocated(id, &[given], tokens).unwrap();
            assert_eq!(report(&mut pool), 1);
            pool.finish(id, 0).unwrap();
        });
    });
    group.finish();
}

criterion_group!(requests_benches, benches);
criterion_main!(requests_benches);
