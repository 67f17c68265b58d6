//! Resolves the driver's functions once, by their exported names.
//!
//! Source: cuda.h of CUDA 13.0. An exported name never changes its prototype; a changed function
//! gets a new suffix.
#![allow(non_snake_case, reason = "fields are named as the driver's functions")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::NonNull;

use bursar_protocol::fence::{self, FenceFn, ProcessGenerationFn, QuotaFn};
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUmemAccessDesc, CUmemAllocationProp,
    CUmemGenericAllocationHandle, CUmemLocation, CUmodule, CUstream, CUuuid,
};
use libloading::Library;

/// CUDA version for which functions are resolved by `cuGetProcAddress`.
const VERSION: c_int = 12_000;

macro_rules! table {
    (
        every { $(fn $name:ident($($kind:ty),* $(,)?);)* }
        some { $(fn $newer:ident($($newer_kind:ty),* $(,)?);)* }
    ) => {
        /// Function pointers; functions that some drivers lack are optional.
        #[derive(Debug)]
        pub(super) struct Table {
            $(pub(super) $name: unsafe extern "C" fn($($kind),*) -> c_int,)*
            $(pub(super) $newer: Option<unsafe extern "C" fn($($newer_kind),*) -> c_int>,)*
        }

        impl Table {
            fn of(library: &Library) -> Result<Table, libloading::Error> {
                Ok(Table {
                    // SAFETY: the prototypes are those of cuda.h, and the library is never closed.
                    $($name: *unsafe { library.get(concat!(stringify!($name), "\0")) }?,)*
                    // SAFETY: the prototypes are those of cuda.h, and the library is never closed.
                    $($newer: unsafe { library.get(concat!(stringify!($newer), "\0")) }.ok().map(|found| *found),)*
                })
            }
        }
    };
}

table! {
    every {
        fn cuInit(c_uint);
        fn cuDriverGetVersion(*mut c_int);
        fn cuGetErrorName(c_int, *mut *const c_char);

        fn cuDeviceGetCount(*mut c_int);
        fn cuDeviceGet(*mut CUdevice, c_int);
        fn cuDeviceGetName(*mut c_char, c_int, CUdevice);
        fn cuDeviceGetUuid_v2(*mut CUuuid, CUdevice);
        fn cuDeviceTotalMem_v2(*mut usize, CUdevice);
        fn cuDeviceGetAttribute(*mut c_int, c_int, CUdevice);
        fn cuDeviceCanAccessPeer(*mut c_int, CUdevice, CUdevice);

        fn cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
        fn cuDevicePrimaryCtxRelease_v2(CUdevice);
        fn cuCtxGetCurrent(*mut CUcontext);
        fn cuCtxPushCurrent_v2(CUcontext);
        fn cuCtxPopCurrent_v2(*mut CUcontext);
        fn cuCtxSynchronize();
        fn cuCtxEnablePeerAccess(CUcontext, c_uint);

        fn cuStreamCreate(*mut CUstream, c_uint);
        fn cuStreamDestroy_v2(CUstream);
        fn cuStreamSynchronize(CUstream);
        fn cuStreamQuery(CUstream);
        fn cuStreamWaitEvent(CUstream, CUevent, c_uint);
        fn cuEventCreate(*mut CUevent, c_uint);
        fn cuEventDestroy_v2(CUevent);
        fn cuEventRecord(CUevent, CUstream);
        fn cuEventQuery(CUevent);
        fn cuEventSynchronize(CUevent);

        fn cuMemGetInfo_v2(*mut usize, *mut usize);
        fn cuMemAlloc_v2(*mut CUdeviceptr, usize);
        fn cuMemFree_v2(CUdeviceptr);
        fn cuMemAllocAsync(*mut CUdeviceptr, usize, CUstream);
        fn cuMemFreeAsync(CUdeviceptr, CUstream);
        fn cuMemAllocManaged(*mut CUdeviceptr, usize, c_uint);
        fn cuStreamAttachMemAsync(CUstream, CUdeviceptr, usize, c_uint);
        fn cuMemPrefetchAsync(CUdeviceptr, usize, CUdevice, CUstream);
        fn cuMemAdvise(CUdeviceptr, usize, c_int, CUdevice);
        fn cuPointerGetAttribute(*mut c_void, c_int, CUdeviceptr);
        fn cuMemRangeGetAttribute(*mut c_void, usize, c_int, CUdeviceptr, usize);

        fn cuMemCreate(*mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, u64);
        fn cuMemRelease(CUmemGenericAllocationHandle);
        fn cuMemExportToShareableHandle(*mut c_void, CUmemGenericAllocationHandle, c_int, u64);
        fn cuMemImportFromShareableHandle(*mut CUmemGenericAllocationHandle, *mut c_void, c_int);
        fn cuMemGetAllocationGranularity(*mut usize, *const CUmemAllocationProp, c_int);
        fn cuMemAddressReserve(*mut CUdeviceptr, usize, usize, CUdeviceptr, u64);
        fn cuMemAddressFree(CUdeviceptr, usize);
        fn cuMemMap(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, u64);
        fn cuMemUnmap(CUdeviceptr, usize);
        fn cuMemSetAccess(CUdeviceptr, usize, *const CUmemAccessDesc, usize);

        fn cuMemsetD8_v2(CUdeviceptr, u8, usize);
        fn cuMemsetD8Async(CUdeviceptr, u8, usize, CUstream);
        fn cuMemcpyHtoD_v2(CUdeviceptr, *const c_void, usize);
        fn cuMemcpyDtoH_v2(*mut c_void, CUdeviceptr, usize);
        fn cuMemcpyPeerAsync(CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, usize, CUstream);

        fn cuModuleLoadData(*mut CUmodule, *const c_void);
        fn cuModuleUnload(CUmodule);
        fn cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
        fn cuLaunchKernel(
            CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void,
            *mut *mut c_void,
        );
    }
    some {
        // Since CUDA 12.2; the headers of CUDA 13 declare only these.
        fn cuMemPrefetchAsync_v2(CUdeviceptr, usize, CUmemLocation, c_uint, CUstream);
        fn cuMemAdvise_v2(CUdeviceptr, usize, c_int, CUmemLocation);
        // Since CUDA 12.0.
        fn cuGetProcAddress_v2(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int);
    }
}

