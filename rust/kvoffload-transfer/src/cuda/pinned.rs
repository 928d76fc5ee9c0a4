//! The region, made usable for the device piece by piece, in the background.
//!
//! Touching and registering 40 GiB takes ten seconds, so nobody waits for it: a thread touches one
//! piece after the other, on the device's NUMA node, and registers it with the driver. A job is held
//! until the pieces it needs are ready; those are taken first. Pieces are small (about 16 MiB), so
//! that no registration holds the driver's lock for more than some milliseconds, and a copy never
//! crosses from one into the next, which the driver refuses.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::driver::Device;
use super::error::DriverError;
use super::numa;
use super::objects::HostMemory;
use crate::error::StartError;
use crate::notices::Notices;
use crate::region::Region;

/// What is touched in one system call: a process whose memory map is locked meanwhile waits for a
/// millisecond, not for a piece.
const TOUCH_BYTES: u64 = 4 << 20;
/// A step that takes so long has the kernel move memory about for huge pages.
const SLOW_TOUCH: Duration = Duration::from_millis(100);

/// What the driver does with memory that is not pinned.
const SLOW: &str = "copies from and to ordinary memory, AT A FRACTION OF THE SPEED";

/// How host memory is made usable for the device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Pinning {
    /// The region's pages are registered; where that is refused, as for [`Pinning::Allocate`], or, if
    /// others have the region mapped as well, as for [`Pinning::None`].
    #[default]
    Register,
    /// The driver allocates each piece; where that is refused, as for [`Pinning::None`].
    Allocate,
    /// Ordinary memory: copies are slow, and hold up the transfer thread.
    None,
}

/// Whether copies may use a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ready {
    Yes,
    Later,
    Never,
}

/// What making host memory usable has cost so far, in microseconds.
#[derive(Debug, Default)]
pub(super) struct PinTimes {
    pub(super) touch: AtomicU64,
    pub(super) register: AtomicU64,
    pub(super) longest_touch: AtomicU64,
    pub(super) longest_register: AtomicU64,
}

/// Runs something and adds its time to a sum and a maximum.
fn timed<T>(sum: &AtomicU64, longest: &AtomicU64, run: impl FnOnce() -> T) -> T {
    let started = Instant::now();
    let result = run();
    let taken = started.elapsed().as_micros() as u64;
    sum.fetch_add(taken, Ordering::Relaxed);
    longest.fetch_max(taken, Ordering::Relaxed);
    result
}

const WAITING: u8 = 0;
const REGISTERED: u8 = 1;
const ALLOCATED: u8 = 2;
const UNPINNED: u8 = 3;
const REFUSED: u8 = 4;

/// The region and the state of its pieces. Dropped when no copy can use it any more; the
/// registrations end before the memory does.
pub(super) struct PinnedRegion {
    region: Arc<Region>,
    device: Arc<Device>,
    piece_bytes: u64,
    states: Box<[AtomicU8]>,
    /// Pieces that a job waits for.
    wanted: Mutex<VecDeque<u32>>,
    stop: AtomicBool,
    times: Arc<PinTimes>,
    ready_bytes: Arc<AtomicU64>,
    pageable: AtomicBool,
    small_pages: AtomicBool,
    allocated: Mutex<Vec<HostMemory>>,
    notices: Arc<Notices>,
}

impl PinnedRegion {
    pub(super) fn new(
        region: Arc<Region>,
        device: Arc<Device>,
        notices: Arc<Notices>,
        ready_bytes: Arc<AtomicU64>,
        times: Arc<PinTimes>,
    ) -> Arc<Self> {
        let pieces = region.pieces().count();
        Arc::new(Self {
            piece_bytes: region.piece_bytes(),
            states: (0..pieces).map(|_| AtomicU8::new(WAITING)).collect(),
            region,
            device,
            wanted: Mutex::default(),
            stop: AtomicBool::new(false),
            ready_bytes,
            times,
            pageable: AtomicBool::new(false),
            small_pages: AtomicBool::new(false),
            allocated: Mutex::default(),
            notices,
        })
    }

    /// Whether some pieces are not pinned.
    pub(super) fn is_pageable(&self) -> bool {
        self.pageable.load(Ordering::Relaxed)
    }

