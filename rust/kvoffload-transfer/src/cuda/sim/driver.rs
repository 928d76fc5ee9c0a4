//! A simulated device for unit tests: memory is ordinary memory, and what is enqueued runs when somebody
//! asks for an event, one operation at a time, on a stream that is drawn at random among those whose
//! next operation may run. Copies and kernels read their source then, not when they are enqueued.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use super::error::{CudaUnavailable, DriverError};
use super::fragment::{Fragment, Way};
use super::rows::Rows;

/// The device is always there.
pub fn unavailable() -> Option<CudaUnavailable> {
    None
}

/// What a stream does.
pub(super) enum Op {
    Copy {
        target: u64,
        source: u64,
        bytes: usize,
    },
    Kernel {
        way: Way,
        list: u64,
        count: u32,
        staging: u64,
    },
    Record(u64),
    Wait(u64),
    /// Something of the engine's.
    Run(Box<dyn FnOnce() + Send>),
}

/// All streams.
#[derive(Default)]
pub(super) struct World {
    streams: HashMap<usize, VecDeque<Op>>,
    done: HashSet<u64>,
    /// When each event was recorded, in operations.
    times: HashMap<u64, u64>,
    time: u64,
    random: u64,
    /// Until when kernels of ours find no room.
    pub(super) no_room: Option<Instant>,
}

impl World {
    fn draw(&mut self, below: usize) -> usize {
        // splitmix64
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % below as u64) as usize
    }

    fn may_run(&self, stream: usize) -> bool {
        match self.streams[&stream].front() {
            None => false,
            Some(Op::Wait(event)) => self.done.contains(event),
            Some(Op::Kernel { .. }) => self.no_room.is_none_or(|until| until < Instant::now()),
            Some(_) => true,
        }
    }

    /// Runs one operation; false if none may run.
    fn step(&mut self) -> bool {
        let mut ready: Vec<usize> = self.streams.keys().copied().collect();
        ready.retain(|&stream| self.may_run(stream));
        if ready.is_empty() {
            return false;
        }
        ready.sort_unstable();
        let stream = ready[self.draw(ready.len())];
        let op = self.streams.get_mut(&stream).and_then(VecDeque::pop_front);
        self.time += 1;
        match op {
            None | Some(Op::Wait(_)) => {}
            Some(Op::Record(event)) => {
                self.done.insert(event);
                self.times.insert(event, self.time);
            }
            Some(Op::Run(run)) => run(),
            Some(Op::Copy {
                target,
                source,
                bytes,
            }) => copy(target, source, bytes),
            Some(Op::Kernel {
                way,
                list,
                count,
                staging,
            }) => {
                for at in 0..count as usize {
                    // SAFETY: the list is memory of `HostMemory` with that many fragments.
                    let fragment = unsafe {
                        ptr::with_exposed_provenance::<Fragment>(list as usize)
                            .add(at)
                            .read()
                    };
                    let chunk = staging + u64::from(fragment.staging);
                    let (target, source) = match way {
                        Way::Pack => (chunk, fragment.device),
                        Way::Unpack => (fragment.device, chunk),
                    };
                    copy(target, source, fragment.bytes as usize);
                }
            }
        }
        true
    }

    /// Runs a few operations.
    pub(super) fn advance(&mut self) {
        for _ in 0..self.draw(6) {
            if !self.step() {
                break;
            }
        }
    }

    /// Runs until a stream is empty; false if it cannot be emptied.
    fn drain(&mut self, stream: usize) -> bool {
        while self.streams.get(&stream).is_some_and(|ops| !ops.is_empty()) {
            if !self.step() {
                return false;
            }
        }
        true
    }
}

fn copy(target: u64, source: u64, bytes: usize) {
    // SAFETY: the tests enqueue ranges of memory that is alive; nobody holds references to it while the
    // world is locked. `copy` allows for overlap, so that a mistake is wrong bytes and no more.
    unsafe {
        ptr::copy(
            ptr::with_exposed_provenance::<u8>(source as usize),
            ptr::with_exposed_provenance_mut::<u8>(target as usize),
            bytes,
        );
    }
}

/// Start and end of all memory that a copy may lie in: allocations of the device, and host memory
/// that is allocated or registered with it.
static KNOWN: Mutex<Vec<(u64, u64)>> = Mutex::new(Vec::new());

/// Memory that the driver knows as one, until this is dropped.
pub(super) struct Known(u64);

impl Known {
    pub(super) fn new(address: u64, bytes: u64) -> Self {
        learn(address, bytes);
        Self(address)
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        forget(self.0);
    }
}

fn learn(address: u64, bytes: u64) {
    KNOWN.lock().push((address, address + bytes));
}

fn forget(address: u64) {
    let mut known = KNOWN.lock();
    let at = known.iter().position(|&(start, _)| start == address);
    known.swap_remove(at.expect("it was learnt"));
}

/// Start and end of what the driver knows as one and an address lies in.
fn known(address: u64) -> Option<(u64, u64)> {
    let known = KNOWN.lock();
    let mut found = known.iter().copied();
    found.find(|&(start, end)| (start..end).contains(&address))
}

/// Whether a range lies in more than one memory that the driver knows.
pub(super) fn is_across(address: u64, bytes: usize) -> bool {
    known(address) != known(address + bytes as u64 - 1)
}

/// Whether rows lie in one memory on each side.
fn is_in_one_place(rows: &Rows) -> bool {
    let mut ends = rows.each().flat_map(|(device, host)| {
        [0, rows.width - 1].map(|at| (known(device + at), known(host as u64 + at)))
    });
    let first = ends.next().expect("there are rows");
    first.0.is_some() && first.1.is_some() && ends.all(|end| end == first)
}

