//! Charges variables (`__managed__`, `__device__`, `__constant__`) when the program looks them up.
//!
//! The driver allocates them when it loads the module (fact F26), and does not report their size
//! then. The CUDA runtime looks up each of them after the load. A program that looks up none is
//! found by the agent's audit, which reads the mappings of managed memory, or the agent settles
//! them.
//!
//! The lock is held over requests to the agent, for seconds at most.
#![allow(non_snake_case)]

use std::ffi::{c_char, c_int, c_uint};

use super::{hooks, write_if_not_null};
use crate::accounting::{self, Account, Denied};
use crate::alloc_table::Charge;
use crate::curesult::{self, CuResult};
use crate::driver_calls::{context_ids, current_device, driver};
use crate::fork_local::ForkLocal;

/// `CU_POINTER_ATTRIBUTE_IS_MANAGED`.
const ATTR_IS_MANAGED: c_int = 8;

/// A variable that is charged until its module or library is unloaded.
struct Variable {
    /// The handle of its module or library.
    owner: u64,
    /// The context of its module; 0 for one of a library.
    context: u64,
    pointer: u64,
    charge: Charge,
}

static VARIABLES: ForkLocal<Vec<Variable>> = ForkLocal::new();

/// Forgets the parent's variables, in a forked child.
pub(crate) fn reset() {
    VARIABLES.reset();
}

/// Discharges the variables of a destroyed context's modules.
pub(crate) fn end_context(context: u64) {
    discharge(|variable| variable.context == context && context != 0);
}

fn discharge(is_gone: impl Fn(&Variable) -> bool) {
    let gone: Vec<Variable> = VARIABLES
        .lock()
        .extract_if(.., |variable| is_gone(variable))
        .collect();
    for variable in gone {
        accounting::discharge(variable.charge);
    }
}

fn is_managed(pointer: u64) -> bool {
    let mut managed: c_uint = 0;
    let code = driver!(cuPointerGetAttribute(
        &raw mut managed => *mut c_uint, ATTR_IS_MANAGED => c_int, pointer => u64,
    ));
    code == curesult::SUCCESS && managed != 0
}

fn charge(
    owner: u64,
    context: u64,
    pointer: u64,
    bytes: usize,
    function: &str,
) -> Result<(), Denied> {
    if pointer == 0 || bytes == 0 {
        return Ok(());
    }
    let (account, context) = match (is_managed(pointer), current_device()) {
        (true, _) => (Account::Managed, context),
        // The variable is of the current context, also where its library belongs to none.
        (false, Ok(device)) => (Account::Device(device), context_ids::current_id()),
        (false, Err(_)) => return Ok(()),
    };
    let mut known = VARIABLES.lock();
    if known.iter().any(|variable| variable.pointer == pointer) {
        return Ok(());
    }
    let charge = accounting::charge(account, bytes as u64, function)?.into_charge();
    known.push(Variable {
        owner,
        context,
        pointer,
        charge,
    });
    Ok(())
}

/// Looks a variable up by `driver_call`, which takes places for its address and its size. Charges
/// it; where that is denied, the program gets neither.
///
/// # Safety
/// `pointer` and `bytes` are null or can be written.
unsafe fn look_up(
    (owner, context): (u64, u64),
    pointer: *mut u64,
    bytes: *mut usize,
    function: &str,
    driver_call: impl FnOnce(*mut u64, *mut usize) -> CuResult,
) -> CuResult {
    let (mut at, mut size) = (0, 0);
    let answer = driver_call(&raw mut at, &raw mut size);
    if answer != curesult::SUCCESS {
        return answer;
    }
    if charge(owner, context, at, size, function).is_err() {
        return curesult::OUT_OF_MEMORY;
    }
    // SAFETY: the caller guarantees it.
    unsafe {
        write_if_not_null(pointer, at);
        write_if_not_null(bytes, size);
    }
    answer
}

hooks! {
    /// `cuModuleGetGlobal` (CUDA 3.2).
    fn cuModuleGetGlobal_v2(
        pointer: *mut u64,
        bytes: *mut usize,
        module: u64,
        name: *const c_char,
    ) = |driver_call| {
        if pointer.is_null() && bytes.is_null() {
            return driver_call(pointer, bytes, module, name);
        }
        let context = context_ids::current_id();
        // SAFETY: by the prototype both are null or can be written.
        unsafe {
            look_up((module, context), pointer, bytes, "cuModuleGetGlobal_v2", |at, size| {
                driver_call(at, size, module, name)
            })
        }
    };

    /// `cuLibraryGetGlobal` (CUDA 12.0), which finds variables in managed memory too.
    fn cuLibraryGetGlobal(
        pointer: *mut u64,
        bytes: *mut usize,
        library: u64,
        name: *const c_char,
    ) = |driver_call| {
        if pointer.is_null() && bytes.is_null() {
            return driver_call(pointer, bytes, library, name);
        }
        // SAFETY: by the prototype both are null or can be written.
        unsafe {
            look_up((library, 0), pointer, bytes, "cuLibraryGetGlobal", |at, size| {
                driver_call(at, size, library, name)
            })
        }
    };

    /// `cuLibraryGetManaged` (CUDA 12.0).
    fn cuLibraryGetManaged(
        pointer: *mut u64,
        bytes: *mut usize,
        library: u64,
        name: *const c_char,
    ) = |driver_call| {
        if pointer.is_null() && bytes.is_null() {
            return driver_call(pointer, bytes, library, name);
        }
        // SAFETY: by the prototype both are null or can be written.
        unsafe {
            look_up((library, 0), pointer, bytes, "cuLibraryGetManaged", |at, size| {
                driver_call(at, size, library, name)
            })
        }
    };

    /// `cuModuleUnload` (CUDA 2.0).
    fn cuModuleUnload(module: u64) = |driver_call| {
        let answer = driver_call(module);
        if answer == curesult::SUCCESS {
            discharge(|variable| variable.owner == module);
        }
        answer
    };

    /// `cuLibraryUnload` (CUDA 12.0).
    fn cuLibraryUnload(library: u64) = |driver_call| {
        let answer = driver_call(library);
        if answer == curesult::SUCCESS {
            discharge(|variable| variable.owner == library);
        }
        answer
    };
}
