//! Ranges of equal length that lie equally far apart on both sides: one copy of the driver moves them.
//!
//! A short range costs the copy engine some time besides that of its bytes: on an H200 0.2 to 0.4 us in a
//! batch of stores, 0.4 to 1.6 us in one of loads, but less than 0.1 us as a row of a copy of several
//! rows, which itself costs 2.2 us (loads 2.5). Rows are found in two ways: pages of one tensor, where
//! neighbouring blocks go to neighbouring slots; and the layers of a block, where the engine has all
//! layers in one allocation.

use kvoffload_core::jobs::JobKind;

use super::piece::{Home, Piece, Range};

/// Longer ranges make 50 GB/s in a batch; rows of them were not measured.
const WIDEST: u64 = 64 << 10;

/// Fewer rows are copied as fast in a batch: of 8 KiB, 8 rows make 18 GB/s out and 17 in, 16 rows 27 and
/// 25, 128 rows 44 and 47; a batch 19 and 10.
fn fewest(kind: JobKind) -> u32 {
    match kind {
        JobKind::Store => 16,
        JobKind::Load => 8,
    }
}

/// What one copy moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rows {
    pub(super) device: u64,
    pub(super) host: usize,
    /// Bytes of a row.
    pub(super) width: u64,
    pub(super) count: u32,
    /// Bytes from the start of a row to the start of the next; 0 if there is one only.
    pub(super) device_step: u64,
    pub(super) host_step: u64,
}

impl Rows {
    fn of(range: &Range) -> Self {
        Self {
            device: range.device,
            host: range.host,
            width: range.bytes,
            count: 1,
            device_step: 0,
            host_step: 0,
        }
    }

    /// Takes a range as the next row if it is where that should be; no step is longer than `longest`.
    fn take(&mut self, range: &Range, longest: u64) -> bool {
        if range.bytes != self.width {
            return false;
        }
        let device = range.device.checked_sub(self.device);
        let host = range.host.checked_sub(self.host);
        let (Some(device), Some(host)) = (device, host) else {
            return false;
        };
        let host = host as u64;
        if self.count == 1 {
            let steps = self.width..=longest;
            if !steps.contains(&device) || !steps.contains(&host) {
                return false;
            }
            (self.device_step, self.host_step) = (device, host);
        } else {
            let count = u64::from(self.count);
            if (device, host) != (count * self.device_step, count * self.host_step) {
                return false;
            }
        }
        self.count += 1;
        true
    }

    /// Whether one copy of all is faster than a batch.
    pub(super) fn are_worth_it(&self, kind: JobKind) -> bool {
        self.count >= fewest(kind) && self.width <= WIDEST
    }

    /// What copying it costs, in ranges of a batch.
    fn cost(&self, kind: JobKind) -> u64 {
        let one_by_one = !self.are_worth_it(kind);
        if one_by_one { self.count } else { fewest(kind) }.into()
    }

    /// Device address and host address of each row.
    pub(super) fn each(&self) -> impl Iterator<Item = (u64, usize)> + use<> {
        let Self {
            device,
            host,
            device_step,
            host_step,
            ..
        } = *self;
        let at = move |row| {
            let row = u64::from(row);
            (
                device + row * device_step,
                host + (row * host_step) as usize,
            )
        };
        (0..self.count).map(at)
    }
}

/// Finds rows. Keeps its memory from one piece to the next.
#[derive(Debug, Default)]
pub(super) struct Finder {
    found: Vec<Rows>,
    other: Vec<Rows>,
    /// What of it is worth a copy of its own, and the rest.
    many: Vec<Rows>,
    few: Vec<Rows>,
    /// Of each tensor: the rows that its next range may go on, and where they lie.
    open: Vec<Option<(Home, Rows)>>,
}

