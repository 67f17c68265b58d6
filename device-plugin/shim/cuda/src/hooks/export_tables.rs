//! Refuses the unnamed table of functions with which NVIDIA's tool cuda-checkpoint stops processes.
//!
//! A restore hangs where the process maps retained memory, and takes memory without a charge. The
//! driver's functions for checkpoints are refused too. All other tables are passed on: the CUDA
//! runtime and profilers need theirs.
#![allow(non_snake_case)]

use std::ffi::c_void;

use super::hooks;
use crate::curesult;

/// The table of cuda-checkpoint 570.86, `69A28E9F-2449-8B47-B030-C5DA330EA4E9`.
const CHECKPOINT_TABLE: [u8; 16] = [
    0x69, 0xa2, 0x8e, 0x9f, 0x24, 0x49, 0x8b, 0x47, 0xb0, 0x30, 0xc5, 0xda, 0x33, 0x0e, 0xa4, 0xe9,
];

hooks! {
    /// `cuGetExportTable` (CUDA 3.0).
    fn cuGetExportTable(table: *mut *const c_void, id: *const [u8; 16]) = |driver_call| {
        // SAFETY: the program passes a valid id or null. An array of bytes needs no alignment.
        match unsafe { id.as_ref() } {
            Some(id) if *id == CHECKPOINT_TABLE => curesult::NOT_SUPPORTED,
            _ => driver_call(table, id),
        }
    };
}
