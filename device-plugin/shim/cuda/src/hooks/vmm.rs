//! Hooks virtual memory management: `cuMemCreate`, and the references to its memory.
//!
//! The table's lock is held over driver calls, so that a handle's number cannot be reused in
//! between. All of these calls are slow (6 us and more).
#![allow(non_snake_case)]

use std::ffi::{c_int, c_uint, c_void};
use std::sync::MutexGuard;

use super::hooks;
use super::pools::HANDLE_TYPE_FABRIC;
use crate::accounting::{self, Account};
use crate::alloc_table::Charge;
use crate::curesult::{self, CuResult};
use crate::eviction;
use crate::fork_local::ForkLocal;
use crate::location::{ChargeTo, MemProperties};
use crate::session_state::state;
use crate::vmm::VmmTable;

/// The memory that this process created by `cuMemCreate`.
static TABLE: ForkLocal<VmmTable> = ForkLocal::new();

/// Forgets the parent's memory, in a forked child.
pub(crate) fn reset() {
    TABLE.reset();
}

/// Locks the table. Returns `None` without a session state, where nothing was ever charged.
fn table() -> Option<MutexGuard<'static, VmmTable>> {
    state().map(|_| TABLE.lock())
}

/// Calls the driver with the table locked, updates the table after a success, and discharges the
/// charges that `note` returns.
fn with_table(
    call: impl FnOnce() -> CuResult,
    note: impl FnOnce(&mut VmmTable) -> Vec<Charge>,
) -> CuResult {
    let Some(mut table) = table() else {
        return call();
    };
    let answer = call();
    if answer == curesult::SUCCESS {
        note(&mut table).into_iter().for_each(accounting::discharge);
    }
    answer
}

/// Makes a call that lets other processes hold a handle's memory, and marks the memory as exported
/// before.
pub(crate) fn with_export(
    handle: impl FnOnce(&VmmTable) -> Option<u64>,
    call: impl FnOnce() -> CuResult,
) -> CuResult {
    with_exports(|table| handle(table).into_iter().collect(), call)
}

/// Makes a call that lets others hold the memory of several handles. See [`with_export`].
fn with_exports(
    handles: impl FnOnce(&VmmTable) -> Vec<u64>,
    call: impl FnOnce() -> CuResult,
) -> CuResult {
    let Some(mut table) = table() else {
        return call();
    };
    let handles = handles(&table);
    let mut newly_exported = Vec::new();
    let is_marked = handles.iter().all(|handle| match table.export(*handle) {
        None => true,
        Some(charge) if accounting::mark_exported(charge).is_ok() => {
            newly_exported.push((*handle, charge));
            true
        }
        Some(_) => {
            table.unexport(*handle);
            false
        }
    });
    let answer = if is_marked {
        call()
    } else {
        curesult::NOT_PERMITTED
    };
    // A failed call of several handles may have reached some of them.
    let may_be_held = is_marked && (answer == curesult::SUCCESS || handles.len() > 1);
    if !may_be_held {
        for (handle, charge) in newly_exported {
            table.unexport(handle);
            accounting::unmark_exported(charge);
        }
    }
    answer
}

/// `CUarrayMapInfo` (CUDA 11.1), 96 bytes.
#[repr(C)]
pub(crate) struct ArrayMapping {
    resource_kind: c_int,
    resource: u64,
    subresource_kind: c_int,
    subresource: [u64; 4],
    operation: c_int,
    handle_kind: c_int,
    handle: u64,
    offset: u64,
    device_mask: c_uint,
    flags: c_uint,
    reserved: [c_uint; 2],
}

const _: () = assert!(size_of::<ArrayMapping>() == 96);

/// Marks memory that is mapped into sparse arrays as exported. The driver unmaps it in stream
/// order, which the shim does not see, so the memory stays charged.
///
/// # Safety
/// `list` has `count` entries.
unsafe fn map_sparse_arrays(
    list: *const ArrayMapping,
    count: c_uint,
    call: impl FnOnce() -> CuResult,
) -> CuResult {
    if list.is_null() {
        return call();
    }
    // SAFETY: the caller guarantees it.
    let handle = |place| unsafe { (*list.add(place)).handle };
    with_exports(|_| (0..count as usize).map(handle).collect(), call)
}

