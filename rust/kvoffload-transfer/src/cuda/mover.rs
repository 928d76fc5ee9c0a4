//! Puts one direction's copies into the device's queues, piece by piece, on either path.
//!
//! - *direct*: the copy engine moves every range by itself: equally spaced ones as rows of one copy
//!   (`rows`), such copies in one batch (`cuMemcpy3DBatchAsync`), all other ranges in another
//!   (`cuMemcpyBatchAsync`, or one call per range on drivers that lack it). Best where ranges are long.
//! - *staged*: a kernel packs the ranges into staging memory on the device, or unpacks them from it,
//!   and the copy engine moves what lies together in host memory, whole slots mostly. The staging
//!   memory is a ring, so that packing one piece overlaps with copying another.
//!
//! | | first stream | then |
//! | --- | --- | --- |
//! | store, staged | `kernel`: wait for compute, pack | `copy`: wait for that, copy out |
//! | load, staged | `copy`: copy in | `kernel`: wait for that and for compute, unpack |
//! | direct | `direct`: wait for compute, copy | |
//!
//! A load waits for compute as well: a step that still runs may read the block that it writes.
//!
//! Where the kernel finds no room on the device, pieces had better go the direct way (`room`).

use std::sync::Arc;

use kvoffload_core::jobs::JobKind;

use super::batch::Batch;
use super::driver::Device;
use super::error::DriverError;
use super::fragment::Way;
use super::objects::{Event, Stream};
use super::piece::Piece;
use super::queue::{InFlight, Passage, Queue};
use super::room::Room;
use super::rows::Finder;
use super::staging::{Place, Staging};

/// How bytes are moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Path {
    /// Range by range, by the copy engine.
    Direct,
    /// Through staging chunks on the device.
    Staged,
}

impl Path {
    /// The other one.
    pub(super) fn other(self) -> Self {
        match self {
            Self::Direct => Self::Staged,
            Self::Staged => Self::Direct,
        }
    }

    /// `direct` or `staged`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Staged => "staged",
        }
    }
}

/// What was made of a piece.
pub(super) struct Sent {
    /// Before its first copy.
    pub(super) start: Option<Event>,
    /// After its last one.
    pub(super) done: Arc<Event>,
    /// How many of its copies were of several rows.
    pub(super) row_copies: u64,
}

/// Mistakes to make on purpose, for tests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Mistakes {
    pub(super) skip_staging_wait: bool,
    pub(super) skip_ring_wait: bool,
    pub(super) fail: Option<Path>,
    /// The staged piece of this number, from 1 on, fails between its two steps.
    pub(super) fail_piece: u64,
}

/// The error of what a test wants to fail.
pub(super) fn injected(what: &str) -> DriverError {
    DriverError {
        call: "an injected fault",
        code: 1,
        name: "CUDA_ERROR_INVALID_VALUE".to_owned(),
        text: what.to_owned(),
    }
}

/// One direction's streams and queues. All methods need the context to be current.
pub(super) struct Mover {
    kind: JobKind,
    device: Arc<Device>,
    copy: Stream,
    kernel: Stream,
    direct: Stream,
    staging: Option<Staging>,
    /// By path.
    queues: [Queue; 2],
    room: Room,
    /// The most bytes from row to row; 0 if there are no copies of several rows.
    longest_pitch: u64,
    /// Why there are none from now on, until it is taken.
    refusal: Option<DriverError>,
    /// Working memory.
    batch: Batch,
    finder: Finder,
    /// Staged pieces so far.
    staged: u64,
    mistakes: Mistakes,
}

impl Mover {
    pub(super) fn new(
        kind: JobKind,
        device: &Arc<Device>,
        staging: Option<Staging>,
        mistakes: Mistakes,
    ) -> Result<Self, DriverError> {
        Ok(Self {
            kind,
            device: Arc::clone(device),
            copy: device.stream(false)?,
            // The kernel is short, and the copy engine waits for it: it goes before the engine's own.
            kernel: device.stream(true)?,
            // Another priority than `copy`, so that the device does not queue the two together.
            direct: device.stream(true)?,
            staging,
            queues: Default::default(),
            room: Room::new(kind),
            longest_pitch: device.longest_pitch().unwrap_or(0),
            refusal: None,
            batch: Batch::new(kind),
            finder: Finder::default(),
            staged: 0,
            mistakes,
        })
    }

    /// Bytes of the longest staged piece; `None` without staging.
    pub(super) fn chunk(&self) -> Option<u64> {
        self.staging.as_ref().map(Staging::chunk)
    }

    /// Whether another piece keeps to the pace: what is in a queue cannot be overtaken.
    pub(super) fn has_room(&self, path: Path) -> bool {
        self.queues[path as usize].has_room()
    }

    /// Whether staged pieces find no room, or may find none. Changes in [`Mover::reap`] only.
    pub(super) fn starves(&self) -> bool {
        self.room.is_short()
    }

