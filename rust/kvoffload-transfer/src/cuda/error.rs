//! What the CUDA driver can answer.

use thiserror::Error;

/// A driver call that failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{call} failed with {name} ({code}: {text})")]
pub struct DriverError {
    /// The function that was called.
    pub call: &'static str,
    /// The driver's number for the error.
    pub code: u32,
    /// The driver's name for it, such as `CUDA_ERROR_OUT_OF_MEMORY`.
    pub name: String,
    /// The driver's description of it.
    pub text: String,
}

impl DriverError {
    /// Whether the context is gone: no call will succeed until the process has been started again.
    #[must_use]
    pub fn is_fatal(&self) -> bool {
        // Deinitialised, invalid or destroyed context, the uncorrectable memory and hardware errors,
        // every kind of failed launch that the driver calls sticky, and the unknown error.
        // Those of a lost MPS server, too.
        matches!(
            self.code,
            4 | 201 | 214 | 220 | 226 | 700 | 702 | 709..=710 | 714..=719 | 721 | 806 | 810 | 999
        )
    }
}

/// Why CUDA cannot be used in this process.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CudaUnavailable {
    /// The driver's library is not on this machine, or cannot be loaded.
    #[error("no CUDA driver was found: libcuda.so cannot be loaded")]
    NoLibrary,
    /// The driver does not start.
    #[error("the CUDA driver does not start: {error}{hint}", error = .0, hint = stub_hint(.0))]
    Init(DriverError),
    /// The device's primary context cannot be had.
    #[error("CUDA device {ordinal} cannot be used: {source}")]
    Context {
        /// Number of the device.
        ordinal: u32,
        /// The driver's answer.
        source: DriverError,
    },
    /// The driver is too old for this package.
    #[error("the CUDA driver is too old: it supports CUDA {}.{}, at least 11.0 is needed", .version / 1000, .version % 1000 / 10)]
    TooOld {
        /// 1000 times the major version plus 10 times the minor one.
        version: i32,
    },
    /// No such device.
    #[error("there is no CUDA device {ordinal}: this process sees {devices}")]
    NoDevice {
        /// Number of the device that was asked for.
        ordinal: u32,
        /// How many there are.
        devices: i32,
    },
}

/// What to do where the toolkit's stub of the library was loaded instead of the driver.
fn stub_hint(error: &DriverError) -> &'static str {
    const STUB_LIBRARY: u32 = 34;
    match error.code {
        STUB_LIBRARY => "; a stub of libcuda.so comes first on the library path: take it off",
        _ => "",
    }
}
