#![doc = include_str!("../README.md")]
#![allow(non_snake_case)]

mod abi;
mod device;
mod events;
mod library;
mod limits;
mod memory;
mod mig;
mod processes;
mod system;
mod utilization;
