//! Python values in and out, without a copy per key where the interpreter allows it.

use std::ops::BitOr;

use kvoffload_core::key::Key;
use kvoffload_core::pool::Slot;
use pyo3::buffer::{Element, PyBuffer};
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

/// One-dimensional 32 or 64-bit integers, as vLLM has them before and since 0.30, in place of what is
/// in `into`.
pub(crate) fn ids<T>(
    py: Python<'_>,
    job: u64,
    field: &'static str,
    object: &Bound<'_, PyAny>,
    id: impl Fn(u32) -> T,
    into: &mut Vec<T>,
) -> PyResult<()> {
    let bad = |text: String| {
        let about = About {
            field: Some(field),
            job: Some(job),
            ..About::default()
        };
        raise(
            py,
            "InvalidJobError",
            format!("job {job}: {field} {text}"),
            about,
        )
    };
    let found = if let Ok(buffer) = PyBuffer::<i32>::get(object) {
        convert(py, &buffer, id, into)?
    } else if let Ok(buffer) = PyBuffer::<i64>::get(object) {
        convert(py, &buffer, id, into)?
    } else {
        return Err(bad("must be an array of 32 or 64-bit integers".to_owned()));
    };
    found.map_err(|id| bad(format!("has {id}: ids are 0 to 4294967295")))
}

/// Integers that ids come as.
trait Number: Element + Copy + Default + BitOr<Output = Self> + Into<i64> {
    /// The lower 32 bits.
    fn truncated(self) -> u32;
}

impl Number for i32 {
    fn truncated(self) -> u32 {
        self as u32
    }
}

impl Number for i64 {
    fn truncated(self) -> u32 {
        self as u32
    }
}

/// Turns each of a buffer's numbers into an id; answers the first that cannot be one.
fn convert<W: Number, T>(
    py: Python<'_>,
    buffer: &PyBuffer<W>,
    id: impl Fn(u32) -> T,
    into: &mut Vec<T>,
) -> PyResult<Result<(), i64>> {
    // In one pass without a branch, which takes a fraction of a nanosecond for each: whatever does not
    // fit into 32 bits leaves the sign or one of the upper bits behind.
    let mut bits = W::default();
    let one = |number: W| {
        bits = bits | number;
        id(number.truncated())
    };
    into.clear();
    match buffer.as_slice_ptr() {
        Some(numbers) => {
            #[expect(unsafe_code, reason = "a copy of the buffer would take as long again")]
            // SAFETY: `buffer` keeps the memory where it is, and has checked that it holds aligned
            // numbers of this type. No Python code runs meanwhile, and nobody writes to the ids of a
            // job that he is submitting.
            let numbers = unsafe { numbers.as_ref() };
            into.extend(numbers.iter().copied().map(one));
        }
        None => into.extend(buffer.to_vec(py)?.into_iter().map(one)),
    }
    if u32::try_from(bits.into()).is_ok() {
        return Ok(Ok(()));
    }
    let mut numbers = buffer.to_vec(py)?.into_iter().map(W::into);
    let bad = numbers.find(|&id| u32::try_from(id).is_err());
    Ok(bad.map_or(Ok(()), Err))
}
