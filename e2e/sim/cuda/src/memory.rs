//! Implements linear device memory (`cuMemAlloc`, `cuMemFree`).
//!
//! Device memory is untouched host memory of the process, so device pointers are host pointers. A
//! program that dereferences one on the host does not crash here, unlike with a GPU.

use bursar_sim_state::{Charge, residue};

use crate::abi::{Code, DriverResult, Out};
use crate::context_stack::{CurrentContext, current_context};
use crate::entry::exports;
use crate::granularity::{CHUNK, is_piece, round_up, whole_chunks};
use crate::process::{Process, device_dir, healthy_process, lock};
use crate::tables::address_space::{AddressSpace, Allocation, AllocationKind};
use bursar_sim_state::object::Object;

use std::os::fd::AsRawFd as _;

const PAGE: u64 = 4096;

/// Maps address space that uses no memory before it is touched.
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
    // SAFETY: the kernel chooses the address of the new mapping.
    let address = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, -1, 0) };
    if address == libc::MAP_FAILED {
        Err(Code::OUT_OF_MEMORY)
    } else {
        Ok(address as u64)
    }
}

/// Maps address space for managed memory: the driver's node, which no forked child has.
fn map_managed(len: u64) -> Result<u64, Code> {
    let Ok(node) = std::fs::File::open(device_dir().join("nvidia-uvm")) else {
        return map_pages(len);
    };
    let len = len
        .checked_next_multiple_of(PAGE)
        .and_then(|len| usize::try_from(len).ok());
    let len = len.ok_or(Code::OUT_OF_MEMORY)?;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
    // SAFETY: the kernel chooses the address of the new mapping.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            access,
            flags,
            node.as_raw_fd(),
            0,
        )
    };
    if address == libc::MAP_FAILED {
        return Err(Code::OUT_OF_MEMORY);
    }
    // SAFETY: the range is the mapping just made.
    unsafe { libc::madvise(address, len, libc::MADV_DONTFORK) };
    Ok(address as u64)
}

/// Maps a chunk at a multiple of its size.
fn map_chunk(map: impl FnOnce(u64) -> Result<u64, Code>) -> Result<u64, Code> {
    let wide = map(2 * CHUNK)?;
    let base = wide.next_multiple_of(CHUNK);
    for (at, len) in [(wide, base - wide), (base + CHUNK, wide + CHUNK - base)] {
        if len > 0 {
            // SAFETY: a part of the mapping just made, in whole pages.
            unsafe { unmap_pages(at, len) };
        }
    }
    Ok(base)
}

/// Clears a freed piece: whole pages without a touch.
///
/// # Safety
/// The piece is mapped, and no longer listed.
unsafe fn clear_piece(address: u64, len: u64) {
    let (first, end) = (
        address.next_multiple_of(PAGE),
        (address + len) / PAGE * PAGE,
    );
    // SAFETY: the caller guarantees it, and the pages are inside the piece.
    unsafe {
        if first >= end {
            std::ptr::write_bytes(address as *mut u8, 0, len as usize);
            return;
        }
        std::ptr::write_bytes(address as *mut u8, 0, (first - address) as usize);
        std::ptr::write_bytes(end as *mut u8, 0, (address + len - end) as usize);
        libc::madvise(
            first as *mut libc::c_void,
            (end - first) as usize,
            libc::MADV_DONTNEED,
        );
    }
}

/// Unmaps address space.
///
/// # Safety
/// `address` came from [`map_pages`] (or a mapping over it) with this length, and is no longer
/// listed.
pub(crate) unsafe fn unmap_pages(address: u64, len: u64) {
    // SAFETY: the caller guarantees it.
    unsafe {
        libc::munmap(
            address as *mut libc::c_void,
            len.next_multiple_of(PAGE) as usize,
        )
    };
}

/// The bytes at an address of this library.
///
/// # Safety
/// The range is inside one allocation that lives while the slice is used.
pub(crate) unsafe fn bytes<'a>(address: u64, len: u64) -> &'a [u8] {
    // SAFETY: the caller guarantees it.
    unsafe { std::slice::from_raw_parts(address as *const u8, len as usize) }
}

