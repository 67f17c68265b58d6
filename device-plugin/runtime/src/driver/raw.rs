//! Fills and copies by address, of memory that the caller vouches for.

use super::{Context, Stream};
use crate::error::CudaError;

/// Fills memory, and waits for it.
///
/// # Safety
/// If the range is memory of the host (pinned, managed, or any where the device reaches pageable memory), nothing refers
/// to it.
///
/// # Errors
/// What the driver answered.
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
/// What the driver answered.
pub unsafe fn fill_async(
    context: &Context,
    address: u64,
    value: u8,
    bytes: usize,
    stream: &Stream,
) -> Result<(), CudaError> {
    context.fill_async(address, value, bytes, stream)
}

/// Copies from the host, and waits for it.
///
/// # Safety
/// As [`fill`].
///
/// # Errors
/// What the driver answered.
pub unsafe fn copy_to_device(
    context: &Context,
    address: u64,
    from: &[u8],
) -> Result<(), CudaError> {
    context.copy_to_device(address, from)
}

/// Copies to the host, and waits for it.
///
/// # Safety
/// If the range is memory of the host, nobody has the right to write it.
///
/// # Errors
/// What the driver answered.
pub unsafe fn copy_from_device(
    context: &Context,
    to: &mut [u8],
    address: u64,
) -> Result<(), CudaError> {
    context.copy_from_device(to, address)
}
