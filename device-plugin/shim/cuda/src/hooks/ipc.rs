//! Charges linear memory that other processes can hold by IPC handles and DMA-BUF descriptors.
//!
//! An IPC handle alone keeps no memory. By CUDA's contract a process closes the handle before the
//! exporter frees the memory. The agent sees a process that does not on NVML's list. So the
//! exporter's free discharges the memory. A descriptor keeps memory unseen (fact F4), so memory
//! with a descriptor stays charged.
#![allow(non_snake_case)]

use std::ffi::{c_int, c_void};

use super::hooks;
use super::vmm::with_export;
use crate::accounting::{self, ALLOC_TABLE};
use crate::alloc_table::{Charge, ShareState};
use crate::chunks;
use crate::curesult::{self, CuResult};
use crate::driver_calls::driver;
use crate::pools::POOLS;
use crate::session_state::state;

/// `CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE`.
const ATTR_MEMPOOL_HANDLE: c_int = 17;

/// Returns the start of the allocation that contains an address.
fn allocation_start(address: u64) -> Option<u64> {
    let (mut start, mut bytes) = (0, 0);
    let code = driver!(cuMemGetAddressRange_v2(
        &raw mut start => *mut u64, &raw mut bytes => *mut usize, address => u64,
    ));
    (code == curesult::SUCCESS).then_some(start)
}

/// Makes a call that shares the linear memory around an address, and marks it as exported before.
fn share(address: u64, share: ShareState, call: impl FnOnce() -> CuResult) -> CuResult {
    let known = state().and_then(|_| {
        let start = allocation_start(address)?;
        Some((start, ALLOC_TABLE.remove(start)?))
    });
    let Some((start, charge)) = known else {
        return call();
    };
    if charge.share == ShareState::OfChunk {
        let answer = chunks::share(charge.units, share, call);
        let _ = ALLOC_TABLE.insert(start, charge);
        return answer;
    }
    let newly_exported = charge.share == ShareState::Private;
    let after = Charge {
        share: charge.share.max(share),
        ..charge
    };
    let is_counted = !newly_exported || accounting::mark_exported(after).is_ok();
    let answer = if is_counted {
        call()
    } else {
        curesult::NOT_PERMITTED
    };
    let recorded = if answer == curesult::SUCCESS {
        after
    } else {
        charge
    };
    if newly_exported && is_counted && answer != curesult::SUCCESS {
        accounting::unmark_exported(after);
    }
    // The insert reuses the slot that the charge was removed from.
    let _ = ALLOC_TABLE.insert(start, recorded);
    answer
}

/// Returns the pool that an address was allocated from.
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
