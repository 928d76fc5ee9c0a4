//! What slots and copy plans cost.
//!
//! `cargo bench -p kvoffload-core --bench pool`. Criterion's `thrpt` is slots (pool) or blocks times
//! refs (plan) per second.
//!
//! - `pool/N/fill/cycle`: 256 slots through their whole life in a pool of N: alloc, publish, pin,
//!   unpin, release. The pool is otherwise empty (`empty`), has every second slot in use
//!   (`alternate`), or has exactly 256 free slots at random places (`full`).
//! - `pool/N/one`: alloc and release of a single slot that is the only free one, each time elsewhere.
//! - `plan/...`: a job of 256 blocks of 64 layers, one tensor per layer, chunks of 1 or 16 blocks.
//!   `runs`: blocks in one run; `scattered`: no two blocks adjacent; `one_tensor`: one tensor for all
//!   layers. `check` is what the submitting thread pays: bounds, and no block twice. Copies go slot by
//!   slot, so that pages of different blocks merge only inside a chunk or if a slot has one page.
//!
//! Not measured here: several threads at once, and the copies.
//!
//! One run on 2026-11-29, 2 cores of an Intel Xeon that other work kept busy throughout (load 6), so
//! these are upper bounds; the same row moves by up to 60 % between runs. Pool: nanoseconds a slot.
//!
//! | slots | empty | alternate | full | one |
//! |---|---|---|---|---|
//! | 10 000 | 133 | 139 | 146 | 133 |
//! | 100 000 | 124 | 122 | 169 | 127 |
//! | 1 000 000 | 109 | 116 | 174 | 576 |
//!
//! | plan | build | check |
//! |---|---|---|
//! | runs/1 | 128 us, 7.8 ns a page | 0.6 us |
//! | runs/16 | 67 us, 4.1 ns a page | |
//! | scattered/1 | 139 us, 8.5 ns a page; 100 us in another run | 0.4 us |
//! | scattered/16 | 124 us, 7.6 ns a page | |
//! | one_tensor/1 | 2.4 us, 9.4 ns a page | |

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvoffload_core::jobs::JobKind;
use kvoffload_core::layout::{KvLayout, PageRef, TensorLayout, slot_bytes};
use kvoffload_core::plan::{CheckScratch, CopyPlan, Geometry};
use kvoffload_core::pool::{Pool, Slot};

const BATCH: usize = 256;

/// xorshift64*: the same sequence in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u32) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as u32 % end
    }
}

fn free(pool: &Pool, slot: Slot) {
    pool.release(slot, pool.generation(slot))
        .expect("in use and not pinned");
}

/// A pool in which every slot is in use.
fn full(num_slots: u32) -> Pool {
    let pool = Pool::new(num_slots);
    assert!(pool.alloc(num_slots as usize, &mut Vec::new()));
    pool
}

fn alternate(num_slots: u32) -> Pool {
    let pool = full(num_slots);
    (0..num_slots)
        .step_by(2)
        .for_each(|slot| free(&pool, Slot::new(slot)));
    pool
}

fn nearly_full(num_slots: u32) -> Pool {
    let (pool, mut random) = (full(num_slots), Random(7));
    while pool.free() < BATCH as u32 {
        pool.release_any(Slot::new(random.below(num_slots)));
    }
    pool
}

fn cycle(pool: &Pool, slots: &mut Vec<Slot>) {
    assert!(pool.alloc(BATCH, slots));
    for slot in slots.drain(..) {
        let generation = pool.generation(slot);
        black_box(pool.publish(slot, generation)).expect("being written");
        black_box(pool.pin(slot, generation)).expect("ready");
        black_box(pool.unpin(slot, generation)).expect("pinned");
        black_box(pool.release(slot, generation)).expect("not pinned");
    }
}

fn pools(c: &mut Criterion) {
    for num_slots in [10_000, 100_000, 1_000_000] {
        let mut group = c.benchmark_group(format!("pool/{num_slots}"));
        group.throughput(Throughput::Elements(BATCH as u64));
        for (fill, pool) in [
            ("empty", Pool::new(num_slots)),
            ("alternate", alternate(num_slots)),
            ("full", nearly_full(num_slots)),
        ] {
            let mut slots = Vec::with_capacity(BATCH);
            group.bench_function(BenchmarkId::new(fill, "cycle"), |b| {
                b.iter(|| cycle(&pool, &mut slots));
            });
        }
        group.throughput(Throughput::Elements(1));
        let (pool, mut random) = (full(num_slots), Random(7));
        let mut slots = Vec::with_capacity(1);
        group.bench_function("one", |b| {
            b.iter(|| {
                free(&pool, Slot::new(random.below(num_slots)));
                assert!(pool.alloc(1, &mut slots));
                slots.clear();
            });
        });
    }
}

const NUM_BLOCKS: u32 = 8192;
const LAYERS: u32 = 64;

fn layout(layers: u32, page_bytes: u64, blocks_per_chunk: u32) -> KvLayout {
    let tensor = TensorLayout {
        num_blocks: NUM_BLOCKS,
        block_stride: page_bytes,
        page_bytes,
    };
    let refs = vec![
        (0..layers)
            .map(|tensor| PageRef { tensor, page_bytes })
            .collect(),
    ];
    let slot = slot_bytes(&refs, blocks_per_chunk);
    let tensors = vec![tensor; layers as usize];
    KvLayout::new(tensors, refs, blocks_per_chunk, 4096, slot, 64).expect("a good layout")
}

fn plans(c: &mut Criterion) {
    let in_a_run: Vec<u32> = (1000..).take(BATCH).collect();
    let scattered: Vec<u32> = (0..BATCH as u32).map(|at| at * 2803 % NUM_BLOCKS).collect();
    let mut group = c.benchmark_group("plan");
    for (name, layers, page_bytes, per_chunk, block_ids) in [
        ("runs/1", LAYERS, 8 << 10, 1, &in_a_run),
        ("runs/16", LAYERS, 8 << 10, 16, &in_a_run),
        ("scattered/1", LAYERS, 8 << 10, 1, &scattered),
        ("scattered/16", LAYERS, 8 << 10, 16, &scattered),
        ("one_tensor/1", 1, 512 << 10, 1, &in_a_run),
    ] {
        let layout = layout(layers, page_bytes, per_chunk);
        let slots: Vec<Slot> = (300..)
            .map(Slot::new)
            .take(BATCH / per_chunk as usize)
            .collect();
        let job = Geometry {
            block_ids,
            group_sizes: &[BATCH as u32],
            block_indices: &[0],
            slots: &slots,
        };
        group.throughput(Throughput::Elements(BATCH as u64 * u64::from(layers)));
        let mut plan = CopyPlan::default();
        group.bench_function(BenchmarkId::new("build", name), |b| {
            b.iter(|| {
                plan.build_into(black_box(&layout), &job)
                    .expect("a good job")
            });
        });
        if layers == LAYERS && per_chunk == 1 {
            let mut scratch = CheckScratch::new(&layout);
            group.bench_function(BenchmarkId::new("check", name), |b| {
                b.iter(|| job.check_job(JobKind::Load, black_box(&layout), &mut scratch));
            });
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(std::time::Duration::from_millis(200))
        .measurement_time(std::time::Duration::from_millis(800));
    targets = pools, plans
}
criterion_main!(benches);
