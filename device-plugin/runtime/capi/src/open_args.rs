//! Reads the arguments of `bursar_retained_open` from the caller's memory.

use std::ffi::{CStr, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use bursar_runtime::retained::Key;

use crate::last_error::Failure;

/// `bursar_open_args`.
#[derive(Debug)]
#[repr(C)]
pub struct RawOpenArgs {
    name: *const c_char,
    socket: *const c_char,
    key: Key,
    bytes: u64,
    timeout_ms: u64,
    device: i32,
}

/// Owned arguments.
#[derive(Debug)]
pub(crate) struct OpenArgs {
    pub(crate) name: String,
    pub(crate) socket: Option<PathBuf>,
    pub(crate) key: Key,
    pub(crate) bytes: u64,
    pub(crate) timeout: Duration,
    pub(crate) device: u32,
}

impl OpenArgs {
    /// Copies the arguments.
    ///
    /// # Safety
    /// The texts are null or end with a zero.
    pub(crate) unsafe fn read(raw: &RawOpenArgs) -> Result<OpenArgs, Failure> {
        let RawOpenArgs {
            name,
            socket,
            key,
            bytes,
            timeout_ms,
            device,
        } = raw;
        // SAFETY: the caller keeps the contract.
        let (name, socket) = unsafe { (text(*name), text(*socket)) };
        let name = name.ok_or(Failure::null("name"))?.to_str();
        Ok(OpenArgs {
            name: name
                .map_err(|_| {
                    Failure::invalid(
                        "failed to open the lease: its name is not UTF-8; pass printable ASCII"
                            .to_owned(),
                    )
                })?
                .to_owned(),
            socket: socket.map(path),
            key: *key,
            bytes: *bytes,
            timeout: Duration::from_millis(*timeout_ms),
            device: ordinal(*device)?,
        })
    }
}

/// Returns the ordinal of a device.
pub(crate) fn ordinal(device: i32) -> Result<u32, Failure> {
    u32::try_from(device).map_err(|_| {
        Failure::invalid(format!(
            "failed to use device {device}: there is no such device; pass an ordinal from 0"
        ))
    })
}

/// Returns the path in a text of C.
pub(crate) fn path(text: &CStr) -> PathBuf {
    PathBuf::from(OsStr::from_bytes(text.to_bytes()))
}

/// # Safety
/// The pointer is null, or its text ends with a zero and lives as long as the result.
pub(crate) unsafe fn text<'a>(pointer: *const c_char) -> Option<&'a CStr> {
    // SAFETY: not null, and the caller keeps the contract.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) })
}
