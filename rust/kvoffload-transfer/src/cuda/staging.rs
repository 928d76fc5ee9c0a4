//! Staging memory on the device, and the list of fragments that the kernel reads: two rings.
//!
//! A piece gets a place in both. Its bytes in staging memory may still be in use by an older piece,
//! which the device can wait for; its entries in the list must be free, because the CPU writes them.

use std::sync::Arc;

use super::driver::Device;
use super::error::DriverError;
use super::fragment::{Fragment, LONGEST};
use super::kernel::Kernel;
use super::objects::{DeviceMemory, HostMemory};
use super::piece::{MOST_COPIES, Piece};

/// Into how many pieces the staging memory of one direction is divided at least. Two overlap: one is
/// packed while another is copied.
const CHUNKS: u64 = 2;
/// Where pieces start in the staging memory.
const PIECE_ALIGN: u64 = 4096;
/// Fragments that all pieces in the queues may have together.
const LIST: u64 = 1 << 19;

/// A ring in which every piece lies in one go. Positions only grow; what is at a position is at the
/// position modulo the ring's size.
#[derive(Debug)]
struct Ring {
    size: u64,
    align: u64,
    next: u64,
}

impl Ring {
    fn new(size: u64, align: u64) -> Self {
        Self {
            size,
            align,
            next: 0,
        }
    }

    /// Where the next piece of this length would start; the rest of the ring is left out if it is too
    /// short for the piece.
    fn start(&self, length: u64) -> u64 {
        if self.next % self.size + length > self.size {
            self.next.next_multiple_of(self.size)
        } else {
            self.next
        }
    }

    /// Takes the next `length` units; says where they start.
    fn take(&mut self, length: u64) -> u64 {
        let start = self.start(length);
        self.next = (start + length).next_multiple_of(self.align);
        start
    }
}

/// Where one piece is staged.
#[derive(Debug)]
pub(super) struct Place {
    /// The device's address of its first fragment in the list, how many there are, and the length of
    /// the longest.
    pub(super) list: u64,
    pub(super) count: u32,
    pub(super) longest: u32,
    /// The device's address of its staging memory.
    pub(super) chunk: u64,
    /// Positions of its staging memory, and how large the ring is.
    start: u64,
    end: u64,
    size: u64,
    /// Position after its last fragment.
    list_end: u64,
}

impl Place {
    /// Whether an older place's staging memory is used again by this one, or was by one in between.
    pub(super) fn reuses(&self, older: &Self) -> bool {
        older.start + self.size < self.end
    }
}

/// See the module's description.
pub(super) struct Staging {
    memory: DeviceMemory,
    kernel: Arc<Kernel>,
    bytes: Ring,
    list: HostMemory,
    list_address: u64,
    entries: Ring,
    /// Position before the oldest piece's fragments.
    oldest: u64,
}

impl Staging {
    pub(super) fn new(
        device: &Arc<Device>,
        kernel: Arc<Kernel>,
        bytes: u64,
    ) -> Result<Self, DriverError> {
        let memory = DeviceMemory::new(device, bytes as usize)?;
        let list = HostMemory::new(device, LIST as usize * size_of::<Fragment>())?;
        let list_address = list.device_address()?;
        Ok(Self {
            bytes: Ring::new(memory.bytes() as u64, PIECE_ALIGN),
            memory,
            kernel,
            list,
            list_address,
            entries: Ring::new(LIST, 1),
            oldest: 0,
        })
    }

    pub(super) fn kernel(&self) -> &Arc<Kernel> {
        &self.kernel
    }

    /// Bytes of the longest piece.
    pub(super) fn chunk(&self) -> u64 {
        self.bytes.size / CHUNKS / PIECE_ALIGN * PIECE_ALIGN
    }

    /// Whether the list has room for the fragments of any piece.
    pub(super) fn has_room(&self) -> bool {
        let most = MOST_COPIES as u64 + self.chunk() / u64::from(LONGEST) + 1;
        self.entries.start(most) + most <= self.oldest + LIST
    }

    /// Gives a piece its place, and writes its fragments into the list.
    ///
    /// # Panics
    /// The list has no room; see [`Staging::has_room`].
    pub(super) fn place(&mut self, piece: &Piece) -> Place {
        let fragments = piece.ranges.iter();
        let count: u64 = fragments
            .map(|range| range.bytes.div_ceil(LONGEST.into()))
            .sum();
        let first = self.entries.take(count);
        let list_end = self.entries.next;
        assert!(list_end <= self.oldest + LIST, "a list without room");
        let list = self.list.base().cast::<Fragment>();
        let mut at = (first % LIST) as usize;
        let mut longest = 0;
        for range in &piece.ranges {
            let mut done = 0;
            while done < range.bytes {
                let bytes = (range.bytes - done).min(LONGEST.into());
                let fragment = Fragment {
                    device: range.device + done,
                    // Exact: staging memory is far smaller than 4 GiB a piece.
                    staging: (range.staging + done) as u32,
                    bytes: bytes as u32,
                };
                // SAFETY: `at` is below LIST, because a piece's entries lie in one go; the memory has
                // LIST fragments and is aligned to pages, and no kernel reads this entry, which is not
                // between `oldest` and `first`.
                unsafe { list.add(at).write(fragment) };
                longest = longest.max(fragment.bytes);
                at += 1;
                done += bytes;
            }
        }
        let start = self.bytes.take(piece.staging);
        Place {
            list: self.list_address + first % LIST * size_of::<Fragment>() as u64,
            count: count as u32,
            longest,
            chunk: self.memory.address() + start % self.bytes.size,
            start,
            end: start + piece.staging,
            size: self.bytes.size,
            list_end,
        }
    }

    /// The oldest piece is done.
    pub(super) fn release(&mut self, place: &Place) {
        self.oldest = place.list_end;
    }

    /// No piece is left in the queues.
    pub(super) fn release_all(&mut self) {
        self.oldest = self.entries.next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every piece that has a byte in common with a new one, or is older than such a one, is found.
    #[test]
    fn a_place_knows_whose_bytes_it_uses_again() {
        let size = 1000;
        let mut ring = Ring::new(size, 1);
        let mut places: Vec<Place> = Vec::new();
        let lengths = [
            500, 500, 1, 499, 300, 300, 300, 300, 1000, 7, 993, 10, 400, 600, 250,
        ];
        for length in lengths.into_iter().cycle().take(300) {
            let start = ring.take(length);
            let new = Place {
                list: 0,
                count: 0,
                longest: 0,
                chunk: 0,
                start,
                end: start + length,
                size,
                list_end: 0,
            };
            assert!(start % size + length <= size, "in one go");
            let bytes =
                |place: &Place| place.start % size..place.start % size + place.end - place.start;
            let meet = |older: &Place| {
                let (a, b) = (bytes(older), bytes(&new));
                a.start < b.end && b.start < a.end
            };
            let newest = places.iter().rposition(meet);
            let found = places.iter().rposition(|older| new.reuses(older));
            assert!(found >= newest, "{found:?} {newest:?}");
            places.push(new);
        }
    }

    #[test]
    fn a_piece_that_is_too_long_for_the_rest_goes_to_the_start() {
        let mut ring = Ring::new(100, 10);
        assert_eq!([ring.take(55), ring.take(40), ring.take(1)], [0, 60, 100]);
        assert_eq!(ring.take(95), 200);
    }
}
