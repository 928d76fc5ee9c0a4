//! The engine over the CUDA backend: what a worker with a GPU uses.

use std::fmt;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvoffload_core::jobs::JobKind;
use kvoffload_core::layout::{KvLayout, PageRef, TensorLayout};
use parking_lot::Mutex;

use super::backend::CudaBackend;
use super::calibrate::{Calibration, Chooser, CopyPath, calibrate};
use super::driver::Device;
use super::error::DriverError;
use super::kernel::Kernel;
use super::mover::{Mistakes, Mover, Path};
use super::pinned::{PinTimes, PinnedRegion, Pinner, Pinning};
use super::shared::{Common, Counters, CudaFaults, TensorPlace};
use super::staging::Staging;
use crate::backend::Backend;
use crate::engine::{Engine, EngineConfig, NewJob, ShutdownReport, panic_text};
use crate::error::{StartError, SubmitError, WaitTimeout};
use crate::host::KeepAlive;
use crate::notices::Notices;
use crate::region::{Backing, Region};

/// Events made in advance: some for every job in the queues and every piece.
const EVENTS: usize = 512;
/// Staging memory of a direction is at least so large.
const LEAST_STAGING: u64 = 1 << 20;

/// A KV-cache tensor in the device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceTensor {
    /// Address of the first byte of its first block.
    pub address: u64,
    /// Its blocks.
    pub layout: TensorLayout,
}

/// Everything a [`CudaEngine`] is made from.
pub struct CudaConfig {
    /// Number of the device, as this process sees it.
    pub device: u32,
    /// The tensors to copy from and to.
    pub tensors: Vec<DeviceTensor>,
    /// Per KV group, the parts of a block, in the order they have in a slot.
    pub groups: Vec<Vec<PageRef>>,
    /// Blocks in a chunk.
    pub blocks_per_chunk: u32,
    /// Slots in the region.
    pub num_slots: u32,
    /// Bytes of a slot; see [`kvoffload_core::layout::slot_bytes`].
    pub slot_bytes: u64,
    /// Where the region's memory comes from.
    pub backing: Backing,
    /// Dropped when the engine's threads have ended, on one of them.
    pub keep_alive: Option<KeepAlive>,
    /// Which path jobs take.
    pub copy_path: CopyPath,
    /// Bytes of the device's memory to use for staging; 0: none, thus only the direct path.
    pub staging_bytes: u64,
    /// How host memory is made usable for the device.
    pub pinning: Pinning,
    /// Blocks of the staging kernel; `None`: the default.
    #[doc(hidden)]
    pub kernel_blocks: Option<u32>,
    /// Mistakes and failures: for tests only.
    pub faults: CudaFaults,
    /// Settings of queues and verification.
    pub engine: EngineConfig,
}

/// Stores chunks of tensors on a CUDA device into a region of its own, and loads them back.
///
/// All methods may be called from several threads. A submit records an event on the stream it is
/// given and queues the job; everything else happens on the engine's threads.
pub struct CudaEngine {
    engine: Engine,
    /// Its thread is stopped after the engine's, whose jobs may need memory that it has not reached.
    pinner: Mutex<Option<Pinner>>,
    common: Arc<Common>,
    chooser: Arc<Chooser>,
    ready_bytes: Arc<AtomicU64>,
    pin_times: Arc<PinTimes>,
    region_bytes: u64,
    skip_stream_wait: bool,
}

impl CudaEngine {
    /// Makes the region and starts the engine. Takes some 200 ms, whatever the region's size: its
    /// memory is touched and registered in the background.
    ///
    /// # Safety
    /// All blocks of all tensors are memory of the device and may be read and written at the given
    /// addresses until `keep_alive` is dropped. From a job's submit until its end is known, or until a
    /// stream that [`CudaEngine::wait_on`] was called for gets there, nobody else writes the blocks it
    /// stores from or touches the blocks it loads to, save what was enqueued before on the stream that
    /// the job was submitted with.
    ///
    /// # Errors
    /// See [`StartError`]; nothing remains then.
    pub unsafe fn new(config: CudaConfig) -> Result<Self, StartError> {
        // A driver that lacks a function makes its first call panic.
        // SAFETY: passed on to the caller.
        let made = catch_unwind(AssertUnwindSafe(|| unsafe { Self::make(config) }));
        made.unwrap_or_else(|panic| {
            Err(StartError::Panicked {
                message: panic_text(&*panic),
            })
        })
    }

