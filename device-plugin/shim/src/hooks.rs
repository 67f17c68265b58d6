//! The functions that the shim has of its own: they charge, settle and report.
//!
//! Prototypes are those of cuda.h. Each hook charges before it calls the real function and settles
//! after it; what the driver answers is what the program gets. A hook that is reached from inside
//! another one (a driver that calls its own exported functions) only forwards.
#![allow(non_snake_case)]

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::codes::{self, CuResult};
use crate::contexts;
use crate::forward::{self, index};
use crate::ledger::{self, Denied, Kind};

/// Hooked names as `cuGetProcAddress` knows them: the base name, the CUDA version that a variant
/// came with, and our function for it. Source: cudaTypedefs.h (`PFN_cuMemAlloc_v3020`).
const BY_NAME: &[(&CStr, c_int, *const c_void)] = &[
    (c"cuMemAlloc", 2000, cuMemAlloc as *const c_void),
    (c"cuMemAlloc", 3020, cuMemAlloc_v2 as *const c_void),
    (c"cuMemAllocPitch", 2000, cuMemAllocPitch as *const c_void),
    (
        c"cuMemAllocPitch",
        3020,
        cuMemAllocPitch_v2 as *const c_void,
    ),
    (
        c"cuMemAllocManaged",
        6000,
        cuMemAllocManaged as *const c_void,
    ),
    (c"cuMemFree", 3020, cuMemFree_v2 as *const c_void),
    (c"cuMemGetInfo", 2000, cuMemGetInfo as *const c_void),
    (c"cuMemGetInfo", 3020, cuMemGetInfo_v2 as *const c_void),
    (c"cuDeviceTotalMem", 2000, cuDeviceTotalMem as *const c_void),
    (
        c"cuDeviceTotalMem",
        3020,
        cuDeviceTotalMem_v2 as *const c_void,
    ),
    (
        c"cuCtxDestroy",
        2000,
        contexts::cuCtxDestroy as *const c_void,
    ),
    (
        c"cuCtxDestroy",
        4000,
        contexts::cuCtxDestroy_v2 as *const c_void,
    ),
    (
        c"cuDevicePrimaryCtxRelease",
        7000,
        contexts::cuDevicePrimaryCtxRelease as *const c_void,
    ),
    (
        c"cuDevicePrimaryCtxRelease",
        11000,
        contexts::cuDevicePrimaryCtxRelease_v2 as *const c_void,
    ),
    (
        c"cuDevicePrimaryCtxReset",
        7000,
        contexts::cuDevicePrimaryCtxReset as *const c_void,
    ),
    (
        c"cuDevicePrimaryCtxReset",
        11000,
        contexts::cuDevicePrimaryCtxReset_v2 as *const c_void,
    ),
    (
        c"cuGetProcAddress",
        11030,
        cuGetProcAddress as *const c_void,
    ),
    (
        c"cuGetProcAddress",
        12000,
        cuGetProcAddress_v2 as *const c_void,
    ),
];

/// The largest pitch alignment of any GPU (`CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT` is 32,
/// allocations are aligned to 512): what a pitched allocation is charged before its pitch is known.
const PITCH_ALIGNMENT: u64 = 512;

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Runs a hook's body; a panic in it is an error of the driver's, and the program goes on.
pub(crate) fn hooked(body: impl FnOnce() -> CuResult) -> CuResult {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(codes::UNKNOWN)
}

/// Runs `body` unless this thread is inside a hook, and then `plain`.
pub(crate) fn outermost(
    body: impl FnOnce() -> CuResult,
    plain: impl FnOnce() -> CuResult,
) -> CuResult {
    let inside = INSIDE
        .try_with(|inside| inside.replace(true))
        .unwrap_or(true);
    if inside {
        return plain();
    }
    let _leaves = Leaves;
    body()
}

/// Ends the outermost hook of this thread, by a panic too.
struct Leaves;

impl Drop for Leaves {
    fn drop(&mut self) {
        let _ = INSIDE.try_with(|inside| inside.set(false));
    }
}

/// Calls the real function; the answer of a missing one is that of its trampoline.
macro_rules! real {
    ($name:ident($($argument:expr => $kind:ty),* $(,)?)) => {
        match forward::real(index::$name) {
            // SAFETY: the prototype is that of cuda.h, and the arguments are the program's own or
            // point to locals of the right type.
            Some(function) => unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($kind),*) -> CuResult>(function)($($argument),*)
            },
            None => codes::NOT_SUPPORTED,
        }
    };
}
pub(crate) use real;