hooks! {
    /// `cuMemCreate` (CUDA 10.2): charged to the device in the properties.
    fn cuMemCreate(handle: *mut u64, bytes: usize, properties: *const MemProperties, flags: u64) = |driver_call| {
        if handle.is_null() || properties.is_null() || bytes == 0 || accounting::before_cuinit() {
            return driver_call(handle, bytes, properties, flags);
        }
        // SAFETY: not null, and by the prototype of this type.
        let ChargeTo::Account(account) = (unsafe { *properties }).charge_to() else {
            return driver_call(handle, bytes, properties, flags);
        };
        let Ok(pending) = accounting::charge(account, bytes as u64, "cuMemCreate") else {
            return curesult::OUT_OF_MEMORY;
        };
        let mut new_handle = 0;
        let call = || match driver_call(&raw mut new_handle, bytes, properties, flags) {
            curesult::SUCCESS => Ok(()),
            code => Err(code),
        };
        if let Err(code) = eviction::allocate(account, bytes as u64, "cuMemCreate", call) {
            return code;
        }
        TABLE.lock().created(new_handle, pending.into_charge());
        // SAFETY: not null, and by the prototype of this type.
        unsafe { handle.write(new_handle) };
        curesult::SUCCESS
    };

    /// `cuMemRelease` (CUDA 10.2).
    fn cuMemRelease(handle: u64) = |driver_call| {
        with_table(|| driver_call(handle), |table| table.released(handle).into_iter().collect())
    };

    /// `cuMemMap` (CUDA 10.2).
    fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64) = |driver_call| {
        with_table(|| driver_call(address, bytes, offset, handle, flags), |table| {
            table.mapped(address, bytes as u64, handle);
            Vec::new()
        })
    };

    /// `cuMemUnmap` (CUDA 10.2): of one mapping or several.
    fn cuMemUnmap(address: u64, bytes: usize) = |driver_call| {
        with_table(|| driver_call(address, bytes), |table| table.unmapped(address, bytes as u64))
    };

    /// `cuMemRetainAllocationHandle` (CUDA 11.0): returns the handle that the memory was mapped by.
    fn cuMemRetainAllocationHandle(handle: *mut u64, address: u64) = |driver_call| {
        with_table(|| driver_call(handle, address), |table| {
            // SAFETY: null, or the driver has just written it.
            if let Some(handle) = unsafe { handle.as_ref() } {
                table.retained(*handle);
            }
            Vec::new()
        })
    };

    /// `cuMemExportToShareableHandle` (CUDA 10.2). Fabric handles are refused, because other nodes
    /// and pods could import them.
    fn cuMemExportToShareableHandle(shared: *mut c_void, handle: u64, kind: c_int, flags: u64) = |driver_call| {
        if kind == HANDLE_TYPE_FABRIC {
            return curesult::NOT_PERMITTED;
        }
        with_export(|_| Some(handle), || driver_call(shared, handle, kind, flags))
    };

    /// `cuMulticastBindMem` (CUDA 12.1).
    fn cuMulticastBindMem(
        object: u64, to: usize, handle: u64, from: usize, bytes: usize, flags: u64,
    ) = |driver_call| {
        with_table(|| driver_call(object, to, handle, from, bytes, flags), |table| {
            table.bound((object, to as u64), handle);
            Vec::new()
        })
    };

    /// `cuMulticastBindMem` (CUDA 13.1).
    fn cuMulticastBindMem_v2(
        object: u64, device: c_int, to: usize, handle: u64, from: usize, bytes: usize, flags: u64,
    ) = |driver_call| {
        with_table(|| driver_call(object, device, to, handle, from, bytes, flags), |table| {
            table.bound((object, to as u64), handle);
            Vec::new()
        })
    };

    /// `cuMulticastBindAddr` (CUDA 12.1).
    fn cuMulticastBindAddr(object: u64, to: usize, address: u64, bytes: usize, flags: u64) = |driver_call| {
        with_table(|| driver_call(object, to, address, bytes, flags), |table| {
            if let Some(handle) = table.handle_at(address) {
                table.bound((object, to as u64), handle);
            }
            Vec::new()
        })
    };

    /// `cuMulticastBindAddr` (CUDA 13.1).
    fn cuMulticastBindAddr_v2(
        object: u64, device: c_int, to: usize, address: u64, bytes: usize, flags: u64,
    ) = |driver_call| {
        with_table(|| driver_call(object, device, to, address, bytes, flags), |table| {
            if let Some(handle) = table.handle_at(address) {
                table.bound((object, to as u64), handle);
            }
            Vec::new()
        })
    };

    /// `cuMulticastUnbind` (CUDA 12.1).
    fn cuMulticastUnbind(object: u64, device: c_int, offset: usize, bytes: usize) = |driver_call| {
        with_table(|| driver_call(object, device, offset, bytes), |table| {
            let unbound = |account| table.unbound(object, account, offset as u64, bytes as u64);
            accounting::account_index(Account::Device(device)).map(unbound).unwrap_or_default()
        })
    };

    /// `cuMemMapArrayAsync` (CUDA 11.1): tiles of sparse arrays.
    fn cuMemMapArrayAsync(list: *mut ArrayMapping, count: c_uint, stream: u64) = |driver_call| {
        // SAFETY: the program passes the length of its array.
        unsafe { map_sparse_arrays(list, count, || driver_call(list, count, stream)) }
    };

    /// `cuMemMapArrayAsync` for the per-thread default stream.
    fn cuMemMapArrayAsync_ptsz(list: *mut ArrayMapping, count: c_uint, stream: u64) = |driver_call| {
        // SAFETY: the program passes the length of its array.
        unsafe { map_sparse_arrays(list, count, || driver_call(list, count, stream)) }
    };
}
