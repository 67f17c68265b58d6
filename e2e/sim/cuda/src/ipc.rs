//! IPC handles of linear memory (F13), and DMA-BUF descriptors of it and of mapped memory.
//!
//! Linear memory becomes a shared object when its first handle is made: same address, same contents, but
//! charged as an object, so that it outlives its process while an importer has it open. A descriptor keeps the memory
//! past its free, as on an H200.

use crate::abi::{Answer, Code, Out};
use crate::context::current;
use crate::entry::exports;
use crate::memory::{Allocation, Kind, bytes, map, taken, unmap};
use crate::process::{Process, lock};
use bursar_sim_state::{Charge, object::Object};
use std::os::fd::IntoRawFd;

const PAGE: usize = 4096;
const BOTH: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// `CUipcMemHandle`: the name of the object. An opened handle is its start, as with the real driver.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Handle {
    object: u64,
    rest: [u64; 7],
}

impl Process {
    /// The object of linear memory, made when there is none yet.
    fn share(&self, base: u64, found: Allocation) -> Result<Object, Code> {
        match found.kind {
            Kind::Shared(object) => return Ok(object),
            Kind::Linear => {}
            _ => return Err(Code::INVALID_VALUE),
        }
        let size = taken(found.len);
        self.image.release(found.unit, Charge::Memory, size)?;
        let made = Object::create(&self.sim, &self.image, found.unit, size);
        let (object, _hold) = made.map_err(|error| {
            // The bytes were ours a moment ago; where somebody else was quicker, they are owed.
            let _ = self.image.charge(found.unit, Charge::Memory, size);
            Code::from(error)
        })?;
        let aside = map(found.len)?;
        // SAFETY: `aside` is a new mapping; `base` is linear memory of that length, on the list until we
        // return. Only pages with contents are written, so that the others stay untouched.
        unsafe {
            object.map_over(&self.sim, &self.image, aside, found.len, 0, BOTH)?;
            for (number, page) in bytes(base, found.len).chunks(PAGE).enumerate() {
                if page.iter().any(|byte| *byte != 0) {
                    let to = (aside as *mut u8).add(number * PAGE);
                    std::ptr::copy_nonoverlapping(page.as_ptr(), to, page.len());
                }
            }
            object.map_over(&self.sim, &self.image, base, found.len, 0, BOTH)?;
            unmap(aside, found.len);
        }
        if let Some(found) = lock(&self.space).allocations.get_mut(&base) {
            found.kind = Kind::Shared(object);
        }
        Ok(object)
    }
}

fn open(address: &Out<u64>, handle: Handle) -> Answer {
    let current = current()?;
    let process = current.process;
    if address.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    let object = Object::named(&process.sim, handle.object)?;
    let own = |found: &Allocation| matches!(found.kind, Kind::Shared(mine) if mine.id == object.id);
    if lock(&process.space).allocations.values().any(own) {
        return Err(Code::INVALID_CONTEXT); // a process cannot open its own
    }
    let at = map(object.size)?;
    // SAFETY: a new mapping of that length.
    unsafe { object.map_over(&process.sim, &process.image, at, object.size, 0, BOTH)? };
    let (len, kind) = (object.size, Kind::Opened(object));
    let opened = Allocation {
        len,
        kind,
        context: current.context,
        unit: object.unit,
        readable: true,
        writable: true,
    };
    lock(&process.space).allocations.insert(at, opened);
    address.set(at)
}

/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const DMA_BUF: i32 = 1;

fn export(descriptor: &Out<i32>, address: u64, len: u64) -> Answer {
    let process = current()?.process;
    if descriptor.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    let around = lock(&process.space).around(address);
    let (base, found) = around.ok_or(Code::INVALID_VALUE)?;
    if len == 0 || len > found.len - (address - base) {
        return Err(Code::INVALID_VALUE);
    }
    let object = match found.kind {
        Kind::Mapped(object) => object,
        _ => process.share(base, found)?,
    };
    descriptor.set(object.export(&process.sim)?.into_raw_fd())
}

exports! {
    fn cuMemGetHandleForAddressRange(descriptor: Out<i32>, address: u64, len: u64, kind: i32, _flags: u64) = {
        if kind != DMA_BUF {
            return Err(Code::NOT_SUPPORTED);
        }
        export(&descriptor, address, len)
    };
    fn cuIpcGetMemHandle(handle: Out<Handle>, address: u64) = {
        let current = current()?;
        let around = lock(&current.process.space).around(address);
        let (base, found) = around.ok_or(Code::INVALID_VALUE)?;
        let object = current.process.share(base, found)?.id;
        handle.set(Handle { object, rest: [0; 7] })
    };
    fn cuIpcOpenMemHandle_v2(address: Out<u64>, handle: Handle, _flags: u32) = open(&address, handle);
    fn cuIpcCloseMemHandle(address: u64) = {
        let current = current()?;
        let gone = current.process.take(address, |kind| matches!(kind, Kind::Opened(_)))?;
        current.process.end(address, gone);
        Ok(())
    };
}
