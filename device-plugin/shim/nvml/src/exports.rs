//! Exports the functions of NVML that have no hook. The build script generates a line for each from
//! `nvml-symbols.txt`.

use bursar_shim_common::forward;

use crate::forward::FUNCTIONS;

#[allow(non_snake_case)]
mod generated {
    use super::*;
    include!(concat!(env!("OUT_DIR"), "/exports.rs"));
}