/// The ordinal of the calling thread's current device.
fn current_device() -> Result<c_int, CuResult> {
    let mut device = 0;
    match real!(cuCtxGetDevice(&raw mut device => *mut c_int)) {
        codes::SUCCESS => Ok(device),
        code => Err(code),
    }
}

/// How many devices the driver shows to this process.
pub(crate) fn device_count() -> c_int {
    let mut count = 0;
    match real!(cuDeviceGetCount(&raw mut count => *mut c_int)) {
        codes::SUCCESS => count,
        _ => 0,
    }
}

/// A device's UUID: a MIG instance's own where the driver can tell (CUDA 11.4).
pub(crate) fn device_uuid(device: c_int) -> Option<[u8; 16]> {
    let mut uuid = [0; 16];
    let code = match forward::real(index::cuDeviceGetUuid_v2) {
        Some(_) => real!(cuDeviceGetUuid_v2(uuid.as_mut_ptr() => *mut u8, device => c_int)),
        None => real!(cuDeviceGetUuid(uuid.as_mut_ptr() => *mut u8, device => c_int)),
    };
    (code == codes::SUCCESS).then_some(uuid)
}

/// Charges, allocates, settles. `call` allocates and answers with the pointer and its true size.
fn allocate(
    kind: Kind,
    bytes: u64,
    function: &str,
    call: impl FnOnce() -> Result<(u64, u64), CuResult>,
) -> CuResult {
    let mut pending = match ledger::charge(kind, bytes, function) {
        Ok(pending) => pending,
        Err(Denied) => return codes::OUT_OF_MEMORY,
    };
    let context = contexts::current();
    let (pointer, size) = match call() {
        Ok(allocated) => allocated,
        Err(code) => return code,
    };
    // Only a larger size can be denied; a charge that cannot be noted is as good as denied.
    let settled = pending
        .settle(size)
        .and_then(|()| pending.keep(pointer, context));
    match settled {
        Ok(()) => codes::SUCCESS,
        Err(Denied) => {
            let _ = real!(cuMemFree_v2(pointer => u64));
            codes::OUT_OF_MEMORY
        }
    }
}

/// `cuMemAlloc` (CUDA 3.2): linear memory of the current context's device.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(pointer: *mut u64, bytes: usize) -> CuResult {
    let plain = |pointer: *mut u64| real!(cuMemAlloc_v2(pointer => *mut u64, bytes => usize));
    hooked(|| {
        outermost(
            || {
                // What the driver refuses anyway, it refuses itself.
                if pointer.is_null() || bytes == 0 {
                    return plain(pointer);
                }
                let device = match current_device() {
                    Ok(device) => device,
                    Err(code) => return code,
                };
                let mut got = 0;
                let answer =
                    allocate(
                        Kind::Device(device),
                        bytes as u64,
                        "cuMemAlloc_v2",
                        || match plain(&raw mut got) {
                            codes::SUCCESS => Ok((got, bytes as u64)),
                            code => Err(code),
                        },
                    );
                if answer == codes::SUCCESS {
                    // SAFETY: not null, and the program says that it is a pointer of this type.
                    unsafe { pointer.write(got) };
                }
                answer
            },
            || plain(pointer),
        )
    })
}

/// `cuMemAllocPitch` (CUDA 3.2): the driver chooses the pitch, and so the size.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocPitch_v2(
    pointer: *mut u64,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: c_uint,
) -> CuResult {
    let plain = |pointer: *mut u64, pitch: *mut usize| {
        real!(cuMemAllocPitch_v2(
            pointer => *mut u64, pitch => *mut usize, width => usize, height => usize, element => c_uint,
        ))
    };
    hooked(|| {
        outermost(
            || {
                if pointer.is_null() || pitch.is_null() || width == 0 || height == 0 {
                    return plain(pointer, pitch);
                }
                let device = match current_device() {
                    Ok(device) => device,
                    Err(code) => return code,
                };
                let row = (width as u64).checked_next_multiple_of(PITCH_ALIGNMENT);
                let Some(estimate) = row.and_then(|row| row.checked_mul(height as u64)) else {
                    return codes::OUT_OF_MEMORY;
                };
                let (mut got, mut row) = (0, 0);
                let answer =
                    allocate(
                        Kind::Device(device),
                        estimate,
                        "cuMemAllocPitch_v2",
                        || match plain(&raw mut got, &raw mut row) {
                            codes::SUCCESS => Ok((got, (row as u64).saturating_mul(height as u64))),
                            code => Err(code),
                        },
                    );
                if answer == codes::SUCCESS {
                    // SAFETY: neither is null, and the program says that they are of these types.
                    unsafe {
                        pointer.write(got);
                        pitch.write(row);
                    }
                }
                answer
            },
            || plain(pointer, pitch),
        )
    })
}

