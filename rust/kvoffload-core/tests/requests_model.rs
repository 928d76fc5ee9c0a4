//! The requests table under a simulated engine: whatever happens, a load brings the right bytes, a key
//! that hits has its bytes, nothing that is read is written, and nothing leaks.

mod engine;

use engine::{Engine, Random, Setup};
use kvoffload_core::requests::{GroupConfig, RequestStats, Span};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Op {
    Add {
        name: u64,
        family: u64,
        prompt: u64,
        outputs: u64,
        flags: u64,
    },
    Step,
    Abort(usize),
    /// The GPU's prefix cache alone is emptied.
    Forget,
    Reset {
        preempt: bool,
    },
}

/// Flags that ask for nothing special.
const PLAIN: u64 = 1 << 10 | 1 << 13 | 1 << 16;

fn op() -> impl Strategy<Value = Op> {
    let flags = prop_oneof![3 => Just(PLAIN), 1 => 0..1u64 << 18];
    let add = (0..12u64, 0..7u64, 1..120u64, 0..12u64, flags);
    prop_oneof![
        12 => add.prop_map(|(name, family, prompt, outputs, flags)| Op::Add {
            name, family, prompt, outputs, flags
        }),
        24 => Just(Op::Step),
        2 => any::<usize>().prop_map(Op::Abort),
        2 => Just(Op::Forget),
        1 => any::<bool>().prop_map(|preempt| Op::Reset { preempt }),
    ]
}

/// The same by weight, from a seed.
fn random_op(random: &mut Random) -> Op {
    match random.below(1000) {
        0..300 => Op::Add {
            name: random.below(12),
            family: random.below(7),
            prompt: 1 + random.below(120),
            outputs: random.below(12),
            flags: if random.chance(75) {
                PLAIN
            } else {
                random.below(1 << 18)
            },
        },
        300..330 => Op::Abort(random.below(100) as usize),
        330..390 => Op::Forget,
        390..400 => Op::Reset {
            preempt: random.chance(50),
        },
        _ => Op::Step,
    }
}

fn run(engine: &mut Engine, op: Op) {
    match op {
        Op::Add {
            name,
            family,
            prompt,
            outputs,
            flags,
        } => engine.add(name, family, prompt, outputs, flags),
        Op::Step => engine.step(),
        Op::Abort(pick) => {
            let live = engine.uids();
            if !live.is_empty() {
                engine.abort(live[pick % live.len()]);
            }
        }
        Op::Forget => engine.forget(),
        Op::Reset { preempt } => engine.reset(preempt),
    }
}

fn group(id: u32, tokens_per_block: u32, span: Span) -> GroupConfig {
    GroupConfig {
        id,
        tokens_per_block,
        span,
        draft: false,
    }
}

/// Kinds of models: their groups, and blocks in a chunk.
fn model(kind: u64) -> (Vec<GroupConfig>, u32) {
    let full = group(3, 16, Span::Full);
    let draft = |group| GroupConfig {
        draft: true,
        ..group
    };
    match kind {
        0 => (vec![full], 1),
        1 => (vec![full], 2),
        2 => (vec![full], 3),
        3 => (vec![full, group(1, 16, Span::Window(34))], 1),
        4 => (vec![group(0, 16, Span::Window(20)), full], 2),
        5 => {
            let local = group(7, 16, Span::Local(48));
            (vec![full, local, group(2, 16, Span::State)], 1)
        }
        6 => (vec![full, group(1, 32, Span::Full)], 1),
        7 => (
            vec![group(0, 32, Span::Window(33)), group(1, 16, Span::Full)],
            2,
        ),
        8 => (vec![draft(full)], 1),
        9 => (vec![full, draft(group(1, 16, Span::Window(33)))], 1),
        10 => (vec![group(5, 8, Span::Window(17))], 3),
        _ => (
            vec![
                full,
                group(2, 32, Span::State),
                draft(group(1, 16, Span::Full)),
            ],
            1,
        ),
    }
}

const MODELS: u64 = 12;

fn setup(kind: u64, random: &mut Random) -> Setup {
    let (groups, blocks_per_chunk) = model(kind);
    // Enough for the longest request, and for a few of them at best.
    let least: u64 = groups
        .iter()
        .map(|group| 144u64.div_ceil(group.tokens_per_block.into()) + 1)
        .sum();
    Setup {
        groups,
        blocks_per_chunk,
        ranks: 1 + random.below(3) as u32,
        blocks: (least + random.below(2 * least)) as u32,
        slots: 4 + random.below(60) as u32,
        one_region: random.chance(30),
        prompt_only: random.chance(40),
        share_loads: random.chance(60),
        arc: random.chance(30),
        max_jobs: if random.chance(80) { 100 } else { 3 },
        failures: [0, 0, 5, 15][random.below(4) as usize],
        seed: random.below(u64::MAX),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, ..ProptestConfig::default() })]

    #[test]
    fn every_request_gets_the_bytes_of_its_tokens(
        kind in 0..MODELS,
        seed in any::<u64>(),
        ops in prop::collection::vec(op(), 1..150),
    ) {
        let mut engine = Engine::new(setup(kind, &mut Random(seed)));
        for op in ops {
            run(&mut engine, op);
        }
        engine.drain();
    }
}

/// More of them with `KVOFFLOAD_SEEDS`, for a long search.
fn seeds() -> u64 {
    let wanted = std::env::var("KVOFFLOAD_SEEDS");
    wanted.map_or(1, |seeds| seeds.parse().expect("a number"))
}

#[test]
fn long_lives_of_every_kind_of_model() {
    let mut all: Vec<RequestStats> = Vec::new();
    let mut preemptions = 0;
    for seed in 0..seeds() * MODELS {
        println!("seed {seed}");
        let mut random = Random(seed << 32);
        let mut engine = Engine::new(setup(seed % MODELS, &mut random));
        for _ in 0..1000 {
            run(&mut engine, random_op(&mut random));
        }
        engine.drain();
        preemptions += engine.preemptions;
        all.push(engine.stats());
    }
    // Everything has happened, and not only now and then.
    let sum = |count: fn(&RequestStats) -> u64| all.iter().map(count).sum::<u64>();
    println!("{preemptions} preemptions");
    for (what, count) in [
        ("loads", sum(|stats| stats.loads.done)),
        ("failed loads", sum(|stats| stats.loads.failed)),
        ("void loads", sum(|stats| stats.loads.voided)),
        ("stores", sum(|stats| stats.stores.done)),
        ("failed stores", sum(|stats| stats.stores.failed)),
        ("void stores", sum(|stats| stats.stores.voided)),
        ("flushes", sum(|stats| stats.flushes)),
        ("put off", sum(|stats| stats.deferred_writing)),
        ("put off for a load", sum(|stats| stats.deferred_loading)),
        ("deadlines", sum(|stats| stats.deadlines)),
        ("refused chunks", sum(|stats| stats.chunks_refused)),
        ("refused jobs", sum(|stats| stats.jobs_refused)),
        ("preemptions", preemptions),
    ] {
        println!("{count} {what}");
        assert!(count > 2, "{what}: {count}");
    }
}