static NEXT: AtomicU64 = AtomicU64::new(1);

pub(super) fn fresh() -> u64 {
    NEXT.fetch_add(1, Ordering::Relaxed)
}

pub(super) struct Device {
    pub(super) world: Mutex<World>,
    /// Which call of the driver from now on fails, and with which code; from 700 on all later ones, too.
    pub(super) failure: Mutex<Option<(u64, u32)>>,
    lost: AtomicBool,
    /// With which code copies of rows are refused; 0: they are not.
    pub(super) row_answer: AtomicU32,
    /// Batches of copies of rows, and how many of them were refused.
    pub(super) row_calls: AtomicU64,
    pub(super) refused_rows: AtomicU64,
}

impl Device {
    /// The number of the device is the seed of its order.
    pub(super) fn open(
        ordinal: u32,
        _events: usize,
        _keep_capture_mode: bool,
    ) -> Result<Arc<Self>, CudaUnavailable> {
        Ok(Arc::new(Self {
            world: Mutex::new(World {
                random: u64::from(ordinal),
                ..World::default()
            }),
            failure: Mutex::new(None),
            lost: AtomicBool::new(false),
            row_answer: AtomicU32::new(0),
            row_calls: AtomicU64::new(0),
            refused_rows: AtomicU64::new(0),
        }))
    }

    #[expect(clippy::unused_self, reason = "the real one has a name of its own")]
    pub(super) fn name(&self) -> &'static str {
        "a simulated device"
    }

    #[expect(clippy::unused_self, reason = "the real one has an address")]
    pub(super) fn pci(&self) -> Option<&str> {
        None
    }

    #[expect(
        clippy::unnecessary_wraps,
        clippy::unused_self,
        reason = "the real one may fail"
    )]
    pub(super) fn longest_pitch(&self) -> Result<u64, DriverError> {
        Ok(i32::MAX as u64)
    }

    #[expect(
        clippy::unnecessary_wraps,
        clippy::unused_self,
        reason = "the real one asks the driver"
    )]
    pub(super) fn allocation(&self, address: u64) -> Result<u64, DriverError> {
        Ok(known(address).map_or(address, |(start, _)| start))
    }

    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    pub(super) fn note(&self, error: &DriverError) -> bool {
        error.is_fatal() && self.give_up()
    }

    pub(super) fn give_up(&self) -> bool {
        !self.lost.swap(true, Ordering::Relaxed)
    }

    #[expect(
        clippy::unnecessary_wraps,
        clippy::unused_self,
        reason = "the real one may fail"
    )]
    pub(super) fn attach(&self) -> Result<(), DriverError> {
        Ok(())
    }

    #[expect(clippy::unused_self, reason = "the real one has a context")]
    pub(super) fn with_context<T>(
        &self,
        run: impl FnOnce() -> Result<T, DriverError>,
    ) -> Result<T, DriverError> {
        run()
    }

    /// # Safety
    /// None is needed.
    #[expect(
        clippy::unnecessary_wraps,
        clippy::unused_self,
        reason = "the real one may fail"
    )]
    pub(super) unsafe fn register(&self, address: *mut u8, bytes: u64) -> Result<(), DriverError> {
        learn(address.addr() as u64, bytes);
        Ok(())
    }

    /// # Safety
    /// None is needed.
    #[expect(clippy::unused_self, reason = "the real one has a context")]
    pub(super) unsafe fn unregister(&self, address: *mut u8) {
        forget(address.addr() as u64);
    }

    /// A batch of copies of several rows: it may be refused, and is if the rows of a copy are not all in
    /// the same memory on both sides.
    pub(super) fn call_rows(&self, all: &[Rows]) -> Result<(), DriverError> {
        let call = "cuMemcpy3DBatchAsync";
        self.row_calls.fetch_add(1, Ordering::Relaxed);
        let answer = self.row_answer.load(Ordering::Relaxed);
        let code = if all.iter().all(is_in_one_place) {
            answer
        } else {
            1
        };
        if code == 0 {
            return self.call(call);
        }
        self.refused_rows.fetch_add(1, Ordering::Relaxed);
        Err(simulated(call, code))
    }

    /// One call of the driver.
    pub(super) fn call(&self, call: &'static str) -> Result<(), DriverError> {
        let mut failure = self.failure.lock();
        let Some((calls, code)) = &mut *failure else {
            return Ok(());
        };
        *calls = calls.saturating_sub(1);
        if *calls > 0 {
            return Ok(());
        }
        let code = *code;
        if code < 700 {
            *failure = None;
        }
        Err(simulated(call, code))
    }

    pub(super) fn push(&self, stream: usize, op: Op) {
        let mut world = self.world.lock();
        world.streams.entry(stream).or_default().push_back(op);
    }

    /// Whether an event is done; time goes on a little.
    pub(super) fn ask(&self, event: u64) -> bool {
        let mut world = self.world.lock();
        world.advance();
        world.done.contains(&event)
    }

    pub(super) fn time(&self, event: u64) -> u64 {
        // With a wait left out on purpose, an end may come before its start.
        self.world.lock().times.get(&event).copied().unwrap_or(0)
    }

    pub(super) fn drain(&self, stream: usize) -> bool {
        self.world.lock().drain(stream)
    }
}

pub(super) fn simulated(call: &'static str, code: u32) -> DriverError {
    DriverError {
        call,
        code,
        name: "CUDA_ERROR_SIMULATED".to_owned(),
        text: "on purpose".to_owned(),
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Device (simulated)")
    }
}
