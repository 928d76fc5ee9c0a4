//! The CUDA driver: found at run time, never linked, and every answer turned into a typed error.
//!
//! Nothing outside this folder calls the driver. `cudarc` panics where libcuda or a symbol is
//! missing, so [`Device::open`] asks whether the library is there and whether the driver is recent
//! enough before anything else is called.
//!
//! vLLM captures CUDA graphs in global mode after its worker has been built. Until a thread has
//! exchanged its capture mode, calls such as `cuEventQuery` and `cuMemHostRegister` from it break a
//! capture that runs on another thread. So each of our threads begins with [`Device::attach`].

use std::ffi::{CStr, c_char, c_void};
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::sys;
use parking_lot::Mutex;
use thiserror::Error;

/// The oldest driver whose loader takes our kernels (PTX 7.0): CUDA 11.0.
const OLDEST_DRIVER: i32 = 11_000;
/// The first driver that has `cuMemcpyBatchAsync`.
const BATCH_DRIVER: i32 = 12_080;

/// A driver call that failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{call} failed with {name} ({code}: {text})")]
pub struct DriverError {
    /// The function that was called.
    pub call: &'static str,
    /// The driver's number for the error.
    pub code: u32,
    /// The driver's name for it, such as `CUDA_ERROR_OUT_OF_MEMORY`.
    pub name: String,
    /// The driver's description of it.
    pub text: String,
}

impl DriverError {
    /// Whether the context is gone: no call will succeed until the process has been started again.
    #[must_use]
    pub fn is_fatal(&self) -> bool {
        // Deinitialised, invalid or destroyed context, the uncorrectable memory and hardware errors,
        // every kind of failed launch that the driver calls sticky, and the unknown error.
        matches!(self.code, 4 | 201 | 214 | 220 | 226 | 700 | 702 | 709..=710 | 714..=719 | 721 | 999)
    }
}

/// Why CUDA cannot be used in this process.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CudaUnavailable {
    /// The driver's library is not on this machine.
    #[error("no CUDA driver was found: libcuda.so is not on this machine")]
    NoLibrary,
    /// The driver does not start.
    #[error("the CUDA driver does not start: {0}")]
    Init(DriverError),
    /// The driver is too old for this package.
    #[error("the CUDA driver is too old: it supports CUDA {}.{}, at least 11.0 is needed", .version / 1000, .version % 1000 / 10)]
    TooOld {
        /// 1000 times the major version plus 10 times the minor one.
        version: i32,
    },
    /// No such device.
    #[error("there is no CUDA device {ordinal}: this process sees {devices}")]
    NoDevice {
        /// Number of the device that was asked for.
        ordinal: u32,
        /// How many there are.
        devices: i32,
    },
}

/// Turns a driver's answer into a result.
pub(super) fn check(call: &'static str, answer: sys::CUresult) -> Result<(), DriverError> {
    if answer == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let text = |ask: unsafe fn(sys::CUresult, *mut *const c_char) -> sys::CUresult| {
        let mut text: *const c_char = ptr::null();
        // SAFETY: `text` is a place for one pointer; what the driver puts there is null or a string
        // that it never frees.
        unsafe {
            ask(answer, &raw mut text);
            if text.is_null() {
                "unknown".to_owned()
            } else {
                CStr::from_ptr(text).to_string_lossy().into_owned()
            }
        }
    };
    Err(DriverError {
        call,
        code: answer as u32,
        name: text(sys::cuGetErrorName),
        text: text(sys::cuGetErrorString),
    })
}

/// Calls a driver function by name and checks its answer. To be used inside `unsafe`.
macro_rules! call {
    ($function:ident ( $($argument:expr),* $(,)? )) => {
        $crate::cuda::driver::check(
            stringify!($function),
            cudarc::driver::sys::$function($($argument),*),
        )
    };
}
pub(super) use call;

/// Version of the driver, once it has been found, started and found recent enough.
fn start_driver() -> Result<i32, CudaUnavailable> {
    // SAFETY: opening the library runs its initialisers, as the first use of CUDA in any process does.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaUnavailable::NoLibrary);
    }
    let mut version = 0;
    // SAFETY: `version` is a place for one integer; both functions may be called at any time, and every
    // driver since CUDA 2.2 has them.
    unsafe {
        call!(cuInit(0)).map_err(CudaUnavailable::Init)?;
        call!(cuDriverGetVersion(&raw mut version)).map_err(CudaUnavailable::Init)?;
    }
    if version < OLDEST_DRIVER {
        return Err(CudaUnavailable::TooOld { version });
    }
    Ok(version)
}

