//! Implements memory limits of cgroups (driver r615 and later): checked, recorded and counted, but
//! not enforced.

use crate::abi::{Code, NvmlResult, Out, Text, exports};
use crate::device::{Device, present_device};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;

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

/// `nvmlGetMemoryLimits_v1_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct CountedLimits {
    limits: MemoryLimits,
    used: u64,
}

/// The device, if its driver has limits.
fn limited_device(device: u64) -> Result<Device, Code> {
    let device = present_device(device)?;
    let branch = device.library.sim.config.driver_version.split('.').next();
    let branch: Option<u32> = branch.and_then(|branch| branch.parse().ok());
    if branch < Some(FIRST_DRIVER_BRANCH) || device.unit.mig.is_some() {
        return Err(Code::NOT_SUPPORTED);
    }
    Ok(device)
}

/// The pids in a cgroup and those below it.
fn pids_in(cgroup: &Path) -> BTreeSet<u32> {
    let text = std::fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    let mut pids: BTreeSet<u32> = text.lines().filter_map(|line| line.parse().ok()).collect();
    let entries = std::fs::read_dir(cgroup).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.path().is_dir()) {
        pids.extend(pids_in(&entry.path()));
    }
    pids
}

fn get_limits(device: u64, limits: &Out<CountedLimits>) -> NvmlResult {
    let device = limited_device(device)?;
    let (sim, found) = (&device.library.sim, limits.get()?);
    let cgroup = Text::at_address(found.limits.name_space).get()?;
    let (uuid, record) = (
        sim.uuid(&device.unit),
        std::fs::read_to_string(sim.folder.memory_limits()),
    );
    let record = record.unwrap_or_default();
    // A line is UUID, soft, hard, cgroup; the last one is in force.
    let of_cgroup = |line: &&str| {
        let mut words = line.splitn(4, ' ');
        words.next() == Some(uuid) && words.nth(2) == Some(cgroup.as_str())
    };
    let line = record.lines().rfind(of_cgroup).ok_or(Code::NOT_SUPPORTED)?;
    let number = |place| {
        line.split(' ')
            .nth(place)
            .and_then(|word| word.parse().ok())
    };
    let (soft, hard) = number(1).zip(number(2)).ok_or(Code::UNKNOWN)?;
    let pids = pids_in(Path::new(&cgroup));
    let counted = sim.usage(device.unit.index).processes.into_iter();
    let counted = counted.filter(|process| pids.contains(&process.pid));
    limits.set(CountedLimits {
        limits: MemoryLimits {
            soft,
            hard,
            ..found.limits
        },
        used: counted.map(|process| process.bytes).sum(),
    })
}

fn set_limits(device: u64, limits: &Out<MemoryLimits>) -> NvmlResult {
    let device = limited_device(device)?;
    let sim = &device.library.sim;
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
    fn nvmlDeviceGetMemoryLimits_v1(device: u64, limits: Out<CountedLimits>) = get_limits(device, &limits);
    fn nvmlDeviceSetMemoryLimits_v1(device: u64, limits: Out<MemoryLimits>) = set_limits(device, &limits);
}