impl Finder {
    /// All ranges of a piece, in as cheap copies as there are: those that are worth one of their own, and
    /// the others. No step is longer than `longest` bytes.
    pub(super) fn find(
        &mut self,
        piece: &Piece,
        kind: JobKind,
        longest: u64,
    ) -> (&[Rows], &[Rows]) {
        self.found.clear();
        self.by_tensor(&piece.ranges, longest);
        self.other.clear();
        self.by_layer(&piece.ranges, longest);
        let cost = |found: &[Rows]| found.iter().map(|rows| rows.cost(kind)).sum::<u64>();
        if cost(&self.other) < cost(&self.found) {
            std::mem::swap(&mut self.found, &mut self.other);
        }
        self.many.clear();
        self.few.clear();
        for &rows in &self.found {
            match rows.are_worth_it(kind) {
                true => self.many.push(rows),
                false => self.few.push(rows),
            }
        }
        (&self.many, &self.few)
    }

    /// Rows are pages of one tensor; those of different tensors come in turns.
    fn by_tensor(&mut self, ranges: &[Range], longest: u64) {
        for range in ranges {
            let tensor = range.home.tensor as usize;
            if tensor >= self.open.len() {
                self.open.resize(tensor + 1, None);
            }
            let over = place(&mut self.open[tensor], range, longest);
            self.found.extend(over);
        }
        let open = self.open.iter_mut().filter_map(Option::take);
        self.found.extend(open.map(|(_, rows)| rows));
    }

    /// Rows are ranges that follow each other.
    fn by_layer(&mut self, ranges: &[Range], longest: u64) {
        let mut open = None;
        for range in ranges {
            let over = place(&mut open, range, longest);
            self.other.extend(over);
        }
        self.other.extend(open.map(|(_, rows)| rows));
    }
}