/// `cuMemAllocManaged`: charged to the container's managed quota; without one it is out of memory.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocManaged(pointer: *mut u64, bytes: usize, flags: c_uint) -> CuResult {
    let plain = |pointer: *mut u64| real!(cuMemAllocManaged(pointer => *mut u64, bytes => usize, flags => c_uint));
    hooked(|| {
        outermost(
            || {
                if pointer.is_null() || bytes == 0 {
                    return plain(pointer);
                }
                let mut got = 0;
                let answer =
                    allocate(
                        Kind::Managed,
                        bytes as u64,
                        "cuMemAllocManaged",
                        || match plain(&raw mut got) {
                            codes::SUCCESS => Ok((got, bytes as u64)),
                            code => Err(code),
                        },
                    );
                if answer == codes::SUCCESS {
                    // SAFETY: not null, and the program says that it is a pointer of this type.
                    unsafe { pointer.write(got) };
                }
                answer
            },
            || plain(pointer),
        )
    })
}

/// `cuMemFree` (CUDA 3.2). The pointer is forgotten first: once it is freed, another thread may be
/// given the same one.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemFree_v2(pointer: u64) -> CuResult {
    hooked(|| {
        let known = crate::state::state().and_then(|_| ledger::LIVE.remove(pointer));
        let answer = real!(cuMemFree_v2(pointer => u64));
        match (known, answer) {
            (Some(charge), codes::SUCCESS) => ledger::discharge(charge),
            // Not freed, so still there.
            (Some(charge), _) => drop(ledger::LIVE.insert(pointer, charge)),
            (None, _) => {}
        }
        answer
    })
}

/// `cuMemGetInfo` (CUDA 3.2): the quota, and what the container can still take of it.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> CuResult {
    let plain = || real!(cuMemGetInfo_v2(free => *mut usize, total => *mut usize));
    hooked(|| {
        outermost(
            || {
                let answer = plain();
                if answer != codes::SUCCESS || free.is_null() || total.is_null() {
                    return answer;
                }
                let device = match current_device() {
                    Ok(device) => device,
                    Err(code) => return code,
                };
                // Nothing can be taken without a session.
                let (room, quota) = ledger::room(device).unwrap_or((0, 0));
                // SAFETY: neither is null, and the driver has just written both.
                unsafe {
                    *free = (*free).min(usize::try_from(room).unwrap_or(usize::MAX));
                    *total = usize::try_from(quota).unwrap_or(usize::MAX);
                }
                answer
            },
            plain,
        )
    })
}

/// `cuDeviceTotalMem` (CUDA 3.2): the quota.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> CuResult {
    let plain = || real!(cuDeviceTotalMem_v2(bytes => *mut usize, device => c_int));
    hooked(|| {
        outermost(
            || {
                let answer = plain();
                if answer == codes::SUCCESS && !bytes.is_null() {
                    let (_, quota) = ledger::room(device).unwrap_or((0, 0));
                    // SAFETY: not null, and the driver has just written it.
                    unsafe { *bytes = usize::try_from(quota).unwrap_or(usize::MAX) };
                }
                answer
            },
            plain,
        )
    })
}

/// Declares a function of CUDA 2.0, whose pointers and sizes have 32 bits: no program for a 64-bit
/// system uses one, and uncharged it would be a way around the quota.
macro_rules! refused {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> CuResult {
            codes::NOT_SUPPORTED
        }
    )*};
}
refused!(cuMemAlloc cuMemAllocPitch cuMemGetInfo cuDeviceTotalMem);

