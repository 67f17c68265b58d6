//! The real management library, opened at the first call.

use std::ffi::CStr;
use std::sync::OnceLock;

use crate::library::Library;
use crate::nvml_return::{self, NvmlReturn};

/// The return code of the library that the trampolines forward to.
pub(crate) type Code = NvmlReturn;

/// What a trampoline returns for a function that this driver lacks.
pub(crate) const MISSING: Code = nvml_return::FUNCTION_NOT_FOUND;
/// What a trampoline returns while the real library cannot be opened.
pub(crate) const UNLOADABLE: Code = nvml_return::LIBRARY_NOT_FOUND;

/// Where the agent mounts the real library (the CDI device's `/opt/bursar/drv`): a name that does
/// not start with `lib`, so that `ldconfig` does not take it for one.
const PATH: &CStr = c"/opt/bursar/drv/nvidia-ml.so.1";

/// The real library; `None` when it cannot be opened. It is tried once: a program that got an error
/// from its first call does not get a driver later.
pub(crate) fn library() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    LIBRARY.get_or_init(|| Library::open(PATH)).as_ref()
}
