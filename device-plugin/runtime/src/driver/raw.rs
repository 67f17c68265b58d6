//! Fills and copies memory by address, for which the caller vouches.

use super::{Context, Stream};
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
