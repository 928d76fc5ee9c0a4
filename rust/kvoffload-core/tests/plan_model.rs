//! Copy plans against a byte-level model: executing a plan's runs must leave the same bytes as copying
//! every page of every block by itself, and touch no other.

use kvoffload_core::jobs::JobKind;
use kvoffload_core::layout::{KvLayout, LayoutError, PageRef, TensorLayout, slot_bytes};
use kvoffload_core::plan::{CheckScratch, CopyPlan, CopyRun, Geometry, RunCursor};
use kvoffload_core::pool::Slot;
use proptest::prelude::*;
use proptest::sample::Index;

/// What a layout is made of, kept for the model.
#[derive(Clone, Debug)]
struct Shape {
    tensors: Vec<TensorLayout>,
    groups: Vec<Vec<PageRef>>,
    blocks_per_chunk: u32,
    num_slots: u32,
    slot_bytes: u64,
    slots_per_piece: u32,
}

impl Shape {
    fn layout(&self) -> Result<KvLayout, LayoutError> {
        KvLayout::new(
            self.tensors.clone(),
            self.groups.clone(),
            self.blocks_per_chunk,
            self.num_slots,
            self.slot_bytes,
            self.slots_per_piece,
        )
    }
}

/// A job, owned.
#[derive(Clone, Debug)]
struct Work {
    block_ids: Vec<u32>,
    group_sizes: Vec<u32>,
    block_indices: Vec<u64>,
    slots: Vec<Slot>,
}

impl Work {
    fn geometry(&self) -> Geometry<'_> {
        Geometry {
            block_ids: &self.block_ids,
            group_sizes: &self.group_sizes,
            block_indices: &self.block_indices,
            slots: &self.slots,
        }
    }

    /// (group, block, slot, sub-block) of every block of the job.
    fn blocks(&self, shape: &Shape) -> Vec<(usize, u32, Slot, u64)> {
        let per_chunk = u64::from(shape.blocks_per_chunk);
        let (mut blocks, mut slots) = (self.block_ids.iter(), self.slots.iter());
        let mut all = Vec::new();
        for (group, (&size, &first)) in self.group_sizes.iter().zip(&self.block_indices).enumerate()
        {
            let mut slot = None;
            for logical in first..first + u64::from(size) {
                if slot.is_none() || logical % per_chunk == 0 {
                    slot = slots.next().copied();
                }
                let block = *blocks.next().unwrap();
                all.push((group, block, slot.unwrap(), logical % per_chunk));
            }
        }
        assert!(blocks.next().is_none() && slots.next().is_none());
        all
    }
}

fn tensor() -> impl Strategy<Value = TensorLayout> {
    let gap = prop_oneof![3 => Just(0u64), 1 => 1..9u64];
    (1..14u32, 1..20u64, gap).prop_map(|(num_blocks, page_bytes, gap)| TensorLayout {
        num_blocks,
        block_stride: page_bytes + gap,
        page_bytes,
    })
}

fn shape() -> impl Strategy<Value = Shape> {
    let refs = prop::collection::vec(
        (any::<Index>(), prop_oneof![3 => Just(0u64), 1 => 1..9u64]),
        0..4,
    );
    (
        prop::collection::vec(tensor(), 1..4),
        prop::collection::vec(refs, 1..4),
        1..9u32,
        1..40u32,
        prop_oneof![2 => Just(None), 1 => (0..7u64).prop_map(Some)],
        1..8u32,
    )
        .prop_map(
            |(tensors, groups, blocks_per_chunk, num_slots, spare, slots_per_piece)| {
                let page_ref = |(index, padding): (Index, u64)| {
                    let tensor = index.index(tensors.len());
                    let page_bytes = tensors[tensor].page_bytes.saturating_sub(padding).max(1);
                    PageRef {
                        tensor: tensor as u32,
                        page_bytes,
                    }
                };
                let groups: Vec<Vec<PageRef>> = groups
                    .into_iter()
                    .map(|refs| refs.into_iter().map(page_ref).collect())
                    .collect();
                let chunk = |refs: &Vec<PageRef>| -> u64 {
                    refs.iter().map(|r| r.page_bytes).sum::<u64>() * u64::from(blocks_per_chunk)
                };
                let tight = groups.iter().map(chunk).max().unwrap_or(0).max(1);
                let slot_bytes = spare.map_or(tight.next_multiple_of(64), |spare| tight + spare);
                Shape {
                    tensors,
                    groups,
                    blocks_per_chunk,
                    num_slots,
                    slot_bytes,
                    slots_per_piece,
                }
            },
        )
}

