//! Contexts: what one takes is charged before it is made, and given back with all that was allocated in
//! it when it ends.
//!
//! What a context takes is measured by the agent and stands in the page; the first context of a process
//! measures it again. A primary context is charged by whatever makes it active first.
//!
//! Source: `cuCtxDestroy` in cuda.h, "these resources also include memory allocations by
//! cuMemAlloc(), cuMemAllocHost(), cuMemAllocManaged() and cuMemAllocPitch()".
#![allow(non_snake_case)]

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::MutexGuard;

use super::{allocate, context_registry, device_count, driver, hooks};
use crate::accounting::{self, ALLOC_TABLE, Account, Denied, PendingCharge};
use crate::curesult::{self, CuResult};
use crate::fork_local::ForkLocal;
use crate::forward::{self, index};
use crate::graphs;
use crate::session_state::{MAX_DEVICES, state};

/// The calling thread's context; zero where there is none.
pub(crate) fn current_id() -> u64 {
    context_id(0).unwrap_or(0)
}

/// What tells a context from all others of this process: the driver's number for it (CUDA 12.0),
/// which never comes again, and before that its handle, which may. Handle zero is the current
/// context.
fn context_id(handle: u64) -> Option<u64> {
    let mut name = 0;
    let code = if forward::driver_function(index::cuCtxGetId).is_some() {
        driver!(cuCtxGetId(handle => u64, &raw mut name => *mut u64))
    } else if handle == 0 {
        driver!(cuCtxGetCurrent(&raw mut name => *mut u64))
    } else {
        name = handle;
        curesult::SUCCESS
    };
    (code == curesult::SUCCESS && name != 0).then_some(name)
}

/// Whether a device's primary context lives.
fn primary_is_active(device: c_int) -> bool {
    let (mut flags, mut active) = (0, 0);
    let code = driver!(cuDevicePrimaryCtxGetState(
        device => c_int, &raw mut flags => *mut c_uint, &raw mut active => *mut c_int,
    ));
    code == curesult::SUCCESS && active != 0
}

/// The primary context of a device, if it lives. Whoever retained it, it cannot end while it is
/// asked for its name.
fn primary_id(device: c_int) -> Option<u64> {
    let mut handle = 0;
    if !primary_is_active(device) {
        return None;
    }
    if driver!(cuDevicePrimaryCtxRetain(&raw mut handle => *mut u64, device => c_int))
        != curesult::SUCCESS
    {
        return None;
    }
    let name = context_id(handle);
    release_primary(device);
    name
}

/// Releases a primary context, in the form that the driver has.
fn release_primary(device: c_int) -> CuResult {
    match forward::driver_function(index::cuDevicePrimaryCtxRelease_v2) {
        Some(_) => driver!(cuDevicePrimaryCtxRelease_v2(device => c_int)),
        None => driver!(cuDevicePrimaryCtxRelease(device => c_int)),
    }
}

/// Calls what ends a context for certain. Its pointers are forgotten first: once they are freed,
/// another thread may be given the same ones.
fn destroy(context: Option<u64>, call: impl FnOnce() -> CuResult) -> CuResult {
    let Some(context) = context.filter(|_| crate::session_state::state().is_some()) else {
        return call();
    };
    let (pointers, itself) = (
        ALLOC_TABLE.remove_context(context),
        context_registry::remove(context),
    );
    let answer = graphs::with_trim(call);
    match itself {
        Some(itself) if answer == curesult::SUCCESS => itself.discharge(),
        Some(itself) => context_registry::reinsert(itself),
        None => {}
    }
    for (pointer, charge) in pointers {
        if answer == curesult::SUCCESS {
            accounting::discharge(charge);
        } else {
            // Not ended, so still there.
            let _ = ALLOC_TABLE.insert(pointer, charge);
        }
    }
    answer
}

/// Calls what ends a primary context, whoever has retained it.
fn reset_primary(device: c_int, call: impl FnOnce() -> CuResult) -> CuResult {
    let _alone = lock_primary(device);
    destroy(primary_id(device), call)
}

/// Calls what ends a primary context if nobody else has retained it.
fn release_checked(device: c_int, call: impl FnOnce() -> CuResult) -> CuResult {
    let _alone = lock_primary(device);
    let before = primary_id(device);
    let answer = graphs::with_trim(call);
    if let (curesult::SUCCESS, Some(context)) = (answer, before)
        && primary_id(device) != Some(context)
    {
        discharge_context(context);
    }
    answer
}

