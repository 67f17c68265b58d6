//! The address space: linear memory, and what is known about every address that the library gave out.
//!
//! Device memory is host memory of the process, made without touching it, so device pointers are host
//! pointers. A program that follows one on the host does not crash here, as it would with a GPU.

use crate::abi::{Answer, Code, Out};
use crate::context::{Current, current};
use crate::entry::exports;
use crate::process::{Process, healthy, lock};
use bursar_sim_state::{Charge, object::Object, residue};
use std::collections::BTreeMap;

/// What an allocation is, and so how it is freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Charged to the image.
    Linear,
    /// Linear memory that became an object when its IPC handle was made; it is the object that is charged.
    Shared(Object),
    /// Another process's linear memory, opened from its IPC handle.
    Opened(Object),
    /// From the pool with that handle, which is charged.
    Pool(u64),
    /// An address that a captured allocation gave out: nothing is there before the graph is launched.
    Captured,
    /// Managed and pinned host memory: not charged to a GPU.
    Managed,
    /// As above.
    Host,
    /// Host memory of the program that it registered.
    Registered,
    /// A mapped piece of a VMM object; freed by unmapping.
    Mapped(Object),
}

/// What is at an address.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Allocation {
    pub(crate) len: u64,
    pub(crate) kind: Kind,
    /// Freed with that context; 0 for none.
    pub(crate) context: u64,
    pub(crate) unit: usize,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
}

/// All allocations of this image, by address.
#[derive(Debug, Default)]
pub(crate) struct Space {
    pub(crate) allocations: BTreeMap<u64, Allocation>,
}

impl Space {
    /// The allocation that an address is inside of.
    pub(crate) fn around(&self, address: u64) -> Option<(u64, Allocation)> {
        let (base, found) = self.allocations.range(..=address).next_back()?;
        (address - base < found.len).then_some((*base, *found))
    }

