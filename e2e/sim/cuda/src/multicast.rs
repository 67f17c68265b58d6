//! Implements multicast objects (`cuMulticast*`), as far as memory is concerned.
//!
//! A multicast object keeps bound memory until it is unbound or the object is released. Multicast
//! objects cannot be mapped.

use crate::abi::{Code, DriverResult, In, Out};
use crate::entry::exports;
use crate::process::{Process, healthy_process, lock};
use crate::tables::multicasts::{Binding, Multicast};
use crate::tables::vmm::PinnedObject;
use crate::vmm::GRANULARITY;
use std::collections::BTreeMap;

/// `CUmulticastObjectProp`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct MulticastProperties {
    devices: u32,
    size: u64,
    handle_types: u64,
    flags: u64,
}

fn is_aligned(bytes: u64) -> bool {
    bytes.is_multiple_of(GRANULARITY)
}

impl Process {
    fn bind(&self, object: u64, offset: u64, len: u64, memory: PinnedObject) -> DriverResult {
        let mut multicasts = lock(&self.multicasts);
        let found = multicasts.find(object)?;
        let end = offset.checked_add(len).ok_or(Code::INVALID_VALUE)?;
        let fits = len > 0 && is_aligned(offset) && is_aligned(len) && end <= found.size;
        let mut before = found.bindings.range(..end);
        let taken = before
            .next_back()
            .is_some_and(|(at, old)| at + old.len > offset);
        if !fits || taken {
            return Err(Code::INVALID_VALUE);
        }
        found.bindings.insert(offset, Binding { len, memory });
        Ok(())
    }

    fn unbind(&self, object: u64, offset: u64, len: u64) -> DriverResult {
        let end = offset.checked_add(len).ok_or(Code::INVALID_VALUE)?;
        let removed: Vec<Binding> = {
            let mut multicasts = lock(&self.multicasts);
            let bindings = &mut multicasts.find(object)?.bindings;
            bindings
                .extract_if(offset..end, |_, _| true)
                .map(|(_, removed)| removed)
                .collect()
        };
        removed
            .into_iter()
            .for_each(|removed| self.unpin(removed.memory));
        Ok(())
    }

    /// Releases a multicast object; false if the handle is none.
    pub(crate) fn release_multicast(&self, object: u64) -> bool {
        let removed = lock(&self.multicasts).live.remove(&object);
        let is_one = removed.is_some();
        let bindings = removed
            .into_iter()
            .flat_map(|removed| removed.bindings.into_values());
        bindings.for_each(|removed| self.unpin(removed.memory));
        is_one
    }
}

fn bind_memory(object: u64, to: u64, handle: u64, len: u64) -> DriverResult {
    let process = healthy_process()?;
    process.bind(object, to, len, process.pin_handle(handle)?)
}

fn bind_address(object: u64, to: u64, address: u64, len: u64) -> DriverResult {
    let process = healthy_process()?;
    process.bind(object, to, len, process.pin_mapping(address)?)
}

exports! {
    fn cuMulticastCreate(object: Out<u64>, wanted: In<MulticastProperties>) = {
        let (process, wanted) = (healthy_process()?, wanted.get()?);
        if wanted.size == 0 || !is_aligned(wanted.size) || wanted.devices == 0 || object.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let mut multicasts = lock(&process.multicasts);
        multicasts.handle_count += 1;
        let handle = 0x5197_0000_0000 + multicasts.handle_count * 0x10;
        multicasts.live.insert(handle, Multicast { size: wanted.size, bindings: BTreeMap::new() });
        object.set(handle)
    };
    fn cuMulticastAddDevice(object: u64, device: i32) = {
        let process = healthy_process()?;
        process.device(device)?;
        lock(&process.multicasts).find(object).map(|_| ())
    };
    fn cuMulticastBindMem(object: u64, to: u64, handle: u64, _from: u64, len: u64, _flags: u64) = {
        bind_memory(object, to, handle, len)
    };
    fn cuMulticastBindMem_v2(object: u64, _device: i32, to: u64, handle: u64, _from: u64, len: u64, _flags: u64) = {
        bind_memory(object, to, handle, len)
    };
    fn cuMulticastBindAddr(object: u64, to: u64, address: u64, len: u64, _flags: u64) = {
        bind_address(object, to, address, len)
    };
    fn cuMulticastBindAddr_v2(object: u64, _device: i32, to: u64, address: u64, len: u64, _flags: u64) = {
        bind_address(object, to, address, len)
    };
    fn cuMulticastUnbind(object: u64, _device: i32, offset: u64, len: u64) = healthy_process()?.unbind(object, offset, len);
    fn cuMulticastGetGranularity(bytes: Out<u64>, _wanted: In<MulticastProperties>, _option: i32) = {
        healthy_process()?;
        bytes.set(GRANULARITY)
    };
}
