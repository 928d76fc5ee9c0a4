//! Jobs that are given up on the simulated device.

use super::*;
use crate::error::CopyError;

/// More one-block jobs of one direction, and with them a long one, than its queue has room for.
const SHORT_JOBS: usize = 15;
const PER_CHUNK: usize = 4;
/// Slots of the long job, and its blocks.
const LONG_SLOTS: std::ops::Range<usize> = SHORT_JOBS..SHORT_JOBS + 20;
const LONG_BLOCKS: std::ops::Range<usize> = SHORT_JOBS..SHORT_JOBS + 20 * PER_CHUNK;

impl Rig {
    fn pieces(&self) -> u64 {
        let stats: CudaStatsOf = self.engine.device_stats().into_iter().collect();
        stats["pieces"]
    }

    /// Waits until at least `least` pieces have been sent, and no more are.
    fn settled_pieces(&self, least: u64) -> u64 {
        let mut before = 0;
        loop {
            let now = self.pieces();
            if now == before && now >= least {
                return now;
            }
            before = now;
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn kernels_have_room(&self, room: bool) {
        let until = Instant::now() + LONG;
        self.engine.common.device.world.lock().no_room = (!room).then_some(until);
    }

    /// Waits for jobs while the device goes on, and takes all ends.
    fn ends_of(&mut self, jobs: &[u64]) -> Vec<crate::Completion> {
        let device = Arc::clone(&self.engine.common.device);
        while self.engine.wait(jobs, Duration::from_millis(1)).is_err() {
            device.world.lock().advance();
        }
        let ends = self.engine.take_finished();
        for end in &ends {
            self.live.retain(|(job, ..)| *job != end.job);
        }
        ends
    }

    /// Submits a job and gives it up some time later; says whether it ended before that.
    fn submit_and_cancel(&mut self, kind: JobKind) -> Option<bool> {
        let (jobs, blocks) = (self.jobs, self.blocks.clone());
        match kind {
            JobKind::Store => self.store(),
            JobKind::Load => self.load(),
        }
        if self.jobs == jobs {
            return None; // There is nothing to load.
        }
        let (job, load, targets) = self.live.last()?.clone();
        for _ in 0..self.draw(80) {
            self.engine.common.device.world.lock().advance();
            thread::sleep(Duration::from_micros(20));
        }
        self.engine.cancel(&[job]);
        let mut well = true;
        for end in self.ends_of(&[job]) {
            match end.outcome {
                Err(CopyError::Cancelled { job: named }) => {
                    assert_eq!((named, end.job), (job, job));
                    well = false;
                }
                outcome => assert_eq!(outcome, Ok(())),
            }
        }
        if well {
            return Some(true);
        }
        if !load {
            // Nothing that may be loaded is in the slots it was to write.
            for &slot in &self.newest {
                self.slots[slot] = None;
            }
            return Some(false);
        }
        for block in targets {
            if self.in_use(block, false) {
                // An earlier job has not ended, so this one has not started.
                self.blocks[block].clone_from(&blocks[block]);
            } else {
                // It is over: nothing of it comes after these bytes.
                self.write_block(block);
            }
        }
        Some(false)
    }
}

#[test]
fn of_a_job_in_the_queues_in_part_nothing_more_is_put_there() {
    for kind in [JobKind::Store, JobKind::Load] {
        let mut rig = Rig::new(Setup {
            path: CopyPath::Only(Path::Staged),
            per_chunk: PER_CHUNK as u32,
            ..Setup::default()
        });
        for block in 0..BLOCKS {
            rig.write_block(block);
        }
        let stored: Vec<usize> = (0..LONG_SLOTS.end * PER_CHUNK)
            .map(|at| at % BLOCKS)
            .collect();
        let slots: Vec<usize> = (0..LONG_SLOTS.end).collect();
        if kind == JobKind::Load {
            rig.submit(JobKind::Store, stored.clone(), &slots);
            rig.ends_of(&[1]);
        }
        let old = rig.blocks.clone();
        let before = rig.pieces();
        rig.kernels_have_room(false);
        for at in 0..SHORT_JOBS {
            rig.submit(kind, vec![at], &[at]);
            if kind == JobKind::Load {
                rig.blocks[at].clone_from(&old[stored[at * PER_CHUNK]]);
            }
        }
        let short: Vec<u64> = rig.live.iter().map(|(job, ..)| *job).collect();
        rig.submit(kind, LONG_BLOCKS.collect(), &LONG_SLOTS.collect::<Vec<_>>());
        let long = rig.jobs;
        // The long job has begun, and has no room to go on.
        let pieces = rig.settled_pieces(before + SHORT_JOBS as u64 + 1);
        rig.engine.cancel(&[long]);
        let waits = rig.engine.wait(&[long], Duration::from_millis(20));
        assert!(waits.is_err(), "what is in the queues has not come through");
        rig.kernels_have_room(true);
        for end in rig.ends_of(&[&short[..], &[long]].concat()) {
            let expected = match end.job == long {
                true => Err(CopyError::Cancelled { job: long }),
                false => Ok(()),
            };
            assert_eq!(end.outcome, expected);
        }
        assert_eq!(rig.pieces(), pieces, "{kind:?}");
        // Nothing of it comes after what is written now.
        for block in LONG_BLOCKS {
            rig.write_block(block);
        }
        assert!(rig.is_right());
    }
}

#[test]
fn a_job_that_waits_for_compute_ends_without_it() {
    let (mut rig, gate) = gated(CopyPath::Auto);
    let job = store_half(&mut rig, false);
    assert!(rig.engine.wait(&[job], Duration::from_millis(20)).is_err());
    let pieces = rig.pieces();
    rig.engine.cancel(&[job]);
    rig.engine.wait(&[job], LONG).unwrap();
    let ends = rig.ends_of(&[job]);
    assert_eq!(ends[0].outcome, Err(CopyError::Cancelled { job }));
    assert_eq!(rig.pieces(), pieces);
    open(&rig, gate);
    assert!(rig.is_right());
}

#[test]
fn random_cancels_leave_all_other_bytes_right() {
    let (mut well, mut cancelled) = (0, 0);
    for setup in setups() {
        let seed = setup.seed;
        let mut rig = Rig::new(setup);
        for _ in 0..120 {
            match rig.draw(12) {
                0..=2 => rig.write(),
                3 | 4 => rig.read(),
                5 => rig.store(),
                6 => rig.load(),
                7 => rig.wait_on(),
                8 => {
                    let until = Instant::now() + Duration::from_millis(rig.draw(8) as u64);
                    rig.engine.common.device.world.lock().no_room = Some(until);
                }
                at => {
                    let kind = if at % 2 == 0 {
                        JobKind::Store
                    } else {
                        JobKind::Load
                    };
                    match rig.submit_and_cancel(kind) {
                        Some(true) => well += 1,
                        Some(false) => cancelled += 1,
                        None => {}
                    }
                }
            }
            if rig.live.len() > 6 {
                rig.wait_on();
            }
            rig.take();
        }
        assert!(rig.is_right(), "seed {seed}");
    }
    assert!(
        well > 20 && cancelled > 20,
        "{well} ended well, {cancelled} did not"
    );
}
