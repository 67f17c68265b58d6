//! The simulated `libcuda.so.1`.
//!
//! # What it does not do
//! It runs no kernels but its own, knows no arrays, textures, graphs or multicast, and copies at once what a
//! GPU would copy later. Device pointers are host pointers.
#![allow(non_snake_case)]

mod abi;
mod context;
mod copy;
mod device;
mod entry;
mod init;
mod memory;
mod pool;
mod process;
mod stream;
