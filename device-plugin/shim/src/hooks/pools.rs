//! Stream-ordered memory: allocations, frees and pools.
//!
//! An allocation in a stream that is being captured becomes a node of a graph, and takes nothing now.
//!
//! Where a pool was charged ahead, whether a hook is inside another one does not matter: what the pool has
//! reserved is what counts in the end.
#![allow(non_snake_case)]

use std::ffi::{c_int, c_void};

use super::streams::{device_of, per_thread};
use super::{captures, device_count, hooks, outermost, real};
use crate::codes::{self, CuResult};
use crate::leaving;
use crate::ledger::{Kind, LIVE};
use crate::live::Charge;
use crate::place::{Location, Payer, Properties, payer};
use crate::pools::{POOLS, Pool};
use crate::state::state;

/// `CU_MEM_HANDLE_TYPE_FABRIC`.
pub(crate) const FABRIC: c_int = 8;

/// Allocates from the pool of the stream's device.
fn from_device(
    pointer: *mut u64,
    bytes: usize,
    stream: u64,
    function: &str,
    plain: impl Fn(*mut u64) -> CuResult,
) -> CuResult {
    let pool = device_of(stream).and_then(pool_of);
    allocate(pool.ok(), pointer, bytes, stream, function, plain)
}

/// Allocates from a pool. What the driver refuses anyway, it refuses itself: no pointer, no bytes, no
/// such pool or stream.
fn allocate(
    pool: Option<&'static Pool>,
    pointer: *mut u64,
    bytes: usize,
    stream: u64,
    function: &str,
    plain: impl Fn(*mut u64) -> CuResult,
) -> CuResult {
    let Some(pool) = pool.filter(|_| !pointer.is_null() && bytes != 0) else {
        return plain(pointer);
    };
    if pool.has_ended() {
        return codes::INVALID_VALUE;
    }
    if !pool.is_charged() || captures::is_capturing(stream) {
        return plain(pointer);
    }
    let call = || {
        let mut got = 0;
        match plain(&raw mut got) {
            codes::SUCCESS => Ok(got),
            code => Err(code),
        }
    };
    let hand_out = |got: Result<u64, CuResult>| match got {
        Ok(got) => {
            LIVE.is_elsewhere(got);
            // SAFETY: not null, and the program says that it is a pointer of this type.
            unsafe { pointer.write(got) };
            codes::SUCCESS
        }
        Err(code) => code,
    };
    match pool.allocate_ahead(bytes as u64, call) {
        Some(got) => hand_out(got),
        None => outermost(
            || hand_out(pool.allocate(bytes as u64, function, call)),
            || plain(pointer),
        ),
    }
}

/// Frees in the order of a stream. What pools gave out only goes back to them; a linear pointer is
/// forgotten first: once it is freed, another thread may be given the same one.
fn free(pointer: u64, stream: u64, plain: impl Fn() -> CuResult) -> CuResult {
    match state().and_then(|_| LIVE.remove(pointer)) {
        None => plain(),
        Some(charge) => free_linear(pointer, charge, stream, plain),
    }
}

#[inline(never)]
fn free_linear(
    pointer: u64,
    charge: Charge,
    stream: u64,
    plain: impl Fn() -> CuResult,
) -> CuResult {
    let answer = plain();
    if answer == codes::SUCCESS {
        leaving::add(stream, charge);
    } else {
        // Not freed, so still there.
        let _ = LIVE.insert(pointer, charge);
    }
    answer
}

/// The pool that a device allocates from.
fn pool_of(device: c_int) -> Result<&'static Pool, CuResult> {
    // The state first: a forked child forgets its parent's pools with it.
    let _ = state();
    if let Some(known) = POOLS.present(device) {
        return Ok(known);
    }
    ask_pool_of(device)
}

#[cold]
fn ask_pool_of(device: c_int) -> Result<&'static Pool, CuResult> {
    let mut handle = 0;
    match real!(cuDeviceGetMemPool(&raw mut handle => *mut u64, device => c_int)) {
        codes::SUCCESS => {
            let pool = POOLS.enter(handle, Payer::Account(Kind::Device(device)));
            POOLS.set_present(device, Some(pool));
            Ok(pool)
        }
        code => Err(code),
    }
}

/// The pool with a handle: made by this process, or a device's own.
fn pool_with(handle: u64) -> Option<&'static Pool> {
    let _ = state();
    if let Some(known) = POOLS.find(handle) {
        return Some(known);
    }
    let device = (0..device_count()).find(|device| default_pool(*device) == Some(handle))?;
    Some(POOLS.enter(handle, Payer::Account(Kind::Device(device))))
}

fn default_pool(device: c_int) -> Option<u64> {
    let mut handle = 0;
    let code = real!(cuDeviceGetDefaultMemPool(&raw mut handle => *mut u64, device => c_int));
    (code == codes::SUCCESS).then_some(handle)
}

/// Enters a pool that the driver just told of.
///
/// # Safety
/// After success the pointers can be read.
unsafe fn told(
    answer: CuResult,
    pool: *const u64,
    location: *const Location,
    kind: c_int,
) -> CuResult {
    if answer == codes::SUCCESS && state().is_some() {
        // SAFETY: the caller's promise.
        let (handle, location) = unsafe { (*pool, *location) };
        POOLS.enter(handle, payer(kind, location));
    }
    answer
}

/// Notes which pool a device allocates from now.
fn chosen(answer: CuResult, device: c_int, pool: u64) -> CuResult {
    if answer == codes::SUCCESS && state().is_some() {
        POOLS.set_present(device, pool_with(pool));
    }
    answer
}

