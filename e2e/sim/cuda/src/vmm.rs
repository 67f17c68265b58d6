//! Implements virtual memory management: allocation handles, address reservations, mappings, export
//! and import (F2 to F5 in docs/internals/facts.md).

use bursar_sim_state::Charge;
use bursar_sim_state::object::Object;

use crate::abi::{Code, DriverResult, In, Location, Out};
use crate::entry::exports;
use crate::memory::{map_pages, unmap_pages};
use crate::process::{Process, healthy_process, lock};
use crate::tables::address_space::{Allocation, AllocationKind};
use crate::tables::vmm::{PinnedObject, Vmm};
use std::fs::File;
use std::os::fd::{BorrowedFd, IntoRawFd};

/// Granularity of sizes and addresses.
pub(crate) const GRANULARITY: u64 = 2 << 20;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const DESCRIPTOR: i32 = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const ON_DEVICE: i32 = 1;

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct AllocationProperties {
    kind: i32,
    handle_types: i32,
    location: Location,
    windows: u64,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct AccessDescriptor {
    location: Location,
    flags: i32,
}

fn check_aligned(len: u64) -> DriverResult {
    if len != 0 && len.is_multiple_of(GRANULARITY) {
        Ok(())
    } else {
        Err(Code::INVALID_VALUE)
    }
}

impl Process {
    fn create(&self, len: u64, wanted: &AllocationProperties) -> Result<u64, Code> {
        check_aligned(len)?;
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
            // A process without a context has this overhead once (F3 in docs/internals/facts.md).
            self.image
                .charge(unit, Charge::Client, self.sim.config.client)?;
        }
        let (object, pin) = Object::create(&self.sim, &self.image, unit, len)?;
        Ok(vmm.insert(object, wanted.handle_types & DESCRIPTOR != 0, pin))
    }

    pub(crate) fn pin_handle(&self, handle: u64) -> Result<PinnedObject, Code> {
        let object = lock(&self.vmm).find(handle)?.object;
        Ok(PinnedObject(object, object.pin(&self.sim, &self.image)?))
    }

    /// Pins the object that is mapped at an address.
    pub(crate) fn pin_mapping(&self, address: u64) -> Result<PinnedObject, Code> {
        match lock(&self.space).find_containing(address) {
            Some((
                _,
                Allocation {
                    kind: AllocationKind::Mapped(object),
                    ..
                },
            )) => Ok(PinnedObject(object, object.pin(&self.sim, &self.image)?)),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    /// Releases a pinned object.
    pub(crate) fn unpin(&self, PinnedObject(object, pin): PinnedObject) {
        drop(pin);
        object.free_if_unreferenced(&self.sim);
    }

    fn release_handle(&self, handle: u64) -> DriverResult {
        if self.release_multicast(handle) {
            return Ok(());
        }
        let mut vmm = lock(&self.vmm);
        let found = vmm.find(handle)?;
        found.references -= 1;
        if found.references == 0 {
            found.pin = None;
            let object = found.object;
            self.forget_unmapped(&mut vmm, object);
            object.free_if_unreferenced(&self.sim);
        }
        Ok(())
    }

    /// Removes the handles of an object that have neither a reference nor a mapping.
    fn forget_unmapped(&self, vmm: &mut Vmm, object: Object) {
        let is_mapped =
            |left: &Allocation| matches!(left.kind, AllocationKind::Mapped(of) if of == object);
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
        // SAFETY: not -1; the descriptor is only duplicated, which fails if it is not open.
        let borrowed = unsafe { BorrowedFd::borrow_raw(descriptor) };
        let file = File::from(
            borrowed
                .try_clone_to_owned()
                .map_err(|_| Code::INVALID_VALUE)?,
        );
        let object = Object::from_descriptor(&self.sim, &file)?;
        let visible = self.devices.iter().any(|device| device.unit == object.unit);
        if !visible {
            return Err(Code::INVALID_DEVICE);
        }
        let pin = object.pin(&self.sim, &self.image)?;
        Ok(lock(&self.vmm).insert(object, false, pin))
    }

    fn reserve(&self, len: u64) -> Result<u64, Code> {
        check_aligned(len)?;
        // Larger than requested, so that it contains an aligned range.
        let room = len.checked_add(GRANULARITY).ok_or(Code::OUT_OF_MEMORY)?;
        let (start, mut vmm) = (map_pages(room)?, lock(&self.vmm));
        let address = start.next_multiple_of(GRANULARITY);
        // SAFETY: the parts of the new mapping outside the aligned range are not listed anywhere.
        unsafe {
            unmap_nonempty(start, address - start);
            unmap_nonempty(address + len, start + room - address - len);
        }
        map_inaccessible(address, len)?;
        vmm.reserved.insert(address, len);
        Ok(address)
    }

    fn free_range(&self, address: u64, len: u64) -> DriverResult {
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
        // SAFETY: a whole reservation, unlisted and without a mapping.
        unsafe { unmap_pages(address, len) };
        Ok(())
    }

    fn map_handle(&self, address: u64, len: u64, offset: u64, handle: u64) -> DriverResult {
        check_aligned(len)?;
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
            || space.find_containing(address).is_some()
        {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the range is reserved, and nothing is mapped there.
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
        let kind = AllocationKind::Mapped(object);
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

    /// The mappings that exactly fill a range.
    ///
    /// # Errors
    /// The mappings do not begin and end with the range.
    fn mappings(&self, address: u64, len: u64) -> Result<Vec<(u64, Allocation)>, Code> {
        let end = address.checked_add(len).ok_or(Code::INVALID_VALUE)?;
        let space = lock(&self.space);
        let inside: Vec<_> = space
            .allocations
            .range(address..end)
            .map(|(at, mapping)| (*at, *mapping))
            .collect();
        let next = inside.iter().try_fold(address, |next, (at, mapping)| {
            (*at == next && matches!(mapping.kind, AllocationKind::Mapped(_)))
                .then_some(at + mapping.len)
        });
        if next == Some(end) && !inside.is_empty() {
            Ok(inside)
        } else {
            Err(Code::INVALID_VALUE)
        }
    }

    fn unmap_range(&self, address: u64, len: u64) -> DriverResult {
        for (at, mapping) in self.mappings(address, len)? {
            lock(&self.space).allocations.remove(&at);
            map_inaccessible(at, mapping.len)?;
            if let AllocationKind::Mapped(object) = mapping.kind {
                self.forget_unmapped(&mut lock(&self.vmm), object);
                object.free_if_unreferenced(&self.sim);
            }
        }
        Ok(())
    }

    /// Sets the access to the mappings of a range.
    ///
    /// The last descriptor wins. Its device is ignored, because every device here has access.
    fn set_access(&self, address: u64, len: u64, access: &AccessDescriptor) -> DriverResult {
        let (readable, writable, protection) = match access.flags {
            0 => (false, false, libc::PROT_NONE),
            1 => (true, false, libc::PROT_READ),
            3 => (true, true, libc::PROT_READ | libc::PROT_WRITE),
            _ => return Err(Code::INVALID_VALUE),
        };
        for (at, mapping) in self.mappings(address, len)? {
            // SAFETY: changes a whole mapping of this library.
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

/// Unmaps a range unless its length is 0.
///
/// # Safety
/// As for [`unmap_pages`], if `len` is not 0.
unsafe fn unmap_nonempty(address: u64, len: u64) {
    if len != 0 {
        // SAFETY: the caller guarantees it.
        unsafe { unmap_pages(address, len) };
    }
}

/// Maps inaccessible pages over a range of a reservation.
fn map_inaccessible(address: u64, len: u64) -> DriverResult {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    let at = address as *mut libc::c_void;
    // SAFETY: callers pass ranges inside a reservation in which nothing is mapped any more.
    let done = unsafe { libc::mmap(at, len as usize, libc::PROT_NONE, flags, -1, 0) };
    if done == libc::MAP_FAILED {
        Err(Code::UNKNOWN)
    } else {
        Ok(())
    }
}

exports! {
    fn cuMemCreate(handle: Out<u64>, len: u64, wanted: In<AllocationProperties>, flags: u64) = {
        if handle.is_null() || flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        handle.set(healthy_process()?.create(len, &wanted.get()?)?)
    };
    fn cuMemRelease(handle: u64) = healthy_process()?.release_handle(handle);
    fn cuMemRetainAllocationHandle(handle: Out<u64>, address: u64) = {
        let process = healthy_process()?;
        let around = lock(&process.space).find_containing(address);
        let Some((_, Allocation { kind: AllocationKind::Mapped(object), .. })) = around else { return Err(Code::INVALID_VALUE) };
        let mut vmm = lock(&process.vmm);
        if let Some((known, found)) = vmm.handles.iter_mut().find(|(_, found)| found.object == object) {
            if found.references == 0 {
                found.pin = Some(object.pin(&process.sim, &process.image)?);
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
        shared.set(healthy_process()?.export(handle)?)
    };
    fn cuMemImportFromShareableHandle(handle: Out<u64>, shared: u64, kind: i32) = {
        // Descriptor 0 is passed as a null pointer, which driver 580 refuses.
        if handle.is_null() || shared == 0 || kind != DESCRIPTOR {
            return Err(Code::INVALID_VALUE);
        }
        handle.set(healthy_process()?.import(i32::try_from(shared).map_err(|_| Code::INVALID_VALUE)?)?)
    };
    fn cuMemGetAllocationGranularity(bytes: Out<u64>, _wanted: In<AllocationProperties>, _option: i32) = {
        healthy_process()?;
        bytes.set(GRANULARITY)
    };
    fn cuMemGetAllocationPropertiesFromHandle(properties: Out<AllocationProperties>, handle: u64) = {
        let process = healthy_process()?;
        let mut vmm = lock(&process.vmm);
        let found = vmm.find(handle)?;
        let device = process.devices.iter().position(|device| device.unit == found.object.unit);
        let location = Location { kind: ON_DEVICE, id: device.and_then(|device| i32::try_from(device).ok()).ok_or(Code::UNKNOWN)? };
        properties.set(AllocationProperties { kind: 1, handle_types: i32::from(found.exportable), location, windows: 0, flags: [0; 8] })
    };
    fn cuMemAddressReserve(address: Out<u64>, len: u64, _alignment: u64, _wish: u64, flags: u64) = {
        if address.is_null() || flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        address.set(healthy_process()?.reserve(len)?)
    };
    fn cuMemAddressFree(address: u64, len: u64) = healthy_process()?.free_range(address, len);
    fn cuMemMap(address: u64, len: u64, offset: u64, handle: u64, flags: u64) = {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        healthy_process()?.map_handle(address, len, offset, handle)
    };
    fn cuMemUnmap(address: u64, len: u64) = healthy_process()?.unmap_range(address, len);
    fn cuMemSetAccess(address: u64, len: u64, access: In<AccessDescriptor>, count: u64) = {
        let process = healthy_process()?;
        (0..count as usize).try_for_each(|place| process.set_access(address, len, &access.at(place)?))
    };
    fn cuMemGetAccess(flags: Out<u64>, _location: In<Location>, address: u64) = {
        let around = lock(&healthy_process()?.space).find_containing(address);
        let (_, found) = around.ok_or(Code::INVALID_VALUE)?;
        flags.set(u64::from(found.readable) | u64::from(found.writable) << 1)
    };
}
