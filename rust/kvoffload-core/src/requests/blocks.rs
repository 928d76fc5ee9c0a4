//! What is known of GPU blocks: who reads them, and when they were last given away.

use crate::jobs::{JobId, JobKind, JobTable};

use super::orders::JobBody;

/// The number of the call that told a GPU block's last allocation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Stamp(u32);

/// One number per block of each kind, for as many blocks as have been seen.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    stamps: Vec<Stamp>,
    /// Stores under way that read the block.
    readers: Vec<u16>,
    /// Stores under way.
    stores: usize,
    call: u32,
}

impl Blocks {
    /// A request's blocks will be told: what it is given is told from what others had before, also
    /// within a step, in which one that is preempted loses what another one gets.
    pub(super) fn next_call(&mut self) {
        self.call = self.call.wrapping_add(1);
    }

    /// The block was given to a request just now. Answers whether a store still reads it.
    pub(super) fn allocate(&mut self, block: u32) -> (Stamp, bool) {
        let at = self.grow(block);
        // Not a count per block: two groups of a request may have a block in common.
        self.stamps[at] = Stamp(self.call);
        (self.stamps[at], self.readers[at] > 0)
    }

    /// The stamp of a block that a request shares with others or had already.
    pub(super) fn stamp(&mut self, block: u32) -> Stamp {
        let at = self.grow(block);
        self.stamps[at]
    }

    /// Whether the block has been with the same owner since.
    pub(super) fn is_since(&self, block: u32, stamp: Stamp) -> bool {
        self.stamps.get(block as usize) == Some(&stamp)
    }

    pub(super) fn has_readers(&self) -> bool {
        self.stores > 0
    }

    pub(super) fn begin_store(&mut self, blocks: &[u32]) {
        self.stores += 1;
        for &block in blocks {
            let at = self.grow(block);
            self.readers[at] = self.readers[at].saturating_add(1);
        }
    }

    pub(super) fn end_store(&mut self, blocks: &[u32]) {
        self.stores -= 1;
        for &block in blocks {
            let readers = &mut self.readers[block as usize];
            *readers = readers.saturating_sub(1);
        }
    }

    fn grow(&mut self, block: u32) -> usize {
        let at = block as usize;
        if at >= self.stamps.len() {
            let len = (at + 1).next_power_of_two();
            self.stamps.resize(len, Stamp::default());
            self.readers.resize(len, 0);
        }
        at
    }

    pub(super) fn validate(&self, jobs: &JobTable<JobBody>) {
        let mut readers = vec![0u16; self.readers.len()];
        let mut stores = 0;
        for job in jobs.iter().filter(|job| job.kind == JobKind::Store) {
            stores += 1;
            for &block in &job.body.blocks {
                readers[block as usize] += 1;
            }
        }
        assert_eq!(self.readers, readers, "readers of blocks");
        assert_eq!(self.stores, stores);
    }
}

/// The stores that read one of `taken`, by number.
pub(super) fn readers_of(jobs: &JobTable<JobBody>, taken: &[u32]) -> Vec<JobId> {
    let mut readers: Vec<JobId> = jobs
        .iter()
        .filter(|job| job.kind == JobKind::Store)
        .filter(|job| job.body.blocks.iter().any(|block| taken.contains(block)))
        .map(|job| job.id)
        .collect();
    readers.sort_unstable();
    readers
}
