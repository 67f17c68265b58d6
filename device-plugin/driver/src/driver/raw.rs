//! Fills, copies and frees memory by address. The driver cannot check that the address is
//! still the caller's, so each function is unsafe, and its caller vouches for the address.

use super::{Context, Stream, call};
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
    let _current = context.enter()?;
    call!(context.driver(), cuMemsetD8_v2(address, value, bytes))?;
    // The driver returns before the device is done ("API synchronization behavior" in its
    // manual).
    context.default_stream().synchronize()
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
    let _current = context.enter()?;
    call!(
        context.driver(),
        cuMemsetD8Async(address, value, bytes, stream.raw())
    )
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
    let _current = context.enter()?;
    call!(
        context.driver(),
        cuMemcpyHtoD_v2(address, from.as_ptr().cast(), from.len())
    )?;
    // The driver returns once it has read the host's memory, possibly before the device's
    // memory is written.
    context.default_stream().synchronize()
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
    let _current = context.enter()?;
    call!(
        context.driver(),
        cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), address, to.len())
    )
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
    (peer, from): (&Context, u64),
    bytes: usize,
    stream: &Stream,
) -> Result<(), CudaError> {
    let _current = stream.context().enter()?;
    call!(
        context.driver(),
        cuMemcpyPeerAsync(to, context.raw(), from, peer.raw(), bytes, stream.raw())
    )
}

/// `cuMemFree`: frees linear, stream-ordered or managed memory, and waits for work that may use it.
///
/// # Safety
/// The host does not refer to the memory.
///
/// # Errors
/// The driver's error; the driver refuses an address inside an allocation.
pub unsafe fn free(context: &Context, address: u64) -> Result<(), CudaError> {
    let _current = context.enter()?;
    call!(context.driver(), cuMemFree_v2(address))
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
    let _current = context.enter()?;
    call!(context.driver(), cuMemFreeAsync(address, stream.raw()))
}
