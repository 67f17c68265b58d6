//! Looks up the real library's functions, each at its first call.
//!
//! Each trampoline ([`mod@crate::trampoline`]) puts its index into a scratch register and jumps
//! through its slot. Until the first call a slot leads to the shim's `lazy_resolve`, made by
//! [`at_first_call!`](crate::at_first_call). That looks the function up in the real library,
//! preserves every argument register and jumps there. So no prototype is needed, and arguments of
//! any shape pass through.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::Library;

/// The functions of a real library, by the indexes of the shim's table.
// The slots come first, because trampolines find them at the address of the static.
#[repr(C)]
pub struct Functions<const COUNT: usize> {
    slots: [AtomicPtr<c_void>; COUNT],
    names: &'static [&'static CStr; COUNT],
    library: fn() -> Option<&'static Library>,
    // A function may have an address in each codegen unit, so the compared addresses are taken
    // once.
    lazy_resolve: AtomicPtr<c_void>,
    missing: AtomicPtr<c_void>,
    unloadable: AtomicPtr<c_void>,
}

impl<const COUNT: usize> Functions<COUNT> {
    /// Creates a table whose slots all lead to `lazy_resolve`. The function `missing` stands in for
    /// one that the real library lacks, and `unloadable` for each while `library` returns none.
    pub const fn new(
        names: &'static [&'static CStr; COUNT],
        library: fn() -> Option<&'static Library>,
        lazy_resolve: *mut c_void,
        missing: *mut c_void,
        unloadable: *mut c_void,
    ) -> Functions<COUNT> {
        let mut slots = [const { AtomicPtr::new(std::ptr::null_mut()) }; COUNT];
        let mut index = 0;
        while index < COUNT {
            slots[index] = AtomicPtr::new(lazy_resolve);
            index += 1;
        }
        Functions {
            slots,
            names,
            library,
            lazy_resolve: AtomicPtr::new(lazy_resolve),
            missing: AtomicPtr::new(missing),
            unloadable: AtomicPtr::new(unloadable),
        }
    }

    /// Returns the real function at `index`, or `None` if the library lacks it or cannot be loaded.
    #[inline]
    pub fn get(&self, index: usize) -> Option<*mut c_void> {
        let known = self.slots.get(index)?.load(Ordering::Acquire);
        let found = if known == self.lazy_resolve.load(Ordering::Relaxed) {
            self.resolve(index)
        } else {
            known
        };
        let stubs = [&self.missing, &self.unloadable].map(|stub| stub.load(Ordering::Relaxed));
        (!stubs.contains(&found)).then_some(found)
    }

    /// Looks up the function at `index` and fills its slot. Threads that race find the same
    /// address.
    #[cold]
    pub fn resolve(&self, index: usize) -> *mut c_void {
        let found = match ((self.library)(), self.names.get(index)) {
            (Some(library), Some(name)) => library
                .symbol(name)
                .unwrap_or_else(|| self.missing.load(Ordering::Relaxed)),
            _ => self.unloadable.load(Ordering::Relaxed),
        };
        if let Some(slot) = self.slots.get(index) {
            slot.store(found, Ordering::Release);
        }
        found
    }
}
