//! The host memory of one rank: slots back to back in anonymous memory.
//!
//! It has no name anywhere, so that nothing is left behind, nothing collides and nobody else's file is
//! trusted. It is not inherited by forked children (which would keep the memory alive) and stays out
//! of core dumps. The kernel is asked for huge pages: with them, touching 16 GiB took 2.6 s instead of
//! 10.2, registering them with a driver 0.4 s instead of 0.9 and ending that 0.4 s instead of 2.0.
//!
//! Where all ranks hold the same KV, the first one's region is a `memfd` that the others map and only
//! read (`file.rs`); few systems give that huge pages, so it is used for nothing else.

mod file;

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

use parking_lot::Mutex;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use xxhash_rust::xxh3::xxh3_64;

use crate::error::StartError;
use crate::memory::Machine;
pub use file::Backing;

/// Bytes a piece should have: large enough that a piece costs nothing, small enough that registering
/// one with a driver holds the driver's lock only briefly.
const PIECE_BYTES: u64 = 16 << 20;
/// A region that is not much smaller starts at a multiple of this: a huge page.
const HUGE_PAGE: usize = 2 << 20;

/// One rank's host memory: `num_slots * slot_bytes` bytes, in pieces of whole slots.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    bytes: u64,
    slot_bytes: u64,
    num_slots: u32,
    piece_bytes: u64,
    /// For each piece, where its bytes are; null: in the mapping.
    moved: Box<[AtomicPtr<u8>]>,
    /// Other processes may map it.
    shared: bool,
    /// It is somebody else's, and only read.
    joined: bool,
    /// What they map, until it is taken.
    file: Mutex<Option<OwnedFd>>,
}

// SAFETY: `base` is an address of memory that this value owns until it is dropped and that no thread
// is tied to. The type gives out no references to the bytes: every access goes through the raw
// pointer under the conditions of `base_ptr` and `hash`.
unsafe impl Send for Region {}
// SAFETY: as above; the only fields that change are atomic.
unsafe impl Sync for Region {}

impl Region {
    /// Makes a region of zeroed slots. No page is touched yet, so that it costs no time.
    ///
    /// # Errors
    /// Zero slots or bytes, a size that does not fit into memory or cgroup, or a system call that
    /// failed. Nothing remains of a region that could not be made.
    pub fn new(num_slots: u32, slot_bytes: u64) -> Result<Self, StartError> {
        Self::with(Backing::Private, num_slots, slot_bytes)
    }

    /// Makes a region of memory that comes from somewhere else than [`Region::new`]'s.
    ///
    /// # Errors
    /// As for [`Region::new`]; or the memory to join is not what a region of this size shares.
    pub fn with(backing: Backing, num_slots: u32, slot_bytes: u64) -> Result<Self, StartError> {
        Self::within(&Machine::new("/"), backing, num_slots, slot_bytes)
    }

    fn within(
        machine: &Machine,
        backing: Backing,
        num_slots: u32,
        slot_bytes: u64,
    ) -> Result<Self, StartError> {
        if num_slots == 0 {
            return Err(StartError::Zero { field: "num_slots" });
        }
        if slot_bytes == 0 {
            return Err(StartError::Zero {
                field: "slot_bytes",
            });
        }
        let needed = u64::from(num_slots).saturating_mul(slot_bytes);
        if let Backing::Joined(file) = &backing {
            file::check(file, needed)?;
        } else {
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
        }
        let failed = |what| {
            move |error: rustix::io::Errno| StartError::System {
                what,
                source: error.into(),
            }
        };
        let length = usize::try_from(needed).map_err(|_| StartError::TooLarge {
            needed,
            available: usize::MAX as u64,
            limited_by: "the address space".to_owned(),
        })?;
        let joined = matches!(backing, Backing::Joined(_));
        let (base, file) = match backing {
            Backing::Private => (map(length), None),
            Backing::Shared => {
                let file = file::create(needed).map_err(failed("make memory for all ranks"))?;
                (file::map(&file, length), Some(file))
            }
            Backing::Joined(file) => (file::map(&file, length), None),
        };
        let base = base.map_err(failed("map the region"))?;
        let piece_bytes = slot_bytes.saturating_mul(Self::slots_per_piece(slot_bytes).into());
        let region = Self {
            base,
            bytes: needed,
            slot_bytes,
            num_slots,
            piece_bytes,
            moved: (0..needed.div_ceil(piece_bytes))
                .map(|_| AtomicPtr::default())
                .collect(),
            shared: joined || file.is_some(),
            joined,
            file: Mutex::new(file),
        };
        // Without huge pages it is slower, and nothing else.
        // SAFETY: exactly the mapping made above; the advice does not change its bytes.
        unsafe { rustix::mm::madvise(region.base_void(), length, Advice::LinuxHugepage) }.ok();
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

    /// What others map to join the region. Given out once, and only by one that is shared; as long
    /// as somebody has it, the memory stays.
    #[must_use]
    pub fn take_file(&self) -> Option<OwnedFd> {
        self.file.lock().take()
    }

    /// Whether other processes may have it mapped: then its bytes cannot live elsewhere.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.shared
    }

