//! What a lookup should answer, by trying every length.

use std::collections::HashSet;

use kvoffload_core::pool::SlotState;
use kvoffload_core::requests::Span;

use super::Engine;
use super::requests::skipped;

impl Engine {
    /// The longest prefix that a request may start from if what is in the pool is loaded.
    pub(crate) fn longest(&self, at: usize, local: u64) -> u64 {
        let request = &self.requests[at];
        let total = request.known();
        if request.about.skip_load || request.hollow {
            return local;
        }
        let keys = self.offload.manager().dump().keys;
        let ready: HashSet<&[u8]> = keys
            .iter()
            .filter(|chunk| chunk.state == SlotState::Ready)
            .map(|chunk| chunk.key.as_bytes())
            .collect();
        let has = |group: usize, chunk: u64| {
            let end = (chunk + 1) * self.chunk(group);
            end <= total && {
                let mut key = request.hashes[end as usize].to_le_bytes().to_vec();
                key.extend(self.groups[group].id.to_be_bytes());
                ready.contains(&*key)
            }
        };
        let any = |span: fn(&Span) -> bool| self.groups.iter().any(|group| span(&group.span));
        let full = !any(|span| *span != Span::Full);
        let state = any(|span| *span == Span::State);
        let groups = 0..self.groups.len();
        let unit = groups.clone().map(|group| self.chunk(group)).max().unwrap();
        let most = request
            .about
            .max_load_tokens
            .map_or(total, |limit| local + limit);
        let possible = |tokens: &u64| {
            let whole = tokens.is_multiple_of(unit) && (full || *tokens < total);
            let last = !full && !state && *tokens + 1 == total && total.is_multiple_of(unit);
            let complete = groups.clone().all(|group| {
                let config = &self.groups[group];
                let first = skipped(config.span, *tokens).max(local) / self.chunk(group);
                // A window of which all is there already needs nothing.
                let end = tokens.div_ceil(self.chunk(group)) + u64::from(config.draft);
                (first..end).all(|chunk| has(group, chunk))
            });
            (whole || last) && complete
        };
        let lengths = (local + 1..=total.min(most)).rev();
        lengths.into_iter().find(possible).unwrap_or(local)
    }

    /// Tokens of a chunk.
    fn chunk(&self, group: usize) -> u64 {
        self.size(group) * u64::from(self.setup.blocks_per_chunk)
    }
}
