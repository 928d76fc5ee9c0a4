//! What an engine is started with, and what is left of it in the end.

use std::time::Duration;

use crate::verify::Verify;

/// Settings of an engine.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Whether slots are hashed.
    pub verify: Verify,
    /// The most jobs that may be live or ended but not taken.
    pub max_jobs: usize,
    /// How long a drop waits for live jobs.
    pub shutdown_timeout: Duration,
    /// False lets loads read slots, or blocks of a slot, that nothing was stored to: for tests of
    /// copies alone.
    #[doc(hidden)]
    pub stored_only: bool,
    /// False lets conflicting jobs run side by side: a test shows with it that the fence is needed.
    #[doc(hidden)]
    pub fences: bool,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            verify: Verify::Off,
            max_jobs: 65_536,
            shutdown_timeout: Duration::from_secs(10),
            stored_only: true,
            fences: true,
        }
    }
}

/// What a shutdown left behind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShutdownReport {
    /// Jobs that were given up at the deadline, in ascending order. Each is reported with an error.
    pub abandoned: Vec<u64>,
    /// Threads that did not end in time. The memory they may touch stays mapped, and their jobs stay
    /// unreported, until they do.
    pub stuck_threads: usize,
}