/// `cuGetProcAddress` (CUDA 11.3).
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetProcAddress(
    symbol: *const c_char,
    function: *mut *const c_void,
    version: c_int,
    flags: u64,
) -> CuResult {
    hooked(|| {
        let answer = real!(cuGetProcAddress(
            symbol => *const c_char, function => *mut *const c_void, version => c_int, flags => u64,
        ));
        // SAFETY: the driver has just read the name and written the address.
        unsafe { substitute(answer, symbol, function, version) };
        answer
    })
}

/// `cuGetProcAddress` (CUDA 12.0): says besides why a name was not found.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    function: *mut *const c_void,
    version: c_int,
    flags: u64,
    status: *mut c_int,
) -> CuResult {
    hooked(|| {
        let answer = real!(cuGetProcAddress_v2(
            symbol => *const c_char, function => *mut *const c_void, version => c_int, flags => u64,
            status => *mut c_int,
        ));
        // SAFETY: the driver has just read the name and written the address.
        unsafe { substitute(answer, symbol, function, version) };
        answer
    })
}

/// Puts our function in the place of the driver's, where we have one and the driver too.
///
/// # Safety
/// If `answer` is success, `symbol` is a string that ends with a zero and `function` can be written.
unsafe fn substitute(
    answer: CuResult,
    symbol: *const c_char,
    function: *mut *const c_void,
    version: c_int,
) {
    if answer != codes::SUCCESS || symbol.is_null() || function.is_null() {
        return;
    }
    // SAFETY: the caller's promise.
    let (name, found) = unsafe { (CStr::from_ptr(symbol), *function) };
    if let (false, Some(ours)) = (found.is_null(), hook_for(name, version)) {
        // SAFETY: the caller's promise.
        unsafe { *function = ours };
    }
}

/// Our function for a base name as CUDA `version` (`12040`) knows it: the newest variant that is
/// not newer.
fn hook_for(name: &CStr, version: c_int) -> Option<*const c_void> {
    let variants = BY_NAME
        .iter()
        .filter(|(base, since, _)| *base == name && *since <= version);
    variants
        .max_by_key(|(_, since, _)| *since)
        .map(|(_, _, ours)| *ours)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn get_proc_address_gives_the_variant_of_the_version_that_was_asked_for() {
        assert_eq!(
            hook_for(c"cuMemAlloc", 12040),
            Some(cuMemAlloc_v2 as *const c_void)
        );
        assert_eq!(
            hook_for(c"cuMemAlloc", 3010),
            Some(cuMemAlloc as *const c_void)
        );
        assert_eq!(
            hook_for(c"cuGetProcAddress", 11080),
            Some(cuGetProcAddress as *const c_void)
        );
        assert_eq!(
            hook_for(c"cuGetProcAddress", 13000),
            Some(cuGetProcAddress_v2 as *const c_void)
        );
        assert_eq!(hook_for(c"cuMemAllocManaged", 5000), None);
        assert_eq!(hook_for(c"cuLaunchKernel", 13000), None);
    }

    #[test]
    fn every_hook_of_the_table_is_one_that_get_proc_address_gives_or_keeps_its_base_name() {
        let table = include_str!("../symbols.txt");
        let hooks = table.lines().filter_map(|line| line.strip_suffix(" hook"));
        for name in hooks.filter_map(|line| line.split(' ').next()) {
            let base = name.trim_end_matches("_v2");
            let known = BY_NAME.iter().any(|(known, ..)| known.to_str() == Ok(base));
            assert!(
                known,
                "{name} is hooked, and cuGetProcAddress hands out the driver's"
            );
        }
    }

    #[test]
    fn a_panic_in_a_hook_is_an_answer() {
        assert_eq!(hooked(|| panic!("in a hook")), codes::UNKNOWN);
    }

    #[test]
    fn a_panic_in_a_hook_leaves_the_next_one_charging() {
        assert_eq!(
            hooked(|| outermost(|| panic!("in a hook"), || 2)),
            codes::UNKNOWN
        );
        assert_eq!(outermost(|| 1, || 2), 1);
    }

    #[test]
    fn a_hook_inside_a_hook_only_forwards() {
        let answer = outermost(|| outermost(|| 1, || 2) + 10, || 3);
        assert_eq!(answer, 12);
        assert_eq!(outermost(|| 1, || 3), 1);
    }
}
