//! Whether kernels of ours find room on the device.
//!
//! The staging kernel needs a warp's room on the device's multiprocessors. Some kernels of an engine
//! leave none for tens of milliseconds (attention over long prompts): then staged pieces *starve*, and
//! others should go the direct way, which needs no multiprocessor. From then on an empty kernel is sent
//! ahead now and then, and when one comes through in time, so will pieces. Stores keep to the direct way
//! for a while longer: such kernels come again with every layer, and a store is seldom waited for.

use std::time::{Duration, Instant};

use kvoffload_core::jobs::JobKind;

use super::error::DriverError;
use super::queue::{Is, Passage, Queue};

/// How long stores keep to the direct way after pieces have starved: an engine's step over long prompts
/// takes about a second.
const WARY: Duration = Duration::from_millis(if cfg!(test) { 5 } else { 2000 });

/// What is known of it in one direction.
pub(super) struct Room {
    kind: JobKind,
    /// Staged pieces starve, or have starved and no kernel has come through in time since.
    starving: bool,
    /// When they were last seen to.
    starved: Option<Instant>,
    /// That was not long ago, and these are stores.
    wary: bool,
    /// The oldest staged piece waits for compute.
    held_up: bool,
    /// An empty kernel that finds out, and whether it has taken too long.
    probe: Option<(Passage, bool)>,
}

impl Room {
    pub(super) fn new(kind: JobKind) -> Self {
        Self {
            kind,
            starving: false,
            starved: None,
            wary: false,
            held_up: false,
            probe: None,
        }
    }

    /// Whether a staged piece would, or might, wait for long behind others: for a kernel of somebody else
    /// to end, or for compute that a job which somebody waits for comes after.
    pub(super) fn is_short(&self) -> bool {
        self.starving || self.held_up || self.wary
    }

    /// Looks at the staged pieces in the queues. `send` sends an empty kernel ahead, if there can be one.
    pub(super) fn look(
        &mut self,
        staged: &mut Queue,
        send: impl FnOnce() -> Result<Option<Passage>, DriverError>,
    ) -> Result<(), DriverError> {
        let passage = staged.oldest().and_then(|piece| piece.passage.as_mut());
        let state = passage.map(Passage::state).transpose()?;
        self.held_up = state == Some(Is::Computing);
        let mut starves = state == Some(Is::Starving);
        self.starving |= starves;
        if self.starving && !starves {
            starves = self.find_out(staged.is_empty(), send)?;
        }
        self.note(starves, Instant::now());
        Ok(())
    }

    /// Notes whether something starves now.
    fn note(&mut self, starves: bool, now: Instant) {
        if starves {
            self.starved = Some(now);
        }
        let since = self.starved.map(|starved| now.duration_since(starved));
        self.wary = self.kind == JobKind::Store && since.is_some_and(|since| since < WARY);
    }

    /// Finds out whether kernels come through again; says whether one starves now.
    fn find_out(
        &mut self,
        may_send: bool,
        send: impl FnOnce() -> Result<Option<Passage>, DriverError>,
    ) -> Result<bool, DriverError> {
        if let Some((probe, late)) = &mut self.probe {
            match probe.state()? {
                Is::OnItsWay | Is::Computing => return Ok(false),
                Is::Starving => {
                    // One at a time: what is put behind it starves as well.
                    *late = true;
                    return Ok(true);
                }
                Is::Over if *late => self.probe = None,
                Is::Over => {
                    (self.starving, self.probe) = (false, None);
                    return Ok(false);
                }
            }
        }
        if may_send {
            match send() {
                Ok(probe) => self.probe = probe.map(|probe| (probe, false)),
                Err(error) if error.is_fatal() => return Err(error),
                // Another time.
                Err(_) => {}
            }
        }
        Ok(false)
    }

    /// Nothing is in the queues any more.
    pub(super) fn forget_probe(&mut self) {
        self.probe = None;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::super::driver::{Device, Op, fresh};
    use super::*;

    #[test]
    fn a_late_probe_keeps_stores_away_as_well() {
        let device = Device::open(0, 0, false).unwrap();
        let stream = device.stream(false).unwrap();
        device.push(stream.id, Op::Wait(fresh()));
        let over = Arc::new(stream.record(&device).unwrap());
        let (mut room, mut staged) = (Room::new(JobKind::Store), Queue::default());
        room.starving = true;
        let probe = || Ok(Some(Passage::new([None, None], Arc::clone(&over), 0)));
        room.look(&mut staged, probe).unwrap();
        assert_eq!(room.starved, None);
        for _ in 0..2 {
            // From the first time on it could run.
            room.look(&mut staged, || Ok(None)).unwrap();
            thread::sleep(Duration::from_millis(5));
        }
        room.look(&mut staged, || Ok(None)).unwrap();
        assert!(room.starved.is_some() && room.wary);
    }

    #[test]
    fn stores_keep_away_for_a_while_and_loads_do_not() {
        for kind in [JobKind::Store, JobKind::Load] {
            let mut room = Room::new(kind);
            let begin = Instant::now();
            room.note(false, begin);
            assert!(!room.is_short());
            room.note(true, begin);
            room.note(false, begin + WARY / 2);
            assert_eq!(room.is_short(), kind == JobKind::Store);
            room.note(true, begin + WARY / 2);
            room.note(false, begin + WARY);
            assert_eq!(room.is_short(), kind == JobKind::Store);
            room.note(false, begin + 2 * WARY);
            assert!(!room.is_short());
        }
    }
}
