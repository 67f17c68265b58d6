//! Sets and reads the driver's own memory limit of a cgroup, for which nvml-wrapper has no calls.
//!
//! NVML's functions are `nvmlDeviceSetMemoryLimits_v1` and `nvmlDeviceGetMemoryLimits_v1` (`nvml.h`
//! of CUDA 13.4, driver r615).

use std::ffi::{CString, c_char, c_int, c_ulonglong, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use bursar_ledger::units::Bytes;
use nvml_wrapper::error::{NvmlError, nvml_try};
use nvml_wrapper::{Device, Nvml};
use serde::{Deserialize, Serialize};

/// The driver's memory limit of a cgroup on one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupLimit {
    /// The bytes above which the driver denies allocations.
    pub hard: Bytes,
    /// The bytes that the driver counts for the processes of the cgroup, without managed memory.
    pub used: Bytes,
}

/// `nvmlGetMemoryLimits_v1_t`, which begins with `nvmlSetMemoryLimits_v1_t`.
#[repr(C)]
struct MemoryLimits {
    /// The full path of the cgroup's folder.
    name_space: *const c_char,
    soft: c_ulonglong,
    hard: c_ulonglong,
    used: c_ulonglong,
}

/// `nvmlReturn_t nvmlDeviceSetMemoryLimits_v1(nvmlDevice_t, nvmlSetMemoryLimits_v1_t *)`; the
/// getter has the same prototype. The code is an integer, because a newer driver may return other
/// codes.
type MemoryLimitsCall = unsafe extern "C" fn(*mut c_void, *mut MemoryLimits) -> c_int;

const SET: &[u8] = b"nvmlDeviceSetMemoryLimits_v1\0";
const GET: &[u8] = b"nvmlDeviceGetMemoryLimits_v1\0";

/// Limits what processes in `cgroup` can allocate of `device` to `hard`, if `hard` is given.
/// Returns the limit that the driver then has. The soft limit stays zero, because the driver adds
/// soft limits to every parent cgroup, and these sums remain when the cgroup is removed without the
/// driver (NVIDIA's "MPS v3 Memory Partitioning").
pub(crate) fn memory_limit(
    nvml: &Nvml,
    device: &Device<'_>,
    cgroup: &Path,
    hard: Option<Bytes>,
) -> Result<CgroupLimit, NvmlError> {
    let name_space = CString::new(cgroup.as_os_str().as_bytes())?;
    let mut limits = MemoryLimits {
        name_space: name_space.as_ptr(),
        soft: 0,
        hard: hard.unwrap_or_default().0,
        used: 0,
    };
    if hard.is_some() {
        call(nvml, device, SET, &mut limits)?;
    }
    call(nvml, device, GET, &mut limits)?;
    Ok(CgroupLimit {
        hard: Bytes(limits.hard),
        used: Bytes(limits.used),
    })
}

#[expect(unsafe_code, reason = "nvml-wrapper has no call for it")]
fn call(
    nvml: &Nvml,
    device: &Device<'_>,
    symbol: &[u8],
    limits: &mut MemoryLimits,
) -> Result<(), NvmlError> {
    // SAFETY: the functions of these names have this prototype in `nvml.h`, and the setter takes
    // the beginning of the structure. The library, the device and the text outlive the call, which
    // keeps none of them.
    let code = unsafe {
        let function = nvml.lib().__library.get::<MemoryLimitsCall>(symbol)?;
        function(device.handle().cast(), limits)
    };
    nvml_try(code.unsigned_abs())
}

/// Whether this driver sets no limits, because it is too old or `RmMemacctMode` switches them off.
pub(crate) fn is_unsupported(error: &NvmlError) -> bool {
    matches!(
        error,
        NvmlError::LibloadingError(_) | NvmlError::FunctionNotFound | NvmlError::NotSupported
    )
}
