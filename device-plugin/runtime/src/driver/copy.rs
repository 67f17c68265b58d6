//! Fills and copies.

use super::{Context, Stream, call};
use crate::error::CudaError;

impl Context {
    /// Fills device memory, and waits for it.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn fill(&self, address: u64, value: u8, bytes: usize) -> Result<(), CudaError> {
        let _current = self.enter()?;
        call!(self.driver(), cuMemsetD8_v2(address, value, bytes))?;
        // The driver returns before the device is done ("API synchronization behavior" in its manual).
        self.default_stream().synchronize()
    }

    /// Fills device memory in the order of a stream.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn fill_async(
        &self,
        address: u64,
        value: u8,
        bytes: usize,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let _current = self.enter()?;
        call!(
            self.driver(),
            cuMemsetD8Async(address, value, bytes, stream.raw())
        )
    }

    /// Copies to the device, and waits for it.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn copy_to_device(&self, address: u64, from: &[u8]) -> Result<(), CudaError> {
        let _current = self.enter()?;
        call!(
            self.driver(),
            cuMemcpyHtoD_v2(address, from.as_ptr().cast(), from.len())
        )?;
        // It returns when it has read the host's memory, which may be before the device's is written.
        self.default_stream().synchronize()
    }

    /// Copies from the device, and waits for it.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn copy_from_device(&self, to: &mut [u8], address: u64) -> Result<(), CudaError> {
        let _current = self.enter()?;
        call!(
            self.driver(),
            cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), address, to.len())
        )
    }

    /// Copies inside the device in the order of a stream.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn copy_async(
        &self,
        to: u64,
        from: u64,
        bytes: usize,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let _current = self.enter()?;
        call!(
            self.driver(),
            cuMemcpyDtoDAsync_v2(to, from, bytes, stream.raw())
        )
    }

    /// Copies from another device's memory to this one's in the order of a stream of either.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn copy_from_peer_async(
        &self,
        to: u64,
        (peer, from): (&Context, u64),
        bytes: usize,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let _current = stream.context().enter()?;
        call!(
            self.driver(),
            cuMemcpyPeerAsync(to, self.raw(), from, peer.raw(), bytes, stream.raw())
        )
    }
}
