//! A simulated device for unit tests: memory is ordinary memory, and what is enqueued runs when somebody
//! asks for an event, one operation at a time, on a stream that is drawn at random among those whose
//! next operation may run. Copies and kernels read their source then, not when they are enqueued.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use super::error::{CudaUnavailable, DriverError};
use super::fragment::{Fragment, Way};

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

static NEXT: AtomicU64 = AtomicU64::new(1);

pub(super) fn fresh() -> u64 {
    NEXT.fetch_add(1, Ordering::Relaxed)
}

pub(super) struct Device {
    pub(super) world: Mutex<World>,
    /// Which call of the driver from now on fails, and with which code; from 700 on all later ones, too.
    pub(super) failure: Mutex<Option<(u64, u32)>>,
    lost: AtomicBool,
    /// Copies of rows are refused.
    refuses_rows: AtomicBool,
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
            refuses_rows: AtomicBool::new(false),
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

    /// Tensors are allocations of their own.
    #[expect(clippy::unused_self, reason = "the real one asks the driver")]
    pub(super) fn allocation(&self, address: u64) -> u64 {
        address
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
    pub(super) unsafe fn register(
        &self,
        _address: *mut u8,
        _bytes: u64,
    ) -> Result<(), DriverError> {
        Ok(())
    }

    /// # Safety
    /// None is needed.
    #[expect(clippy::unused_self, reason = "the real one has a context")]
    pub(super) unsafe fn unregister(&self, _address: *mut u8) {}

    /// From now on copies of rows are refused.
    pub(super) fn no_rows(&self) {
        self.refuses_rows.store(true, Ordering::Relaxed);
    }

    /// A copy of rows.
    pub(super) fn call_rows(&self) -> Result<(), DriverError> {
        let call = "cuMemcpy2DAsync";
        match self.refuses_rows.load(Ordering::Relaxed) {
            true => Err(simulated(call, 1)),
            false => self.call(call),
        }
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

fn simulated(call: &'static str, code: u32) -> DriverError {
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
