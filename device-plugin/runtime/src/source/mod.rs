//! Allocates device memory by calls of the driver: the sources at the bottom of every stack of resources.
#![forbid(unsafe_code)]

mod block_uses;
pub mod direct;
pub mod stream_ordered;
pub mod vmm;
