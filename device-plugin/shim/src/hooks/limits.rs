//! Limits of a context: the stack's takes memory at once.
//!
//! The heap of device-side malloc and the buffer of device-side printf take theirs when a module that uses
//! them runs, as measured: the agent's audit bounds these.
#![allow(non_snake_case)]

use std::ffi::c_int;

use super::{contexts, current_device, hooks, known, real};
use crate::codes;

/// `CU_LIMIT_STACK_SIZE`.
const STACK_SIZE: c_int = 0;

hooks! {
    /// `cuCtxSetLimit` (CUDA 3.1).
    fn cuCtxSetLimit(limit: c_int, value: usize) = |plain| {
        let (Ok(device), context) = (current_device(), contexts::current()) else {
            return plain(limit, value);
        };
        if limit != STACK_SIZE || context == 0 {
            return plain(limit, value);
        }
        if known::limit(context, device, value as u64).is_err() {
            return codes::OUT_OF_MEMORY;
        }
        let answer = plain(limit, value);
        let mut now = 0;
        // The driver rounds, and a refused limit leaves the one before.
        if real!(cuCtxGetLimit(&raw mut now => *mut usize, limit => c_int)) == codes::SUCCESS {
            known::limited(context, device, now as u64);
        }
        answer
    };
}
