//! Stores: what a step computes goes to slots once it is there.

use crate::jobs::JobKind;

use super::Requests;
use super::config::RequestError;
use super::load::Parts;
use super::orders::{JobBody, JobOrder};
use super::table::{RequestId, State};

/// A chunk that could be stored, by the order in which chunks are wanted: of what is refused for lack
/// of room, the end of the prefix is the least loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    end: u64,
    group: u32,
    chunk: u32,
}

impl Requests {
    /// A request runs in this step, and has these blocks in addition, or (`all`) these alone. Blocks
    /// of the first `computed` tokens hold KV already, possibly shared with others.
    ///
    /// All requests of a step are announced before the first call of [`Requests::store`]: one's new
    /// block may have been another one's.
    ///
    /// # Errors
    /// [`RequestError::Groups`].
    pub fn scheduled(
        &mut self,
        id: RequestId,
        blocks: &[&[u32]],
        all: bool,
        computed: u64,
    ) -> Result<(), RequestError> {
        let Some(state) = self.table.get_mut(id) else {
            return Ok(());
        };
        if blocks.len() != self.groups.len() {
            return Err(RequestError::Groups {
                name: state.name.to_string(),
                given: blocks.len(),
                expected: self.groups.len(),
            });
        }
        state.admitted(&mut self.stats);
        let mut taken = Vec::new();
        self.blocks.next_call();
        for ((group, known), ids) in self.groups.iter().zip(&mut state.groups).zip(blocks) {
            if all {
                known.blocks.clear();
            }
            let holds_kv = (computed / group.tokens_per_block) as usize;
            for &block in *ids {
                let old = all && known.blocks.len() < holds_kv;
                let stamp = if old || block == 0 {
                    self.blocks.stamp(block)
                } else {
                    let (stamp, read) = self.blocks.allocate(block);
                    if read {
                        taken.push(block);
                    }
                    stamp
                };
                known.blocks.push((block, stamp));
            }
        }
        self.flush_readers(&taken);
        Ok(())
    }

    /// Tokens that may be stored of a request whose first `computed` tokens are computed, for
    /// [`Requests::hashes_for`].
    pub fn storable(&self, id: RequestId, computed: u64) -> u64 {
        self.table
            .get(id)
            .map_or(0, |state| self.storable_of(state, computed))
    }

    fn storable_of(&self, state: &State, computed: u64) -> u64 {
        let about = &state.about;
        if about.skip_store || state.tainted {
            return 0;
        }
        let most = about.max_store_tokens.unwrap_or(u64::MAX);
        let prompt = if self.config.prompt_only {
            about.prompt_tokens
        } else {
            u64::MAX
        };
        computed.min(most).min(prompt)
    }

    /// Begins a store of the chunks of a request that are complete once its first `computed` tokens
    /// are, as far as they have keys and blocks and there is room. What is refused is offered again
    /// as soon as there is room, and when the request ends.
    ///
    /// # Errors
    /// From the manager; none for a request of this table.
    pub fn store(&mut self, id: RequestId, computed: u64) -> Result<(), RequestError> {
        let Some(state) = self.table.get(id) else {
            return Ok(());
        };
        if self.config.one_region && self.void_loads > 0 {
            return Ok(());
        }
        let is_full = || self.manager.room(state.room()) == 0;
        if state.refused && !state.finished && is_full() {
            return Ok(());
        }
        let tokens = self.storable_of(state, computed);
        let decoding = computed > state.about.prompt_tokens && !state.finished;
        let blocks_per_chunk = self.config.blocks_per_chunk as usize;
        let mut candidates: Vec<Candidate> = Vec::new();
        let mut ends = Vec::with_capacity(self.groups.len());
        for (at, group) in self.groups.iter().enumerate() {
            let known = &state.groups[at];
            let mut end = (tokens / group.tokens_per_chunk) as usize;
            if group.draft && decoding {
                // Its last token's KV is written again if a speculated token is rejected.
                end = end.min((computed / group.tokens_per_chunk).saturating_sub(1) as usize);
            }
            let end = end
                .min(state.num_keys(at))
                .min(known.blocks.len() / blocks_per_chunk);
            ends.push(end);
            for chunk in known.stored..end {
                let blocks = &known.blocks[chunk * blocks_per_chunk..][..blocks_per_chunk];
                let whole = blocks
                    .iter()
                    .all(|&(block, stamp)| block != 0 && self.blocks.is_since(block, stamp));
                if whole {
                    candidates.push(Candidate {
                        end: group.end_of(chunk),
                        group: at as u32,
                        chunk: chunk as u32,
                    });
                }
            }
        }
        if candidates.is_empty() {
            self.advance(id, &ends, None);
            return Ok(());
        }
        if self.jobs.len() >= self.config.max_jobs {
            self.stats.jobs_refused += 1;
            return Ok(());
        }
        if self.groups.len() > 1 {
            candidates.sort_unstable();
        }
        self.begin_store(id, &candidates, &ends)
    }