    /// # Safety
    /// As for [`CudaEngine::new`].
    unsafe fn make(config: CudaConfig) -> Result<Self, StartError> {
        let CudaConfig {
            tensors,
            groups,
            num_slots,
            slot_bytes,
            backing,
            faults,
            ..
        } = config;
        check_tensors(&tensors)?;
        let is_private = matches!(backing, Backing::Private);
        if config.pinning == Pinning::Allocate && !is_private {
            return Err(StartError::Setting {
                field: "pinning",
                reason: "memory that ranks share cannot be the driver's: use \"register\", or set \
                         share_replicated_kv to false",
            });
        }
        let layout = Arc::new(KvLayout::new(
            tensors.iter().map(|tensor| tensor.layout).collect(),
            groups,
            config.blocks_per_chunk,
            num_slots,
            slot_bytes,
            Region::slots_per_piece(slot_bytes),
        )?);
        let staging = staging_of_one(config.staging_bytes, config.copy_path)?;
        let device = Device::open(config.device, EVENTS, faults.keep_capture_mode)?;
        let notices = Arc::new(Notices::default());
        let region = Arc::new(Region::with(backing, num_slots, slot_bytes)?);
        let mistakes = Mistakes {
            skip_staging_wait: faults.skip_staging_wait,
            skip_ring_wait: faults.skip_ring_wait,
            fail: faults.fail_path,
            fail_piece: faults.fail_piece,
        };
        let mut chooser = Chooser {
            wanted: config.copy_path,
            has_staging: true,
            calibration: None,
        };
        let made = device.with_context(|| {
            let places = tensors.iter().map(|tensor| {
                Ok(TensorPlace {
                    address: tensor.address,
                    allocation: device.allocation(tensor.address)?,
                })
            });
            let places = places.collect::<Result<Vec<_>, DriverError>>()?;
            let (movers, failure) = make_movers(&device, staging, config.kernel_blocks, mistakes)?;
            if let Some(error) = failure {
                notices.add(format!(
                    "no staging on the device ({error}): copies take the direct path, which is slow \
                     for small fragments. Lower staging_bytes or gpu_memory_utilization"
                ));
            }
            let mut movers = movers;
            chooser.has_staging = movers.iter().all(|mover| mover.chunk().is_some());
            if chooser.wanted == CopyPath::Auto && chooser.has_staging && faults.fail_path.is_none()
                && faults.fail_piece == 0
            {
                match calibrate(&device, &mut movers) {
                    Ok(calibration) => chooser.calibration = Some(calibration),
                    Err(error) if error.is_fatal() => return Err(error),
                    Err(error) => notices.add(format!(
                        "the copy paths could not be measured ({error}): fragments under 512 KiB are staged"
                    )),
                }
            }
            Ok((places, movers))
        });
        let (places, movers) = made.map_err(StartError::Driver)?;
        let chooser = Arc::new(chooser);
        let ready_bytes = Arc::new(AtomicU64::new(0));
        let pin_times = Arc::new(PinTimes::default());
        let pinned = PinnedRegion::new(
            Arc::clone(&region),
            Arc::clone(&device),
            Arc::clone(&notices),
            Arc::clone(&ready_bytes),
            Arc::clone(&pin_times),
        );
        let common = Arc::new(Common {
            device,
            layout: Arc::clone(&layout),
            tensors: places,
            after: Mutex::default(),
            counters: Counters::default(),
            notices,
        });
        let keep_alive = Arc::new(config.keep_alive);
        let pinner = pinned.start(config.pinning)?;
        let kinds = [JobKind::Store, JobKind::Load];
        let mut backends = kinds.into_iter().zip(movers).map(|(kind, mover)| {
            Box::new(CudaBackend::new(
                kind,
                mover,
                Arc::clone(&chooser),
                Arc::clone(&pinned),
                Arc::clone(&common),
                faults.clone(),
                Arc::clone(&keep_alive),
            )) as Box<dyn Backend>
        });
        let backends = std::array::from_fn(|_| backends.next().expect("one for each direction"));
        let engine = Engine::start(layout, &region, backends, &config.engine)?;
        Ok(Self {
            engine,
            pinner: Mutex::new(Some(pinner)),
            common,
            chooser,
            ready_bytes,
            pin_times,
            region_bytes: region.bytes(),
            skip_stream_wait: faults.skip_stream_wait,
        })
    }

