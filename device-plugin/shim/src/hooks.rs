//! The functions that the shim has of its own: they charge, settle and report.
//!
//! Prototypes are those of cuda.h. Each hook charges before it calls the real function and settles
//! after it; what the driver answers is what the program gets. A hook that is reached from inside
//! another one (a driver that calls its own exported functions) only forwards.
//!
//! * [`linear`] linear, pitched and managed memory
//! * [`arrays`] arrays and mipmapped arrays
//! * [`sizes`] what the driver takes for a request
//! * [`pools`] stream-ordered memory
//! * [`vmm`] memory of `cuMemCreate`
//! * [`exports`] linear memory that others can come to hold
//! * [`captures`], [`streams`] what the calling stream does, and where
//! * [`contexts`] what contexts take, and what ends with them; [`known`] which there are
//! * [`graphs`] graphs with memory nodes
//! * [`limits`] and [`functions`] stacks and kernels' local memory
//! * [`reports`] how much memory there is
//! * [`start`] what a process does first
//! * [`proc_address`] the addresses that `cuGetProcAddress` hands out

mod arrays;
pub(crate) mod captures;
pub(crate) mod contexts;
mod exports;
mod functions;
mod graphs;
pub(crate) mod known;
mod limits;
mod linear;
mod pools;
mod proc_address;
mod reports;
pub(crate) mod sizes;
mod start;
pub(crate) mod streams;
pub(crate) mod vmm;

use std::cell::Cell;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::codes::{self, CuResult};
use crate::forward::{self, index};
use crate::ledger::{self, Denied, Kind};
use crate::poison;

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Runs a hook's body; a panic in it is an error of the driver's, and the program goes on. Hooks are where errors
/// of work that went before come to light too.
#[inline]
pub(crate) fn hooked(body: impl FnOnce() -> CuResult) -> CuResult {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(codes::SUCCESS) => codes::SUCCESS,
        Ok(code) => poison::noticed(code),
        Err(_) => codes::UNKNOWN,
    }
}

/// Runs `body` unless this thread is inside a hook, and then `plain`.
#[inline]
pub(crate) fn outermost(
    body: impl FnOnce() -> CuResult,
    plain: impl FnOnce() -> CuResult,
) -> CuResult {
    // Looked up once: the lookup is a call of the loader's, and the hook a few of them long.
    INSIDE.with(|inside| {
        if inside.replace(true) {
            return plain();
        }
        let _leaves = Leaves(inside);
        body()
    })
}

/// Ends the outermost hook of this thread, by a panic too.
struct Leaves<'a>(&'a Cell<bool>);

impl Drop for Leaves<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

/// Calls the real function; the answer of a missing one is that of its trampoline.
macro_rules! real {
    ($name:ident($($argument:expr => $kind:ty),* $(,)?)) => {
        match $crate::forward::real($crate::forward::index::$name) {
            // SAFETY: the prototype is that of cuda.h, and the arguments are the program's own or
            // point to locals of the right type.
            Some(function) => unsafe {
                std::mem::transmute::<
                    *mut std::ffi::c_void,
                    unsafe extern "C" fn($($kind),*) -> $crate::codes::CuResult,
                >(function)($($argument),*)
            },
            None => $crate::codes::NOT_SUPPORTED,
        }
    };
}
pub(crate) use real;

/// Declares hooks: `fn name(argument: type, ...) = |plain| body`. In the body, `plain` calls the real
/// function with arguments of the same types. Inside another hook the real function is all there is;
/// `anywhere fn` declares one that does the same there, and so need not know.
macro_rules! hooks {
    () => {};
    (
        $(#[$about:meta])*
        fn $name:ident($($argument:ident: $kind:ty),* $(,)?) = |$plain:ident| $body:expr;
        $($more:tt)*
    ) => {
        $crate::hooks::hooks! {
            $(#[$about])*
            anywhere fn $name($($argument: $kind),*) = |$plain| {
                $crate::hooks::outermost(|| $body, || $plain($($argument),*))
            };
            $($more)*
        }
    };
    (
        $(#[$about:meta])*
        anywhere fn $name:ident($($argument:ident: $kind:ty),* $(,)?) = |$plain:ident| $body:expr;
        $($more:tt)*
    ) => {
        $(#[$about])*
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($($argument: $kind),*) -> $crate::codes::CuResult {
            let $plain = |$($argument: $kind),*| {
                $crate::hooks::real!($name($($argument => $kind),*))
            };
            $crate::hooks::hooked(|| $body)
        }
        $crate::hooks::hooks! { $($more)* }
    };
}
pub(crate) use hooks;

/// The ordinal of the calling thread's current device.
pub(crate) fn current_device() -> Result<c_int, CuResult> {
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

/// Charges, allocates, settles. `call` allocates and answers with the pointer and its true size; `free`
/// takes the pointer back.
pub(crate) fn allocate(
    kind: Kind,
    bytes: u64,
    function: &str,
    call: impl FnOnce() -> Result<(u64, u64), CuResult>,
    free: impl FnOnce(u64) -> CuResult,
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
            let _ = free(pointer);
            codes::OUT_OF_MEMORY
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
