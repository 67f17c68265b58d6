//! Opens the session with the agent when the program calls `cuInit`.
//!
//! A process needs no context to take memory, and the driver lists no process without one. By the
//! session the agent tells a program that bypassed the shim from one that has taken nothing yet.
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
