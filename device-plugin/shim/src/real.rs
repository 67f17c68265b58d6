//! The real driver's library, opened at the first call: the host's, or by NVIDIA's rule the image's ([`compat`]).

use std::ffi::{CStr, c_void};
use std::sync::OnceLock;

use crate::compat;

/// Where the agent mounts the real library (the CDI device's `/opt/bursar/drv`): a name that does
/// not start with `lib`, so that `ldconfig` does not take it for one.
const PATH: &CStr = c"/opt/bursar/drv/cuda.so.1";

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
        .get_or_init(|| images().or_else(|| open(PATH)))
        .as_ref()
}

/// The image's own. What it opens by name must be of its version: a loader that has a library of that
/// name looks for no other.
fn images() -> Option<Library> {
    let (library, helpers) = compat::library()?;
    for helper in helpers {
        // One that does not open was not needed, or is missed by the library itself.
        let _ = open(&helper);
    }
    open(&library)
}

fn open(path: &CStr) -> Option<Library> {
    // SAFETY: opening the driver runs its constructors, as linking with it would.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    (!handle.is_null()).then_some(Library(handle))
}