    /// Queues a job whose copies come after everything that is on `stream` by now.
    ///
    /// # Safety
    /// `stream` is a stream of the device's primary context, or 0 for its default stream.
    ///
    /// # Errors
    /// See [`SubmitError`]; nothing has changed then.
    pub unsafe fn submit(
        &self,
        kind: JobKind,
        job: u64,
        new: NewJob,
        stream: usize,
    ) -> Result<(), SubmitError> {
        let device = &self.common.device;
        if device.is_lost() {
            return Err(SubmitError::DeviceLost { job });
        }
        // SAFETY: passed on to the caller.
        let mark = unsafe { device.mark(stream) }.map_err(|source| {
            self.common.note(&source);
            SubmitError::Driver { job, source }
        })?;
        self.engine
            .submit_after(kind, job, new, Some(Box::new(mark)))
    }

    /// Blocks until the copies of these jobs are in the device's queues, or over, and has `stream`
    /// wait for them: what is put on it afterwards finds them done. Their ends are still reported.
    ///
    /// # Safety
    /// As for [`CudaEngine::submit`].
    ///
    /// # Errors
    /// Some were not in the queues in time.
    pub unsafe fn wait_on(
        &self,
        jobs: &[u64],
        stream: usize,
        timeout: Duration,
    ) -> Result<(), WaitTimeout> {
        self.engine.wait_enqueued(jobs, timeout)?;
        let all_wait = {
            let device = &self.common.device;
            let after = self.common.after.lock();
            let ends = jobs.iter().filter_map(|job| after.get(job));
            let waited_for = ends.flat_map(|ends| ends.iter().flatten());
            // A job that is not there is over.
            waited_for
                .filter(|_| !self.skip_stream_wait)
                // SAFETY: passed on to the caller.
                .try_for_each(|event| unsafe { device.make_wait(stream, event) })
        };
        match all_wait {
            Ok(()) => Ok(()),
            Err(error) => {
                self.common.note(&error);
                self.common.notices.add(format!(
                    "a stream could not be made to wait ({error}): the caller waits instead"
                ));
                self.engine.wait(jobs, timeout)
            }
        }
    }

    /// Ends the engine, then the registrations, and unmaps the region; see [`Engine::shutdown`].
    pub fn shutdown(&self, timeout: Duration) -> ShutdownReport {
        let report = self.engine.shutdown(timeout);
        drop(self.pinner.lock().take());
        report
    }

