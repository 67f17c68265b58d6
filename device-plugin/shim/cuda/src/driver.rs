//! Opens the real driver library at the first call: the host's, or the image's own by NVIDIA's rule
//! ([`compat`]).

use std::ffi::CStr;
use std::sync::OnceLock;

use bursar_shim_common::Library;

use crate::compat;
use crate::curesult::{self, CuResult};

/// The path where the agent mounts the real library (the CDI device's `/opt/bursar/drv`). The name
/// does not start with `lib`, so that `ldconfig` ignores the file.
const PATH: &CStr = c"/opt/bursar/drv/cuda.so.1";

/// Returns the real library, or `None` when it cannot be opened. Opening is tried once: a program
/// whose first call failed gets no driver later.
pub(crate) fn library() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    LIBRARY
        .get_or_init(|| images().or_else(|| Library::open(PATH)))
        .as_ref()
}

/// Opens the image's own library. Its helper libraries are opened before it, by their paths in the
/// image: the loader then looks for no other file of the same name.
fn images() -> Option<Library> {
    let (library, helpers) = compat::library()?;
    for helper in helpers {
        // A helper that cannot be opened is not needed, or the library reports that it is missing.
        let _ = Library::open(&helper);
    }
    Library::open(&library)
}

/// Stands in for a function that this driver lacks.
pub(crate) extern "C" fn missing() -> CuResult {
    curesult::NOT_SUPPORTED
}

/// Stands in for every function while the real library cannot be opened.
pub(crate) extern "C" fn unloadable() -> CuResult {
    curesult::SHARED_OBJECT_INIT_FAILED
}
