//! The CUDA backend: copies between a device's memory and pinned host memory.
//!
//! Follow one job: [`engine`] records an event on the stream of the compute that the job comes after,
//! and queues it. On its direction's thread, `backend` has `filler` cut it into pieces whose host memory
//! is ready (`pinned` sees to that in the background), `calibrate` says which path is faster for it, and
//! `mover` puts it into the device's queues, through `staging` and `kernel` where it is staged (and they
//! find `room` there), as `rows` where many ranges can be copied with one call. `driver` and `objects`
//! are the only way to the CUDA driver, which is looked for at run time: without one, this module answers
//! with [`CudaUnavailable`].
//!
//! In unit tests those three are a simulated device (`sim`), whose streams run in any order that their
//! waits allow: so a missing wait shows as wrong bytes on any machine.

mod backend;
mod batch;
mod calibrate;
#[cfg_attr(test, path = "sim/driver.rs")]
mod driver;
pub mod engine;
mod error;
mod filler;
mod fragment;
mod job;
#[cfg_attr(test, path = "sim/kernel.rs")]
mod kernel;
mod mover;
mod numa;
#[cfg_attr(test, path = "sim/objects.rs")]
mod objects;
mod piece;
mod pinned;
mod queue;
mod room;
mod rows;
mod shared;
mod staging;

pub use calibrate::{Calibration, CopyPath};
pub use driver::unavailable;
pub use engine::{CudaConfig, CudaEngine, DeviceTensor};
pub use error::{CudaUnavailable, DriverError};
pub use mover::Path;
pub use pinned::Pinning;
pub use shared::CudaFaults;
