//! Layouts and plans worked out by hand, and every error by name.

use kvoffload_core::jobs::JobKind;
use kvoffload_core::layout::{KvLayout, LayoutError, PageRef, TensorLayout, slot_bytes};
use kvoffload_core::plan::{CheckScratch, CopyPlan, CopyRun, Geometry, PlanError, RunCursor};
use kvoffload_core::pool::Slot;

fn tensor(num_blocks: u32, block_stride: u64, page_bytes: u64) -> TensorLayout {
    TensorLayout {
        num_blocks,
        block_stride,
        page_bytes,
    }
}

fn page(tensor: u32, page_bytes: u64) -> PageRef {
    PageRef { tensor, page_bytes }
}

fn slots(numbers: &[u32]) -> Vec<Slot> {
    numbers.iter().copied().map(Slot::new).collect()
}

fn runs(layout: &KvLayout, job: Geometry<'_>) -> Vec<(u32, u64, u64, u64)> {
    let mut plan = CopyPlan::default();
    plan.build_into(layout, &job).unwrap();
    let flat = |run: &CopyRun| (run.tensor, run.device_offset, run.region_offset, run.bytes);
    plan.runs.iter().map(flat).collect()
}

/// Two groups, two blocks per chunk. Group 0: a padded page of 10 of 16 bytes and a page of 4.
/// Group 1: the strided tensor 2 alone. Slots of 64 bytes, two per piece.
fn two_groups() -> KvLayout {
    let tensors = vec![tensor(8, 16, 16), tensor(8, 4, 4), tensor(100, 32, 8)];
    let groups = vec![vec![page(0, 10), page(1, 4)], vec![page(2, 8)]];
    assert_eq!(slot_bytes(&groups, 2), 64);
    KvLayout::new(tensors, groups, 2, 6, 64, 2).unwrap()
}

#[test]
fn pages_lie_layer_by_layer_and_a_job_may_begin_and_end_inside_a_chunk() {
    let job = Geometry {
        block_ids: &[3, 4, 5, 6, 99],
        group_sizes: &[4, 1],
        // Group 0 begins with sub-block 1 of its first chunk; group 1 with sub-block 0 of its chunk.
        block_indices: &[7, 20],
        slots: &slots(&[5, 0, 1, 2]),
    };
    let expected = [
        // Slot after slot. Tensor 0: 10 of 16 bytes per block, so nothing merges.
        (0, 48, 5 * 64 + 10, 10),
        // Tensor 1 starts 2 * 10 bytes into the slot.
        (1, 12, 5 * 64 + 20 + 4, 4),
        (0, 64, 0, 10),
        (0, 80, 10, 10),
        // The two blocks of slot 0 merge.
        (1, 16, 20, 8),
        (0, 96, 64, 10),
        (1, 24, 64 + 20, 4),
        (2, 99 * 32, 2 * 64, 8),
    ];
    assert_eq!(runs(&two_groups(), job), expected);
}

#[test]
fn one_tensor_for_all_layers_gives_one_run_per_piece() {
    let layout = KvLayout::new(
        vec![tensor(64, 32, 32)],
        vec![vec![page(0, 32)]],
        2,
        10,
        64,
        4,
    );
    let blocks: Vec<u32> = (8..24).collect();
    let job = Geometry {
        block_ids: &blocks,
        group_sizes: &[16],
        block_indices: &[0],
        slots: &slots(&[1, 2, 3, 4, 5, 6, 7, 8]),
    };
    let expected = [
        (0, 8 * 32, 64, 3 * 64),
        (0, 14 * 32, 4 * 64, 4 * 64),
        (0, 22 * 32, 8 * 64, 64),
    ];
    assert_eq!(runs(&layout.unwrap(), job), expected);
}

#[test]
fn a_group_without_refs_uses_slots_and_moves_nothing() {
    let groups = vec![vec![], vec![page(0, 32)]];
    let layout = KvLayout::new(vec![tensor(4, 32, 32)], groups, 1, 4, 64, 4).unwrap();
    let job = Geometry {
        block_ids: &[1_000_000, 1_000_000, 3],
        group_sizes: &[2, 1],
        block_indices: &[5, 0],
        slots: &slots(&[0, 1, 2]),
    };
    assert_eq!(
        job.check_job(JobKind::Load, &layout, &mut CheckScratch::new(&layout)),
        Ok(())
    );
    assert_eq!(runs(&layout, job), [(0, 96, 128, 32)]);
    let nothing = Geometry {
        block_ids: &[],
        group_sizes: &[0, 0],
        block_indices: &[5, 9],
        slots: &[],
    };
    assert_eq!(runs(&layout, nothing), []);
}

