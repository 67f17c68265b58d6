//! Linear memory that other processes can come to hold: IPC handles and DMA-BUF descriptors.
//!
//! An IPC handle itself keeps nothing. A process that has it open does, and CUDA's contract is that it
//! closes it before the exporter frees; one that does not is on NVML's list with the memory, where the
//! agent sees it. So the charge goes with the exporter's free. A descriptor keeps memory unseen (design
//! F4), so what has one stays charged.
#![allow(non_snake_case)]

use std::ffi::{c_int, c_void};

use super::vmm::with_export;
use super::{driver, hooks};
use crate::accounting::{self, ALLOC_TABLE};
use crate::alloc_table::{Charge, ShareState};
use crate::curesult::{self, CuResult};
use crate::pools::POOLS;
use crate::session_state::state;

/// `CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE`.
const ATTR_MEMPOOL_HANDLE: c_int = 17;

/// The start of the allocation around an address.
fn allocation_start(address: u64) -> Option<u64> {
    let (mut start, mut bytes) = (0, 0);
    let code = driver!(cuMemGetAddressRange_v2(
        &raw mut start => *mut u64, &raw mut bytes => *mut usize, address => u64,
    ));
    (code == curesult::SUCCESS).then_some(start)
}

/// Calls what lends the linear memory around an address to others, counted as exported before.
fn share(address: u64, share: ShareState, call: impl FnOnce() -> CuResult) -> CuResult {
    let known = state().and_then(|_| {
        let start = allocation_start(address)?;
        Some((start, ALLOC_TABLE.remove(start)?))
    });
    let Some((start, charge)) = known else {
        return call();
    };
    let fresh = charge.share == ShareState::Private;
    let after = Charge {
        share: charge.share.max(share),
        ..charge
    };
    let counted = !fresh || accounting::mark_exported(after).is_ok();
    let answer = if counted {
        call()
    } else {
        curesult::NOT_PERMITTED
    };
    let kept = if answer == curesult::SUCCESS {
        after
    } else {
        charge
    };
    if fresh && counted && answer != curesult::SUCCESS {
        accounting::unmark_exported(after);
    }
    // It has a place in the table: the one that it was taken from.
    let _ = ALLOC_TABLE.insert(start, kept);
    answer
}

/// The pool that an address was allocated from.
fn pool_of(address: u64) -> Option<u64> {
    let mut pool = 0_u64;
    let code = driver!(cuPointerGetAttribute(
        (&raw mut pool).cast() => *mut c_void, ATTR_MEMPOOL_HANDLE => c_int, address => u64,
    ));
    (code == curesult::SUCCESS && pool != 0).then_some(pool)
}

hooks! {
    /// `cuIpcGetMemHandle` (CUDA 4.1).
    fn cuIpcGetMemHandle(handle: *mut c_void, address: u64) = |driver_call| {
        share(address, ShareState::IpcHandle, || driver_call(handle, address))
    };

    /// `cuMemGetHandleForAddressRange` (CUDA 11.7): a DMA-BUF descriptor of any device memory.
    fn cuMemGetHandleForAddressRange(
        shared: *mut c_void, address: u64, bytes: usize, kind: c_int, flags: u64,
    ) = |driver_call| {
        let call = || driver_call(shared, address, bytes, kind, flags);
        match pool_of(address).and_then(|pool| POOLS.find(pool)) {
            Some(pool) => pool.with_export(call),
            None => with_export(
                |table| table.handle_at(address),
                || share(address, ShareState::Descriptor, call),
            ),
        }
    };
}
