//! Allocates linear and stream-ordered memory.

use super::{Context, Stream, call};
use crate::error::CudaError;

/// Smallest alignment of linear memory in bytes (CUDA programming guide, "Device Memory Accesses").
pub const LINEAR_ALIGNMENT: usize = 256;

impl Context {
    /// `cuMemAlloc`: allocates at least `bytes` bytes.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn allocate(&self, bytes: usize) -> Result<u64, CudaError> {
        let _current = self.enter()?;
        let mut address = 0;
        call!(self.driver(), cuMemAlloc_v2(&raw mut address, bytes))?;
        Ok(address)
    }

    /// `cuMemAllocAsync`: allocates from the device's pool for later work of the stream.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn allocate_async(&self, bytes: usize, stream: &Stream) -> Result<u64, CudaError> {
        let _current = self.enter()?;
        let mut address = 0;
        call!(
            self.driver(),
            cuMemAllocAsync(&raw mut address, bytes, stream.raw())
        )?;
        Ok(address)
    }
}