/// Jobs whose blocks and slots come in consecutive runs, mostly without repetition.
fn work(shape: &Shape) -> impl Strategy<Value = Work> + use<> {
    let limits: Vec<u32> = shape
        .groups
        .iter()
        .map(|refs| {
            refs.iter()
                .map(|r| shape.tensors[r.tensor as usize].num_blocks)
                .min()
        })
        .map(|limit| limit.unwrap_or(1000))
        .collect();
    let per_group = (
        0..12u32,
        0..20u64,
        any::<Index>(),
        prop::bool::weighted(0.3),
        0..30u32,
    );
    let groups = prop::collection::vec(per_group, limits.len());
    let (num_slots, per_chunk) = (shape.num_slots, u64::from(shape.blocks_per_chunk));
    (groups, 0..num_slots, prop::bool::weighted(0.2)).prop_map(move |(groups, start, backwards)| {
        let (mut block_ids, mut group_sizes, mut block_indices) = (vec![], vec![], vec![]);
        let mut chunks = 0;
        for (&limit, (size, first, from, scattered, step)) in limits.iter().zip(groups) {
            let size = size.min(limit);
            let from = from.index(limit as usize) as u32;
            let step = if scattered { step } else { 1 };
            block_ids.extend((0..size).map(|at| (from + at * step) % limit));
            group_sizes.push(size);
            block_indices.push(first);
            if size > 0 {
                chunks += (first % per_chunk + u64::from(size)).div_ceil(per_chunk);
            }
        }
        let slot = |at: u64| {
            let at = (u64::from(start) + at) as u32 % num_slots;
            Slot::new(if backwards { num_slots - 1 - at } else { at })
        };
        Work {
            block_ids,
            group_sizes,
            block_indices,
            slots: (0..chunks).map(slot).collect(),
        }
    })
}

/// Bytes of all device tensors and of the region, each byte telling where it came from.
#[derive(Clone, Debug, PartialEq)]
struct Memory {
    tensors: Vec<Vec<u8>>,
    region: Vec<u8>,
}

impl Memory {
    fn new(shape: &Shape) -> Self {
        let fill = |len: u64, seed: u64| -> Vec<u8> {
            (0..len)
                .map(|at| ((at * 0x9e37_79b9 + seed * 0x85eb_ca6b) >> 11) as u8)
                .collect()
        };
        let extent = |t: &TensorLayout| u64::from(t.num_blocks - 1) * t.block_stride + t.page_bytes;
        let tensors = shape
            .tensors
            .iter()
            .zip(1..)
            .map(|(t, seed)| fill(extent(t), seed))
            .collect();
        let region = fill(u64::from(shape.num_slots) * shape.slot_bytes, 77);
        Self { tensors, region }
    }

    fn copy(&mut self, kind: JobKind, run: CopyRun) {
        let device = run.device_offset as usize..(run.device_offset + run.bytes) as usize;
        let host = run.region_offset as usize..(run.region_offset + run.bytes) as usize;
        let tensor = &mut self.tensors[run.tensor as usize][device];
        match kind {
            JobKind::Store => self.region[host].copy_from_slice(tensor),
            JobKind::Load => tensor.copy_from_slice(&self.region[host]),
        }
    }

