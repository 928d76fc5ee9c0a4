//! `HostWorker`: one rank's host region and the threads that copy.

use std::num::NonZeroU32;
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::time::Duration;

use kvoffload_core::layout::{self, PageRef, TensorLayout};
use kvoffload_core::pool::Slot;
use kvoffload_transfer::region::Backing;
use kvoffload_transfer::{
    Completion, CopyError, EngineConfig, FaultPlan, HostConfig, HostEngine, HostTensor, JobKind,
    LoadFault, NewJob, StartError, SubmitError, Verify, WaitTimeout,
};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::convert::{cast, ids};
use crate::errors::{About, raise};

/// (job, whether it is a store, bytes, seconds)
pub(crate) type Finished = (u64, bool, u64, f64);

/// As [`Finished`], and its error.
pub(crate) type Outcome = (u64, bool, u64, f64, Option<Py<PyAny>>);

/// One rank's host region, and the threads that copy to and from it.
#[pyclass(frozen, module = "kvoffload_rs._core")]
pub(crate) struct HostWorker {
    engine: HostEngine,
    wait_timeout: Duration,
}

#[pymethods]
impl HostWorker {
    #[new]
    #[pyo3(signature = (tensors, groups, *, blocks_per_chunk, num_slots, slot_bytes, keep_alive = None,
        verify = "off", verify_sample = 16, wait_timeout_s = 60.0, share_region = false,
        join_region = None, faults = None))]
    #[expect(
        clippy::too_many_arguments,
        reason = "keyword arguments of a Python constructor"
    )]
    fn new(
        py: Python<'_>,
        tensors: Vec<(u64, u64, u64, u64)>,
        groups: Vec<Vec<(u32, u64)>>,
        blocks_per_chunk: u32,
        num_slots: u64,
        slot_bytes: u64,
        keep_alive: Option<Py<PyAny>>,
        verify: &str,
        verify_sample: u32,
        wait_timeout_s: f64,
        share_region: bool,
        join_region: Option<i32>,
        faults: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let wait_timeout = timeout(py, "wait_timeout_s", wait_timeout_s)?;
        let verify = verify_mode(py, verify, verify_sample)?;
        let tensors = shapes(py, tensors)?
            .into_iter()
            .map(|(address, layout)| {
                let address = cast(py, "tensors", address)?;
                Ok(HostTensor { address, layout })
            })
            .collect::<PyResult<_>>()?;
        let config = HostConfig {
            tensors,
            groups: page_refs(groups),
            blocks_per_chunk,
            num_slots: cast(py, "num_slots", num_slots)?,
            slot_bytes,
            backing: backing(py, share_region, join_region)?,
            keep_alive: keep_alive.map(|object| Box::new(object) as _),
            faults: fault_plan(py, faults)?,
            engine: EngineConfig {
                verify,
                ..EngineConfig::default()
            },
        };
        #[expect(unsafe_code, reason = "Python hands tensors over as addresses")]
        // SAFETY: the caller (KvOffloadWorker) passes addresses and strides of live tensors together
        // with `keep_alive`, which holds them until the engine's threads have ended, and leaves the
        // blocks of a submitted job alone until its end is known: that is vLLM's contract with a worker.
        let engine = py.detach(|| unsafe { HostEngine::new(config) });
        Ok(Self {
            engine: engine.map_err(|error| start_error(py, &error))?,
            wait_timeout,
        })
    }

    /// Starts copying blocks to slots.
    fn submit_store(
        &self,
        py: Python<'_>,
        job_id: u64,
        block_ids: &Bound<'_, PyAny>,
        group_sizes: Vec<u32>,
        block_indices: Vec<u64>,
        slots: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let parts = (block_ids, group_sizes, block_indices, slots);
        self.submit(py, JobKind::Store, job_id, parts)
    }

    /// Starts copying slots to blocks.
    fn submit_load(
        &self,
        py: Python<'_>,
        job_id: u64,
        slots: &Bound<'_, PyAny>,
        block_ids: &Bound<'_, PyAny>,
        group_sizes: Vec<u32>,
        block_indices: Vec<u64>,
    ) -> PyResult<()> {
        let parts = (block_ids, group_sizes, block_indices, slots);
        self.submit(py, JobKind::Load, job_id, parts)
    }

    /// (job, whether it is a store, bytes, seconds) of what is over since the last call.
    fn take_finished(&self, py: Python<'_>) -> PyResult<Vec<Finished>> {
        finished(py, self.engine.take_finished_or_failure())
    }

    /// All that is over since the last call, with its error if it failed; raises none.
    fn take_outcomes(&self, py: Python<'_>) -> Vec<Outcome> {
        outcomes(py, self.engine.take_finished())
    }

    /// Asks that jobs be given up; unknown ids are ignored. Never waits.
    fn cancel(&self, job_ids: &Bound<'_, PyAny>) -> PyResult<()> {
        self.engine.cancel(&job_list(job_ids)?);
        Ok(())
    }

    /// Waits until jobs are over; unknown ids are ignored.
    fn wait(&self, py: Python<'_>, job_ids: &Bound<'_, PyAny>) -> PyResult<()> {
        let jobs = job_list(job_ids)?;
        py.detach(|| self.engine.wait(&jobs, self.wait_timeout))
            .map_err(|timeout| wait_error(py, &timeout))
    }

    /// Waits until no job is live of those that are now.
    fn drain(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.engine.drain(self.wait_timeout))
            .map_err(|timeout| wait_error(py, &timeout))
    }

    /// Descriptor with which other processes join a shared region, to be closed by the caller; once.
    fn take_region_fd(&self) -> Option<i32> {
        self.engine.take_region_file().map(IntoRawFd::into_raw_fd)
    }

    /// Address of the region's first byte, for tests and debuggers.
    #[getter]
    fn region_address(&self) -> usize {
        self.engine.region_address()
    }

    /// Lets running copies end, ends the threads and gives the memory back.
    ///
    /// Answers (jobs that were given up, threads that could not be ended).
    fn shutdown(&self, py: Python<'_>) -> (Vec<u64>, usize) {
        let report = py.detach(|| self.engine.shutdown(self.shutdown_timeout()));
        (report.abandoned, report.stuck_threads)
    }

    /// Counts of jobs, bytes and faults.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = PyDict::new(py);
        for (name, value) in self.engine.stats().entries() {
            stats.set_item(name, value)?;
        }
        Ok(stats)
    }
}

