//! The host backend: the "device" is ordinary memory, and a copy is a `memcpy`.
//!
//! It serves engines without a GPU and tests. A source is read when its copy *runs*, on the lane's
//! thread, so that a missing ordering shows as wrong bytes; delays and faults can be injected.

pub mod engine;
pub mod faults;

use std::any::Any;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvoffload_core::jobs::JobKind;
use kvoffload_core::layout::KvLayout;
use kvoffload_core::plan::{CopyRun, RunCursor};
use kvoffload_core::pool::Slot;
use parking_lot::{Mutex, MutexGuard};

use crate::backend::{Backend, Ended, Poll, Progress, Work};
use crate::error::{CopyError, StartError};
use crate::region::Region;
use faults::{FaultPlan, Injector, JobFaults, LoadFault};

/// What one `poll` copies at most: a millisecond or two, so that a shutdown is noticed soon.
const STEP_BYTES: u64 = 8 << 20;

/// How long a stalled job lets its thread sleep; any wake-up comes sooner.
const STALLED: Duration = Duration::from_secs(3600);

/// Something that keeps the device tensors alive as long as a copy may touch them.
pub type KeepAlive = Box<dyn Any + Send + Sync>;

/// Memory of both sides, shared by the two directions.
pub(crate) struct HostMemory {
    layout: Arc<KvLayout>,
    tensors: Vec<Tensor>,
    region: Arc<Region>,
    loads: LoadFault,
    /// Held while copying if loads read slots that they have not fenced.
    one_at_a_time: Mutex<()>,
    _keep_alive: Option<KeepAlive>,
}

#[derive(Clone, Copy, Debug)]
struct Tensor {
    address: usize,
    /// From the first byte of the first block to the last byte of the last.
    bytes: u64,
}

impl HostMemory {
    /// # Safety
    /// `addresses[i]` is the first byte of tensor i of `layout`, and all its blocks may be read and
    /// written while `keep_alive` lives. While a job is live nobody else writes the blocks it reads
    /// or touches the blocks it writes.
    pub(crate) unsafe fn new(
        layout: &Arc<KvLayout>,
        addresses: &[usize],
        region: Arc<Region>,
        keep_alive: Option<KeepAlive>,
        loads: LoadFault,
    ) -> Result<Self, StartError> {
        let tensors = layout.tensors().iter().zip(addresses).enumerate();
        let tensors = tensors
            .map(|(tensor, (shape, &address))| {
                let bytes = u64::from(shape.num_blocks - 1) * shape.block_stride + shape.page_bytes;
                let fits = address != 0 && (address as u64).checked_add(bytes).is_some();
                let placed = fits.then_some(Tensor { address, bytes });
                placed.ok_or(StartError::Address {
                    tensor,
                    address,
                    bytes,
                })
            })
            .collect::<Result<_, _>>()?;
        if loads == LoadFault::Neighbour && region.num_slots() < 2 {
            return Err(StartError::Setting {
                field: "loads",
                reason: "a neighbour needs at least 2 slots",
            });
        }
        Ok(Self {
            layout: Arc::clone(layout),
            tensors,
            region,
            loads,
            one_at_a_time: Mutex::default(),
            _keep_alive: keep_alive,
        })
    }

    /// With [`LoadFault::Neighbour`], one direction at a time copies.
    fn alone(&self) -> Option<MutexGuard<'_, ()>> {
        (self.loads == LoadFault::Neighbour).then(|| self.one_at_a_time.lock())
    }

    /// Copies one run, or a part of one.
    fn copy(&self, kind: JobKind, run: CopyRun) -> Result<(), String> {
        let CopyRun {
            tensor,
            device_offset,
            region_offset,
            bytes,
        } = run;
        let target = self.tensors.get(tensor as usize);
        let inside =
            |offset: u64, size: u64| offset.checked_add(bytes).is_some_and(|end| end <= size);
        let Some(target) = target.filter(|target| {
            inside(device_offset, target.bytes) && inside(region_offset, self.region.bytes())
        }) else {
            return Err(format!("{run:?} is outside tensor or region"));
        };
        let device = ptr::with_exposed_provenance_mut::<u8>(target.address);
        // SAFETY: both ranges were just found to lie inside their memory; the region is mapped and
        // the tensors are kept alive by `self`. They do not overlap, because the region is a mapping
        // of its own. No other thread touches what this one writes, nor writes what it reads: inside
        // the engine the fence keeps conflicting jobs apart (under `LoadFault::Neighbour` also the
        // lock of `alone`), outside it the promise made to `new` does. The casts are exact: both
        // ranges lie in this process's memory.
        unsafe {
            let device = device.add(device_offset as usize);
            let host = self.region.base_ptr().add(region_offset as usize);
            match kind {
                JobKind::Store => ptr::copy_nonoverlapping(device, host, bytes as usize),
                JobKind::Load => ptr::copy_nonoverlapping(host, device, bytes as usize),
            }
        }
        Ok(())
    }

    /// Copies for a load each slot's part of the run from the slot after it.
    fn copy_neighbours(&self, run: CopyRun) -> Result<(), String> {
        let (slot_bytes, all) = (self.region.slot_bytes(), self.region.bytes());
        let mut done = 0;
        while done < run.bytes {
            let at = run.region_offset + done;
            let bytes = (slot_bytes - at % slot_bytes).min(run.bytes - done);
            let device_offset = run.device_offset + done;
            let region_offset = (at + slot_bytes) % all;
            self.copy(
                JobKind::Load,
                CopyRun {
                    device_offset,
                    region_offset,
                    bytes,
                    ..run
                },
            )?;
            done += bytes;
        }
        Ok(())
    }

    /// Flips one bit of the region.
    fn flip(&self, region_offset: u64) {
        if region_offset < self.region.bytes() {
            let _alone = self.alone();
            // SAFETY: inside the region; the job that wrote the slot has not been reported yet, so
            // the fence keeps every other job away from it.
            unsafe { *self.region.base_ptr().add(region_offset as usize) ^= 1 };
        }
    }
}

