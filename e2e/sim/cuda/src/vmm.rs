//! Virtual memory management: handles, reservations, mappings, export and import (F2 to F5).

use crate::abi::{Answer, Code, In, Out};
use crate::entry::exports;
use crate::memory::{Allocation, Kind, map, unmap};
use crate::process::{Process, healthy, lock};
use bursar_sim_state::Charge;
use bursar_sim_state::object::{Hold, Object};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{BorrowedFd, IntoRawFd};

/// Sizes and addresses are multiples of this.
pub(crate) const GRANULARITY: u64 = 2 << 20;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const DESCRIPTOR: i32 = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const ON_DEVICE: i32 = 1;

#[derive(Debug)]
struct Handle {
    object: Object,
    /// Made for export, and by this process: an importer cannot export again (F4).
    exportable: bool,
    /// `cuMemRetainAllocationHandle` adds one, `cuMemRelease` takes one. A handle without any is known
    /// by its mappings: it comes again from `cuMemRetainAllocationHandle`.
    references: u32,
    hold: Option<Hold>,
}

/// All VMM handles and reserved ranges of this image.
#[derive(Debug, Default)]
pub(crate) struct Vmm {
    handles: BTreeMap<u64, Handle>,
    /// Address to length.
    reserved: BTreeMap<u64, u64>,
    made: u64,
}

/// Keeps an object that is bound or mapped into something.
#[derive(Debug)]
pub(crate) struct Kept(Object, Hold);

