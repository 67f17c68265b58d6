//! Hooks stream-ordered memory: allocations, frees and pools.
//!
//! An allocation in a stream that is being captured becomes a node of a graph and takes no memory.
//! Allocations from prefetched credit need no check for an outer hook, because the pool's reserved
//! amount is what is charged in the end.
#![allow(non_snake_case)]

use std::ffi::{c_int, c_void};

use super::{hooks, outermost};
use crate::accounting::{ALLOC_TABLE, Account};
use crate::alloc_table::Charge;
use crate::curesult::{self, CuResult};
use crate::deferred_free;
use crate::driver_calls::streams::{device_of, per_thread};
use crate::driver_calls::{captures, device_count, driver};
use crate::location::{ChargeTo, MemLocation, MemProperties, charge_to};
use crate::pools::{POOLS, Pool};
use crate::session_state::state;

/// `CU_MEM_HANDLE_TYPE_FABRIC`.
pub(crate) const HANDLE_TYPE_FABRIC: c_int = 8;

/// Allocates from the pool of the stream's device.
fn allocate_from_device(
    pointer: *mut u64,
    bytes: usize,
    stream: u64,
    function: &str,
    driver_call: impl Fn(*mut u64) -> CuResult,
) -> CuResult {
    let pool = device_of(stream).and_then(pool_of);
    allocate(pool.ok(), pointer, bytes, stream, function, driver_call)
}

/// Allocates from a pool. The driver returns its own error for a null pointer, zero bytes, or an
/// unknown pool or stream.
fn allocate(
    pool: Option<&'static Pool>,
    pointer: *mut u64,
    bytes: usize,
    stream: u64,
    function: &str,
    driver_call: impl Fn(*mut u64) -> CuResult,
) -> CuResult {
    let Some(pool) = pool.filter(|_| !pointer.is_null() && bytes != 0) else {
        return driver_call(pointer);
    };
    if pool.is_destroyed() {
        return curesult::INVALID_VALUE;
    }
    if !pool.is_charged() || captures::is_capturing(stream) {
        return driver_call(pointer);
    }
    let call = || {
        let mut allocated = 0;
        match driver_call(&raw mut allocated) {
            curesult::SUCCESS => Ok(allocated),
            code => Err(code),
        }
    };
    let hand_out = |allocated: Result<u64, CuResult>| match allocated {
        Ok(allocated) => {
            ALLOC_TABLE.note_pool_pointer(allocated);
            // SAFETY: not null, and by the prototype a pointer of this type.
            unsafe { pointer.write(allocated) };
            curesult::SUCCESS
        }
        Err(code) => code,
    };
    match pool.allocate_prefetched(bytes as u64, function, call) {
        Some(allocated) => hand_out(allocated),
        None => outermost(
            || hand_out(pool.allocate(bytes as u64, function, call)),
            || driver_call(pointer),
        ),
    }
}

/// Frees in stream order. Memory of a pool returns to the pool. A linear pointer is forgotten
/// before the call, because another thread may get the same address after it.
fn free(pointer: u64, stream: u64, driver_call: impl Fn() -> CuResult) -> CuResult {
    match state().and_then(|_| ALLOC_TABLE.remove(pointer)) {
        None => driver_call(),
        Some(charge) => free_linear(pointer, charge, stream, driver_call),
    }
}

#[inline(never)]
fn free_linear(
    pointer: u64,
    charge: Charge,
    stream: u64,
    driver_call: impl Fn() -> CuResult,
) -> CuResult {
    let answer = driver_call();
    if answer == curesult::SUCCESS {
        deferred_free::add(stream, pointer, charge);
    } else {
        // The driver did not free the memory, so the charge stays.
        let _ = ALLOC_TABLE.insert(pointer, charge);
    }
    answer
}

/// Returns the pool that a device allocates from.
fn pool_of(device: c_int) -> Result<&'static Pool, CuResult> {
    // The state comes first, because it resets the pools in a forked child.
    let _ = state();
    if let Some(known) = POOLS.current_pool(device) {
        return Ok(known);
    }
    query_pool_of(device)
}