/// One direction of the host backend.
pub(crate) struct HostBackend {
    kind: JobKind,
    memory: Arc<HostMemory>,
    injector: Injector,
    running: Option<Running>,
    /// The job that ended last gets a flipped bit when it is retired.
    corrupt: bool,
}

impl HostBackend {
    pub(crate) fn new(kind: JobKind, memory: Arc<HostMemory>, faults: FaultPlan) -> Self {
        let injector = Injector::new(kind, faults);
        Self {
            kind,
            memory,
            injector,
            running: None,
            corrupt: false,
        }
    }
}

/// The job that is being copied.
struct Running {
    work: Work,
    faults: JobFaults,
    /// Not before this moment.
    resume: Instant,
    started: Option<Instant>,
    /// Bytes that are copied.
    moved: u64,
    half_way: bool,
    cancelled: bool,
}

impl Running {
    fn new(work: Work, faults: JobFaults) -> Self {
        Self {
            work,
            faults,
            resume: Instant::now() + faults.pause_before,
            started: None,
            moved: 0,
            half_way: false,
            cancelled: false,
        }
    }

    /// Copies on for a step; says when to go on, or `None` when all is copied.
    fn advance(&mut self, kind: JobKind, memory: &HostMemory) -> Result<Option<Poll>, CopyError> {
        let now = Instant::now();
        if self.cancelled {
            let job = self.work.job;
            return Err(CopyError::Cancelled { job });
        }
        if self.faults.stall {
            return Ok(Some(Poll::After(STALLED)));
        }
        if now < self.resume {
            return Ok(Some(Poll::After(self.resume - now)));
        }
        self.started.get_or_insert(now);
        let total = self.work.bytes;
        let stop = if self.half_way { total } else { total / 2 };
        self.copy(kind, memory, STEP_BYTES.min(stop - self.moved))?;
        if self.moved == stop && !self.half_way {
            if self.faults.fail && total > 0 {
                let next = self.work.next_run(&memory.layout, 1);
                let next = next.expect("a job with bytes has some left half-way");
                return Err(self.failed(memory, next, "an injected fault".to_owned()));
            }
            self.half_way = true;
            self.resume = Instant::now() + self.faults.pause_half_way;
        }
        let done = self.half_way && self.moved == total;
        Ok((!done).then_some(Poll::Again))
    }

    /// Copies the next `bytes` bytes.
    fn copy(&mut self, kind: JobKind, memory: &HostMemory, bytes: u64) -> Result<(), CopyError> {
        let _alone = memory.alone();
        let target = self.moved + bytes;
        while self.moved < target {
            let run = self.work.next_run(&memory.layout, target - self.moved);
            let run = run.expect("the runs of a job have all its bytes");
            let copied = match (kind, memory.loads) {
                (JobKind::Store, _) | (JobKind::Load, LoadFault::Copy) => memory.copy(kind, run),
                (JobKind::Load, LoadFault::Nothing) => Ok(()),
                (JobKind::Load, LoadFault::Neighbour) => memory.copy_neighbours(run),
            };
            copied.map_err(|reason| self.failed(memory, run, reason))?;
            self.moved += run.bytes;
        }
        Ok(())
    }

    /// The error of a copy that fails at this run.
    fn failed(&self, memory: &HostMemory, run: CopyRun, reason: String) -> CopyError {
        // A run's offsets are inside the region, whose slots have 32-bit numbers.
        let slot = Slot::new((run.region_offset / memory.region.slot_bytes()) as u32);
        CopyError::Failed {
            job: self.work.job,
            slot,
            reason,
        }
    }
}

impl Backend for HostBackend {
    fn submit(&mut self, work: Work) -> Result<(), CopyError> {
        debug_assert!(self.running.is_none(), "one job at a time");
        let faults = self.injector.next(work.job);
        self.running = Some(Running::new(work, faults));
        Ok(())
    }

    fn poll(&mut self, progress: &mut Progress) -> Poll {
        // The job stays in `self` while it is worked on, so that a panic does not lose it.
        let Some(running) = &mut self.running else {
            return Poll::After(STALLED);
        };
        let outcome = match running.advance(self.kind, &self.memory) {
            Ok(Some(poll)) => return poll,
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        let seconds = running
            .started
            .map_or(0.0, |started| started.elapsed().as_secs_f64());
        self.corrupt = running.faults.corrupt;
        let work = self.running.take().map(|running| running.work);
        progress.ended.extend(work.map(|work| Ended {
            work,
            seconds,
            outcome,
        }));
        Poll::Again
    }

    fn cancel(&mut self, job: u64) {
        // Copies are made in `poll` only, so the next one is the end of it.
        if let Some(running) = self.running.as_mut().filter(|held| held.work.job == job) {
            running.cancelled = true;
        }
    }

    fn retire(&mut self, work: &Work) {
        let layout = &*self.memory.layout;
        if std::mem::take(&mut self.corrupt)
            && let Some(run) = RunCursor::default().next(layout, &work.geometry(), 1)
        {
            self.memory.flip(run.region_offset);
        }
    }

    fn abandon(&mut self) -> Vec<Work> {
        self.running
            .take()
            .map(|running| running.work)
            .into_iter()
            .collect()
    }
}