    /// Counters that only this backend has.
    #[must_use]
    pub fn device_stats(&self) -> [(&'static str, u64); 14] {
        let counters = &self.common.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        [
            ("direct_jobs", read(&counters.direct_jobs)),
            ("staged_jobs", read(&counters.staged_jobs)),
            ("retries", read(&counters.retries)),
            ("pieces", read(&counters.pieces)),
            ("switched_pieces", read(&counters.switched_pieces)),
            ("row_copies", read(&counters.row_copies)),
            ("registration_waits", read(&counters.registration_waits)),
            ("registered_bytes", read(&self.ready_bytes)),
            ("region_bytes", self.region_bytes),
            ("touch_us", read(&self.pin_times.touch)),
            ("longest_touch_us", read(&self.pin_times.longest_touch)),
            ("register_us", read(&self.pin_times.register)),
            (
                "longest_register_us",
                read(&self.pin_times.longest_register),
            ),
            ("device_lost", u64::from(self.common.device.is_lost())),
        ]
    }

    /// What an operator should read, once.
    #[must_use]
    pub fn take_notices(&self) -> Vec<String> {
        self.common.notices.take()
    }

    /// Name of the device.
    #[must_use]
    pub fn device_name(&self) -> &str {
        self.common.device.name()
    }

    /// Whether there is staging memory.
    #[must_use]
    pub fn has_staging(&self) -> bool {
        self.chooser.has_staging
    }

    /// What was measured at the start, if anything was.
    #[must_use]
    pub fn calibration(&self) -> Option<&Calibration> {
        self.chooser.calibration.as_ref()
    }

    /// The path that a long job with fragments of this size takes.
    #[must_use]
    pub fn path_for(&self, kind: JobKind, fragment_bytes: u64) -> Path {
        let many = 64;
        self.chooser
            .choose(kind, many, many * fragment_bytes, 1 << 30)
    }
}

/// What is done with jobs is the engine's business; but they have to be submitted with a stream, by
/// [`CudaEngine::submit`]. (The backend refuses others.)
impl Deref for CudaEngine {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.engine
    }
}

impl fmt::Debug for CudaEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaEngine")
            .field("engine", &self.engine)
            .field("device", &self.common.device)
            .field("chooser", &self.chooser)
            .finish_non_exhaustive()
    }
}

/// Bytes of staging memory for each direction; `None`: no staging.
///
/// A path that was set does not change it: a failed copy is tried again on the other.
fn staging_of_one(staging_bytes: u64, path: CopyPath) -> Result<Option<u64>, StartError> {
    let field = "staging_bytes";
    if staging_bytes == 0 {
        if path == CopyPath::Only(Path::Staged) {
            let reason = "copy_path is \"staged\": give it at least 2 MiB";
            return Err(StartError::Setting { field, reason });
        }
        return Ok(None);
    }
    let bytes = staging_bytes / 2 / 4096 * 4096;
    if !(LEAST_STAGING..=4 << 30).contains(&bytes) {
        let reason = "give 2 MiB to 8 GiB, or 0 for no staging";
        return Err(StartError::Setting { field, reason });
    }
    Ok(Some(bytes))
}

/// One mover for each direction; with the reason if staging was wanted and could not be had.
fn make_movers(
    device: &Arc<Device>,
    staging: Option<u64>,
    blocks: Option<u32>,
    mistakes: Mistakes,
) -> Result<([Mover; 2], Option<DriverError>), DriverError> {
    let staging = staging.map(|bytes| {
        let kernel = Arc::new(Kernel::load(device, blocks)?);
        let stores = Staging::new(device, Arc::clone(&kernel), bytes)?;
        let loads = Staging::new(device, kernel, bytes)?;
        Ok((stores, loads))
    });
    let (stores, loads, failure) = match staging {
        None => (None, None, None),
        Some(Ok((stores, loads))) => (Some(stores), Some(loads), None),
        Some(Err(error)) if DriverError::is_fatal(&error) => return Err(error),
        Some(Err(error)) => (None, None, Some(error)),
    };
    let movers = [
        Mover::new(JobKind::Store, device, stores, mistakes)?,
        Mover::new(JobKind::Load, device, loads, mistakes)?,
    ];
    Ok((movers, failure))
}

fn check_tensors(tensors: &[DeviceTensor]) -> Result<(), StartError> {
    for (tensor, DeviceTensor { address, layout }) in tensors.iter().enumerate() {
        let bytes = u64::from(layout.num_blocks.saturating_sub(1))
            .saturating_mul(layout.block_stride)
            .saturating_add(layout.page_bytes);
        if *address == 0 || address.checked_add(bytes).is_none() {
            return Err(StartError::Address {
                tensor,
                address: *address as usize,
                bytes,
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