/// Why CUDA cannot be used here; `None` where it can. Makes no context.
#[must_use]
pub fn unavailable() -> Option<CudaUnavailable> {
    start_driver().and_then(|_| device_count()).err()
}

fn device_count() -> Result<i32, CudaUnavailable> {
    let mut devices = 0;
    // SAFETY: the driver has been started, and `devices` is a place for one integer.
    unsafe { call!(cuDeviceGetCount(&raw mut devices)) }.map_err(CudaUnavailable::Init)?;
    if devices == 0 {
        return Err(CudaUnavailable::NoDevice {
            ordinal: 0,
            devices,
        });
    }
    Ok(devices)
}

/// One device and its primary context, which is also PyTorch's. Retained until the last owner goes.
pub(super) struct Device {
    handle: sys::CUdevice,
    context: sys::CUcontext,
    name: String,
    pci: Option<String>,
    has_batch: bool,
    /// The context is gone.
    lost: AtomicBool,
    free_events: Mutex<Vec<RawEvent>>,
    /// Whether threads keep the capture mode they started with: for a test that shows what it does.
    keep_capture_mode: bool,
}

// SAFETY: the driver's handles are not tied to threads, and every driver function may be called from
// any thread. All fields that change are behind a lock or atomic.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

#[derive(Clone, Copy)]
struct RawEvent(sys::CUevent);
// SAFETY: an event handle may be used from any thread.
unsafe impl Send for RawEvent {}
// SAFETY: as above; the driver locks what is behind it.
unsafe impl Sync for RawEvent {}

impl Device {
    /// Opens a device by the number that the process sees (as PyTorch numbers them), and makes
    /// `events` events in advance.
    pub(super) fn open(
        ordinal: u32,
        events: usize,
        keep_capture_mode: bool,
    ) -> Result<Arc<Self>, CudaUnavailable> {
        let version = start_driver()?;
        let devices = device_count()?;
        let number = i32::try_from(ordinal)
            .ok()
            .filter(|&number| number < devices)
            .ok_or(CudaUnavailable::NoDevice { ordinal, devices })?;
        let mut handle = 0;
        let mut context = ptr::null_mut();
        let (mut name, mut pci) = ([0u8; 128], [0u8; 32]);
        // SAFETY: every pointer is to a place of the size that is passed or implied; the number is one
        // of a device.
        let pci_known = unsafe {
            call!(cuDeviceGet(&raw mut handle, number)).map_err(CudaUnavailable::Init)?;
            call!(cuDeviceGetName(name.as_mut_ptr().cast(), 128, handle))
                .map_err(CudaUnavailable::Init)?;
            let pci_known = call!(cuDeviceGetPCIBusId(pci.as_mut_ptr().cast(), 32, handle)).is_ok();
            call!(cuDevicePrimaryCtxRetain(&raw mut context, handle))
                .map_err(CudaUnavailable::Init)?;
            pci_known
        };
        let text = |bytes: &[u8]| {
            CStr::from_bytes_until_nul(bytes).map_or_else(
                |_| String::new(),
                |text| text.to_string_lossy().into_owned(),
            )
        };
        let device = Arc::new(Self {
            handle,
            context,
            name: text(&name),
            pci: pci_known.then(|| text(&pci).to_lowercase()),
            has_batch: version >= BATCH_DRIVER,
            lost: AtomicBool::new(false),
            free_events: Mutex::default(),
            keep_capture_mode,
        });
        let made = device.with_context(|| {
            let made: Result<Vec<_>, _> = (0..events).map(|_| make_event()).collect();
            made.map(|made| *device.free_events.lock() = made)
        });
        made.map_err(CudaUnavailable::Init)?;
        Ok(device)
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The device's address on the PCI bus, in lower case.
    pub(super) fn pci(&self) -> Option<&str> {
        self.pci.as_deref()
    }

    pub(super) fn multiprocessors(&self) -> Result<u32, DriverError> {
        let what = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let mut count = 0;
        // SAFETY: a place for one number; the device is open.
        unsafe { call!(cuDeviceGetAttribute(&raw mut count, what, self.handle))? };
        Ok(u32::try_from(count).unwrap_or(1).max(1))
    }

    /// Whether the driver copies many ranges in one call.
    pub(super) fn has_batch(&self) -> bool {
        self.has_batch
    }

    /// Whether a fatal error has been seen.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Notes a fatal error; true the first time.
    pub(super) fn note(&self, error: &DriverError) -> bool {
        error.is_fatal() && !self.lost.swap(true, Ordering::Relaxed)
    }

    /// Makes the context current on a thread of ours, for good, and keeps the thread's driver calls
    /// out of other threads' graph captures.
    pub(super) fn attach(&self) -> Result<(), DriverError> {
        // SAFETY: the context is retained by `self`; the mode is a place for one value.
        unsafe {
            call!(cuCtxSetCurrent(self.context))?;
            if !self.keep_capture_mode {
                let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
                call!(cuThreadExchangeStreamCaptureMode(&raw mut mode))?;
            }
        }
        Ok(())
    }

    /// Runs something on a thread that is not ours: with the context current, and with the thread's
    /// capture mode and context as they were afterwards.
    pub(super) fn with_context<T>(
        &self,
        run: impl FnOnce() -> Result<T, DriverError>,
    ) -> Result<T, DriverError> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        let mut popped = ptr::null_mut();
        // SAFETY: the context is retained by `self`, pushed and popped in pairs; `mode` and `popped`
        // are places for one value each.
        unsafe {
            call!(cuCtxPushCurrent_v2(self.context))?;
            let exchanged = call!(cuThreadExchangeStreamCaptureMode(&raw mut mode));
            let result = exchanged.and_then(|()| {
                let result = run();
                call!(cuThreadExchangeStreamCaptureMode(&raw mut mode))?;
                result
            });
            call!(cuCtxPopCurrent_v2(&raw mut popped))?;
            result
        }
    }

