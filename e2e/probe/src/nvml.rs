//! Reads a device's memory and processes from NVML, as `nvidia-smi` does.

use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;

/// The library's soname.
const LIBRARY: &str = "libnvidia-ml.so.1";

/// The `nvml` part of an event.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum NvmlReport {
    /// NVML answered.
    Seen(DeviceUsage),
    /// NVML's error message.
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
    /// `None` where NVML does not report it.
    pub(crate) bytes: Option<u64>,
}

/// Reads the device with this UUID.
pub(crate) fn report_device(uuid: &str) -> NvmlReport {
    match read_device(uuid) {
        Ok(usage) => NvmlReport::Seen(usage),
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
