//! Declares types and error codes of `cuda.h`, as far as this library uses them.

use bursar_sim_state::SimError;
use bursar_sim_state::ffi;
use bursar_sim_state::ffi::NullPointer;

/// A pointer argument to write through.
pub type Out<T> = ffi::Out<T, Code>;
/// A pointer argument to read through.
pub type In<T> = ffi::In<T, Code>;
/// A string argument.
pub type Text = ffi::Text<Code>;

/// A `CUresult` other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code(pub i32);

/// The result of an entry point.
pub(crate) type DriverResult = Result<(), Code>;

impl Code {
    pub(crate) const INVALID_VALUE: Code = Code(1);
    pub(crate) const OUT_OF_MEMORY: Code = Code(2);
    pub(crate) const NOT_INITIALIZED: Code = Code(3);
    pub(crate) const DEVICE_UNAVAILABLE: Code = Code(46);
    pub(crate) const NO_DEVICE: Code = Code(100);
    pub(crate) const INVALID_DEVICE: Code = Code(101);
    pub(crate) const INVALID_CONTEXT: Code = Code(201);
    pub(crate) const INVALID_HANDLE: Code = Code(400);
    pub(crate) const ILLEGAL_STATE: Code = Code(401);
    pub(crate) const NOT_FOUND: Code = Code(500);
    pub(crate) const NOT_READY: Code = Code(600);
    pub(crate) const ILLEGAL_ADDRESS: Code = Code(700);
    pub(crate) const ASSERT: Code = Code(710);
    pub(crate) const MISALIGNED_ADDRESS: Code = Code(716);
    pub(crate) const LAUNCH_FAILED: Code = Code(719);
    pub(crate) const NOT_SUPPORTED: Code = Code(801);
    pub(crate) const CAPTURE_UNSUPPORTED: Code = Code(900);
    pub(crate) const CAPTURE_INVALIDATED: Code = Code(901);
    pub(crate) const UNKNOWN: Code = Code(999);
}

impl From<SimError> for Code {
    fn from(error: SimError) -> Code {
        match error {
            SimError::OutOfMemory { .. } | SimError::TableFull(_) => Code::OUT_OF_MEMORY,
            SimError::NotAnObject => Code::INVALID_VALUE,
            SimError::Config(_)
            | SimError::Table(_)
            | SimError::Io { .. }
            | SimError::ImageCollected => Code::UNKNOWN,
        }
    }
}

impl From<NullPointer> for Code {
    fn from(_: NullPointer) -> Code {
        Code::INVALID_VALUE
    }
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Location {
    pub(crate) kind: i32,
    pub(crate) id: i32,
}

/// Writes a NUL-terminated string into a caller's buffer, truncated to fit.
pub(crate) fn put_text(buffer: &Out<u8>, len: i32, text: &str) -> DriverResult {
    let room = usize::try_from(len)
        .ok()
        .filter(|len| *len > 0)
        .ok_or(Code::INVALID_VALUE)?;
    let bytes = &text.as_bytes()[..text.len().min(room - 1)];
    buffer.set_all(bytes.iter().copied().chain([0]))
}