/// Destroys a pool; a device that allocated from it goes back to its own.
fn destroy(handle: u64, plain: impl Fn() -> CuResult) -> CuResult {
    let own = (0..device_count()).any(|device| default_pool(device) == Some(handle));
    let Some(pool) = pool_with(handle).filter(|_| !own) else {
        return plain();
    };
    if pool.has_ended() {
        return codes::INVALID_VALUE;
    }
    let answer = pool.destroy(plain);
    for device in 0..device_count() {
        if answer == codes::SUCCESS
            && POOLS
                .present(device)
                .is_some_and(|now| std::ptr::eq(now, pool))
        {
            POOLS.set_present(device, None);
            let own = default_pool(device).unwrap_or(0);
            let _ = real!(cuDeviceSetMemPool(device => c_int, own => u64));
        }
    }
    answer
}

hooks! {
    /// `cuMemAllocAsync` (CUDA 11.2).
    anywhere fn cuMemAllocAsync(pointer: *mut u64, bytes: usize, stream: u64) = |plain| {
        from_device(pointer, bytes, stream, "cuMemAllocAsync", |pointer| plain(pointer, bytes, stream))
    };

    /// As above, for a default stream of each thread.
    anywhere fn cuMemAllocAsync_ptsz(pointer: *mut u64, bytes: usize, stream: u64) = |plain| {
        let plain = |pointer| plain(pointer, bytes, stream);
        from_device(pointer, bytes, per_thread(stream), "cuMemAllocAsync_ptsz", plain)
    };

    /// `cuMemAllocFromPoolAsync` (CUDA 11.2).
    anywhere fn cuMemAllocFromPoolAsync(pointer: *mut u64, bytes: usize, pool: u64, stream: u64) = |plain| {
        let plain = |pointer| plain(pointer, bytes, pool, stream);
        allocate(pool_with(pool), pointer, bytes, stream, "cuMemAllocFromPoolAsync", plain)
    };

    /// As above, for a default stream of each thread.
    anywhere fn cuMemAllocFromPoolAsync_ptsz(pointer: *mut u64, bytes: usize, pool: u64, stream: u64) = |plain| {
        let plain = |pointer| plain(pointer, bytes, pool, stream);
        let name = "cuMemAllocFromPoolAsync_ptsz";
        allocate(pool_with(pool), pointer, bytes, per_thread(stream), name, plain)
    };

    /// `cuMemFreeAsync` (CUDA 11.2): of linear memory too.
    anywhere fn cuMemFreeAsync(pointer: u64, stream: u64) = |plain| free(pointer, stream, || plain(pointer, stream));

    /// As above, for a default stream of each thread.
    anywhere fn cuMemFreeAsync_ptsz(pointer: u64, stream: u64) = |plain| {
        free(pointer, per_thread(stream), || plain(pointer, stream))
    };

    /// `cuMemPoolCreate` (CUDA 11.2): takes nothing.
    fn cuMemPoolCreate(pool: *mut u64, properties: *const Properties) = |plain| {
        let answer = plain(pool, properties);
        if answer == codes::SUCCESS && state().is_some() {
            // SAFETY: the driver has just written the one and read the other.
            unsafe { POOLS.made(*pool, (*properties).payer()) };
        }
        answer
    };

    /// `cuMemPoolDestroy` (CUDA 11.2): the driver keeps a pool's memory until the last of it is freed.
    fn cuMemPoolDestroy(pool: u64) = |plain| destroy(pool, || plain(pool));

    /// `cuMemPoolTrimTo` (CUDA 11.2).
    fn cuMemPoolTrimTo(pool: u64, keep: usize) = |plain| {
        let answer = plain(pool, keep);
        if let Some(pool) = POOLS.find(pool) {
            pool.settle_now();
        }
        answer
    };

    /// `cuDeviceSetMemPool` (CUDA 11.2).
    fn cuDeviceSetMemPool(device: c_int, pool: u64) = |plain| {
        if POOLS.find(pool).is_some_and(Pool::has_ended) {
            return codes::INVALID_VALUE;
        }
        chosen(plain(device, pool), device, pool)
    };

    /// `cuMemSetMemPool` (CUDA 13.0): for a device's own memory the same as `cuDeviceSetMemPool`.
    fn cuMemSetMemPool(location: *mut Location, kind: c_int, pool: u64) = |plain| {
        if POOLS.find(pool).is_some_and(Pool::has_ended) {
            return codes::INVALID_VALUE;
        }
        let answer = plain(location, kind, pool);
        if answer != codes::SUCCESS {
            return answer;
        }
        // SAFETY: the driver has just read it.
        match payer(kind, unsafe { *location }) {
            Payer::Account(Kind::Device(device)) => chosen(answer, device, pool),
            _ => answer,
        }
    };

    /// `cuMemGetDefaultMemPool` (CUDA 13.0).
    fn cuMemGetDefaultMemPool(pool: *mut u64, location: *mut Location, kind: c_int) = |plain| {
        // SAFETY: the driver reads and writes them before it answers success.
        unsafe { told(plain(pool, location, kind), pool, location, kind) }
    };

    /// `cuMemGetMemPool` (CUDA 13.0).
    fn cuMemGetMemPool(pool: *mut u64, location: *mut Location, kind: c_int) = |plain| {
        // SAFETY: the driver reads and writes them before it answers success.
        unsafe { told(plain(pool, location, kind), pool, location, kind) }
    };

    /// `cuMemPoolExportToShareableHandle` (CUDA 11.2). A fabric handle is for other nodes and pods.
    fn cuMemPoolExportToShareableHandle(shared: *mut c_void, pool: u64, kind: c_int, flags: u64) = |plain| {
        if kind == FABRIC {
            return codes::NOT_PERMITTED;
        }
        match pool_with(pool) {
            Some(known) => known.exporting(|| plain(shared, pool, kind, flags)),
            None => plain(shared, pool, kind, flags),
        }
    };
}
