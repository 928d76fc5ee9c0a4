//! Copies of several rows, many with one call, in engines of more layers and slots than the rig has.

use super::*;

const LAYERS: usize = 20;
const PAGE: usize = 2048;
const MANY: usize = 600;

/// An engine on the direct path whose tensors have equal pages, in one allocation or in one each.
struct Layers {
    engine: CudaEngine,
    /// Forgotten before the memory is freed.
    _known: Vec<Known>,
    memory: Box<[u8]>,
    jobs: u64,
}

impl Layers {
    fn new(one_allocation: bool, staging_bytes: u64) -> Self {
        Self::of_groups(1, one_allocation, staging_bytes)
    }

    /// All groups have all layers.
    fn of_groups(groups: usize, one_allocation: bool, staging_bytes: u64) -> Self {
        let memory = vec![0; LAYERS * MANY * PAGE].into_boxed_slice();
        let tensors = memory.chunks(MANY * PAGE);
        let shapes = tensors.clone().map(|memory| tensor(memory, PAGE)).collect();
        let known = match one_allocation {
            true => vec![known(&memory)],
            false => tensors.map(known).collect(),
        };
        let mut config = CudaConfig {
            copy_path: CopyPath::Only(Path::Direct),
            staging_bytes,
            ..config(shapes, MANY, 1)
        };
        config.groups = vec![config.groups[0].clone(); groups];
        // SAFETY: the memory is `Layers`', which shuts the engine down before it goes, and leaves the blocks
        // of live jobs alone.
        let engine = unsafe { CudaEngine::new(config) }.unwrap();
        Self {
            engine,
            _known: known,
            memory,
            jobs: 0,
        }
    }

    /// Every page, as (layer, block) and its bytes.
    fn pages(&mut self) -> impl Iterator<Item = ((usize, usize), &mut [u8])> {
        let pages = self.memory.chunks_mut(PAGE).enumerate();
        pages.map(|(at, page)| ((at / MANY, at % MANY), page))
    }

    fn fill(&mut self, value: impl Fn(usize, usize) -> u8) {
        self.pages()
            .for_each(|((layer, block), page)| page.fill(value(layer, block)));
    }

    /// Runs one job of slots and blocks to its end.
    fn run(&mut self, kind: JobKind, blocks: &[u32], slots: &[u32]) {
        self.jobs += 1;
        let slots: Vec<Slot> = slots.iter().map(|&slot| Slot::new(slot)).collect();
        let groups = self.engine.common.layout.num_groups();
        let geometry = Geometry {
            block_ids: blocks,
            group_sizes: &vec![(blocks.len() / groups) as u32; groups],
            block_indices: &vec![0; groups],
            slots: &slots,
        };
        submit(&self.engine, kind, self.jobs, &geometry, fresh() as usize).unwrap();
        self.engine.wait(&[self.jobs], LONG).unwrap();
        for end in self.engine.take_finished() {
            assert_eq!(end.outcome, Ok(()));
        }
    }

    /// Stores blocks to slots, loads them to others, and answers how many copies were of several rows in
    /// each of the two.
    fn there_and_back(&mut self, blocks: &[u32], slots: &[u32], others: &[u32]) -> [u64; 2] {
        let value = |layer: usize, block: usize| (layer * 7 + block * 3 + block / 64) as u8;
        self.fill(value);
        let before = self.stat("row_copies");
        self.run(JobKind::Store, blocks, slots);
        let between = self.stat("row_copies");
        self.fill(|_, _| 0);
        self.run(JobKind::Load, others, slots);
        let mut from = vec![None; MANY];
        for (&block, &other) in blocks.iter().zip(others) {
            from[other as usize] = Some(block as usize);
        }
        for ((layer, block), page) in self.pages() {
            let expected = from[block].map_or(0, |block| value(layer, block));
            assert!(
                page.iter().all(|&byte| byte == expected),
                "layer {layer}, block {block}"
            );
        }
        [between - before, self.stat("row_copies") - between]
    }

    fn stat(&self, name: &str) -> u64 {
        CudaStatsOf::from(self.engine.device_stats())[name]
    }

    fn row_calls(&self) -> u64 {
        let calls = &self.engine.common.device.row_calls;
        calls.load(Ordering::Relaxed)
    }

