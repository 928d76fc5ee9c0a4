//! `Requests`: the scheduler side of the connector.

use kvoffload_core::jobs::{JobId, JobKind};
use kvoffload_core::manager::{self, PolicyKind};
use kvoffload_core::requests::{
    self as core, GivenBlocks, GroupConfig, Lookup, MissReason, NewRequest, RequestError,
    RequestId, RequestsConfig, Span,
};
use parking_lot::{Mutex, MutexGuard};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PySet, PyString, PyTuple};

use crate::convert::keys_to_list;
use crate::errors::{About, manager_error, raise, request_error};
use crate::manager::{debug_state, stats_dict};
use crate::orders::{self, Lists, Orders};
use crate::worker::{config_error, timeout};

/// (job, whether it is a store, request, chunks, (rank, reason) of failures, void)
type Ended = (u64, bool, Option<String>, usize, Vec<(u32, String)>, bool);

const LOAD_NAMES: [&str; 5] = [
    "loads_begun",
    "loads_done",
    "loads_failed",
    "loads_voided",
    "loads_chunks",
];
const STORE_NAMES: [&str; 5] = [
    "stores_begun",
    "stores_done",
    "stores_failed",
    "stores_voided",
    "stores_chunks",
];
/// In the order of [`MissReason::ALL`].
const MISS_NAMES: [&str; MissReason::ALL.len()] = [
    "miss_never_stored",
    "miss_evicted",
    "miss_refused",
    "miss_failed",
    "miss_offered_too_rarely",
    "miss_too_slow",
    "miss_policy",
];

/// What the scheduler knows of its requests, and decides for them.
#[pyclass(frozen, module = "kvoffload_rs._core")]
pub(crate) struct Requests {
    core: Mutex<core::Requests>,
}

