//! Hooks `cuGetProcAddress`, so that programs get the shim's functions from it.
//!
//! A program asks for a base name, a CUDA version and a kind of default stream. The driver decides
//! which form of the function that means, so the driver is called before the shim looks. Where the
//! driver returns a function that it also exports, the address names the form. Driver 580 does so
//! for every name, version and mode, and has no two names for one address. Otherwise the table
//! decides ([`SUBSTITUTES`]). A name that only a newer driver knows is returned only if no part of
//! it hints at memory.
#![allow(non_snake_case)]

use std::ffi::{CStr, c_char, c_int, c_void};

use super::guarded;
use crate::curesult::{self, CuResult};
use crate::driver_calls::driver;
use crate::fence;
use crate::forward::{self, index};

/// A function of the shim that replaces one of the driver's.
struct Substitute {
    /// The name that `cuGetProcAddress` is called with.
    base: &'static CStr,
    /// The exported name.
    symbol: &'static CStr,
    /// The CUDA version that introduced this form.
    since: c_int,
    /// Whether this is the form for the per-thread default stream.
    per_thread: bool,
    /// The index of the driver's function.
    index: usize,
    shim_function: *const c_void,
}

// SAFETY: addresses of functions, which never change.
unsafe impl Sync for Substitute {}

include!(concat!(env!("OUT_DIR"), "/substitutes.rs"));

/// `CU_GET_PROC_ADDRESS_LEGACY_STREAM`.
const LEGACY_STREAM: u64 = 1;
/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const PER_THREAD_STREAM: u64 = 2;
/// `CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND`.
const SYMBOL_NOT_FOUND: c_int = 1;

/// Parts of the names of functions that take, import or export memory.
const MEMORY_NAME_PARTS: [&str; 12] = [
    "Alloc", "Create", "Import", "Reserve", "Pool", "Malloc", "Map", "Limit", "Load", "Export",
    "Open", "Register",
];

/// The arguments of a call of `cuGetProcAddress`.
#[derive(Clone, Copy)]
struct Lookup<'a> {
    name: &'a CStr,
    version: c_int,
    per_thread: bool,
}

macro_rules! first {
    ($first:expr $(, $rest:expr)?) => {
        $first
    };
}

/// Declares the forms of `cuGetProcAddress`. The later forms also return why a name was not found.
/// The `_ptsz` forms are for programs compiled for the per-thread default stream.
macro_rules! get_proc_address {
    ($($name:ident(per_thread: $per_thread:expr $(, $status:ident)?);)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            symbol: *const c_char,
            function: *mut *const c_void,
            version: c_int,
            flags: u64,
            $($status: *mut c_int,)?
        ) -> CuResult {
            guarded(|| {
                // SAFETY: the program's pointers, as the driver takes them.
                if unsafe { hand_out_shim_only(symbol, function) } {
                    return curesult::SUCCESS;
                }
                let answer = driver!($name(
                    symbol => *const c_char, function => *mut *const c_void, version => c_int,
                    flags => u64, $($status => *mut c_int,)?
                ));
                let per_thread = match flags & (LEGACY_STREAM | PER_THREAD_STREAM) {
                    0 => $per_thread,
                    mode => mode == PER_THREAD_STREAM,
                };
                let status = first!($($status,)? std::ptr::null_mut());
                // SAFETY: the driver has just read the name and written address and status.
                unsafe { substitute(answer, symbol, function, version, per_thread, status) }
            })
        }
    )*};
}

get_proc_address! {
    cuGetProcAddress(per_thread: false);
    cuGetProcAddress_ptsz(per_thread: true);
    cuGetProcAddress_v2(per_thread: false, status);
    cuGetProcAddress_v2_ptsz(per_thread: true, status);
}

/// Writes the address of a function that only the shim has, and returns whether the name is of such
/// a function.
///
/// # Safety
/// `symbol` is null or a string that ends with a zero; `function` is null or can be written.
unsafe fn hand_out_shim_only(symbol: *const c_char, function: *mut *const c_void) -> bool {
    if symbol.is_null() || function.is_null() {
        return false;
    }
    // SAFETY: the caller guarantees it.
    let found = fence::lookup(unsafe { CStr::from_ptr(symbol) });
    if let Some(found) = found {
        // SAFETY: the caller guarantees it.
        unsafe { *function = found };
    }
    found.is_some()
}

/// Replaces the driver's function by the shim's where both exist, and withholds functions that may
/// take memory. Returns the code for the program.
///
/// # Safety
/// If `answer` is success, `symbol` is a string that ends with a zero and `function` can be
/// written; `status` is null or can be written.
unsafe fn substitute(
    answer: CuResult,
    symbol: *const c_char,
    function: *mut *const c_void,
    version: c_int,
    per_thread: bool,
    status: *mut c_int,
) -> CuResult {
    if answer != curesult::SUCCESS || symbol.is_null() || function.is_null() {
        return answer;
    }
    // SAFETY: the caller guarantees it.
    let (name, found) = unsafe { (CStr::from_ptr(symbol), *function) };
    if found.is_null() {
        return answer;
    }
    let question = Lookup {
        name,
        version,
        per_thread,
    };
    if let Some(ours) = substitute_for(question, |index| {
        forward::FUNCTIONS
            .get(index)
            .is_some_and(|real| std::ptr::eq(real, found))
    }) {
        // SAFETY: the caller guarantees it.
        unsafe { *function = ours.shim_function };
    } else if may_take_memory(name) {
        // SAFETY: the caller guarantees it.
        unsafe {
            *function = std::ptr::null();
            if !status.is_null() {
                *status = SYMBOL_NOT_FOUND;
            }
        }
        return curesult::NOT_FOUND;
    }
    answer
}

