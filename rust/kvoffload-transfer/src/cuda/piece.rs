//! What is put into the device's queues at a time.

/// The most copies in a piece. (Batches of 50,000 and more are reported to crash some drivers.)
pub(super) const MOST_COPIES: usize = 32_768;
/// What does not follow on what came before starts at a multiple of this in staging memory.
const STAGING_ALIGN: u64 = 64;

/// One range to copy: contiguous on both sides.
#[derive(Debug, Clone, Copy)]
pub(super) struct Range {
    pub(super) device: u64,
    pub(super) host: usize,
    pub(super) bytes: u64,
    /// Where it lies in the staging chunk.
    pub(super) staging: u64,
    /// Whether its host side goes on where that of the range before it ended, in the same memory.
    pub(super) follows: bool,
    pub(super) home: Home,
}

/// Where a range belongs. The driver copies no rows across two allocations, nor across two
/// registrations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Home {
    pub(super) tensor: u32,
    /// Start of the device's allocation.
    pub(super) allocation: u64,
    /// Start of the region's piece.
    pub(super) region_piece: u64,
}

impl Home {
    /// Whether both are in the same memory on both sides.
    pub(super) fn is_beside(self, other: Self) -> bool {
        (self.allocation, self.region_piece) == (other.allocation, other.region_piece)
    }
}

/// Ranges that are put into the queues together.
#[derive(Debug, Default)]
pub(super) struct Piece {
    pub(super) ranges: Vec<Range>,
    /// Bytes of a staging chunk that they take.
    pub(super) staging: u64,
    bytes: u64,
}

impl Piece {
    pub(super) fn clear(&mut self) {
        self.ranges.clear();
        (self.staging, self.bytes) = (0, 0);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Bytes of all its ranges.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How long a range may be for it to fit into a chunk of `chunk` bytes and at most `most` ranges; 0:
    /// the piece is full.
    pub(super) fn room(&self, chunk: u64, most: usize) -> u64 {
        if self.ranges.len() >= most {
            return 0;
        }
        chunk.saturating_sub(self.staging.next_multiple_of(STAGING_ALIGN))
    }

    /// Adds a range that fits.
    pub(super) fn push(&mut self, device: u64, host: usize, bytes: u64, follows: bool, home: Home) {
        let follows = follows && !self.ranges.is_empty();
        if !follows {
            self.staging = self.staging.next_multiple_of(STAGING_ALIGN);
        }
        let staging = self.staging;
        self.staging += bytes;
        self.bytes += bytes;
        self.ranges.push(Range {
            device,
            host,
            bytes,
            staging,
            follows,
            home,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_is_packed_and_the_rest_is_aligned() {
        let mut piece = Piece::default();
        assert_eq!(piece.room(4096, MOST_COPIES), 4096);
        piece.push(1, 1000, 100, true, Home::default());
        piece.push(2, 1100, 100, true, Home::default());
        piece.push(3, 5000, 10, false, Home::default());
        let places: Vec<_> = piece
            .ranges
            .iter()
            .map(|r| (r.staging, r.follows))
            .collect();
        assert_eq!(places, [(0, false), (100, true), (256, false)]);
        assert_eq!(piece.room(4096, MOST_COPIES), 4096 - 320);
        assert_eq!(piece.room(266, 4), 0);
        assert_eq!(piece.room(4096, 3), 0);
    }
}
