//! The one place where atomics and locks come from, so that model checkers can replace them.
//!
//! `--cfg loom` explores every interleaving of the pool and the slot word, `--cfg shuttle` random
//! schedules of the whole manager; otherwise these are the standard atomics and a parking_lot mutex.

#[cfg(loom)]
#[path = "sync_loom.rs"]
pub(crate) mod atomic;
#[cfg(all(shuttle, not(loom)))]
pub(crate) mod atomic {
    pub(crate) use shuttle::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
}
#[cfg(not(any(loom, shuttle)))]
pub(crate) mod atomic {
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
}

/// What a thread does between two rounds of a search that others may be about to end.
pub(crate) mod hint {
    #[cfg(loom)]
    pub(crate) use loom::hint::spin_loop;
    #[cfg(all(shuttle, not(loom)))]
    pub(crate) use shuttle::hint::spin_loop;
    #[cfg(not(any(loom, shuttle)))]
    pub(crate) use std::hint::spin_loop;
}

#[cfg(loom)]
use loom::sync as imp;
#[cfg(all(shuttle, not(loom)))]
use shuttle::sync as imp;

#[cfg(any(loom, shuttle))]
pub(crate) use imp::MutexGuard;

/// A mutex whose lock cannot be poisoned from a caller's point of view.
#[cfg(any(loom, shuttle))]
#[derive(Debug)]
pub(crate) struct Mutex<T>(imp::Mutex<T>);

#[cfg(any(loom, shuttle))]
impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(imp::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> imp::MutexGuard<'_, T> {
        self.0
            .lock()
            .expect("a model-checked thread panicked while it held the lock")
    }
}

#[cfg(not(any(loom, shuttle)))]
pub(crate) use parking_lot::{Mutex, MutexGuard};
