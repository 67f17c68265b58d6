//! Charges stacks when a program sets their limit by `cuCtxSetLimit`.
//!
//! The heap of device-side malloc and the buffer of device-side printf are allocated when a module
//! that uses them runs, as measured. The agent's audit bounds these.
#![allow(non_snake_case)]

use std::ffi::c_int;

use super::{context_registry, contexts, hooks};
use crate::curesult;
use crate::driver_calls::{current_device, driver};

/// `CU_LIMIT_STACK_SIZE`.
const STACK_SIZE: c_int = 0;

hooks! {
    /// `cuCtxSetLimit` (CUDA 3.1).
    fn cuCtxSetLimit(limit: c_int, value: usize) = |driver_call| {
        let (Ok(device), context) = (current_device(), contexts::current_id()) else {
            return driver_call(limit, value);
        };
        if limit != STACK_SIZE || context == 0 {
            return driver_call(limit, value);
        }
        if context_registry::charge_limit(context, device, value as u64).is_err() {
            return curesult::OUT_OF_MEMORY;
        }
        let answer = driver_call(limit, value);
        let mut now = 0;
        // The driver rounds the limit, and a refused call leaves the old one.
        if driver!(cuCtxGetLimit(&raw mut now => *mut usize, limit => c_int)) == curesult::SUCCESS {
            context_registry::limit_set(context, device, now as u64);
        }
        answer
    };
}
