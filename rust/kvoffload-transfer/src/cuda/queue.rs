//! What is in the device's queues, and whether it gets through.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::error::DriverError;
use super::objects::Event;
use super::staging::Place;

/// The most pieces that keep to the pace.
const MOST_PIECES: usize = 16;
/// Bytes in the queues that keep to the pace, and one piece more: what a new job has to wait for, and
/// how long the thread may sleep before the copy engine has nothing to do (600 us on a fast bus).
pub(super) const PACE_BYTES: u64 = 32 << 20;
/// A kernel that takes longer to come through starves; its work takes some 20 microseconds.
const STARVES: Duration = Duration::from_millis(2);
/// And for so many bytes one microsecond more: fragments of odd sizes are moved byte by byte.
const BYTES_PER_US: u64 = 4000;

/// A piece in the queues.
pub(super) struct InFlight {
    pub(super) done: Arc<Event>,
    pub(super) bytes: u64,
    /// Where it is staged; `None` for a direct piece.
    pub(super) place: Option<Place>,
    /// The way of its kernel through the device; `None` for a direct piece.
    pub(super) passage: Option<Passage>,
}

/// A kernel's way through the device: it should be over soon after it may begin.
pub(super) struct Passage {
    /// What comes before it: compute of the engine, and a copy.
    waits: [Option<Arc<Event>>; 2],
    /// After it.
    over: Arc<Event>,
    /// Since when it could run, and how long it may take.
    free: Option<Instant>,
    limit: Duration,
}

impl Passage {
    /// Of a kernel that moves so many bytes.
    pub(super) fn new(waits: [Option<Arc<Event>>; 2], over: Arc<Event>, bytes: u64) -> Self {
        Self {
            waits,
            over,
            free: None,
            limit: STARVES + Duration::from_micros(bytes / BYTES_PER_US),
        }
    }

    /// Where it is.
    pub(super) fn state(&mut self) -> Result<Is, DriverError> {
        if self.over.is_done()? {
            return Ok(Is::Over);
        }
        for (wait, is) in self.waits.iter_mut().zip([Is::Computing, Is::OnItsWay]) {
            if let Some(event) = wait {
                if !event.is_done()? {
                    return Ok(is);
                }
                *wait = None;
            }
        }
        let free = self.free.get_or_insert_with(Instant::now);
        Ok(if free.elapsed() > self.limit {
            Is::Starving
        } else {
            Is::OnItsWay
        })
    }
}

/// What can be said of a kernel's passage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Is {
    /// It waits for compute of the engine, and so does all that is put behind it.
    Computing,
    OnItsWay,
    Starving,
    Over,
}

/// Pieces that have been put into the queues of one path; they end in this order.
#[derive(Default)]
pub(super) struct Queue(VecDeque<InFlight>);

impl Queue {
    pub(super) fn has_room(&self) -> bool {
        let bytes = self.bytes();
        // One behind the one that is under way, if that is not too long by itself.
        let behind_one = self.0.len() == 1 && bytes <= PACE_BYTES;
        behind_one || self.0.len() < MOST_PIECES && bytes < PACE_BYTES
    }

    /// Bytes of all its pieces.
    pub(super) fn bytes(&self) -> u64 {
        self.0.iter().map(|piece| piece.bytes).sum()
    }

    /// Takes out the oldest piece if it is done.
    pub(super) fn pop_done(&mut self) -> Result<Option<InFlight>, DriverError> {
        match self.0.front() {
            Some(piece) if piece.done.is_done()? => Ok(self.0.pop_front()),
            _ => Ok(None),
        }
    }

    pub(super) fn push(&mut self, piece: InFlight) {
        self.0.push_back(piece);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn oldest(&mut self) -> Option<&mut InFlight> {
        self.0.front_mut()
    }

    /// The end of the newest piece whose staging memory is used again by a new one. Pieces end in order,
    /// so waiting for it is enough.
    pub(super) fn last_use(&self, place: &Place) -> Option<Arc<Event>> {
        let mut newest_first = self.0.iter().rev();
        let reused = |older: &InFlight| {
            let older = older.place.as_ref();
            older.is_some_and(|older| place.reuses(older))
        };
        newest_first
            .find(|older| reused(older))
            .map(|older| Arc::clone(&older.done))
    }
}

#[cfg(test)]
mod tests {
    use super::super::driver::Device;
    use super::*;

    #[test]
    fn what_keeps_to_the_pace() {
        let device = Device::open(0, 0, false).unwrap();
        let stream = device.stream(false).unwrap();
        let has_room = |pieces: &[u64]| {
            let mut queue = Queue::default();
            for &bytes in pieces {
                queue.push(InFlight {
                    done: Arc::new(stream.record(&device).unwrap()),
                    bytes,
                    place: None,
                    passage: None,
                });
            }
            queue.has_room()
        };
        assert!(has_room(&[]));
        assert!(has_room(&[PACE_BYTES]), "one behind it");
        assert!(!has_room(&[PACE_BYTES, 1]));
        assert!(!has_room(&[PACE_BYTES + 1]), "too long by itself");
        assert!(has_room(&[PACE_BYTES / 2, PACE_BYTES / 2 - 1]));
        assert!(!has_room(&[1; MOST_PIECES]));
    }
}
