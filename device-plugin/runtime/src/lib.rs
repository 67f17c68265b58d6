//! The allocator runtime of a GPU: memory resources that compose, over the CUDA driver.
//!
//! * [`driver`] calls `libcuda.so.1`; the only module here with `unsafe`
//! * [`error`] says what failed, of which class it is and whether a retry helps
//! * [`resource`] is what every source of device memory and every layer over one has in common
//! * [`state`] says whether what a device holds for this process image is still there
//! * [`checksum`] is what kept memory is verified by
//! * [`runtime`] is one GPU: its context, and the resource that it allocates from
//! * sources of memory: [`direct`] (and managed), [`asynchronous`], [`exportable`] (and guard pages)
//! * [`pool`] cuts blocks from slabs of another source without a call of the driver
//! * layers over them: [`budget`], [`supervised`], [`statistics`], [`logging`], [`guard`], [`failure`], [`faults`]
//! * [`kept`] is memory that outlives the process that filled it

pub mod asynchronous;
pub mod budget;
pub mod checksum;
pub mod direct;
pub mod driver;
pub mod error;
pub mod exportable;
pub mod failure;
pub mod faults;
pub mod guard;
pub mod kept;
pub mod logging;
pub mod pool;
pub mod resource;
pub mod runtime;
pub mod state;
pub mod statistics;
pub mod supervised;
mod tracking;
mod under;

pub use asynchronous::Async;
pub use budget::Budget;
pub use checksum::Checksum;
pub use direct::{Direct, Managed};
pub use error::{CudaError, ErrorClass, FreeError, ResourceError};
pub use exportable::Exportable;
pub use failure::OnFailure;
pub use faults::FaultInjection;
pub use guard::Guard;
pub use logging::Logging;
pub use pool::{Pool, PoolSettings, PoolStatistics};
pub use resource::{
    Block, BlockRef, BlockUse, BudgetSnapshot, DeviceMemoryResource, Origin, Outstanding, Reaped,
    Tag,
};
pub use runtime::DeviceRuntime;
pub use state::{DeviceState, Stale, Supervisor};
pub use statistics::Statistics;
pub use supervised::Supervised;
