//! A call allocates a few times whatever the number of its keys, never once per key.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use kvoffload_core::manager::{Config, Manager, PolicyKind, Prepared};

struct Counting;

static COUNT: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged; counting touches no memory of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of one whole cycle of `keys`, on a full pool.
fn cycle(manager: &Manager, keys: &[Vec<u8>], prepared: &mut Prepared) -> usize {
    let names: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
    let mut slots = Vec::with_capacity(names.len());
    let before = COUNT.load(Ordering::Relaxed);
    let mut request = manager.new_request();
    manager.lookup_run(names.iter().copied());
    assert!(
        manager
            .prepare_store(&names, &mut request, prepared)
            .unwrap()
    );
    manager
        .complete_store(names.iter().copied(), &mut request, true)
        .unwrap();
    manager.lookup_run(names.iter().copied());
    manager
        .prepare_load(names.iter().copied(), &mut request, &mut slots)
        .unwrap();
    manager
        .complete_load(names.iter().copied(), &mut request)
        .unwrap();
    let positions = names.iter().copied().zip(1..);
    manager.finish_request(&mut request, positions).unwrap();
    COUNT.load(Ordering::Relaxed) - before
}

// One test only: another thread's allocations would be counted as well.
#[test]
fn allocations_do_not_grow_with_the_number_of_keys() {
    for policy in [PolicyKind::Lru, PolicyKind::Arc] {
        let manager = Manager::new(Config {
            policy,
            ..Config::new(4096)
        })
        .unwrap();
        let mut prepared = Prepared::default();
        let mut next = 0u64;
        let mut batch = |keys: usize| -> Vec<Vec<u8>> {
            let mut name = || {
                next += 1;
                let mut key = vec![0; 28];
                key.extend(next.to_be_bytes());
                key
            };
            (0..keys).map(|_| name()).collect()
        };
        for _ in 0..6 {
            cycle(&manager, &batch(2048), &mut prepared);
        }
        let few = cycle(&manager, &batch(16), &mut prepared);
        let many = cycle(&manager, &batch(2048), &mut prepared);
        assert!(few <= 12, "{few} allocations for a cycle");
        // Vectors that double: a handful for a hundred times as many keys.
        assert!(
            many <= few + 24,
            "{many} allocations for 2048 keys, {few} for 16"
        );
    }
}
