//! `KeyList`: keys that become `bytes` when somebody looks at them.

use kvoffload_core::key::Key;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// A sequence of keys.
///
/// vLLM's connector never reads the keys that a store evicted; making `bytes` of each would be a
/// good part of a store's time.
#[pyclass(frozen, sequence, module = "kvoffload_rs._core")]
pub(crate) struct KeyList(Vec<Key>);

impl KeyList {
    pub(crate) fn new(keys: Vec<Key>) -> Self {
        Self(keys)
    }
}

#[pymethods]
impl KeyList {
    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __getitem__<'py>(&self, py: Python<'py>, index: isize) -> PyResult<Bound<'py, PyBytes>> {
        let from_end = if index < 0 { self.0.len() } else { 0 };
        from_end
            .checked_add_signed(index)
            .and_then(|at| self.0.get(at))
            .map(|key| PyBytes::new(py, key.as_bytes()))
            .ok_or_else(|| PyIndexError::new_err("KeyList index out of range"))
    }

    /// Equal to any sequence of the same keys.
    fn __eq__(&self, other: &Bound<'_, PyAny>) -> PyResult<bool> {
        if other.len().ok() != Some(self.0.len()) {
            return Ok(false);
        }
        for (key, other) in self.0.iter().zip(other.try_iter()?) {
            let other = other?;
            let same = other
                .cast::<PyBytes>()
                .is_ok_and(|other| other.as_bytes() == key.as_bytes());
            if !same {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn __repr__(&self) -> String {
        format!("KeyList({} keys)", self.0.len())
    }
}
