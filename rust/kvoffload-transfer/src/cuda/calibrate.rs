//! Which path is faster on this machine, found out at start.
//!
//! Short measurements of both paths on scratch memory, in both directions, for fragments from 2 KiB to
//! 1 MiB: about 100 ms in all. Ranks of one host measure one after the other, because they share the
//! bus.

use std::fs::{File, OpenOptions};
use std::hint;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kvoffload_core::jobs::JobKind;
use rustix::fs::FlockOperation;

use super::driver::Device;
use super::error::DriverError;
use super::mover::{Mover, Path};
use super::objects::{DeviceMemory, HostMemory};
use super::piece::{Home, MOST_COPIES, Piece};

/// Fragment sizes that are measured, in ascending order.
const FRAGMENTS: [u64; 10] = [
    2 << 10,
    4 << 10,
    8 << 10,
    16 << 10,
    32 << 10,
    64 << 10,
    128 << 10,
    256 << 10,
    512 << 10,
    1 << 20,
];
/// Bytes of the scratch memory on each side.
const SCRATCH: u64 = 2 * MOVED;
/// What one measurement moves at most, and the most fragments.
const MOVED: u64 = if cfg!(test) { 1 << 20 } else { 32 << 20 };
const MOST_FRAGMENTS: u64 = 2048;
const REPEATS: usize = 2;
/// Fragments that lie together in host memory, as the layers of a block in a slot do.
const TOGETHER: u64 = 32;
/// Before the first byte of a job moves: one call of the driver, or a kernel and a call.
const FIRST: [f64; 2] = [8e-6, 20e-6];
/// How much faster staging must be to be used: it takes a little of the device from the engine.
const MARGIN: f64 = 1.03;
/// Below this fragment size staging wins where nothing was measured.
const USUALLY: u64 = 512 << 10;
/// How long to wait for another rank that measures.
const TURN: Duration = Duration::from_secs(2);

/// Which path jobs take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CopyPath {
    /// The faster one for each job, by the calibration.
    #[default]
    Auto,
    /// Always this one.
    Only(Path),
}

/// What was measured: for each direction (store, load) and fragment size, bytes per second.
#[derive(Debug, Clone, PartialEq)]
pub struct Calibration {
    /// Fragment sizes in bytes.
    pub fragments: Vec<u64>,
    /// Of the direct path.
    pub direct: [Vec<f64>; 2],
    /// Of the staged path.
    pub staged: [Vec<f64>; 2],
    /// How long it took.
    pub seconds: f64,
}

/// Chooses a job's path.
#[derive(Debug)]
pub(super) struct Chooser {
    pub(super) wanted: CopyPath,
    pub(super) has_staging: bool,
    pub(super) calibration: Option<Calibration>,
}

fn index(kind: JobKind) -> usize {
    match kind {
        JobKind::Store => 0,
        JobKind::Load => 1,
    }
}

impl Chooser {
    /// The path for a job whose first piece has so many ranges and bytes, of `all` bytes.
    pub(super) fn choose(&self, kind: JobKind, ranges: u64, bytes: u64, all: u64) -> Path {
        match self.wanted {
            _ if !self.has_staging => return Path::Direct,
            CopyPath::Only(path) => return path,
            CopyPath::Auto => {}
        }
        let fragment = bytes / ranges.max(1);
        let Some(calibration) = &self.calibration else {
            return if fragment < USUALLY {
                Path::Staged
            } else {
                Path::Direct
            };
        };
        let at = index(kind);
        let time = |rates: &[f64], first: f64| {
            first + all as f64 / interpolate(&calibration.fragments, rates, fragment)
        };
        let direct = time(&calibration.direct[at], FIRST[0]);
        let staged = time(&calibration.staged[at], FIRST[1]);
        if staged * MARGIN < direct {
            Path::Staged
        } else {
            Path::Direct
        }
    }
}

/// The rate for a size between two that were measured, on logarithmic scales; the nearest outside.
/// Below the smallest a rate is proportional to the size: each fragment costs the same there.
fn interpolate(sizes: &[u64], rates: &[f64], size: u64) -> f64 {
    let above = sizes.partition_point(|&measured| measured < size);
    match above {
        0 => rates[0] * size as f64 / sizes[0] as f64,
        _ if above == sizes.len() => rates[above - 1],
        _ => {
            let (low, high) = (sizes[above - 1] as f64, sizes[above] as f64);
            let part = (size as f64 / low).ln() / (high / low).ln();
            rates[above - 1].powf(1.0 - part) * rates[above].powf(part)
        }
    }
}

/// Measures both paths with the movers that will be used, stores first. The context is current.
pub(super) fn calibrate(
    device: &Arc<Device>,
    movers: &mut [Mover; 2],
) -> Result<Calibration, DriverError> {
    let _turn = take_turn();
    let started = Instant::now();
    let scratch = DeviceMemory::new(device, SCRATCH as usize)?;
    let host = HostMemory::new(device, SCRATCH as usize)?;
    let mut rates: [[Vec<f64>; 2]; 2] = Default::default();
    for (mover, rates) in movers.iter_mut().zip(&mut rates) {
        for (path, rates) in [Path::Direct, Path::Staged].into_iter().zip(rates) {
            let measured = measure_all(mover, path, &scratch, &host);
            // Nothing may use the scratch memory when it goes, also after a failure.
            mover.drain()?;
            *rates = measured?;
        }
    }
    let [[direct_store, staged_store], [direct_load, staged_load]] = rates;
    Ok(Calibration {
        fragments: sizes(&movers[0]).collect(),
        direct: [direct_store, direct_load],
        staged: [staged_store, staged_load],
        seconds: started.elapsed().as_secs_f64(),
    })
}