#[cold]
fn query_pool_of(device: c_int) -> Result<&'static Pool, CuResult> {
    let mut handle = 0;
    match driver!(cuDeviceGetMemPool(&raw mut handle => *mut u64, device => c_int)) {
        curesult::SUCCESS => {
            let pool = POOLS.register(handle, ChargeTo::Account(Account::Device(device)));
            POOLS.set_current_pool(device, Some(pool));
            Ok(pool)
        }
        code => Err(code),
    }
}

/// Returns the pool with a handle: one of this process, or a device's own.
fn pool_with(handle: u64) -> Option<&'static Pool> {
    let _ = state();
    if let Some(known) = POOLS.find(handle) {
        return Some(known);
    }
    let device = (0..device_count()).find(|device| default_pool(*device) == Some(handle))?;
    Some(POOLS.register(handle, ChargeTo::Account(Account::Device(device))))
}

fn default_pool(device: c_int) -> Option<u64> {
    let mut handle = 0;
    let code = driver!(cuDeviceGetDefaultMemPool(&raw mut handle => *mut u64, device => c_int));
    (code == curesult::SUCCESS).then_some(handle)
}

/// Registers a pool that the driver just returned.
///
/// # Safety
/// After success the pointers are null or can be read.
unsafe fn register_reported(
    answer: CuResult,
    pool: *const u64,
    location: *const MemLocation,
    kind: c_int,
) -> CuResult {
    if answer == curesult::SUCCESS
        && state().is_some()
        // SAFETY: the caller guarantees it where the call has succeeded.
        && let (Some(handle), Some(location)) = unsafe { (pool.as_ref(), location.as_ref()) }
    {
        POOLS.register(*handle, charge_to(kind, *location));
    }
    answer
}

/// Notes the pool that a device allocates from after a successful call.
fn note_current_pool(answer: CuResult, device: c_int, pool: u64) -> CuResult {
    if answer == curesult::SUCCESS && state().is_some() {
        POOLS.set_current_pool(device, pool_with(pool));
    }
    answer
}

/// Destroys a pool. A device that allocated from it returns to its own pool.
fn destroy(handle: u64, driver_call: impl Fn() -> CuResult) -> CuResult {
    let own = (0..device_count()).any(|device| default_pool(device) == Some(handle));
    let Some(pool) = pool_with(handle).filter(|_| !own) else {
        return driver_call();
    };
    if pool.is_destroyed() {
        return curesult::INVALID_VALUE;
    }
    let answer = pool.destroy(driver_call);
    for device in 0..device_count() {
        if answer == curesult::SUCCESS
            && POOLS
                .current_pool(device)
                .is_some_and(|now| std::ptr::eq(now, pool))
        {
            POOLS.set_current_pool(device, None);
            let own = default_pool(device).unwrap_or(0);
            let _ = driver!(cuDeviceSetMemPool(device => c_int, own => u64));
        }
    }
    answer
}

