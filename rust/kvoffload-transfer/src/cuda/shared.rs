//! What both directions and the callers of a CUDA engine have in common.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvoffload_core::layout::KvLayout;
use parking_lot::Mutex;

use super::driver::Device;
use super::error::DriverError;
use super::job::Ends;
use super::mover::Path;
use crate::notices::Notices;

/// What both directions and the callers share.
pub(super) struct Common {
    pub(super) device: Arc<Device>,
    pub(super) layout: Arc<KvLayout>,
    pub(super) tensors: Vec<TensorPlace>,
    /// After the last copies of each job that is in the queues as a whole.
    pub(super) after: Mutex<HashMap<u64, Ends>>,
    pub(super) counters: Counters,
    pub(super) notices: Arc<Notices>,
}

/// Where a tensor is on the device.
#[derive(Debug, Clone, Copy)]
pub(super) struct TensorPlace {
    /// Of its first block.
    pub(super) address: u64,
    /// Start of the allocation that it is in.
    pub(super) allocation: u64,
}

/// Counters that only the CUDA backend has.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) direct_jobs: AtomicU64,
    pub(super) staged_jobs: AtomicU64,
    pub(super) retries: AtomicU64,
    pub(super) pieces: AtomicU64,
    /// Pieces of staged jobs that went the direct way, because others starved.
    pub(super) switched_pieces: AtomicU64,
    /// Copies of several rows with one call.
    pub(super) row_copies: AtomicU64,
    /// Times that a piece waited for memory to be registered.
    pub(super) registration_waits: AtomicU64,
}

impl Counters {
    pub(super) fn add(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// Mistakes and failures to make on purpose: for tests only.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CudaFaults {
    /// Copies do not wait for the engine's compute.
    pub skip_compute_wait: bool,
    /// The two steps of the staged path do not wait for each other.
    pub skip_staging_wait: bool,
    /// A piece does not wait for the one that had its staging memory before.
    pub skip_ring_wait: bool,
    /// A stream that should wait for a job's copies does not.
    pub skip_stream_wait: bool,
    /// Threads keep the stream capture mode they started with.
    pub keep_capture_mode: bool,
    /// Everything that is enqueued on this path fails.
    pub fail_path: Option<Path>,
    /// The staged piece of this number in each direction, from 1 on, fails half-way; 0: none.
    pub fail_piece: u64,
    /// Every n-th store fails, on both paths; 0: none.
    pub fail_every_store: u64,
    /// Every n-th load fails, on both paths; 0: none.
    pub fail_every_load: u64,
    /// Loads copy nothing and report success: a control that must be noticed.
    pub load_nothing: bool,
}

impl Common {
    /// Notes what an error means for the device, and says once that it is lost.
    pub(super) fn note(&self, error: &DriverError) {
        if self.device.note(error) {
            self.say_lost(error);
        }
    }

    /// As [`Common::note`], for an error after which nothing is certain any more.
    pub(super) fn give_up(&self, error: &DriverError) {
        if self.device.give_up() {
            self.say_lost(error);
        }
    }

    fn say_lost(&self, error: &DriverError) {
        self.notices.add(format!(
            "the CUDA context is lost: {error}. This worker takes no more jobs: restart the engine"
        ));
    }
}
