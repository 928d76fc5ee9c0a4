//! Loads: the blocks a request was given, filled from slots.

use crate::jobs::JobKind;

use super::Requests;
use super::blocks::readers_of;
use super::config::{RequestError, Span};
use super::orders::{JobBody, JobOrder};
use super::table::RequestId;

/// The blocks that a request was given in one group, from some position on.
#[derive(Clone, Copy, Debug)]
pub struct GivenBlocks<'a> {
    /// Their ids; 0: none.
    pub ids: &'a [u32],
    /// Position of the first in the request, in blocks.
    pub first: usize,
    /// Position of the first that is neither missing nor holds KV already.
    pub fresh: usize,
}

impl Requests {
    /// Position of the first block of each group that [`Requests::allocated`] needs to know for a
    /// request: those before it hold KV that is shared, and nobody writes them.
    pub fn first_given(&self, id: RequestId, group: usize) -> usize {
        let computed = self.table.get(id).map_or(0, |state| state.computed);
        self.groups
            .get(group)
            .map_or(0, |group| (computed / group.tokens_per_block) as usize)
    }

    /// Whether it matters which blocks a request was given although nothing is loaded into them: a
    /// store reads them, or another request may believe that it still has them.
    pub fn watches_blocks(&self) -> bool {
        self.blocks.has_readers() || self.table.len() > 1
    }

    /// The engine gave blocks to a request, `external` tokens of which are to be loaded: what the last
    /// lookup promised, or less. Begins the load.
    ///
    /// The whole prefix is one job. A load in parts, after whose first the request may start, would
    /// begin several here.
    ///
    /// # Errors
    /// [`RequestError::Groups`]. A load that turns out to be impossible is no error: it is ordered
    /// without slots, and fails.
    pub fn allocated(
        &mut self,
        id: RequestId,
        given: &[GivenBlocks<'_>],
        external: u64,
    ) -> Result<(), RequestError> {
        let Some(state) = self.table.get_mut(id) else {
            return Ok(());
        };
        if given.len() != self.groups.len() {
            return Err(RequestError::Groups {
                name: state.name.to_string(),
                given: given.len(),
                expected: self.groups.len(),
            });
        }
        state.admitted(&mut self.stats);
        let mut taken = Vec::new();
        self.blocks.next_call();
        for group in given {
            for &block in group.ids.iter().filter(|&&block| block != 0) {
                if self.blocks.allocate(block).1 {
                    taken.push(block);
                }
            }
        }
        self.flush_readers(&taken);
        if external > 0 {
            self.begin_load(id, given, external)?;
        }
        Ok(())
    }

    /// The stores that read one of these blocks go before this step.
    pub(super) fn flush_readers(&mut self, taken: &[u32]) {
        if taken.is_empty() {
            return;
        }
        for job in readers_of(&self.jobs, taken) {
            if !self.orders.flush.contains(&job) {
                self.orders.flush.push(job);
                self.stats.flushes += 1;
            }
        }
    }

    fn begin_load(
        &mut self,
        id: RequestId,
        given: &[GivenBlocks<'_>],
        external: u64,
    ) -> Result<(), RequestError> {
        let now = self.config.clock.elapsed();
        let blocks_per_chunk = self.config.blocks_per_chunk as usize;
        let Some(state) = self.table.get_mut(id) else {
            return Ok(());
        };
        let target = state.computed + external;
        let mut order = Parts::default();
        let mut keys = Vec::new();
        let mut complete = true;
        for ((at, group), given) in self.groups.iter().enumerate().zip(given) {
            let end = target.div_ceil(group.tokens_per_block) as usize;
            let end = end.min(given.first + given.ids.len());
            let first = given.fresh.max(given.first).min(end);
            let blocks = &given.ids[first - given.first..end - given.first];
            complete &= !blocks.contains(&0);
            // A state is that of one length only, and the engine may take less than it was promised.
            complete &= group.span != Span::State || target.is_multiple_of(group.tokens_per_chunk);
            order.blocks.extend_from_slice(blocks);
            order.sizes.push(blocks.len() as u32);
            order.firsts.push(first as u64);
            if !blocks.is_empty() {
                for chunk in first / blocks_per_chunk..end.div_ceil(blocks_per_chunk) {
                    match state.key(at, chunk) {
                        Some(key) => keys.extend_from_slice(key),
                        None => complete = false,
                    }
                }
            }
            state.groups[at].stored = target.div_ceil(group.tokens_per_chunk) as usize;
        }
        // Without a block the job is begun, too: the engine waits for what it was promised.
        self.slots.clear();
        let key_bytes = state.key_bytes.max(1);
        let pinned = complete
            && self
                .manager
                .prepare_load(
                    keys.chunks_exact(key_bytes),
                    &mut state.record,
                    &mut self.slots,
                )
                .is_ok();
        let body = JobBody {
            request: id,
            keys: keys.into(),
            key_bytes,
            blocks: Box::default(),
            began: now,
            hollow: !pinned,
        };
        let name = state.name.clone();
        let job = self.jobs.begin(JobKind::Load, body)?;
        if let Some(state) = self.table.get_mut(id) {
            state.jobs += 1;
        }
        self.stats.loads.begun += 1;
        self.orders.loads.push(JobOrder {
            id: job,
            kind: JobKind::Load,
            request: name,
            blocks: order.blocks.into(),
            group_sizes: order.sizes.into(),
            first_blocks: order.firsts.into(),
            slots: if pinned {
                self.slots.as_slice().into()
            } else {
                Box::default()
            },
        });
        Ok(())
    }
}

/// The numbers of an order, as they are collected.
#[derive(Default)]
pub(super) struct Parts {
    pub(super) blocks: Vec<u32>,
    pub(super) sizes: Vec<u32>,
    pub(super) firsts: Vec<u64>,
}