    /// Whether every byte of a range may be accessed. Neighbouring VMM mappings count as one.
    pub(crate) fn allows(&self, address: u64, len: u64, write: bool) -> bool {
        let Some(end) = address.checked_add(len) else {
            return false;
        };
        let mut next = address;
        while next < end {
            match self.around(next) {
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
const GRAIN: u64 = 512;
/// What the driver takes of a GPU at a time.
const CHUNK: u64 = 2 << 20;
const PAGE: u64 = 4096;

pub(crate) fn rounded(bytes: u64) -> Result<u64, Code> {
    bytes
        .checked_next_multiple_of(GRAIN)
        .ok_or(Code::OUT_OF_MEMORY)
}

/// What a request of whole grains takes of its GPU: above 1 MiB whole chunks, below a share of one. (The real
/// driver keeps a chunk while a piece of it lives; here each piece comes and goes alone.)
pub(crate) fn taken(len: u64) -> u64 {
    if len > CHUNK / 2 {
        len.checked_next_multiple_of(CHUNK).unwrap_or(u64::MAX)
    } else {
        let pieces = CHUNK / len.max(GRAIN);
        (CHUNK / pieces).next_multiple_of(GRAIN)
    }
}

/// Address space of the process that takes no memory before it is touched.
pub(crate) fn map(len: u64) -> Result<u64, Code> {
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
/// `address` came from [`map`] (or a mapping over it) with this length, and is on no list any more.
pub(crate) unsafe fn unmap(address: u64, len: u64) {
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
    pub(crate) fn make(&self, current: &Current, len: u64, kind: Kind) -> Result<u64, Code> {
        let address = map(len)?;
        if matches!(kind, Kind::Linear | Kind::Pool(_)) {
            let old = residue::take(&self.sim, current.unit(), len);
            // SAFETY: a fresh mapping of at least `len` bytes, and `old` is no longer than `len`.
            unsafe { std::ptr::copy_nonoverlapping(old.as_ptr(), address as *mut u8, old.len()) };
        }
        let allocation = Allocation {
            len,
            kind,
            // Pools belong to the device.
            context: if matches!(kind, Kind::Pool(_)) {
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

    fn allocate(&self, current: &Current, len: u64) -> Result<u64, Code> {
        self.check_captures()?;
        if len == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let len = rounded(len)?;
        self.image
            .charge(current.unit(), Charge::Memory, taken(len))?;
        self.make(current, len, Kind::Linear).inspect_err(|_| {
            // It was charged two lines above.
            let _ = self
                .image
                .release(current.unit(), Charge::Memory, taken(len));
        })
    }

    /// Takes an allocation off the list if it starts here and is of the right kind.
    pub(crate) fn take(
        &self,
        address: u64,
        right: impl Fn(&Kind) -> bool,
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
    pub(crate) fn end(&self, address: u64, gone: Allocation) {
        self.end_in(address, gone, None);
    }

    /// As [`Process::end`], in the order of a stream where there is one.
    pub(crate) fn end_in(&self, address: u64, gone: Allocation, stream: Option<u64>) {
        if !self.sim.scrubs() && matches!(gone.kind, Kind::Linear | Kind::Pool(_)) {
            // SAFETY: still mapped, and nobody else frees it: it was taken off the list.
            residue::keep(&self.sim, gone.unit, unsafe { bytes(address, gone.len) });
        }
        if gone.kind != Kind::Registered {
            // SAFETY: it came from `map` with this length, and is off the list.
            unsafe { unmap(address, gone.len) };
        }
        match gone.kind {
            Kind::Linear => match stream {
                Some(stream) => self.leave(gone.unit, taken(gone.len), stream),
                // Collected means: given back already.
                None => drop(
                    self.image
                        .release(gone.unit, Charge::Memory, taken(gone.len)),
                ),
            },
            Kind::Pool(pool) => self.return_to_pool(pool, gone.len, stream),
            Kind::Shared(object) | Kind::Opened(object) | Kind::Mapped(object) => {
                object.let_go(&self.sim)
            }
            Kind::Managed => lock(&self.residency).forget(address, gone.len),
            Kind::Captured | Kind::Host | Kind::Registered => {}
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
            if let Ok(gone) = self.take(address, |_| true) {
                self.end(address, gone);
            }
        }
    }
}

fn free(address: u64) -> Answer {
    let current = current()?;
    if address == 0 {
        return Ok(());
    }
    // As the real one, it waits for work that may still use the memory, unless it is a pool's.
    let found = lock(&current.process.space).around(address);
    if !found.is_some_and(|(_, found)| matches!(found.kind, Kind::Pool(_))) {
        current.process.wait_for_context(current.context)?;
    }
    let freed = |kind: &Kind| {
        matches!(
            kind,
            Kind::Linear | Kind::Shared(_) | Kind::Pool(_) | Kind::Managed
        )
    };
    let gone = current.process.take(address, freed)?;
    current.process.end(address, gone);
    Ok(())
}

pub(crate) fn allocate(address: &Out<u64>, len: u64) -> Answer {
    let current = current()?;
    if address.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    address.set(current.process.allocate(&current, len)?)
}

exports! {
    fn cuMemAlloc_v2(address: Out<u64>, len: u64) = allocate(&address, len);
    fn cuMemAllocPitch_v2(address: Out<u64>, pitch: Out<u64>, width: u64, height: u64, _element: u32) = {
        let current = current()?;
        if address.is_null() || pitch.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let row = rounded(width)?;
        pitch.set(row)?;
        address.set(current.process.allocate(&current, row.checked_mul(height).ok_or(Code::OUT_OF_MEMORY)?)?)
    };
    fn cuMemFree_v2(address: u64) = free(address);
    fn cuMemGetInfo_v2(free: Out<u64>, total: Out<u64>) = {
        let current = current()?;
        let all = current.process.total(current.device);
        free.set(all.saturating_sub(current.process.sim.used(current.unit())))?;
        total.set(all)
    };
    fn cuMemGetAddressRange_v2(base: Out<u64>, len: Out<u64>, address: u64) = {
        let found = lock(&healthy()?.space).around(address);
        let (start, found) = found.ok_or(Code::NOT_FOUND)?;
        base.set_if_asked(start);
        len.set_if_asked(found.len);
        Ok(())
    };
}