#[test]
fn every_fault_of_a_job_is_named() {
    let layout = two_groups();
    let good_slots = slots(&[5, 0, 1]);
    let good = Geometry {
        block_ids: &[3, 4, 5, 9],
        group_sizes: &[3, 1],
        block_indices: &[1, 0],
        slots: &good_slots,
    };
    assert_eq!(good.check(&layout), Ok(()));
    let fault = |job: Geometry<'_>| job.check(&layout).unwrap_err();
    assert_eq!(
        fault(Geometry {
            group_sizes: &[3],
            ..good
        }),
        PlanError::GroupCount {
            field: "group_sizes",
            given: 1,
            groups: 2
        }
    );
    assert_eq!(
        fault(Geometry {
            block_indices: &[1, 0, 0],
            ..good
        }),
        PlanError::GroupCount {
            field: "block_indices",
            given: 3,
            groups: 2
        }
    );
    assert_eq!(
        fault(Geometry {
            group_sizes: &[u32::MAX, u32::MAX],
            ..good
        }),
        PlanError::BlockCount {
            needed: 2 * u64::from(u32::MAX),
            given: 4
        }
    );
    // Three blocks touch two chunks wherever they begin; the other group's block is the third.
    for first in [0, 1, 3, u64::MAX] {
        let few = slots(&[5]);
        let job = Geometry {
            block_indices: &[first, 0],
            slots: &few,
            ..good
        };
        assert_eq!(
            fault(job),
            PlanError::SlotCount {
                needed: 3,
                given: 1
            }
        );
    }
    assert_eq!(
        fault(Geometry {
            block_ids: &[3, 4, 8, 9],
            ..good
        }),
        PlanError::UnknownBlock {
            index: 2,
            group: 0,
            block: 8,
            num_blocks: 8
        }
    );
    assert_eq!(
        fault(Geometry {
            slots: &slots(&[5, 6, 1]),
            ..good
        }),
        PlanError::UnknownSlot {
            index: 1,
            slot: Slot::new(6),
            num_slots: 6
        }
    );
    let text = fault(Geometry {
        block_ids: &[3, 4, 8, 9],
        ..good
    })
    .to_string();
    assert_eq!(text, "block_ids[2]: block 8 of group 0 is outside 0..8");
}

#[test]
fn no_job_writes_a_byte_twice() {
    let tensors = vec![tensor(8, 4, 4), tensor(8, 4, 4)];
    let groups = vec![
        vec![page(0, 4)],
        vec![page(1, 4)],
        vec![page(0, 4), page(1, 4)],
    ];
    let layout = KvLayout::new(tensors, groups, 1, 8, 64, 8).unwrap();
    let check = |kind, blocks: &[u32], sizes: &[u32], used: &[u32]| {
        let used = slots(used);
        let job = Geometry {
            block_ids: blocks,
            group_sizes: sizes,
            block_indices: &[0, 0, 0],
            slots: &used,
        };
        job.check_job(kind, &layout, &mut CheckScratch::new(&layout))
    };
    let twice = |block, first, second| {
        Err(PlanError::BlockTwice {
            block,
            first,
            second,
        })
    };
    // The groups 0 and 1 share no tensor: their blocks of one number are different bytes.
    assert_eq!(check(JobKind::Load, &[5, 5], &[1, 1, 0], &[0, 1]), Ok(()));
    assert_eq!(
        check(JobKind::Load, &[5, 5], &[2, 0, 0], &[0, 1]),
        twice(5, 0, 0)
    );
    assert_eq!(
        check(JobKind::Load, &[5, 5, 5], &[1, 1, 1], &[0, 1, 2]),
        twice(5, 0, 2)
    );
    assert_eq!(
        check(JobKind::Load, &[4, 5], &[2, 0, 0], &[3, 3]),
        Ok(()),
        "reads may repeat"
    );
    assert_eq!(
        check(JobKind::Store, &[5, 5], &[2, 0, 0], &[0, 1]),
        Ok(()),
        "reads may repeat"
    );
    assert_eq!(
        check(JobKind::Store, &[4, 5], &[2, 0, 0], &[3, 3]),
        Err(PlanError::SlotTwice { slot: Slot::new(3) })
    );
}

