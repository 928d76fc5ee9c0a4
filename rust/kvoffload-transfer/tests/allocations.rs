//! A submit allocates nothing once there are ended jobs whose memory it can use.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::thread;
use std::time::Duration;

use common::{Job, LONG, Rig, Shape};
use kvoffload_transfer::{FaultPlan, JobKind};

struct Counting;

thread_local! {
    /// Allocations of this thread.
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system's allocator unchanged; counting touches no memory of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_submit_allocates_nothing_in_steady_state() {
    let rig = Rig::new(&Shape::simple(1000, 64, 1000), FaultPlan::default());
    let ids: Vec<u32> = (0..1000).rev().collect();
    let what = Job::simple(&ids, &ids);
    let mut without = 0;
    for round in 0..40 {
        let before = COUNT.get();
        for (job, kind) in (round * 2..).zip([JobKind::Store, JobKind::Load]) {
            rig.submit(kind, job, &what).unwrap();
        }
        without += u32::from(COUNT.get() == before);
        rig.engine.wait(&[round * 2, round * 2 + 1], LONG).unwrap();
        // A job's memory is free a moment after its end is known, or on a busy machine later.
        thread::sleep(Duration::from_millis(2));
        assert_eq!(rig.engine.take_finished().len(), 2);
    }
    assert!(without >= 30, "{without} of 40 rounds");
}
