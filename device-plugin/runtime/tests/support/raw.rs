//! Fills and copies by address, for tests and examples that pass only device memory.
#![allow(
    unsafe_code,
    reason = "nothing of the host refers to what blocks and leases have"
)]
#![allow(dead_code, reason = "each program uses some of them")]

use bursar_runtime::driver::{Context, Stream, raw};
use bursar_runtime::error::CudaError;

pub(crate) trait Raw {
    fn fill(&self, address: u64, value: u8, bytes: usize) -> Result<(), CudaError>;
    fn fill_async(&self, to: u64, value: u8, bytes: usize, in_: &Stream) -> Result<(), CudaError>;
    fn copy_to_device(&self, address: u64, from: &[u8]) -> Result<(), CudaError>;
    fn copy_from_device(&self, to: &mut [u8], address: u64) -> Result<(), CudaError>;
}

impl Raw for Context {
    fn fill(&self, address: u64, value: u8, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the address is a device's.
        unsafe { raw::fill(self, address, value, bytes) }
    }

    fn fill_async(&self, to: u64, value: u8, bytes: usize, in_: &Stream) -> Result<(), CudaError> {
        // SAFETY: the address is a device's.
        unsafe { raw::fill_async(self, to, value, bytes, in_) }
    }

    fn copy_to_device(&self, address: u64, from: &[u8]) -> Result<(), CudaError> {
        // SAFETY: the address is a device's.
        unsafe { raw::copy_to_device(self, address, from) }
    }

    fn copy_from_device(&self, to: &mut [u8], address: u64) -> Result<(), CudaError> {
        // SAFETY: the address is a device's.
        unsafe { raw::copy_from_device(self, to, address) }
    }
}
