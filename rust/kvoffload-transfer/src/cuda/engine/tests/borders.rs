//! Slots that lie beside one another in two pieces of the region.

use super::*;

const PAGES: usize = 48;
const SLOT: usize = 1 << 20;

/// The driver refuses a copy across two registrations, also in a staged piece, where whole slots that lie
/// beside one another are one copy.
#[test]
fn no_copy_reaches_across_a_border() {
    for (layers, pinning) in [
        (1, Pinning::Register),
        (2, Pinning::Register),
        (2, Pinning::Allocate),
    ] {
        for path in [Path::Staged, Path::Direct] {
            let page = SLOT / layers;
            let mut memory = vec![0; layers * PAGES * page].into_boxed_slice();
            for (at, page) in memory.chunks_mut(page).enumerate() {
                page.fill(at as u8 + 1);
            }
            let before = memory.clone();
            let tensors = memory.chunks(PAGES * page);
            let shapes = tensors.map(|memory| tensor(memory, page)).collect();
            let _known = known(&memory);
            let config = CudaConfig {
                copy_path: CopyPath::Only(path),
                staging_bytes: 64 << 20,
                pinning,
                ..config(shapes, PAGES, 1)
            };
            // SAFETY: the memory outlives the engine, and is left alone while jobs are live.
            let engine = unsafe { CudaEngine::new(config) }.unwrap();
            let numbers: Vec<u32> = (0..PAGES as u32).collect();
            let slots: Vec<Slot> = numbers.iter().map(|&slot| Slot::new(slot)).collect();
            let geometry = Geometry {
                block_ids: &numbers,
                group_sizes: &[PAGES as u32],
                block_indices: &[0],
                slots: &slots,
            };
            for (job, kind) in [(1, JobKind::Store), (2, JobKind::Load)] {
                submit(&engine, kind, job, &geometry, fresh() as usize).unwrap();
                engine.engine.wait(&[job], LONG).unwrap();
                for end in engine.engine.take_finished() {
                    assert_eq!(end.outcome, Ok(()));
                }
                if kind == JobKind::Store {
                    memory.fill(0);
                }
            }
            let stats: CudaStatsOf = engine.device_stats().into_iter().collect();
            assert_eq!(
                stats["retries"], 0,
                "{layers} layers, {path:?}, {pinning:?}"
            );
            assert!(memory == before, "{layers} layers, {path:?}, {pinning:?}");
        }
    }
}
