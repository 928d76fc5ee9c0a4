//! `CudaWorker`: one rank's host region and the threads that copy to and from a GPU.

use std::os::fd::IntoRawFd;
use std::time::Duration;

use kvoffload_transfer::cuda::{
    self, CopyPath, CudaConfig, CudaEngine, CudaFaults, DeviceTensor, Path, Pinning,
};
use kvoffload_transfer::{EngineConfig, JobKind};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::convert::cast;
use crate::worker::{
    Finished, Outcome, Parts, backing, config_error, finished, job_list, outcomes, page_refs,
    shapes, start_error, submit, timeout, verify_mode, wait_error,
};

/// One rank's pinned host region, and the threads that copy between it and a GPU.
#[pyclass(frozen, module = "kvoffload_rs._core")]
pub(crate) struct CudaWorker {
    engine: CudaEngine,
    wait_timeout: Duration,
}

#[pymethods]
impl CudaWorker {
    #[new]
    #[pyo3(signature = (tensors, groups, *, device, blocks_per_chunk, num_slots, slot_bytes,
        keep_alive = None, verify = "off", verify_sample = 16, wait_timeout_s = 60.0,
        copy_path = "auto", staging_bytes = 64 << 20, pinning = "register", share_region = false,
        join_region = None, kernel_blocks = None, faults = None))]
    #[expect(
        clippy::too_many_arguments,
        reason = "keyword arguments of a Python constructor"
    )]
    fn new(
        py: Python<'_>,
        tensors: Vec<(u64, u64, u64, u64)>,
        groups: Vec<Vec<(u32, u64)>>,
        device: u32,
        blocks_per_chunk: u32,
        num_slots: u64,
        slot_bytes: u64,
        keep_alive: Option<Py<PyAny>>,
        verify: &str,
        verify_sample: u32,
        wait_timeout_s: f64,
        copy_path: &str,
        staging_bytes: u64,
        pinning: &str,
        share_region: bool,
        join_region: Option<i32>,
        kernel_blocks: Option<u32>,
        faults: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let wait_timeout = timeout(py, "wait_timeout_s", wait_timeout_s)?;
        let tensors = shapes(py, tensors)?.into_iter();
        let copy_path = match copy_path {
            "auto" => CopyPath::Auto,
            "direct" => CopyPath::Only(Path::Direct),
            "staged" => CopyPath::Only(Path::Staged),
            other => {
                let text =
                    format!("copy_path is {other:?}: use \"auto\", \"direct\" or \"staged\"");
                return Err(config_error(py, "copy_path", text));
            }
        };
        let pinning = match pinning {
            "register" => Pinning::Register,
            "allocate" => Pinning::Allocate,
            "none" => Pinning::None,
            other => {
                let text =
                    format!("pinning is {other:?}: use \"register\", \"allocate\" or \"none\"");
                return Err(config_error(py, "pinning", text));
            }
        };
        let config = CudaConfig {
            device,
            tensors: tensors
                .map(|(address, layout)| DeviceTensor { address, layout })
                .collect(),
            groups: page_refs(groups),
            blocks_per_chunk,
            num_slots: cast(py, "num_slots", num_slots)?,
            slot_bytes,
            backing: backing(py, share_region, join_region)?,
            keep_alive: keep_alive.map(|object| Box::new(object) as _),
            copy_path,
            staging_bytes,
            pinning,
            kernel_blocks: kernel_blocks.map(|blocks| blocks.clamp(1, 65_536)),
            faults: cuda_faults(py, faults)?,
            engine: EngineConfig {
                verify: verify_mode(py, verify, verify_sample)?,
                ..EngineConfig::default()
            },
        };
        #[expect(unsafe_code, reason = "Python hands tensors over as addresses")]
        // SAFETY: as for `HostWorker`: the caller passes addresses and strides of live tensors of this
        // device together with `keep_alive`, and leaves the blocks of a submitted job alone until its
        // end is known or the stream it waits on gets there: vLLM's contract with a worker.
        let engine = py.detach(|| unsafe { CudaEngine::new(config) });
        Ok(Self {
            engine: engine.map_err(|error| start_error(py, &error))?,
            wait_timeout,
        })
    }

    /// Starts copying blocks to slots, after what is on the stream.
    #[expect(
        clippy::too_many_arguments,
        reason = "the parts of a job as Python gives them"
    )]
    fn submit_store(
        &self,
        py: Python<'_>,
        job_id: u64,
        block_ids: &Bound<'_, PyAny>,
        group_sizes: Vec<u32>,
        block_indices: Vec<u64>,
        slots: &Bound<'_, PyAny>,
        stream: usize,
    ) -> PyResult<()> {
        let parts = (block_ids, group_sizes, block_indices, slots);
        self.submit(py, JobKind::Store, job_id, parts, stream)
    }

    /// Starts copying slots to blocks, after what is on the stream.
    #[expect(
        clippy::too_many_arguments,
        reason = "the parts of a job as Python gives them"
    )]
    fn submit_load(
        &self,
        py: Python<'_>,
        job_id: u64,
        slots: &Bound<'_, PyAny>,
        block_ids: &Bound<'_, PyAny>,
        group_sizes: Vec<u32>,
        block_indices: Vec<u64>,
        stream: usize,
    ) -> PyResult<()> {
        let parts = (block_ids, group_sizes, block_indices, slots);
        self.submit(py, JobKind::Load, job_id, parts, stream)
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

    /// Waits until jobs are over, or has a stream wait for them; unknown ids are ignored.
    #[pyo3(signature = (job_ids, stream = None))]
    fn wait(
        &self,
        py: Python<'_>,
        job_ids: &Bound<'_, PyAny>,
        stream: Option<usize>,
    ) -> PyResult<()> {
        let jobs = job_list(job_ids)?;
        py.detach(|| match stream {
            None => self.engine.wait(&jobs, self.wait_timeout),
            #[expect(unsafe_code, reason = "PyTorch hands streams over as numbers")]
            // SAFETY: the caller passes the handle of a stream of this device that exists.
            Some(stream) => unsafe { self.engine.wait_on(&jobs, stream, self.wait_timeout) },
        })
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

    /// Counts of jobs, bytes, paths and faults.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = PyDict::new(py);
        let (engine, device) = (self.engine.stats(), self.engine.device_stats());
        for (name, value) in engine.entries().into_iter().chain(device) {
            stats.set_item(name, value)?;
        }
        Ok(stats)
    }

    /// What an operator should read, each text once.
    fn take_notices(&self) -> Vec<String> {
        self.engine.take_notices()
    }

    /// What was measured at the start, and which path it leads to.
    fn calibration<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("device", self.engine.device_name())?;
        dict.set_item("staging", self.engine.has_staging())?;
        let Some(calibration) = self.engine.calibration() else {
            return Ok(dict);
        };
        dict.set_item("seconds", calibration.seconds)?;
        dict.set_item("fragment_bytes", calibration.fragments.clone())?;
        for (at, kind, name) in [(0, JobKind::Store, "store"), (1, JobKind::Load, "load")] {
            let table = PyDict::new(py);
            table.set_item("direct", calibration.direct[at].clone())?;
            table.set_item("staged", calibration.staged[at].clone())?;
            let sizes = calibration.fragments.iter();
            let paths = sizes.map(|&size| self.engine.path_for(kind, size).name());
            table.set_item("path", paths.collect::<Vec<_>>())?;
            dict.set_item(name, table)?;
        }
        Ok(dict)
    }
}

