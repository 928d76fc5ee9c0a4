//! Makes a piece of a job's next copies, as far as their host memory is ready.

use std::ops::Range;

use kvoffload_core::plan::CopyRun;

use super::job::Job;
use super::piece::{Home, Piece};
use super::pinned::{PinnedRegion, Ready};
use super::shared::Common;

/// Fills one piece.
pub(super) struct Filler<'a> {
    common: &'a Common,
    pinned: &'a PinnedRegion,
    piece: &'a mut Piece,
    /// Bytes and ranges that the piece may have.
    chunk: u64,
    most: usize,
    /// The piece of the region that was asked for last and is ready, and its address.
    ready: Range<u64>,
    base: usize,
    /// Where the first range of the piece lies in the region, and where the last one ends.
    first: Option<u64>,
    end: u64,
}

impl<'a> Filler<'a> {
    /// Of a piece of at most `chunk` bytes and `most` ranges, which replaces what `piece` holds.
    pub(super) fn new(
        common: &'a Common,
        pinned: &'a PinnedRegion,
        piece: &'a mut Piece,
        chunk: u64,
        most: usize,
    ) -> Self {
        piece.clear();
        Self {
            common,
            pinned,
            piece,
            chunk,
            most,
            ready: 0..0,
            base: 0,
            first: None,
            end: u64::MAX,
        }
    }

    /// Takes copies out of a job until the piece is full, or there are no more, or the memory of the
    /// next one is not ready yet; says where the first one lies in the region, if there is one. An error
    /// is the offset of memory that cannot be had.
    pub(super) fn fill(mut self, job: &mut Job) -> Result<Option<u64>, u64> {
        loop {
            let room = self.room();
            if room == 0 {
                break;
            }
            if self.take_pages(job) {
                continue;
            }
            let held = job.held.take();
            let Some(mut run) = held.or_else(|| job.work.next_run(&self.common.layout, room))
            else {
                break;
            };
            if run.bytes > room {
                if !self.piece.is_empty() {
                    job.held = Some(run);
                    break;
                }
                // It was asked for when pieces were longer.
                let (first, rest) = run.split_at(room);
                (run, job.held) = (first, Some(rest));
            }
            match self.find(run.region_offset) {
                Ready::Yes => self.push(run),
                Ready::Later => {
                    job.hold(run);
                    break;
                }
                Ready::Never => return Err(run.region_offset),
            }
        }
        debug_assert!(self.piece.staging <= self.chunk && self.piece.ranges.len() <= self.most);
        Ok(self.first)
    }

    /// Takes several pages of one block, each of which costs about half as much so as by itself; false if
    /// there are none to be had so, or the first is too long or its memory not ready.
    fn take_pages(&mut self, job: &mut Job) -> bool {
        if job.held.is_some() {
            return false;
        }
        let Some(pages) = job.work.pages(&self.common.layout) else {
            return false;
        };
        let mut taken = 0;
        for run in pages.runs() {
            // All of them are in one slot, and a slot is in one piece of the region.
            let fits = run.bytes <= self.room();
            if !fits || taken == 0 && self.find(run.region_offset) != Ready::Yes {
                break;
            }
            self.push(run);
            taken += 1;
        }
        if taken > 0 {
            job.work.skip(taken);
        }
        taken > 0
    }

    /// How long the next range may be; 0: there is to be none.
    fn room(&self) -> u64 {
        self.piece.room(self.chunk, self.most)
    }

    /// Makes `ready` and `base` those of a byte of the region, if its memory is.
    fn find(&mut self, at: u64) -> Ready {
        // Slots are long: the next range mostly lies in the same piece.
        if self.ready.contains(&at) {
            return Ready::Yes;
        }
        let ready = self.pinned.ready(at);
        if ready == Ready::Yes {
            let piece_bytes = self.common.layout.piece_bytes();
            let start = at / piece_bytes * piece_bytes;
            self.ready = start..start + piece_bytes;
            self.base = self.pinned.address(start);
        }
        ready
    }

    /// Adds a range whose memory was found.
    fn push(&mut self, run: CopyRun) {
        let at = run.region_offset;
        self.first.get_or_insert(at);
        let tensor = &self.common.tensors[run.tensor as usize];
        let home = Home {
            tensor: run.tensor,
            allocation: tensor.allocation,
            region_piece: self.ready.start,
        };
        // Pieces of the region are not copied across: they may lie in different memory.
        let follows = at == self.end && at != self.ready.start;
        let host = self.base + (at - self.ready.start) as usize;
        let device = tensor.address + run.device_offset;
        self.piece.push(device, host, run.bytes, follows, home);
        self.end = at + run.bytes;
    }
}
