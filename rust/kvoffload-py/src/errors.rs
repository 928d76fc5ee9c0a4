//! Rust errors as the classes of `kvoffload_rs.errors`.

use kvoffload_core::manager::ManagerError;
use kvoffload_core::requests::RequestError;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyModule};

static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

/// What an error is about, besides its text.
#[derive(Default)]
pub(crate) struct About {
    pub(crate) field: Option<&'static str>,
    pub(crate) value: Option<u64>,
    pub(crate) job: Option<u64>,
    pub(crate) slot: Option<u32>,
}

/// An instance of `kvoffload_rs.errors.<class>`.
pub(crate) fn raise(py: Python<'_>, class: &str, message: String, about: About) -> PyErr {
    let make = || -> PyResult<Bound<'_, PyAny>> {
        let module = ERRORS.get_or_try_init(py, || {
            PyModule::import(py, "kvoffload_rs.errors").map(Bound::unbind)
        })?;
        let kwargs = PyDict::new(py);
        kwargs.set_item("field", about.field)?;
        kwargs.set_item("value", about.value)?;
        kwargs.set_item("job", about.job)?;
        kwargs.set_item("slot", about.slot)?;
        module
            .bind(py)
            .getattr(class)?
            .call((message.clone(),), Some(&kwargs))
    };
    match make() {
        Ok(error) => PyErr::from_value(error),
        // Only a broken installation gets here; the text must not be lost with it.
        Err(_) => PyRuntimeError::new_err(message),
    }
}

pub(crate) fn manager_error(py: Python<'_>, error: &ManagerError) -> PyErr {
    let field = |field, value| About {
        field: Some(field),
        value,
        ..About::default()
    };
    let (class, about) = match error {
        ManagerError::NoSlots => ("CapacityError", field("num_slots", Some(0))),
        ManagerError::TooManySlots { num_slots } => (
            "CapacityError",
            field("num_slots", Some(u64::from(*num_slots))),
        ),
        ManagerError::NoTracker { .. } => ("ConfigError", field("max_tracker_size", Some(0))),
        ManagerError::TooManyTracked { max_tracker_size } => (
            "ConfigError",
            field("max_tracker_size", Some(u64::from(*max_tracker_size))),
        ),
        ManagerError::UnknownPolicy { .. } => ("ConfigError", field("policy", None)),
        ManagerError::KeyNotReady { position, .. } => {
            ("KeyNotReadyError", field("keys", Some(*position as u64)))
        }
        ManagerError::StaleHandle { position } => {
            ("StaleHandleError", field("keys", Some(*position as u64)))
        }
        ManagerError::ForeignRequest => ("StaleHandleError", field("request", None)),
        _ => ("KvOffloadError", About::default()),
    };
    raise(py, class, error.to_string(), about)
}

pub(crate) fn request_error(py: Python<'_>, error: &RequestError) -> PyErr {
    let (class, field) = match error {
        RequestError::Manager(error) => return manager_error(py, error),
        RequestError::Zero { field } => ("ConfigError", Some(*field)),
        RequestError::Hashes { .. } | RequestError::StateChunks { .. } => {
            ("ConfigError", Some("blocks_per_chunk"))
        }
        RequestError::Duplicate { .. } | RequestError::Unknown { .. } => {
            ("RequestError", Some("request"))
        }
        RequestError::HashLength { .. } => ("RequestError", Some("block_hashes")),
        RequestError::Groups { .. } => ("RequestError", Some("blocks")),
        _ => ("KvOffloadError", None),
    };
    let about = About {
        field,
        ..About::default()
    };
    raise(py, class, error.to_string(), about)
}
