//! Implements the driver functions that the shim replaces: they charge, adjust and report memory.
//!
//! Prototypes are those of cuda.h. Each hook charges before it calls the real function and adjusts
//! the charge after it; the program gets the driver's own result. A hook that is called from inside
//! another hook only forwards, because the driver calls its own exported functions.
//!
//! * [`linear`] linear, pitched and managed memory
//! * [`managed_variables`] variables of modules
//! * [`arrays`] arrays and mipmapped arrays
//! * [`rounding`] the size that the driver takes for a request
//! * [`pools`] stream-ordered memory
//! * [`vmm`] memory of `cuMemCreate`
//! * [`ipc`] IPC handles and DMA-BUF descriptors of linear memory
//! * [`captures`] the begin and the end of stream captures
//! * [`contexts`] creation and destruction of contexts, [`context_registry`] their charges
//! * [`graphs`] graphs
//! * [`ctx_limits`] and [`kernels`] stacks, heaps and kernels' local memory
//! * [`mem_info`] the memory sizes that programs query
//! * [`device_attributes`] the attributes of devices that lead programs past every charge
//! * [`export_tables`] the unnamed table of functions for process checkpoints
//! * [`init`] `cuInit`
//! * [`proc_address`] the addresses that `cuGetProcAddress` returns

mod arrays;
mod captures;
pub(crate) mod context_registry;
pub(crate) mod contexts;
mod ctx_limits;
mod device_attributes;
mod export_tables;
mod graphs;
mod init;
mod ipc;
mod kernels;
mod linear;
pub(crate) mod managed_variables;
mod mem_info;
mod pools;
mod proc_address;
mod rounding;
pub(crate) mod vmm;

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::accounting::{self, Account, Denied};
use crate::curesult::{self, CuResult};
use crate::driver_calls::context_ids;
use crate::poison;

thread_local! {
    static IN_HOOK: Cell<bool> = const { Cell::new(false) };
}

/// Runs a hook's body and turns a panic into an error code. Errors of earlier asynchronous work are
/// noticed here too.
#[inline]
pub(crate) fn guarded(body: impl FnOnce() -> CuResult) -> CuResult {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(curesult::SUCCESS) => curesult::SUCCESS,
        Ok(code) => poison::on_error(code),
        Err(_) => curesult::UNKNOWN,
    }
}

/// Runs `body`, or `driver_call` where this thread is already inside a hook.
#[inline]
pub(crate) fn outermost(
    body: impl FnOnce() -> CuResult,
    driver_call: impl FnOnce() -> CuResult,
) -> CuResult {
    // The thread-local is looked up once, because the lookup calls into the loader.
    IN_HOOK.with(|inside| {
        if inside.replace(true) {
            return driver_call();
        }
        let _leaves = HookScope(inside);
        body()
    })
}

/// Writes an output that the program may leave out.
///
/// # Safety
/// `out` is null or can be written.
pub(crate) unsafe fn write_if_not_null<T>(out: *mut T, value: T) {
    if !out.is_null() {
        // SAFETY: the caller guarantees it.
        unsafe { out.write(value) };
    }
}

/// Ends this thread's outermost hook when it is dropped, also by a panic.
struct HookScope<'a>(&'a Cell<bool>);

impl Drop for HookScope<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

/// Declares hooks: `fn name(argument: type, ...) = |driver_call| body`. The body calls the real
/// function by `driver_call`, with arguments of the same types. A plain `fn` only forwards inside
/// another hook. A `reentrant fn` runs its body there too.
macro_rules! hooks {
    () => {};
    (
        $(#[$about:meta])*
        fn $name:ident($($argument:ident: $kind:ty),* $(,)?) = |$driver_call:ident| $body:expr;
        $($more:tt)*
    ) => {
        $crate::hooks::hooks! {
            $(#[$about])*
            reentrant fn $name($($argument: $kind),*) = |$driver_call| {
                $crate::hooks::outermost(|| $body, || $driver_call($($argument),*))
            };
            $($more)*
        }
    };
    (
        $(#[$about:meta])*
        reentrant fn $name:ident($($argument:ident: $kind:ty),* $(,)?) = |$driver_call:ident| $body:expr;
        $($more:tt)*
    ) => {
        $(#[$about])*
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($($argument: $kind),*) -> $crate::curesult::CuResult {
            let $driver_call = |$($argument: $kind),*| {
                $crate::driver_calls::driver!($name($($argument => $kind),*))
            };
            $crate::hooks::guarded(|| $body)
        }
        $crate::hooks::hooks! { $($more)* }
    };
}
pub(crate) use hooks;

/// Charges, allocates, and adjusts the charge to the true size. `call` allocates and returns the
/// pointer and its size. `free` frees the pointer where the larger charge is denied.
pub(crate) fn allocate(
    account: Account,
    bytes: u64,
    function: &str,
    call: impl FnOnce() -> Result<(u64, u64), CuResult>,
    free: impl FnOnce(u64) -> CuResult,
) -> CuResult {
    let mut pending = match accounting::charge(account, bytes, function) {
        Ok(pending) => pending,
        Err(Denied) => return curesult::OUT_OF_MEMORY,
    };
    let context = context_ids::current_id();
    let (pointer, size) = match call() {
        Ok(allocated) => allocated,
        Err(code) => return code,
    };
    // Only a larger size can be denied. A charge that cannot be recorded is treated as denied.
    let settled = pending
        .adjust(size)
        .and_then(|()| pending.commit(pointer, context));
    match settled {
        Ok(()) => curesult::SUCCESS,
        Err(Denied) => {
            let _ = free(pointer);
            curesult::OUT_OF_MEMORY
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panic_in_a_hook_becomes_an_error_code() {
        assert_eq!(guarded(|| panic!("in a hook")), curesult::UNKNOWN);
    }

    #[test]
    fn hook_charges_after_a_panic_in_another() {
        assert_eq!(
            guarded(|| outermost(|| panic!("in a hook"), || 2)),
            curesult::UNKNOWN
        );
        assert_eq!(outermost(|| 1, || 2), 1);
    }

    #[test]
    fn nested_hook_only_forwards() {
        let answer = outermost(|| outermost(|| 1, || 2) + 10, || 3);
        assert_eq!(answer, 12);
        assert_eq!(outermost(|| 1, || 3), 1);
    }
}
