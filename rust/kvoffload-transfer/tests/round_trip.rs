//! Whatever the layout, the delays and the conflicts: the bytes are those of running the jobs one
//! after another in the order of their submits.

mod common;

use common::{Job, LONG, Model, Random, Rig, Shape, random_job};
use kvoffload_core::layout::{PageRef, TensorLayout};
use kvoffload_core::pool::Slot;
use kvoffload_transfer::{FaultPlan, JobKind, Verify};
use proptest::prelude::*;

fn shapes() -> impl Strategy<Value = Shape> {
    let tensor = (6u32..12, 1u64..48, prop_oneof![Just(0u64), 1u64..20]);
    let tensors = prop::collection::vec(tensor, 1..4);
    (tensors, 1usize..4, 1u32..5, 3u32..8, any::<u64>()).prop_map(
        |(tensors, num_groups, blocks_per_chunk, num_slots, seed)| {
            let tensors: Vec<TensorLayout> = tensors
                .into_iter()
                .map(|(num_blocks, page_bytes, padding)| TensorLayout {
                    num_blocks,
                    block_stride: page_bytes + padding,
                    page_bytes,
                })
                .collect();
            let mut random = Random(seed);
            let mut group = || -> Vec<PageRef> {
                let refs = 1 + random.below(tensors.len());
                let mut page = |tensor: u32| {
                    let page = tensors[tensor as usize].page_bytes as usize;
                    PageRef {
                        tensor,
                        page_bytes: 1 + random.below(page) as u64,
                    }
                };
                // Tensors in any order; some groups share one.
                (0..refs as u32).rev().map(&mut page).collect()
            };
            let groups = (0..num_groups).map(|_| group()).collect();
            Shape {
                tensors,
                groups,
                blocks_per_chunk,
                num_slots,
            }
        },
    )
}

/// A job that loads every slot as a chunk of every group, one after another, so that the region's
/// bytes can be seen.
fn show_all(shape: &Shape) -> Vec<Job> {
    let per_chunk = shape.blocks_per_chunk;
    let groups = shape.groups.len();
    let show = |group: usize, slot: u32| {
        let mut job = Job::simple(&(0..per_chunk).collect::<Vec<_>>(), &[slot]);
        job.group_sizes = (0..groups)
            .map(|g| if g == group { per_chunk } else { 0 })
            .collect();
        job.block_indices = vec![0; groups];
        job
    };
    let slots = 0..shape.num_slots;
    slots
        .flat_map(|slot| (0..groups).map(move |group| show(group, slot)))
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn any_jobs_equal_one_after_another(
        shape in shapes(),
        seed in any::<u64>(),
        num_jobs in 1usize..40,
        max_delay_us in prop_oneof![Just(0u64), 1u64..300],
    ) {
        let rig = Rig::new(&shape, FaultPlan { seed, max_delay_us, ..FaultPlan::default() });
        let mut model = Model::new(&shape, &rig.device);
        let mut random = Random(seed);
        for job in 0..num_jobs as u64 {
            let kind = if random.below(2) == 0 { JobKind::Store } else { JobKind::Load };
            let what = random_job(&shape, kind, &mut random);
            rig.submit(kind, job, &what).unwrap();
            model.run(kind, &what);
        }
        let jobs: Vec<u64> = (0..num_jobs as u64).collect();
        let ends = rig.finish(&jobs);
        prop_assert_eq!(ends.iter().map(|end| end.job).collect::<Vec<_>>(), jobs);
        prop_assert!(ends.iter().all(|end| end.outcome.is_ok()));
        prop_assert_eq!(rig.device.all_bytes(), model.tensors.clone());

        for (job, what) in (1000u64..).zip(show_all(&shape)) {
            rig.submit(JobKind::Load, job, &what).unwrap();
            model.run(JobKind::Load, &what);
            rig.finish_well(&[job]);
            prop_assert_eq!(rig.device.all_bytes(), model.tensors.clone());
        }
        let stats = rig.engine.stats();
        prop_assert_eq!((stats.stores.live, stats.loads.live), (0, 0));
        let moved: u64 = ends.iter().map(|end| end.bytes).sum();
        prop_assert!(stats.stores.bytes + stats.loads.bytes >= moved);
    }

    #[test]
    fn chunks_come_back_verified(shape in shapes(), seed in any::<u64>()) {
        let faults = FaultPlan { seed, max_delay_us: 50, ..FaultPlan::default() };
        let rig = Rig::with(&shape, faults, |config| config.verify = Verify::All);
        let before = rig.device.all_bytes();
        let mut random = Random(seed);
        let store = random_job(&shape, JobKind::Store, &mut random);
        // The same blocks are not loaded twice: one group after the other.
        rig.submit(JobKind::Store, 0, &store).unwrap();
        rig.finish_well(&[0]);
        let (mut blocks, mut slots) = (&store.block_ids[..], &store.slots[..]);
        for (group, &size) in store.group_sizes.iter().enumerate() {
            let per_chunk = u64::from(shape.blocks_per_chunk);
            let skip = if size == 0 { 0 } else { store.block_indices[group] % per_chunk };
            let chunks = (skip + u64::from(size)).div_ceil(per_chunk) as usize;
            let mut load = Job {
                block_ids: blocks[..size as usize].to_vec(),
                group_sizes: vec![0; shape.groups.len()],
                block_indices: vec![skip; shape.groups.len()],
                slots: slots[..chunks].to_vec(),
            };
            load.group_sizes[group] = size;
            for page in &shape.groups[group] {
                let tensor = page.tensor as usize;
                let stride = shape.tensors[tensor].block_stride as usize;
                for &block in &load.block_ids {
                    let start = block as usize * stride;
                    rig.device.fill(tensor, start..start + page.page_bytes as usize, 0xee);
                }
            }
            rig.submit(JobKind::Load, 1 + group as u64, &load).unwrap();
            rig.finish_well(&[1 + group as u64]);
            prop_assert_eq!(rig.device.all_bytes(), before.clone());
            (blocks, slots) = (&blocks[size as usize..], &slots[chunks..]);
        }
        prop_assert_eq!(rig.engine.stats().verify_failures, 0);
    }
}

