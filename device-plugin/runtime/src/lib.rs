//! The allocator runtime of a GPU: memory resources that compose, over the CUDA driver.
//!
//! * [`driver`] calls `libcuda.so.1`; the only module here with `unsafe`
//! * [`error`] says what failed, of which class it is and whether a retry helps
//! * [`resource`] is what every source of device memory and every layer over one has in common
//! * [`state`] says whether what a device holds for this process image is still there
//! * [`checksum`] is what kept memory is verified by
//! * [`direct`] is the plainest source: one driver call for each allocation

pub mod checksum;
pub mod direct;
pub mod driver;
pub mod error;
pub mod resource;
pub mod state;

pub use checksum::Checksum;
pub use direct::Direct;
pub use error::{CudaError, ErrorClass, FreeError, ResourceError};
pub use resource::{
    Block, BlockRef, BlockUse, BudgetSnapshot, DeviceMemoryResource, Origin, Outstanding, Reaped,
    Tag,
};
pub use state::{DeviceState, Stale, Supervisor};
