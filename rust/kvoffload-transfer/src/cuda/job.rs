//! One job on its way into the device's queues.

use std::sync::Arc;

use kvoffload_core::plan::CopyRun;
use kvoffload_core::pool::Slot;

use super::error::DriverError;
use super::mover::Path;
use super::objects::Event;
use crate::backend::{Ended, Work};
use crate::error::CopyError;

/// Events before or after all of a job, by path.
pub(super) type Ends = [Option<Arc<Event>>; 2];

pub(super) struct Job {
    pub(super) work: Work,
    /// What must have happened on the device before its blocks are touched; `None` once it has.
    pub(super) after: Option<Arc<Event>>,
    /// Chosen when its first piece is known.
    pub(super) path: Option<Path>,
    /// A range that was asked for and did not go into the piece.
    pub(super) held: Option<CopyRun>,
    /// Bytes that are not in the queues yet.
    pub(super) left: u64,
    /// Pieces that are in the queues.
    pub(super) pieces: u32,
    /// Before its first piece on each path.
    pub(super) start: Ends,
    /// After its newest piece on each path.
    pub(super) last: Ends,
    pub(super) rushed: bool,
    /// The first attempt's error.
    pub(super) retried: Option<String>,
    pub(super) fail: bool,
    /// No further piece of it is to be put into the queues.
    pub(super) cancelled: bool,
}

impl Job {
    /// Whether all its pieces are in the queues.
    pub(super) fn is_enqueued(&self) -> bool {
        self.left == 0
    }

    pub(super) fn new(work: Work, after: Option<Arc<Event>>) -> Self {
        Self {
            after,
            path: None,
            held: None,
            left: work.bytes,
            pieces: 0,
            start: Ends::default(),
            last: Ends::default(),
            rushed: false,
            retried: None,
            fail: false,
            cancelled: false,
            work,
        }
    }

    /// Puts a range back that came before what is held.
    pub(super) fn hold(&mut self, run: CopyRun) {
        let rest = self.held.take().map_or(0, |rest| rest.bytes);
        self.held = Some(CopyRun {
            bytes: run.bytes + rest,
            ..run
        });
    }

    /// Goes back to the first piece, on this path.
    pub(super) fn restart(&mut self, path: Path) {
        self.work.restart();
        self.path = Some(path);
        (self.left, self.pieces) = (self.work.bytes, 0);
        (self.held, self.start, self.last) = (None, Ends::default(), Ends::default());
    }

    /// Whether its last copy is done: of one that was cancelled, the last in the queues.
    pub(super) fn is_done(&self) -> Result<bool, DriverError> {
        if !self.is_enqueued() && !self.cancelled {
            return Ok(false);
        }
        for last in self.last.iter().flatten() {
            if !last.is_done()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Seconds between its first copy and its last, which is done.
    pub(super) fn seconds(&self) -> Result<f64, DriverError> {
        let mut most = 0.0;
        for start in self.start.iter().flatten() {
            for last in self.last.iter().flatten() {
                most = f64::max(most, start.seconds_until(last)?);
            }
        }
        Ok(most)
    }

    /// Its error, with a slot to name.
    pub(super) fn failed(&self, slot: Slot, reason: String) -> CopyError {
        let job = self.work.job;
        CopyError::Failed { job, slot, reason }
    }

    /// Whether all its bytes arrived, when its last copy is done.
    pub(super) fn outcome(&self) -> Result<(), CopyError> {
        let job = self.work.job;
        match self.is_enqueued() {
            true => Ok(()),
            false => Err(CopyError::Cancelled { job }),
        }
    }

    pub(super) fn ended(self, seconds: f64, outcome: Result<(), CopyError>) -> Ended {
        Ended {
            work: self.work,
            seconds,
            outcome,
        }
    }
}
