//! Opens the real management library at the first call.

use std::ffi::CStr;
use std::sync::OnceLock;

use crate::library::Library;
use crate::nvml_return::{self, NvmlReturn};

/// The return code of the library that the trampolines forward to.
pub(crate) type Code = NvmlReturn;

/// The value that a trampoline returns for a function that this driver lacks.
pub(crate) const MISSING: Code = nvml_return::FUNCTION_NOT_FOUND;
/// The value that a trampoline returns while the real library cannot be opened.
pub(crate) const UNLOADABLE: Code = nvml_return::LIBRARY_NOT_FOUND;

/// The path where the agent mounts the real library (the CDI device's `/opt/bursar/drv`). The name
/// does not start with `lib`, so that `ldconfig` ignores the file.
const PATH: &CStr = c"/opt/bursar/drv/nvidia-ml.so.1";

/// Returns the real library, or `None` when it cannot be opened. Opening is tried once: a program
/// whose first call failed gets no driver later.
pub(crate) fn library() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    LIBRARY.get_or_init(|| Library::open(PATH)).as_ref()
}
