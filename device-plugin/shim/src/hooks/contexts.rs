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

use super::{allocate, device_count, hooks, known, real};
use crate::afresh::Afresh;
use crate::codes::{self, CuResult};
use crate::forward::{self, index};
use crate::graphs;
use crate::ledger::{self, Denied, Kind, LIVE, Pending};
use crate::state::{MAX_DEVICES, state};

/// The calling thread's context; zero where there is none.
pub(crate) fn current() -> u64 {
    name_of(0).unwrap_or(0)
}

/// What tells a context from all others of this process: the driver's number for it (CUDA 12.0),
/// which never comes again, and before that its handle, which may. Handle zero is the current
/// context.
fn name_of(handle: u64) -> Option<u64> {
    let mut name = 0;
    let code = if forward::real(index::cuCtxGetId).is_some() {
        real!(cuCtxGetId(handle => u64, &raw mut name => *mut u64))
    } else if handle == 0 {
        real!(cuCtxGetCurrent(&raw mut name => *mut u64))
    } else {
        name = handle;
        codes::SUCCESS
    };
    (code == codes::SUCCESS && name != 0).then_some(name)
}

/// Whether a device's primary context lives.
fn is_active(device: c_int) -> bool {
    let (mut flags, mut active) = (0, 0);
    let code = real!(cuDevicePrimaryCtxGetState(
        device => c_int, &raw mut flags => *mut c_uint, &raw mut active => *mut c_int,
    ));
    code == codes::SUCCESS && active != 0
}

/// The primary context of a device, if it lives. Whoever retained it, it cannot end while it is
/// asked for its name.
fn primary(device: c_int) -> Option<u64> {
    let mut handle = 0;
    if !is_active(device) {
        return None;
    }
    if real!(cuDevicePrimaryCtxRetain(&raw mut handle => *mut u64, device => c_int))
        != codes::SUCCESS
    {
        return None;
    }
    let name = name_of(handle);
    release(device);
    name
}

/// Releases a primary context, in the form that the driver has.
fn release(device: c_int) -> CuResult {
    match forward::real(index::cuDevicePrimaryCtxRelease_v2) {
        Some(_) => real!(cuDevicePrimaryCtxRelease_v2(device => c_int)),
        None => real!(cuDevicePrimaryCtxRelease(device => c_int)),
    }
}

/// Calls what ends a context for certain. Its pointers are forgotten first: once they are freed,
/// another thread may be given the same ones.
fn ending(context: Option<u64>, call: impl FnOnce() -> CuResult) -> CuResult {
    let Some(context) = context.filter(|_| crate::state::state().is_some()) else {
        return call();
    };
    let (pointers, itself) = (LIVE.remove_context(context), known::ended(context));
    let answer = graphs::trimming(call);
    match itself {
        Some(itself) if answer == codes::SUCCESS => itself.discharge(),
        Some(itself) => known::lives(itself),
        None => {}
    }
    for (pointer, charge) in pointers {
        if answer == codes::SUCCESS {
            ledger::discharge(charge);
        } else {
            // Not ended, so still there.
            let _ = LIVE.insert(pointer, charge);
        }
    }
    answer
}

/// Calls what ends a primary context, whoever has retained it.
fn resetting(device: c_int, call: impl FnOnce() -> CuResult) -> CuResult {
    let _alone = alone(device);
    ending(primary(device), call)
}

/// Calls what ends a primary context if nobody else has retained it.
fn releasing(device: c_int, call: impl FnOnce() -> CuResult) -> CuResult {
    let _alone = alone(device);
    let before = primary(device);
    let answer = graphs::trimming(call);
    if let (codes::SUCCESS, Some(context)) = (answer, before)
        && primary(device) != Some(context)
    {
        gone(context);
    }
    answer
}

/// Calls what ends the current context if it has no other user. It is current no more then, and otherwise still
/// is (measured on an H200).
fn detaching(handle: u64, call: impl FnOnce() -> CuResult) -> CuResult {
    let before = named(handle);
    let answer = graphs::trimming(call);
    if let (codes::SUCCESS, Some(context)) = (answer, before)
        && current() != context
    {
        gone(context);
    }
    answer
}

