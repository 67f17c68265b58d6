//! Calls the CUDA driver, over cudarc.

#![allow(unsafe_code)]

use std::ffi::CString;
use std::os::fd::{FromRawFd as _, OwnedFd};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

/// Reasons why the driver could not be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CudaError {
    /// The container has no libcuda.
    #[error("failed to load libcuda.so: the container has no GPU")]
    NoLibrary,
    /// A call failed.
    #[error("{call}: {}", name(.source))]
    Call {
        /// The driver's function.
        call: &'static str,
        source: DriverError,
    },
}

/// The driver's error for an allocation that it refused.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Refusal {
    /// The CUresult.
    pub(crate) code: u32,
    /// Its name in cuda.h.
    pub(crate) name: String,
}

/// A device with the attributes that the driver reports.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Device {
    /// The device's ordinal.
    pub(crate) ordinal: i32,
    /// The UUID in NVML's format.
    pub(crate) uuid: String,
    /// The marketing name.
    pub(crate) name: String,
    /// `cuDeviceTotalMem`, in bytes.
    pub(crate) total_mem: usize,
    /// The free memory that `cuMemGetInfo` reports, in bytes.
    pub(crate) free: usize,
    /// The total memory that `cuMemGetInfo` reports, in bytes.
    pub(crate) total: usize,
}

/// Loads and initialises the driver.
pub(crate) fn init() -> Result<(), CudaError> {
    // SAFETY: opening the driver's library runs its constructors, as linking with it would.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoLibrary);
    }
    result::init().map_err(call_error("cuInit"))
}

/// The number of visible devices.
pub(crate) fn device_count() -> Result<i32, CudaError> {
    result::device::get_count().map_err(call_error("cuDeviceGetCount"))
}

/// Makes the device's primary context current on this thread.
pub(crate) fn set_current_device(ordinal: i32) -> Result<sys::CUdevice, CudaError> {
    let device = result::device::get(ordinal).map_err(call_error("cuDeviceGet"))?;
    // SAFETY: the device was just returned by the driver.
    let context = unsafe { result::primary_ctx::retain(device) }
        .map_err(call_error("cuDevicePrimaryCtxRetain"))?;
    // SAFETY: the context was just returned by the driver, and is never released.
    unsafe { result::ctx::set_current(context) }.map_err(call_error("cuCtxSetCurrent"))?;
    Ok(device)
}

/// Reads a device's attributes, and makes its primary context current.
pub(crate) fn describe(ordinal: i32) -> Result<Device, CudaError> {
    let device = set_current_device(ordinal)?;
    // SAFETY: the device was returned by the driver.
    let total_mem =
        unsafe { result::device::total_mem(device) }.map_err(call_error("cuDeviceTotalMem"))?;
    let (free, total) = result::mem_get_info().map_err(call_error("cuMemGetInfo"))?;
    let name = result::device::get_name(device).map_err(call_error("cuDeviceGetName"))?;
    let uuid = result::device::get_uuid(device).map_err(call_error("cuDeviceGetUuid"))?;
    Ok(Device {
        ordinal,
        uuid: uuid_text(uuid.bytes.map(|byte| byte as u8)),
        name,
        total_mem,
        free,
        total,
    })
}

/// Linear memory, which lives until it is freed or the process ends.
#[derive(Debug)]
pub(crate) struct Allocation(sys::CUdeviceptr);

/// Allocates linear memory on the current device.
pub(crate) fn allocate(bytes: u64) -> Result<Allocation, Refusal> {
    let bytes = usize::try_from(bytes)
        .map_err(|_| refusal(DriverError(sys::CUresult::CUDA_ERROR_INVALID_VALUE)))?;
    // SAFETY: a context is current, and nothing reads the uninitialised memory.
    unsafe { result::malloc_sync(bytes) }
        .map(Allocation)
        .map_err(refusal)
}