impl HostWorker {
    fn shutdown_timeout(&self) -> Duration {
        self.wait_timeout
            .min(EngineConfig::default().shutdown_timeout)
    }

    fn submit(
        &self,
        py: Python<'_>,
        kind: JobKind,
        job: u64,
        parts: Parts<'_, '_>,
    ) -> PyResult<()> {
        let new = self.engine.new_job();
        submit(py, new, job, parts, |new| {
            self.engine.submit_after(kind, job, new, None)
        })
    }
}

impl Drop for HostWorker {
    /// The engine waits for running copies when it is dropped; other Python threads go on meanwhile.
    fn drop(&mut self) {
        // If the interpreter is ending, the engine's own drop does the same.
        Python::try_attach(|py| py.detach(|| self.engine.shutdown(self.shutdown_timeout())));
    }
}

/// Blocks, group sizes, block indices and slots of a job, as Python gives them.
pub(crate) type Parts<'a, 'py> = (
    &'a Bound<'py, PyAny>,
    Vec<u32>,
    Vec<u64>,
    &'a Bound<'py, PyAny>,
);

/// Reads a job's numbers and submits it.
pub(crate) fn submit(
    py: Python<'_>,
    mut new: NewJob,
    job: u64,
    (block_ids, group_sizes, block_indices, slots): Parts<'_, '_>,
    submit: impl FnOnce(NewJob) -> Result<(), SubmitError>,
) -> PyResult<()> {
    let named = new.ids();
    ids(
        py,
        job,
        "block_ids",
        block_ids,
        |id| id,
        &mut named.block_ids,
    )?;
    ids(py, job, "slots", slots, Slot::new, &mut named.slots)?;
    named.group_sizes = group_sizes;
    named.block_indices = block_indices;
    submit(new).map_err(|error| submit_error(py, &error))
}

