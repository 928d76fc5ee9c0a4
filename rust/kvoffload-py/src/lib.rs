//! `kvoffload_rs._core`: the extension module. It converts, releases the GIL where a call may block,
//! and maps errors; the logic is in `kvoffload-core` and `kvoffload-transfer`.
//!
//! No Python object is made while a lock of the core is held: making one can run the garbage
//! collector, and with it any other object's code.
#![deny(unsafe_code)]

mod convert;
mod cuda_worker;
mod errors;
mod fast;
mod keylist;
mod manager;
mod orders;
mod requests;
mod worker;

use pyo3::prelude::*;
use pyo3::types::PyDict;

/// KV-cache offloading: the Rust core.
#[pymodule]
mod _core {
    use super::*;

    #[pymodule_export]
    use super::cuda_worker::{CudaWorker, cuda_available, cuda_unavailable_reason};
    #[pymodule_export]
    use super::keylist::KeyList;
    #[pymodule_export]
    use super::manager::{Manager, Request};
    #[pymodule_export]
    use super::requests::Requests;
    #[pymodule_export]
    use super::worker::{HostWorker, machine_memory, slot_bytes};

    /// Version, profile and target of this build.
    #[pyfunction]
    fn build_info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
        let info = PyDict::new(py);
        info.set_item("version", env!("CARGO_PKG_VERSION"))?;
        info.set_item(
            "profile",
            if cfg!(debug_assertions) {
                "debug"
            } else {
                "release"
            },
        )?;
        info.set_item(
            "target",
            format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
        )?;
        Ok(info)
    }
}
