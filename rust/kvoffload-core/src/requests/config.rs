//! What a [`Requests`](super::Requests) table is made from, and what it refuses.

use std::time::Duration;

use thiserror::Error;

use crate::jobs::JobError;
use crate::manager::{Clock, ManagerError};

/// What of a prefix a KV group must hold so that the next token can be computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Span {
    /// All of it: full attention, MLA.
    Full,
    /// The last tokens: each token attends to this many, itself included.
    Window(u32),
    /// The tokens since the last multiple of this: chunked local attention.
    Local(u32),
    /// One state at its very end: Mamba and the like.
    State,
}

/// One KV cache group of the model.
#[derive(Clone, Copy, Debug)]
pub struct GroupConfig {
    /// Its number, the last four bytes of its keys.
    pub id: u32,
    /// Tokens in one GPU block, over all context-parallel ranks.
    pub tokens_per_block: u32,
    /// What it must hold.
    pub span: Span,
    /// It holds a draft model's layers: the KV of a chunk's last token depends on the token after it,
    /// so a chunk counts only if the one behind it is known, too.
    pub draft: bool,
}

/// Settings of a [`Requests`](super::Requests) table.
#[derive(Clone, Debug)]
pub struct RequestsConfig {
    /// The KV groups, in the engine's order.
    pub groups: Vec<GroupConfig>,
    /// GPU blocks in a chunk.
    pub blocks_per_chunk: u32,
    /// Tokens that one of the engine's block hashes covers.
    pub tokens_per_hash: u32,
    /// Ranks that report each job.
    pub num_ranks: u32,
    /// The ranks share one host region, to which one of them stores for all.
    pub one_region: bool,
    /// No store is begun while so many jobs are under way.
    pub max_jobs: usize,
    /// Store a request's prompt only, not what it generates.
    pub prompt_only: bool,
    /// A request waits while another one loads what it needs: it finds it in the GPU's prefix cache
    /// afterwards.
    pub share_loads: bool,
    /// The longest that a request is put off for chunks that are being written or loaded.
    pub defer_deadline: Duration,
    /// Source of time.
    pub clock: Clock,
}

impl RequestsConfig {
    /// One KV group, one rank, vLLM's defaults for the rest.
    pub fn new(group: GroupConfig) -> Self {
        Self {
            groups: vec![group],
            blocks_per_chunk: 1,
            tokens_per_hash: group.tokens_per_block,
            num_ranks: 1,
            one_region: false,
            max_jobs: 1 << 12,
            prompt_only: true,
            share_loads: true,
            defer_deadline: Duration::from_secs(2),
            clock: Clock::default(),
        }
    }

    pub(super) fn check(&self) -> Result<(), RequestError> {
        if self.groups.is_empty() {
            return Err(RequestError::Zero { field: "groups" });
        }
        for (field, value) in [
            ("blocks_per_chunk", self.blocks_per_chunk),
            ("tokens_per_hash", self.tokens_per_hash),
        ] {
            if value == 0 {
                return Err(RequestError::Zero { field });
            }
        }
        for group in &self.groups {
            let chunk = u64::from(group.tokens_per_block) * u64::from(self.blocks_per_chunk);
            if chunk == 0 {
                return Err(RequestError::Zero {
                    field: "tokens_per_block",
                });
            }
            if chunk % u64::from(self.tokens_per_hash) != 0 {
                return Err(RequestError::Hashes {
                    group: group.id,
                    tokens_per_chunk: chunk,
                    tokens_per_hash: self.tokens_per_hash,
                });
            }
            let same = |other: &&GroupConfig| other.id == group.id;
            if self.groups.iter().filter(same).count() > 1 {
                return Err(RequestError::SameGroup { group: group.id });
            }
            if matches!(group.span, Span::Window(0) | Span::Local(0)) {
                return Err(RequestError::Zero { field: "window" });
            }
            if group.span == Span::State && self.blocks_per_chunk > 1 {
                return Err(RequestError::StateChunks { group: group.id });
            }
        }
        Ok(())
    }
}

/// Why a call was refused. Nothing has changed.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum RequestError {
    /// A number that must not be 0.
    #[error("{field} is 0 or empty")]
    Zero {
        /// The setting.
        field: &'static str,
    },
    /// Chunks that are no whole number of hashes.
    #[error(
        "group {group}: a chunk has {tokens_per_chunk} tokens, which is no multiple of the \
         {tokens_per_hash} tokens of a block hash: choose another blocks_per_chunk"
    )]
    Hashes {
        /// The group.
        group: u32,
        /// Tokens in a chunk.
        tokens_per_chunk: u64,
        /// Tokens under one hash.
        tokens_per_hash: u32,
    },
    /// A state of which only the last block of a chunk exists.
    #[error(
        "group {group} keeps a state (Mamba), of which a chunk of several blocks would hold holes: \
         use blocks_per_chunk 1"
    )]
    StateChunks {
        /// The group.
        group: u32,
    },
    /// Two groups whose chunks would have the same keys.
    #[error("two KV groups have the number {group}: their chunks would have the same keys")]
    SameGroup {
        /// The number.
        group: u32,
    },
    /// Two live requests of one name.
    #[error("request {name:?} is known already: names are unique while a request lives")]
    Duplicate {
        /// The name.
        name: String,
    },
    /// A request that was never announced, or is over.
    #[error("request {name:?} is not known: announce it first, and not after its end")]
    Unknown {
        /// The name.
        name: String,
    },
    /// A block hash of another length than those before it.
    #[error("request {name:?}: a block hash has {bytes} bytes, those before it {expected}")]
    HashLength {
        /// The request.
        name: String,
        /// Length of this one.
        bytes: usize,
        /// Length of the others.
        expected: usize,
    },
    /// Block lists of another number of groups.
    #[error("request {name:?}: blocks of {given} KV groups were given, the model has {expected}")]
    Groups {
        /// The request.
        name: String,
        /// Groups given.
        given: usize,
        /// Groups of the model.
        expected: usize,
    },
    /// From the manager.
    #[error(transparent)]
    Manager(#[from] ManagerError),
    /// From the table of jobs.
    #[error(transparent)]
    Job(#[from] JobError),
}
