//! What a submit costs the thread that makes it.
//!
//! `cargo bench -p kvoffload-transfer --bench submit`. 5000 jobs, in turn stores and loads, each of 4096
//! random blocks and 4096 random slots of 100 000 each, chunks of one block, 32 refs. A backend that
//! copies nothing asks for every copy of a job, so that both threads are busy planning and ordering
//! such jobs throughout; up to 16 of them are live while one is submitted.
//!
//! Not measured here: the calls from Python, and what the threads do.
//!
//! On 2026-11-29, 2 cores of an Intel Xeon that other work used too (load 2), so that three busy threads
//! and more shared them. Microseconds, lowest and highest of several runs:
//!
//! | runs | | median | p99 | p99.9 |
//! |---|---|---|---|---|
//! | 6 | as it is | 8 to 11 | 29 to 64, once 555 | 940 to 2290 |
//! | 3 | real-time priority for the submitting thread | 9 to 11 | 41 to 48 | 79 to 276 |
//! | 3 | stores alone, thus one busy thread | 10 to 13 | 17 to 71 | 62 to 812 |
//!
//! The median is the engine's. The last column changes with what else wants the two cores, so
//! it says little about a machine that has more.

use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kvoffload_core::layout::{KvLayout, PageRef, TensorLayout, slot_bytes};
use kvoffload_core::plan::Geometry;
use kvoffload_core::pool::Slot;
use kvoffload_transfer::backend::{Backend, Ended, Poll, Progress, Work};
use kvoffload_transfer::{CopyError, Engine, EngineConfig, JobKind, Region};

const BLOCKS: u32 = 100_000;
const SLOTS: u32 = 100_000;
const REFS: u32 = 32;
const JOB: usize = 4096;
const SUBMITS: usize = 5000;
const LIVE: u64 = 16;
/// Too small for a copy; nothing is copied.
const PAGE: u64 = 2;

/// Asks for every copy and makes none.
struct Planner {
    layout: Arc<KvLayout>,
    works: VecDeque<Work>,
}

impl Backend for Planner {
    fn depth(&self) -> usize {
        4
    }

    fn submit(&mut self, work: Work) -> Result<(), CopyError> {
        self.works.push_back(work);
        Ok(())
    }

    fn poll(&mut self, progress: &mut Progress) -> Poll {
        let Some(work) = self.works.front_mut() else {
            return Poll::After(Duration::from_secs(1));
        };
        for _ in 0..16_384 {
            if black_box(work.next_run(&self.layout, u64::MAX)).is_none() {
                progress
                    .ended
                    .extend(self.works.pop_front().map(|work| Ended {
                        work,
                        seconds: 0.0,
                        outcome: Ok(()),
                    }));
                break;
            }
        }
        Poll::Again
    }

    fn cancel(&mut self, _job: u64) {}

    fn abandon(&mut self) -> Vec<Work> {
        self.works.drain(..).collect()
    }
}

/// xorshift64*: the same sequence in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u32) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as u32 % end
    }

    /// All numbers below `end`, in any order.
    fn numbers(&mut self, end: u32) -> Vec<u32> {
        let mut all: Vec<u32> = (0..end).collect();
        for at in (1..end).rev() {
            all.swap(at as usize, self.below(at + 1) as usize);
        }
        all
    }
}

fn main() {
    let tensor = TensorLayout {
        num_blocks: BLOCKS,
        block_stride: PAGE,
        page_bytes: PAGE,
    };
    let refs = (0..REFS).map(|tensor| PageRef {
        tensor,
        page_bytes: PAGE,
    });
    let groups = vec![refs.collect()];
    let slot = slot_bytes(&groups, 1);
    let tensors = vec![tensor; REFS as usize];
    let pieces = Region::slots_per_piece(slot);
    let layout = KvLayout::new(tensors, groups, 1, SLOTS, slot, pieces).expect("a good layout");
    let layout = Arc::new(layout);
    let backends = [(); 2].map(|()| -> Box<dyn Backend> {
        Box::new(Planner {
            layout: Arc::clone(&layout),
            works: VecDeque::new(),
        })
    });
    let region = Arc::new(Region::new(SLOTS, slot).expect("a few megabytes"));
    let config = EngineConfig {
        stored_only: false,
        ..EngineConfig::default()
    };
    let engine = Engine::start(layout, &region, backends, &config).expect("two threads");

    // As many jobs as can be without two that conflict.
    let mut random = Random(7);
    let (blocks, slots) = (random.numbers(BLOCKS), random.numbers(SLOTS));
    let slots: Vec<Slot> = slots.into_iter().map(Slot::new).collect();
    let parts = blocks.chunks_exact(JOB).zip(slots.chunks_exact(JOB));
    let jobs: Vec<(Vec<u32>, Vec<Slot>)> = parts
        .map(|(blocks, slots)| (blocks.to_vec(), slots.to_vec()))
        .collect();
    let live = || {
        let stats = engine.stats();
        stats.stores.live + stats.loads.live
    };
    let mut took = Vec::with_capacity(SUBMITS);
    for job in 0..SUBMITS + 100 {
        while live() >= LIVE {
            thread::sleep(Duration::from_micros(50));
            drop(engine.take_finished());
        }
        // As whoever calls has just made them.
        let (block_ids, slots) = &jobs[job % jobs.len()].clone();
        let geometry = Geometry {
            block_ids,
            group_sizes: &[JOB as u32],
            block_indices: &[0],
            slots,
        };
        let kind = [JobKind::Store, JobKind::Load][job % 2];
        let started = Instant::now();
        engine
            .submit(kind, job as u64, geometry)
            .expect("a good job");
        // The first ones find no memory to use again.
        if job >= 100 {
            took.push(started.elapsed());
        }
    }
    took.sort_unstable();
    let at = |share: f64| took[((took.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e6;
    let waits = engine.stats().fence_waits;
    println!(
        "submit of {JOB} blocks: median {:.1} us, p99 {:.1}, p99.9 {:.1}, max {:.1} \
         ({waits} of {SUBMITS} jobs were held back)",
        at(0.5),
        at(0.99),
        at(0.999),
        at(1.0)
    );
}
