//! Linear memory that other processes can come to hold: IPC handles and DMA-BUF descriptors.
//!
//! An IPC handle itself keeps nothing. A process that has it open does, and CUDA's contract is that it
//! closes it before the exporter frees; one that does not is on NVML's list with the memory, where the
//! agent sees it. So the charge goes with the exporter's free. A descriptor keeps memory unseen (design
//! F4), so what has one stays charged.
#![allow(non_snake_case)]

use std::ffi::{c_int, c_void};

use super::vmm::exporting;
use super::{hooks, real};
use crate::codes::{self, CuResult};
use crate::ledger::{self, LIVE};
use crate::live::{Charge, Lent};
use crate::pools::POOLS;
use crate::state::state;

/// `CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE`.
const POOL_OF_POINTER: c_int = 17;

/// The start of the allocation around an address.
fn start_of(address: u64) -> Option<u64> {
    let (mut start, mut bytes) = (0, 0);
    let code = real!(cuMemGetAddressRange_v2(
        &raw mut start => *mut u64, &raw mut bytes => *mut usize, address => u64,
    ));
    (code == codes::SUCCESS).then_some(start)
}

/// Calls what lends the linear memory around an address to others, counted as exported before.
fn lending(address: u64, lent: Lent, call: impl FnOnce() -> CuResult) -> CuResult {
    let known = state().and_then(|_| {
        let start = start_of(address)?;
        Some((start, LIVE.remove(start)?))
    });
    let Some((start, charge)) = known else {
        return call();
    };
    let fresh = charge.lent == Lent::No;
    let after = Charge {
        lent: charge.lent.max(lent),
        ..charge
    };
    let counted = !fresh || ledger::export(after).is_ok();
    let answer = if counted {
        call()
    } else {
        codes::NOT_PERMITTED
    };
    let kept = if answer == codes::SUCCESS {
        after
    } else {
        charge
    };
    if fresh && counted && answer != codes::SUCCESS {
        ledger::unexport(after);
    }
    // It has a place in the table: the one that it was taken from.
    let _ = LIVE.insert(start, kept);
    answer
}

/// The pool that an address was allocated from.
fn pool_of(address: u64) -> Option<u64> {
    let mut pool = 0_u64;
    let code = real!(cuPointerGetAttribute(
        (&raw mut pool).cast() => *mut c_void, POOL_OF_POINTER => c_int, address => u64,
    ));
    (code == codes::SUCCESS && pool != 0).then_some(pool)
}

hooks! {
    /// `cuIpcGetMemHandle` (CUDA 4.1).
    fn cuIpcGetMemHandle(handle: *mut c_void, address: u64) = |plain| {
        lending(address, Lent::Handle, || plain(handle, address))
    };

    /// `cuMemGetHandleForAddressRange` (CUDA 11.7): a DMA-BUF descriptor of any device memory.
    fn cuMemGetHandleForAddressRange(
        shared: *mut c_void, address: u64, bytes: usize, kind: c_int, flags: u64,
    ) = |plain| {
        let call = || plain(shared, address, bytes, kind, flags);
        match pool_of(address).and_then(|pool| POOLS.find(pool)) {
            Some(pool) => pool.exporting(call),
            None => exporting(
                |table| table.handle_at(address),
                || lending(address, Lent::Descriptor, call),
            ),
        }
    };
}
