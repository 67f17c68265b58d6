//! Fills, copies, frees and uses memory by address. The driver cannot check that the address is
//! still the caller's, so each function is unsafe, and its caller vouches for the address.

use super::{Context, Grid, HostView, Kernel, Stream};
use crate::error::CudaError;

/// Fills memory and waits.
///
/// # Safety
/// If the range is host memory (pinned, managed, or pageable memory that the device can access),
/// the host does not refer to it.
///
/// # Errors
/// The error that the driver returned.
pub unsafe fn fill(
    context: &Context,
    address: u64,
    value: u8,
    bytes: usize,
) -> Result<(), CudaError> {
    context.fill(address, value, bytes)
}

/// Fills memory in the order of a stream.
///
/// # Safety
/// As [`fill`], until the work is done.
///
/// # Errors
/// The error that the driver returned.
pub unsafe fn fill_async(
    context: &Context,
    address: u64,
    value: u8,
    bytes: usize,
    stream: &Stream,
) -> Result<(), CudaError> {
    context.fill_async(address, value, bytes, stream)
}

/// Copies bytes of the host to memory and waits.
///
/// # Safety
/// As [`fill`].
///
/// # Errors
/// The error that the driver returned.
pub unsafe fn copy_to_device(
    context: &Context,
    address: u64,
    from: &[u8],
) -> Result<(), CudaError> {
    context.copy_to_device(address, from)
}

/// Copies memory to the host and waits.
///
/// # Safety
/// If the range is host memory, no mutable reference to it exists.
///
/// # Errors
/// The error that the driver returned.
pub unsafe fn copy_from_device(
    context: &Context,
    to: &mut [u8],
    address: u64,
) -> Result<(), CudaError> {
    context.copy_from_device(to, address)
}

/// Copies between two devices in the order of a stream of either.
///
/// # Safety
/// As [`fill`] for either range, until the work is done.
///
/// # Errors
/// The error that the driver returned.
pub unsafe fn copy_from_peer_async(
    context: &Context,
    to: u64,
    from: (&Context, u64),
    bytes: usize,
    stream: &Stream,
) -> Result<(), CudaError> {
    context.copy_from_peer_async(to, from, bytes, stream)
}

/// `cuMemFree`: frees linear, stream-ordered or managed memory, and waits for work that may use it.
///
/// # Safety
/// The host does not refer to the memory.
///
/// # Errors
/// The driver's error; the driver refuses an address inside an allocation.
pub unsafe fn free(context: &Context, address: u64) -> Result<(), CudaError> {
    context.free(address)
}

/// `cuMemFreeAsync`: frees memory after the present work of the stream.
///
/// # Safety
/// As [`free`].
///
/// # Errors
/// The error that the driver returned.
pub unsafe fn free_async(
    context: &Context,
    address: u64,
    stream: &Stream,
) -> Result<(), CudaError> {
    context.free_async(address, stream)
}

/// Launches a kernel in a stream.
///
/// # Safety
/// The arguments that are addresses are of memory that the host does not refer to before the work
/// is done.
///
/// # Errors
/// The driver's error, or code 1 (invalid value) for another number of arguments.
pub unsafe fn launch(
    kernel: &Kernel,
    stream: &Stream,
    grid: Grid,
    arguments: &mut [u64],
) -> Result<(), CudaError> {
    kernel.launch(stream, grid, arguments)
}

/// Creates the host's view of managed memory.
///
/// # Safety
/// The caller owns the memory, frees it after the view, and calls the view's methods only when no
/// work uses the bytes as long as the result lives.
///
/// # Errors
/// The driver's error, or code 1 (invalid value) for memory that is not managed.
pub unsafe fn host_view(
    context: &Context,
    address: u64,
    bytes: usize,
) -> Result<HostView, CudaError> {
    context.host_view(address, bytes)
}
