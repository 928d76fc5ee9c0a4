//! The arithmetic of one KV group: which chunks a prefix of some length needs.

use std::ops::Range;

use super::config::{GroupConfig, Span};

/// A group with its numbers worked out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group {
    pub(super) id: u32,
    pub(super) span: Span,
    pub(super) draft: bool,
    pub(super) tokens_per_block: u64,
    pub(super) tokens_per_chunk: u64,
    pub(super) hashes_per_chunk: usize,
}

impl Group {
    pub(super) fn new(config: GroupConfig, blocks_per_chunk: u32, tokens_per_hash: u32) -> Self {
        let tokens_per_block = u64::from(config.tokens_per_block);
        let tokens_per_chunk = tokens_per_block * u64::from(blocks_per_chunk);
        Self {
            id: config.id,
            span: config.span,
            draft: config.draft,
            tokens_per_block,
            tokens_per_chunk,
            hashes_per_chunk: (tokens_per_chunk / u64::from(tokens_per_hash)) as usize,
        }
    }

    /// The chunks that must be there so that the token at position `tokens` can be computed.
    ///
    /// One function for lookups and loads, so that what is looked up is what is loaded.
    pub(super) fn needed(&self, tokens: u64) -> Range<usize> {
        let end = tokens.div_ceil(self.tokens_per_chunk);
        let first_token = match self.span {
            Span::Full => 0,
            Span::Window(window) => (tokens + 1).saturating_sub(u64::from(window)),
            Span::Local(local) => tokens - tokens % u64::from(local),
            Span::State => tokens.saturating_sub(1),
        };
        let start = first_token / self.tokens_per_chunk;
        start.min(end) as usize..end as usize
    }

    /// Chunks behind the needed ones whose presence is proof that the needed ones are right.
    pub(super) fn proof(&self) -> usize {
        usize::from(self.draft)
    }

    /// Tokens at which this chunk ends.
    pub(super) fn end_of(&self, chunk: usize) -> u64 {
        (chunk as u64 + 1) * self.tokens_per_chunk
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_needs_what_its_next_token_reads() {
        let needed = |span, blocks_per_chunk, tokens| {
            let config = GroupConfig {
                id: 0,
                tokens_per_block: 16,
                span,
                draft: false,
            };
            Group::new(config, blocks_per_chunk, 16).needed(tokens)
        };
        for (span, blocks_per_chunk, tokens, chunks) in [
            (Span::Full, 1, 0, 0..0),
            (Span::Full, 1, 64, 0..4),
            (Span::Full, 1, 63, 0..4),
            (Span::Full, 2, 64, 0..2),
            // The next token is one of those in the window.
            (Span::Window(1), 1, 64, 4..4),
            (Span::Window(2), 1, 64, 3..4),
            (Span::Window(17), 1, 64, 3..4),
            (Span::Window(18), 1, 64, 2..4),
            (Span::Window(18), 2, 64, 1..2),
            (Span::Window(16), 1, 63, 3..4),
            (Span::Window(17), 1, 63, 2..4),
            (Span::Window(100), 1, 64, 0..4),
            (Span::Local(32), 1, 64, 4..4),
            (Span::Local(48), 1, 64, 3..4),
            (Span::Local(48), 1, 95, 3..6),
            (Span::State, 1, 64, 3..4),
            (Span::State, 1, 0, 0..0),
        ] {
            let what = format!("{span:?}, {blocks_per_chunk} blocks a chunk, {tokens} tokens");
            assert_eq!(needed(span, blocks_per_chunk, tokens), chunks, "{what}");
        }
    }
}
