//! Implements managed memory (`cuMemAllocManaged`) and page-locked host memory (`cuMemHost*`),
//! which no GPU is charged for.
//!
//! Managed memory becomes resident on a device by a prefetch or an access, until other memory
//! displaces it. It also stays on the device when it is prefetched to the host. Prefetches and
//! advice are recorded per page and can be queried.

use crate::abi::{Code, DriverResult, Out};
use crate::context_stack::current_context;
use crate::entry::exports;
use crate::process::{Process, healthy_process, lock};
use crate::tables::address_space::{Allocation, AllocationKind};
use crate::tables::residency::{DEVICE_CPU, DEVICE_INVALID, NO_HINTS, PageHints, pages};

fn allocate(address: &Out<u64>, len: u64, kind: AllocationKind) -> DriverResult {
    let current = current_context()?;
    if address.is_null() || len == 0 {
        return Err(Code::INVALID_VALUE);
    }
    address.set(current.process.map_allocation(&current, len, kind)?)
}

/// `CUmemLocationType`. C passes a `CUmemLocation` as one number: the type in the low half, the id
/// in the high half.
const LOCATION_DEVICE: u32 = 1;
const LOCATION_HOST: u32 = 2;
const LOCATION_HOST_NUMA: u32 = 3;

/// Fails unless the whole range is managed memory.
fn check_managed(process: &Process, address: u64, len: u64) -> DriverResult {
    let space = lock(&process.space);
    let managed = space
        .find_containing(address)
        .is_some_and(|(_, found)| found.kind == AllocationKind::Managed);
    if managed && space.is_accessible(address, len, false) {
        Ok(())
    } else {
        Err(Code::INVALID_VALUE)
    }
}

/// Checks a device's ordinal, or `DEVICE_CPU`.
fn check_device(process: &Process, device: i32) -> Result<i32, Code> {
    match usize::try_from(device) {
        Ok(device) if device >= process.devices.len() => Err(Code::INVALID_DEVICE),
        Err(_) if device != DEVICE_CPU => Err(Code::INVALID_DEVICE),
        _ => Ok(device),
    }
}