    fn begin_store(
        &mut self,
        id: RequestId,
        candidates: &[Candidate],
        ends: &[usize],
    ) -> Result<(), RequestError> {
        let now = self.config.clock.elapsed();
        let blocks_per_chunk = self.config.blocks_per_chunk as usize;
        let Some(state) = self.table.get_mut(id) else {
            return Ok(());
        };
        let from = state.room();
        let key_bytes = state.key_bytes;
        let keys: Vec<&[u8]> = candidates
            .iter()
            .map(|one| {
                let at = one.chunk as usize * key_bytes;
                &state.groups[one.group as usize].keys[at..at + key_bytes]
            })
            .collect();
        let prepared = &mut self.prepared;
        self.manager
            .prepare_store_in(from, &keys, &mut state.record, prepared)?;
        let refused = prepared.refused_from;
        state.refused = refused.is_some();
        if let Some(first) = refused {
            // Those that are in the pool already are counted, too; nobody needs it exactly.
            self.stats.chunks_refused += (candidates.len() - first) as u64;
        }
        let mut order = Parts::default();
        let mut slots = Vec::with_capacity(prepared.to_store.len());
        let mut kept = Vec::with_capacity(prepared.to_store.len() * key_bytes);
        for at in 0..self.groups.len() {
            let before = order.blocks.len();
            let mut first = None;
            for (&position, &slot) in prepared.to_store.iter().zip(&prepared.slots) {
                let Candidate { group, chunk, .. } = candidates[position];
                if group as usize != at {
                    continue;
                }
                let block = chunk as usize * blocks_per_chunk;
                first.get_or_insert(block as u64);
                let blocks = &state.groups[at].blocks[block..block + blocks_per_chunk];
                order.blocks.extend(blocks.iter().map(|&(block, _)| block));
                slots.push(slot);
                kept.extend_from_slice(keys[position]);
            }
            order.sizes.push((order.blocks.len() - before) as u32);
            order.firsts.push(first.unwrap_or(0));
        }
        if !slots.is_empty() {
            let blocks: Box<[u32]> = order.blocks.into();
            self.blocks.begin_store(&blocks);
            let body = JobBody {
                request: id,
                keys: kept.into(),
                key_bytes,
                blocks: blocks.clone(),
                began: now,
                hollow: false,
            };
            state.jobs += 1;
            let job = self.jobs.begin(JobKind::Store, body)?;
            self.stats.stores.begun += 1;
            self.orders.stores.push(JobOrder {
                id: job,
                kind: JobKind::Store,
                request: state.name.clone(),
                blocks,
                group_sizes: order.sizes.into(),
                first_blocks: order.firsts.into(),
                slots: slots.into(),
            });
        }
        self.advance(id, ends, refused.map(|first| &candidates[first..]));
        Ok(())
    }

    /// Chunks up to `ends` need not be offered again, but for those refused.
    fn advance(&mut self, id: RequestId, ends: &[usize], refused: Option<&[Candidate]>) {
        let Some(state) = self.table.get_mut(id) else {
            return;
        };
        for (at, (known, &end)) in state.groups.iter_mut().zip(ends).enumerate() {
            let first_refused = refused
                .and_then(|refused| refused.iter().find(|one| one.group as usize == at))
                .map(|one| one.chunk as usize);
            known.stored = known.stored.max(first_refused.unwrap_or(end).min(end));
        }
    }

    /// The step that is being announced computes this many tokens.
    pub fn step(&mut self, tokens: u64) {
        self.pace.step(self.config.clock.elapsed(), tokens);
    }

    /// A request has ended, its first `computed` tokens are computed: stores what is left of it, and
    /// applies its accesses. Its name is free; it is forgotten when its jobs are over.
    /// To finish it again changes nothing.
    ///
    /// # Errors
    /// From the manager; none for a request of this table.
    pub fn finish(&mut self, id: RequestId, computed: u64) -> Result<(), RequestError> {
        let Some(state) = self.table.get_mut(id).filter(|state| !state.finished) else {
            return Ok(());
        };
        state.finished = true;
        self.table.unname(id);
        self.store(id, computed)?;
        let Some(state) = self.table.get_mut(id) else {
            return Ok(());
        };
        let bytes = state.key_bytes.max(1);
        let positions = state
            .groups
            .iter()
            .zip(&self.groups)
            .flat_map(|(known, group)| {
                let keys = known.keys.chunks_exact(bytes).enumerate();
                keys.map(|(chunk, key)| (key, group.end_of(chunk) as i64))
            });
        self.manager.finish_request(&mut state.record, positions)?;
        self.table.bury(id);
        Ok(())
    }
}
