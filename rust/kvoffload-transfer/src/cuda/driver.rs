//! The CUDA driver: found at run time, never linked, and every answer turned into a typed error.
//!
//! `cudarc` knows the results of CUDA 12.8 as an `enum`; what later drivers have added to them belongs
//! to functions that are not called here.
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

use super::error::{CudaUnavailable, DriverError};

/// The oldest driver whose loader takes our kernels (PTX 7.0): CUDA 11.0.
const OLDEST_DRIVER: i32 = 11_000;
/// The first driver that has `cuMemcpyBatchAsync` and `cuMemcpy3DBatchAsync`.
const BATCH_DRIVER: i32 = 12_080;

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

/// Whether the driver has a function. `cudarc` panics at the first call of one that it lacks.
fn has_function(name: &[u8]) -> bool {
    // SAFETY: the library was loaded by `start_driver`; the address is looked at, not called.
    unsafe { sys::culib().get::<*const c_void>(name).is_ok() }
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
    has_row_batch: bool,
    /// The context is gone.
    lost: AtomicBool,
    pub(super) free_events: Mutex<Vec<RawEvent>>,
    /// Whether threads keep the capture mode they started with: for a test that shows what it does.
    keep_capture_mode: bool,
}

// SAFETY: the driver's handles are not tied to threads, and every driver function may be called from
// any thread. All fields that change are behind a lock or atomic.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

#[derive(Clone, Copy)]
pub(super) struct RawEvent(pub(super) sys::CUevent);
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
                .map_err(|source| CudaUnavailable::Context { ordinal, source })?;
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
            has_batch: version >= BATCH_DRIVER && has_function(b"cuMemcpyBatchAsync"),
            has_row_batch: version >= BATCH_DRIVER && has_function(b"cuMemcpy3DBatchAsync"),
            lost: AtomicBool::new(false),
            free_events: Mutex::default(),
            keep_capture_mode,
        });
        let made = device.with_context(|| {
            let made: Result<Vec<_>, _> = (0..events).map(|_| make_event()).collect();
            made.map(|made| *device.free_events.lock() = made)
        });
        made.map_err(|source| CudaUnavailable::Context { ordinal, source })?;
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

    /// The most bytes from row to row of one copy; 0 where the driver has no batches of such copies.
    pub(super) fn longest_pitch(&self) -> Result<u64, DriverError> {
        if !self.has_row_batch {
            return Ok(0);
        }
        let what = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_PITCH;
        let mut bytes = 0;
        // SAFETY: a place for one number; the device is open.
        unsafe { call!(cuDeviceGetAttribute(&raw mut bytes, what, self.handle))? };
        Ok(u64::try_from(bytes).unwrap_or(0))
    }

    /// Start of the allocation that an address of the device lies in; the address itself where the driver
    /// does not know. The context is current.
    pub(super) fn allocation(&self, address: u64) -> Result<u64, DriverError> {
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: places for an address and a number; the address is looked up, not followed.
        match unsafe {
            call!(cuMemGetAddressRange_v2(
                &raw mut base,
                &raw mut bytes,
                address
            ))
        } {
            Ok(()) => Ok(base),
            Err(error) if error.is_fatal() => Err(error),
            Err(_) => Ok(address),
        }
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
        let _guest = Guest::enter(self.context)?;
        run()
    }

    /// Registers host memory, so that the device can copy from and to it.
    ///
    /// # Safety
    /// The range is mapped until [`Device::unregister`], and shares no page with another that is
    /// registered.
    pub(super) unsafe fn register(&self, address: *mut u8, bytes: u64) -> Result<(), DriverError> {
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: passed on to the caller.
        unsafe { call!(cuMemHostRegister_v2(address.cast(), bytes as usize, flags)) }
    }

    /// Ends a registration.
    ///
    /// # Safety
    /// It was registered, and no copy uses it.
    pub(super) unsafe fn unregister(&self, address: *mut u8) {
        // SAFETY: passed on to the caller. An error leaves pages pinned until the process ends.
        unsafe { sys::cuMemHostUnregister(address.cast()) };
    }

    /// Notes that the device cannot be relied on any more; true the first time.
    pub(super) fn give_up(&self) -> bool {
        !self.lost.swap(true, Ordering::Relaxed)
    }

    /// As [`Device::with_context`] for calls that no capture forbids: cheaper where the context is
    /// current already, as it is on PyTorch's threads and on ours.
    pub(super) fn on_caller<T>(
        &self,
        run: impl FnOnce() -> Result<T, DriverError>,
    ) -> Result<T, DriverError> {
        let mut current = ptr::null_mut();
        // SAFETY: a place for one handle.
        unsafe { call!(cuCtxGetCurrent(&raw mut current))? };
        if current == self.context {
            run()
        } else {
            self.with_context(run)
        }
    }

    /// Gives something back, on whatever thread its owner is dropped. Where that fails the context is
    /// gone, and with it everything in it.
    pub(super) fn release(&self, run: impl FnOnce() -> Result<(), DriverError>) {
        self.on_caller(run).ok();
    }
}

/// A context that is current on somebody else's thread for a while, in relaxed capture mode. Both are
/// as they were afterwards, also after a panic.
struct Guest(sys::CUstreamCaptureMode);

impl Guest {
    fn enter(context: sys::CUcontext) -> Result<Self, DriverError> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the caller's device retains the context for as long as the guest stays; `mode` is a
        // place for one value.
        unsafe {
            call!(cuCtxPushCurrent_v2(context))?;
            if let Err(error) = call!(cuThreadExchangeStreamCaptureMode(&raw mut mode)) {
                let mut popped = ptr::null_mut();
                sys::cuCtxPopCurrent_v2(&raw mut popped);
                return Err(error);
            }
        }
        Ok(Self(mode))
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let mut popped = ptr::null_mut();
        // SAFETY: undoes what `enter` did, on the same thread; places for one value each. Errors mean
        // that the context is gone, and then there is nothing to undo.
        unsafe {
            sys::cuThreadExchangeStreamCaptureMode(&raw mut self.0);
            sys::cuCtxPopCurrent_v2(&raw mut popped);
        }
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

pub(super) fn make_event() -> Result<RawEvent, DriverError> {
    let mut raw = ptr::null_mut();
    // SAFETY: a place for one handle; the context is current.
    unsafe { call!(cuEventCreate(&raw mut raw, 0))? };
    Ok(RawEvent(raw))
}