hooks! {
    /// `cuMemAllocAsync` (CUDA 11.2).
    reentrant fn cuMemAllocAsync(pointer: *mut u64, bytes: usize, stream: u64) = |driver_call| {
        allocate_from_device(pointer, bytes, stream, "cuMemAllocAsync", |pointer| driver_call(pointer, bytes, stream))
    };

    /// `cuMemAllocAsync` for the per-thread default stream.
    reentrant fn cuMemAllocAsync_ptsz(pointer: *mut u64, bytes: usize, stream: u64) = |driver_call| {
        let driver_call = |pointer| driver_call(pointer, bytes, stream);
        allocate_from_device(pointer, bytes, per_thread(stream), "cuMemAllocAsync_ptsz", driver_call)
    };

    /// `cuMemAllocFromPoolAsync` (CUDA 11.2).
    reentrant fn cuMemAllocFromPoolAsync(pointer: *mut u64, bytes: usize, pool: u64, stream: u64) = |driver_call| {
        let driver_call = |pointer| driver_call(pointer, bytes, pool, stream);
        allocate(pool_with(pool), pointer, bytes, stream, "cuMemAllocFromPoolAsync", driver_call)
    };

    /// `cuMemAllocFromPoolAsync` for the per-thread default stream.
    reentrant fn cuMemAllocFromPoolAsync_ptsz(pointer: *mut u64, bytes: usize, pool: u64, stream: u64) = |driver_call| {
        let driver_call = |pointer| driver_call(pointer, bytes, pool, stream);
        let name = "cuMemAllocFromPoolAsync_ptsz";
        allocate(pool_with(pool), pointer, bytes, per_thread(stream), name, driver_call)
    };

    /// `cuMemFreeAsync` (CUDA 11.2): of linear memory too.
    reentrant fn cuMemFreeAsync(pointer: u64, stream: u64) = |driver_call| free(pointer, stream, || driver_call(pointer, stream));

    /// `cuMemFreeAsync` for the per-thread default stream.
    reentrant fn cuMemFreeAsync_ptsz(pointer: u64, stream: u64) = |driver_call| {
        free(pointer, per_thread(stream), || driver_call(pointer, stream))
    };

    /// `cuMemPoolCreate` (CUDA 11.2): takes no memory.
    fn cuMemPoolCreate(pool: *mut u64, properties: *const MemProperties) = |driver_call| {
        let answer = driver_call(pool, properties);
        if answer == curesult::SUCCESS
            && state().is_some()
            // SAFETY: null, or the driver has just written the handle and read the properties.
            && let (Some(pool), Some(properties)) = unsafe { (pool.as_ref(), properties.as_ref()) }
        {
            POOLS.created(*pool, properties.charge_to());
        }
        answer
    };

    /// `cuMemPoolDestroy` (CUDA 11.2): the driver keeps a pool's memory until its last allocation
    /// is freed.
    fn cuMemPoolDestroy(pool: u64) = |driver_call| destroy(pool, || driver_call(pool));

    /// `cuMemPoolTrimTo` (CUDA 11.2).
    fn cuMemPoolTrimTo(pool: u64, keep: usize) = |driver_call| {
        let answer = driver_call(pool, keep);
        if let Some(pool) = POOLS.find(pool) {
            pool.reconcile_now();
        }
        answer
    };

    /// `cuDeviceSetMemPool` (CUDA 11.2).
    fn cuDeviceSetMemPool(device: c_int, pool: u64) = |driver_call| {
        if POOLS.find(pool).is_some_and(Pool::is_destroyed) {
            return curesult::INVALID_VALUE;
        }
        note_current_pool(driver_call(device, pool), device, pool)
    };

    /// `cuMemSetMemPool` (CUDA 13.0): for a device's own memory the same as `cuDeviceSetMemPool`.
    fn cuMemSetMemPool(location: *mut MemLocation, kind: c_int, pool: u64) = |driver_call| {
        if POOLS.find(pool).is_some_and(Pool::is_destroyed) {
            return curesult::INVALID_VALUE;
        }
        let answer = driver_call(location, kind, pool);
        if answer != curesult::SUCCESS {
            return answer;
        }
        // SAFETY: null, or the driver has just read it.
        match unsafe { location.as_ref() }.map(|location| charge_to(kind, *location)) {
            Some(ChargeTo::Account(Account::Device(device))) => note_current_pool(answer, device, pool),
            _ => answer,
        }
    };

    /// `cuMemGetDefaultMemPool` (CUDA 13.0).
    fn cuMemGetDefaultMemPool(pool: *mut u64, location: *mut MemLocation, kind: c_int) = |driver_call| {
        // SAFETY: the driver reads and writes them before it answers success.
        unsafe { register_reported(driver_call(pool, location, kind), pool, location, kind) }
    };

    /// `cuMemGetMemPool` (CUDA 13.0).
    fn cuMemGetMemPool(pool: *mut u64, location: *mut MemLocation, kind: c_int) = |driver_call| {
        // SAFETY: the driver reads and writes them before it answers success.
        unsafe { register_reported(driver_call(pool, location, kind), pool, location, kind) }
    };

    /// `cuMemPoolExportToShareableHandle` (CUDA 11.2). Fabric handles are refused, because other
    /// nodes and pods could import them.
    fn cuMemPoolExportToShareableHandle(shared: *mut c_void, pool: u64, kind: c_int, flags: u64) = |driver_call| {
        if kind == HANDLE_TYPE_FABRIC {
            return curesult::NOT_PERMITTED;
        }
        match pool_with(pool) {
            Some(known) => known.with_export(|| driver_call(shared, pool, kind, flags)),
            None => driver_call(shared, pool, kind, flags),
        }
    };
}