/// Bytes of one slot: what the largest group needs for a chunk, in whole units of 64.
#[pyfunction]
pub(crate) fn slot_bytes(groups: Vec<Vec<(u32, u64)>>, blocks_per_chunk: u32) -> u64 {
    layout::slot_bytes(&page_refs(groups), blocks_per_chunk)
}

/// (bytes, what limits them): this machine's memory or the tightest cgroup limit above this process.
#[pyfunction]
pub(crate) fn machine_memory() -> PyResult<(u64, String)> {
    let limit = kvoffload_transfer::machine_memory()?;
    Ok((limit.bytes, limit.limited_by))
}

/// Address and shape of each tensor, from (address, blocks, bytes from block to block, page bytes).
pub(crate) fn shapes(
    py: Python<'_>,
    tensors: Vec<(u64, u64, u64, u64)>,
) -> PyResult<Vec<(u64, TensorLayout)>> {
    let shape = |(address, num_blocks, block_stride, page_bytes)| {
        let layout = TensorLayout {
            num_blocks: cast(py, "tensors", num_blocks)?,
            block_stride,
            page_bytes,
        };
        Ok((address, layout))
    };
    tensors.into_iter().map(shape).collect()
}

pub(crate) fn timeout(py: Python<'_>, field: &'static str, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|_| {
        let text = format!("{field} is {seconds}: give seconds, 0 or more");
        config_error(py, field, text)
    })
}

/// Where a region's memory comes from.
pub(crate) fn backing(py: Python<'_>, share: bool, join: Option<i32>) -> PyResult<Backing> {
    let Some(join) = join else {
        return Ok(match share {
            true => Backing::Shared,
            false => Backing::Private,
        });
    };
    let wrong = |text: String| config_error(py, "join_region", text);
    if share {
        return Err(wrong(
            "join_region: who joins a region shares none".to_owned(),
        ));
    }
    if join < 0 {
        return Err(wrong(format!(
            "join_region is {join}: pass an open descriptor"
        )));
    }
    #[expect(unsafe_code, reason = "Python knows descriptors as numbers")]
    // SAFETY: not -1. The caller keeps it open during this call; if it is not, the system says so.
    let file = unsafe { BorrowedFd::borrow_raw(join) }.try_clone_to_owned();
    file.map(Backing::Joined)
        .map_err(|error| wrong(format!("join_region is {join}: {error}")))
}

pub(crate) fn verify_mode(py: Python<'_>, verify: &str, sample: u32) -> PyResult<Verify> {
    match verify {
        "off" => Ok(Verify::Off),
        "all" => Ok(Verify::All),
        "sample" => NonZeroU32::new(sample).map(Verify::Sample).ok_or_else(|| {
            let text = "verify_sample is 0: give 1 or more".to_owned();
            config_error(py, "verify_sample", text)
        }),
        other => {
            let text = format!("verify is {other:?}: use \"off\", \"sample\" or \"all\"");
            Err(config_error(py, "verify", text))
        }
    }
}

/// What `take_finished` gives to Python.
pub(crate) fn finished(
    py: Python<'_>,
    ends: Result<Vec<Completion>, Completion>,
) -> PyResult<Vec<Finished>> {
    match ends {
        Ok(ends) => Ok(ends
            .into_iter()
            .map(|end| (end.job, end.kind == JobKind::Store, end.bytes, end.seconds))
            .collect()),
        Err(end) => Err(match end.outcome {
            Err(error) => copy_error(py, &error),
            Ok(()) => raise(
                py,
                "TransferError",
                format!("job {} is said to have failed without a reason", end.job),
                About {
                    job: Some(end.job),
                    ..About::default()
                },
            ),
        }),
    }
}

/// What `take_outcomes` gives to Python.
pub(crate) fn outcomes(py: Python<'_>, ends: Vec<Completion>) -> Vec<Outcome> {
    let outcome = |end: Completion| {
        let error = end.outcome.err();
        let error = error.map(|error| copy_error(py, &error).into_value(py).into_any());
        let is_store = end.kind == JobKind::Store;
        (end.job, is_store, end.bytes, end.seconds, error)
    };
    ends.into_iter().map(outcome).collect()
}