    /// Sends an empty kernel ahead; `None` without staging.
    fn send_probe(
        staging: Option<&Staging>,
        kernel: &Stream,
        device: &Arc<Device>,
    ) -> Result<Option<Passage>, DriverError> {
        let Some(staging) = staging else {
            return Ok(None);
        };
        staging.kernel().launch_empty(kernel)?;
        let over = Arc::new(kernel.record(device)?);
        Ok(Some(Passage::new([None, None], over, 0)))
    }

    /// Why the driver has refused a copy of several rows; once.
    pub(super) fn take_refusal(&mut self) -> Option<DriverError> {
        self.refusal.take()
    }

    /// Whether another piece can be staged at all: its fragments need a place in the list.
    pub(super) fn can_stage(&self) -> bool {
        self.staging.as_ref().is_none_or(Staging::has_room)
    }

    /// Bytes that the device has not copied yet, as far as is known.
    pub(super) fn bytes(&self) -> u64 {
        self.queues.iter().map(Queue::bytes).sum()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.queues.iter().all(Queue::is_empty)
    }

    /// Notes which pieces are done, and whether staged ones starve.
    pub(super) fn reap(&mut self) -> Result<(), DriverError> {
        self.pop_done()?;
        let (staging, kernel, device) = (self.staging.as_ref(), &self.kernel, &self.device);
        self.room.look(&mut self.queues[Path::Staged as usize], || {
            Self::send_probe(staging, kernel, device)
        })
    }

    fn pop_done(&mut self) -> Result<(), DriverError> {
        for queue in &mut self.queues {
            while let Some(piece) = queue.pop_done()? {
                if let (Some(place), Some(staging)) = (&piece.place, &mut self.staging) {
                    staging.release(place);
                }
            }
        }
        Ok(())
    }

    /// Blocks until nothing is in the queues: for failures and the end only.
    pub(super) fn drain(&mut self) -> Result<(), DriverError> {
        let streams = [&self.copy, &self.kernel, &self.direct];
        let drained = streams.map(Stream::synchronize);
        drained.into_iter().collect::<Result<(), _>>()?;
        self.room.forget_probe();
        self.pop_done()?;
        if let (true, Some(staging)) = (self.is_idle(), &mut self.staging) {
            // A piece that failed half-way left fragments in the list.
            staging.release_all();
        }
        Ok(())
    }

    /// Puts a piece into a path's queues. `after` has to come before the device's blocks are touched
    /// (once for each path: its later pieces come after the first); `timed` asks for an event at the
    /// start.
    ///
    /// # Safety
    /// Until the piece is done, its ranges may be read and written, and nothing else that does so
    /// conflicts, save what `after` waits for. The host's ranges are known to the driver as pinned,
    /// unless `pageable` says otherwise, and lie in the piece of the region that their homes say.
    pub(super) unsafe fn send(
        &mut self,
        path: Path,
        piece: &Piece,
        after: Option<&Arc<Event>>,
        timed: bool,
        pageable: bool,
    ) -> Result<Sent, DriverError> {
        if self.mistakes.fail == Some(path) {
            return Err(injected(path.name()));
        }
        match path {
            // SAFETY: passed on to the caller.
            Path::Direct => unsafe { self.send_direct(piece, after, timed, pageable) },
            // SAFETY: passed on to the caller.
            Path::Staged => unsafe { self.send_staged(piece, after, timed, pageable) },
        }
    }

    unsafe fn send_direct(
        &mut self,
        piece: &Piece,
        after: Option<&Arc<Event>>,
        timed: bool,
        pageable: bool,
    ) -> Result<Sent, DriverError> {
        if let Some(event) = after {
            self.direct.wait(event)?;
        }
        let start = timed
            .then(|| self.direct.record(&self.device))
            .transpose()?;
        // SAFETY: passed on to the caller.
        let row_copies = unsafe { self.copy_ranges(piece, pageable) }?;
        let done = Arc::new(self.direct.record(&self.device)?);
        self.note(Path::Direct, &done, piece, None, None);
        Ok(Sent {
            start,
            done,
            row_copies,
        })
    }

    /// Copies each range between its places on both sides; says how many copies were of several rows.
    unsafe fn copy_ranges(&mut self, piece: &Piece, pageable: bool) -> Result<u64, DriverError> {
        // The driver copies pageable memory at once, and rows of it one by one.
        let longest = if pageable { 0 } else { self.longest_pitch };
        let (mut many, few) = self.finder.find(piece, self.kind, longest);
        let mut row_copies = many.len() as u64;
        if !many.is_empty() {
            // SAFETY: passed on to the caller.
            match unsafe { self.direct.copy_rows(self.kind, many) } {
                Ok(()) => many = &[],
                Err(error) if error.is_fatal() => return Err(error),
                // Such as memory of a kind in which it takes none. The batch copies all of them, also
                // what was copied before the refusal.
                Err(error) => {
                    row_copies = 0;
                    self.longest_pitch = 0;
                    self.refusal = Some(error);
                }
            }
        }
        for rows in many.iter().chain(few) {
            for (device, host) in rows.each() {
                self.batch.add(device, host, rows.width);
                if self.batch.is_full() {
                    // SAFETY: passed on to the caller.
                    unsafe { self.direct.copy(&mut self.batch, pageable) }?;
                }
            }
        }
        // SAFETY: passed on to the caller.
        unsafe { self.direct.copy(&mut self.batch, pageable) }?;
        Ok(row_copies)
    }