/// Calls what ends the current context if it has no other user. It is current no more then, and otherwise still
/// is (measured on an H200).
fn detach(handle: u64, call: impl FnOnce() -> CuResult) -> CuResult {
    let before = id_of_handle(handle);
    let answer = graphs::with_trim(call);
    if let (curesult::SUCCESS, Some(context)) = (answer, before)
        && current_id() != context
    {
        discharge_context(context);
    }
    answer
}

/// Gives back what a context that has ended was charged.
fn discharge_context(context: u64) {
    if crate::session_state::state().is_none() {
        return;
    }
    for (_, charge) in ALLOC_TABLE.remove_context(context) {
        accounting::discharge(charge);
    }
    if let Some(itself) = context_registry::remove(context) {
        itself.discharge();
    }
}

/// What a green context takes of its own, as measured on an H200.
const GREEN_CONTEXT_BYTES: u64 = 6 << 20;

/// Charges a context that is about to be made; nothing where contexts are not charged.
fn charge_context(device: c_int, function: &str) -> Result<Option<PendingCharge>, Denied> {
    match accounting::context_size(device)? {
        0 => Ok(None),
        bytes => accounting::charge(Account::Device(device), bytes, function).map(Some),
    }
}

/// Settles the charge of a context that was made.
fn register_context(
    name: u64,
    device: c_int,
    mut own: Option<PendingCharge>,
) -> Result<(), Denied> {
    if let Some(own) = &mut own
        && let Some(bytes) = accounting::report_context(device)
    {
        own.adjust(bytes)?;
    }
    context_registry::created(name, device, own)
}

/// Whether the driver has that device. Without it, the driver answers.
fn device_exists(device: c_int) -> bool {
    (0..device_count()).contains(&device)
}

/// Charges and makes a context.
fn create(
    out: *mut u64,
    device: c_int,
    function: &str,
    call: impl Fn(*mut u64) -> CuResult,
) -> CuResult {
    if out.is_null() || !device_exists(device) {
        return call(out);
    }
    let Ok(own) = charge_context(device, function) else {
        return curesult::OUT_OF_MEMORY;
    };
    let mut handle = 0;
    match call(&raw mut handle) {
        curesult::SUCCESS => {}
        code => return code,
    }
    let settled = context_id(handle).map_or(Ok(()), |name| register_context(name, device, own));
    if settled.is_err() {
        let _ = driver!(cuCtxDestroy_v2(handle => u64));
        return curesult::OUT_OF_MEMORY;
    }
    // SAFETY: not null, and the program says that it is a handle's place.
    unsafe { out.write(handle) };
    curesult::SUCCESS
}

/// Held by who makes the primary context of a device active, and by who may end it: of threads that start together
/// one is charged, and of those that release it together the last gives that back.
static PRIMARY_LOCKS: [ForkLocal<()>; MAX_DEVICES] = [const { ForkLocal::new() }; MAX_DEVICES];

/// The devices of green contexts.
static GREEN_CONTEXTS: ForkLocal<BTreeMap<u64, c_int>> = ForkLocal::new();

/// In a forked child: it has none of its parent's contexts, nor of its locks.
pub(crate) fn reset() {
    PRIMARY_LOCKS.iter().for_each(ForkLocal::reset);
    GREEN_CONTEXTS.reset();
}

/// Keeps other threads from making the primary context of a device active or ending it.
fn lock_primary(device: c_int) -> Option<MutexGuard<'static, ()>> {
    let place = usize::try_from(device).ok()?;
    // First: a forked child forgets that its parent held this.
    state()?;
    PRIMARY_LOCKS.get(place).map(ForkLocal::lock)
}

/// Calls what makes a device's primary context active, unless it is; `undo` takes the call back.
fn activate_primary(
    device: c_int,
    function: &str,
    call: impl Fn() -> CuResult,
    undo: impl Fn() -> CuResult,
) -> CuResult {
    let _alone = lock_primary(device);
    if !device_exists(device) || primary_is_active(device) {
        return call();
    }
    let Ok(own) = charge_context(device, function) else {
        return curesult::OUT_OF_MEMORY;
    };
    let answer = call();
    if answer != curesult::SUCCESS {
        return answer;
    }
    let settled = primary_id(device).map_or(Ok(()), |name| register_context(name, device, own));
    if settled.is_err() {
        let _ = undo();
        return curesult::OUT_OF_MEMORY;
    }
    answer
}

