//! The staging kernel of the simulated device.

use std::sync::Arc;

use super::driver::{Device, Op};
use super::error::DriverError;
use super::fragment::Way;
use super::objects::Stream;

pub(super) struct Kernel;

#[expect(
    clippy::unnecessary_wraps,
    clippy::unused_self,
    reason = "the real ones may fail, and have a handle"
)]
impl Kernel {
    pub(super) fn load(_device: &Arc<Device>, _blocks: Option<u32>) -> Result<Self, DriverError> {
        Ok(Self)
    }

    /// # Safety
    /// As for the real one.
    pub(super) unsafe fn launch(
        &self,
        stream: &Stream,
        way: Way,
        list: u64,
        count: u32,
        _longest: u32,
        staging: u64,
    ) -> Result<(), DriverError> {
        stream.push(Op::Kernel {
            way,
            list,
            count,
            staging,
        })
    }

    pub(super) fn launch_empty(&self, stream: &Stream) -> Result<(), DriverError> {
        stream.push(Op::Kernel {
            way: Way::Pack,
            list: 0,
            count: 0,
            staging: 0,
        })
    }
}
