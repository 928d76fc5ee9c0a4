//! `Manager` and `Request`.

use std::time::Duration;

use kvoffload_core::manager::{self as core, Answer, Config, PolicyKind, Prepared};
use kvoffload_core::pool::{Slot, SlotState};
use parking_lot::Mutex;
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::convert::{Keys, keys_to_list, slots_to_bytes};
use crate::errors::{About, manager_error, raise};
use crate::fast;
use crate::keylist::KeyList;

/// One request's accesses and pins; owned by the caller.
#[pyclass(frozen, module = "kvoffload_rs._core")]
pub(crate) struct Request(Mutex<core::Request>);

impl Request {
    /// Runs `call` under the request's lock, and ends the lock before anything is made of the answer.
    fn locked<T>(&self, call: impl FnOnce(&mut core::Request) -> T) -> T {
        call(&mut self.0.lock())
    }
}

#[pymethods]
impl Request {
    /// Loads and stores in progress that this request must still complete.
    #[getter]
    fn pins(&self) -> usize {
        self.0.lock().held()
    }
}

/// Where every chunk is, who uses it, and what makes room for what.
#[pyclass(frozen, module = "kvoffload_rs._core")]
pub(crate) struct Manager {
    core: core::Manager,
    policy: PolicyKind,
    miss: Py<PyAny>,
    hit: Py<PyAny>,
    later: Py<PyAny>,
    /// Working memory of `prepare_store`, so that it allocates nothing per key.
    prepared: Mutex<Prepared>,
    slots: Mutex<Vec<Slot>>,
}

impl Manager {
    /// The answer to a lookup of `key`.
    pub(crate) fn find(&self, py: Python<'_>, key: &[u8]) -> Py<PyAny> {
        self.answer(py, self.core.lookup(key))
    }

    fn answer(&self, py: Python<'_>, answer: Answer) -> Py<PyAny> {
        match answer {
            Answer::Miss => self.miss.clone_ref(py),
            Answer::Hit => self.hit.clone_ref(py),
            Answer::Later => self.later.clone_ref(py),
        }
    }
}

/// (keys to store, their slots, evicted keys)
type Stored<'py> = (Bound<'py, PyList>, Bound<'py, PyBytes>, KeyList);

