//! Events, streams and memory of the simulated device.

use std::alloc::{Layout, alloc, dealloc};
use std::sync::Arc;

use kvoffload_core::jobs::JobKind;

use super::batch::Batch;
use super::driver::{Device, Known, Op, fresh, is_across, simulated};
use super::error::DriverError;
use super::rows::Rows;

impl Device {
    /// # Safety
    /// None is needed.
    #[expect(clippy::unnecessary_wraps, reason = "the real one may fail")]
    pub(super) unsafe fn mark(self: &Arc<Self>, stream: usize) -> Result<Event, DriverError> {
        Ok(Event::on(self, stream))
    }

    /// # Safety
    /// None is needed.
    #[expect(clippy::unnecessary_wraps, reason = "the real one may fail")]
    pub(super) unsafe fn make_wait(&self, stream: usize, event: &Event) -> Result<(), DriverError> {
        self.push(stream, Op::Wait(event.id));
        Ok(())
    }

    #[expect(clippy::unnecessary_wraps, reason = "the real one may fail")]
    pub(super) fn stream(self: &Arc<Self>, _high_priority: bool) -> Result<Stream, DriverError> {
        Ok(Stream {
            id: fresh() as usize,
            device: Arc::clone(self),
        })
    }
}

pub(super) struct Event {
    id: u64,
    device: Arc<Device>,
}

#[expect(clippy::unnecessary_wraps, reason = "the real ones may fail")]
impl Event {
    fn on(device: &Arc<Device>, stream: usize) -> Self {
        let id = fresh();
        device.push(stream, Op::Record(id));
        Self {
            id,
            device: Arc::clone(device),
        }
    }

    pub(super) fn is_done(&self) -> Result<bool, DriverError> {
        if self
            .device
            .failure
            .lock()
            .is_some_and(|(calls, code)| calls == 0 && code >= 700)
        {
            self.device.call("cuEventQuery")?;
        }
        Ok(self.device.ask(self.id))
    }

    pub(super) fn seconds_until(&self, later: &Self) -> Result<f64, DriverError> {
        let (from, to) = (self.device.time(self.id), self.device.time(later.id));
        Ok((to as f64 - from as f64) * 1e-6)
    }
}

pub(super) struct Stream {
    pub(super) id: usize,
    device: Arc<Device>,
}

impl Stream {
    pub(super) fn record(&self, device: &Arc<Device>) -> Result<Event, DriverError> {
        device.call("cuEventRecord")?;
        Ok(Event::on(device, self.id))
    }

    /// # Safety
    /// As for the real one.
    pub(super) unsafe fn copy(
        &self,
        batch: &mut Batch,
        _pageable: bool,
    ) -> Result<(), DriverError> {
        let call = "cuMemcpyBatchAsync";
        let hosts = match batch.kind {
            JobKind::Store => &batch.targets,
            JobKind::Load => &batch.sources,
        };
        let mut copies = hosts.iter().zip(&batch.sizes);
        let answer = match copies.any(|(&host, &bytes)| is_across(host, bytes)) {
            true => Err(simulated(call, 1)),
            false => self.device.call(call),
        };
        answer.inspect_err(|_| batch.clear())?;
        for at in 0..batch.sizes.len() {
            let op = Op::Copy {
                target: batch.targets[at],
                source: batch.sources[at],
                bytes: batch.sizes[at],
            };
            self.device.push(self.id, op);
        }
        batch.clear();
        Ok(())
    }

    /// # Safety
    /// As for the real one.
    pub(super) unsafe fn copy_rows(&self, kind: JobKind, all: &[Rows]) -> Result<(), DriverError> {
        let answer = self.device.call_rows(all);
        // The driver does not say that it has copied nothing when it refuses.
        let copied = match &answer {
            Ok(()) => all,
            Err(error) if error.is_fatal() => &[],
            Err(_) => &all[..all.len() / 2],
        };
        for rows in copied {
            let bytes = rows.width as usize;
            for (device, host) in rows.each() {
                let (target, source) = match kind {
                    JobKind::Store => (host as u64, device),
                    JobKind::Load => (device, host as u64),
                };
                let op = Op::Copy {
                    target,
                    source,
                    bytes,
                };
                self.device.push(self.id, op);
            }
        }
        answer
    }

    pub(super) fn wait(&self, event: &Event) -> Result<(), DriverError> {
        self.device.call("cuStreamWaitEvent")?;
        self.device.push(self.id, Op::Wait(event.id));
        Ok(())
    }

    pub(super) fn push(&self, op: Op) -> Result<(), DriverError> {
        self.device.call("cuLaunchKernel")?;
        self.device.push(self.id, op);
        Ok(())
    }

    pub(super) fn synchronize(&self) -> Result<(), DriverError> {
        if self.device.is_lost() {
            self.device.call("cuStreamSynchronize")?;
        }
        while !self.device.drain(self.id) {
            std::thread::yield_now(); // Another stream goes on first, or room is made.
        }
        Ok(())
    }
}

/// Memory on either side.
struct Memory {
    base: *mut u8,
    layout: Layout,
    known: Option<Known>,
}

// SAFETY: plain memory, tied to no thread.
unsafe impl Send for Memory {}
// SAFETY: the type gives out an address only.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes, 4096).expect("a size");
        // SAFETY: no test asks for nothing.
        let base = unsafe { alloc(layout) };
        assert!(!base.is_null());
        // SAFETY: just allocated. What is read before it was written shows.
        unsafe { base.write_bytes(0xee, bytes) };
        let known = Some(Known::new(base.expose_provenance() as u64, bytes as u64));
        Self {
            base,
            layout,
            known,
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // Before others can have the address.
        drop(self.known.take());
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.base, self.layout) };
    }
}

pub(super) struct DeviceMemory(Memory);

impl DeviceMemory {
    #[expect(clippy::unnecessary_wraps, reason = "the real one may fail")]
    pub(super) fn new(_device: &Arc<Device>, bytes: usize) -> Result<Self, DriverError> {
        Ok(Self(Memory::new(bytes)))
    }

    pub(super) fn address(&self) -> u64 {
        self.0.base.addr() as u64
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.layout.size()
    }
}

pub(super) struct HostMemory(Memory);

#[expect(clippy::unnecessary_wraps, reason = "the real ones may fail")]
impl HostMemory {
    pub(super) fn new(_device: &Arc<Device>, bytes: usize) -> Result<Self, DriverError> {
        Ok(Self(Memory::new(bytes)))
    }

    pub(super) fn base(&self) -> *mut u8 {
        self.0.base
    }

    pub(super) fn device_address(&self) -> Result<u64, DriverError> {
        Ok(self.0.base.addr() as u64)
    }
}
