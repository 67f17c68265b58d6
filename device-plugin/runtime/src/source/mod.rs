//! Allocates device memory by driver calls, at the bottom of every stack of resources.
#![forbid(unsafe_code)]

#[cfg(feature = "cudarc-interop")]
pub(crate) mod adopted;
mod block_uses;
pub mod direct;
mod live_blocks;
pub mod stream_ordered;
pub mod vmm;