    /// Page by page, by the definition of the slot layout.
    fn copy_all(&mut self, kind: JobKind, shape: &Shape, work: &Work) {
        for (group, block, slot, sub_block) in work.blocks(shape) {
            let mut start = u64::from(slot.get()) * shape.slot_bytes;
            for page in &shape.groups[group] {
                let stride = shape.tensors[page.tensor as usize].block_stride;
                let run = CopyRun {
                    tensor: page.tensor,
                    device_offset: u64::from(block) * stride,
                    region_offset: start + sub_block * page.page_bytes,
                    bytes: page.page_bytes,
                };
                self.copy(kind, run);
                start += u64::from(shape.blocks_per_chunk) * page.page_bytes;
            }
        }
    }
}

/// Whether the job would write a byte twice for two of its chunks or blocks.
fn writes_twice(kind: JobKind, shape: &Shape, work: &Work) -> bool {
    let tensors = |group: usize| shape.groups[group].iter().map(|r| r.tensor);
    let blocks = work.blocks(shape);
    blocks.iter().enumerate().any(|(at, a)| {
        blocks[at + 1..].iter().any(|b| match kind {
            JobKind::Store => false,
            JobKind::Load => a.1 == b.1 && tensors(a.0).any(|t| tensors(b.0).any(|u| t == u)),
        })
    }) || kind == JobKind::Store
        && (1..work.slots.len()).any(|at| work.slots[..at].contains(&work.slots[at]))
}

/// The job's copies by the definition: every page by itself, then what is adjacent put together, then
/// cut where the limits say, which are used in turn.
fn naive_runs(shape: &Shape, work: &Work, limits: &[u64]) -> Vec<CopyRun> {
    let blocks = work.blocks(shape);
    let mut pages = Vec::new();
    // Of the same chunk: next to each other, of the same group, with ascending sub-blocks.
    for chunk in blocks.chunk_by(|a, b| (a.0, a.2) == (b.0, b.2) && a.3 < b.3) {
        let (group, _, slot, _) = chunk[0];
        let mut start = u64::from(slot.get()) * shape.slot_bytes;
        for page in &shape.groups[group] {
            for &(_, block, _, sub_block) in chunk {
                pages.push(CopyRun {
                    tensor: page.tensor,
                    device_offset: u64::from(block)
                        * shape.tensors[page.tensor as usize].block_stride,
                    region_offset: start + sub_block * page.page_bytes,
                    bytes: page.page_bytes,
                });
            }
            start += u64::from(shape.blocks_per_chunk) * page.page_bytes;
        }
    }
    let mut limits = limits.iter().cycle();
    let mut cut = Vec::new();
    for mut run in merged(shape, pages) {
        while run.bytes > 0 {
            let bytes = run.bytes.min(*limits.next().unwrap());
            cut.push(CopyRun { bytes, ..run });
            run.device_offset += bytes;
            run.region_offset += bytes;
            run.bytes -= bytes;
        }
    }
    cut
}

/// Puts copies together that are adjacent on both sides.
fn merged(shape: &Shape, runs: Vec<CopyRun>) -> Vec<CopyRun> {
    let piece = u64::from(shape.slots_per_piece) * shape.slot_bytes;
    let mut merged: Vec<CopyRun> = Vec::new();
    for run in runs {
        match merged.last_mut() {
            Some(last)
                if last.tensor == run.tensor
                    && last.device_offset + last.bytes == run.device_offset
                    && last.region_offset + last.bytes == run.region_offset
                    && last.region_offset / piece == run.region_offset / piece =>
            {
                last.bytes += run.bytes;
            }
            _ => merged.push(run),
        }
    }
    merged
}

