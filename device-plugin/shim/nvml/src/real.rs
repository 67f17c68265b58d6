//! The real management library, opened at the first call.

use std::ffi::{CStr, c_void};
use std::sync::OnceLock;

/// Where the agent mounts the real library (the CDI device's `/opt/bursar/drv`): a name that does
/// not start with `lib`, so that `ldconfig` does not take it for one.
const PATH: &CStr = c"/opt/bursar/drv/nvidia-ml.so.1";

/// The real library.
pub(crate) struct Library(*mut c_void);

// SAFETY: a handle of dlopen belongs to the process, not to a thread, and is never closed.
unsafe impl Send for Library {}
// SAFETY: as above; dlsym may be called from any thread.
unsafe impl Sync for Library {}

impl Library {
    /// The address of a symbol of the library.
    pub(crate) fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: the handle is open for ever, and the name ends with a zero.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    }
}

/// The real library; `None` when it cannot be opened. It is tried once: a program that got an error
/// from its first call does not get a driver later.
pub(crate) fn library() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    LIBRARY
        .get_or_init(|| {
            // SAFETY: opening the driver runs its constructors, as linking with it would.
            let handle = unsafe { libc::dlopen(PATH.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            (!handle.is_null()).then_some(Library(handle))
        })
        .as_ref()
}
