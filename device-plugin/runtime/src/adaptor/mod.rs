//! Adds a limit, a log, a check or a fault to an upstream resource.
#![forbid(unsafe_code)]

pub mod budget;
pub mod debug_guard;
pub mod default_stack;
pub mod fault_injection;
pub mod logging;
pub mod on_failure;
pub mod state_gate;
pub mod statistics;
mod upstream;
