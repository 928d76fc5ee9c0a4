//! Random jobs of an engine on the simulated device, against a model; and controls without each wait.

mod borders;
mod cancel;
mod rig;
mod rows;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvoffload_core::plan::Geometry;
use kvoffload_core::pool::Slot;

use super::*;
use crate::cuda::driver::{Known, Op, fresh};
use crate::verify::Verify;
use rig::{BLOCKS, LONG, Rig, SLOTS, Setup, config, known, submit, tensor};

/// A few hundred steps in which everything may happen; whether all bytes are right.
fn play(setup: Setup, steps: usize) -> (bool, CudaStatsOf) {
    let mut rig = Rig::new(setup);
    for _ in 0..steps {
        match rig.draw(12) {
            0..=2 => rig.write(),
            3 | 4 => rig.read(),
            5 | 6 => rig.store(),
            7 | 8 => rig.load(),
            9 => rig.take(),
            10 => rig.wait_on(),
            _ => {
                // A kernel of the engine leaves no room, mostly for longer than a piece may take.
                let until = Instant::now() + Duration::from_millis(rig.draw(8) as u64);
                rig.engine.common.device.world.lock().no_room = Some(until);
                thread::sleep(Duration::from_millis(3));
            }
        }
        if rig.live.len() > 6 {
            rig.wait_on();
        }
        rig.take();
    }
    let right = rig.is_right();
    (right, rig.engine.device_stats().into_iter().collect())
}

type CudaStatsOf = std::collections::HashMap<&'static str, u64>;

fn setups() -> impl Iterator<Item = Setup> {
    let paths = [
        CopyPath::Auto,
        CopyPath::Only(Path::Direct),
        CopyPath::Only(Path::Staged),
    ];
    let pinnings = [Pinning::Register, Pinning::Allocate, Pinning::None];
    (0..seeds()).map(move |seed| Setup {
        seed,
        path: paths[seed as usize % 3],
        per_chunk: 1 + seed % 2,
        verify: if seed % 4 < 2 {
            Verify::Off
        } else {
            Verify::All
        },
        pinning: pinnings[(seed / 3) as usize % 3],
        ..Setup::default()
    })
}

/// More of them with `KVOFFLOAD_SEEDS`, for a long search.
fn seeds() -> u32 {
    let wanted = std::env::var("KVOFFLOAD_SEEDS");
    wanted.map_or(12, |seeds| seeds.parse().expect("a number"))
}

#[test]
fn every_byte_arrives_whatever_order_streams_run_in() {
    let (mut switched, mut rows) = (0, 0);
    for setup in setups() {
        let seed = setup.seed;
        let (right, stats) = play(setup, 150);
        assert!(right, "seed {seed}");
        switched += stats["switched_pieces"];
        rows += stats["row_copies"];
    }
    assert!(rows > 0, "no rows were copied");
    assert!(switched > 0, "no piece went the other way");
}

#[test]
fn a_failed_piece_is_copied_again() {
    for seed in 0..6 {
        for faults in [
            CudaFaults {
                fail_piece: 1 + u64::from(seed),
                ..CudaFaults::default()
            },
            CudaFaults {
                fail_path: Some(Path::Staged),
                ..CudaFaults::default()
            },
            CudaFaults {
                fail_path: Some(Path::Direct),
                ..CudaFaults::default()
            },
        ] {
            let setup = Setup {
                seed,
                faults,
                ..Setup::default()
            };
            let (right, _) = play(setup.clone(), 60);
            assert!(right, "seed {seed}, {:?}", setup.faults);
        }
    }
}

/// Without each of the waits, some order shows it.
#[test]
fn a_missing_wait_shows() {
    let none = CudaFaults::default();
    for (path, faults) in [
        (
            Path::Staged,
            CudaFaults {
                skip_compute_wait: true,
                ..none.clone()
            },
        ),
        (
            Path::Direct,
            CudaFaults {
                skip_compute_wait: true,
                ..none.clone()
            },
        ),
        (
            Path::Staged,
            CudaFaults {
                skip_staging_wait: true,
                ..none.clone()
            },
        ),
        (
            Path::Staged,
            CudaFaults {
                skip_ring_wait: true,
                ..none.clone()
            },
        ),
        (
            Path::Staged,
            CudaFaults {
                skip_stream_wait: true,
                ..none.clone()
            },
        ),
        (
            Path::Direct,
            CudaFaults {
                skip_stream_wait: true,
                ..none.clone()
            },
        ),
    ] {
        let shows = (0..20).any(|seed| {
            let path = CopyPath::Only(path);
            let setup = Setup {
                seed,
                path,
                faults: faults.clone(),
                per_chunk: 2, // jobs that are longer than the ring
                ..Setup::default()
            };
            !play(setup, 100).0
        });
        assert!(shows, "{faults:?} on the {} path", path.name());
    }
}

