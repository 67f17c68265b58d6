//! Provides a private function table, whose functions allocate memory past the API.
//!
//! Real drivers have several such tables. Like NVIDIA's, the table begins with its size in bytes,
//! and its functions have no names.

use crate::abi::{Code, DriverResult, In, Out};
use crate::context_stack::current_context;
use crate::entry::{call, exports};
use crate::memory::allocate;
use crate::tables::address_space::AllocationKind;
use std::ffi::c_void;

const TABLE_UUID: [u8; 16] = *b"bursar-sim-alloc";

/// The id of the table with which NVIDIA's tool cuda-checkpoint stops processes.
const CHECKPOINT_UUID: [u8; 16] = [
    0x69, 0xa2, 0x8e, 0x9f, 0x24, 0x49, 0x8b, 0x47, 0xb0, 0x30, 0xc5, 0xda, 0x33, 0x0e, 0xa4, 0xe9,
];

#[repr(C)]
struct Table {
    size: usize,
    /// Allocates like `cuMemAlloc`.
    allocate: extern "C" fn(Out<u64>, u64) -> i32,
    /// Allocates like `cuMemAllocManaged`, and moves the memory to the current device.
    allocate_managed: extern "C" fn(Out<u64>, u64) -> i32,
}

static TABLE: Table = Table {
    size: size_of::<Table>(),
    allocate: allocate_by_table,
    allocate_managed: allocate_managed_by_table,
};

/// A table without functions: its size alone.
static CHECKPOINT_TABLE: usize = size_of::<usize>();

extern "C" fn allocate_by_table(address: Out<u64>, len: u64) -> i32 {
    call("allocate_by_table", || allocate(&address, len))
}

extern "C" fn allocate_managed_by_table(address: Out<u64>, len: u64) -> i32 {
    call("allocate_managed_by_table", || {
        allocate_managed(&address, len)
    })
}

fn allocate_managed(address: &Out<u64>, len: u64) -> DriverResult {
    let current = current_context()?;
    let process = current.process;
    let mapped = process.map_allocation(&current, len, AllocationKind::Managed)?;
    process.populate_managed(current.unit(), mapped, len);
    address.set(mapped)
}

exports! {
    fn cuGetExportTable(table: Out<*const c_void>, id: In<[u8; 16]>) = {
        if id.get()? == TABLE_UUID {
            return table.set((&raw const TABLE).cast());
        }
        if id.get()? == CHECKPOINT_UUID {
            return table.set((&raw const CHECKPOINT_TABLE).cast());
        }
        table.set(std::ptr::null())?;
        Err(Code::NOT_FOUND)
    };
}
