//! Python values in and out, without a copy per key where the interpreter allows it.

use kvoffload_core::key::Key;
use kvoffload_core::pool::Slot;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::errors::{About, raise};

/// The elements of a list, tuple, set or any other iterable of `bytes`, held so that their bytes
/// can be borrowed.
pub(crate) struct Keys<'py>(Vec<Bound<'py, PyBytes>>);

impl<'py> Keys<'py> {
    pub(crate) fn from(object: &Bound<'py, PyAny>) -> PyResult<Self> {
        if let Ok(list) = object.cast::<PyList>() {
            return list
                .iter()
                .map(into_bytes)
                .collect::<PyResult<_>>()
                .map(Self);
        }
        object
            .try_iter()?
            .map(|item| into_bytes(item?))
            .collect::<PyResult<_>>()
            .map(Self)
    }

    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = &[u8]> + Clone {
        self.0.iter().map(|key| key.as_bytes())
    }

    pub(crate) fn objects(&self) -> &[Bound<'py, PyBytes>] {
        &self.0
    }
}

fn into_bytes(item: Bound<'_, PyAny>) -> PyResult<Bound<'_, PyBytes>> {
    Ok(item.cast_into::<PyBytes>()?)
}

/// Slots as native 32-bit integers, ready for `numpy.frombuffer`.
pub(crate) fn slots_to_bytes<'py>(
    py: Python<'py>,
    slots: &[Slot],
) -> PyResult<Bound<'py, PyBytes>> {
    PyBytes::new_with(py, slots.len() * 4, |bytes| {
        for (out, slot) in bytes.chunks_exact_mut(4).zip(slots) {
            out.copy_from_slice(&slot.get().to_ne_bytes());
        }
        Ok(())
    })
}

pub(crate) fn keys_to_list<'py>(py: Python<'py>, keys: &[Key]) -> PyResult<Bound<'py, PyList>> {
    PyList::new(py, keys.iter().map(|key| PyBytes::new(py, key.as_bytes())))
}

/// A number in the range that the core counts in.
pub(crate) fn cast<T: TryFrom<u64>>(
    py: Python<'_>,
    field: &'static str,
    value: u64,
) -> PyResult<T> {
    T::try_from(value).map_err(|_| {
        let about = About {
            field: Some(field),
            value: Some(value),
            ..About::default()
        };
        raise(
            py,
            "ConfigError",
            format!("{field}: {value} is out of range"),
            about,
        )
    })
}
