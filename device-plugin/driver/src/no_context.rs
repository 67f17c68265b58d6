//! Provides the runtime of a process that must never have a context.
//!
//! A context costs hundreds of MiB of the GPU, NVML lists its process, and a kernel's fault poisons
//! it. Physical memory needs none: it can be created and exported, and another process maps it.
#![forbid(unsafe_code)]

use std::sync::Arc;

use crate::account::BudgetAccount;
use crate::driver::{Device, Driver, DriverError, GpuUuid};
use crate::error::{CudaError, ResourceError};
use crate::physical::{Physical, PhysicalBlock, PhysicalMemoryResource, ReleaseError};
use crate::resource::{BudgetSnapshot, Origin, Tag};
use crate::state::{DeviceState, ErrorMonitor};

/// `CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS`
const CONCURRENT_MANAGED_ACCESS: i32 = 89;

/// Physical memory resource that several owners share.
pub type SharedPhysicalResource = Arc<dyn PhysicalMemoryResource>;

/// Runtime of one GPU that creates memory which other processes map. None of its methods returns a
/// context, a stream or an address, so it cannot create a context by mistake.
///
/// ```no_run
/// use bursar_driver::NoContextRuntime;
/// use bursar_driver::driver::GpuUuid;
/// use bursar_driver::physical::PhysicalMemoryResource as _;
/// use bursar_driver::resource::Tag;
/// # fn send(_: std::os::fd::OwnedFd) {}
///
/// fn share(uuid: GpuUuid) -> Result<(), Box<dyn std::error::Error>> {
///     let runtime = NoContextRuntime::start(uuid)?;
///     runtime.set_limit(8 << 30);
///     let memory = runtime.physical();
///     let block = memory.create(memory.round_up(1 << 20)?, Tag("shared"))?;
///     send(block.export()?); // the descriptor keeps the memory
///     memory.release(block)?;
///     Ok(())
/// }
/// ```
///
/// ```compile_fail,E0599
/// # use bursar_driver::NoContextRuntime;
/// fn reach(runtime: &NoContextRuntime) {
///     runtime.context();
/// }
/// ```
#[derive(Debug)]
pub struct NoContextRuntime {
    device: Device,
    state: Arc<DeviceState>,
    account: Arc<BudgetAccount>,
    physical: SharedPhysicalResource,
}

impl NoContextRuntime {
    /// Starts a runtime of a GPU. Its budget is the GPU's memory.
    ///
    /// # Errors
    /// No driver, no such GPU in this process, or the driver's error.
    pub fn start(uuid: GpuUuid) -> Result<NoContextRuntime, DriverError> {
        let device = Driver::get()?.device_by_uuid(uuid)?;
        let state = ErrorMonitor::global().new_state();
        let account = Arc::new(BudgetAccount::new(device.total_memory()?));
        let physical = LimitedPhysical {
            source: Physical::new(&device)?,
            state: Arc::clone(&state),
            account: Arc::clone(&account),
        };
        Ok(NoContextRuntime {
            device,
            state,
            account,
            physical: Arc::new(physical),
        })
    }

    /// Returns the resource that creates memory.
    pub fn physical(&self) -> &SharedPhysicalResource {
        &self.physical
    }

    /// Returns whether the GPU and the host can access managed memory at the same time.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn has_concurrent_managed_access(&self) -> Result<bool, CudaError> {
        let value = self.device.attribute(CONCURRENT_MANAGED_ACCESS)?;
        Ok(value != 0)
    }

    /// Returns the limit, and the bytes that were created and not released.
    pub fn budget(&self) -> BudgetSnapshot {
        self.account.snapshot()
    }

    /// Sets the limit in bytes. Every later creation obeys it.
    pub fn set_limit(&self, bytes: u64) {
        self.account.set_limit(bytes);
    }

    /// Returns the state that says whether this runtime may create memory.
    pub fn state(&self) -> &Arc<DeviceState> {
        &self.state
    }

    /// Returns the GPU's memory in bytes. Under the shim this is the quota.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn total_memory(&self) -> Result<u64, CudaError> {
        self.device.total_memory()
    }

    /// Returns the CUDA version that the driver reports: 13000 is 13.0.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn driver_version(&self) -> Result<i32, CudaError> {
        self.device.driver().version()
    }
}

/// Physical memory within a limit, and only while the process image is valid.
#[derive(Debug)]
struct LimitedPhysical {
    source: Physical,
    state: Arc<DeviceState>,
    account: Arc<BudgetAccount>,
}

impl PhysicalMemoryResource for LimitedPhysical {
    fn create(&self, bytes: u64, tag: Tag) -> Result<PhysicalBlock, ResourceError> {
        self.state.check()?;
        self.account.charge_for(self.ordinal(), bytes)?;
        let created = self.source.create(bytes, tag);
        created.inspect_err(|_| self.account.uncharge(bytes))
    }

    fn release(&self, block: PhysicalBlock) -> Result<(), ReleaseError> {
        let bytes = block.bytes();
        self.source.release(block)?;
        self.account.uncharge(bytes);
        Ok(())
    }

    fn uuid(&self) -> GpuUuid {
        self.source.uuid()
    }

    fn ordinal(&self) -> u32 {
        self.source.ordinal()
    }

    fn granularity(&self) -> u64 {
        self.source.granularity()
    }

    fn origin(&self) -> Origin {
        self.source.origin()
    }

    fn bytes_outstanding(&self) -> u64 {
        self.source.bytes_outstanding()
    }

    fn budget_snapshot(&self) -> Option<BudgetSnapshot> {
        Some(self.account.snapshot())
    }

    fn kind(&self) -> &'static str {
        "limited"
    }
}