    /// Address of a byte of the region. Once its piece is ready it does not change.
    pub(super) fn address(&self, offset: u64) -> usize {
        self.region.address(offset).expose_provenance()
    }

    /// Whether copies may use the piece that holds a byte; asks for it to be taken next if not.
    pub(super) fn ready(&self, offset: u64) -> Ready {
        let piece = (offset / self.piece_bytes) as usize;
        // Acquire: the address that an allocated piece got is seen with its state.
        match self.states[piece].load(Ordering::Acquire) {
            WAITING => {
                let mut wanted = self.wanted.lock();
                if !wanted.contains(&(piece as u32)) {
                    wanted.push_back(piece as u32);
                }
                Ready::Later
            }
            REFUSED => Ready::Never,
            _ => Ready::Yes,
        }
    }

    /// Asks for the pieces that hold these slots, in this order; `urgent`: before all others.
    pub(super) fn want(&self, slots: impl Iterator<Item = u64>, urgent: bool) {
        if self.ready_bytes.load(Ordering::Relaxed) == self.region.bytes() {
            return;
        }
        let slot_bytes = self.region.slot_bytes();
        let mut pieces: Vec<u32> = Vec::new();
        for slot in slots {
            // Exact: a region has fewer pieces than slots, which have 32-bit numbers.
            let piece = (slot * slot_bytes / self.piece_bytes) as u32;
            let waits = self.states[piece as usize].load(Ordering::Relaxed) == WAITING;
            if waits && pieces.last() != Some(&piece) {
                pieces.push(piece);
            }
        }
        let mut wanted = self.wanted.lock();
        // A queue that is as long as the region has nothing to gain from more.
        if urgent {
            pieces
                .iter()
                .rev()
                .for_each(|&piece| wanted.push_front(piece));
        } else if wanted.len() < self.states.len() {
            wanted.extend(pieces);
        }
    }

    /// Starts the thread.
    pub(super) fn start(self: &Arc<Self>, pinning: Pinning) -> Result<Pinner, StartError> {
        let region = Arc::clone(self);
        let thread = thread::Builder::new()
            .name("kvoffload-pin".to_owned())
            .spawn(move || region.run(pinning))
            .map_err(|source| StartError::System {
                what: "start a thread",
                source,
            })?;
        Ok(Pinner {
            region: Arc::clone(self),
            thread: Some(thread),
        })
    }

    /// The thread's body.
    fn run(&self, mut pinning: Pinning) {
        let _unfinished = Unfinished(self);
        if let Some(pci) = self.device.pci() {
            numa::stay_near(pci);
        }
        if let Err(error) = self.device.attach() {
            self.notices.add(format!(
                "the host memory cannot be registered: {error}; copies will be slow"
            ));
            pinning = Pinning::None;
        }
        let mut next = 0;
        while let Some(piece) = self.take(&mut next) {
            self.prepare(piece, &mut pinning);
        }
    }

    /// The piece to take next: one that somebody waits for, else the first that is left.
    fn take(&self, next: &mut u32) -> Option<u32> {
        let waiting = |piece: u32| self.states[piece as usize].load(Ordering::Relaxed) == WAITING;
        while !self.stop.load(Ordering::Relaxed) {
            let wanted = self.wanted.lock().pop_front();
            if let Some(piece) = wanted {
                if waiting(piece) {
                    return Some(piece);
                }
                continue;
            }
            let piece = *next;
            if piece as usize == self.states.len() {
                return None;
            }
            *next += 1;
            if waiting(piece) {
                return Some(piece);
            }
        }
        None
    }

