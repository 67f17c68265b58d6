//! The allocator runtime of a GPU: memory resources that compose, over the CUDA driver.
//!
//! * [`driver`] calls `libcuda.so.1`; it is part of the crate `bursar-driver`.
//! * [`resource`] defines [`DeviceMemoryResource`], which each source and each adaptor implements,
//!   and [`PhysicalMemoryResource`], for memory that has no address and needs no context.
//! * [`source`] allocates from the driver: [`Direct`], [`Managed`], [`StreamOrdered`] and
//!   [`Exportable`]; [`Physical`] memory is the driver crate's.
//! * [`pool`] cuts blocks from slabs of another resource without calling the driver.
//! * [`adaptor`] adds a limit, a log, statistics or checks to an upstream resource.
//! * [`memory`] gives blocks a type, an owner and an order of use: [`TrackedSlice`], [`GpuRef`],
//!   [`ManagedRef`], [`Launch`], [`WriteToken`] and [`GpuToken`].
//! * [`retained`] opens device memory that outlives the process that filled it.
//! * [`checksum`] computes the checksum by which retained memory is verified.
//! * [`state`] says whether the memory of this process image on a device is still valid.
//! * [`runtime`] is the entry point of a program: one GPU, its context and its resource.
//!   [`NoContextRuntime`] is that of a process without a context.
//! * [`error`] classifies each failure and says whether a retry can succeed.

pub mod adaptor;
mod agent_client;
pub mod checksum;
pub mod memory;
pub mod pool;
pub mod resource;
pub mod retained;
pub mod runtime;
pub mod source;
mod sync;
mod vouched;

pub use bursar_driver::{driver, error, state};

pub use bursar_driver::NoContextRuntime;

pub use adaptor::budget::Budget;
pub use adaptor::debug_guard::DebugGuard;
pub use adaptor::default_stack::DefaultStack;
pub use adaptor::fault_injection::FaultInjection;
pub use adaptor::logging::Logging;
pub use adaptor::on_failure::OnFailure;
pub use adaptor::state_gate::StateGate;
pub use adaptor::statistics::Statistics;
pub use checksum::DeviceChecksum;
pub use error::{CudaError, ErrorClass, ResourceError};
pub use memory::async_runtime::AsyncRuntime;
pub use memory::gpu_ref::GpuRef;
pub use memory::gpu_token::{GpuToken, TokenClient};
pub use memory::kernel_arg::{DevSliceArg, KernelArg};
pub use memory::launch::Launch;
pub use memory::managed_allocator::ManagedAllocator;
pub use memory::managed_ref::ManagedRef;
pub use memory::shared_managed::SharedManagedRef;
pub use memory::slice::{FirstUse, TrackedSlice};
pub use memory::stream_pool::StreamPool;
pub use memory::submission::submit_in;
pub use memory::write_token::{WriteGate, WriteToken};
pub use pool::{Pool, PoolSettings, PoolStatistics};
pub use resource::physical::{Physical, PhysicalBlock, PhysicalMemoryResource, ReleaseError};
pub use resource::{
    Block, BlockRef, BlockUse, BudgetSnapshot, DeviceMemoryResource, FreeError, Origin,
    Outstanding, Reaped, Tag,
};
pub use runtime::DeviceRuntime;
pub use source::direct::{Direct, Managed};
pub use source::stream_ordered::StreamOrdered;
pub use source::vmm::Exportable;
pub use state::subscription::StateSubscription;
pub use state::{DeviceGeneration, DeviceState, ErrorMonitor, StaleReason};