#[pymethods]
impl Manager {
    #[new]
    #[pyo3(signature = (num_slots, *, policy = "lru", events = false, store_threshold = 0,
        max_tracker_size = 64_000, partial_admission = false, write_deadline_s = 600.0, answers = None))]
    #[expect(
        clippy::too_many_arguments,
        reason = "keyword arguments of a Python constructor"
    )]
    fn new(
        py: Python<'_>,
        num_slots: u64,
        policy: &str,
        events: bool,
        store_threshold: u32,
        max_tracker_size: u32,
        partial_admission: bool,
        write_deadline_s: f64,
        answers: Option<(Py<PyAny>, Py<PyAny>, Py<PyAny>)>,
    ) -> PyResult<Self> {
        let fail = |error| manager_error(py, &error);
        let write_deadline = Duration::try_from_secs_f64(write_deadline_s).map_err(|_| {
            let about = About {
                field: Some("write_deadline_s"),
                ..About::default()
            };
            let text = format!("write_deadline_s is {write_deadline_s}: give seconds, 0 or more");
            raise(py, "ConfigError", text, about)
        })?;
        let policy = PolicyKind::from_name(policy).map_err(fail)?;
        let config = Config {
            policy,
            events,
            store_threshold,
            max_tracker_size,
            partial_admission,
            write_deadline,
            // More than u32 is more than the core accepts; it says so.
            ..Config::new(u32::try_from(num_slots).unwrap_or(u32::MAX))
        };
        let (miss, hit, later) = match answers {
            Some(answers) => answers,
            None => (false.into_py_any(py)?, true.into_py_any(py)?, py.None()),
        };
        Ok(Self {
            core: core::Manager::new(config).map_err(fail)?,
            policy,
            miss,
            hit,
            later,
            prepared: Mutex::default(),
            slots: Mutex::default(),
        })
    }

    /// Slots in the pool.
    #[getter]
    fn num_slots(&self) -> u32 {
        self.core.num_slots()
    }

    /// Name of the eviction policy.
    #[getter]
    fn policy(&self) -> &'static str {
        self.policy.name()
    }

    /// A record for one request's accesses and pins.
    fn new_request(&self) -> Request {
        Request(Mutex::new(self.core.new_request()))
    }

    /// Whether the chunk can be read: one of the constructor's `answers`. `request` is not used.
    #[pyo3(signature = (key, request = None, /))]
    fn lookup(&self, py: Python<'_>, key: &[u8], request: Option<&Bound<'_, PyAny>>) -> Py<PyAny> {
        let _ = request;
        self.find(py, key)
    }

    /// `lookup` as a function of its own, for callers to whom the time of a method call matters.
    fn lookup_function<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        fast::lookup_function(slf)
    }

    /// The number of leading hits, and whether the key after them is being written.
    fn lookup_run(&self, keys: &Bound<'_, PyAny>) -> PyResult<(usize, bool)> {
        let keys = Keys::from(keys)?;
        let (hits, last) = self.core.lookup_run(keys.iter());
        Ok((hits, last == Answer::Later))
    }

    /// Slots for those keys that need one, evicting others if need be; `None` if there is no room.
    ///
    /// Answers (keys to store in the caller's order, their slots as native int32, evicted keys).
    fn prepare_store<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        request: &Request,
    ) -> PyResult<Option<Stored<'py>>> {
        let keys = Keys::from(keys)?;
        let bytes: Vec<&[u8]> = keys.iter().collect();
        // Taken out, not borrowed: making Python objects below may run other Python code.
        let mut prepared = std::mem::take(&mut *self.prepared.lock());
        let room = request
            .locked(|request| self.core.prepare_store(&bytes, request, &mut prepared))
            .map_err(|error| manager_error(py, &error))?;
        let stored = room.then(|| -> PyResult<_> {
            let objects = keys.objects();
            let to_store = PyList::new(py, prepared.to_store.iter().map(|&at| &objects[at]))?;
            let slots = slots_to_bytes(py, &prepared.slots)?;
            let evicted = KeyList::new(std::mem::take(&mut prepared.evicted));
            Ok((to_store, slots, evicted))
        });
        *self.prepared.lock() = prepared;
        stored.transpose()
    }

    /// Ends this request's writes of `keys`. Keys that it is not writing change nothing.
    #[pyo3(signature = (keys, request, success = true))]
    fn complete_store(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        request: &Request,
        success: bool,
    ) -> PyResult<()> {
        let keys = Keys::from(keys)?;
        request
            .locked(|request| self.core.complete_store(keys.iter(), request, success))
            .map_err(|error| manager_error(py, &error))
    }

    /// Pins all `keys` for a load; their slots as native int32, in the order of `keys`.
    fn prepare_load<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        request: &Request,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let keys = Keys::from(keys)?;
        let mut slots = std::mem::take(&mut *self.slots.lock());
        slots.clear();
        let bytes = request
            .locked(|request| self.core.prepare_load(keys.iter(), request, &mut slots))
            .map_err(|error| manager_error(py, &error))
            .and_then(|()| slots_to_bytes(py, &slots));
        *self.slots.lock() = slots;
        bytes
    }

    /// Ends one load of each of `keys` by this request.
    fn complete_load(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        request: &Request,
    ) -> PyResult<()> {
        let keys = Keys::from(keys)?;
        request
            .locked(|request| self.core.complete_load(keys.iter(), request))
            .map_err(|error| manager_error(py, &error))
    }

    /// Marks `keys` as used, the first one most recently.
    fn touch(&self, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        let keys = Keys::from(keys)?;
        self.core.touch(keys.iter());
        Ok(())
    }

    /// The request issues no more stores and loads; `positions` maps keys to their end in tokens.
    #[pyo3(signature = (request, positions = None))]
    fn finish_request(
        &self,
        py: Python<'_>,
        request: &Request,
        positions: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<()> {
        let mut known: Vec<(Bound<'_, PyBytes>, i64)> = Vec::new();
        if let Some(positions) = positions {
            known.reserve(positions.len());
            for (key, position) in positions {
                known.push((key.cast_into::<PyBytes>()?, position.extract()?));
            }
        }
        let positions = known
            .iter()
            .map(|(key, position)| (key.as_bytes(), *position));
        request
            .locked(|request| self.core.finish_request(request, positions))
            .map_err(|error| manager_error(py, &error))
    }

    /// Empties the pool and voids every pin.
    fn reset(&self) {
        self.core.reset();
    }

    /// (keys, removed) for everything stored or evicted since the last call.
    fn take_events<'py>(&self, py: Python<'py>) -> PyResult<Vec<(Bound<'py, PyList>, bool)>> {
        let events = self.core.take_events();
        events
            .iter()
            .map(|event| Ok((keys_to_list(py, &event.keys)?, event.removed)))
            .collect()
    }

    /// Sizes now, and counts since the start.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats_dict(py, &self.core.stats())
    }

    /// Chunks asked for by each store since the last call.
    fn take_allocation_sizes(&self) -> Vec<u32> {
        self.core.take_allocation_sizes()
    }

    /// Chunks not stored because they had been offered too rarely, since the last call.
    fn take_stores_skipped(&self) -> u64 {
        self.core.take_stores_skipped()
    }

    /// Bytes of bookkeeping.
    fn metadata_bytes(&self) -> usize {
        self.core.metadata_bytes()
    }

    /// The whole state, for tests: keys with slot, state and pins, and the policy's order.
    fn debug_state<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        debug_state(py, &self.core.dump())
    }
}

