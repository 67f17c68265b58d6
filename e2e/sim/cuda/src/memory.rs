//! The address space: linear memory, and what is known about every address that the library gave out.
//!
//! Device memory is host memory of the process, made without touching it, so device pointers are host
//! pointers. A program that follows one on the host does not crash here, as it would with a GPU.

use crate::abi::{Code, DriverResult, Out};
use crate::context::{CurrentContext, current_context};
use crate::entry::exports;
use crate::process::{Process, healthy_process, lock};
use bursar_sim_state::{Charge, object::Object, residue};
use std::collections::BTreeMap;

/// What an allocation is, and so how it is freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AllocationKind {
    /// Charged to the image.
    Linear,
    /// Linear memory that became an object when its IPC handle was made; it is the object that is charged.
    Shared(Object),
    /// Another process's linear memory, opened from its IPC handle.
    IpcOpened(Object),
    /// From the pool with that handle, which is charged.
    Pool(u64),
    /// An address that a captured allocation gave out: nothing is there before the graph is launched.
    Captured,
    /// Managed and pinned host memory: not charged to a GPU.
    Managed,
    /// As above.
    Host,
    /// Host memory of the program that it registered.
    HostRegistered,
    /// A mapped piece of a VMM object; freed by unmapping.
    Mapped(Object),
}

/// What is at an address.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Allocation {
    pub(crate) len: u64,
    pub(crate) kind: AllocationKind,
    /// Freed with that context; 0 for none.
    pub(crate) context: u64,
    pub(crate) unit: usize,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
}

/// All allocations of this image, by address.
#[derive(Debug, Default)]
pub(crate) struct AddressSpace {
    pub(crate) allocations: BTreeMap<u64, Allocation>,
}

impl AddressSpace {
    /// The allocation that an address is inside of.
    pub(crate) fn find_containing(&self, address: u64) -> Option<(u64, Allocation)> {
        let (base, found) = self.allocations.range(..=address).next_back()?;
        (address - base < found.len).then_some((*base, *found))
    }

    /// Whether every byte of a range may be accessed. Neighbouring VMM mappings count as one.
    pub(crate) fn is_accessible(&self, address: u64, len: u64, write: bool) -> bool {
        let Some(end) = address.checked_add(len) else {
            return false;
        };
        let mut next = address;
        while next < end {
            match self.find_containing(next) {
                Some((base, found))
                    if if write {
                        found.writable
                    } else {
                        found.readable
                    } =>
                {
                    next = base + found.len
                }
                _ => return false,
            }
        }
        true
    }
}

/// Sizes are multiples of this.
const ALLOCATION_GRANULARITY: u64 = 512;
/// What the driver takes of a GPU at a time.
const CHUNK: u64 = 2 << 20;
const PAGE: u64 = 4096;

pub(crate) fn round_up(bytes: u64) -> Result<u64, Code> {
    bytes
        .checked_next_multiple_of(ALLOCATION_GRANULARITY)
        .ok_or(Code::OUT_OF_MEMORY)
}

/// What a request of whole grains takes of its GPU: above 1 MiB whole chunks, below a share of one. (The real
/// driver keeps a chunk while a piece of it lives; here each piece comes and goes alone.)
pub(crate) fn charged_bytes(len: u64) -> u64 {
    if len > CHUNK / 2 {
        len.checked_next_multiple_of(CHUNK).unwrap_or(u64::MAX)
    } else {
        let pieces = CHUNK / len.max(ALLOCATION_GRANULARITY);
        (CHUNK / pieces).next_multiple_of(ALLOCATION_GRANULARITY)
    }
}

/// Address space of the process that takes no memory before it is touched.
pub(crate) fn map_pages(len: u64) -> Result<u64, Code> {
    let (access, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
    );
    let len = usize::try_from(
        len.checked_next_multiple_of(PAGE)
            .ok_or(Code::OUT_OF_MEMORY)?,
    )
    .map_err(|_| Code::OUT_OF_MEMORY)?;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let address = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, -1, 0) };
    if address == libc::MAP_FAILED {
        Err(Code::OUT_OF_MEMORY)
    } else {
        Ok(address as u64)
    }
}

/// Gives address space back.
///
/// # Safety
/// `address` came from [`map_pages`] (or a mapping over it) with this length, and is on no list any more.
pub(crate) unsafe fn unmap_pages(address: u64, len: u64) {
    // SAFETY: the caller's promise.
    unsafe {
        libc::munmap(
            address as *mut libc::c_void,
            len.next_multiple_of(PAGE) as usize,
        )
    };
}

/// The bytes at an address of ours.
///
/// # Safety
/// The range is inside one allocation that stays while the slice is used.
pub(crate) unsafe fn bytes<'a>(address: u64, len: u64) -> &'a [u8] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(address as *const u8, len as usize) }
}

impl Process {
    /// Makes memory of a kind and enters it; the caller has charged it.
    pub(crate) fn map_allocation(
        &self,
        current: &CurrentContext,
        len: u64,
        kind: AllocationKind,
    ) -> Result<u64, Code> {
        let address = map_pages(len)?;
        if matches!(kind, AllocationKind::Linear | AllocationKind::Pool(_)) {
            let old = residue::load(&self.sim, current.unit(), len);
            // SAFETY: a fresh mapping of at least `len` bytes, and `old` is no longer than `len`.
            unsafe { std::ptr::copy_nonoverlapping(old.as_ptr(), address as *mut u8, old.len()) };
        }
        let allocation = Allocation {
            len,
            kind,
            // Pools belong to the device.
            context: if matches!(kind, AllocationKind::Pool(_)) {
                0
            } else {
                current.context
            },
            unit: current.unit(),
            readable: true,
            writable: true,
        };
        lock(&self.space).allocations.insert(address, allocation);
        Ok(address)
    }