/// Gives back what a context that has ended was charged.
fn gone(context: u64) {
    if crate::state::state().is_none() {
        return;
    }
    for (_, charge) in LIVE.remove_context(context) {
        ledger::discharge(charge);
    }
    if let Some(itself) = known::ended(context) {
        itself.discharge();
    }
}

/// What a green context takes of its own, as measured on an H200.
const GREEN_CONTEXT: u64 = 6 << 20;

/// Charges a context that is about to be made; nothing where contexts are not charged.
fn begin(device: c_int, function: &str) -> Result<Option<Pending>, Denied> {
    match ledger::context_size(device)? {
        0 => Ok(None),
        bytes => ledger::charge(Kind::Device(device), bytes, function).map(Some),
    }
}

/// Settles the charge of a context that was made.
fn settle(name: u64, device: c_int, mut own: Option<Pending>) -> Result<(), Denied> {
    if let Some(own) = &mut own
        && let Some(bytes) = ledger::context_made(device)
    {
        own.settle(bytes)?;
    }
    known::made(name, device, own)
}

/// Whether the driver has that device. Without it, the driver answers.
fn exists(device: c_int) -> bool {
    (0..device_count()).contains(&device)
}

/// Charges and makes a context.
fn making(
    out: *mut u64,
    device: c_int,
    function: &str,
    call: impl Fn(*mut u64) -> CuResult,
) -> CuResult {
    if out.is_null() || !exists(device) {
        return call(out);
    }
    let Ok(own) = begin(device, function) else {
        return codes::OUT_OF_MEMORY;
    };
    let mut handle = 0;
    match call(&raw mut handle) {
        codes::SUCCESS => {}
        code => return code,
    }
    let settled = name_of(handle).map_or(Ok(()), |name| settle(name, device, own));
    if settled.is_err() {
        let _ = real!(cuCtxDestroy_v2(handle => u64));
        return codes::OUT_OF_MEMORY;
    }
    // SAFETY: not null, and the program says that it is a handle's place.
    unsafe { out.write(handle) };
    codes::SUCCESS
}

/// Held by who makes the primary context of a device active, and by who may end it: of threads that start together
/// one is charged, and of those that release it together the last gives that back.
static PRIMARIES: [Afresh<()>; MAX_DEVICES] = [const { Afresh::new() }; MAX_DEVICES];

/// The devices of green contexts.
static GREEN: Afresh<BTreeMap<u64, c_int>> = Afresh::new();

/// In a forked child: it has none of its parent's contexts, nor of its locks.
pub(crate) fn forget() {
    PRIMARIES.iter().for_each(Afresh::forget);
    GREEN.forget();
}

/// Keeps other threads from making the primary context of a device active or ending it.
fn alone(device: c_int) -> Option<MutexGuard<'static, ()>> {
    let place = usize::try_from(device).ok()?;
    // First: a forked child forgets that its parent held this.
    state()?;
    PRIMARIES.get(place).map(Afresh::lock)
}

/// Calls what makes a device's primary context active, unless it is; `undo` takes the call back.
fn activating(
    device: c_int,
    function: &str,
    call: impl Fn() -> CuResult,
    undo: impl Fn() -> CuResult,
) -> CuResult {
    let _alone = alone(device);
    if !exists(device) || is_active(device) {
        return call();
    }
    let Ok(own) = begin(device, function) else {
        return codes::OUT_OF_MEMORY;
    };
    let answer = call();
    if answer != codes::SUCCESS {
        return answer;
    }
    let settled = primary(device).map_or(Ok(()), |name| settle(name, device, own));
    if settled.is_err() {
        let _ = undo();
        return codes::OUT_OF_MEMORY;
    }
    answer
}

