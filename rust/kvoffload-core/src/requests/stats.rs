//! Counts, and how fast things go.

use std::time::Duration;

use crate::manager::Missed;

/// Why a request was put off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deferral {
    /// Chunks that it needs are being written.
    Writing,
    /// Chunks that it needs are being loaded by another request.
    Loading,
}

/// Why a request did not find more in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissReason {
    /// The first chunk that was missing is not in the pool.
    Missed(Missed),
    /// It was being written, and waiting would have taken longer than computing, or the deadline had
    /// passed.
    TooSlow,
    /// The request, or a limit of it, does not want more.
    Policy,
}

impl MissReason {
    /// Every reason, in the order of [`RequestStats::miss_reasons`].
    pub const ALL: [Self; 7] = [
        Self::Missed(Missed::NeverStored),
        Self::Missed(Missed::Evicted),
        Self::Missed(Missed::Refused),
        Self::Missed(Missed::Failed),
        Self::Missed(Missed::Threshold),
        Self::TooSlow,
        Self::Policy,
    ];

    /// Its name in metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Missed(Missed::NeverStored) => "never_stored",
            Self::Missed(Missed::Evicted) => "evicted",
            Self::Missed(Missed::Refused) => "refused",
            Self::Missed(Missed::Failed) => "failed",
            Self::Missed(Missed::Threshold) => "offered_too_rarely",
            Self::TooSlow => "too_slow",
            Self::Policy => "policy",
        }
    }

    pub(super) fn number(self) -> usize {
        Self::ALL
            .iter()
            .position(|&reason| reason == self)
            .unwrap_or(0)
    }
}

/// Counts since the table was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestStats {
    /// Lookups that decided an admission: one for each, however often the engine asked before it had
    /// blocks.
    pub lookups: u64,
    /// Those that found something.
    pub hits: u64,
    /// Tokens asked for beyond what the GPU had.
    pub tokens_asked: u64,
    /// Tokens that were found.
    pub tokens_hit: u64,
    /// Lookups put off because chunks were being written.
    pub deferred_writing: u64,
    /// Lookups put off because another request was loading the chunks.
    pub deferred_loading: u64,
    /// Requests for which putting off ended with the deadline.
    pub deadlines: u64,
    /// Why lookups did not find more, by [`MissReason::ALL`].
    pub miss_reasons: [u64; MissReason::ALL.len()],
    /// Loads begun, ended well, failed, and voided by a reset.
    pub loads: JobCounts,
    /// Stores likewise.
    pub stores: JobCounts,
    /// Chunks that found no room, each time they were offered.
    pub chunks_refused: u64,
    /// Stores not begun because too many jobs were under way.
    pub jobs_refused: u64,
    /// Stores that had to be waited for before a block was written again.
    pub flushes: u64,
    /// Reports of jobs that were over, or by a rank that had reported.
    pub stray_reports: u64,
}

impl RequestStats {
    pub(super) fn defer(&mut self, why: Deferral) {
        match why {
            Deferral::Writing => self.deferred_writing += 1,
            Deferral::Loading => self.deferred_loading += 1,
        }
    }
}

/// Counts of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JobCounts {
    /// Begun.
    pub begun: u64,
    /// Every rank reported success.
    pub done: u64,
    /// Some rank reported a failure.
    pub failed: u64,
    /// A reset came in between.
    pub voided: u64,
    /// Chunks of jobs that were done.
    pub chunks: u64,
}

/// What has been observed of speeds, to choose between waiting and computing.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Seconds from a store's beginning to its last report.
    store: Option<f64>,
    /// Seconds to compute one token of a prompt.
    token: Option<f64>,
    last_step: Option<(Duration, u64)>,
}

/// Weight of the newest observation.
const NEWEST: f64 = 0.2;
/// A pause of the engine says nothing about its speed.
const PAUSE: f64 = 5.0;

impl Pace {
    pub(super) fn store_took(&mut self, seconds: f64) {
        blend(&mut self.store, seconds);
    }

    /// A step begins that computes this many tokens.
    pub(super) fn step(&mut self, now: Duration, tokens: u64) {
        if let Some((then, computed)) = self.last_step.replace((now, tokens))
            && computed > 0
        {
            let seconds = now.saturating_sub(then).as_secs_f64();
            if seconds < PAUSE {
                blend(&mut self.token, seconds / computed as f64);
            }
        }
    }

    /// Whether chunks that are being written are there before as many tokens are computed. Where
    /// nothing is known, waiting is bounded by its deadline.
    pub(super) fn worth_waiting(&self, tokens: u64) -> bool {
        match (self.store, self.token) {
            (Some(store), Some(token)) => store <= token * tokens as f64,
            _ => true,
        }
    }
}

fn blend(average: &mut Option<f64>, value: f64) {
    *average = Some(match *average {
        Some(average) => average + NEWEST * (value - average),
        None => value,
    });
}
