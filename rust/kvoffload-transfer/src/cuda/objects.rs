//! What lives on a device: events, streams and memory. Each gives itself back when it is dropped, on
//! whatever thread that happens.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;
use kvoffload_core::jobs::JobKind;

use super::batch::Batch;
use super::driver::{Device, RawEvent, call, check, make_event};
use super::error::DriverError;
use super::rows::Rows;

impl Device {
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
            device: Arc::clone(self),
        })
    }
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
    device: Arc<Device>,
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

    /// Copies what is in a batch, and empties it.
    ///
    /// # Safety
    /// Until they are done, all ranges may be read and written, and nothing else that does so conflicts.
    /// Host memory is registered or allocated with this driver, unless `pageable` says otherwise.
    pub(super) unsafe fn copy(&self, batch: &mut Batch, pageable: bool) -> Result<(), DriverError> {
        // SAFETY: passed on to the caller.
        let copied = unsafe { self.enqueue(batch, pageable) };
        batch.clear();
        copied
    }

    /// Makes copies of several rows each, all with one call. The driver refuses rows in several allocations
    /// of the device; then some of the others may have been copied.
    ///
    /// # Safety
    /// As for [`Stream::copy`], for every row; all rows of a copy are in one registration of host memory.
    pub(super) unsafe fn copy_rows(&self, kind: JobKind, all: &[Rows]) -> Result<(), DriverError> {
        let mut copies: Vec<_> = all.iter().map(|rows| row_copy(kind, rows)).collect();
        let mut failed = usize::MAX;
        // SAFETY: the driver reads `copies` during the call; the rows by the caller's promise.
        unsafe {
            call!(cuMemcpy3DBatchAsync(
                copies.len(),
                copies.as_mut_ptr(),
                &raw mut failed,
                0,
                self.raw,
            ))
        }
    }

    /// # Safety
    /// As for [`Stream::copy`].
    unsafe fn enqueue(&self, batch: &mut Batch, pageable: bool) -> Result<(), DriverError> {
        let count = batch.sizes.len();
        if count > 1 && self.device.has_batch() && !pageable {
            let mut attributes = sys::CUmemcpyAttributes {
                srcAccessOrder: access_order(batch.kind),
                srcLocHint: NO_LOCATION,
                dstLocHint: NO_LOCATION,
                flags: 0,
            };
            let (mut first, mut failed) = (0usize, usize::MAX);
            // SAFETY: three arrays of `count` entries that the driver reads during the call; one
            // attribute, which holds from copy 0 on; the ranges by the caller's promise.
            return unsafe {
                call!(cuMemcpyBatchAsync(
                    batch.targets.as_mut_ptr(),
                    batch.sources.as_mut_ptr(),
                    batch.sizes.as_mut_ptr(),
                    count,
                    &raw mut attributes,
                    &raw mut first,
                    1,
                    &raw mut failed,
                    self.raw,
                ))
            };
        }
        for i in 0..count {
            let (target, source, bytes) = (batch.targets[i], batch.sources[i], batch.sizes[i]);
            // SAFETY: the ranges by the caller's promise; [`Batch::add`] put the host's side where it belongs.
            unsafe {
                match batch.kind {
                    JobKind::Store => call!(cuMemcpyDtoHAsync_v2(
                        std::ptr::with_exposed_provenance_mut(target as usize),
                        source,
                        bytes,
                        self.raw
                    )),
                    JobKind::Load => call!(cuMemcpyHtoDAsync_v2(
                        target,
                        std::ptr::with_exposed_provenance(source as usize),
                        bytes,
                        self.raw
                    )),
                }
            }?;
        }
        Ok(())
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

/// Not managed memory: the driver knows where it is.
const NO_LOCATION: sys::CUmemLocation = sys::CUmemLocation {
    type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID,
    id: 0,
};

/// When the sources of a batch may be read.
fn access_order(kind: JobKind) -> sys::CUmemcpySrcAccessOrder {
    match kind {
        // A device source has writers: the steps before.
        JobKind::Store => sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
        // A host source has none left when a load starts (the fence sees to that).
        JobKind::Load => sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_ANY,
    }
}

/// Rows as the driver takes them.
fn row_copy(kind: JobKind, rows: &Rows) -> sys::CUDA_MEMCPY3D_BATCH_OP {
    let count = rows.count as usize;
    let side = |address, step: u64| sys::CUmemcpy3DOperand {
        type_: sys::CUmemcpy3DOperandType::CU_MEMCPY_OPERAND_TYPE_POINTER,
        op: sys::CUmemcpy3DOperand_st__bindgen_ty_1 {
            ptr: sys::CUmemcpy3DOperand_st__bindgen_ty_1__bindgen_ty_1 {
                ptr: address,
                rowLength: step as usize,
                layerHeight: count,
                locHint: NO_LOCATION,
            },
        },
    };
    let device = side(rows.device, rows.device_step);
    let host = side(rows.host as u64, rows.host_step);
    let (src, dst) = match kind {
        JobKind::Store => (device, host),
        JobKind::Load => (host, device),
    };
    sys::CUDA_MEMCPY3D_BATCH_OP {
        src,
        dst,
        extent: sys::CUextent3D {
            width: rows.width as usize,
            height: count,
            depth: 1,
        },
        srcAccessOrder: access_order(kind),
        flags: 0,
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made by us and destroyed once; what is still enqueued runs to its end.
        self.device
            .release(|| unsafe { call!(cuStreamDestroy_v2(self.raw)) });
    }
}

/// Memory on the device.
pub(super) struct DeviceMemory {
    address: u64,
    bytes: usize,
    device: Arc<Device>,
}

impl DeviceMemory {
    pub(super) fn new(device: &Arc<Device>, bytes: usize) -> Result<Self, DriverError> {
        let mut address = 0;
        // SAFETY: a place for one address; the context is current.
        unsafe { call!(cuMemAlloc_v2(&raw mut address, bytes))? };
        Ok(Self {
            address,
            bytes,
            device: Arc::clone(device),
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
        self.device
            .release(|| unsafe { call!(cuMemFree_v2(self.address)) });
    }
}

/// Pinned host memory from the driver, which the device can read and write.
pub(super) struct HostMemory {
    base: *mut u8,
    device: Arc<Device>,
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
            device: Arc::clone(device),
        })
    }

    pub(super) fn base(&self) -> *mut u8 {
        self.base
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
        self.device
            .release(|| unsafe { call!(cuMemFreeHost(self.base.cast())) });
    }
}