/// The manager's counters by name.
pub(crate) fn stats_dict<'py>(
    py: Python<'py>,
    stats: &kvoffload_core::manager::Stats,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (name, value) in [
        ("slots", stats.slots),
        ("free", stats.free),
        ("ready", stats.ready),
        ("writing", stats.writing),
        ("pinned", stats.pinned),
        ("evictable", stats.evictable),
        ("hits", stats.hits),
        ("misses", stats.misses),
        ("laters", stats.laters),
        ("overdue", stats.overdue),
        ("stored", stats.stored),
        ("store_failures", stats.store_failures),
        ("loaded", stats.loaded),
        ("evicted", stats.evicted),
        ("discarded", stats.discarded),
        ("refused", stats.refused),
        ("left_out", stats.left_out),
        ("skipped", stats.skipped),
        ("resets", stats.resets),
        ("stale_completions", stats.stale_completions),
        ("events_dropped", stats.events_dropped),
    ] {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}

/// The whole state of a pool, for tests.
pub(crate) fn debug_state<'py>(
    py: Python<'py>,
    dump: &kvoffload_core::manager::StateDump,
) -> PyResult<Bound<'py, PyDict>> {
    let keys = PyDict::new(py);
    let mut names = std::collections::HashMap::new();
    for chunk in &dump.keys {
        let name = PyBytes::new(py, chunk.key.as_bytes());
        let state = if chunk.state == SlotState::Ready {
            "ready"
        } else {
            "writing"
        };
        keys.set_item(&name, (chunk.slot.get(), state, chunk.pins))?;
        names.insert(chunk.slot, name);
    }
    let resident = PyDict::new(py);
    for (name, slots) in &dump.policy.resident {
        resident.set_item(
            name,
            PyList::new(py, slots.iter().map(|slot| &names[slot]))?,
        )?;
    }
    let ghosts = PyDict::new(py);
    for (name, keys) in &dump.policy.ghosts {
        ghosts.set_item(
            name,
            PyList::new(py, keys.iter().map(|key| PyBytes::new(py, key)))?,
        )?;
    }
    let state = PyDict::new(py);
    state.set_item("keys", keys)?;
    state.set_item("resident", resident)?;
    state.set_item("ghosts", ghosts)?;
    state.set_item("target", dump.policy.target)?;
    Ok(state)
}
