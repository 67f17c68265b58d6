//! The allocator runtime of a GPU: memory resources that compose, over the CUDA driver.
//!
//! * [`driver`] calls `libcuda.so.1`; the only module here with `unsafe`, but for the pool's `lock`
//! * [`error`] says what failed, of which class it is and whether a retry helps
//! * [`resource`] is what every source of device memory and every layer over one has in common
//! * [`state`] says whether what a device holds for this process image is still there
//! * [`tracked`] is typed memory with one owner, in the order of one stream; [`gpu_ref`] has several owners and any streams
//! * [`managed_ref`] is typed managed memory, for the host and the device; [`advice`] says where it should be
//! * [`launch`] launches kernels with what [`arg`] gives them, and puts their work in order
//! * [`peer`] copies between devices; [`streams`] are a few that many share
//! * [`write_token`] is the right to write; [`gpu_token`] is the sealed identity of memory, by the node's agent
//! * [`checksum`] is what kept memory is verified by
//! * [`runtime`] is one GPU: its context, and the resource that it allocates from
//! * sources of memory: [`direct`] (and managed), [`asynchronous`], [`exportable`] (and guard pages)
//! * [`pool`] cuts blocks from slabs of another source without a call of the driver
//! * layers over them: [`budget`], [`supervised`], [`statistics`], [`logging`], [`guard`], [`failure`], [`faults`]
//! * [`kept`] is memory that outlives the process that filled it

pub mod advice;
mod agent;
pub mod arg;
pub mod asynchronous;
pub mod budget;
pub mod checksum;
pub mod direct;
pub mod driver;
pub mod error;
pub mod exportable;
pub mod failure;
pub mod faults;
pub mod gpu_ref;
pub mod gpu_token;
pub mod guard;
pub mod kept;
pub mod launch;
mod lock;
pub mod logging;
pub mod managed_ref;
mod order;
pub mod peer;
pub mod pool;
pub mod resource;
pub mod runtime;
mod shared;
pub mod state;
pub mod statistics;
pub mod streams;
pub mod supervised;
pub mod tracked;
mod tracking;
mod under;
pub mod write_token;

pub use arg::{DevSliceArg, KernelArg};
pub use asynchronous::Async;
pub use budget::Budget;
pub use checksum::Checksum;
pub use direct::{Direct, Managed};
pub use error::{CudaError, ErrorClass, FreeError, ResourceError};
pub use exportable::Exportable;
pub use failure::OnFailure;
pub use faults::FaultInjection;
pub use gpu_ref::GpuRef;
pub use gpu_token::{GpuToken, Tokens};
pub use guard::Guard;
pub use launch::Launch;
pub use logging::Logging;
pub use managed_ref::ManagedRef;
pub use pool::{Pool, PoolSettings, PoolStatistics};
pub use resource::{
    Block, BlockRef, BlockUse, BudgetSnapshot, DeviceMemoryResource, Origin, Outstanding, Reaped,
    Tag,
};
pub use runtime::DeviceRuntime;
pub use state::{DeviceState, Stale, Supervisor};
pub use statistics::Statistics;
pub use streams::StreamPool;
pub use supervised::Supervised;
pub use tracked::TrackedSlice;
pub use write_token::{WriteGate, WriteToken};
