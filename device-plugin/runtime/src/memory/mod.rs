//! Gives allocated blocks an element type, an owner and an order of use across streams.
#![forbid(unsafe_code)]

pub mod async_runtime;
pub mod error;
pub mod gpu_ref;
pub mod gpu_token;
#[cfg(feature = "cudarc-interop")]
pub mod interop;
pub mod kernel_arg;
pub mod launch;
pub mod managed_allocator;
pub mod managed_ref;
mod multi_stream;
mod owned_block;
pub mod peer_copy;
pub mod prefetch;
pub mod shared_managed;
pub mod slice;
pub mod stream_pool;
mod stream_sync;
pub mod submission;
pub mod write_token;
