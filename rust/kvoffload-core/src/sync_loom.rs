//! loom's atomics, made to conflict on every access.
//!
//! loom 0.7 decides which orders to try from the *last* access to an atomic. In "load, then
//! compare-and-swap" a thread's own load hides an earlier load by another thread, so that loom never
//! tries the swap before that load: half of what the pool does would go unchecked. Here each access is
//! preceded by a relaxed read-modify-write of a counter beside the value. That makes any two accesses
//! conflict, adds no synchronisation, and leaves loads free to return old values.

pub(crate) use loom::sync::atomic::Ordering;

macro_rules! atomic {
    ($name:ident, $int:ty) => {
        #[derive(Debug)]
        pub(crate) struct $name {
            value: loom::sync::atomic::$name,
            accesses: loom::sync::atomic::AtomicUsize,
        }

        #[allow(dead_code, reason = "each type uses a part of the interface")]
        impl $name {
            pub(crate) fn new(value: $int) -> Self {
                let accesses = loom::sync::atomic::AtomicUsize::new(0);
                Self {
                    value: loom::sync::atomic::$name::new(value),
                    accesses,
                }
            }

            fn value(&self) -> &loom::sync::atomic::$name {
                self.accesses.fetch_add(1, Ordering::Relaxed);
                &self.value
            }

            pub(crate) fn load(&self, order: Ordering) -> $int {
                self.value().load(order)
            }

            pub(crate) fn store(&self, value: $int, order: Ordering) {
                self.value().store(value, order);
            }

            pub(crate) fn fetch_add(&self, value: $int, order: Ordering) -> $int {
                self.value().fetch_add(value, order)
            }

            pub(crate) fn fetch_sub(&self, value: $int, order: Ordering) -> $int {
                self.value().fetch_sub(value, order)
            }

            pub(crate) fn fetch_and(&self, value: $int, order: Ordering) -> $int {
                self.value().fetch_and(value, order)
            }

            pub(crate) fn fetch_or(&self, value: $int, order: Ordering) -> $int {
                self.value().fetch_or(value, order)
            }

            pub(crate) fn compare_exchange_weak(
                &self,
                current: $int,
                new: $int,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$int, $int> {
                self.value()
                    .compare_exchange_weak(current, new, success, failure)
            }

            pub(crate) fn fetch_update(
                &self,
                success: Ordering,
                failure: Ordering,
                step: impl Fn($int) -> Option<$int>,
            ) -> Result<$int, $int> {
                let mut current = self.load(failure);
                while let Some(new) = step(current) {
                    match self.compare_exchange_weak(current, new, success, failure) {
                        Ok(before) => return Ok(before),
                        Err(now) => current = now,
                    }
                }
                Err(current)
            }
        }
    };
}

atomic!(AtomicU32, u32);
atomic!(AtomicU64, u64);
atomic!(AtomicUsize, usize);
