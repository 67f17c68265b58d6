//! Fills and copies memory: mappings for every caller, and raw addresses for this crate.
//!
//! An address may be pinned or managed host memory, so that a fill could change borrowed memory.
//! Callers outside this crate must therefore use the unsafe functions of [`raw`](super::raw).
//! Modules of this crate pass addresses of blocks and leases only.

use super::{Context, Mapping, Stream, call};
use crate::error::CudaError;

impl Mapping {
    /// Fills a part of the mapping, from byte `at` on, and waits.
    ///
    /// # Errors
    /// The driver's error, or code 1 (invalid value) for a range past the end.
    pub fn fill(
        &self,
        context: &Context,
        at: u64,
        value: u8,
        bytes: usize,
    ) -> Result<(), CudaError> {
        context.fill(
            self.checked_address("Mapping::fill", at, bytes)?,
            value,
            bytes,
        )
    }

    /// Copies bytes of the host to a part of the mapping, from byte `at` on, and waits.
    ///
    /// # Errors
    /// As [`fill`](Self::fill).
    pub fn write(&self, context: &Context, at: u64, from: &[u8]) -> Result<(), CudaError> {
        context.copy_to_device(
            self.checked_address("Mapping::write", at, from.len())?,
            from,
        )
    }

    /// Copies a part of the mapping, from byte `at` on, to the host and waits.
    ///
    /// # Errors
    /// As [`fill`](Self::fill).
    pub fn read(&self, context: &Context, at: u64, to: &mut [u8]) -> Result<(), CudaError> {
        let from = self.checked_address("Mapping::read", at, to.len())?;
        context.copy_from_device(to, from)
    }

    /// Returns the address of a range inside the mapping.
    fn checked_address(&self, call: &'static str, at: u64, bytes: usize) -> Result<u64, CudaError> {
        /// `CUDA_ERROR_INVALID_VALUE`
        const INVALID_VALUE: i32 = 1;
        match at.checked_add(bytes as u64) {
            Some(end) if end <= self.bytes() => Ok(self.address() + at),
            _ => Err(CudaError {
                call,
                code: INVALID_VALUE,
            }),
        }
    }
}

impl Context {
    /// Fills device memory and waits.
    pub(crate) fn fill(&self, address: u64, value: u8, bytes: usize) -> Result<(), CudaError> {
        let _current = self.enter()?;
        call!(self.driver(), cuMemsetD8_v2(address, value, bytes))?;
        // The driver returns before the device is done ("API synchronization behavior" in its
        // manual).
        self.default_stream().synchronize()
    }

    /// Fills device memory in the order of a stream.
    pub(crate) fn fill_async(
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

    /// Copies to the device and waits.
    pub(crate) fn copy_to_device(&self, address: u64, from: &[u8]) -> Result<(), CudaError> {
        let _current = self.enter()?;
        call!(
            self.driver(),
            cuMemcpyHtoD_v2(address, from.as_ptr().cast(), from.len())
        )?;
        // The driver returns once it has read the host's memory, possibly before the device's
        // memory is written.
        self.default_stream().synchronize()
    }

    /// Copies from the device and waits.
    pub(crate) fn copy_from_device(&self, to: &mut [u8], address: u64) -> Result<(), CudaError> {
        let _current = self.enter()?;
        call!(
            self.driver(),
            cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), address, to.len())
        )
    }

    /// Copies between two devices in the order of a stream of either.
    pub(crate) fn copy_from_peer_async(
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
