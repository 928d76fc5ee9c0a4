//! A backend whose copies end when the test says so.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::thread::{self, ThreadId};
use std::time::Duration;

use kvoffload_core::layout::KvLayout;
use kvoffload_transfer::backend::{Backend, Ended, Poll, Progress, Work};
use kvoffload_transfer::{CopyError, Engine, EngineConfig, JobKind, Region};
use parking_lot::{Condvar, Mutex};

use super::{Job, LONG, Shape};

/// Where a job panics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Submit,
    Poll,
    Retire,
}

/// What the test and both directions' backends share.
#[derive(Default)]
pub struct Gates {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    open: HashSet<u64>,
    all_open: bool,
    panics: HashMap<u64, Place>,
    refused: HashSet<u64>,
    started: Vec<u64>,
    threads: HashSet<ThreadId>,
}

impl Gates {
    /// Lets these jobs end.
    pub fn open(&self, jobs: &[u64]) {
        self.state.lock().open.extend(jobs);
    }

    /// Lets every job end at once.
    pub fn open_all(&self) {
        self.state.lock().all_open = true;
    }

    pub fn panic_in(&self, job: u64, place: Place) {
        self.state.lock().panics.insert(job, place);
    }

    /// Has the backend refuse a job.
    pub fn refuse(&self, job: u64) {
        self.state.lock().refused.insert(job);
    }

    /// Jobs in the order in which the backend got them.
    pub fn started(&self) -> Vec<u64> {
        self.state.lock().started.clone()
    }

    /// Blocks until the backend has got the job.
    pub fn wait_started(&self, job: u64) {
        let mut state = self.state.lock();
        while !state.started.contains(&job) {
            assert!(
                !self.changed.wait_for(&mut state, LONG).timed_out(),
                "job {job} never started"
            );
        }
    }

    /// Threads that called the backend.
    pub fn threads(&self) -> HashSet<ThreadId> {
        self.state.lock().threads.clone()
    }

    fn visit(&self, job: u64, place: Place) {
        let panics = {
            let mut state = self.state.lock();
            state.threads.insert(thread::current().id());
            state.panics.get(&job) == Some(&place)
        };
        assert!(!panics, "on purpose in {place:?}");
    }
}

struct GateBackend {
    gates: Arc<Gates>,
    held: VecDeque<Work>,
    cancelled: HashSet<u64>,
    depth: usize,
}

impl Backend for GateBackend {
    fn depth(&self) -> usize {
        self.depth
    }

    fn submit(&mut self, work: Work) -> Result<(), CopyError> {
        assert!(self.held.len() < self.depth);
        self.gates.visit(work.job, Place::Submit);
        if self.gates.state.lock().refused.contains(&work.job) {
            return Err(CopyError::Failed {
                job: work.job,
                slot: work.geometry().slots[0],
                reason: "refused on purpose".to_owned(),
            });
        }
        self.gates.state.lock().started.push(work.job);
        self.gates.changed.notify_all();
        self.held.push_back(work);
        Ok(())
    }

    fn poll(&mut self, progress: &mut Progress) -> Poll {
        for _ in 0..self.held.len() {
            let Some(work) = self.held.pop_front() else {
                break;
            };
            let open = {
                let state = self.gates.state.lock();
                state.all_open || state.open.contains(&work.job)
            };
            if self.cancelled.remove(&work.job) {
                let outcome = Err(CopyError::Cancelled { job: work.job });
                progress.ended.push_back(Ended {
                    work,
                    seconds: 0.0,
                    outcome,
                });
            } else if open {
                let job = work.job;
                progress.ended.push_back(Ended {
                    work,
                    seconds: 0.0,
                    outcome: Ok(()),
                });
                // The job ended, and the panic hits those that are left.
                self.gates.visit(job, Place::Poll);
            } else {
                self.held.push_back(work);
            }
        }
        Poll::After(Duration::from_millis(1))
    }

    fn cancel(&mut self, job: u64) {
        if self.held.iter().any(|work| work.job == job) {
            self.cancelled.insert(job);
        }
    }

    fn retire(&mut self, work: &Work) {
        self.gates.visit(work.job, Place::Retire);
    }

    fn abandon(&mut self) -> Vec<Work> {
        self.held.drain(..).collect()
    }
}

/// An engine whose copies move nothing and end when told to.
pub struct GateRig {
    pub gates: Arc<Gates>,
    pub engine: Engine,
}

impl GateRig {
    pub fn new(shape: &Shape, depth: usize, config: &EngineConfig) -> Self {
        let gates = Arc::new(Gates::default());
        let layout = KvLayout::new(
            shape.tensors.clone(),
            shape.groups.clone(),
            shape.blocks_per_chunk,
            shape.num_slots,
            shape.slot_bytes(),
            Region::slots_per_piece(shape.slot_bytes()),
        );
        let region = Arc::new(Region::new(shape.num_slots, shape.slot_bytes()).unwrap());
        let backends = [JobKind::Store, JobKind::Load].map(|_| -> Box<dyn Backend> {
            Box::new(GateBackend {
                gates: Arc::clone(&gates),
                held: VecDeque::new(),
                cancelled: HashSet::new(),
                depth,
            })
        });
        let engine = Engine::start(Arc::new(layout.unwrap()), &region, backends, config).unwrap();
        Self { gates, engine }
    }

    pub fn store(&self, job: u64, block: u32, slot: u32) {
        let what = Job::simple(&[block], &[slot]);
        self.engine
            .submit(JobKind::Store, job, what.geometry())
            .unwrap();
    }

    pub fn load(&self, job: u64, slot: u32, block: u32) {
        let what = Job::simple(&[block], &[slot]);
        self.engine
            .submit(JobKind::Load, job, what.geometry())
            .unwrap();
    }
}
