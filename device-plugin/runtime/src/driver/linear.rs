//! Linear and stream-ordered memory.

use super::{Context, Stream, call};
use crate::error::CudaError;

/// What the driver aligns linear memory to, at least, in bytes (CUDA's programming guide, "Device Memory Accesses").
pub const LINEAR_ALIGNMENT: usize = 256;

impl Context {
    /// `cuMemAlloc`: an address with at least that many bytes behind it.
    ///
    /// # Errors
    /// What the driver answered.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<u64, CudaError> {
        let _current = self.enter()?;
        let mut address = 0;
        call!(self.driver(), cuMemAlloc_v2(&raw mut address, bytes))?;
        Ok(address)
    }

    /// `cuMemFree`: linear, stream-ordered and managed memory, which nothing of the host refers to any more. Waits for
    /// work that may use it.
    ///
    /// # Errors
    /// What the driver answered; one that is not an allocation's first address is refused.
    pub(crate) fn free(&self, address: u64) -> Result<(), CudaError> {
        let _current = self.enter()?;
        call!(self.driver(), cuMemFree_v2(address))
    }

    /// `cuMemAllocAsync`: memory of the device's pool, good for work that comes after this in the stream.
    ///
    /// # Errors
    /// What the driver answered.
    pub(crate) fn allocate_async(&self, bytes: usize, stream: &Stream) -> Result<u64, CudaError> {
        let _current = self.enter()?;
        let mut address = 0;
        call!(
            self.driver(),
            cuMemAllocAsync(&raw mut address, bytes, stream.raw())
        )?;
        Ok(address)
    }

    /// `cuMemFreeAsync`: free once the work that is in the stream now is done.
    ///
    /// # Errors
    /// What the driver answered.
    pub(crate) fn free_async(&self, address: u64, stream: &Stream) -> Result<(), CudaError> {
        let _current = self.enter()?;
        call!(self.driver(), cuMemFreeAsync(address, stream.raw()))
    }
}