    /// Whether it is somebody else's: then nobody here may write to it.
    #[must_use]
    pub fn is_joined(&self) -> bool {
        self.joined
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

    /// Address of the first byte, for tests and debuggers; a piece may have been moved elsewhere.
    #[must_use]
    pub fn base_address(&self) -> usize {
        self.base.as_ptr().expose_provenance()
    }

    /// Slots per piece for slots of this size: about 16 MiB, and whole pages of memory, because no
    /// page can be registered with a driver twice.
    #[must_use]
    pub fn slots_per_piece(slot_bytes: u64) -> u32 {
        let slot_bytes = slot_bytes.max(1);
        let page = rustix::param::page_size() as u64;
        // Pages are powers of two: their greatest common divisor is the power of two in the slot.
        let common = 1 << slot_bytes.trailing_zeros().min(page.trailing_zeros());
        let unit = page / common;
        let slots = PIECE_BYTES / slot_bytes / unit * unit;
        u32::try_from(slots.max(unit)).unwrap_or(u32::MAX)
    }

    /// Bytes of a piece; only the last may be shorter.
    #[must_use]
    pub fn piece_bytes(&self) -> u64 {
        self.piece_bytes
    }

    /// The pieces as ranges of bytes, in order.
    pub fn pieces(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let (bytes, piece) = (self.bytes, self.piece_bytes);
        (0..bytes.div_ceil(piece)).map(move |i| i * piece..bytes.min((i + 1) * piece))
    }

    /// Where a byte is, for copies of what lies in the same piece. Reading and writing is sound only
    /// below `bytes()`, while this value lives, and if no other thread touches the same bytes at the
    /// same time; the engine's fence sees to the last.
    pub(crate) fn address(&self, offset: u64) -> *mut u8 {
        let piece = offset / self.piece_bytes;
        // Acquire: with the address, what made the memory usable is seen.
        let moved = self.moved[piece as usize].load(Ordering::Acquire);
        if moved.is_null() {
            // The cast is exact: the whole region fits into the address space.
            self.base.as_ptr().wrapping_add(offset as usize)
        } else {
            moved.wrapping_add((offset - piece * self.piece_bytes) as usize)
        }
    }

    /// Has the piece's bytes live elsewhere from now on: in memory of `piece_bytes` bytes that outlives
    /// every copy. Nothing may have been stored to the piece yet.
    ///
    /// # Panics
    /// The region is shared.
    pub(crate) fn move_piece(&self, piece: usize, to: *mut u8) {
        assert!(!self.shared, "others would go on reading the mapping");
        self.moved[piece].store(to, Ordering::Release);
    }

    /// Takes small pages from now on: where memory is fragmented, huge ones can take seconds to find.
    pub(crate) fn avoid_huge_pages(&self) {
        // SAFETY: exactly the region's mapping; the advice does not change its bytes.
        unsafe {
            let advice = Advice::LinuxNoHugepage;
            rustix::mm::madvise(self.base_void(), self.bytes as usize, advice)
        }
        .ok();
    }

    /// Makes the pages of a range exist, so that no copy has to wait for them. Keeps their bytes.
    ///
    /// # Errors
    /// There is no memory for them.
    pub(crate) fn touch(&self, start: u64, bytes: u64) -> Result<(), rustix::io::Errno> {
        let end = self.bytes.min(start.saturating_add(bytes));
        let start = start.min(end);
        let page = rustix::param::page_size();
        // Both are exact: the whole region fits into the address space.
        let first = start as usize / page * page;
        let length = end as usize - first;
        let base = self.base.as_ptr().wrapping_add(first);
        // SAFETY: inside the mapping: `base` is page-aligned, and so is `first`. The advice changes no byte.
        match unsafe { rustix::mm::madvise(base.cast(), length, Advice::LinuxPopulateWrite) } {
            // A kernel before 5.14 does not know it.
            Err(rustix::io::Errno::INVAL) => {
                for offset in (first..end as usize).step_by(page) {
                    // SAFETY: inside the mapping, aligned for a byte, mapped while `self` lives. Copies
                    // of other threads do not overlap with it: no copy uses a piece before it has been
                    // touched. Copies of the process that owns a joined region may, and write there:
                    // it is only read, which is enough to have a file's page.
                    let byte = unsafe { AtomicU8::from_ptr(self.base.as_ptr().add(offset)) };
                    match self.joined {
                        true => byte.load(Ordering::Relaxed),
                        false => byte.fetch_or(0, Ordering::Relaxed),
                    };
                }
                Ok(())
            }
            answer => answer,
        }
    }

    /// The first byte, for copies by whoever never moves a piece; see [`Region::address`].
    pub(crate) fn base_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Hash of a range of bytes.
    ///
    /// # Safety
    /// No thread writes any byte of the range during the call.
    ///
    /// # Panics
    /// The range does not lie inside the region, or in more than one piece.
    pub(crate) unsafe fn hash(&self, range: Range<u64>) -> u64 {
        assert!(
            range.start <= range.end && range.end <= self.bytes,
            "{range:?} is not inside"
        );
        let piece = range.start / self.piece_bytes;
        assert!(
            range.is_empty() || (range.end - 1) / self.piece_bytes == piece,
            "{range:?} crosses a piece"
        );
        // SAFETY: inside one piece by the assertions, mapped while `self` lives, initialised because new
        // memory reads as zeroes and a moved piece was stored to before anybody asks, and not written
        // by the caller's promise. The cast is exact: the whole region fits into the address space.
        let bytes = unsafe {
            std::slice::from_raw_parts(
                self.address(range.start.min(self.bytes - 1)),
                (range.end - range.start) as usize,
            )
        };
        xxh3_64(bytes)
    }

    fn base_void(&self) -> *mut c_void {
        self.base.as_ptr().cast()
    }
}

/// New memory of `length` bytes, which are zero.
fn map(length: usize) -> Result<NonNull<u8>, rustix::io::Errno> {
    let spare = if length < HUGE_PAGE / 2 { 0 } else { HUGE_PAGE };
    let page = rustix::param::page_size();
    let all = length.next_multiple_of(page) + spare;
    // SAFETY: a new mapping at an address the kernel chooses touches no existing memory.
    let start = unsafe {
        rustix::mm::mmap_anonymous(
            ptr::null_mut(),
            all,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE,
        )
    }?;
    let before = match spare {
        0 => 0,
        _ => start.cast::<u8>().align_offset(HUGE_PAGE).min(spare),
    };
    let base = start.cast::<u8>().wrapping_add(before);
    // What is beside the region is given back.
    for (address, bytes) in [
        (start.cast::<u8>(), before),
        (base.wrapping_add(all - spare), spare - before),
    ] {
        if bytes > 0 {
            // SAFETY: whole pages of the mapping made above, which nobody knows yet.
            unsafe { rustix::mm::munmap(address.cast(), bytes) }?;
        }
    }
    Ok(NonNull::new(base).expect("mmap never answers the null page"))
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `map`, unmapped once. Every lane thread holds an `Arc` of
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
    }

