//! Implements memory limits of cgroups (driver r615 and later): checked and recorded, but not
//! enforced.

use crate::abi::{Code, NvmlResult, Out, Text, exports};
use crate::device::present_device;
use std::fs::File;
use std::io::Write as _;

/// The first driver branch with memory limits.
const FIRST_DRIVER_BRANCH: u32 = 615;
/// `NVML_DEVICE_MEMORY_LIMIT_MAX`.
const UNLIMITED: u64 = u64::MAX;

/// `nvmlSetMemoryLimits_v1_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemoryLimits {
    /// Address of the cgroup's path, a C string.
    name_space: u64,
    soft: u64,
    hard: u64,
}

fn set_limits(device: u64, limits: &Out<MemoryLimits>) -> NvmlResult {
    let device = present_device(device)?;
    let sim = &device.library.sim;
    let branch = sim.config.driver_version.split('.').next();
    let branch: Option<u32> = branch.and_then(|branch| branch.parse().ok());
    if branch < Some(FIRST_DRIVER_BRANCH) || device.unit.mig.is_some() {
        return Err(Code::NOT_SUPPORTED);
    }
    let MemoryLimits {
        name_space,
        soft,
        hard,
    } = limits.get()?;
    if soft > hard || (hard != UNLIMITED && hard > device.unit.total) {
        return Err(Code::INVALID_ARGUMENT);
    }
    let cgroup = Text::at_address(name_space).get()?;
    let uuid = sim.uuid(&device.unit);
    let recorded = File::open(&cgroup).and_then(|_| {
        let mut record = File::options()
            .create(true)
            .append(true)
            .open(sim.folder.memory_limits())?;
        writeln!(record, "{uuid} {soft} {hard} {cgroup}")
    });
    recorded.map_err(|_| Code::OPERATING_SYSTEM)
}

exports! {
    fn nvmlDeviceSetMemoryLimits_v1(device: u64, limits: Out<MemoryLimits>) = set_limits(device, &limits);
}
