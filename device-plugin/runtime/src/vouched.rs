//! Calls the unsafe functions of [`raw`]. The runtime vouches for each address, because it passes
//! only those of its own blocks. While the work goes on, it borrows the block's owner, so that the
//! host cannot refer to the block.
#![allow(
    unsafe_code,
    reason = "each block's owner is borrowed as the call needs"
)]

use crate::driver::{Context, Grid, HostView, Kernel, Stream, raw};
use crate::error::CudaError;

/// Calls with the address of a block of this crate.
pub(crate) trait Vouched {
    fn fill(&self, address: u64, value: u8, bytes: usize) -> Result<(), CudaError>;
    fn fill_async(
        &self,
        address: u64,
        value: u8,
        bytes: usize,
        stream: &Stream,
    ) -> Result<(), CudaError>;
    fn copy_to_device(&self, address: u64, from: &[u8]) -> Result<(), CudaError>;
    fn copy_from_device(&self, to: &mut [u8], address: u64) -> Result<(), CudaError>;
    fn copy_from_peer_async(
        &self,
        to: u64,
        from: (&Context, u64),
        bytes: usize,
        stream: &Stream,
    ) -> Result<(), CudaError>;
    fn free(&self, address: u64) -> Result<(), CudaError>;
    fn free_async(&self, address: u64, stream: &Stream) -> Result<(), CudaError>;
    fn host_view(&self, address: u64, bytes: usize) -> Result<HostView, CudaError>;
}

impl Vouched for Context {
    fn fill(&self, address: u64, value: u8, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the module's description.
        unsafe { raw::fill(self, address, value, bytes) }
    }

    fn fill_async(
        &self,
        address: u64,
        value: u8,
        bytes: usize,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        // SAFETY: the module's description.
        unsafe { raw::fill_async(self, address, value, bytes, stream) }
    }

    fn copy_to_device(&self, address: u64, from: &[u8]) -> Result<(), CudaError> {
        // SAFETY: the module's description.
        unsafe { raw::copy_to_device(self, address, from) }
    }

    fn copy_from_device(&self, to: &mut [u8], address: u64) -> Result<(), CudaError> {
        // SAFETY: the module's description.
        unsafe { raw::copy_from_device(self, to, address) }
    }

    fn copy_from_peer_async(
        &self,
        to: u64,
        from: (&Context, u64),
        bytes: usize,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        // SAFETY: the module's description.
        unsafe { raw::copy_from_peer_async(self, to, from, bytes, stream) }
    }

    fn free(&self, address: u64) -> Result<(), CudaError> {
        // SAFETY: the module's description.
        unsafe { raw::free(self, address) }
    }

    fn free_async(&self, address: u64, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: the module's description.
        unsafe { raw::free_async(self, address, stream) }
    }

    fn host_view(&self, address: u64, bytes: usize) -> Result<HostView, CudaError> {
        // SAFETY: `ManagedRef` owns the memory longer than the view, and waits before each use.
        unsafe { raw::host_view(self, address, bytes) }
    }
}

/// Launches a kernel with addresses of blocks of this crate.
pub(crate) fn launch(
    kernel: &Kernel,
    stream: &Stream,
    grid: Grid,
    arguments: &mut [u64],
) -> Result<(), CudaError> {
    // SAFETY: the module's description.
    unsafe { raw::launch(kernel, stream, grid, arguments) }
}

/// Lends a block of this crate to cudarc.
#[cfg(feature = "cudarc-interop")]
pub(crate) fn lend<T>(
    stream: &std::sync::Arc<cudarc::driver::CudaStream>,
    address: u64,
    len: usize,
) -> Result<crate::driver::interop::LentSlice<T>, crate::driver::interop::InteropError> {
    // SAFETY: the block's owner is borrowed until the result ends.
    unsafe { crate::driver::interop::LentSlice::new(stream, address, len) }
}