    fn refused_rows(&self) -> u64 {
        let refused = &self.engine.common.device.refused_rows;
        refused.load(Ordering::Relaxed)
    }
}

impl Drop for Layers {
    fn drop(&mut self) {
        assert_eq!(self.engine.shutdown(LONG).stuck_threads, 0);
    }
}

fn numbers(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

/// That many different ones, each far from the one before.
fn scattered(count: u32) -> Vec<u32> {
    (0..count).map(|at| at * 371 % MANY as u32).collect()
}

/// Of neighbouring blocks and slots every tensor's pages are rows, in every piece of the region by
/// themselves.
#[test]
fn neighbours_are_rows_of_each_tensor() {
    let mut layers = Layers::new(false, 0);
    let layout = &layers.engine.common.layout;
    assert!(layout.piece_bytes() < layout.slot_bytes() * 500);
    let copies = layers.there_and_back(&numbers(100..600), &numbers(50..550), &numbers(0..500));
    assert!(
        copies.iter().all(|&copies| copies >= 2 * LAYERS as u64),
        "{copies:?}"
    );
    let before = layers.stat("pieces");
    assert!(layers.row_calls() <= before, "one call a piece");
    let copies = layers.there_and_back(&scattered(500), &numbers(50..550), &scattered(500));
    assert_eq!(copies, [0, 0]);
    // 20 MB are less than one piece of a store and three of a load; but no piece has more than 8,192
    // copies, and the first is short.
    assert_eq!(layers.stat("pieces") - before, 3 + 4);
    assert_eq!((layers.refused_rows(), layers.stat("retries")), (0, 0));
}

/// A store goes through its slots in their order, so that neighbours are found in whatever order they are
/// named.
#[test]
fn a_store_finds_neighbours_in_any_order() {
    let mut layers = Layers::new(false, 0);
    let any: Vec<u32> = (0..500).map(|at| at * 371 % 500).collect();
    let [stored, loaded] = layers.there_and_back(&any, &any, &any);
    assert!(stored >= LAYERS as u64, "{stored}");
    assert_eq!(loaded, 0, "a load keeps to the order it was given");
}

/// Groups that share tensors are stored one after the other, though their slots take turns: so each one's
/// neighbours are rows.
#[test]
fn neighbours_of_groups_that_take_turns_are_rows() {
    let mut layers = Layers::of_groups(2, false, 0);
    let blocks = [numbers(0..250), numbers(300..550)].concat();
    let mut slots: Vec<u32> = numbers(0..250).iter().map(|at| 2 * at).collect();
    slots.extend(numbers(0..250).iter().map(|at| 2 * at + 1));
    // And named from the last to the first, so that there is something to sort.
    slots[..250].reverse();
    let blocks_from_last = [
        blocks[..250].iter().rev().copied().collect(),
        blocks[250..].to_vec(),
    ];
    let [stored, _] = layers.there_and_back(&blocks_from_last.concat(), &slots, &blocks);
    assert!(stored >= 2 * LAYERS as u64, "{stored}");
}

/// Of scattered blocks the layers are rows, where all are in one allocation.
#[test]
fn layers_are_rows_in_one_allocation() {
    let mut layers = Layers::new(true, 0);
    let copies = layers.there_and_back(&scattered(500), &scattered(500), &numbers(100..600));
    assert!(copies.iter().all(|&copies| copies >= 490), "{copies:?}");
    assert_eq!((layers.refused_rows(), layers.stat("retries")), (0, 0));
}

/// Whatever the driver says to rows, a batch is made of them, and none are tried again.
#[test]
fn refused_rows_are_copied_in_a_batch() {
    for code in [1, 2, 801] {
        for staging_bytes in [0, 4 << 20] {
            let mut layers = Layers::new(false, staging_bytes);
            let answer = &layers.engine.common.device.row_answer;
            answer.store(code, Ordering::Relaxed);
            for _ in 0..2 {
                let copies =
                    layers.there_and_back(&numbers(0..99), &numbers(0..99), &numbers(0..99));
                assert_eq!(copies, [0, 0]);
            }
            // Once in each direction.
            assert_eq!((layers.refused_rows(), layers.stat("retries")), (2, 0));
            let notices = layers.engine.take_notices();
            let said = notices
                .iter()
                .filter(|text| text.contains("refused to copy rows"));
            assert_eq!(said.count(), 1, "{notices:?}");
        }
    }
}