fn check_runs(plan: &CopyPlan, shape: &Shape) -> Result<(), TestCaseError> {
    let piece = u64::from(shape.slots_per_piece) * shape.slot_bytes;
    prop_assert_eq!(
        plan.runs.iter().map(|run| run.bytes).sum::<u64>(),
        plan.bytes
    );
    for run in &plan.runs {
        prop_assert!(run.bytes > 0);
        let last = run.region_offset + run.bytes - 1;
        prop_assert_eq!(
            run.region_offset / piece,
            last / piece,
            "crosses a piece border"
        );
    }
    for pair in plan.runs.windows(2) {
        let adjacent = pair[0].tensor == pair[1].tensor
            && pair[0].device_offset + pair[0].bytes == pair[1].device_offset
            && pair[0].region_offset + pair[0].bytes == pair[1].region_offset;
        prop_assert!(
            !adjacent || pair[1].region_offset % piece == 0,
            "not merged: {:?}",
            pair
        );
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_plan_moves_exactly_the_pages_of_the_job(
        (shape, work) in shape().prop_flat_map(|shape| (Just(shape.clone()), work(&shape))),
        kind in prop_oneof![Just(JobKind::Store), Just(JobKind::Load)],
    ) {
        let layout = shape.layout().unwrap();
        let geometry = work.geometry();
        prop_assert_eq!(geometry.check(&layout), Ok(()));
        let mut scratch = CheckScratch::new(&layout);
        let checked = geometry.check_job(kind, &layout, &mut scratch);
        let again = geometry.check_job(kind, &layout, &mut scratch);
        prop_assert_eq!(&again, &checked, "nothing is left in the working memory");
        prop_assert_eq!(checked.is_err(), writes_twice(kind, &shape, &work), "{:?}", checked);

        let mut plan = CopyPlan::default();
        plan.build_into(&layout, &geometry).unwrap();
        check_runs(&plan, &shape)?;
        if checked.is_ok() {
            let mut planned = Memory::new(&shape);
            let mut expected = planned.clone();
            plan.runs.iter().for_each(|&run| planned.copy(kind, run));
            expected.copy_all(kind, &shape, &work);
            prop_assert_eq!(planned, expected);
        }
    }

    #[test]
    fn a_cursor_gives_the_copies_of_the_definition_in_its_order(
        (shape, work) in shape().prop_flat_map(|shape| (Just(shape.clone()), work(&shape))),
        limits in prop::collection::vec(
            prop_oneof![1..30u64, 30..400u64, Just(u64::MAX)], 1..5),
    ) {
        let layout = shape.layout().unwrap();
        let geometry = work.geometry();
        let expected = naive_runs(&shape, &work, &limits);
        let mut cursor = RunCursor::default();
        let mut limit = limits.iter().cycle();
        let mut runs = Vec::new();
        while let Some(run) = cursor.next(&layout, &geometry, *limit.next().unwrap()) {
            runs.push(run);
        }
        prop_assert_eq!(cursor.next(&layout, &geometry, 1), None, "it stays at the end");
        prop_assert_eq!(geometry.bytes(&layout), runs.iter().map(|run| run.bytes).sum::<u64>());
        prop_assert_eq!(runs, expected);
    }

    /// Whoever takes pages several at a time, and not always all of them, gets the same bytes in the same
    /// order.
    #[test]
    fn pages_are_what_the_cursor_gives_one_by_one(
        (shape, work) in shape().prop_flat_map(|shape| (Just(shape.clone()), work(&shape))),
        limits in prop::collection::vec(prop_oneof![1..30u64, Just(u64::MAX)], 1..5),
        choices in prop::collection::vec(prop::option::weighted(0.8, any::<Index>()), 1..9),
    ) {
        let layout = shape.layout().unwrap();
        let geometry = work.geometry();
        let mut cursor = RunCursor::default();
        let (mut limit, mut choice) = (limits.iter().cycle(), choices.iter().cycle());
        let mut runs = Vec::new();
        loop {
            if let Some(index) = choice.next().unwrap()
                && let Some(pages) = cursor.pages(&layout, &geometry)
            {
                let pages: Vec<CopyRun> = pages.runs().collect();
                let taken = index.index(pages.len()) + 1;
                if shape.groups.len() == 1 {
                    let mut by_one = cursor.clone();
                    for &page in &pages {
                        prop_assert_eq!(by_one.next(&layout, &geometry, u64::MAX), Some(page));
                    }
                }
                runs.extend_from_slice(&pages[..taken]);
                cursor.skip(taken);
            } else if let Some(run) = cursor.next(&layout, &geometry, *limit.next().unwrap()) {
                runs.push(run);
            } else {
                break;
            }
        }
        prop_assert!(cursor.pages(&layout, &geometry).is_none(), "it stays at the end");
        prop_assert_eq!(merged(&shape, runs), naive_runs(&shape, &work, &[u64::MAX]));
    }

    /// By slot the same bytes are moved, group by group from the region's start to its end, as often as one
    /// likes.
    #[test]
    fn by_slot_the_copies_are_those_of_the_job_in_the_regions_order(
        (shape, mut work) in shape().prop_flat_map(|shape| (Just(shape.clone()), work(&shape))),
        kind in prop_oneof![Just(JobKind::Store), Just(JobKind::Load)],
        mix in prop::option::weighted(0.8, any::<u64>()),
        limits in prop::collection::vec(prop_oneof![1..30u64, Just(u64::MAX)], 1..5),
        taken in prop::collection::vec(prop::option::weighted(0.5, any::<Index>()), 1..9),
    ) {
        if let Some(seed) = mix {
            let key = |slot: &Slot| (u64::from(slot.get()) ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            work.slots.sort_by_key(key);
        }
        let layout = shape.layout().unwrap();
        let geometry = work.geometry();
        let mut scratch = CheckScratch::new(&layout);
        prop_assume!(geometry.check_job(kind, &layout, &mut scratch).is_ok());
        // Which slots come after one another, all of them, and those with bytes without repeats.
        let chunks: Vec<_> = geometry.chunks(&layout).collect();
        let (mut all, mut copied) = (Vec::new(), Vec::new());
        for group in chunks.chunk_by(|a, b| a.group == b.group) {
            let mut slots: Vec<Slot> = group.iter().map(|chunk| chunk.slot).collect();
            slots.sort();
            all.extend_from_slice(&slots);
            if !shape.groups[group[0].group].is_empty() {
                copied.extend(slots.iter().map(|&slot| u64::from(slot.get())));
            }
        }
        copied.dedup();

        let mut cursor = RunCursor::by_slot(&layout, &geometry);
        prop_assert_eq!(cursor.slots(geometry).collect::<Vec<_>>(), all);
        let mut expected = Memory::new(&shape);
        expected.copy_all(kind, &shape, &work);
        for _ in 0..2 {
            let (mut limit, mut taken) = (limits.iter().cycle(), taken.iter().cycle());
            let mut runs = Vec::new();
            loop {
                if let Some(index) = taken.next().unwrap()
                    && let Some(pages) = cursor.pages(&layout, &geometry)
                {
                    let pages: Vec<CopyRun> = pages.runs().collect();
                    let count = index.index(pages.len()) + 1;
                    runs.extend_from_slice(&pages[..count]);
                    cursor.skip(count);
                } else if let Some(run) = cursor.next(&layout, &geometry, *limit.next().unwrap()) {
                    runs.push(run);
                } else {
                    break;
                }
            }
            prop_assert!(cursor.pages(&layout, &geometry).is_none(), "it stays at the end");
            prop_assert_eq!(cursor.next(&layout, &geometry, 1), None);
            let mut moved = Memory::new(&shape);
            runs.iter().for_each(|&run| moved.copy(kind, run));
            prop_assert_eq!(&moved, &expected);
            prop_assert_eq!(geometry.bytes(&layout), runs.iter().map(|run| run.bytes).sum::<u64>());
            let slot = |offset: u64| offset / layout.slot_bytes();
            let spans = runs.iter().map(|run| (run.region_offset, run.region_offset + run.bytes - 1));
            let mut seen: Vec<u64> = spans.flat_map(|(first, last)| slot(first)..=slot(last)).collect();
            seen.dedup();
            prop_assert_eq!(&seen, &copied);
            cursor.restart();
        }
    }

    /// Any numbers at all: a typed error or a plan inside the bounds, never a panic.
    #[test]
    fn hostile_jobs_are_refused(
        shape in shape(),
        block_ids in prop::collection::vec(prop_oneof![0..14u32, any::<u32>()], 0..6),
        group_sizes in prop::collection::vec(prop_oneof![0..4u32, any::<u32>()], 0..4),
        block_indices in prop::collection::vec(prop_oneof![0..9u64, any::<u64>()], 0..4),
        slots in prop::collection::vec(prop_oneof![0..40u32, any::<u32>()], 0..6),
    ) {
        let slots = slots.into_iter().map(Slot::new).collect();
        let work = Work { block_ids, group_sizes, block_indices, slots };
        let layout = shape.layout().unwrap();
        let mut plan = CopyPlan::default();
        let built = plan.build_into(&layout, &work.geometry());
        prop_assert_eq!(built, work.geometry().check(&layout));
        if built.is_err() {
            let mut scratch = CheckScratch::new(&layout);
            prop_assert!(plan.runs.is_empty() && plan.bytes == 0);
            prop_assert_eq!(work.geometry().check_job(JobKind::Load, &layout, &mut scratch), built);
        } else {
            let mut memory = Memory::new(&shape);
            plan.runs.iter().for_each(|&run| memory.copy(JobKind::Store, run));
        }
    }

    #[test]
    fn hostile_layouts_are_refused(
        tensors in prop::collection::vec((big32(), big64(), big64()), 0..3),
        groups in prop::collection::vec(prop::collection::vec((0..3u32, big64()), 0..3), 0..3),
        (blocks_per_chunk, num_slots, slot_bytes, slots_per_piece) in
            (big32(), big32(), big64(), big32()),
    ) {
        let tensors = tensors.into_iter().map(|(num_blocks, block_stride, page_bytes)| {
            TensorLayout { num_blocks, block_stride, page_bytes }
        });
        let page_ref = |(tensor, page_bytes)| PageRef { tensor, page_bytes };
        let groups: Vec<Vec<PageRef>> =
            groups.into_iter().map(|refs| refs.into_iter().map(page_ref).collect()).collect();
        let needed = slot_bytes_exact(&groups, blocks_per_chunk);
        let given = u128::from(self::slot_bytes(&groups, blocks_per_chunk));
        if blocks_per_chunk > 0 {
            let align = if needed >= 256 << 10 { 4096 } else { 64 };
            prop_assert_eq!(given, needed.next_multiple_of(align).min(u128::from(u64::MAX)));
        }
        let shape = Shape {
            tensors: tensors.collect(), groups, blocks_per_chunk, num_slots, slot_bytes, slots_per_piece,
        };
        if let Ok(layout) = shape.layout() {
            prop_assert!(needed <= u128::from(slot_bytes));
            let last = Slot::new(num_slots - 1);
            prop_assert_eq!(layout.slot_offset(last) + slot_bytes, layout.region_bytes());
            prop_assert_eq!(layout.piece_of(last) + 1, layout.num_pieces());
        }
    }
}

fn big32() -> impl Strategy<Value = u32> {
    prop_oneof![0..5u32, any::<u32>(), Just(u32::MAX)]
}

fn big64() -> impl Strategy<Value = u64> {
    prop_oneof![
        0..200u64,
        any::<u64>(),
        Just(u64::MAX),
        (0..64u32).prop_map(|bit| 1 << bit)
    ]
}

fn slot_bytes_exact(groups: &[Vec<PageRef>], blocks_per_chunk: u32) -> u128 {
    let block = |refs: &Vec<PageRef>| refs.iter().map(|r| u128::from(r.page_bytes)).sum::<u128>();
    groups.iter().map(block).max().unwrap_or(0) * u128::from(blocks_per_chunk)
}