/// Makes a range the next row of the open rows; or the first of new ones, and answers the others.
fn place(open: &mut Option<(Home, Rows)>, range: &Range, longest: u64) -> Option<Rows> {
    if let Some((home, rows)) = open
        && home.is_beside(range.home)
        && rows.take(range, longest)
    {
        return None;
    }
    let over = open.replace((range.home, Rows::of(range)));
    over.map(|(_, rows)| rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONGEST: u64 = 1 << 31;
    const KIND: JobKind = JobKind::Store;

    /// A piece of (device, host, bytes, home).
    fn piece(ranges: impl IntoIterator<Item = (u64, usize, u64, Home)>) -> Piece {
        let mut piece = Piece::default();
        for (device, host, bytes, home) in ranges {
            piece.push(device, host, bytes, false, home);
        }
        piece
    }

    fn home(tensor: u32, allocation: u64, region_piece: u64) -> Home {
        Home {
            tensor,
            allocation,
            region_piece,
        }
    }

    /// Slots of 2 layers; the layers' tensors are allocations of their own.
    fn slots(blocks: &[u64], slots: &[usize]) -> Piece {
        let places = blocks.iter().zip(slots);
        piece(places.flat_map(|(&block, &slot)| {
            [0, 1].map(|layer| {
                let device = (u64::from(layer) << 40) + block * 100;
                let host = slot * 256 + layer as usize * 100;
                (device, host, 100, home(layer, layer.into(), 0))
            })
        }))
    }

    /// All rows of a piece.
    fn find(finder: &mut Finder, piece: &Piece, longest: u64) -> Vec<Rows> {
        let (many, few) = finder.find(piece, KIND, longest);
        [many, few].concat()
    }

    /// (count, steps) of what was found.
    fn shapes(found: &[Rows]) -> Vec<(u32, u64, u64)> {
        let shape = |rows: &Rows| (rows.count, rows.device_step, rows.host_step);
        found.iter().map(shape).collect()
    }

    #[test]
    fn neighbouring_blocks_in_neighbouring_slots_are_rows_of_each_tensor() {
        let mut finder = Finder::default();
        let found = find(&mut finder, &slots(&[7, 8, 9, 10], &[3, 4, 5, 6]), LONGEST);
        assert_eq!(shapes(&found), [(4, 100, 256), (4, 100, 256)]);
        // Every second one, too; where the step changes, others begin.
        let found = find(&mut finder, &slots(&[1, 3, 5, 6], &[0, 2, 4, 5]), LONGEST);
        let expected = [(3, 200, 512), (3, 200, 512), (1, 0, 0), (1, 0, 0)];
        assert_eq!(shapes(&found), expected);
    }

    #[test]
    fn what_goes_down_on_one_side_is_not_rows() {
        let mut finder = Finder::default();
        let found = find(&mut finder, &slots(&[10, 9, 8], &[3, 4, 5]), LONGEST);
        assert_eq!(shapes(&found), [(1, 0, 0); 6]);
        let found = find(&mut finder, &slots(&[8, 9, 10], &[5, 4, 3]), LONGEST);
        assert_eq!(shapes(&found), [(1, 0, 0); 6]);
    }

    #[test]
    fn layers_of_one_allocation_are_rows() {
        let layers = |allocation: fn(u32) -> u64| {
            piece((0..20u32).map(move |layer| {
                let device = u64::from(layer) * 5000;
                let host = layer as usize * 100;
                (device, host, 100, home(layer, allocation(layer), 0))
            }))
        };
        let mut finder = Finder::default();
        let found = find(&mut finder, &layers(|_| 1), LONGEST);
        assert_eq!(shapes(&found), [(20, 5000, 100)]);
        let found = find(&mut finder, &layers(|layer| u64::from(layer / 18)), LONGEST);
        assert_eq!(shapes(&found), [(18, 5000, 100), (2, 5000, 100)]);
        let found = find(&mut finder, &layers(|_| 1), 4999);
        assert_eq!(found.len(), 20);
    }

    #[test]
    fn rows_are_many_and_short() {
        let rows = |count, width| {
            let at = |at: u64| (at * width, at as usize * 99_999, width, home(0, 0, 0));
            [JobKind::Store, JobKind::Load].map(|kind| {
                let mut finder = Finder::default();
                let (many, few) = finder.find(&piece((0..count).map(at)), kind, LONGEST);
                assert_eq!(many.len() + few.len(), 1);
                many.len() == 1
            })
        };
        assert_eq!(rows(16, 65_536), [true, true]);
        assert_eq!(rows(15, 8192), [false, true]);
        assert_eq!(rows(7, 8192), [false, false]);
        assert_eq!(rows(99, 65_537), [false, false]);
    }

    #[test]
    fn rows_end_where_memory_of_the_region_does() {
        let ranges = (0..12u64).map(|at| (at * 8, at as usize * 16, 8, home(0, 0, at / 5)));
        let mut finder = Finder::default();
        let found = find(&mut finder, &piece(ranges), LONGEST);
        assert_eq!(shapes(&found), [(5, 8, 16), (5, 8, 16), (2, 8, 16)]);
    }

    #[test]
    fn no_row_reaches_into_the_next() {
        let ranges = [(0, 0, 8), (4, 16, 8), (16, 20, 8)].map(|(d, h, b)| (d, h, b, home(0, 0, 0)));
        let mut finder = Finder::default();
        assert_eq!(find(&mut finder, &piece(ranges), LONGEST).len(), 3);
    }

    #[test]
    fn every_range_is_copied_once() {
        let mut finder = Finder::default();
        let mut random = 1u64;
        let mut draw = |below: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        for _ in 0..2000 {
            let count = draw(40);
            let ranges: Vec<_> = (0..count)
                .map(|_| {
                    let (tensor, at) = (draw(3) as u32, draw(20));
                    let device = u64::from(tensor) * 1000 + at * 32;
                    let host = ((at + draw(2)) * 96) as usize;
                    let home = home(tensor, u64::from(tensor / 2), draw(8) / 7);
                    (device, host, 16 + draw(5) / 4 * 8, home)
                })
                .collect();
            let found = find(&mut finder, &piece(ranges.clone()), LONGEST);
            let rows = found.iter().flat_map(|rows| {
                let width = rows.width;
                rows.each().map(move |(device, host)| (device, host, width))
            });
            let mut copied: Vec<_> = rows.collect();
            let mut wanted: Vec<_> = ranges.iter().map(|&(d, h, b, _)| (d, h, b)).collect();
            copied.sort_unstable();
            wanted.sort_unstable();
            assert_eq!(copied, wanted);
        }
    }
}
