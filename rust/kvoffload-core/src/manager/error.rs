//! What callers can get wrong.

use thiserror::Error;

use super::Config;

/// A call that was refused. It has changed nothing.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ManagerError {
    /// A pool without slots.
    #[error("num_slots is 0: a pool needs at least one slot")]
    NoSlots,
    /// More slots than ids.
    #[error(
        "num_slots is {num_slots}, the most is {}: use larger chunks",
        Config::MAX_SLOTS
    )]
    TooManySlots {
        /// What was asked for.
        num_slots: u32,
    },
    /// Offers shall be counted, but nowhere.
    #[error("max_tracker_size is 0, but store_threshold {store_threshold} needs counted offers")]
    NoTracker {
        /// The threshold asked for.
        store_threshold: u32,
    },
    /// More counted offers than memory is set aside for.
    #[error(
        "max_tracker_size is {max_tracker_size}, the most is {}",
        Config::MAX_TRACKED
    )]
    TooManyTracked {
        /// What was asked for.
        max_tracker_size: u32,
    },
    /// No policy has this name.
    #[error("no eviction policy is called {name:?}: use \"lru\" or \"arc\"")]
    UnknownPolicy {
        /// The name given.
        name: String,
    },
    /// A load of a key that cannot be read; `position` counts the call's keys from 0.
    #[error("key {position} of the load is {}: load only what a lookup answered as a hit", if *.writing { "still being written" } else { "not in the pool" })]
    KeyNotReady {
        /// Which of the call's keys.
        position: usize,
        /// Whether it is being written (otherwise it is absent).
        writing: bool,
    },
    /// A release of a pin that this request does not hold.
    #[error(
        "key {position} of the release is not being loaded by this request: complete every load once"
    )]
    StaleHandle {
        /// Which of the call's keys.
        position: usize,
    },
    /// A request record of another manager.
    #[error("the request belongs to another manager: make one with this manager's new_request()")]
    ForeignRequest,
}
