//! Charges stacks and a large heap when a program sets their limits by `cuCtxSetLimit`.
//!
//! The first launch of a kernel that uses device-side malloc takes the whole heap (fact F25). The
//! shim does not see which launch that is, so it charges a limit above 64 MiB when it is set. What
//! smaller heaps and the buffer of device-side printf take, the agent settles.
#![allow(non_snake_case)]

use std::ffi::c_int;

use super::context_registry::{self, Part};
use super::hooks;
use crate::curesult;
use crate::driver_calls::{context_ids, current_device, driver};

/// `CU_LIMIT_STACK_SIZE`.
const STACK_SIZE: c_int = 0;
/// `CU_LIMIT_MALLOC_HEAP_SIZE`.
const MALLOC_HEAP_SIZE: c_int = 2;

hooks! {
    /// `cuCtxSetLimit` (CUDA 3.1).
    fn cuCtxSetLimit(limit: c_int, value: usize) = |driver_call| {
        let part = match limit {
            STACK_SIZE => Part::Stacks,
            MALLOC_HEAP_SIZE => Part::Heap,
            _ => return driver_call(limit, value),
        };
        let (Ok(device), context @ 1..) = (current_device(), context_ids::current_id()) else {
            return driver_call(limit, value);
        };
        let context = (device, context);
        if context_registry::charge_limit(context, part, value as u64).is_err() {
            return curesult::OUT_OF_MEMORY;
        }
        let answer = driver_call(limit, value);
        let mut now = 0;
        // The driver rounds the limit, and a refused call leaves the old one.
        if driver!(cuCtxGetLimit(&raw mut now => *mut usize, limit => c_int)) == curesult::SUCCESS {
            context_registry::limit_set(context, part, now as u64);
        }
        answer
    };
}
