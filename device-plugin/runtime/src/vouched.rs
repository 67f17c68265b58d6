//! Calls the driver's functions that take addresses. The runtime vouches for each address, because
//! it passes only those of its own blocks. While the work goes on, it borrows the block's owner, so
//! that the host cannot refer to the block.
#![allow(
    unsafe_code,
    reason = "each block's owner is borrowed as the call needs"
)]

use crate::driver::{Context, Grid, HostView, Kernel, Stream, raw};
use crate::error::CudaError;

pub(crate) fn fill(
    context: &Context,
    address: u64,
    value: u8,
    bytes: usize,
) -> Result<(), CudaError> {
    // SAFETY: the module's description.
    unsafe { raw::fill(context, address, value, bytes) }
}

pub(crate) fn fill_async(
    context: &Context,
    address: u64,
    value: u8,
    bytes: usize,
    stream: &Stream,
) -> Result<(), CudaError> {
    // SAFETY: the module's description.
    unsafe { raw::fill_async(context, address, value, bytes, stream) }
}

pub(crate) fn copy_to_device(
    context: &Context,
    address: u64,
    from: &[u8],
) -> Result<(), CudaError> {
    // SAFETY: the module's description.
    unsafe { raw::copy_to_device(context, address, from) }
}

pub(crate) fn copy_from_device(
    context: &Context,
    to: &mut [u8],
    address: u64,
) -> Result<(), CudaError> {
    // SAFETY: the module's description.
    unsafe { raw::copy_from_device(context, to, address) }
}

pub(crate) fn copy_from_peer_async(
    context: &Context,
    to: u64,
    from: (&Context, u64),
    bytes: usize,
    stream: &Stream,
) -> Result<(), CudaError> {
    // SAFETY: the module's description.
    unsafe { raw::copy_from_peer_async(context, to, from, bytes, stream) }
}

pub(crate) fn free(context: &Context, address: u64) -> Result<(), CudaError> {
    // SAFETY: the module's description.
    unsafe { raw::free(context, address) }
}

pub(crate) fn free_async(
    context: &Context,
    address: u64,
    stream: &Stream,
) -> Result<(), CudaError> {
    // SAFETY: the module's description.
    unsafe { raw::free_async(context, address, stream) }
}

pub(crate) fn host_view(
    context: &Context,
    address: u64,
    bytes: usize,
) -> Result<HostView, CudaError> {
    // SAFETY: `ManagedRef` owns the memory longer than the view, and waits before each use.
    unsafe { context.host_view(address, bytes) }
}

/// Launches a kernel with addresses of blocks of this crate.
pub(crate) fn launch(
    kernel: &Kernel,
    stream: &Stream,
    grid: Grid,
    arguments: &mut [u64],
) -> Result<(), CudaError> {
    // SAFETY: the module's description.
    unsafe { kernel.launch(stream, grid, arguments) }
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
