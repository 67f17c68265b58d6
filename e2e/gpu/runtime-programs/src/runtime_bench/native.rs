//! Calls the driver's own pool as a C program does, without this crate.

use std::ffi::{c_int, c_void};

use anyhow::{Context as _, Result, ensure};
use bursar_runtime::driver::Stream;
use libloading::Library;

use super::random::BenchAllocator;

/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`
const RELEASE_THRESHOLD: c_int = 4;

/// `cuMemAllocAsync` and `cuMemFreeAsync` in one stream.
pub(crate) struct Native {
    allocate: unsafe extern "C" fn(*mut u64, usize, *mut c_void) -> c_int,
    free: unsafe extern "C" fn(u64, *mut c_void) -> c_int,
    stream: usize,
    _library: Library,
}

impl Native {
    /// Uses the pool of the current context's device with an unlimited release threshold and
    /// `primed` bytes, as RMM's resource does.
    pub(crate) fn new(ordinal: u32, stream: &Stream, primed: u64) -> Result<Native> {
        type DefaultPool = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
        type SetAttribute = unsafe extern "C" fn(*mut c_void, c_int, *const u64) -> c_int;
        // SAFETY: the library is loaded, and the prototypes are those of cuda.h.
        let (native, default_pool, set_attribute) = unsafe {
            let library = Library::new("libcuda.so.1")?;
            let default_pool = *library.get::<DefaultPool>("cuDeviceGetDefaultMemPool\0")?;
            let set_attribute = *library.get::<SetAttribute>("cuMemPoolSetAttribute\0")?;
            let native = Native {
                allocate: *library.get("cuMemAllocAsync\0")?,
                free: *library.get("cuMemFreeAsync\0")?,
                stream: stream.as_raw(),
                _library: library,
            };
            (native, default_pool, set_attribute)
        };
        let (mut pool, keep) = (std::ptr::null_mut(), u64::MAX);
        // SAFETY: the pointers are valid for the calls.
        let answers = unsafe {
            let found = default_pool(&raw mut pool, ordinal.cast_signed());
            [
                found,
                set_attribute(pool, RELEASE_THRESHOLD, &raw const keep),
            ]
        };
        ensure!(answers == [0, 0], "the driver's pool answered {answers:?}");
        let block = native
            .allocate(primed)
            .context("the driver's pool cannot be primed")?;
        native.free(block);
        stream.synchronize()?;
        Ok(native)
    }
}

impl BenchAllocator for Native {
    /// Address and size in bytes.
    type Block = (u64, u64);

    fn allocate(&self, bytes: u64) -> Option<(u64, u64)> {
        let mut address = 0;
        // SAFETY: the pointer is valid for the call, and the stream lives.
        let answer = unsafe {
            (self.allocate)(&raw mut address, bytes as usize, self.stream as *mut c_void)
        };
        (answer == 0).then_some((address, bytes))
    }

    fn free(&self, (address, bytes): (u64, u64)) -> u64 {
        // SAFETY: the address was allocated here and is freed once.
        let answer = unsafe { (self.free)(address, self.stream as *mut c_void) };
        assert_eq!(answer, 0, "the driver did not free");
        bytes
    }
}
