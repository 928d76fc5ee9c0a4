//! Ranges that are copied with one call of the driver.

use kvoffload_core::jobs::JobKind;

/// The most ranges in one call.
const MOST: usize = 4096;

/// Ranges in the form in which the driver takes them.
pub(super) struct Batch {
    pub(super) kind: JobKind,
    pub(super) targets: Vec<u64>,
    pub(super) sources: Vec<u64>,
    pub(super) sizes: Vec<usize>,
}

impl Batch {
    pub(super) fn new(kind: JobKind) -> Self {
        Self {
            kind,
            targets: Vec::with_capacity(MOST),
            sources: Vec::with_capacity(MOST),
            sizes: Vec::with_capacity(MOST),
        }
    }

    pub(super) fn add(&mut self, device: u64, host: usize, bytes: u64) {
        let (target, source) = match self.kind {
            JobKind::Store => (host as u64, device),
            JobKind::Load => (device, host as u64),
        };
        self.targets.push(target);
        self.sources.push(source);
        self.sizes.push(bytes as usize);
    }

    pub(super) fn is_full(&self) -> bool {
        self.sizes.len() == MOST
    }

    pub(super) fn clear(&mut self) {
        self.targets.clear();
        self.sources.clear();
        self.sizes.clear();
    }
}
