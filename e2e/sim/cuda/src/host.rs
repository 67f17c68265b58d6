//! Managed and pinned host memory: not charged to a GPU. Managed memory is never resident on a device; what prefetches
//! and advice said is remembered by page, and told.

use crate::abi::{Answer, Code, Out};
use crate::context::current;
use crate::entry::exports;
use crate::memory::{Allocation, Kind};
use crate::process::{Process, healthy, lock};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

fn allocate(address: &Out<u64>, len: u64, kind: Kind) -> Answer {
    let current = current()?;
    if address.is_null() || len == 0 {
        return Err(Code::INVALID_VALUE);
    }
    address.set(current.process.make(&current, len, kind)?)
}

/// A place as `CUmemLocation` has it: its type is the low half of the number that C passes, its id the high one.
const DEVICE: u32 = 1;
const HOST: u32 = 2;
const HOST_NUMA: u32 = 3;
/// `CU_DEVICE_CPU` and `CU_DEVICE_INVALID`, as attributes have them.
const ON_HOST: i32 = -1;
const NOWHERE: i32 = -2;

/// What was last said about a page of managed memory. Places are as attributes have them.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Hints {
    read_mostly: bool,
    preferred: i32,
    accessed_by: BTreeSet<i32>,
    prefetched: i32,
}

static NONE: Hints = Hints {
    read_mostly: false,
    preferred: NOWHERE,
    accessed_by: BTreeSet::new(),
    prefetched: NOWHERE,
};

/// All hints of this image, by page.
#[derive(Debug, Default)]
pub(crate) struct Residency(BTreeMap<u64, Hints>);

const PAGE: u64 = 4096;

fn pages(address: u64, len: u64) -> RangeInclusive<u64> {
    address / PAGE..=(address + len.max(1) - 1) / PAGE
}

impl Residency {
    /// Nothing is known about memory that is gone.
    pub(crate) fn forget(&mut self, address: u64, len: u64) {
        for page in pages(address, len) {
            self.0.remove(&page);
        }
    }
}

/// Fails where not all of a range is managed.
fn check_managed(process: &Process, address: u64, len: u64) -> Answer {
    let space = lock(&process.space);
    let managed = space
        .around(address)
        .is_some_and(|(_, found)| found.kind == Kind::Managed);
    if managed && space.allows(address, len, false) {
        Ok(())
    } else {
        Err(Code::INVALID_VALUE)
    }
}

/// A device's number, or the host, as attributes have it.
fn place(process: &Process, device: i32) -> Result<i32, Code> {
    match usize::try_from(device) {
        Ok(device) if device >= process.devices.len() => Err(Code::INVALID_DEVICE),
        Err(_) if device != ON_HOST => Err(Code::INVALID_DEVICE),
        _ => Ok(device),
    }
}

/// A `CUmemLocation`, as attributes have it.
fn place_of(process: &Process, location: u64) -> Result<i32, Code> {
    match location as u32 {
        DEVICE => {
            let device = i32::try_from(location >> 32).map_err(|_| Code::INVALID_DEVICE)?;
            usize::try_from(device).map_err(|_| Code::INVALID_DEVICE)?;
            place(process, device)
        }
        HOST | HOST_NUMA => Ok(ON_HOST),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// Notes something about managed memory.
fn hint(
    address: u64,
    len: u64,
    at: impl FnOnce(&Process) -> Result<i32, Code>,
    note: impl Fn(&mut Hints, i32) -> Answer,
) -> Answer {
    let process = healthy()?;
    check_managed(process, address, len)?;
    let at = at(process)?;
    let mut residency = lock(&process.residency);
    for page in pages(address, len) {
        note(residency.0.entry(page).or_insert_with(|| NONE.clone()), at)?;
    }
    Ok(())
}

fn prefetch(address: u64, len: u64, at: impl FnOnce(&Process) -> Result<i32, Code>) -> Answer {
    hint(address, len, at, |hints, at| {
        hints.prefetched = at;
        Ok(())
    })
}

/// `CUmem_advise`. The place of advice on what is mostly read is not looked at.
fn advise(
    address: u64,
    len: u64,
    advice: i32,
    at: impl FnOnce(&Process) -> Result<i32, Code>,
) -> Answer {
    let at = |process: &Process| {
        if matches!(advice, 1 | 2) {
            Ok(ON_HOST)
        } else {
            at(process)
        }
    };
    hint(address, len, at, |hints, at| {
        match advice {
            1 => hints.read_mostly = true,
            2 => hints.read_mostly = false,
            3 => hints.preferred = at,
            4 => hints.preferred = NOWHERE,
            5 => drop(hints.accessed_by.insert(at)),
            6 => drop(hints.accessed_by.remove(&at)),
            _ => return Err(Code::INVALID_VALUE),
        }
        Ok(())
    })
}

/// `CUmem_range_attribute`: what holds for every page of a range.
fn range_attribute(data: &Out<i32>, size: u64, attribute: i32, address: u64, len: u64) -> Answer {
    let process = healthy()?;
    check_managed(process, address, len)?;
    let residency = lock(&process.residency);
    let all: Vec<&Hints> = pages(address, len)
        .map(|page| residency.0.get(&page).unwrap_or(&NONE))
        .collect();
    let same = |of: fn(&Hints) -> i32| {
        let first = of(all[0]);
        if all.iter().all(|hints| of(hints) == first) {
            first
        } else {
            NOWHERE
        }
    };
    match (attribute, size) {
        (1, 4) => data.set(i32::from(all.iter().all(|hints| hints.read_mostly))),
        (2, 4) => data.set(same(|hints| hints.preferred)),
        (3, size) if size != 0 && size.is_multiple_of(4) => {
            let by_all = all[0].accessed_by.iter().copied();
            let by_all = by_all.filter(|at| all.iter().all(|hints| hints.accessed_by.contains(at)));
            let places = by_all.chain(std::iter::repeat(NOWHERE));
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
        allocate(&address, len, Kind::Managed)
    };
    fn cuMemPrefetchAsync(address: u64, len: u64, device: i32, stream: u64) = {
        current()?.check_stream(stream)?;
        prefetch(address, len, |process| place(process, device))
    };
    fn cuMemPrefetchAsync_v2(address: u64, len: u64, location: u64, _flags: u32, stream: u64) = {
        current()?.check_stream(stream)?;
        prefetch(address, len, |process| place_of(process, location))
    };
    fn cuMemAdvise(address: u64, len: u64, advice: i32, device: i32) = {
        advise(address, len, advice, |process| place(process, device))
    };
    fn cuMemAdvise_v2(address: u64, len: u64, advice: i32, location: u64) = {
        advise(address, len, advice, |process| place_of(process, location))
    };
    fn cuMemRangeGetAttribute(data: Out<i32>, size: u64, attribute: i32, address: u64, len: u64) = {
        range_attribute(&data, size, attribute, address, len)
    };
    fn cuStreamAttachMemAsync(stream: u64, address: u64, _len: u64, flags: u32) = {
        let current = current()?;
        current.check_stream(stream)?;
        // A stream's own (4) is no context's default stream.
        if !matches!((flags, stream), (1 | 2, _) | (4, 3..)) {
            return Err(Code::INVALID_VALUE);
        }
        check_managed(current.process, address, 1)
    };
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