hooks! {
    /// `cuCtxCreate` (CUDA 2.0).
    fn cuCtxCreate(out: *mut u64, flags: c_uint, device: c_int) = |driver_call| {
        create(out, device, "cuCtxCreate", |out| driver_call(out, flags, device))
    };
    /// `cuCtxCreate` (CUDA 3.2).
    fn cuCtxCreate_v2(out: *mut u64, flags: c_uint, device: c_int) = |driver_call| {
        create(out, device, "cuCtxCreate_v2", |out| driver_call(out, flags, device))
    };
    /// `cuCtxCreate` (CUDA 11.4), with execution affinities.
    fn cuCtxCreate_v3(
        out: *mut u64,
        affinities: *mut c_void,
        count: c_int,
        flags: c_uint,
        device: c_int,
    ) = |driver_call| {
        create(out, device, "cuCtxCreate_v3", |out| driver_call(out, affinities, count, flags, device))
    };
    /// `cuCtxCreate` (CUDA 12.5), with parameters.
    fn cuCtxCreate_v4(out: *mut u64, parameters: *mut c_void, flags: c_uint, device: c_int) = |driver_call| {
        create(out, device, "cuCtxCreate_v4", |out| driver_call(out, parameters, flags, device))
    };
    /// `cuDevicePrimaryCtxRetain` (CUDA 7.0).
    fn cuDevicePrimaryCtxRetain(out: *mut u64, device: c_int) = |driver_call| {
        let undo = || release_primary(device);
        activate_primary(device, "cuDevicePrimaryCtxRetain", || driver_call(out, device), undo)
    };
    /// `cuGreenCtxCreate` (CUDA 12.4): it lives in the device's primary context.
    fn cuGreenCtxCreate(out: *mut u64, resources: u64, device: c_int, flags: c_uint) = |driver_call| {
        if out.is_null() || !device_exists(device) {
            return driver_call(out, resources, device, flags);
        }
        let destroy = |green: u64| driver!(cuGreenCtxDestroy(green => u64));
        let make = || match driver_call(out, resources, device, flags) {
            // SAFETY: not null, and the driver has just written it.
            curesult::SUCCESS => Ok((unsafe { out.read() }, GREEN_CONTEXT_BYTES)),
            code => Err(code),
        };
        let call = || allocate(Account::Device(device), GREEN_CONTEXT_BYTES, "cuGreenCtxCreate", make, destroy);
        // SAFETY: not null, and written if the call before succeeded.
        let made = || unsafe { out.read() };
        let undo = || accounting::free(made(), || destroy(made()));
        let answer = activate_primary(device, "cuGreenCtxCreate", call, undo);
        if answer == curesult::SUCCESS {
            GREEN_CONTEXTS.lock().insert(made(), device);
        }
        answer
    };
    /// `cuGreenCtxDestroy` (CUDA 12.4): it may have been the last user of the primary context.
    fn cuGreenCtxDestroy(green: u64) = |driver_call| {
        let device = state().and_then(|_| GREEN_CONTEXTS.lock().remove(&green));
        let call = || accounting::free(green, || driver_call(green));
        match device {
            Some(device) => release_checked(device, call),
            None => call(),
        }
    };
    /// `cuCtxDestroy` (CUDA 2.0).
    fn cuCtxDestroy(context: u64) = |driver_call| destroy(id_of_handle(context), || driver_call(context));
    /// `cuCtxDestroy` (CUDA 4.0).
    fn cuCtxDestroy_v2(context: u64) = |driver_call| destroy(id_of_handle(context), || driver_call(context));
    /// `cuCtxDetach` (CUDA 2.0).
    fn cuCtxDetach(context: u64) = |driver_call| detach(context, || driver_call(context));
    /// `cuDevicePrimaryCtxRelease` (CUDA 7.0).
    fn cuDevicePrimaryCtxRelease(device: c_int) = |driver_call| release_checked(device, || driver_call(device));
    /// `cuDevicePrimaryCtxRelease` (CUDA 11.0).
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) = |driver_call| release_checked(device, || driver_call(device));
    /// `cuDevicePrimaryCtxReset` (CUDA 7.0).
    fn cuDevicePrimaryCtxReset(device: c_int) = |driver_call| reset_primary(device, || driver_call(device));
    /// `cuDevicePrimaryCtxReset` (CUDA 11.0).
    fn cuDevicePrimaryCtxReset_v2(device: c_int) = |driver_call| reset_primary(device, || driver_call(device));
}

/// The name of a context that a program hands over; of no context where that is null.
fn id_of_handle(handle: u64) -> Option<u64> {
    if handle == 0 {
        None
    } else {
        context_id(handle)
    }
}