    /// Notes a piece that is in the queues.
    fn note(
        &mut self,
        path: Path,
        done: &Arc<Event>,
        piece: &Piece,
        place: Option<Place>,
        passage: Option<Passage>,
    ) {
        self.queues[path as usize].push(InFlight {
            done: Arc::clone(done),
            bytes: piece.bytes(),
            place,
            passage,
        });
    }

    unsafe fn send_staged(
        &mut self,
        piece: &Piece,
        after: Option<&Arc<Event>>,
        timed: bool,
        pageable: bool,
    ) -> Result<Sent, DriverError> {
        let Some(staging) = &mut self.staging else {
            return Err(DriverError {
                call: "the staged path",
                code: 2,
                name: "CUDA_ERROR_OUT_OF_MEMORY".to_owned(),
                text: "there is no staging memory".to_owned(),
            });
        };
        let place = staging.place(piece);
        let Place {
            list,
            count,
            longest,
            chunk,
            ..
        } = place;
        let kernel = Arc::clone(staging.kernel());
        let last_use = self.queues[Path::Staged as usize].last_use(&place);
        let (first_stream, way) = match self.kind {
            JobKind::Store => (&self.kernel, Way::Pack),
            JobKind::Load => (&self.copy, Way::Unpack),
        };
        if let Some(event) = last_use.filter(|_| !self.mistakes.skip_ring_wait) {
            first_stream.wait(&event)?;
        }
        if let (JobKind::Store, Some(event)) = (self.kind, after) {
            self.kernel.wait(event)?;
        }
        let begun = timed
            .then(|| first_stream.record(&self.device))
            .transpose()?;
        self.staged += 1;
        let fails = self.staged == self.mistakes.fail_piece;
        // Before the kernel and after it, besides what the engine computes: see `Passage`.
        let (moved, over);
        let done = match self.kind {
            JobKind::Store => {
                // SAFETY: the list was written above and is not used again before this piece is done;
                // fragments lie in the piece's ranges, by the caller's promise, and in the staging bytes
                // that `last_use` leaves to this piece.
                unsafe { kernel.launch(&self.kernel, way, list, count, longest, chunk) }?;
                if fails {
                    return Err(injected("after packing"));
                }
                let packed = self.kernel.record(&self.device)?;
                if !self.mistakes.skip_staging_wait {
                    self.copy.wait(&packed)?;
                }
                (moved, over) = (None, Some(Arc::new(packed)));
                // SAFETY: passed on to the caller.
                unsafe { self.copy_spans(piece, chunk, pageable) }?;
                self.copy.record(&self.device)?
            }
            JobKind::Load => {
                // SAFETY: passed on to the caller.
                unsafe { self.copy_spans(piece, chunk, pageable) }?;
                if fails {
                    return Err(injected("before unpacking"));
                }
                let copied = self.copy.record(&self.device)?;
                if !self.mistakes.skip_staging_wait {
                    self.kernel.wait(&copied)?;
                }
                (moved, over) = (Some(Arc::new(copied)), None);
                if let Some(event) = after {
                    self.kernel.wait(event)?;
                }
                // SAFETY: as above.
                unsafe { kernel.launch(&self.kernel, way, list, count, longest, chunk) }?;
                self.kernel.record(&self.device)?
            }
        };
        let done = Arc::new(done);
        let over = over.unwrap_or_else(|| Arc::clone(&done));
        let passage = Passage::new([after.cloned(), moved], over, piece.bytes());
        self.note(Path::Staged, &done, piece, Some(place), Some(passage));
        Ok(Sent {
            start: begun,
            done,
            row_copies: 0,
        })
    }

    /// Copies between the chunk at `chunk` and host memory, as long ranges as there are.
    unsafe fn copy_spans(
        &mut self,
        piece: &Piece,
        chunk: u64,
        pageable: bool,
    ) -> Result<(), DriverError> {
        let mut ranges = piece.ranges.iter().peekable();
        while let Some(first) = ranges.next() {
            let mut bytes = first.bytes;
            while let Some(next) = ranges.next_if(|next| next.follows) {
                bytes += next.bytes;
            }
            self.batch.add(chunk + first.staging, first.host, bytes);
            if self.batch.is_full() {
                // SAFETY: passed on to the caller.
                unsafe { self.copy.copy(&mut self.batch, pageable) }?;
            }
        }
        // SAFETY: passed on to the caller.
        unsafe { self.copy.copy(&mut self.batch, pageable) }
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        // Nothing of it may be in use when the staging memory goes. Where it cannot be waited for, the
        // driver itself waits before it frees memory.
        self.drain().ok();
    }
}
