//! Implements initialisation, version and error names.

use crate::abi::{Code, Out};
use crate::entry::exports;
use std::ffi::{CStr, c_char};

exports! {
    fn cuInit(flags: u32) = if flags == 0 { crate::process::init_driver() } else { Err(Code::INVALID_VALUE) };
    fn cuDriverGetVersion(version: Out<i32>) = {
        let config = bursar_sim_state::Config::read(&crate::process::machine_dir().join("config.toml"));
        let cuda = config.map_err(|_| Code::UNKNOWN)?.cuda_version;
        version.set(cuda.major * 1000 + cuda.minor * 10)
    };
    fn cuGetErrorName(code: i32, text: Out<*const c_char>) = put_error_text(code, &text, |(_, name, _)| name);
    fn cuGetErrorString(code: i32, text: Out<*const c_char>) = put_error_text(code, &text, |(_, _, words)| words);
}

type Error = (i32, &'static CStr, &'static CStr);

fn put_error_text(
    code: i32,
    text: &Out<*const c_char>,
    part: fn(Error) -> &'static CStr,
) -> Result<(), Code> {
    match ERRORS.iter().find(|(known, _, _)| *known == code) {
        Some(error) => text.set(part(*error).as_ptr()),
        None => {
            text.set(std::ptr::null())?;
            Err(Code::INVALID_VALUE)
        }
    }
}

include!("errors.rs");