/// Allocates managed memory, and moves it to the device, whose context is current.
pub(crate) fn allocate_managed(bytes: u64, ordinal: i32) -> Result<Allocation, Refusal> {
    let size = usize::try_from(bytes)
        .map_err(|_| refusal(DriverError(sys::CUresult::CUDA_ERROR_INVALID_VALUE)))?;
    let location = sys::CUmemLocation {
        type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: ordinal,
    };
    // SAFETY: a context is current, nothing reads the uninitialised memory, and a null stream is
    // the default stream.
    unsafe {
        let flags = sys::CUmemAttach_flags_enum::CU_MEM_ATTACH_GLOBAL;
        let address = result::malloc_managed(size, flags).map_err(refusal)?;
        result::mem_prefetch_async(address, size, location, std::ptr::null_mut())
            .map_err(refusal)?;
        Ok(Allocation(address))
    }
}

/// Frees linear memory.
pub(crate) fn free(allocation: Allocation) -> Result<(), CudaError> {
    // SAFETY: the pointer is from `malloc_sync`, and `free` consumes the allocation.
    unsafe { result::free_sync(allocation.0) }.map_err(call_error("cuMemFree"))
}

/// Allocates memory of the first device without mapping it, and exports a descriptor, which alone
/// keeps the memory.
pub(crate) fn export(bytes: u64) -> Result<OwnedFd, CudaError> {
    let size = usize::try_from(bytes)
        .map_err(|_| DriverError(sys::CUresult::CUDA_ERROR_INVALID_VALUE))
        .map_err(call_error("cuMemCreate"))?;
    let kind = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    // SAFETY: a C structure of numbers and one unread pointer, for which zeros are valid.
    let mut properties: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = kind;
    properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    let (mut handle, mut descriptor) = (0, -1_i32);
    // SAFETY: the properties and the handle outlive the call.
    unsafe { sys::cuMemCreate(&raw mut handle, size, &raw const properties, 0) }
        .result()
        .map_err(call_error("cuMemCreate"))?;
    // SAFETY: the driver just returned the handle, and writes a descriptor of this kind, an int.
    unsafe { sys::cuMemExportToShareableHandle((&raw mut descriptor).cast(), handle, kind, 0) }
        .result()
        .map_err(call_error("cuMemExportToShareableHandle"))?;
    // SAFETY: the driver just opened it for this process.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// PTX of a kernel that writes 4 bytes to address 0.
const FAULT: &std::ffi::CStr = c"
.version 6.0
.target sm_50
.address_size 64
.visible .entry fault()
{
    .reg .b32 %value;
    .reg .b64 %address;
    mov.u32 %value, 1;
    mov.u64 %address, 0;
    st.global.u32 [%address], %value;
    ret;
}
";

/// Launches a kernel that faults, and returns the error that synchronizing the context reports.
pub(crate) fn fault() -> Result<Refusal, CudaError> {
    let kernel = CString::new("fault").expect("no zero in it");
    // SAFETY: the PTX is NUL-terminated; the kernel takes no arguments; a null stream is the
    // default stream.
    let answer = unsafe {
        let module = result::module::load_data(FAULT.as_ptr().cast())
            .map_err(call_error("cuModuleLoadData"))?;
        let function = result::module::get_function(module, kernel)
            .map_err(call_error("cuModuleGetFunction"))?;
        result::launch_kernel(
            function,
            (1, 1, 1),
            (1, 1, 1),
            0,
            std::ptr::null_mut(),
            &mut [],
        )
        .map_err(call_error("cuLaunchKernel"))?;
        result::ctx::synchronize()
    };
    Ok(refusal(
        answer
            .err()
            .unwrap_or(DriverError(sys::CUresult::CUDA_SUCCESS)),
    ))
}

fn refusal(error: DriverError) -> Refusal {
    Refusal {
        code: error.0 as u32,
        name: name(&error),
    }
}

fn call_error(call: &'static str) -> impl FnOnce(DriverError) -> CudaError {
    move |source| CudaError::Call { call, source }
}

fn name(error: &DriverError) -> String {
    format!("{:?}", error.0)
}

fn uuid_text(bytes: [u8; 16]) -> String {
    let hex = bytes.map(|byte| format!("{byte:02x}")).concat();
    format!(
        "GPU-{}-{}-{}-{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..]
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuid_text_has_five_groups() {
        let mut bytes = [0; 16];
        bytes[0] = 0x5e;
        bytes[15] = 1;
        assert_eq!(uuid_text(bytes), "GPU-5e000000-0000-0000-0000-000000000001");
    }
}