/// Returns the shim's function for a call. `is_found` tells whether the driver returned its
/// function of that index.
fn substitute_for(
    question: Lookup<'_>,
    is_found: impl Fn(usize) -> bool,
) -> Option<&'static Substitute> {
    let Lookup {
        name,
        version,
        per_thread,
    } = question;
    let mut forms = SUBSTITUTES
        .iter()
        .filter(|form| form.base == name || form.symbol == name)
        .peekable();
    if forms.peek().is_none() {
        // A name that only this driver has may stand for a function with an older name.
        return (!is_known(name))
            .then(|| SUBSTITUTES.iter().find(|form| is_found(form.index)))
            .flatten();
    }
    let by_address = forms.clone().find(|form| is_found(form.index));
    by_address
        .or_else(|| {
            forms
                .clone()
                .find(|form| form.symbol == name && form.base != name)
        })
        .or_else(|| {
            forms
                .filter(|form| form.since <= version && (per_thread || !form.per_thread))
                .max_by_key(|form| (form.per_thread, form.since))
        })
}

fn is_known(name: &CStr) -> bool {
    KNOWN_NAMES.binary_search(&name).is_ok() || forward::NAMES.contains(&name)
}

/// Returns whether a name is not in the table and hints at memory.
fn may_take_memory(name: &CStr) -> bool {
    let text = name.to_str().unwrap_or("Alloc");
    MEMORY_NAME_PARTS.iter().any(|part| text.contains(part)) && !is_known(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn symbol(name: &CStr, version: c_int, per_thread: bool) -> Option<&'static str> {
        let question = Lookup {
            name,
            version,
            per_thread,
        };
        substitute_for(question, |_| false).map(|form| form.symbol.to_str().unwrap_or("?"))
    }

    #[test]
    fn lookup_finds_the_form_of_the_requested_version() {
        assert_eq!(symbol(c"cuMemAlloc", 12040, false), Some("cuMemAlloc_v2"));
        assert_eq!(symbol(c"cuMemAlloc", 3010, false), Some("cuMemAlloc"));
        assert_eq!(
            symbol(c"cuGetProcAddress", 11080, false),
            Some("cuGetProcAddress")
        );
        assert_eq!(
            symbol(c"cuGetProcAddress", 13000, false),
            Some("cuGetProcAddress_v2")
        );
        assert_eq!(symbol(c"cuMemAllocManaged", 5000, false), None);
        assert_eq!(symbol(c"cuCtxSetCurrent", 13000, false), None);
    }

    #[test]
    fn lookup_finds_the_per_thread_form_where_one_exists() {
        assert_eq!(
            symbol(c"cuGetProcAddress", 13000, true),
            Some("cuGetProcAddress_v2_ptsz")
        );
        assert_eq!(
            symbol(c"cuGetProcAddress", 11030, true),
            Some("cuGetProcAddress_ptsz")
        );
        assert_eq!(symbol(c"cuMemAlloc", 13000, true), Some("cuMemAlloc_v2"));
    }

    #[test]
    fn exported_name_means_itself() {
        assert_eq!(symbol(c"cuMemAlloc_v2", 2000, false), Some("cuMemAlloc_v2"));
        assert_eq!(
            symbol(c"cuGetProcAddress_v2", 11030, false),
            Some("cuGetProcAddress_v2")
        );
    }

    #[test]
    fn driver_address_outweighs_the_table() {
        let asked = |name, found| {
            let question = Lookup {
                name,
                version: 13000,
                per_thread: false,
            };
            substitute_for(question, |index| index == found).map(|form| form.symbol)
        };
        assert_eq!(asked(c"cuMemAlloc", index::cuMemAlloc), Some(c"cuMemAlloc"));
        // An unknown name of a hooked function, and a known name that shares its address.
        assert_eq!(
            asked(c"cuNewNameForMemory", index::cuMemAlloc_v2),
            Some(c"cuMemAlloc_v2")
        );
        assert_eq!(asked(c"cuCtxSetCurrent", index::cuMemAlloc_v2), None);
    }

    #[test]
    fn unknown_name_is_withheld_when_it_may_take_memory() {
        for name in [
            c"cuMemAllocTiered",
            c"cuMemCreateBatch",
            c"cuMemPoolSomething",
            c"cuFabricImport",
        ] {
            assert!(may_take_memory(name), "{name:?}");
        }
        for name in [
            c"cuMemAlloc",
            c"cuMemAlloc_v2",
            c"cuStreamCreate",
            c"cuNothingOfThat",
        ] {
            assert!(!may_take_memory(name), "{name:?}");
        }
    }

    #[test]
    fn known_names_are_sorted() {
        assert!(KNOWN_NAMES.is_sorted());
        assert!(is_known(c"cuArray3DCreate") && is_known(c"cuWGLGetDevice"));
    }
}