    fn allocate(&self, current: &CurrentContext, len: u64) -> Result<u64, Code> {
        self.invalidate_unsafe_captures()?;
        if len == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let len = round_up(len)?;
        self.image
            .charge(current.unit(), Charge::Memory, charged_bytes(len))?;
        self.map_allocation(current, len, AllocationKind::Linear)
            .inspect_err(|_| {
                // It was charged two lines above.
                let _ = self
                    .image
                    .release(current.unit(), Charge::Memory, charged_bytes(len));
            })
    }

    /// Takes an allocation off the list if it starts here and is of the right kind.
    pub(crate) fn remove_allocation(
        &self,
        address: u64,
        right: impl Fn(&AllocationKind) -> bool,
    ) -> Result<Allocation, Code> {
        let mut space = lock(&self.space);
        match space.allocations.get(&address) {
            Some(found) if right(&found.kind) => {
                space.allocations.remove(&address).ok_or(Code::UNKNOWN)
            }
            _ => Err(Code::INVALID_VALUE),
        }
    }

    /// Ends memory that was taken off the list.
    pub(crate) fn free_allocation(&self, address: u64, gone: Allocation) {
        self.free_allocation_in_stream(address, gone, None);
    }

    /// As [`Process::end`], in the order of a stream where there is one.
    pub(crate) fn free_allocation_in_stream(
        &self,
        address: u64,
        gone: Allocation,
        stream: Option<u64>,
    ) {
        if !self.sim.is_scrub_enabled()
            && matches!(gone.kind, AllocationKind::Linear | AllocationKind::Pool(_))
        {
            // SAFETY: still mapped, and nobody else frees it: it was taken off the list.
            residue::save(&self.sim, gone.unit, unsafe { bytes(address, gone.len) });
        }
        if gone.kind != AllocationKind::HostRegistered {
            // SAFETY: it came from `map` with this length, and is off the list.
            unsafe { unmap_pages(address, gone.len) };
        }
        match gone.kind {
            AllocationKind::Linear => match stream {
                Some(stream) => self.defer_free(gone.unit, charged_bytes(gone.len), stream),
                // Collected means: given back already.
                None => drop(self.image.release(
                    gone.unit,
                    Charge::Memory,
                    charged_bytes(gone.len),
                )),
            },
            AllocationKind::Pool(pool) => self.return_to_pool(pool, gone.len, stream),
            AllocationKind::Shared(object)
            | AllocationKind::IpcOpened(object)
            | AllocationKind::Mapped(object) => object.free_if_unreferenced(&self.sim),
            AllocationKind::Managed => lock(&self.residency).forget(address, gone.len),
            AllocationKind::Captured | AllocationKind::Host | AllocationKind::HostRegistered => {}
        }
    }

    /// Frees what a context leaves behind. VMM mappings outlive it.
    pub(crate) fn free_context_memory(&self, context: u64) {
        let left: Vec<u64> = {
            let space = lock(&self.space);
            space
                .allocations
                .iter()
                .filter(|(_, left)| left.context == context)
                .map(|(at, _)| *at)
                .collect()
        };
        for address in left {
            if let Ok(gone) = self.remove_allocation(address, |_| true) {
                self.free_allocation(address, gone);
            }
        }
    }
}

fn free(address: u64) -> DriverResult {
    let current = current_context()?;
    if address == 0 {
        return Ok(());
    }
    // As the real one, it waits for work that may still use the memory, unless it is a pool's.
    let found = lock(&current.process.space).find_containing(address);
    if !found.is_some_and(|(_, found)| matches!(found.kind, AllocationKind::Pool(_))) {
        current.process.wait_for_context(current.context)?;
    }
    let freed = |kind: &AllocationKind| {
        matches!(
            kind,
            AllocationKind::Linear
                | AllocationKind::Shared(_)
                | AllocationKind::Pool(_)
                | AllocationKind::Managed
        )
    };
    let gone = current.process.remove_allocation(address, freed)?;
    current.process.free_allocation(address, gone);
    Ok(())
}

pub(crate) fn allocate(address: &Out<u64>, len: u64) -> DriverResult {
    let current = current_context()?;
    if address.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    address.set(current.process.allocate(&current, len)?)
}

exports! {
    fn cuMemAlloc_v2(address: Out<u64>, len: u64) = allocate(&address, len);
    fn cuMemAllocPitch_v2(address: Out<u64>, pitch: Out<u64>, width: u64, height: u64, _element: u32) = {
        let current = current_context()?;
        if address.is_null() || pitch.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let row = round_up(width)?;
        pitch.set(row)?;
        address.set(current.process.allocate(&current, row.checked_mul(height).ok_or(Code::OUT_OF_MEMORY)?)?)
    };
    fn cuMemFree_v2(address: u64) = free(address);
    fn cuMemGetInfo_v2(free: Out<u64>, total: Out<u64>) = {
        let current = current_context()?;
        let all = current.process.total(current.device);
        free.set(all.saturating_sub(current.process.sim.used(current.unit())))?;
        total.set(all)
    };
    fn cuMemGetAddressRange_v2(base: Out<u64>, len: Out<u64>, address: u64) = {
        let found = lock(&healthy_process()?.space).find_containing(address);
        let (start, found) = found.ok_or(Code::NOT_FOUND)?;
        base.set_if_not_null(start);
        len.set_if_not_null(found.len);
        Ok(())
    };
}
