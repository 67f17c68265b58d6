//! Copies typed memory between devices.
#![forbid(unsafe_code)]

use bytemuck::Pod;

use crate::driver::{Access, Stream};
use crate::memory::error::MemoryError;
use crate::memory::gpu_ref::{GpuRef, WriteError};
use crate::memory::multi_stream::{MultiStreamMemory, SyncGuard};
use crate::memory::slice::TrackedSlice;
use crate::memory::write_token::WriteToken;
use crate::vouched;

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
    vouched::copy_from_peer_async(
        target.context(),
        to.address(),
        (source.context(), from.address()),
        bytes,
        target,
    )?;
    // Later work in the source's stream may overwrite or free the memory that the copy reads.
    source.wait_for(target).or_else(|_| target.synchronize())?;
    Ok(())
}

/// Copies all items to shared memory of another or the same device, in `stream`, a stream of the
/// target's device. The host does not wait.
///
/// The copy follows the last write of `from` and all uses of `to`, in whatever streams they are.
/// Reads of `from` go on beside it. Later writes of `from`, uses of `to` and both frees follow the
/// copy.
///
/// # Errors
/// [`MemoryError::Stale`] for either memory, and [`MemoryError::Length`] if the lengths differ.
/// [`WrongOrdinal`](crate::ResourceError::WrongOrdinal) for a stream of another device, and
/// [`WriteError::Refused`] if the target's gate refuses the token. Otherwise the driver's error.
pub fn copy_shared<T: Pod>(
    from: &GpuRef<T>,
    to: &GpuRef<T>,
    token: &WriteToken,
    stream: &Stream,
) -> Result<(), WriteError> {
    let (len, given) = (to.len(), from.len());
    if len != given {
        return Err(MemoryError::Length { len, given }.into());
    }
    let (source, target) = (from.shared(), to.shared());
    if std::ptr::eq(source, target) {
        to.access()?;
        return Ok(to.gate().admit(token)?);
    }
    let (mut of_source, mut of_target) = lock_both(source, target);
    // Checked under the lock of all uses, so that the next writer is ordered behind the copy.
    to.gate().admit(token)?;
    let reading = source.begin_peer_read(&of_source, stream)?;
    let writing = match target.begin_use(&of_target, stream, Access::Write) {
        Ok(writing) => writing,
        Err(error) => {
            source.end_use(&mut of_source, reading, stream, None)?;
            return Err(error.into());
        }
    };
    let copied = vouched::copy_from_peer_async(
        stream.context(),
        to.as_raw(),
        (source.memory.stream.context(), from.as_raw()),
        size_of::<T>() * len,
        stream,
    );
    let submitted = |access| copied.is_ok().then_some(access);
    let read = source.end_use(&mut of_source, reading, stream, submitted(Access::Read));
    let written = target.end_use(&mut of_target, writing, stream, submitted(Access::Write));
    copied.map_err(MemoryError::from)?;
    read.and(written)?;
    Ok(())
}

/// Locks two memories in the order of their addresses, as launches do, which prevents deadlocks.
fn lock_both<'a>(
    source: &'a MultiStreamMemory,
    target: &'a MultiStreamMemory,
) -> (SyncGuard<'a>, SyncGuard<'a>) {
    let address = |memory: &MultiStreamMemory| std::ptr::from_ref(memory).addr();
    if address(source) < address(target) {
        let of_source = source.lock();
        (of_source, target.lock())
    } else {
        let of_target = target.lock();
        (source.lock(), of_target)
    }
}
