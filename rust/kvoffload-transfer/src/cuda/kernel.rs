//! The kernel that packs fragments into staging chunks and unpacks them.

use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::driver::{Device, call};
use super::error::DriverError;
use super::fragment::{PART_BYTES, Way};
use super::objects::Stream;

const PTX: &str = include_str!("fragments.ptx");
const NAME: &std::ffi::CStr = c"kvoffload_copy_fragments";

/// Threads of a block: one warp, with few registers and no shared memory. It finds room beside a
/// kernel that fills the multiprocessor but for its last warp, as large matrix products do, instead of
/// waiting until that kernel ends.
const THREADS: u32 = 32;
/// The loaded kernel.
pub(super) struct Kernel {
    module: sys::CUmodule,
    function: sys::CUfunction,
    blocks: u32,
    device: Arc<Device>,
}

// SAFETY: module and function handles may be used from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above; a launch changes nothing in them.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Has the driver compile the kernel for the device; it keeps the result for the next start.
    /// `blocks`: the most of a launch, for measurements.
    pub(super) fn load(device: &Arc<Device>, blocks: Option<u32>) -> Result<Self, DriverError> {
        // One for each multiprocessor: a second one would wait where there is no room.
        let blocks = match blocks {
            Some(blocks) => blocks,
            None => device.multiprocessors()?,
        };
        let text = CString::new(PTX).expect("the text has no zero byte");
        let mut module = ptr::null_mut();
        let mut function = ptr::null_mut();
        // SAFETY: places for one handle each; the text ends with a zero; the context is current.
        unsafe {
            call!(cuModuleLoadData(&raw mut module, text.as_ptr().cast()))?;
            if let Err(error) = call!(cuModuleGetFunction(
                &raw mut function,
                module,
                NAME.as_ptr()
            )) {
                sys::cuModuleUnload(module);
                return Err(error);
            }
        }
        Ok(Self {
            module,
            function,
            blocks,
            device: Arc::clone(device),
        })
    }

    /// Enqueues the copy of `count` fragments, whose list lies at `list` and the longest of which has
    /// `longest` bytes.
    ///
    /// # Safety
    /// Until the kernel has run: `list` is readable by the device and holds `count` fragments, and
    /// every fragment lies in memory of the device that nothing else uses in a conflicting way, its
    /// other side in the chunk that starts at `staging`.
    pub(super) unsafe fn launch(
        &self,
        stream: &Stream,
        way: Way,
        list: u64,
        count: u32,
        longest: u32,
        staging: u64,
    ) -> Result<(), DriverError> {
        if count == 0 {
            return Ok(());
        }
        let parts = longest.div_ceil(PART_BYTES).max(1);
        let all = count * parts;
        let share = all.div_ceil(self.blocks);
        let blocks = all.div_ceil(share);
        // SAFETY: passed on to the caller.
        unsafe { self.enqueue(stream, blocks, way, [list, staging], [count, parts, share]) }
    }

    /// # Safety
    /// As for [`Kernel::launch`].
    unsafe fn enqueue(
        &self,
        stream: &Stream,
        blocks: u32,
        way: Way,
        [mut list, mut staging]: [u64; 2],
        [mut count, mut parts, mut share]: [u32; 3],
    ) -> Result<(), DriverError> {
        let mut store = u32::from(way == Way::Pack);
        let mut arguments: [*mut c_void; 6] = [
            (&raw mut list).cast(),
            (&raw mut count).cast(),
            (&raw mut parts).cast(),
            (&raw mut share).cast(),
            (&raw mut staging).cast(),
            (&raw mut store).cast(),
        ];
        // SAFETY: the six arguments are those of the kernel, in order and of its types, and live
        // during the call, in which the driver copies them; memory by the caller's promise.
        unsafe {
            call!(cuLaunchKernel(
                self.function,
                blocks,
                1,
                1,
                THREADS,
                1,
                1,
                0,
                stream.raw(),
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            ))
        }
    }
}

impl Kernel {
    /// Enqueues the kernel with nothing to do.
    pub(super) fn launch_empty(&self, stream: &Stream) -> Result<(), DriverError> {
        // SAFETY: without fragments the kernel reads and writes nothing.
        unsafe { self.enqueue(stream, 1, Way::Pack, [0, 0], [0, 1, 1]) }
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        // SAFETY: loaded by us and unloaded once; streams that used it are drained by then.
        self.device
            .release(|| unsafe { call!(cuModuleUnload(self.module)) });
    }
}