/// Stores half the slots from half the blocks, the lower or the upper ones.
fn store_half(rig: &mut Rig, upper: bool) -> u64 {
    let (block, slot) = if upper {
        (BLOCKS / 2, SLOTS / 2)
    } else {
        (0, 0)
    };
    let slots: Vec<usize> = (slot..slot + SLOTS / 2).collect();
    let blocks: Vec<usize> = (block..block + SLOTS / 2 * rig.per_chunk).collect();
    let chunks = blocks.chunks(rig.per_chunk);
    for (chunk, &slot) in chunks.zip(&slots) {
        rig.slots[slot] = Some(chunk.iter().map(|&b| rig.blocks[b].clone()).collect());
    }
    rig.submit(JobKind::Store, blocks, &slots);
    rig.jobs
}

/// Makes a rig whose compute stream stands until the gate, an event, is opened.
fn gated(path: CopyPath) -> (Rig, u64) {
    let mut rig = Rig::new(Setup {
        path,
        ..Setup::default()
    });
    rig.write();
    let gate = fresh();
    let device = &rig.engine.common.device;
    device.push(rig.compute, Op::Wait(gate));
    (rig, gate)
}

fn open(rig: &Rig, gate: u64) {
    let device = &rig.engine.common.device;
    device.push(fresh() as usize, Op::Record(gate));
}

#[test]
fn a_job_that_waits_for_compute_holds_up_no_other() {
    for path in [Path::Direct, Path::Staged] {
        let (mut rig, gate) = gated(CopyPath::Only(path));
        let late = store_half(&mut rig, false);
        let stands = rig.compute;
        rig.compute = fresh() as usize;
        let early = store_half(&mut rig, true);
        rig.engine.wait(&[early], LONG).unwrap();
        let waits = rig.engine.wait(&[late], Duration::from_millis(20));
        assert!(waits.is_err(), "its compute is not done");
        open(&rig, gate);
        rig.compute = stands;
        assert!(rig.is_right());
    }
}

#[test]
fn nor_does_one_that_somebody_waits_for_where_there_is_another_way() {
    let (mut rig, gate) = gated(CopyPath::Auto);
    let late = store_half(&mut rig, false);
    let stands = rig.compute;
    rig.compute = fresh() as usize;
    // SAFETY: a stream of the simulated device.
    unsafe { rig.engine.wait_on(&[late], rig.compute, LONG) }.unwrap();
    // On a third stream, since the second one stands as well now.
    rig.compute = fresh() as usize;
    let early = store_half(&mut rig, true);
    rig.engine.wait(&[early], LONG).unwrap();
    open(&rig, gate);
    rig.compute = stands;
    assert!(rig.is_right());
}

/// Whatever call of the driver fails once: the job is copied on the other path, or in another form, and
/// its bytes are right.
#[test]
fn one_failed_call_is_made_good() {
    for (call, code) in (1..60).flat_map(|call| [(call, 1), (call, 2)]) {
        for path in [Path::Direct, Path::Staged] {
            let mut rig = Rig::new(Setup {
                seed: call as u32,
                path: CopyPath::Only(path),
                per_chunk: 2,
                ..Setup::default()
            });
            rig.write();
            *rig.engine.common.device.failure.lock() = Some((call, code));
            store_half(&mut rig, true);
            rig.store();
            rig.load();
            rig.store();
            rig.read();
            let what = format!("call {call} with {code} on the {} path", path.name());
            assert!(rig.is_right(), "{what}");
        }
    }
}

/// A context that is lost at any call: every job ends with an error, and later ones are refused.
#[test]
fn a_lost_context_ends_all_jobs() {
    for call in 1..30 {
        let mut rig = Rig::new(Setup {
            seed: call as u32,
            ..Setup::default()
        });
        *rig.engine.common.device.failure.lock() = Some((call, 700));
        for upper in [false, true, false] {
            store_half(&mut rig, upper);
        }
        let taken: Vec<u64> = rig.live.iter().map(|(job, ..)| *job).collect();
        rig.engine.wait(&taken, LONG).unwrap();
        let ends = rig.engine.take_finished();
        assert_eq!(ends.len(), taken.len());
        let mut failed = ends.iter().filter(|end| end.outcome.is_err());
        let lost = rig.engine.common.device.is_lost();
        assert_eq!(
            failed.next().is_some() || !rig.refused.is_empty(),
            lost,
            "call {call}"
        );
        if lost {
            let (job, slots) = (99, [Slot::new(0)]);
            let geometry = Geometry {
                block_ids: &[0],
                group_sizes: &[1],
                block_indices: &[0],
                slots: &slots,
            };
            let refused = submit(&rig.engine, JobKind::Store, job, &geometry, 0);
            assert_eq!(refused, Err(SubmitError::DeviceLost { job }));
            let notices = rig.engine.take_notices();
            let said = notices
                .iter()
                .filter(|text| text.contains("context is lost"))
                .count();
            assert_eq!(said, 1, "{notices:?}");
        }
    }
}