impl Process {
    /// Maps and lists memory of a kind, which the caller has charged.
    pub(crate) fn map_allocation(
        &self,
        current: &CurrentContext,
        len: u64,
        kind: AllocationKind,
    ) -> Result<u64, Code> {
        let address = match kind {
            AllocationKind::Managed if is_piece(len) => self.place_managed(current, len)?,
            AllocationKind::Managed => map_managed(len)?,
            _ => map_pages(len)?,
        };
        if matches!(kind, AllocationKind::Linear | AllocationKind::Pool(_)) {
            let old = residue::load(&self.sim, current.unit(), len);
            // SAFETY: the new mapping has at least `len` bytes, and `old` is no longer than that.
            unsafe { std::ptr::copy_nonoverlapping(old.as_ptr(), address as *mut u8, old.len()) };
        }
        let allocation = Allocation {
            len,
            kind,
            // A pool's memory belongs to the device and outlives the context.
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

    /// Finds a place for a piece of managed memory (F29 in docs/internals/facts.md).
    fn place_managed(&self, current: &CurrentContext, len: u64) -> Result<u64, Code> {
        let (mut space, len) = (lock(&self.space), round_up(len)?);
        if let Some((address, _)) = space.managed_pieces.place(current.context, len) {
            return Ok(address);
        }
        let base = map_chunk(map_managed)?;
        space.managed_pieces.add(base, current.context, len);
        Ok(base)
    }

    fn allocate(&self, current: &CurrentContext, len: u64) -> Result<u64, Code> {
        self.invalidate_unsafe_captures()?;
        if len == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let len = round_up(len)?;
        if is_piece(len) {
            return self.allocate_piece(current, len);
        }
        self.allocate_whole(current, len, AllocationKind::Linear)
    }

    /// Charges, maps and lists memory that takes whole chunks.
    pub(crate) fn allocate_whole(
        &self,
        current: &CurrentContext,
        len: u64,
        kind: AllocationKind,
    ) -> Result<u64, Code> {
        self.image
            .charge(current.unit(), Charge::Memory, whole_chunks(len))?;
        self.map_allocation(current, len, kind)
            .inspect_err(|_| self.release_memory(current.unit(), whole_chunks(len)))
    }

    /// Allocates a piece from a chunk of the context, or from a new chunk.
    fn allocate_piece(&self, current: &CurrentContext, len: u64) -> Result<u64, Code> {
        let list = |space: &mut AddressSpace, address: u64, object: Option<Object>| {
            let allocation = Allocation {
                len,
                kind: object.map_or(AllocationKind::Linear, AllocationKind::Shared),
                context: current.context,
                unit: current.unit(),
                readable: true,
                writable: true,
            };
            space.allocations.insert(address, allocation);
            let old = residue::load(&self.sim, current.unit(), len);
            // SAFETY: the piece has at least `len` bytes, and `old` is no longer than that.
            unsafe { std::ptr::copy_nonoverlapping(old.as_ptr(), address as *mut u8, old.len()) };
            address
        };
        let mut space = lock(&self.space);
        if let Some((address, object)) = space.pieces.place(current.context, len) {
            return Ok(list(&mut space, address, object));
        }
        drop(space);
        self.image.charge(current.unit(), Charge::Memory, CHUNK)?;
        let base =
            map_chunk(map_pages).inspect_err(|_| self.release_memory(current.unit(), CHUNK))?;
        let mut space = lock(&self.space);
        space.pieces.add(base, current.context, len);
        Ok(list(&mut space, base, None))
    }

    /// Releases a piece's place, and with the last one its chunk.
    pub(crate) fn release_piece(&self, address: u64, unit: usize) {
        let Some((base, object)) = lock(&self.space).pieces.remove(address) else {
            return;
        };
        // SAFETY: `map_chunk` mapped it, perhaps with an object over it, and nothing there is
        // listed.
        unsafe { unmap_pages(base, CHUNK) };
        match object {
            Some(object) => object.free_if_unreferenced(&self.sim),
            None => self.release_memory(unit, CHUNK),
        }
    }

    /// Releases charged bytes. An error means that the collector has released them already.
    pub(crate) fn release_memory(&self, unit: usize, bytes: u64) {
        let _ = self.image.release(unit, Charge::Memory, bytes);
    }

    /// Unlists an allocation that starts at `address` and has the right kind.
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

    /// Frees memory that was unlisted.
    pub(crate) fn free_allocation(&self, address: u64, removed: Allocation) {
        self.free_allocation_in_stream(address, removed, None);
    }

    /// Frees memory that was unlisted; with a stream, in the order of that stream.
    pub(crate) fn free_allocation_in_stream(
        &self,
        address: u64,
        removed: Allocation,
        stream: Option<u64>,
    ) {
        if !self.sim.is_scrub_enabled()
            && matches!(
                removed.kind,
                AllocationKind::Linear | AllocationKind::Pool(_)
            )
        {
            // SAFETY: still mapped, and unlisted, so that no other thread frees it.
            residue::save(&self.sim, removed.unit, unsafe {
                bytes(address, removed.len)
            });
        }
        let is_linear = matches!(
            removed.kind,
            AllocationKind::Linear | AllocationKind::Shared(_)
        );
        if is_linear && is_piece(removed.len) {
            // SAFETY: its chunk is mapped while the piece has its place there.
            unsafe { clear_piece(address, removed.len) };
            return match stream {
                Some(stream) => self.defer_free(removed.unit, removed.len, address, stream),
                None => self.release_piece(address, removed.unit),
            };
        }
        if removed.kind == AllocationKind::Managed && is_piece(removed.len) {
            lock(&self.residency).forget(address, removed.len);
            // SAFETY: its chunk is mapped while the piece has its place there.
            unsafe { clear_piece(address, removed.len) };
            return self.release_managed_piece(address);
        }
        if removed.kind != AllocationKind::HostRegistered {
            // SAFETY: `map_pages` mapped it with this length, and it is unlisted.
            unsafe { unmap_pages(address, removed.len) };
        }
        match removed.kind {
            AllocationKind::Linear | AllocationKind::Variable => match stream {
                Some(stream) => self.defer_free(removed.unit, removed.len, address, stream),
                None => self.release_memory(removed.unit, whole_chunks(removed.len)),
            },
            AllocationKind::Pool(pool) => self.return_to_pool(pool, removed.len, stream),
            AllocationKind::Shared(object)
            | AllocationKind::IpcOpened(object)
            | AllocationKind::Mapped(object) => object.free_if_unreferenced(&self.sim),
            AllocationKind::Managed => {
                lock(&self.residency).forget(address, removed.len);
                lock(&self.chunks).free(&self.image, address);
            }
            AllocationKind::Captured | AllocationKind::Host | AllocationKind::HostRegistered => {}
        }
    }

    /// Frees the chunk of a managed piece, if the piece was its last.
    fn release_managed_piece(&self, address: u64) {
        let ended = lock(&self.space).managed_pieces.remove(address);
        if let Some((base, _)) = ended {
            // SAFETY: `map_chunk` mapped it, and nothing there is listed.
            unsafe { unmap_pages(base, CHUNK) };
            lock(&self.chunks).free(&self.image, base);
        }
    }

    /// Frees the allocations of a destroyed context, except VMM mappings, which outlive it.
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
            if let Ok(removed) = self.remove_allocation(address, |_| true) {
                self.free_allocation(address, removed);
            }
        }
    }
}

fn free(address: u64) -> DriverResult {
    let current = current_context()?;
    if address == 0 {
        return Ok(());
    }
    // Like the real driver, it waits for work that may still use the memory, except for pool
    // memory.
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
    let removed = current.process.remove_allocation(address, freed)?;
    current.process.free_allocation(address, removed);
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
        free.set_if_not_null(all.saturating_sub(current.process.sim.used(current.unit())));
        total.set_if_not_null(all);
        Ok(())
    };
    fn cuMemGetAddressRange_v2(base: Out<u64>, len: Out<u64>, address: u64) = {
        let found = lock(&healthy_process()?.space).find_containing(address);
        let (start, found) = found.ok_or(Code::NOT_FOUND)?;
        base.set_if_not_null(start);
        len.set_if_not_null(found.len);
        Ok(())
    };
}
