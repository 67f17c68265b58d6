//! The real driver's library, opened at the first call: the host's, or by NVIDIA's rule the image's ([`compat`]).

use std::ffi::CStr;
use std::sync::OnceLock;

use crate::compat;
use crate::curesult::{self, CuResult};
use crate::library::Library;

/// The return code of the library that the trampolines forward to.
pub(crate) type Code = CuResult;

/// What a trampoline returns for a function that this driver lacks.
pub(crate) const MISSING: Code = curesult::NOT_SUPPORTED;
/// What a trampoline returns while the real library cannot be opened.
pub(crate) const UNLOADABLE: Code = curesult::SHARED_OBJECT_INIT_FAILED;

/// Where the agent mounts the real library (the CDI device's `/opt/bursar/drv`): a name that does
/// not start with `lib`, so that `ldconfig` does not take it for one.
const PATH: &CStr = c"/opt/bursar/drv/cuda.so.1";

/// The real library; `None` when it cannot be opened. It is tried once: a program that got an error
/// from its first call does not get a driver later.
pub(crate) fn library() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    LIBRARY
        .get_or_init(|| images().or_else(|| Library::open(PATH)))
        .as_ref()
}

/// The image's own. What it opens by name must be of its version: a loader that has a library of that
/// name looks for no other.
fn images() -> Option<Library> {
    let (library, helpers) = compat::library()?;
    for helper in helpers {
        // One that does not open was not needed, or is missed by the library itself.
        let _ = Library::open(&helper);
    }
    Library::open(&library)
}
