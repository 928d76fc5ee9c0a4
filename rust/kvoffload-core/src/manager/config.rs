//! What a manager is made with.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::ManagerError;

/// Which policy orders the chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PolicyKind {
    /// Least recently used goes first.
    #[default]
    Lru,
    /// Adaptive replacement: balances recency and frequency by what it regrets.
    Arc,
}

impl PolicyKind {
    /// The name in settings.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Arc => "arc",
        }
    }

    /// The policy called `name`.
    ///
    /// # Errors
    /// [`ManagerError::UnknownPolicy`].
    pub fn from_name(name: &str) -> Result<Self, ManagerError> {
        [Self::Lru, Self::Arc]
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| ManagerError::UnknownPolicy {
                name: name.to_owned(),
            })
    }
}

/// Time since some start; tests give their own.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> Duration + Send + Sync>);

impl Clock {
    /// A clock that answers what `now` answers.
    pub fn new(now: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    /// The time now.
    pub fn elapsed(&self) -> Duration {
        (self.0)()
    }

    pub(super) fn now(&self) -> Tenths {
        Tenths::of(self.elapsed())
    }
}

impl Default for Clock {
    fn default() -> Self {
        let start = Instant::now();
        Self::new(move || start.elapsed())
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Clock({:?})", (self.0)())
    }
}

/// Tenths of a second: a moment or a length of time in four bytes a slot, good for 13 years.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Tenths(u32);

impl Tenths {
    /// `time`, rounded down.
    pub(super) fn of(time: Duration) -> Self {
        Self(u32::try_from(time.as_millis() / 100).unwrap_or(u32::MAX))
    }

    pub(super) fn since(self, earlier: Self) -> Self {
        Self(self.0.saturating_sub(earlier.0))
    }
}

/// Settings of a [`Manager`](super::Manager).
#[derive(Clone, Debug)]
pub struct Config {
    /// Slots of the pool.
    pub num_slots: u32,
    /// Which chunk goes first.
    pub policy: PolicyKind,
    /// Record [`Event`](super::Event)s.
    pub events: bool,
    /// Store a chunk only when it has been offered this often; below 2 every offer is stored.
    pub store_threshold: u32,
    /// Keys whose offers are counted.
    pub max_tracker_size: u32,
    /// Where not all keys of a store fit, store the first ones instead of none. vLLM's own connector
    /// moves its cursor past every key that it offered, so it never offers the others again.
    pub partial_admission: bool,
    /// Remember why keys are not in the pool, for [`Manager::why_missed`](super::Manager::why_missed);
    /// 16 bytes a slot.
    pub reasons: bool,
    /// A chunk whose write has not ended after this time (to a tenth of a second) answers *miss*
    /// instead of *later*. Its slot stays out of use: the copy may still be running.
    pub write_deadline: Duration,
    /// Source of time for the deadline.
    pub clock: Clock,
}

impl Config {
    /// The most slots a pool can have.
    pub const MAX_SLOTS: u32 = 1 << 30;

    /// The most keys whose offers can be counted; they take 72 bytes each, at once.
    pub const MAX_TRACKED: u32 = 1 << 24;

    /// LRU without events or limits on admission.
    pub fn new(num_slots: u32) -> Self {
        Self {
            num_slots,
            policy: PolicyKind::Lru,
            events: false,
            store_threshold: 0,
            max_tracker_size: 64_000,
            partial_admission: false,
            reasons: false,
            write_deadline: Duration::from_secs(600),
            clock: Clock::default(),
        }
    }

    pub(super) fn check(&self) -> Result<(), ManagerError> {
        match self.num_slots {
            0 => Err(ManagerError::NoSlots),
            n if n > Self::MAX_SLOTS => Err(ManagerError::TooManySlots { num_slots: n }),
            _ if self.store_threshold >= 2 && self.max_tracker_size == 0 => {
                Err(ManagerError::NoTracker {
                    store_threshold: self.store_threshold,
                })
            }
            _ if self.store_threshold >= 2 && self.max_tracker_size > Self::MAX_TRACKED => {
                Err(ManagerError::TooManyTracked {
                    max_tracker_size: self.max_tracker_size,
                })
            }
            _ => Ok(()),
        }
    }
}
