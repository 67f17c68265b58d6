//! Managed and pinned host memory: not charged to a GPU. Residency of managed memory is not modelled;
//! prefetches and advice are checked and accepted.

use crate::abi::{Answer, Code, Out};
use crate::context::current;
use crate::entry::exports;
use crate::memory::{Allocation, Kind};
use crate::process::{healthy, lock};

fn allocate(address: &Out<u64>, len: u64, kind: Kind) -> Answer {
    let current = current()?;
    if address.is_null() || len == 0 {
        return Err(Code::INVALID_VALUE);
    }
    address.set(current.process.make(&current, len, kind)?)
}

/// A hint about managed memory.
fn hint(address: u64, len: u64) -> Answer {
    let space = lock(&healthy()?.space);
    let managed = space
        .around(address)
        .is_some_and(|(_, found)| found.kind == Kind::Managed);
    if managed && space.allows(address, len, false) {
        Ok(())
    } else {
        Err(Code::INVALID_VALUE)
    }
}

exports! {
    fn cuMemAllocManaged(address: Out<u64>, len: u64, flags: u32) = {
        if !matches!(flags, 1 | 2) {
            return Err(Code::INVALID_VALUE);
        }
        allocate(&address, len, Kind::Managed)
    };
    fn cuMemPrefetchAsync(address: u64, len: u64, _device: i32, _stream: u64) = hint(address, len);
    fn cuMemPrefetchAsync_v2(address: u64, len: u64, _location: u64, _flags: u32, _stream: u64) = hint(address, len);
    fn cuMemAdvise(address: u64, len: u64, _advice: i32, _device: i32) = hint(address, len);
    fn cuMemAdvise_v2(address: u64, len: u64, _advice: i32, _location: u64) = hint(address, len);
    fn cuStreamAttachMemAsync(_stream: u64, address: u64, _len: u64, _flags: u32) = hint(address, 1);
    fn cuMemAllocHost_v2(address: Out<u64>, len: u64) = allocate(&address, len, Kind::Host);
    fn cuMemHostAlloc(address: Out<u64>, len: u64, _flags: u32) = allocate(&address, len, Kind::Host);
    fn cuMemFreeHost(address: u64) = {
        let process = healthy()?;
        let gone = process.take(address, |kind| *kind == Kind::Host)?;
        process.end(address, gone);
        Ok(())
    };
    fn cuMemHostRegister_v2(address: u64, len: u64, _flags: u32) = {
        let current = current()?;
        if address == 0 || len == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let kind = Kind::Registered;
        let registered = Allocation { len, kind, context: current.context, unit: current.unit(), readable: true, writable: true };
        let mut space = lock(&current.process.space);
        if space.around(address).is_some() {
            return Err(Code(712)); // HOST_MEMORY_ALREADY_REGISTERED
        }
        space.allocations.insert(address, registered);
        Ok(())
    };
    fn cuMemHostUnregister(address: u64) = {
        let gone = healthy()?.take(address, |kind| *kind == Kind::Registered);
        gone.map(|_| ()).map_err(|_| Code(713)) // HOST_MEMORY_NOT_REGISTERED
    };
    fn cuMemHostGetDevicePointer_v2(device: Out<u64>, host: u64, _flags: u32) = {
        let known = lock(&healthy()?.space).around(host).is_some();
        if known { device.set(host) } else { Err(Code::INVALID_VALUE) }
    };
    fn cuMemHostGetFlags(flags: Out<u32>, host: u64) = {
        let known = lock(&healthy()?.space).around(host).is_some();
        if known { flags.set(0) } else { Err(Code::INVALID_VALUE) }
    };
}