    /// An event out of the store of unused ones; makes one if there is none.
    ///
    /// The context must be current on this thread.
    pub(super) fn event(self: &Arc<Self>) -> Result<Event, DriverError> {
        let unused = self.free_events.lock().pop();
        let raw = match unused {
            Some(raw) => raw,
            None => make_event()?,
        };
        Ok(Event {
            raw,
            device: Arc::clone(self),
        })
    }

    /// Records a new event on a stream that belongs to somebody else, such as PyTorch's.
    ///
    /// Nothing is wrapped: the handle is used during the call only. May be called on any thread.
    ///
    /// # Safety
    /// `stream` is a stream of this device's primary context, or 0 for its default stream.
    pub(super) unsafe fn mark(self: &Arc<Self>, stream: usize) -> Result<Event, DriverError> {
        // SAFETY: the stream by the caller's promise.
        self.on_caller(|| unsafe { self.event()?.recorded(stream as sys::CUstream) })
    }

    /// Makes somebody else's stream wait for an event, without waiting here.
    ///
    /// # Safety
    /// As for [`Device::mark`].
    pub(super) unsafe fn make_wait(&self, stream: usize, event: &Event) -> Result<(), DriverError> {
        // SAFETY: the stream by the caller's promise, the event by its owner.
        self.on_caller(|| unsafe {
            call!(cuStreamWaitEvent(stream as sys::CUstream, event.raw.0, 0))
        })
    }

    /// As [`Device::with_context`] for calls that no capture forbids: cheaper where the context is
    /// current already, as it is on PyTorch's threads.
    fn on_caller<T>(&self, run: impl FnOnce() -> Result<T, DriverError>) -> Result<T, DriverError> {
        let mut current = ptr::null_mut();
        // SAFETY: a place for one handle.
        unsafe { call!(cuCtxGetCurrent(&raw mut current))? };
        if current == self.context {
            run()
        } else {
            self.with_context(run)
        }
    }

    pub(super) fn stream(self: &Arc<Self>, high_priority: bool) -> Result<Stream, DriverError> {
        let (mut lowest, mut highest) = (0, 0);
        let mut raw = ptr::null_mut();
        // SAFETY: places for one value each; the context is current.
        unsafe {
            call!(cuCtxGetStreamPriorityRange(
                &raw mut lowest,
                &raw mut highest
            ))?;
            let priority = if high_priority { highest } else { lowest };
            let non_blocking = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            call!(cuStreamCreateWithPriority(
                &raw mut raw,
                non_blocking,
                priority
            ))?;
        }
        Ok(Stream {
            raw,
            _device: Arc::clone(self),
        })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        for RawEvent(event) in self.free_events.get_mut().drain(..) {
            // SAFETY: made by us, in the store, thus used by nobody.
            unsafe { sys::cuEventDestroy_v2(event) };
        }
        // SAFETY: retained once in `open`.
        unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.handle) };
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("name", &self.name)
            .field("pci", &self.pci)
            .field("lost", &self.is_lost())
            .finish_non_exhaustive()
    }
}

fn make_event() -> Result<RawEvent, DriverError> {
    let mut raw = ptr::null_mut();
    // SAFETY: a place for one handle; the context is current.
    unsafe { call!(cuEventCreate(&raw mut raw, 0))? };
    Ok(RawEvent(raw))
}

