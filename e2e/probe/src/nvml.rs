//! A device through NVML, as `nvidia-smi` would look at it.
#![forbid(unsafe_code)]

use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;

/// The library, as the loader knows it.
const LIBRARY: &str = "libnvidia-ml.so.1";

/// What NVML says, or why it says nothing.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum NvmlReport {
    /// The device's memory and processes.
    Seen(DeviceUsage),
    /// NVML's error.
    Failed(String),
}

/// A device's memory and processes, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub(crate) struct DeviceUsage {
    pub(crate) total: u64,
    pub(crate) free: u64,
    pub(crate) used: u64,
    pub(crate) processes: Vec<Process>,
}

/// A process with a context.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    /// None where NVML cannot tell.
    pub(crate) bytes: Option<u64>,
}

/// Looks at the device with this UUID.
pub(crate) fn report_device(uuid: &str) -> NvmlReport {
    match read_device(uuid) {
        Ok(seen) => NvmlReport::Seen(seen),
        Err(error) => NvmlReport::Failed(error.to_string()),
    }
}

fn read_device(uuid: &str) -> Result<DeviceUsage, NvmlError> {
    let nvml = Nvml::builder().lib_path(LIBRARY.as_ref()).init()?;
    let device = nvml.device_by_uuid(uuid)?;
    let memory = device.memory_info()?;
    let processes = device.running_compute_processes()?;
    let process = |process: nvml_wrapper::struct_wrappers::device::ProcessInfo| Process {
        pid: process.pid,
        bytes: match process.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        },
    };
    Ok(DeviceUsage {
        total: memory.total,
        free: memory.free,
        used: memory.used,
        processes: processes.into_iter().map(process).collect(),
    })
}
