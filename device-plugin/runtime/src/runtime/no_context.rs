//! Provides the runtime of a process that must never have a context.
//!
//! A context costs hundreds of MiB of the GPU, NVML lists its process, and a kernel's fault poisons
//! it. Physical memory needs none: it can be created and exported, and another process maps it.
#![forbid(unsafe_code)]

use std::sync::Arc;

use crate::adaptor::budget::BudgetAccount;
use crate::adaptor::statistics::AllocationCounts;
use crate::driver::{Driver, DriverError, GpuUuid};
use crate::error::CudaError;
use crate::resource::BudgetSnapshot;
use crate::resource::physical::PhysicalMemoryResource;
use crate::runtime::DeviceRuntime;
use crate::source::physical::Physical;
use crate::state::ErrorMonitor;
use crate::{Budget, StateGate, Statistics};

/// `CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS`
const CONCURRENT_MANAGED_ACCESS: i32 = 89;

/// Physical memory resource that several owners share.
pub type SharedPhysicalResource = Arc<dyn PhysicalMemoryResource>;

/// Default stack of a runtime without a context.
type PhysicalStack = Statistics<StateGate<Budget<Physical>>>;

/// Physical memory of a runtime without a context.
#[derive(Debug)]
pub struct NoContext {
    resource: SharedPhysicalResource,
    stack: Arc<PhysicalStack>,
    account: Arc<BudgetAccount>,
}

/// A runtime without a context creates memory that other processes map. None of its methods returns
/// a context, a stream or an address, so it cannot create a context by mistake.
///
/// ```no_run
/// use bursar_runtime::driver::GpuUuid;
/// use bursar_runtime::{DeviceRuntime, PhysicalMemoryResource as _, Tag};
/// # fn send(_: std::os::fd::OwnedFd) {}
///
/// fn share(uuid: GpuUuid) -> Result<(), Box<dyn std::error::Error>> {
///     let runtime = DeviceRuntime::without_context(uuid)?;
///     runtime.set_limit(8 << 30);
///     let memory = runtime.physical();
///     let block = memory.create(memory.round_up(1 << 20)?, Tag("shared"))?;
///     send(block.export()?); // the descriptor keeps the memory
///     memory.release(block)?;
///     println!("{} bytes were created", runtime.counts().bytes.total);
///     Ok(())
/// }
/// ```
///
/// ```compile_fail,E0599
/// # use bursar_runtime::{DeviceRuntime, runtime::no_context::NoContext};
/// fn reach(runtime: &DeviceRuntime<NoContext>) {
///     runtime.context();
/// }
/// ```
impl DeviceRuntime<NoContext> {
    /// Starts a runtime of a GPU without a context. Its budget is the GPU's memory.
    ///
    /// # Errors
    /// No driver, no such GPU in this process, or the driver's error.
    pub fn without_context(uuid: GpuUuid) -> Result<DeviceRuntime<NoContext>, DriverError> {
        let device = Driver::get()?.device_by_uuid(uuid)?;
        let state = ErrorMonitor::global().new_state();
        let account = Arc::new(BudgetAccount::new(device.total_memory()?));
        let budget = Budget::with_account(Physical::new(&device)?, Arc::clone(&account));
        let stack = Arc::new(Statistics::new(StateGate::new(budget, Arc::clone(&state))));
        Ok(DeviceRuntime {
            device,
            uuid,
            state,
            memory: NoContext {
                resource: Arc::clone(&stack) as SharedPhysicalResource,
                stack,
                account,
            },
        })
    }

    /// Returns a runtime of the same GPU with another resource, such as an adaptor over this one's.
    #[must_use]
    pub fn with_physical<R: PhysicalMemoryResource + 'static>(
        &self,
        compose: impl FnOnce(SharedPhysicalResource) -> R,
    ) -> DeviceRuntime<NoContext> {
        DeviceRuntime {
            device: self.device,
            uuid: self.uuid,
            state: Arc::clone(&self.state),
            memory: NoContext {
                resource: Arc::new(compose(Arc::clone(&self.memory.resource))),
                stack: Arc::clone(&self.memory.stack),
                account: Arc::clone(&self.memory.account),
            },
        }
    }

    /// Returns the resource that creates memory.
    pub fn physical(&self) -> &SharedPhysicalResource {
        &self.memory.resource
    }

    /// Returns whether the GPU and the host can access managed memory at the same time.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn has_concurrent_managed_access(&self) -> Result<bool, CudaError> {
        let value = self.device.attribute(CONCURRENT_MANAGED_ACCESS)?;
        Ok(value != 0)
    }

    /// Returns the budget of the default resource: its limit, and the bytes that were created and
    /// not released.
    pub fn budget(&self) -> BudgetSnapshot {
        self.memory.account.snapshot()
    }

    /// Sets the limit of the default resource in bytes. Every later creation obeys it.
    pub fn set_limit(&self, bytes: u64) {
        self.memory.account.set_limit(bytes);
    }

    /// Returns the counts of the default resource's calls.
    pub fn counts(&self) -> AllocationCounts {
        self.memory.stack.counts()
    }
}
