//! The manager's lookup as a bare C function.
//!
//! vLLM looks up one key per call, thousands per request, on the scheduler's thread. What PyO3 does
//! around a method (arguments by name, class check, conversions) takes longer than the lookup.
#![expect(unsafe_code, reason = "a C function gets its arguments as pointers")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::{PyTypeInfo, ffi};

use crate::manager::Manager;

/// `PyMethodDef` holds pointers to static text and code only.
struct Definition(ffi::PyMethodDef);

// SAFETY: it is never written, and everything it points to is static.
unsafe impl Sync for Definition {}

static LOOKUP: Definition = Definition(ffi::PyMethodDef {
    ml_name: c"lookup".as_ptr(),
    ml_meth: ffi::PyMethodDefPointer {
        PyCFunctionFast: lookup,
    },
    ml_flags: ffi::METH_FASTCALL,
    ml_doc: c"One of `answers` for a key. Further arguments are not looked at.".as_ptr(),
});

/// A function of `(key, ...)` that looks up in `manager`, and keeps it alive.
pub(crate) fn lookup_function<'py>(manager: &Bound<'py, Manager>) -> PyResult<Bound<'py, PyAny>> {
    let definition = ptr::from_ref(&LOOKUP.0).cast_mut();
    // SAFETY: the definition is static and is only read; the new function holds a reference to the
    // manager. The result is a new reference, or null with an error set.
    unsafe {
        let function = ffi::PyCFunction_NewEx(definition, manager.as_ptr(), ptr::null_mut());
        Bound::from_owned_ptr_or_err(manager.py(), function)
    }
}

/// Called by the interpreter with the manager that `lookup_function` bound.
unsafe extern "C" fn lookup(
    manager: *mut ffi::PyObject,
    arguments: *mut *mut ffi::PyObject,
    count: ffi::Py_ssize_t,
) -> *mut ffi::PyObject {
    // SAFETY: the interpreter calls with its lock held, and keeps manager and arguments alive during
    // the call. The manager is one: nothing else is ever bound. Arguments are `count` pointers; the
    // first is only read when there is one, and taken for bytes only after the check. Nothing below
    // runs other Python code, so the bytes stay where they are.
    unsafe {
        let py = Python::assume_attached();
        let key = if count > 0 {
            *arguments
        } else {
            ptr::null_mut()
        };
        if key.is_null() || ffi::PyBytes_Check(key) == 0 {
            let text = c"lookup: the first argument must be the key, as bytes";
            ffi::PyErr_SetString(PyTypeError::type_object_raw(py).cast(), text.as_ptr());
            return ptr::null_mut();
        }
        let bytes = std::slice::from_raw_parts(
            ffi::PyBytes_AsString(key).cast::<u8>(),
            ffi::PyBytes_Size(key) as usize,
        );
        let manager = Bound::ref_from_ptr(py, &manager).cast_unchecked::<Manager>();
        match catch_unwind(AssertUnwindSafe(|| manager.get().find(py, bytes))) {
            Ok(answer) => answer.into_ptr(),
            Err(_) => {
                let text = c"lookup panicked: please report this";
                ffi::PyErr_SetString(PyRuntimeError::type_object_raw(py).cast(), text.as_ptr());
                ptr::null_mut()
            }
        }
    }
}
