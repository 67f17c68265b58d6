//! Copies and fills. Asynchronous ones are done at once, in the caller's thread.

use crate::abi::{Answer, Code};
use crate::context::{Current, current};
use crate::entry::exports;
use crate::process::lock;

/// One side of a copy.
#[derive(Debug, Clone, Copy)]
enum Side {
    /// Must be memory of ours.
    Device(u64),
    /// The caller's word.
    Host(u64),
}

/// When a call answers.
#[derive(Debug, Clone, Copy)]
enum When {
    /// After all work of the context.
    Done,
    /// At once, in a stream.
    In(u64),
}

fn begin(when: When) -> Result<Current, Code> {
    let current = current()?;
    match when {
        When::Done => current.process.wait_for_context(current.context)?,
        When::In(stream) => current.check_stream(stream)?,
    }
    Ok(current)
}

impl Current {
    fn address(&self, side: Side, len: u64, write: bool) -> Result<u64, Code> {
        match side {
            Side::Host(0) => Err(Code::INVALID_VALUE),
            Side::Host(address) => Ok(address),
            Side::Device(address) if lock(&self.process.space).allows(address, len, write) => {
                Ok(address)
            }
            Side::Device(_) => Err(Code::INVALID_VALUE),
        }
    }
}

fn copy(to: Side, from: Side, len: u64, when: When) -> Answer {
    let current = begin(when)?;
    if len == 0 {
        return Ok(());
    }
    let (to, from) = (
        current.address(to, len, true)?,
        current.address(from, len, false)?,
    );
    // SAFETY: device ranges were looked up; host ranges are the caller's, as the driver API has it.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, len as usize) };
    Ok(())
}

fn fill<T: Copy>(to: u64, value: T, count: u64, when: When) -> Answer {
    let current = begin(when)?;
    let len = count
        .checked_mul(size_of::<T>() as u64)
        .ok_or(Code::INVALID_VALUE)?;
    if !to.is_multiple_of(align_of::<T>() as u64) {
        return Err(Code::INVALID_VALUE);
    }
    if len != 0 {
        let to = current.address(Side::Device(to), len, true)?;
        // SAFETY: the range was looked up, and is aligned for `T`.
        unsafe { std::slice::from_raw_parts_mut(to as *mut T, count as usize) }.fill(value);
    }
    Ok(())
}

/// A unified copy: what is not ours is the host's.
fn side(current: &Current, address: u64) -> Side {
    if lock(&current.process.space).around(address).is_some() {
        Side::Device(address)
    } else {
        Side::Host(address)
    }
}

fn unified(to: u64, from: u64, len: u64, when: When) -> Answer {
    let current = current()?;
    copy(side(&current, to), side(&current, from), len, when)
}

exports! {
    fn cuMemcpy(to: u64, from: u64, len: u64) = unified(to, from, len, When::Done);
    fn cuMemcpyAsync(to: u64, from: u64, len: u64, stream: u64) = unified(to, from, len, When::In(stream));
    fn cuMemcpyPeer(to: u64, _to_context: u64, from: u64, _from_context: u64, len: u64) = {
        copy(Side::Device(to), Side::Device(from), len, When::Done)
    };
    fn cuMemcpyPeerAsync(to: u64, _to_context: u64, from: u64, _from_context: u64, len: u64, stream: u64) = {
        copy(Side::Device(to), Side::Device(from), len, When::In(stream))
    };
    fn cuMemcpyHtoD_v2(to: u64, from: u64, len: u64) = copy(Side::Device(to), Side::Host(from), len, When::Done);
    fn cuMemcpyDtoH_v2(to: u64, from: u64, len: u64) = copy(Side::Host(to), Side::Device(from), len, When::Done);
    fn cuMemcpyDtoD_v2(to: u64, from: u64, len: u64) = copy(Side::Device(to), Side::Device(from), len, When::Done);
    fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, len: u64, stream: u64) = copy(Side::Device(to), Side::Host(from), len, When::In(stream));
    fn cuMemcpyDtoHAsync_v2(to: u64, from: u64, len: u64, stream: u64) = copy(Side::Host(to), Side::Device(from), len, When::In(stream));
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: u64, stream: u64) = copy(Side::Device(to), Side::Device(from), len, When::In(stream));
    fn cuMemsetD8_v2(to: u64, value: u8, count: u64) = fill(to, value, count, When::Done);
    fn cuMemsetD16_v2(to: u64, value: u16, count: u64) = fill(to, value, count, When::Done);
    fn cuMemsetD32_v2(to: u64, value: u32, count: u64) = fill(to, value, count, When::Done);
    fn cuMemsetD8Async(to: u64, value: u8, count: u64, stream: u64) = fill(to, value, count, When::In(stream));
    fn cuMemsetD16Async(to: u64, value: u16, count: u64, stream: u64) = fill(to, value, count, When::In(stream));
    fn cuMemsetD32Async(to: u64, value: u32, count: u64, stream: u64) = fill(to, value, count, When::In(stream));
}
