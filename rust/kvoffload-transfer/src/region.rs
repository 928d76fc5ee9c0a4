//! The host memory of one rank: slots back to back in one anonymous file.
//!
//! The file is a `memfd`: it has no name in any file system, so that nothing is left behind, nothing
//! collides and nobody else's file is trusted. The mapping is shared, so that the descriptor could be
//! handed to another process; it is not inherited by forked children (which would keep the memory
//! alive) and stays out of core dumps.

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use xxhash_rust::xxh3::xxh3_64;

use crate::error::StartError;
use crate::memory::Machine;

/// Bytes a piece should have: large enough that a piece costs nothing, small enough that registering
/// one with a driver holds the driver's lock only briefly.
const PIECE_BYTES: u64 = 64 << 20;

/// One rank's host memory: `num_slots * slot_bytes` bytes, in pieces of whole slots.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    bytes: u64,
    slot_bytes: u64,
    num_slots: u32,
    file: OwnedFd,
}

// SAFETY: `base` is an address of memory that this value owns until it is dropped and that no thread
// is tied to. The type gives out no references to the bytes: every access goes through the raw
// pointer under the conditions of `base_ptr` and `hash`.
unsafe impl Send for Region {}
// SAFETY: as above; the shared methods only read the fields, which never change.
unsafe impl Sync for Region {}

impl Region {
    /// Makes a region of zeroed slots. No page is touched yet, so that it costs no time.
    ///
    /// # Errors
    /// Zero slots or bytes, a size that does not fit into memory or cgroup, or a system call that
    /// failed. Nothing remains of a region that could not be made.
    pub fn new(num_slots: u32, slot_bytes: u64) -> Result<Self, StartError> {
        Self::within(&Machine::new("/"), num_slots, slot_bytes)
    }

    fn within(machine: &Machine, num_slots: u32, slot_bytes: u64) -> Result<Self, StartError> {
        if num_slots == 0 {
            return Err(StartError::Zero { field: "num_slots" });
        }
        if slot_bytes == 0 {
            return Err(StartError::Zero {
                field: "slot_bytes",
            });
        }
        let needed = u64::from(num_slots).saturating_mul(slot_bytes);
        let available = machine.available().map_err(|source| StartError::System {
            what: "read the free memory",
            source,
        })?;
        if needed > available.bytes {
            return Err(StartError::TooLarge {
                needed,
                available: available.bytes,
                limited_by: available.limited_by,
            });
        }
        let failed = |what| {
            move |error: rustix::io::Errno| StartError::System {
                what,
                source: error.into(),
            }
        };
        let file = rustix::fs::memfd_create(
            c"kvoffload",
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
        )
        .map_err(failed("create the region's memfd"))?;
        rustix::fs::ftruncate(&file, needed).map_err(failed("size the region's memfd"))?;
        // Whoever else gets the descriptor cannot shrink the file under the mapping.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(failed("seal the region's memfd"))?;
        let length = usize::try_from(needed).map_err(|_| StartError::TooLarge {
            needed,
            available: usize::MAX as u64,
            limited_by: "the address space".to_owned(),
        })?;
        // SAFETY: a new mapping at an address the kernel chooses touches no existing memory; `length`
        // is the size of the file, which the seal keeps as it is.
        let base = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )
        }
        .map_err(failed("map the region"))?;
        let base = NonNull::new(base.cast::<u8>()).expect("mmap never answers the null page");
        let region = Self {
            base,
            bytes: needed,
            slot_bytes,
            num_slots,
            file,
        };
        for (advice, what) in [
            (
                Advice::LinuxDontFork,
                "keep the region out of forked children",
            ),
            (Advice::LinuxDontDump, "keep the region out of core dumps"),
        ] {
            // SAFETY: exactly the mapping made above; neither advice changes its bytes.
            unsafe { rustix::mm::madvise(region.base_void(), length, advice) }
                .map_err(failed(what))?;
        }
        Ok(region)
    }

    /// Bytes of all slots together.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of one slot.
    #[must_use]
    pub fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// Number of slots.
    #[must_use]
    pub fn num_slots(&self) -> u32 {
        self.num_slots
    }

    /// Slots per piece for slots of this size: about 64 MiB, at least one slot.
    #[must_use]
    pub fn slots_per_piece(slot_bytes: u64) -> u32 {
        let slots = PIECE_BYTES / slot_bytes.max(1);
        u32::try_from(slots).unwrap_or(u32::MAX).max(1)
    }

    /// The pieces as ranges of bytes, in order; only the last may be shorter.
    pub fn pieces(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let (bytes, slot_bytes) = (self.bytes, self.slot_bytes);
        let piece = slot_bytes * u64::from(Self::slots_per_piece(slot_bytes));
        (0..bytes.div_ceil(piece)).map(move |i| i * piece..bytes.min((i + 1) * piece))
    }

    /// The first byte, for copies. Reading and writing is sound only below `bytes()`, while this
    /// value lives, and if no other thread touches the same bytes at the same time; the engine's
    /// fence sees to the last.
    pub(crate) fn base_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Hash of a range of bytes.
    ///
    /// # Safety
    /// No thread writes any byte of the range during the call.
    ///
    /// # Panics
    /// The range does not lie inside the region.
    pub(crate) unsafe fn hash(&self, range: Range<u64>) -> u64 {
        assert!(
            range.start <= range.end && range.end <= self.bytes,
            "{range:?} is not inside"
        );
        // SAFETY: inside the mapping by the assertion, mapped while `self` lives, initialised because
        // a new file reads as zeroes, and not written by the caller's promise. Both casts are exact:
        // the whole region fits into the address space.
        let bytes = unsafe {
            std::slice::from_raw_parts(
                self.base.as_ptr().add(range.start as usize),
                (range.end - range.start) as usize,
            )
        };
        xxh3_64(bytes)
    }

    fn base_void(&self) -> *mut c_void {
        self.base.as_ptr().cast()
    }
}

impl AsFd for Region {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `within`, unmapped once. Every lane thread holds an `Arc` of
        // the region for as long as it may copy, so no copy is running when the last one is dropped.
        let unmapped = unsafe { rustix::mm::munmap(self.base_void(), self.bytes as usize) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_a_region() {
        let region = Region::new(8, 4096).unwrap();
        assert_eq!(region.bytes(), 8 * 4096);
        // SAFETY: nobody else knows the region.
        let (zeroes, first) = unsafe {
            let zeroes = region.hash(4096..8192);
            *region.base_ptr() = 1;
            (zeroes, region.hash(0..4096))
        };
        assert_eq!(zeroes, xxh3_64(&[0; 4096]));
        assert_ne!(first, zeroes);
        assert!(
            rustix::fs::ftruncate(&region, 0).is_err(),
            "the size is sealed"
        );
    }

    #[test]
    fn pieces_are_whole_slots_and_cover_everything() {
        assert_eq!(Region::slots_per_piece(1 << 20), 64);
        assert_eq!(Region::slots_per_piece(1 << 40), 1);
        assert_eq!(Region::slots_per_piece(PIECE_BYTES - 1), 1);
        let region = Region::new(5, 40 << 20).unwrap();
        let pieces: Vec<_> = region.pieces().collect();
        assert_eq!(pieces.len(), 5);
        let region = Region::new(200, 1 << 20).unwrap();
        let pieces: Vec<_> = region.pieces().collect();
        assert_eq!(pieces.len(), 4);
        assert_eq!(pieces[3], 192 << 20..200 << 20);
        assert!(pieces.windows(2).all(|pair| pair[0].end == pair[1].start));
    }
}