pub(crate) fn job_list(job_ids: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    job_ids.try_iter()?.map(|job| job?.extract()).collect()
}

pub(crate) fn page_refs(groups: Vec<Vec<(u32, u64)>>) -> Vec<Vec<PageRef>> {
    let page_ref = |(tensor, page_bytes)| PageRef { tensor, page_bytes };
    groups
        .into_iter()
        .map(|group| group.into_iter().map(page_ref).collect())
        .collect()
}

fn fault_plan(py: Python<'_>, faults: Option<&Bound<'_, PyDict>>) -> PyResult<FaultPlan> {
    let mut plan = FaultPlan::default();
    for (name, value) in faults.into_iter().flatten() {
        let name: String = name.extract()?;
        match name.as_str() {
            "seed" => plan.seed = value.extract()?,
            "max_delay_us" => plan.max_delay_us = value.extract()?,
            "fail_every_store" => plan.fail_every_store = value.extract()?,
            "fail_every_load" => plan.fail_every_load = value.extract()?,
            "corrupt_every_store" => plan.corrupt_every_store = value.extract()?,
            "stall_job" => plan.stall_job = value.extract()?,
            "loads" => {
                plan.loads = match value.extract::<String>()?.as_str() {
                    "copy" => LoadFault::Copy,
                    "nothing" => LoadFault::Nothing,
                    "neighbour" => LoadFault::Neighbour,
                    other => {
                        let text = format!(
                            "faults: loads is {other:?}: use \"copy\", \"nothing\" or \"neighbour\""
                        );
                        return Err(config_error(py, "faults", text));
                    }
                };
            }
            other => {
                let text = format!("faults: {other:?} is not a fault that can be injected");
                return Err(config_error(py, "faults", text));
            }
        }
    }
    Ok(plan)
}

pub(crate) fn config_error(py: Python<'_>, field: &'static str, text: String) -> PyErr {
    raise(
        py,
        "ConfigError",
        text,
        About {
            field: Some(field),
            ..About::default()
        },
    )
}

pub(crate) fn start_error(py: Python<'_>, error: &StartError) -> PyErr {
    let (class, field, value) = match error {
        StartError::TooLarge { needed, .. } => {
            ("CapacityError", Some("cpu_bytes_to_use"), Some(*needed))
        }
        StartError::Zero { field } | StartError::Setting { field, .. } => {
            ("ConfigError", Some(*field), None)
        }
        StartError::System { .. } | StartError::Driver(_) | StartError::Panicked { .. } => {
            ("KvOffloadError", None, None)
        }
        StartError::Cuda(_) => ("CudaUnavailableError", Some("device"), None),
        _ => ("ConfigError", None, None),
    };
    raise(
        py,
        class,
        error.to_string(),
        About {
            field,
            value,
            ..About::default()
        },
    )
}

fn submit_error(py: Python<'_>, error: &SubmitError) -> PyErr {
    let class = match error {
        SubmitError::Closed { .. } | SubmitError::DeviceLost { .. } => "EngineClosedError",
        SubmitError::Driver { .. } => "TransferError",
        _ => "InvalidJobError",
    };
    let slot = match error {
        SubmitError::Quarantined { slot, .. } => Some(slot.get()),
        _ => None,
    };
    raise(
        py,
        class,
        error.to_string(),
        About {
            job: Some(error.job()),
            slot,
            ..About::default()
        },
    )
}

fn copy_error(py: Python<'_>, error: &CopyError) -> PyErr {
    let class = match error {
        CopyError::Verify { .. } => "VerifyError",
        _ => "TransferError",
    };
    let slot = error.slot().map(Slot::get);
    raise(
        py,
        class,
        error.to_string(),
        About {
            job: Some(error.job()),
            slot,
            ..About::default()
        },
    )
}

pub(crate) fn wait_error(py: Python<'_>, timeout: &WaitTimeout) -> PyErr {
    let about = About {
        job: timeout.jobs.first().copied(),
        ..About::default()
    };
    raise(py, "TransferTimeoutError", timeout.to_string(), about)
}