/// Converts a `CUmemLocation` to a device's ordinal or `DEVICE_CPU`.
fn device_of_location(process: &Process, location: u64) -> Result<i32, Code> {
    match location as u32 {
        LOCATION_DEVICE => {
            let device = i32::try_from(location >> 32).map_err(|_| Code::INVALID_DEVICE)?;
            usize::try_from(device).map_err(|_| Code::INVALID_DEVICE)?;
            check_device(process, device)
        }
        LOCATION_HOST | LOCATION_HOST_NUMA => Ok(DEVICE_CPU),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// Updates the hints of every page of a range of managed memory.
fn update_hints(
    address: u64,
    len: u64,
    at: impl FnOnce(&Process) -> Result<i32, Code>,
    note: impl Fn(&mut PageHints, i32) -> DriverResult,
) -> DriverResult {
    let process = healthy_process()?;
    check_managed(process, address, len)?;
    let at = at(process)?;
    let mut residency = lock(&process.residency);
    for page in pages(address, len) {
        note(
            residency.0.entry(page).or_insert_with(|| NO_HINTS.clone()),
            at,
        )?;
    }
    Ok(())
}

fn prefetch(
    address: u64,
    len: u64,
    at: impl FnOnce(&Process) -> Result<i32, Code>,
) -> DriverResult {
    let mut to = DEVICE_CPU;
    let at = |process: &Process| at(process).inspect(|at| to = *at);
    update_hints(address, len, at, |hints, at| {
        hints.prefetched = at;
        Ok(())
    })?;
    let process = healthy_process()?;
    let device = usize::try_from(to).ok();
    if let Some(device) = device.and_then(|device| process.devices.get(device)) {
        process.populate_managed(device.unit, address, len);
    }
    Ok(())
}

/// Implements `CUmem_advise`. Advice about read-mostly memory ignores the location.
fn advise(
    address: u64,
    len: u64,
    advice: i32,
    at: impl FnOnce(&Process) -> Result<i32, Code>,
) -> DriverResult {
    let at = |process: &Process| {
        if matches!(advice, 1 | 2) {
            Ok(DEVICE_CPU)
        } else {
            at(process)
        }
    };
    update_hints(address, len, at, |hints, at| {
        match advice {
            1 => hints.read_mostly = true,
            2 => hints.read_mostly = false,
            3 => hints.preferred = at,
            4 => hints.preferred = DEVICE_INVALID,
            5 => drop(hints.accessed_by.insert(at)),
            6 => drop(hints.accessed_by.remove(&at)),
            _ => return Err(Code::INVALID_VALUE),
        }
        Ok(())
    })
}

/// Reads a `CUmem_range_attribute`, which holds if it holds for every page of the range.
fn range_attribute(
    data: &Out<i32>,
    size: u64,
    attribute: i32,
    address: u64,
    len: u64,
) -> DriverResult {
    let process = healthy_process()?;
    check_managed(process, address, len)?;
    let residency = lock(&process.residency);
    let all: Vec<&PageHints> = pages(address, len)
        .map(|page| residency.0.get(&page).unwrap_or(&NO_HINTS))
        .collect();
    let same = |of: fn(&PageHints) -> i32| {
        let first = of(all[0]);
        if all.iter().all(|hints| of(hints) == first) {
            first
        } else {
            DEVICE_INVALID
        }
    };
    match (attribute, size) {
        (1, 4) => data.set(i32::from(all.iter().all(|hints| hints.read_mostly))),
        (2, 4) => data.set(same(|hints| hints.preferred)),
        (3, size) if size != 0 && size.is_multiple_of(4) => {
            let by_all = all[0].accessed_by.iter().copied();
            let by_all = by_all.filter(|at| all.iter().all(|hints| hints.accessed_by.contains(at)));
            let places = by_all.chain(std::iter::repeat(DEVICE_INVALID));
            data.set_all(places.take((size / 4) as usize))
        }
        (4, 4) => data.set(same(|hints| hints.prefetched)),
        _ => Err(Code::INVALID_VALUE),
    }
}

exports! {
    fn cuMemAllocManaged(address: Out<u64>, len: u64, flags: u32) = {
        if !matches!(flags, 1 | 2) {
            return Err(Code::INVALID_VALUE);
        }
        allocate(&address, len, AllocationKind::Managed)
    };
    fn cuMemPrefetchAsync(address: u64, len: u64, device: i32, stream: u64) = {
        current_context()?.check_stream(stream)?;
        prefetch(address, len, |process| check_device(process, device))
    };
    fn cuMemPrefetchAsync_v2(address: u64, len: u64, location: u64, _flags: u32, stream: u64) = {
        current_context()?.check_stream(stream)?;
        prefetch(address, len, |process| device_of_location(process, location))
    };
    fn cuMemAdvise(address: u64, len: u64, advice: i32, device: i32) = {
        advise(address, len, advice, |process| check_device(process, device))
    };
    fn cuMemAdvise_v2(address: u64, len: u64, advice: i32, location: u64) = {
        advise(address, len, advice, |process| device_of_location(process, location))
    };
    fn cuMemRangeGetAttribute(data: Out<i32>, size: u64, attribute: i32, address: u64, len: u64) = {
        range_attribute(&data, size, attribute, address, len)
    };
    fn cuStreamAttachMemAsync(stream: u64, address: u64, _len: u64, flags: u32) = {
        let current = current_context()?;
        current.check_stream(stream)?;
        // `CU_MEM_ATTACH_SINGLE` (4) excludes the default stream.
        if !matches!((flags, stream), (1 | 2, _) | (4, 3..)) {
            return Err(Code::INVALID_VALUE);
        }
        check_managed(current.process, address, 1)
    };
    fn cuMemAllocHost_v2(address: Out<u64>, len: u64) = allocate(&address, len, AllocationKind::Host);
    fn cuMemHostAlloc(address: Out<u64>, len: u64, _flags: u32) = allocate(&address, len, AllocationKind::Host);
    fn cuMemFreeHost(address: u64) = {
        let process = healthy_process()?;
        let removed = process.remove_allocation(address, |kind| *kind == AllocationKind::Host)?;
        process.free_allocation(address, removed);
        Ok(())
    };
    fn cuMemHostRegister_v2(address: u64, len: u64, _flags: u32) = {
        let current = current_context()?;
        if address == 0 || len == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let kind = AllocationKind::HostRegistered;
        let registered = Allocation { len, kind, context: current.context, unit: current.unit(), readable: true, writable: true };
        let mut space = lock(&current.process.space);
        if space.find_containing(address).is_some() {
            return Err(Code(712)); // HOST_MEMORY_ALREADY_REGISTERED
        }
        space.allocations.insert(address, registered);
        Ok(())
    };
    fn cuMemHostUnregister(address: u64) = {
        let removed = healthy_process()?.remove_allocation(address, |kind| *kind == AllocationKind::HostRegistered);
        removed.map(|_| ()).map_err(|_| Code(713)) // HOST_MEMORY_NOT_REGISTERED
    };
    fn cuMemHostGetDevicePointer_v2(device: Out<u64>, host: u64, _flags: u32) = {
        let known = lock(&healthy_process()?.space).find_containing(host).is_some();
        if known { device.set(host) } else { Err(Code::INVALID_VALUE) }
    };
    fn cuMemHostGetFlags(flags: Out<u32>, host: u64) = {
        let known = lock(&healthy_process()?.space).find_containing(host).is_some();
        if known { flags.set(0) } else { Err(Code::INVALID_VALUE) }
    };
}
