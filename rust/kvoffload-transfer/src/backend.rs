//! What the engine asks of whoever copies bytes.
//!
//! One [`Backend`] value serves one direction and belongs to that direction's thread, so it needs no
//! locks. It never waits: [`Backend::submit`] takes a job over, [`Backend::poll`] moves the jobs it
//! has on for a bounded time and hands back those that ended. Copies are made from the job's numbers
//! as they are asked for ([`Work::next_run`], [`Work::pages`]), so that a large job needs no plan. The
//! host backend copies inside `poll`; a backend for a device enqueues there, and asks its events. What a
//! device has to wait for before a copy is known on the caller's thread only: whoever wraps the engine for
//! it records an event there and gives it to [`Engine::submit_after`](crate::Engine::submit_after) as the
//! job's [`Mark`].

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use kvoffload_core::layout::KvLayout;
use kvoffload_core::plan::{CopyRun, Geometry, Pages, RunCursor};
use kvoffload_core::pool::Slot;

use crate::engine::JobIds;
use crate::error::CopyError;
use crate::verify::StoreNumber;

/// What a backend is to know about the moment of a job's submit.
pub type Mark = Box<dyn Any + Send + Sync>;

/// One job's copies, on their way through a backend and back.
#[derive(Debug)]
pub struct Work {
    /// The job's id.
    pub job: u64,
    /// Bytes of all its copies together.
    pub bytes: u64,
    /// What was given to the engine with it.
    pub mark: Option<Mark>,
    /// What the job named; the engine needs it again when the copies are done.
    pub(crate) ids: Arc<JobIds>,
    /// Of a store.
    pub(crate) store: Option<StoreNumber>,
    cursor: RunCursor,
}

impl Work {
    pub(crate) fn new(job: u64, layout: &KvLayout, ids: Arc<JobIds>, mark: Option<Mark>) -> Self {
        Self {
            job,
            bytes: ids.geometry().bytes(layout),
            mark,
            ids,
            store: None,
            cursor: RunCursor::default(),
        }
    }

    /// The next copy, of at most `limit` bytes (at least 1); `None` when there are no more. See
    /// [`RunCursor::next`]. `layout` must be the engine's.
    #[inline]
    pub fn next_run(&mut self, layout: &KvLayout, limit: u64) -> Option<CopyRun> {
        self.cursor.next(layout, &self.ids.geometry(), limit)
    }

    /// Several of the next copies at a time, where that can be; see [`RunCursor::pages`].
    #[inline]
    pub fn pages<'l>(&mut self, layout: &'l KvLayout) -> Option<Pages<'l>> {
        self.cursor.pages(layout, &self.ids.geometry())
    }

    /// So many of them have been taken; see [`RunCursor::skip`].
    #[inline]
    pub fn skip(&mut self, pages: usize) {
        self.cursor.skip(pages);
    }

    /// From now on the copies come in the order of each group's slots; none may have been taken yet. See
    /// [`RunCursor::by_slot`].
    pub fn sort_by_slot(&mut self, layout: &KvLayout) {
        self.cursor = RunCursor::by_slot(layout, &self.ids.geometry());
    }

    /// The job's slots in the order of its copies.
    pub fn slots(&self) -> impl Iterator<Item = Slot> {
        self.cursor.slots(self.ids.geometry())
    }

    /// Goes back to the first copy.
    pub fn restart(&mut self) {
        self.cursor.restart();
    }

    /// What the job named.
    #[must_use]
    pub fn geometry(&self) -> Geometry<'_> {
        self.ids.geometry()
    }
}

/// A job whose copies are over: nothing of them touches memory any more.
#[derive(Debug)]
pub struct Ended {
    /// What was handed to [`Backend::submit`].
    pub work: Work,
    /// Seconds between the first copy's start and the last one's end.
    pub seconds: f64,
    /// Whether all bytes arrived.
    pub outcome: Result<(), CopyError>,
}

/// What became of a backend's jobs, in the order in which it happened.
#[derive(Debug, Default)]
pub struct Progress {
    /// Jobs that are over.
    pub ended: VecDeque<Ended>,
    /// Jobs that are not over, but all of whose copies are in the device's queues now: what is put
    /// into those queues later finds them done. The host backend has no such queues.
    pub enqueued: Vec<u64>,
}

/// When [`Backend::poll`] should be called again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Poll {
    /// At once: there is more to do.
    Again,
    /// Not before this time has passed, if no other job is submitted.
    After(Duration),
}

/// One direction's copies. All methods are called from that direction's thread alone.
pub trait Backend: Send {
    /// Called once, before everything else: for what belongs to a thread.
    fn start(&mut self) {}

    /// How many jobs it wants to hold at once, at least 1.
    fn depth(&self) -> usize {
        1
    }

    /// Whether it takes jobs beyond its depth if somebody waits for them to be enqueued.
    fn takes_rushed(&self) -> bool {
        false
    }

    /// How long the thread looks for jobs by itself after the last one, instead of being woken.
    fn linger(&self) -> Duration {
        Duration::ZERO
    }

    /// Takes over a job's copies, without waiting for them. Jobs in it at the same time never
    /// conflict: the engine holds back a job whose blocks or slots another live job uses.
    ///
    /// # Errors
    /// The copies cannot be made; none has been or will be.
    fn submit(&mut self, work: Work) -> Result<(), CopyError>;

    /// Moves the jobs it holds on for a bounded time (some milliseconds) and appends what became of
    /// them. Every job ends once, here or in [`Backend::abandon`].
    fn poll(&mut self, progress: &mut Progress) -> Poll;

    /// Somebody waits until this job's copies are in the device's queues: the job should be put into
    /// them as a whole, without regard to pace. It is one that the backend holds.
    fn rush(&mut self, _job: u64) {}

    /// Nobody wants this job any more: no further copy of it should be made. It still ends in
    /// [`Backend::poll`], once nothing of it touches memory: with [`CopyError::Cancelled`], or well if
    /// all its copies were made already. It may be a job that the backend does not hold, which is
    /// ignored.
    fn cancel(&mut self, job: u64);

    /// A job that ended well is about to be reported; the engine has done all it does with its slots.
    fn retire(&mut self, _work: &Work) {}

    /// Gives up all jobs it holds and returns them. It comes back only when none of their copies
    /// touches memory any more; called after a panic and when a shutdown's deadline has passed.
    fn abandon(&mut self) -> Vec<Work>;
}