/// Bytes per second for every size of fragments, on one path.
fn measure_all(
    mover: &mut Mover,
    path: Path,
    scratch: &DeviceMemory,
    host: &HostMemory,
) -> Result<Vec<f64>, DriverError> {
    // The first use of a path includes what the driver does once.
    measure(mover, path, scratch, host, FRAGMENTS[0])?;
    let sizes: Vec<u64> = sizes(mover).collect();
    let rate = |fragment| {
        let mut best = f64::INFINITY;
        for _ in 0..REPEATS {
            best = best.min(measure(mover, path, scratch, host, fragment)?);
        }
        let moved = MOVED.min(fragment * MOST_FRAGMENTS);
        Ok(moved as f64 / best)
    };
    sizes.into_iter().map(rate).collect()
}

/// The sizes that fit into a staged piece: a small ring has short ones.
fn sizes(mover: &Mover) -> impl Iterator<Item = u64> + use<> {
    let longest = mover.chunk().unwrap_or(MOVED);
    FRAGMENTS
        .into_iter()
        .filter(move |&fragment| fragment <= longest)
}

/// Seconds that fragments of one size take.
fn measure(
    mover: &mut Mover,
    path: Path,
    scratch: &DeviceMemory,
    host: &HostMemory,
    fragment: u64,
) -> Result<f64, DriverError> {
    let (all, count) = (SCRATCH / fragment, MOST_FRAGMENTS.min(MOVED / fragment));
    let together = TOGETHER.min(all);
    // Stepping through the places by an odd number, less than half of them, visits none twice.
    let place = |i: u64, of: u64| (i * ((of / 3) | 1)) % of;
    let chunk = mover.chunk().unwrap_or(MOVED).min(MOVED / 2);
    let mut piece = Piece::default();
    let (mut first, mut last) = (None, None);
    let mut done = 0;
    while done < count {
        piece.clear();
        while done < count && piece.room(chunk, MOST_COPIES) >= fragment {
            let (slot, within) = (done / together, done % together);
            let host_at = place(slot, all / together) * together + within;
            let address = host.base().expose_provenance() + (host_at * fragment) as usize;
            let device = scratch.address() + place(done, all) * fragment;
            piece.push(device, address, fragment, within != 0, Home::default());
            done += 1;
        }
        assert!(!piece.is_empty(), "a fragment longer than a piece");
        // SAFETY: both scratch memories are as long as all places together, belong to nobody else and
        // live until the caller has waited for the last copy; the host's is pinned.
        let sent = unsafe { mover.send(path, &piece, None, first.is_none(), false) }?;
        first = first.or(sent.start);
        last = Some(sent.done);
    }
    while !last.as_ref().map_or(Ok(true), |last| last.is_done())? {
        hint::spin_loop();
    }
    mover.drain()?;
    match (&first, &last) {
        (Some(first), Some(last)) => Ok(first.seconds_until(last)?.max(1e-9)),
        _ => Ok(1e-9),
    }
}

/// A lock that the ranks of one user on one host share; given back when it is dropped. Whoever
/// cannot have it measures all the same.
fn take_turn() -> Option<File> {
    let user = rustix::process::getuid().as_raw();
    let path = std::env::temp_dir().join(format!("kvoffload-calibration-{user}.lock"));
    // The folder is shared with other users: no link is followed, and no pipe waited for.
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(flags.bits() as i32)
        .open(path)
        .ok()
        .filter(|file| file.metadata().is_ok_and(|facts| facts.is_file()))?;
    let deadline = Instant::now() + TURN;
    while rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        if Instant::now() > deadline {
            return None;
        }
        thread::sleep(Duration::from_millis(5));
    }
    Some(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chooser(direct: f64, staged: f64) -> Chooser {
        Chooser {
            wanted: CopyPath::Auto,
            has_staging: true,
            calibration: Some(Calibration {
                fragments: vec![1 << 10, 1 << 20],
                direct: [vec![direct, 5e10], vec![direct, 5e10]],
                staged: [vec![staged, 5e10], vec![staged, 5e10]],
                seconds: 0.1,
            }),
        }
    }

    #[test]
    fn the_faster_path_wins_and_direct_when_they_are_close() {
        let chooser = chooser(1e9, 5e10);
        let choose =
            |fragment: u64, all: u64| chooser.choose(JobKind::Load, 64, 64 * fragment, all);
        assert_eq!(choose(1 << 10, 1 << 30), Path::Staged);
        assert_eq!(choose(1 << 20, 1 << 30), Path::Direct);
        // A few short fragments are over before a kernel has started.
        assert_eq!(choose(1 << 10, 4 << 10), Path::Direct);
    }

    #[test]
    fn a_setting_or_missing_memory_overrides() {
        let mut chooser = chooser(5e10, 1e9);
        chooser.wanted = CopyPath::Only(Path::Staged);
        assert_eq!(
            chooser.choose(JobKind::Store, 1, 1 << 20, 1 << 20),
            Path::Staged
        );
        chooser.has_staging = false;
        assert_eq!(
            chooser.choose(JobKind::Store, 1, 1 << 20, 1 << 20),
            Path::Direct
        );
    }

    #[test]
    fn rates_between_and_beside_the_sizes() {
        let (sizes, rates) = ([1024, 4096], [1.0, 4.0]);
        assert!((interpolate(&sizes, &rates, 2048) - 2.0).abs() < 1e-9);
        assert!((interpolate(&sizes, &rates, 512) - 0.5).abs() < 1e-9);
        assert!((interpolate(&sizes, &rates, 1 << 20) - 4.0).abs() < 1e-9);
    }
}
