//! Sets the driver's own memory limit of a cgroup, for which nvml-wrapper has no call.
//!
//! The call is `nvmlDeviceSetMemoryLimits_v1` (`nvml.h` of CUDA 13.4, driver r615).

use std::ffi::{CString, c_char, c_int, c_ulonglong, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use bursar_ledger::units::Bytes;
use nvml_wrapper::error::{NvmlError, nvml_try};
use nvml_wrapper::{Device, Nvml};

/// `nvmlSetMemoryLimits_v1_t`.
#[repr(C)]
struct MemoryLimits {
    /// The full path of the cgroup's folder.
    name_space: *const c_char,
    soft: c_ulonglong,
    hard: c_ulonglong,
}

/// `nvmlReturn_t nvmlDeviceSetMemoryLimits_v1(nvmlDevice_t, nvmlSetMemoryLimits_v1_t *)`. The code
/// is an integer, since a newer driver may have more codes.
type SetMemoryLimits = unsafe extern "C" fn(*mut c_void, *mut MemoryLimits) -> c_int;

const SYMBOL: &[u8] = b"nvmlDeviceSetMemoryLimits_v1\0";

/// Limits what processes in `cgroup` can allocate of `device` to `hard`. The soft limit stays zero,
/// because the driver adds soft limits to every parent cgroup. They remain when the cgroup is
/// removed without the driver (NVIDIA's "MPS v3 Memory Partitioning").
#[expect(unsafe_code, reason = "nvml-wrapper has no call for it")]
pub(crate) fn set_memory_limit(
    nvml: &Nvml,
    device: &Device<'_>,
    cgroup: &Path,
    Bytes(hard): Bytes,
) -> Result<(), NvmlError> {
    let name_space = CString::new(cgroup.as_os_str().as_bytes())?;
    let mut limits = MemoryLimits {
        name_space: name_space.as_ptr(),
        soft: 0,
        hard,
    };
    // SAFETY: the function of this name has this prototype in `nvml.h`. The library, the device and
    // the text outlive the call, which keeps none of them.
    let code = unsafe {
        let set = nvml.lib().__library.get::<SetMemoryLimits>(SYMBOL)?;
        set(device.handle().cast(), &raw mut limits)
    };
    nvml_try(code.unsigned_abs())
}

/// Whether this driver sets no limits: it is too old, or limits are switched off (`RmMemacctMode`).
pub(crate) fn is_unsupported(error: &NvmlError) -> bool {
    matches!(
        error,
        NvmlError::LibloadingError(_) | NvmlError::FunctionNotFound | NvmlError::NotSupported
    )
}
