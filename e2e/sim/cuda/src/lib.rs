#![doc = include_str!("../README.md")]
#![allow(non_snake_case)]

mod abi;
mod array;
mod capture;
mod checkpoint;
mod context;
mod context_stack;
mod copy;
mod device;
mod entry;
mod export_table;
mod granularity;
mod graph;
mod host;
mod init;
mod ipc;
mod kernel;
mod launch;
mod library;
mod memory;
mod module;
mod multicast;
mod pageable;
mod pointer;
mod pool;
mod proc_address;
mod process;
mod stream;
mod tables;
mod unsupported;
mod vmm;