#[test]
fn every_fault_of_a_layout_is_named() {
    let new = |tensors: &[TensorLayout], groups: &[&[PageRef]], sizes: (u32, u32, u64, u32)| {
        let groups = groups.iter().map(|refs| refs.to_vec()).collect();
        let (per_chunk, num_slots, slot_bytes, per_piece) = sizes;
        KvLayout::new(
            tensors.to_vec(),
            groups,
            per_chunk,
            num_slots,
            slot_bytes,
            per_piece,
        )
        .map(|_| ())
        .unwrap_err()
    };
    let (tensors, groups): (_, &[&[_]]) = ([tensor(8, 16, 16)], &[&[page(0, 10)]]);
    let zero = |field: &str| LayoutError::Zero {
        field: field.into(),
    };
    assert_eq!(
        new(&tensors, groups, (0, 1, 64, 1)),
        zero("blocks_per_chunk")
    );
    assert_eq!(new(&tensors, groups, (1, 0, 64, 1)), zero("num_slots"));
    assert_eq!(new(&tensors, groups, (1, 1, 0, 1)), zero("slot_bytes"));
    assert_eq!(
        new(&tensors, groups, (1, 1, 64, 0)),
        zero("slots_per_piece")
    );
    let good = (2, 1, 64, 1);
    assert_eq!(
        new(&[tensor(0, 16, 16)], groups, good),
        zero("tensors[0].num_blocks")
    );
    assert_eq!(
        new(&[tensor(1, 16, 0)], groups, good),
        zero("tensors[0].page_bytes")
    );
    assert_eq!(
        new(&tensors, &[&[page(0, 0)]], good),
        zero("groups[0][0].page_bytes")
    );
    assert_eq!(new(&tensors, &[], good), LayoutError::NoGroups);
    assert_eq!(
        new(&[tensor(8, 15, 16)], groups, good),
        LayoutError::PageExceedsStride {
            tensor: 0,
            page_bytes: 16,
            block_stride: 15
        }
    );
    assert_eq!(
        new(&tensors, &[&[], &[page(0, 1), page(1, 1)]], good),
        LayoutError::UnknownTensor {
            group: 1,
            index: 1,
            tensor: 1,
            num_tensors: 1
        }
    );
    assert_eq!(
        new(&tensors, &[&[page(0, 17)]], good),
        LayoutError::RefExceedsPage {
            group: 0,
            index: 0,
            tensor: 0,
            page_bytes: 17,
            limit: 16
        }
    );
    let small = new(&tensors, groups, (7, 1, 64, 1));
    assert_eq!(
        small,
        LayoutError::SlotTooSmall {
            group: 0,
            slot_bytes: 64,
            needed: 70
        }
    );
    assert_eq!(
        small.to_string(),
        "slot_bytes is 64, a chunk of group 0 needs 70; set it to 70 or more"
    );
    let large = |what: &str| LayoutError::TooLarge { what: what.into() };
    assert_eq!(
        new(&tensors, groups, (2, u32::MAX, u64::MAX, 1)),
        large("the region")
    );
    assert_eq!(
        new(&[tensor(u32::MAX, 1 << 40, 16)], groups, good),
        large("tensors[0]")
    );
    let wide = [tensor(1, 1 << 62, 1 << 62)];
    assert_eq!(
        new(&wide, &[&[page(0, 1 << 62)]], good),
        large("a chunk of groups[0]")
    );
}

#[test]
fn chunks_say_which_of_their_blocks_a_job_copies() {
    let layout = two_groups();
    let slots = slots(&[4, 1, 3, 0]);
    let job = Geometry {
        block_ids: &[0, 1, 2, 3, 4],
        group_sizes: &[4, 1],
        block_indices: &[3, 7],
        slots: &slots,
    };
    job.check(&layout).unwrap();
    let uses: Vec<_> = job
        .chunks(&layout)
        .map(|chunk| (chunk.group, chunk.slot.get(), chunk.first, chunk.end))
        .collect();
    assert_eq!(
        uses,
        [(0, 4, 1, 2), (0, 1, 0, 2), (0, 3, 0, 1), (1, 0, 1, 2)]
    );
}

#[test]
fn a_run_in_two_parts() {
    let run = CopyRun {
        tensor: 3,
        device_offset: 100,
        region_offset: 2000,
        bytes: 50,
    };
    let (first, rest) = run.split_at(20);
    let flat = |run: CopyRun| (run.tensor, run.device_offset, run.region_offset, run.bytes);
    assert_eq!(flat(first), (3, 100, 2000, 20));
    assert_eq!(flat(rest), (3, 120, 2020, 30));
}

#[test]
fn pages_of_a_block_come_together_where_no_two_can_be_one_copy() {
    let layout = |refs: Vec<PageRef>, per_chunk| {
        let tensors = vec![tensor(8, 16, 16), tensor(8, 4, 4)];
        KvLayout::new(tensors, vec![refs], per_chunk, 4, 64, 2).unwrap()
    };
    let slots = slots(&[3, 1]);
    let job = Geometry {
        block_ids: &[5, 2],
        group_sizes: &[2],
        block_indices: &[0],
        slots: &slots,
    };
    let apart = layout(vec![page(0, 16), page(1, 4)], 1);
    let mut cursor = RunCursor::default();
    let mut given = Vec::new();
    for skip in [2, 1, 1] {
        let pages = cursor.pages(&apart, &job).unwrap();
        let flat = |run: CopyRun| (run.tensor, run.device_offset, run.region_offset, run.bytes);
        given.push(pages.runs().map(flat).collect::<Vec<_>>());
        cursor.skip(skip);
    }
    let first = vec![(0, 5 * 16, 3 * 64, 16), (1, 5 * 4, 3 * 64 + 16, 4)];
    let second = vec![(0, 2 * 16, 64, 16), (1, 2 * 4, 64 + 16, 4)];
    let rest = vec![second[1]];
    assert_eq!(given, [first, second, rest]);
    assert!(cursor.pages(&apart, &job).is_none());
    // Blocks of a chunk, and layers that share a tensor, may be adjacent.
    for (refs, per_chunk) in [
        (vec![page(0, 16), page(1, 4)], 2),
        (vec![page(0, 16)], 1),
        (vec![page(0, 16), page(1, 4), page(0, 16)], 1),
    ] {
        let layout = layout(refs, per_chunk);
        let slots = &slots[..2 / per_chunk as usize];
        let job = Geometry { slots, ..job };
        assert!(RunCursor::default().pages(&layout, &job).is_none());
    }
}
