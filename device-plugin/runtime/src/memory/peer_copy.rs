//! Copies between devices.
#![forbid(unsafe_code)]

use bytemuck::Pod;

use crate::memory::slice::{MemoryError, TrackedSlice};

/// Copies all items to memory of another device, or of the same, behind all work that either has so far; work that
/// is submitted to either stream later comes after the copy. Waits for nothing.
///
/// # Errors
/// [`MemoryError::Stale`] for either, [`MemoryError::Length`] where they differ in it, or what the driver answered.
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
    // What comes next in the source's stream may overwrite or free what is being read.
    source.wait_for(target).or_else(|_| target.synchronize())?;
    Ok(())
}
