//! Counts for operators and tests.

/// Sizes now, and counts since the manager was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Slots of the pool.
    pub slots: u64,
    /// Slots that hold nothing.
    pub free: u64,
    /// Chunks that can be read.
    pub ready: u64,
    /// Chunks being written.
    pub writing: u64,
    /// Readable chunks that are being read, and so cannot be evicted.
    pub pinned: u64,
    /// Readable chunks that can be evicted.
    pub evictable: u64,
    /// Lookups answered *hit*.
    pub hits: u64,
    /// Lookups answered *miss*.
    pub misses: u64,
    /// Lookups answered *later*.
    pub laters: u64,
    /// Lookups answered *miss* because the chunk's write is overdue (counted in `misses` too).
    pub overdue: u64,
    /// Chunks whose write succeeded.
    pub stored: u64,
    /// Chunks whose write failed.
    pub store_failures: u64,
    /// Chunks pinned for loads.
    pub loaded: u64,
    /// Chunks evicted.
    pub evicted: u64,
    /// Chunks that left the pool because a load of them failed.
    pub discarded: u64,
    /// Stores refused for lack of room.
    pub refused: u64,
    /// Chunks left out of a store that was admitted in part.
    pub left_out: u64,
    /// Chunks not stored because they had been offered too rarely.
    pub skipped: u64,
    /// Resets.
    pub resets: u64,
    /// Completions for handles that a reset had voided, and of writes that nobody had begun.
    pub stale_completions: u64,
    /// Events dropped because nobody took them.
    pub events_dropped: u64,
}
