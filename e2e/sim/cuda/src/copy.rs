//! Implements copies and fills. Asynchronous calls complete at once, in the caller's thread.

use crate::abi::{Code, DriverResult};
use crate::context_stack::{CurrentContext, current_context};
use crate::entry::exports;
use crate::process::lock;

/// Source or destination of a copy.
#[derive(Debug, Clone, Copy)]
enum Endpoint {
    /// An address that the device has to be able to access.
    Device(u64),
    /// A host address, which is not checked.
    Host(u64),
}

/// When a call completes.
#[derive(Debug, Clone, Copy)]
enum Completion {
    /// After all work of the context.
    Synchronous,
    /// At once, for a stream.
    Stream(u64),
}

fn begin_copy(when: Completion) -> Result<CurrentContext, Code> {
    let current = current_context()?;
    match when {
        Completion::Synchronous => current.process.wait_for_context(current.context)?,
        Completion::Stream(stream) => current.check_stream(stream)?,
    }
    Ok(current)
}

impl CurrentContext {
    fn address(&self, side: Endpoint, len: u64, write: bool) -> Result<u64, Code> {
        match side {
            Endpoint::Host(0) => Err(Code::INVALID_VALUE),
            Endpoint::Host(address) => Ok(address),
            Endpoint::Device(address) if self.process.access(self.unit(), address, len, write) => {
                Ok(address)
            }
            Endpoint::Device(_) => Err(Code::INVALID_VALUE),
        }
    }
}

fn copy(to: Endpoint, from: Endpoint, len: u64, when: Completion) -> DriverResult {
    let current = begin_copy(when)?;
    if len == 0 {
        return Ok(());
    }
    let (to, from) = (
        current.address(to, len, true)?,
        current.address(from, len, false)?,
    );
    // SAFETY: device ranges are accessible allocations; by contract of the API the caller's host
    // ranges are valid.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, len as usize) };
    Ok(())
}

fn fill<T: Copy>(to: u64, value: T, count: u64, when: Completion) -> DriverResult {
    let current = begin_copy(when)?;
    let len = count
        .checked_mul(size_of::<T>() as u64)
        .ok_or(Code::INVALID_VALUE)?;
    if !to.is_multiple_of(align_of::<T>() as u64) {
        return Err(Code::INVALID_VALUE);
    }
    if len != 0 {
        let to = current.address(Endpoint::Device(to), len, true)?;
        // SAFETY: the range is in accessible allocations, and is aligned for `T`.
        unsafe { std::slice::from_raw_parts_mut(to as *mut T, count as usize) }.fill(value);
    }
    Ok(())
}

/// Decides the side of an address of `cuMemcpy`: an address outside all allocations is a host
/// address.
fn classify_address(current: &CurrentContext, address: u64) -> Endpoint {
    if lock(&current.process.space)
        .find_containing(address)
        .is_some()
    {
        Endpoint::Device(address)
    } else {
        Endpoint::Host(address)
    }
}

fn copy_unified(to: u64, from: u64, len: u64, when: Completion) -> DriverResult {
    let current = current_context()?;
    copy(
        classify_address(&current, to),
        classify_address(&current, from),
        len,
        when,
    )
}

exports! {
    fn cuMemcpy(to: u64, from: u64, len: u64) = copy_unified(to, from, len, Completion::Synchronous);
    fn cuMemcpyAsync(to: u64, from: u64, len: u64, stream: u64) = copy_unified(to, from, len, Completion::Stream(stream));
    fn cuMemcpyPeer(to: u64, _to_context: u64, from: u64, _from_context: u64, len: u64) = {
        copy(Endpoint::Device(to), Endpoint::Device(from), len, Completion::Synchronous)
    };
    fn cuMemcpyPeerAsync(to: u64, _to_context: u64, from: u64, _from_context: u64, len: u64, stream: u64) = {
        copy(Endpoint::Device(to), Endpoint::Device(from), len, Completion::Stream(stream))
    };
    fn cuMemcpyHtoD_v2(to: u64, from: u64, len: u64) = copy(Endpoint::Device(to), Endpoint::Host(from), len, Completion::Synchronous);
    fn cuMemcpyDtoH_v2(to: u64, from: u64, len: u64) = copy(Endpoint::Host(to), Endpoint::Device(from), len, Completion::Synchronous);
    fn cuMemcpyDtoD_v2(to: u64, from: u64, len: u64) = copy(Endpoint::Device(to), Endpoint::Device(from), len, Completion::Synchronous);
    fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, len: u64, stream: u64) = copy(Endpoint::Device(to), Endpoint::Host(from), len, Completion::Stream(stream));
    fn cuMemcpyDtoHAsync_v2(to: u64, from: u64, len: u64, stream: u64) = copy(Endpoint::Host(to), Endpoint::Device(from), len, Completion::Stream(stream));
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: u64, stream: u64) = copy(Endpoint::Device(to), Endpoint::Device(from), len, Completion::Stream(stream));
    fn cuMemsetD8_v2(to: u64, value: u8, count: u64) = fill(to, value, count, Completion::Synchronous);
    fn cuMemsetD16_v2(to: u64, value: u16, count: u64) = fill(to, value, count, Completion::Synchronous);
    fn cuMemsetD32_v2(to: u64, value: u32, count: u64) = fill(to, value, count, Completion::Synchronous);
    fn cuMemsetD8Async(to: u64, value: u8, count: u64, stream: u64) = fill(to, value, count, Completion::Stream(stream));
    fn cuMemsetD16Async(to: u64, value: u16, count: u64, stream: u64) = fill(to, value, count, Completion::Stream(stream));
    fn cuMemsetD32Async(to: u64, value: u32, count: u64, stream: u64) = fill(to, value, count, Completion::Stream(stream));
}