hooks! {
    /// `cuCtxCreate` (CUDA 2.0).
    fn cuCtxCreate(out: *mut u64, flags: c_uint, device: c_int) = |plain| {
        making(out, device, "cuCtxCreate", |out| plain(out, flags, device))
    };
    /// `cuCtxCreate` (CUDA 3.2).
    fn cuCtxCreate_v2(out: *mut u64, flags: c_uint, device: c_int) = |plain| {
        making(out, device, "cuCtxCreate_v2", |out| plain(out, flags, device))
    };
    /// `cuCtxCreate` (CUDA 11.4), with execution affinities.
    fn cuCtxCreate_v3(
        out: *mut u64,
        affinities: *mut c_void,
        count: c_int,
        flags: c_uint,
        device: c_int,
    ) = |plain| {
        making(out, device, "cuCtxCreate_v3", |out| plain(out, affinities, count, flags, device))
    };
    /// `cuCtxCreate` (CUDA 12.5), with parameters.
    fn cuCtxCreate_v4(out: *mut u64, parameters: *mut c_void, flags: c_uint, device: c_int) = |plain| {
        making(out, device, "cuCtxCreate_v4", |out| plain(out, parameters, flags, device))
    };
    /// `cuDevicePrimaryCtxRetain` (CUDA 7.0).
    fn cuDevicePrimaryCtxRetain(out: *mut u64, device: c_int) = |plain| {
        let undo = || release(device);
        activating(device, "cuDevicePrimaryCtxRetain", || plain(out, device), undo)
    };
    /// `cuGreenCtxCreate` (CUDA 12.4): it lives in the device's primary context.
    fn cuGreenCtxCreate(out: *mut u64, resources: u64, device: c_int, flags: c_uint) = |plain| {
        if out.is_null() || !exists(device) {
            return plain(out, resources, device, flags);
        }
        let destroy = |green: u64| real!(cuGreenCtxDestroy(green => u64));
        let make = || match plain(out, resources, device, flags) {
            // SAFETY: not null, and the driver has just written it.
            codes::SUCCESS => Ok((unsafe { out.read() }, GREEN_CONTEXT)),
            code => Err(code),
        };
        let call = || allocate(Kind::Device(device), GREEN_CONTEXT, "cuGreenCtxCreate", make, destroy);
        // SAFETY: not null, and written if the call before succeeded.
        let made = || unsafe { out.read() };
        let undo = || ledger::free(made(), || destroy(made()));
        let answer = activating(device, "cuGreenCtxCreate", call, undo);
        if answer == codes::SUCCESS {
            GREEN.lock().insert(made(), device);
        }
        answer
    };
    /// `cuGreenCtxDestroy` (CUDA 12.4): it may have been the last user of the primary context.
    fn cuGreenCtxDestroy(green: u64) = |plain| {
        let device = state().and_then(|_| GREEN.lock().remove(&green));
        let call = || ledger::free(green, || plain(green));
        match device {
            Some(device) => releasing(device, call),
            None => call(),
        }
    };
    /// `cuCtxDestroy` (CUDA 2.0).
    fn cuCtxDestroy(context: u64) = |plain| ending(named(context), || plain(context));
    /// `cuCtxDestroy` (CUDA 4.0).
    fn cuCtxDestroy_v2(context: u64) = |plain| ending(named(context), || plain(context));
    /// `cuCtxDetach` (CUDA 2.0).
    fn cuCtxDetach(context: u64) = |plain| detaching(context, || plain(context));
    /// `cuDevicePrimaryCtxRelease` (CUDA 7.0).
    fn cuDevicePrimaryCtxRelease(device: c_int) = |plain| releasing(device, || plain(device));
    /// `cuDevicePrimaryCtxRelease` (CUDA 11.0).
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) = |plain| releasing(device, || plain(device));
    /// `cuDevicePrimaryCtxReset` (CUDA 7.0).
    fn cuDevicePrimaryCtxReset(device: c_int) = |plain| resetting(device, || plain(device));
    /// `cuDevicePrimaryCtxReset` (CUDA 11.0).
    fn cuDevicePrimaryCtxReset_v2(device: c_int) = |plain| resetting(device, || plain(device));
}

/// The name of a context that a program hands over; of no context where that is null.
fn named(handle: u64) -> Option<u64> {
    if handle == 0 { None } else { name_of(handle) }
}
