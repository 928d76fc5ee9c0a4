//! The CUDA backend: copies between a device's memory and pinned host memory.
//!
//! Follow one job: [`engine`] records an event on the stream of the compute that the job comes after,
//! and queues it. On its direction's thread, `backend` cuts it into pieces whose host memory is ready
//! (`pinned` sees to that in the background), `calibrate` says which path is faster for it, and `mover`
//! puts it into the device's queues, through `staging` and `kernel` where it is staged. `driver` and
//! `objects` are the only way to the CUDA driver, which is looked for at run time: without one, this
//! module answers with [`CudaUnavailable`].

mod backend;
mod calibrate;
mod driver;
pub mod engine;
mod job;
mod kernel;
mod mover;
mod numa;
mod objects;
mod piece;
mod pinned;
mod queue;
mod shared;
mod staging;

pub use calibrate::{Calibration, CopyPath};
pub use driver::{CudaUnavailable, DriverError, unavailable};
pub use engine::{CudaConfig, CudaEngine, DeviceTensor};
pub use mover::Path;
pub use pinned::Pinning;
pub use shared::CudaFaults;
