//! Implements IPC handles of linear memory (F13 in docs/internals/facts.md), and DMA-BUF
//! descriptors.
//!
//! The first export turns linear memory into a shared object with the same address and contents.
//! Charged as an object, the memory outlives its process while an importer has it open. As on an
//! H200, a descriptor keeps the memory past its free.

use bursar_sim_state::{Charge, object::Object};

use crate::abi::{Code, DriverResult, Out};
use crate::context_stack::current_context;
use crate::entry::exports;
use crate::granularity::{CHUNK, is_piece, whole_chunks};
use crate::memory::{bytes, map_pages, unmap_pages};
use crate::process::{Process, lock};
use crate::tables::address_space::{Allocation, AllocationKind};
use std::os::fd::IntoRawFd;

const PAGE: usize = 4096;
const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// `CUipcMemHandle`, with the object's id, and above [`OFFSET_BITS`] the offset of a piece in its
/// chunk, in multiples of [`PIECE`].
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct IpcMemHandle {
    place: u64,
    rest: [u64; 7],
}

const OFFSET_BITS: u32 = 48;
const PIECE: u64 = 512;

impl Process {
    /// The object of linear memory, created if there is none yet: of a piece, that of its whole
    /// chunk (F23 in docs/internals/facts.md).
    fn convert_to_object(&self, base: u64, found: Allocation) -> Result<Object, Code> {
        match found.kind {
            AllocationKind::Shared(object) => return Ok(object),
            AllocationKind::Linear => {}
            _ => return Err(Code::INVALID_VALUE),
        }
        let (base, len) = match is_piece(found.len) {
            true => (base - base % CHUNK, CHUNK),
            false => (base, found.len),
        };
        let size = whole_chunks(len);
        self.image.release(found.unit, Charge::Memory, size)?;
        let created = Object::create(&self.sim, &self.image, found.unit, size);
        let (object, _hold) = created.map_err(|error| {
            // Restores the charge. If another process has taken the bytes meanwhile, the image
            // stays undercharged.
            let _ = self.image.charge(found.unit, Charge::Memory, size);
            Code::from(error)
        })?;
        let aside = map_pages(len)?;
        // SAFETY: `aside` is a new mapping; `base` is listed linear memory of that length. Only
        // pages with contents are copied, so that the others stay untouched.
        unsafe {
            object.map_over(&self.sim, &self.image, aside, len, 0, READ_WRITE)?;
            for (number, page) in bytes(base, len).chunks(PAGE).enumerate() {
                if page.iter().any(|byte| *byte != 0) {
                    let to = (aside as *mut u8).add(number * PAGE);
                    std::ptr::copy_nonoverlapping(page.as_ptr(), to, page.len());
                }
            }
            object.map_over(&self.sim, &self.image, base, len, 0, READ_WRITE)?;
            unmap_pages(aside, len);
        }
        let mut space = lock(&self.space);
        space.pieces.share(base, object);
        for (_, found) in space.allocations.range_mut(base..base + len) {
            found.kind = AllocationKind::Shared(object);
        }
        Ok(object)
    }
}

fn open_handle(address: &Out<u64>, handle: IpcMemHandle) -> DriverResult {
    let current = current_context()?;
    let process = current.process;
    if address.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    let (id, offset) = (
        handle.place % (1 << OFFSET_BITS),
        handle.place >> OFFSET_BITS,
    );
    let object = Object::find(&process.sim, id)?;
    let own = |found: &Allocation| matches!(found.kind, AllocationKind::Shared(own) if own.id == object.id);
    if lock(&process.space).allocations.values().any(own) {
        return Err(Code::INVALID_CONTEXT); // a process cannot open its own
    }
    let at = map_pages(object.size)?;
    // SAFETY: the mapping is new and has that length.
    unsafe { object.map_over(&process.sim, &process.image, at, object.size, 0, READ_WRITE)? };
    let (len, kind) = (object.size, AllocationKind::IpcOpened(object));
    let opened = Allocation {
        len,
        kind,
        context: current.context,
        unit: object.unit,
        readable: true,
        writable: true,
    };
    lock(&process.space).allocations.insert(at, opened);
    address.set(at + offset * PIECE)
}

/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const DMA_BUF: i32 = 1;

fn export_dma_buf(descriptor: &Out<i32>, address: u64, len: u64) -> DriverResult {
    let process = current_context()?.process;
    if descriptor.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    let around = lock(&process.space).find_containing(address);
    let (base, found) = around.ok_or(Code::INVALID_VALUE)?;
    if len == 0 || len > found.len - (address - base) {
        return Err(Code::INVALID_VALUE);
    }
    let object = match found.kind {
        AllocationKind::Mapped(object) => object,
        _ => process.convert_to_object(base, found)?,
    };
    descriptor.set(object.export(&process.sim)?.into_raw_fd())
}

exports! {
    fn cuMemGetHandleForAddressRange(descriptor: Out<i32>, address: u64, len: u64, kind: i32, _flags: u64) = {
        if kind != DMA_BUF {
            return Err(Code::NOT_SUPPORTED);
        }
        export_dma_buf(&descriptor, address, len)
    };
    fn cuIpcGetMemHandle(handle: Out<IpcMemHandle>, address: u64) = {
        let current = current_context()?;
        let around = lock(&current.process.space).find_containing(address);
        let (base, found) = around.ok_or(Code::INVALID_VALUE)?;
        let object = current.process.convert_to_object(base, found)?.id;
        let offset = if is_piece(found.len) { base % CHUNK } else { 0 };
        handle.set(IpcMemHandle { place: object | ((offset / PIECE) << OFFSET_BITS), rest: [0; 7] })
    };
    fn cuIpcOpenMemHandle_v2(address: Out<u64>, handle: IpcMemHandle, _flags: u32) = open_handle(&address, handle);
    fn cuIpcCloseMemHandle(address: u64) = {
        let current = current_context()?;
        let around = lock(&current.process.space).find_containing(address);
        let (base, _) = around.ok_or(Code::INVALID_VALUE)?;
        let removed = current.process.remove_allocation(base, |kind| matches!(kind, AllocationKind::IpcOpened(_)))?;
        current.process.free_allocation(base, removed);
        Ok(())
    };
}