/// An event with a time stamp. Goes back to its device's store when it is dropped: a wait for it that
/// has been enqueued by then is not affected by its next use.
pub(super) struct Event {
    raw: RawEvent,
    device: Arc<Device>,
}

impl Event {
    /// Records it on a stream.
    ///
    /// # Safety
    /// The stream belongs to the event's device and exists.
    unsafe fn recorded(self, stream: sys::CUstream) -> Result<Self, DriverError> {
        // SAFETY: the stream by the caller's promise, the event by `self`.
        unsafe { call!(cuEventRecord(self.raw.0, stream))? };
        Ok(self)
    }

    /// Whether all work before it has been done.
    pub(super) fn is_done(&self) -> Result<bool, DriverError> {
        // SAFETY: the event is `self`'s.
        let answer = unsafe { sys::cuEventQuery(self.raw.0) };
        if answer == sys::CUresult::CUDA_ERROR_NOT_READY {
            return Ok(false);
        }
        check("cuEventQuery", answer).map(|()| true)
    }

    /// Seconds from this event to a later one; both are done.
    pub(super) fn seconds_until(&self, later: &Self) -> Result<f64, DriverError> {
        let mut milliseconds = 0.0f32;
        // SAFETY: a place for one number; both events are owned.
        unsafe {
            call!(cuEventElapsedTime(
                &raw mut milliseconds,
                self.raw.0,
                later.raw.0
            ))?
        };
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.device.free_events.lock().push(self.raw);
    }
}

/// A stream of ours. It does not wait for the default stream, nor the default stream for it.
pub(super) struct Stream {
    raw: sys::CUstream,
    _device: Arc<Device>,
}

// SAFETY: a stream handle may be used from any thread.
unsafe impl Send for Stream {}

impl Stream {
    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Records a new event.
    pub(super) fn record(&self, device: &Arc<Device>) -> Result<Event, DriverError> {
        // SAFETY: the stream is `self`'s.
        unsafe { device.event()?.recorded(self.raw) }
    }

    /// Makes later work on this stream wait for an event.
    pub(super) fn wait(&self, event: &Event) -> Result<(), DriverError> {
        // SAFETY: stream and event are owned.
        unsafe { call!(cuStreamWaitEvent(self.raw, event.raw.0, 0)) }
    }

    /// Blocks until all work on it is done: for failures and the end only.
    pub(super) fn synchronize(&self) -> Result<(), DriverError> {
        // SAFETY: the stream is `self`'s.
        unsafe { call!(cuStreamSynchronize(self.raw)) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made by us and destroyed once; what is still enqueued runs to its end.
        unsafe { sys::cuStreamDestroy_v2(self.raw) };
    }
}

/// Memory on the device.
pub(super) struct DeviceMemory {
    address: u64,
    bytes: usize,
    _device: Arc<Device>,
}

impl DeviceMemory {
    pub(super) fn new(device: &Arc<Device>, bytes: usize) -> Result<Self, DriverError> {
        let mut address = 0;
        // SAFETY: a place for one address; the context is current.
        unsafe { call!(cuMemAlloc_v2(&raw mut address, bytes))? };
        Ok(Self {
            address,
            bytes,
            _device: Arc::clone(device),
        })
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated by us, freed once; the driver waits for work that uses it.
        unsafe { sys::cuMemFree_v2(self.address) };
    }
}

/// Pinned host memory from the driver, which the device can read and write.
pub(super) struct HostMemory {
    base: *mut u8,
    bytes: usize,
    _device: Arc<Device>,
}

// SAFETY: plain memory, tied to no thread.
unsafe impl Send for HostMemory {}
// SAFETY: the type gives out an address only.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    pub(super) fn new(device: &Arc<Device>, bytes: usize) -> Result<Self, DriverError> {
        let mut base: *mut c_void = ptr::null_mut();
        // Portable and mapped; never write-combined, which would make reads by the CPU very slow.
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: a place for one address; the context is current.
        unsafe { call!(cuMemHostAlloc(&raw mut base, bytes, flags))? };
        Ok(Self {
            base: base.cast(),
            bytes,
            _device: Arc::clone(device),
        })
    }

    pub(super) fn base(&self) -> *mut u8 {
        self.base
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address by which the device knows it.
    pub(super) fn device_address(&self) -> Result<u64, DriverError> {
        let mut address = 0;
        // SAFETY: a place for one address; the memory is ours and mapped.
        unsafe {
            call!(cuMemHostGetDevicePointer_v2(
                &raw mut address,
                self.base.cast(),
                0
            ))?
        };
        Ok(address)
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: allocated by us, freed once.
        unsafe { sys::cuMemFreeHost(self.base.cast()) };
    }
}