/// `CUmemLocation`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Location {
    pub(crate) kind: i32,
    pub(crate) id: i32,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Properties {
    kind: i32,
    handle_types: i32,
    location: Location,
    windows: u64,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Access {
    location: Location,
    flags: i32,
}

impl Vmm {
    fn enter(&mut self, object: Object, exportable: bool, hold: Hold) -> u64 {
        self.made += 1;
        let handle = 0x5177_0000_0000 + self.made * 0x10;
        self.handles.insert(
            handle,
            Handle {
                object,
                exportable,
                references: 1,
                hold: Some(hold),
            },
        );
        handle
    }

    fn find(&mut self, handle: u64) -> Result<&mut Handle, Code> {
        self.handles
            .get_mut(&handle)
            .filter(|found| found.references > 0)
            .ok_or(Code::INVALID_VALUE)
    }

    fn is_reserved(&self, address: u64, len: u64) -> bool {
        let around = self.reserved.range(..=address).next_back();
        around.is_some_and(|(base, room)| {
            address
                .checked_add(len)
                .is_some_and(|end| end <= base + room)
        })
    }
}

fn aligned(len: u64) -> Answer {
    if len != 0 && len.is_multiple_of(GRANULARITY) {
        Ok(())
    } else {
        Err(Code::INVALID_VALUE)
    }
}

impl Process {
    fn create(&self, len: u64, wanted: &Properties) -> Result<u64, Code> {
        aligned(len)?;
        if wanted.kind != 1 || wanted.location.kind != ON_DEVICE {
            return Err(Code::INVALID_VALUE);
        }
        if wanted.handle_types & !DESCRIPTOR != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        let device = self.device(wanted.location.id)?;
        self.check_present(device)?;
        let unit = self.devices[device].unit;
        let mut vmm = lock(&self.vmm);
        let known = [Charge::Context, Charge::Client]
            .iter()
            .any(|charge| self.image.charged(unit, *charge) != 0);
        if !known {
            // F3: a process without a context costs this much once.
            self.image
                .charge(unit, Charge::Client, self.sim.config.client)?;
        }
        let (object, hold) = Object::create(&self.sim, &self.image, unit, len)?;
        Ok(vmm.enter(object, wanted.handle_types & DESCRIPTOR != 0, hold))
    }

    /// Keeps the object of a handle.
    pub(crate) fn keep(&self, handle: u64) -> Result<Kept, Code> {
        let object = lock(&self.vmm).find(handle)?.object;
        Ok(Kept(object, object.hold(&self.sim, &self.image)?))
    }

    /// Keeps the object that is mapped at an address.
    pub(crate) fn keep_at(&self, address: u64) -> Result<Kept, Code> {
        match lock(&self.space).around(address) {
            Some((
                _,
                Allocation {
                    kind: Kind::Mapped(object),
                    ..
                },
            )) => Ok(Kept(object, object.hold(&self.sim, &self.image)?)),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    /// Ends what [`Process::keep`] began.
    pub(crate) fn let_go(&self, Kept(object, hold): Kept) {
        drop(hold);
        object.let_go(&self.sim);
    }

    fn release_handle(&self, handle: u64) -> Answer {
        if self.release_multicast(handle) {
            return Ok(());
        }
        let mut vmm = lock(&self.vmm);
        let found = vmm.find(handle)?;
        found.references -= 1;
        if found.references == 0 {
            found.hold = None;
            let object = found.object;
            self.forget_unmapped(&mut vmm, object);
            object.let_go(&self.sim);
        }
        Ok(())
    }

    /// Forgets the handles of an object that have neither a reference nor a mapping.
    fn forget_unmapped(&self, vmm: &mut Vmm, object: Object) {
        let is_mapped = |left: &Allocation| matches!(left.kind, Kind::Mapped(of) if of == object);
        if !lock(&self.space).allocations.values().any(is_mapped) {
            vmm.handles
                .retain(|_, handle| handle.object != object || handle.references > 0);
        }
    }

    fn export(&self, handle: u64) -> Result<i32, Code> {
        let mut vmm = lock(&self.vmm);
        let found = vmm.find(handle)?;
        if !found.exportable {
            return Err(Code::INVALID_VALUE);
        }
        Ok(found.object.export(&self.sim)?.into_raw_fd())
    }

    fn import(&self, descriptor: i32) -> Result<u64, Code> {
        if descriptor < 0 {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not -1; it is only asked to be duplicated, which fails if it is not open.
        let borrowed = unsafe { BorrowedFd::borrow_raw(descriptor) };
        let file = File::from(
            borrowed
                .try_clone_to_owned()
                .map_err(|_| Code::INVALID_VALUE)?,
        );
        let object = Object::of_descriptor(&self.sim, &file)?;
        let visible = self.devices.iter().any(|device| device.unit == object.unit);
        if !visible {
            return Err(Code::INVALID_DEVICE);
        }
        let hold = object.hold(&self.sim, &self.image)?;
        Ok(lock(&self.vmm).enter(object, false, hold))
    }

    fn reserve(&self, len: u64) -> Result<u64, Code> {
        aligned(len)?;
        // More than asked for, so that an aligned range is inside.
        let room = len.checked_add(GRANULARITY).ok_or(Code::OUT_OF_MEMORY)?;
        let (start, mut vmm) = (map(room)?, lock(&self.vmm));
        let address = start.next_multiple_of(GRANULARITY);
        // SAFETY: the parts of the new mapping before and behind the aligned range; nobody knows them.
        unsafe {
            unmap_some(start, address - start);
            unmap_some(address + len, start + room - address - len);
        }
        cover(address, len)?;
        vmm.reserved.insert(address, len);
        Ok(address)
    }

    fn free_range(&self, address: u64, len: u64) -> Answer {
        let mut vmm = lock(&self.vmm);
        let whole = vmm.reserved.get(&address) == Some(&len);
        if !whole
            || lock(&self.space)
                .allocations
                .range(address..address + len)
                .next()
                .is_some()
        {
            return Err(Code::INVALID_VALUE);
        }
        vmm.reserved.remove(&address);
        // SAFETY: a whole reservation that is off the list and has no mapping.
        unsafe { unmap(address, len) };
        Ok(())
    }

    fn map_handle(&self, address: u64, len: u64, offset: u64, handle: u64) -> Answer {
        aligned(len)?;
        let mut vmm = lock(&self.vmm);
        let object = vmm.find(handle)?.object;
        let fits = offset
            .checked_add(len)
            .is_some_and(|end| end <= object.size);
        if !fits
            || !offset.is_multiple_of(GRANULARITY)
            || !address.is_multiple_of(GRANULARITY)
            || !vmm.is_reserved(address, len)
        {
            return Err(Code::INVALID_VALUE);
        }
        let mut space = lock(&self.space);
        if space
            .allocations
            .range(address..address + len)
            .next()
            .is_some()
            || space.around(address).is_some()
        {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: reserved, and nothing is mapped there.
        unsafe {
            object.map_over(
                &self.sim,
                &self.image,
                address,
                len,
                offset,
                libc::PROT_NONE,
            )?
        };
        let kind = Kind::Mapped(object);
        let mapping = Allocation {
            len,
            kind,
            context: 0,
            unit: object.unit,
            readable: false,
            writable: false,
        };
        space.allocations.insert(address, mapping);
        Ok(())
    }

    /// The mappings that fill a range; an error if they do not begin and end with it.
    fn mappings(&self, address: u64, len: u64) -> Result<Vec<(u64, Allocation)>, Code> {
        let end = address.checked_add(len).ok_or(Code::INVALID_VALUE)?;
        let space = lock(&self.space);
        let inside: Vec<_> = space
            .allocations
            .range(address..end)
            .map(|(at, mapping)| (*at, *mapping))
            .collect();
        let next = inside.iter().try_fold(address, |next, (at, mapping)| {
            (*at == next && matches!(mapping.kind, Kind::Mapped(_))).then_some(at + mapping.len)
        });
        if next == Some(end) && !inside.is_empty() {
            Ok(inside)
        } else {
            Err(Code::INVALID_VALUE)
        }
    }

    fn unmap_range(&self, address: u64, len: u64) -> Answer {
        for (at, mapping) in self.mappings(address, len)? {
            lock(&self.space).allocations.remove(&at);
            cover(at, mapping.len)?;
            if let Kind::Mapped(object) = mapping.kind {
                self.forget_unmapped(&mut lock(&self.vmm), object);
                object.let_go(&self.sim);
            }
        }
        Ok(())
    }

    /// The last descriptor wins; the device that it names is not looked at, for every device here sees all.
    fn set_access(&self, address: u64, len: u64, access: &Access) -> Answer {
        let (readable, writable, protection) = match access.flags {
            0 => (false, false, libc::PROT_NONE),
            1 => (true, false, libc::PROT_READ),
            3 => (true, true, libc::PROT_READ | libc::PROT_WRITE),
            _ => return Err(Code::INVALID_VALUE),
        };
        for (at, mapping) in self.mappings(address, len)? {
            // SAFETY: a mapping of ours, whole.
            if unsafe { libc::mprotect(at as *mut libc::c_void, mapping.len as usize, protection) }
                != 0
            {
                return Err(Code::UNKNOWN);
            }
            if let Some(mapping) = lock(&self.space).allocations.get_mut(&at) {
                (mapping.readable, mapping.writable) = (readable, writable);
            }
        }
        Ok(())
    }
}

/// # Safety
/// As [`unmap`]; nothing is unmapped of length 0.
unsafe fn unmap_some(address: u64, len: u64) {
    if len != 0 {
        // SAFETY: the caller's promise.
        unsafe { unmap(address, len) };
    }
}

/// Puts inaccessible address space over a range of a reservation.
fn cover(address: u64, len: u64) -> Answer {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    let at = address as *mut libc::c_void;
    // SAFETY: only called for ranges inside a reservation of ours that nothing is mapped in any more.
    let done = unsafe { libc::mmap(at, len as usize, libc::PROT_NONE, flags, -1, 0) };
    if done == libc::MAP_FAILED {
        Err(Code::UNKNOWN)
    } else {
        Ok(())
    }
}

exports! {
    fn cuMemCreate(handle: Out<u64>, len: u64, wanted: In<Properties>, flags: u64) = {
        if handle.is_null() || flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        handle.set(healthy()?.create(len, &wanted.get()?)?)
    };
    fn cuMemRelease(handle: u64) = healthy()?.release_handle(handle);
    fn cuMemRetainAllocationHandle(handle: Out<u64>, address: u64) = {
        let process = healthy()?;
        let around = lock(&process.space).around(address);
        let Some((_, Allocation { kind: Kind::Mapped(object), .. })) = around else { return Err(Code::INVALID_VALUE) };
        let mut vmm = lock(&process.vmm);
        if let Some((known, found)) = vmm.handles.iter_mut().find(|(_, found)| found.object == object) {
            if found.references == 0 {
                found.hold = Some(object.hold(&process.sim, &process.image)?);
            }
            found.references += 1;
            return handle.set(*known);
        }
        Err(Code::UNKNOWN)
    };
    fn cuMemExportToShareableHandle(shared: Out<i32>, handle: u64, kind: i32, flags: u64) = {
        if shared.is_null() || kind != DESCRIPTOR || flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        shared.set(healthy()?.export(handle)?)
    };
    fn cuMemImportFromShareableHandle(handle: Out<u64>, shared: u64, kind: i32) = {
        // Descriptor 0 is a null pointer to it, as on driver 580.
        if handle.is_null() || shared == 0 || kind != DESCRIPTOR {
            return Err(Code::INVALID_VALUE);
        }
        handle.set(healthy()?.import(i32::try_from(shared).map_err(|_| Code::INVALID_VALUE)?)?)
    };
    fn cuMemGetAllocationGranularity(bytes: Out<u64>, _wanted: In<Properties>, _option: i32) = {
        healthy()?;
        bytes.set(GRANULARITY)
    };
    fn cuMemGetAllocationPropertiesFromHandle(properties: Out<Properties>, handle: u64) = {
        let process = healthy()?;
        let mut vmm = lock(&process.vmm);
        let found = vmm.find(handle)?;
        let device = process.devices.iter().position(|device| device.unit == found.object.unit);
        let location = Location { kind: ON_DEVICE, id: device.and_then(|device| i32::try_from(device).ok()).ok_or(Code::UNKNOWN)? };
        properties.set(Properties { kind: 1, handle_types: i32::from(found.exportable), location, windows: 0, flags: [0; 8] })
    };
    fn cuMemAddressReserve(address: Out<u64>, len: u64, _alignment: u64, _wish: u64, flags: u64) = {
        if address.is_null() || flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        address.set(healthy()?.reserve(len)?)
    };
    fn cuMemAddressFree(address: u64, len: u64) = healthy()?.free_range(address, len);
    fn cuMemMap(address: u64, len: u64, offset: u64, handle: u64, flags: u64) = {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        healthy()?.map_handle(address, len, offset, handle)
    };
    fn cuMemUnmap(address: u64, len: u64) = healthy()?.unmap_range(address, len);
    fn cuMemSetAccess(address: u64, len: u64, access: In<Access>, count: u64) = {
        let process = healthy()?;
        (0..count as usize).try_for_each(|place| process.set_access(address, len, &access.at(place)?))
    };
    fn cuMemGetAccess(flags: Out<u64>, _location: In<Location>, address: u64) = {
        let around = lock(&healthy()?.space).around(address);
        let (_, found) = around.ok_or(Code::INVALID_VALUE)?;
        flags.set(u64::from(found.readable) | u64::from(found.writable) << 1)
    };
}