#[pymethods]
impl Requests {
    #[new]
    #[pyo3(signature = (groups, *, num_slots, blocks_per_chunk, tokens_per_hash, num_ranks = 1,
        one_region = false, prompt_only = true, share_loads = true, defer_deadline_s = 2.0,
        max_jobs = 4096, policy = "lru", events = false, store_threshold = 0,
        max_tracker_size = 64_000, write_deadline_s = 600.0))]
    #[expect(
        clippy::too_many_arguments,
        reason = "keyword arguments of a Python constructor"
    )]
    fn new(
        py: Python<'_>,
        groups: Vec<(u32, u32, String, u32, bool)>,
        num_slots: u64,
        blocks_per_chunk: u32,
        tokens_per_hash: u32,
        num_ranks: u32,
        one_region: bool,
        prompt_only: bool,
        share_loads: bool,
        defer_deadline_s: f64,
        max_jobs: usize,
        policy: &str,
        events: bool,
        store_threshold: u32,
        max_tracker_size: u32,
        write_deadline_s: f64,
    ) -> PyResult<Self> {
        let group = |(id, tokens_per_block, span, tokens, draft): (u32, u32, String, u32, bool)| {
            let span = match span.as_str() {
                "full" => Span::Full,
                "window" => Span::Window(tokens),
                "local" => Span::Local(tokens),
                "state" => Span::State,
                other => {
                    let text = format!(
                        "groups: {other:?} is no span: use \"full\", \"window\", \"local\" or \"state\""
                    );
                    return Err(config_error(py, "groups", text));
                }
            };
            Ok(GroupConfig {
                id,
                tokens_per_block,
                span,
                draft,
            })
        };
        let config = RequestsConfig {
            groups: groups.into_iter().map(group).collect::<PyResult<_>>()?,
            blocks_per_chunk,
            tokens_per_hash,
            num_ranks,
            one_region,
            max_jobs,
            prompt_only,
            share_loads,
            defer_deadline: timeout(py, "defer_deadline_s", defer_deadline_s)?,
            clock: manager::Clock::default(),
        };
        let manager = manager::Config {
            policy: PolicyKind::from_name(policy).map_err(|error| manager_error(py, &error))?,
            events,
            store_threshold,
            max_tracker_size,
            partial_admission: true,
            reasons: true,
            write_deadline: timeout(py, "write_deadline_s", write_deadline_s)?,
            // More than u32 is more than the core accepts; it says so.
            ..manager::Config::new(u32::try_from(num_slots).unwrap_or(u32::MAX))
        };
        let manager = manager::Manager::new(manager).map_err(|error| manager_error(py, &error))?;
        let core = core::Requests::new(config, manager);
        Ok(Self {
            core: Mutex::new(core.map_err(|error| request_error(py, &error))?),
        })
    }

    /// A request arrives.
    #[pyo3(signature = (name, prompt_tokens, *, max_load_tokens = None, max_store_tokens = None,
        skip_load = false, skip_store = false, low_priority = false))]
    #[expect(
        clippy::too_many_arguments,
        reason = "keyword arguments of a Python method"
    )]
    fn add(
        &self,
        py: Python<'_>,
        name: &str,
        prompt_tokens: u64,
        max_load_tokens: Option<u64>,
        max_store_tokens: Option<u64>,
        skip_load: bool,
        skip_store: bool,
        low_priority: bool,
    ) -> PyResult<()> {
        let about = NewRequest {
            prompt_tokens,
            max_load_tokens,
            max_store_tokens,
            skip_load,
            skip_store,
            low_priority,
        };
        let added = self.core.lock().add(name, about);
        added.map(drop).map_err(|error| request_error(py, &error))
    }

    /// (tokens that can be loaded, why not more); None for tokens: ask again with the next step.
    fn lookup(
        &self,
        py: Python<'_>,
        name: &str,
        hashes: &Bound<'_, PyAny>,
        computed: u64,
        total: u64,
    ) -> PyResult<(Option<u64>, Option<&'static str>)> {
        let id = self.find(py, name)?;
        self.read_hashes(py, id, hashes, usize::MAX)?;
        Ok(match self.core.lock().lookup(id, computed, total) {
            Lookup::Tokens(tokens, reason) => (Some(tokens), reason.map(MissReason::name)),
            Lookup::Later(core::Deferral::Writing) => (None, Some("writing")),
            Lookup::Later(core::Deferral::Loading) => (None, Some("loading")),
        })
    }

    /// The engine gave blocks to a request: per group its block objects.
    fn allocated(
        &self,
        py: Python<'_>,
        name: &str,
        groups: &Bound<'_, PyAny>,
        external: u64,
    ) -> PyResult<()> {
        let id = self.find(py, name)?;
        let (num_groups, watches) = {
            let core = self.core.lock();
            (core.num_groups(), core.watches_blocks())
        };
        if external == 0 && !watches {
            return Ok(());
        }
        let mut lists = Lists::default();
        let mut places = Vec::with_capacity(num_groups);
        for (at, group) in groups.try_iter()?.enumerate() {
            let first = self.core.lock().first_given(id, at);
            let mut fresh = None;
            let start = lists.ids.len();
            let mut one = |block: &Bound<'_, PyAny>| -> PyResult<()> {
                let block_id: u32 = block.getattr(intern!(py, "block_id"))?.extract()?;
                if fresh.is_none()
                    && block_id != 0
                    && block.getattr(intern!(py, "block_hash"))?.is_none()
                {
                    fresh = Some(first + lists.ids.len() - start);
                }
                lists.ids.push(block_id);
                Ok(())
            };
            let group = group?;
            // vLLM gives lists, or (for no blocks at all) tuples.
            if let Ok(list) = group.cast::<PyList>() {
                for block in list.iter().skip(first) {
                    one(&block)?;
                }
            } else {
                for block in group.try_iter()?.skip(first) {
                    one(&block?)?;
                }
            }
            let end = first + lists.ids.len() - start;
            places.push((first, fresh.unwrap_or(end)));
            lists.end_group();
        }
        let given: Vec<GivenBlocks<'_>> = lists
            .groups()
            .zip(&places)
            .map(|(ids, &(first, fresh))| GivenBlocks { ids, first, fresh })
            .collect();
        let allocated = self.core.lock().allocated(id, &given, external);
        allocated.map_err(|error| request_error(py, &error))
    }

    /// One step: what runs in it, and what its metadata must tell the workers.
    ///
    /// `new` are (name, block ids per group, computed tokens) of requests with whole block tables;
    /// `names`, `added` (block ids per group or None) and `computed` describe the others, of which
    /// those in `resumed` have whole tables too. Blocks `written` are cleared or copied into before the
    /// forward pass, `moved` may have been replaced in a request's table. `scheduled` maps names to tokens of this step,
    /// `hashes` names to objects with `block_hashes`.
    #[expect(
        clippy::too_many_arguments,
        reason = "a step is described by what vLLM describes it by"
    )]
    fn step<'py>(
        &self,
        py: Python<'py>,
        new: Vec<(Bound<'py, PyString>, Bound<'py, PyTuple>, u64)>,
        names: &Bound<'py, PyList>,
        added: &Bound<'py, PyList>,
        computed: &Bound<'py, PyList>,
        resumed: &Bound<'py, PyAny>,
        preempted: &Bound<'py, PyAny>,
        written: Vec<u32>,
        moved: Vec<u32>,
        scheduled: &Bound<'py, PyDict>,
        requests: &Bound<'py, PyDict>,
    ) -> PyResult<Orders<'py>> {
        if !preempted.is_none() {
            for name in preempted.try_iter()? {
                let mut core = self.core.lock();
                if let Ok(id) = core.find(name?.cast::<PyString>()?.to_str()?) {
                    core.preempted(id);
                }
            }
        }
        self.core.lock().rewritten(&written, &moved);
        let resumed = resumed.cast::<PySet>().ok().filter(|set| !set.is_empty());
        let mut running = Vec::with_capacity(new.len() + names.len());
        let mut lists = Lists::default();
        let mut total = 0;
        for (name, blocks, done) in &new {
            let Some(id) = self.known(name)? else {
                continue;
            };
            self.announce(py, id, blocks, true, *done, &mut lists)?;
            let tokens = tokens_of(scheduled, name)?;
            total += tokens;
            running.push((id, name.clone(), done + tokens));
        }
        for ((name, blocks), done) in names.iter().zip(added.iter()).zip(computed.iter()) {
            let name = name.cast_into::<PyString>()?;
            let Some(id) = self.known(&name)? else {
                continue;
            };
            let done: u64 = done.extract()?;
            if !blocks.is_none() {
                let all = match resumed {
                    Some(resumed) => resumed.contains(&name)?,
                    None => false,
                };
                self.announce(py, id, blocks.cast::<PyTuple>()?, all, done, &mut lists)?;
            }
            let tokens = tokens_of(scheduled, &name)?;
            total += tokens;
            running.push((id, name, done + tokens));
        }
        for (id, name, done) in running {
            let (wanted, has) = {
                let core = self.core.lock();
                (
                    core.hashes_for(core.storable(id, done)),
                    core.num_hashes(id),
                )
            };
            if wanted > has
                && let Some(request) = requests.get_item(&name)?
            {
                let hashes = request.getattr(intern!(py, "block_hashes"))?;
                self.read_hashes(py, id, &hashes, wanted)?;
            }
            let stored = self.core.lock().store(id, done);
            stored.map_err(|error| request_error(py, &error))?;
        }
        let orders = {
            let mut core = self.core.lock();
            core.step(total);
            core.take_orders()
        };
        orders::to_python(py, &orders)
    }

    /// A request has ended with so many tokens computed.
    fn finish(
        &self,
        py: Python<'_>,
        name: &str,
        hashes: &Bound<'_, PyAny>,
        computed: u64,
    ) -> PyResult<()> {
        let id = self.find(py, name)?;
        let wanted = {
            let core = self.core.lock();
            core.hashes_for(core.storable(id, computed))
        };
        if wanted > self.core.lock().num_hashes(id) {
            self.read_hashes(py, id, hashes, wanted)?;
        }
        let finished = self.core.lock().finish(id, computed);
        finished.map_err(|error| request_error(py, &error))
    }

    /// Reports of (rank, job, reason or None for success); what ended with them.
    ///
    /// Reports of jobs that are over, or that a rank had reported, are counted and otherwise ignored.
    fn report(
        &self,
        py: Python<'_>,
        reports: Vec<(u32, u64, Option<String>)>,
    ) -> PyResult<Vec<Ended>> {
        let mut ended = Vec::new();
        for (rank, job, reason) in reports {
            let outcome = reason.map_or(Ok(()), Err);
            let report = self.core.lock().report(JobId(job), rank, outcome);
            match report {
                Ok(Some(end)) => ended.push((
                    end.id.0,
                    end.kind == JobKind::Store,
                    end.request.map(String::from),
                    end.chunks,
                    end.failures,
                    end.void,
                )),
                Ok(None) | Err(RequestError::Job(_)) => {}
                Err(error) => return Err(request_error(py, &error)),
            }
        }
        Ok(ended)
    }

    /// Empties the pool; nothing that was computed or loaded before is stored or found again. Answers
    /// how many loads are under way.
    fn reset(&self, fail_loads: bool) -> usize {
        self.core.lock().reset(fail_loads)
    }

    /// Whether something is under way that needs the engine to go on stepping.
    fn has_work(&self) -> bool {
        self.core.lock().has_work()
    }

    /// Slots in the pool.
    #[getter]
    fn num_slots(&self) -> u32 {
        self.core.lock().manager().num_slots()
    }

    /// Requests that are not forgotten.
    #[getter]
    fn num_requests(&self) -> usize {
        self.core.lock().num_requests()
    }

    /// Jobs under way.
    #[getter]
    fn num_jobs(&self) -> usize {
        self.core.lock().num_jobs()
    }

    /// Counts of lookups and jobs since the start.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = *self.core.lock().stats();
        let dict = PyDict::new(py);
        for (name, value) in [
            ("lookups", stats.lookups),
            ("hits", stats.hits),
            ("tokens_asked", stats.tokens_asked),
            ("tokens_hit", stats.tokens_hit),
            ("deferred_writing", stats.deferred_writing),
            ("deferred_loading", stats.deferred_loading),
            ("deadlines", stats.deadlines),
            ("chunks_refused", stats.chunks_refused),
            ("jobs_refused", stats.jobs_refused),
            ("flushes", stats.flushes),
            ("stray_reports", stats.stray_reports),
        ] {
            dict.set_item(name, value)?;
        }
        let names = [LOAD_NAMES, STORE_NAMES];
        for (names, counts) in names.into_iter().zip([stats.loads, stats.stores]) {
            let values = [
                counts.begun,
                counts.done,
                counts.failed,
                counts.voided,
                counts.chunks,
            ];
            for (name, value) in names.into_iter().zip(values) {
                dict.set_item(name, value)?;
            }
        }
        for (name, value) in MISS_NAMES.into_iter().zip(stats.miss_reasons) {
            dict.set_item(name, value)?;
        }
        Ok(dict)
    }

    /// What is published: `stats`, and of the pool what concerns operators, named `pool_*`.
    fn metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let pool = self.core.lock().manager().stats();
        let dict = self.stats(py)?;
        for (name, value) in [
            ("pool_slots", pool.slots),
            ("pool_free", pool.free),
            ("pool_ready", pool.ready),
            ("pool_writing", pool.writing),
            ("pool_pinned", pool.pinned),
            ("pool_stored", pool.stored),
            ("pool_evicted", pool.evicted),
            ("pool_store_failures", pool.store_failures),
            ("pool_discarded", pool.discarded),
            ("pool_overdue", pool.overdue),
        ] {
            dict.set_item(name, value)?;
        }
        Ok(dict)
    }

    /// Sizes and counts of the pool.
    fn pool_stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.core.lock().manager().stats();
        stats_dict(py, &stats)
    }

    /// Chunks asked for by each store since the last call.
    fn take_allocation_sizes(&self) -> Vec<u32> {
        self.core.lock().manager().take_allocation_sizes()
    }

    /// Chunks not stored because they had been offered too rarely, since the last call.
    fn take_stores_skipped(&self) -> u64 {
        self.core.lock().manager().take_stores_skipped()
    }

    /// (keys, removed) for everything stored or evicted since the last call.
    fn take_events<'py>(&self, py: Python<'py>) -> PyResult<Vec<(Bound<'py, PyList>, bool)>> {
        let events = self.core.lock().manager().take_events();
        events
            .iter()
            .map(|event| Ok((keys_to_list(py, &event.keys)?, event.removed)))
            .collect()
    }

    /// The whole state of the pool, for tests.
    fn debug_state<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dump = self.core.lock().manager().dump();
        debug_state(py, &dump)
    }

    /// Checks what ties requests, jobs, blocks and pool together, for tests.
    fn validate(&self, py: Python<'_>) -> PyResult<()> {
        let core: MutexGuard<'_, core::Requests> = self.core.lock();
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| core.validate())).map_err(|_| {
            let text = "the scheduler's state contradicts itself; see standard error".to_owned();
            raise(py, "KvOffloadError", text, About::default())
        })
    }
}