#[test]
fn a_job_larger_than_a_step_is_copied_whole() {
    // 24 MiB in one run: several steps, also with a half-way pause inside a run.
    let shape = Shape::simple(8, 3 << 20, 8);
    let faults = FaultPlan {
        seed: 1,
        max_delay_us: 100,
        ..FaultPlan::default()
    };
    let rig = Rig::with(&shape, faults, |config| config.verify = Verify::All);
    let before = rig.device.bytes(0);
    let all: Vec<u32> = (0..8).collect();
    rig.store(1, &all, &all);
    rig.finish_well(&[1]);
    rig.device.fill(0, 0..before.len(), 0);
    rig.load(2, &all, &all);
    let ends = rig.finish(&[2]);
    assert_eq!((ends[0].bytes, ends[0].outcome.clone()), (24 << 20, Ok(())));
    assert!(ends[0].seconds > 0.0);
    assert!(rig.device.bytes(0) == before);
}

#[test]
fn a15_a_block_in_two_groups_and_two_layers_of_one_tensor() {
    let mut shape = Shape::simple(4, 64, 4);
    shape.tensors.push(shape.tensors[0]);
    shape.groups = vec![
        vec![
            PageRef {
                tensor: 0,
                page_bytes: 64,
            },
            PageRef {
                tensor: 0,
                page_bytes: 64,
            },
        ],
        vec![PageRef {
            tensor: 1,
            page_bytes: 48,
        }],
    ];
    let rig = Rig::new(&shape, FaultPlan::default());
    let before = rig.device.all_bytes();
    let job = Job {
        block_ids: vec![2, 2],
        group_sizes: vec![1, 1],
        block_indices: vec![0, 0],
        slots: vec![Slot::new(3), Slot::new(0)],
    };
    rig.submit(JobKind::Store, 1, &job).unwrap();
    rig.finish_well(&[1]);
    rig.device.fill(0, 128..192, 0);
    rig.device.fill(1, 128..176, 0);
    rig.submit(JobKind::Load, 2, &job).unwrap();
    rig.finish_well(&[2]);
    assert_eq!(rig.device.all_bytes(), before);
}

#[test]
fn a_job_without_blocks_ends_too() {
    let rig = Rig::new(&Shape::simple(4, 64, 4), FaultPlan::default());
    rig.store(1, &[], &[]);
    rig.load(2, &[], &[]);
    let ends = rig.finish(&[1, 2]);
    assert!(ends.iter().all(|end| end.outcome.is_ok() && end.bytes == 0));
    rig.engine.wait(&[1, 2, 77], LONG).unwrap();
}