    fn prepare(&self, piece: u32, pinning: &mut Pinning) {
        let start = u64::from(piece) * self.piece_bytes;
        let bytes = self.piece_bytes.min(self.region.bytes() - start);
        let state = loop {
            match *pinning {
                Pinning::Register => {
                    if !self.touch(start, bytes, piece) {
                        return;
                    }
                    match self.register(start, bytes) {
                        Ok(()) => break REGISTERED,
                        Err(error) if self.region.is_shared() => {
                            self.say(&error, "registering host memory", SLOW);
                            *pinning = Pinning::None;
                        }
                        Err(error) => {
                            self.say(&error, "registering host memory", "allocates it itself");
                            *pinning = Pinning::Allocate;
                        }
                    }
                }
                Pinning::Allocate => match HostMemory::new(&self.device, bytes as usize) {
                    Ok(memory) => {
                        self.region.move_piece(piece as usize, memory.base());
                        self.allocated.lock().push(memory);
                        break ALLOCATED;
                    }
                    Err(error) => {
                        self.say(&error, "allocating pinned host memory", SLOW);
                        *pinning = Pinning::None;
                    }
                },
                Pinning::None => {
                    if !self.touch(start, bytes, piece) {
                        return;
                    }
                    self.pageable.store(true, Ordering::Relaxed);
                    break UNPINNED;
                }
            }
        };
        self.ready_bytes.fetch_add(bytes, Ordering::Relaxed);
        // Release: see `ready`.
        self.states[piece as usize].store(state, Ordering::Release);
    }

    fn say(&self, error: &DriverError, what: &str, instead: &str) {
        if self.device.note(error) {
            self.notices
                .add(format!("the CUDA context is lost: {error}"));
        }
        self.notices.add(format!(
            "{what} was refused ({error}): from now on the driver {instead}"
        ));
    }

    /// Touches a piece; false if it should not or cannot be used.
    fn touch(&self, start: u64, bytes: u64, piece: u32) -> bool {
        let mut done = 0;
        while done < bytes {
            if self.stop.load(Ordering::Relaxed) {
                return false;
            }
            let step = TOUCH_BYTES.min(bytes - done);
            let times = &self.times;
            let started = Instant::now();
            let touched = timed(&times.touch, &times.longest_touch, || {
                self.region.touch(start + done, step)
            });
            if started.elapsed() > SLOW_TOUCH && !self.small_pages.swap(true, Ordering::Relaxed) {
                self.region.avoid_huge_pages();
            }
            if let Err(error) = touched {
                self.notices.add(format!(
                    "{bytes} bytes of host memory could not be had ({error}): jobs on their slots fail. \
                     Lower cpu_bytes_to_use"
                ));
                self.states[piece as usize].store(REFUSED, Ordering::Release);
                return false;
            }
            done += step;
        }
        true
    }

    fn register(&self, start: u64, bytes: u64) -> Result<(), DriverError> {
        let address = self.region.address(start);
        let times = &self.times;
        timed(&times.register, &times.longest_register, || {
            // SAFETY: the range is a piece of the region, which is mapped until after the registration
            // has ended in `drop`; pieces do not share pages.
            unsafe { self.device.register(address, bytes) }
        })
    }
}

/// Sees to it that nobody waits for a piece that will never be ready.
struct Unfinished<'a>(&'a PinnedRegion);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        let Self(region) = self;
        if region.stop.load(Ordering::Relaxed) {
            return;
        }
        let mut left = 0;
        for state in &region.states {
            let refused =
                state.compare_exchange(WAITING, REFUSED, Ordering::Release, Ordering::Relaxed);
            left += u32::from(refused.is_ok());
        }
        if left > 0 {
            region.notices.add(format!(
                "the thread that registers host memory ended early: jobs on {left} pieces fail"
            ));
        }
    }
}

impl Drop for PinnedRegion {
    fn drop(&mut self) {
        let (states, region) = (&self.states, &self.region);
        // An error leaves pages pinned until the process ends; a lost context has let go of them.
        let _ended = self.device.with_context(|| {
            for (piece, state) in states.iter().enumerate() {
                if state.load(Ordering::Relaxed) == REGISTERED {
                    let start = piece as u64 * self.piece_bytes;
                    // SAFETY: registered in `register`, and no copy is left: each lane holds an `Arc`
                    // of `self` for as long as it may copy.
                    unsafe { self.device.unregister(region.address(start)) };
                }
            }
            self.allocated.lock().clear();
            Ok(())
        });
    }
}

/// Owns the thread; dropping it stops the thread within a step.
pub(super) struct Pinner {
    region: Arc<PinnedRegion>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Pinner {
    fn drop(&mut self) {
        self.region.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}
