//! Opens shared libraries that stay open for the life of the process.

use std::ffi::{CStr, c_void};

/// A handle of `dlopen`.
pub struct Library(*mut c_void);

// SAFETY: a handle of dlopen belongs to the process, not to a thread, and is never closed.
unsafe impl Send for Library {}
// SAFETY: as above; dlsym may be called from any thread.
unsafe impl Sync for Library {}

impl Library {
    /// Opens a library of the driver.
    pub fn open(path: &CStr) -> Option<Library> {
        // SAFETY: opening the driver runs its constructors, as linking with it would.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        (!handle.is_null()).then_some(Library(handle))
    }

    /// Returns the address of a symbol.
    pub fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: the handle is open for ever, and the name ends with a zero.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    }
}