    #[test]
    fn a_large_region_starts_at_a_huge_page_and_is_unmapped_whole() {
        let mapped = |at: usize| {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            maps.lines().any(|line| {
                let (range, _) = line.split_once(' ').unwrap();
                let (from, to) = range.split_once('-').unwrap();
                let parse = |text| usize::from_str_radix(text, 16).unwrap();
                (parse(from)..parse(to)).contains(&at)
            })
        };
        let region = Region::new(3, (2 << 20) + 4096).unwrap();
        let base = region.base_ptr().addr();
        assert!(base.is_multiple_of(HUGE_PAGE));
        let last = base + region.bytes() as usize - 1;
        assert!(mapped(base) && mapped(last));
        drop(region);
        // Other threads may map something there meanwhile, but hardly on both ends.
        assert!(!(mapped(base) && mapped(last)));
    }

    #[test]
    fn pieces_are_whole_slots_and_cover_everything() {
        assert_eq!(Region::slots_per_piece(1 << 20), 16);
        assert_eq!(Region::slots_per_piece(1 << 40), 1);
        assert_eq!(Region::slots_per_piece(PIECE_BYTES - 65536), 1);
        // Slots that are no whole pages come in numbers that are.
        assert!(Region::slots_per_piece(64).is_multiple_of(64));
        assert_eq!(Region::slots_per_piece((1 << 20) + 64) % 64, 0);
        let region = Region::new(5, 10 << 20).unwrap();
        let pieces: Vec<_> = region.pieces().collect();
        assert_eq!(pieces.len(), 5);
        let region = Region::new(50, 1 << 20).unwrap();
        let pieces: Vec<_> = region.pieces().collect();
        assert_eq!(pieces.len(), 4);
        assert_eq!(pieces[3], 48 << 20..50 << 20);
        assert!(pieces.windows(2).all(|pair| pair[0].end == pair[1].start));
    }

    #[test]
    fn touching_keeps_bytes_and_a_moved_piece_lies_elsewhere() {
        let region = Region::new(50, 1 << 20).unwrap();
        let offset = (16 << 20) + 5;
        // SAFETY: nobody else knows the region; both offsets are inside.
        unsafe {
            *region.address(offset) = 7;
            region.touch(12 << 20, 10 << 20).unwrap();
            assert_eq!(*region.address(offset), 7);
        }
        region.touch(0, u64::MAX).unwrap();
        let mut elsewhere = vec![9u8; 16 << 20];
        region.move_piece(1, elsewhere.as_mut_ptr());
        // SAFETY: the moved piece is `elsewhere`, which outlives the region's use.
        unsafe {
            assert_eq!(*region.address(offset), 9);
            assert_eq!(*region.address(0), 0);
            assert_eq!(region.hash(16 << 20..17 << 20), xxh3_64(&[9; 1 << 20]));
        }
    }
}
