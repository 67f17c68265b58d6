//! Implements versions, error strings and process names.

use crate::abi::{Code, Out, exports, put_text};
use crate::library::library;
use std::ffi::{CStr, c_char};

fn cuda_version(out: &Out<i32>) -> Result<(), Code> {
    let version = library()?.sim.config.cuda_version;
    out.set(version.major * 1000 + version.minor * 10)
}

exports! {
    fn nvmlSystemGetDriverVersion(text: Out<u8>, len: u32) = put_text(&text, len, &library()?.sim.config.driver_version);
    fn nvmlSystemGetNVMLVersion(text: Out<u8>, len: u32) = {
        let library = library()?;
        // NVML's version is CUDA's major version and the driver's version.
        put_text(&text, len, &format!("{}.{}", library.sim.config.cuda_version.major, library.sim.config.driver_version))
    };
    fn nvmlSystemGetCudaDriverVersion(version: Out<i32>) = cuda_version(&version);
    fn nvmlSystemGetCudaDriverVersion_v2(version: Out<i32>) = cuda_version(&version);
    fn nvmlSystemGetProcessName(pid: u32, text: Out<u8>, len: u32) = {
        library()?;
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).map_err(|_| Code::NOT_FOUND)?;
        let name = line.split(|byte| *byte == 0).next().unwrap_or_default();
        put_text(&text, len, &String::from_utf8_lossy(name))
    };
}

/// The description of an error code.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(code: u32) -> *const c_char {
    let known = ERRORS.iter().find(|(known, _)| *known == code);
    known.map_or(c"Unknown Error", |(_, text)| text).as_ptr()
}

static ERRORS: &[(u32, &CStr)] = &[
    (0, c"Success"),
    (1, c"Uninitialized"),
    (2, c"Invalid Argument"),
    (3, c"Not Supported"),
    (4, c"Insufficient Permissions"),
    (5, c"Already Initialized"),
    (6, c"Not Found"),
    (7, c"Insufficient Size"),
    (8, c"Insufficient External Power"),
    (9, c"Driver Not Loaded"),
    (10, c"Timeout"),
    (11, c"Interrupt Request Issue"),
    (12, c"NVML Shared Library Not Found"),
    (13, c"Function Not Found"),
    (14, c"Corrupted infoROM"),
    (15, c"GPU is lost"),
    (16, c"GPU requires reset"),
    (17, c"GPU access blocked by the operating system"),
    (18, c"Driver/library version mismatch"),
    (19, c"In use by another client"),
    (20, c"Insufficient Memory"),
    (21, c"No data"),
    (25, c"Argument version mismatch"),
];