impl Requests {
    fn find(&self, py: Python<'_>, name: &str) -> PyResult<RequestId> {
        let found = self.core.lock().find(name);
        found.map_err(|error| request_error(py, &error))
    }

    fn known(&self, name: &Bound<'_, PyString>) -> PyResult<Option<RequestId>> {
        Ok(self.core.lock().find(name.to_str()?).ok())
    }

    /// Takes over the hashes that are new, up to `wanted` of them altogether.
    fn read_hashes(
        &self,
        py: Python<'_>,
        id: RequestId,
        hashes: &Bound<'_, PyAny>,
        wanted: usize,
    ) -> PyResult<()> {
        let hashes = hashes.cast::<PyList>()?;
        let mut has = self.core.lock().num_hashes(id);
        if has > hashes.len() {
            self.core.lock().clear_hashes(id);
            has = 0;
        }
        // Held, so that their bytes can be borrowed while the core is locked.
        let new: Vec<Bound<'_, PyAny>> = hashes.iter().take(wanted).skip(has).collect();
        let mut bytes = Vec::with_capacity(new.len());
        for hash in &new {
            bytes.push(hash.cast::<PyBytes>()?.as_bytes());
        }
        let added = self.core.lock().add_hashes(id, bytes);
        added.map_err(|error| request_error(py, &error))
    }

    fn announce(
        &self,
        py: Python<'_>,
        id: RequestId,
        blocks: &Bound<'_, PyTuple>,
        all: bool,
        computed: u64,
        lists: &mut Lists,
    ) -> PyResult<()> {
        lists.clear();
        for group in blocks.iter() {
            for block in group.cast::<PyList>()?.iter() {
                lists.ids.push(block.extract()?);
            }
            lists.end_group();
        }
        let groups: Vec<&[u32]> = lists.groups().collect();
        let announced = self.core.lock().scheduled(id, &groups, all, computed);
        announced.map_err(|error| request_error(py, &error))
    }
}

fn tokens_of(scheduled: &Bound<'_, PyDict>, name: &Bound<'_, PyString>) -> PyResult<u64> {
    scheduled
        .get_item(name)?
        .map_or(Ok(0), |tokens| tokens.extract())
}