/// Opens the driver for the life of the process.
pub(super) fn load() -> Result<Table, String> {
    // SAFETY: loading NVIDIA's library, or the shim in its place, runs initialisers, as any CUDA
    // program does.
    let library =
        unsafe { Library::new("libcuda.so.1") }.map_err(|error| loader_message(&error))?;
    let table = Table::of(&library).map_err(|error| loader_message(&error))?;
    std::mem::forget(library);
    Ok(table)
}

impl Table {
    /// Returns the shim's function that reads the agent's fence; `None` if the driver itself
    /// answers.
    pub(super) fn fence(&self) -> Option<FenceFn> {
        self.shim_function(fence::FENCE_SYMBOL)
    }

    /// Returns the shim's function that reads the process generation; `None` if the driver itself
    /// or an older shim answers.
    pub(super) fn process_generation(&self) -> Option<ProcessGenerationFn> {
        self.shim_function(fence::PROCESS_GENERATION_SYMBOL)
    }

    /// Returns the shim's function that reads the quota of a device; `None` if the driver itself or
    /// an older shim answers.
    pub(super) fn quota(&self) -> Option<QuotaFn> {
        let found = self.find_shim_function(fence::QUOTA_SYMBOL)?;
        // SAFETY: only the shim has a function of this name. The function has this type, and the
        // shim is never unloaded.
        Some(unsafe { std::mem::transmute::<NonNull<c_void>, QuotaFn>(found) })
    }

    /// Returns a function without arguments that only the shim has.
    fn shim_function(&self, name: &CStr) -> Option<extern "C" fn() -> u64> {
        let found = self.find_shim_function(name)?;
        // SAFETY: only the shim has functions of the given names. Both have this type, and the shim
        // is never unloaded.
        Some(unsafe { std::mem::transmute::<NonNull<c_void>, extern "C" fn() -> u64>(found) })
    }

    fn find_shim_function(&self, name: &CStr) -> Option<NonNull<c_void>> {
        let (mut found, mut status) = (std::ptr::null_mut(), 0);
        // SAFETY: the name ends with a zero, and the pointers are valid for the call.
        let code = unsafe {
            (self.cuGetProcAddress_v2?)(name.as_ptr(), &raw mut found, VERSION, 0, &raw mut status)
        };
        NonNull::new(found).filter(|_| code == 0)
    }
}

/// Returns the loader's message, which is the source of the error.
fn loader_message(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(loader) => loader.to_string(),
        None => error.to_string(),
    }
}
