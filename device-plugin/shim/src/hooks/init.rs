//! Says hello to the agent as soon as the process uses the driver.
//!
//! A process needs no context to take memory, and the driver lists nobody without one. The agent tells a program that
//! went past the shim from one that has taken nothing yet by its session.
#![allow(non_snake_case)]

use std::ffi::c_uint;

use super::hooks;
use crate::accounting;
use crate::curesult;

hooks! {
    /// `cuInit` (CUDA 2.0).
    fn cuInit(flags: c_uint) = |driver_call| {
        let answer = driver_call(flags);
        if answer == curesult::SUCCESS {
            accounting::open_session();
        }
        answer
    };
}
