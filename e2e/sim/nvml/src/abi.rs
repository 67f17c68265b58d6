//! Declares error codes of `nvml.h`, and entry points that catch panics.

use bursar_sim_state::ffi;
use bursar_sim_state::ffi::NullPointer;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A pointer argument to write through.
pub type Out<T> = ffi::Out<T, Code>;
/// A string argument.
pub type Text = ffi::Text<Code>;

/// An `nvmlReturn_t` other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code(pub(crate) u32);

/// The result of an entry point.
pub(crate) type NvmlResult = Result<(), Code>;

impl Code {
    pub(crate) const UNINITIALIZED: Code = Code(1);
    pub(crate) const INVALID_ARGUMENT: Code = Code(2);
    pub(crate) const NOT_SUPPORTED: Code = Code(3);
    pub(crate) const NOT_FOUND: Code = Code(6);
    pub(crate) const INSUFFICIENT_SIZE: Code = Code(7);
    pub(crate) const DRIVER_NOT_LOADED: Code = Code(9);
    pub(crate) const TIMEOUT: Code = Code(10);
    pub(crate) const OPERATING_SYSTEM: Code = Code(17);
    pub(crate) const GPU_IS_LOST: Code = Code(15);
    pub(crate) const ARGUMENT_VERSION_MISMATCH: Code = Code(25);
    pub(crate) const UNKNOWN: Code = Code(999);
}

impl From<NullPointer> for Code {
    fn from(_: NullPointer) -> Code {
        Code::INVALID_ARGUMENT
    }
}

/// Runs an entry point's body, and turns a panic into `NVML_ERROR_UNKNOWN`.
pub(crate) fn call(body: impl FnOnce() -> NvmlResult) -> u32 {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(Code(code))) => code,
        Err(_) => Code::UNKNOWN.0,
    }
}

/// Writes a NUL-terminated string into a caller's buffer.
pub(crate) fn put_text(buffer: &Out<u8>, len: u32, text: &str) -> NvmlResult {
    if text.len() >= len as usize {
        return Err(Code::INSUFFICIENT_SIZE);
    }
    buffer.set_all(text.bytes().chain([0]))
}

/// Declares and exports entry points.
macro_rules! exports {
    ($(fn $name:ident($($arg:ident: $kind:ty),* $(,)?) = $body:expr;)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "` of NVML.")]
            #[unsafe(no_mangle)]
            pub extern "C" fn $name($($arg: $kind),*) -> u32 {
                $crate::abi::call(|| $body)
            }
        )*
    };
}
pub(crate) use exports;
