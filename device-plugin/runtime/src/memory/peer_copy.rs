//! Copies typed memory between devices.
#![forbid(unsafe_code)]

use bytemuck::Pod;

use crate::memory::error::MemoryError;
use crate::memory::slice::TrackedSlice;

/// Copies all items to memory of another or the same device, in the order of both streams. The host
/// does not wait.
///
/// # Errors
/// [`MemoryError::Stale`] for either memory, [`MemoryError::Length`] if the lengths differ, or the
/// driver's error.
pub fn copy<T: Pod>(from: &TrackedSlice<T>, to: &mut TrackedSlice<T>) -> Result<(), MemoryError> {
    from.check()?;
    to.check()?;
    let (len, given) = (to.len(), from.len());
    if len != given {
        return Err(MemoryError::Length { len, given });
    }
    let bytes = size_of::<T>() * len;
    let (source, target) = (from.stream(), to.stream());
    target.wait_for(source)?;
    target.context().copy_from_peer_async(
        to.address(),
        (source.context(), from.address()),
        bytes,
        target,
    )?;
    // Later work in the source's stream may overwrite or free the memory that the copy reads.
    source.wait_for(target).or_else(|_| target.synchronize())?;
    Ok(())
}
