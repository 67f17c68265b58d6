//! Charges a context before it is created, and discharges it with its allocations when it is
//! destroyed.
//!
//! The agent measures what a context takes and writes it into the page; the first context of a
//! process measures it again. The call that makes a primary context active is charged for it.
//!
//! Source: `cuCtxDestroy` in cuda.h, "these resources also include memory allocations by
//! cuMemAlloc(), cuMemAllocHost(), cuMemAllocManaged() and cuMemAllocPitch()".
#![allow(non_snake_case)]

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::MutexGuard;

use super::{allocate, context_registry, hooks, managed_variables};
use crate::accounting::{self, ALLOC_TABLE, Account, Denied, PendingCharge};
use crate::curesult::{self, CuResult};
use crate::driver_calls::context_ids::{context_id, current_id, id_of_handle};
use crate::driver_calls::{captures, device_count, driver};
use crate::fork_local::ForkLocal;
use crate::forward::{self, index};
use crate::session_state::{MAX_DEVICES, state};
use crate::{graph_nodes, graphs};

/// Returns whether a device's primary context is active.
fn primary_is_active(device: c_int) -> bool {
    let (mut flags, mut active) = (0, 0);
    let code = driver!(cuDevicePrimaryCtxGetState(
        device => c_int, &raw mut flags => *mut c_uint, &raw mut active => *mut c_int,
    ));
    code == curesult::SUCCESS && active != 0
}

/// Returns the id of a device's primary context, if it is active. Retained for the query, so that
/// the context cannot end meanwhile.
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

/// Releases a primary context, by the function that the driver has.
fn release_primary(device: c_int) -> CuResult {
    match forward::FUNCTIONS.get(index::cuDevicePrimaryCtxRelease_v2) {
        Some(_) => driver!(cuDevicePrimaryCtxRelease_v2(device => c_int)),
        None => driver!(cuDevicePrimaryCtxRelease(device => c_int)),
    }
}

/// Makes a call that destroys a context. Its pointers are forgotten before the call, because
/// another thread may get the same addresses after it.
fn destroy(context: Option<u64>, call: impl FnOnce() -> CuResult) -> CuResult {
    let Some(context) = context.filter(|_| crate::session_state::state().is_some()) else {
        return call();
    };
    let (pointers, itself) = (
        ALLOC_TABLE.remove_context(context),
        context_registry::remove(context),
    );
    let answer = graphs::with_trim(call);
    if answer == curesult::SUCCESS {
        captures::end_context(context);
        managed_variables::end_context(context);
        graph_nodes::end_context(context);
    }
    match itself {
        Some(itself) if answer == curesult::SUCCESS => itself.discharge(),
        Some(itself) => context_registry::reinsert(itself),
        None => {}
    }
    for (pointer, charge) in pointers {
        if answer == curesult::SUCCESS {
            accounting::discharge(charge);
        } else {
            // The driver did not destroy the context, so its charges stay.
            let _ = ALLOC_TABLE.insert(pointer, charge);
        }
    }
    answer
}

/// Makes a call that destroys a primary context, even one that others have retained.
fn reset_primary(device: c_int, call: impl FnOnce() -> CuResult) -> CuResult {
    let _alone = lock_primary(device);
    destroy(primary_id(device), call)
}

/// Makes a call that destroys a primary context if it was retained only once.
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

/// Makes a call that destroys the current context if it has no other user. Only then the context is
/// no longer current (measured on an H200).
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

/// Makes a call that destroys a green context. Its device is forgotten before the call, because
/// another thread may get the same handle after it.
fn destroy_green(
    devices: &ForkLocal<BTreeMap<u64, c_int>>,
    green: u64,
    call: impl FnOnce() -> CuResult,
) -> CuResult {
    let call = || accounting::free(green, call);
    let Some(device) = state().and_then(|_| devices.lock().remove(&green)) else {
        return call();
    };
    let answer = release_checked(device, call);
    if answer != curesult::SUCCESS {
        devices.lock().insert(green, device);
    }
    answer
}

/// Discharges a context that was destroyed, and its allocations.
fn discharge_context(context: u64) {
    if crate::session_state::state().is_none() {
        return;
    }
    captures::end_context(context);
    managed_variables::end_context(context);
    graph_nodes::end_context(context);
    for (_, charge) in ALLOC_TABLE.remove_context(context) {
        accounting::discharge(charge);
    }
    if let Some(itself) = context_registry::remove(context) {
        itself.discharge();
    }
}

/// Bytes that a green context takes for itself, as measured on an H200.
const GREEN_CONTEXT_BYTES: u64 = 6 << 20;

/// Charges a context before its creation; nothing where contexts are not charged.
fn charge_context(device: c_int, function: &str) -> Result<Option<PendingCharge>, Denied> {
    match accounting::context_size(device)? {
        0 => Ok(None),
        bytes => accounting::charge(Account::Device(device), bytes, function).map(Some),
    }
}

/// Adjusts the charge of a created context to the measured size, and registers it.
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

/// Returns whether the driver has a device. For any other the driver's own error is returned.
fn device_exists(device: c_int) -> bool {
    (0..device_count()).contains(&device)
}

/// Charges and creates a context.
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
    // SAFETY: not null, and by the prototype a place for a handle.
    unsafe { out.write(handle) };
    curesult::SUCCESS
}

/// Serializes the calls that activate or destroy a device's primary context. Of threads that
/// activate it together one is charged; of those that release it together the last discharges it.
static PRIMARY_LOCKS: [ForkLocal<()>; MAX_DEVICES] = [const { ForkLocal::new() }; MAX_DEVICES];

/// The device of each green context.
static GREEN_CONTEXTS: ForkLocal<BTreeMap<u64, c_int>> = ForkLocal::new();

/// Forgets the parent's contexts and locks, in a forked child.
pub(crate) fn reset() {
    PRIMARY_LOCKS.iter().for_each(ForkLocal::reset);
    GREEN_CONTEXTS.reset();
}

/// Keeps other threads from activating or destroying a device's primary context.
fn lock_primary(device: c_int) -> Option<MutexGuard<'static, ()>> {
    let place = usize::try_from(device).ok()?;
    // The state comes first, because it resets the locks in a forked child.
    state()?;
    PRIMARY_LOCKS.get(place).map(ForkLocal::lock)
}

/// Makes a call that activates a device's primary context, and charges the context unless it is
/// active. `undo` reverses the call.
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
        let created = || unsafe { out.read() };
        let undo = || accounting::free(created(), || destroy(created()));
        let answer = activate_primary(device, "cuGreenCtxCreate", call, undo);
        if answer == curesult::SUCCESS {
            GREEN_CONTEXTS.lock().insert(created(), device);
        }
        answer
    };
    /// `cuGreenCtxDestroy` (CUDA 12.4): it may have been the last user of the primary context.
    fn cuGreenCtxDestroy(green: u64) = |driver_call| destroy_green(&GREEN_CONTEXTS, green, || driver_call(green));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn green_context_keeps_its_device_when_its_end_fails() {
        let devices = ForkLocal::<BTreeMap<u64, c_int>>::new();
        devices.lock().insert(7, 0);
        for (answer, kept) in [(curesult::UNKNOWN, Some(&0)), (curesult::SUCCESS, None)] {
            assert_eq!(destroy_green(&devices, 7, || answer), answer);
            assert_eq!(devices.lock().get(&7), kept);
        }
    }
}
