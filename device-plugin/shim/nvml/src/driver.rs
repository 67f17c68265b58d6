//! Opens the real management library at the first call.

use std::ffi::CStr;
use std::sync::OnceLock;

use bursar_shim_common::Library;

use crate::nvml_return::{self, NvmlReturn};

/// The path where the agent mounts the real library (the CDI device's `/opt/bursar/drv`). The name
/// does not start with `lib`, so that `ldconfig` ignores the file.
const PATH: &CStr = c"/opt/bursar/drv/nvidia-ml.so.1";

/// Returns the real library, or `None` when it cannot be opened. Opening is tried once: a program
/// whose first call failed gets no driver later.
pub(crate) fn library() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    LIBRARY.get_or_init(|| Library::open(PATH)).as_ref()
}

/// Stands in for a function that this driver lacks.
pub(crate) extern "C" fn missing() -> NvmlReturn {
    nvml_return::FUNCTION_NOT_FOUND
}

/// Stands in for every function while the real library cannot be opened.
pub(crate) extern "C" fn unloadable() -> NvmlReturn {
    nvml_return::LIBRARY_NOT_FOUND
}