impl CudaWorker {
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
        stream: usize,
    ) -> PyResult<()> {
        submit(py, self.engine.new_job(), job, parts, |new| {
            #[expect(unsafe_code, reason = "PyTorch hands streams over as numbers")]
            // SAFETY: the caller passes the handle of a stream of this device that exists.
            unsafe {
                self.engine.submit(kind, job, new, stream)
            }
        })
    }
}

impl Drop for CudaWorker {
    /// The engine waits for running copies when it is dropped; other Python threads go on meanwhile.
    fn drop(&mut self) {
        // If the interpreter is ending, the engine's own drop does the same.
        Python::try_attach(|py| py.detach(|| self.engine.shutdown(self.shutdown_timeout())));
    }
}

/// Whether a CUDA driver and a device are there.
#[pyfunction]
pub(crate) fn cuda_available(py: Python<'_>) -> bool {
    py.detach(cuda::unavailable).is_none()
}

/// Why CUDA cannot be used here; None where it can.
#[pyfunction]
pub(crate) fn cuda_unavailable_reason(py: Python<'_>) -> Option<String> {
    py.detach(cuda::unavailable)
        .map(|reason| reason.to_string())
}

fn cuda_faults(py: Python<'_>, faults: Option<&Bound<'_, PyDict>>) -> PyResult<CudaFaults> {
    let mut plan = CudaFaults::default();
    for (name, value) in faults.into_iter().flatten() {
        let name: String = name.extract()?;
        let bad = |what: &str| config_error(py, "faults", format!("faults: {what}"));
        match name.as_str() {
            "skip_compute_wait" => plan.skip_compute_wait = value.is_truthy()?,
            "skip_staging_wait" => plan.skip_staging_wait = value.is_truthy()?,
            "skip_ring_wait" => plan.skip_ring_wait = value.is_truthy()?,
            "fail_piece" => plan.fail_piece = value.extract()?,
            "skip_stream_wait" => plan.skip_stream_wait = value.is_truthy()?,
            "keep_capture_mode" => plan.keep_capture_mode = value.is_truthy()?,
            "fail_every_store" => plan.fail_every_store = value.extract()?,
            "fail_every_load" => plan.fail_every_load = value.extract()?,
            "fail_path" => {
                plan.fail_path = match value.extract::<String>()?.as_str() {
                    "direct" => Some(Path::Direct),
                    "staged" => Some(Path::Staged),
                    other => return Err(bad(&format!("fail_path is {other:?}"))),
                }
            }
            "loads" => {
                plan.load_nothing = match value.extract::<String>()?.as_str() {
                    "copy" => false,
                    "nothing" => true,
                    other => {
                        let text =
                            format!("loads is {other:?}: on a GPU use \"copy\" or \"nothing\"");
                        return Err(bad(&text));
                    }
                }
            }
            other => return Err(bad(&format!("{other:?} cannot be injected on a GPU"))),
        }
    }
    Ok(plan)
}
