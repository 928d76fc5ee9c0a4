//! Moves the bytes of KV-cache chunks between device memory and host memory.
//!
//! Follow one job: [`HostEngine::submit_store`], or [`cuda::CudaEngine::submit`] on a GPU, checks it and
//! puts it into the [`engine`]'s queue; the thread of its direction hands it to a [`backend`], which asks for its copies one by one; when
//! they are over, its [`Completion`] waits in a queue until [`Engine::take_finished`] takes it. The host
//! side of every copy lies in a [`region`]; [`verify`] can prove that a slot still holds what was
//! stored.
//!
//! Addresses live here and nowhere else in the project; keys are unknown here.

pub mod backend;
pub mod cuda;
pub mod engine;
pub mod error;
pub mod host;
mod memory;
mod notices;
pub mod region;
pub mod verify;

pub use engine::{
    Completion, Engine, EngineConfig, JobIds, KindStats, NewJob, ShutdownReport, Stats,
};
pub use error::{CopyError, StartError, SubmitError, VerifyReason, WaitTimeout};
pub use host::engine::{HostConfig, HostEngine, HostTensor};
pub use host::faults::{FaultPlan, LoadFault};
pub use kvoffload_core::jobs::JobKind;
pub use memory::{Limit, machine_memory};
pub use region::Region;
pub use verify::Verify;
