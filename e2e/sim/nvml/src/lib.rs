//! The simulated `libnvidia-ml.so.1`.
//!
//! # What it does not do
//! No clocks, power, temperatures, fans, ECC counters, accounting, vGPU or GPM: such a call is not
//! exported, and a program that looks for it is told that the library is too old.
#![allow(non_snake_case)]

mod abi;
mod device;
mod events;
mod library;
mod memory;
mod mig;
mod processes;
mod system;
