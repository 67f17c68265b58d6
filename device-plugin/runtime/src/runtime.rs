//! Provides one shared runtime for each GPU of the process: its context, state and resource.
//!
//! The default resource is a pool that takes no memory before its first use.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use crate::driver::{Context, Device, Driver, DriverError, GpuUuid, Stream};
use crate::error::CudaError;
use crate::resource::DeviceMemoryResource;
use crate::state::{DeviceState, ErrorMonitor, StaleReason};
use crate::{Direct, Pool, PoolSettings, StateGate};

/// Resource that several owners share.
pub type SharedResource = Arc<dyn DeviceMemoryResource>;

/// Context, state and memory resource of one GPU.
#[derive(Debug)]
pub struct DeviceRuntime {
    context: Context,
    resource: SharedResource,
    state: Arc<DeviceState>,
}

/// Runtime of one GPU, once started. The first caller holds the lock during the start; a later
/// caller retries after a failure.
type RuntimeSlot = Arc<Mutex<Option<Arc<DeviceRuntime>>>>;

static RUNTIMES: LazyLock<Mutex<HashMap<GpuUuid, RuntimeSlot>>> = LazyLock::new(Mutex::default);

impl DeviceRuntime {
    /// Returns the process's runtime of a GPU, and starts it on the first call.
    ///
    /// All callers share one runtime until it is shut down. A poisoned process image keeps its
    /// runtime, because a new one would be poisoned too.
    ///
    /// # Errors
    /// No driver, no such GPU in this process, or the driver's error. The next call tries again.
    pub fn for_gpu(uuid: GpuUuid) -> Result<Arc<DeviceRuntime>, DriverError> {
        Self::get_or_start(uuid, || Driver::get()?.device_by_uuid(uuid))
    }

    /// Returns the runtime of the GPU that has this ordinal now.
    ///
    /// # Errors
    /// As [`DeviceRuntime::for_gpu`].
    pub fn for_ordinal(ordinal: u32) -> Result<Arc<DeviceRuntime>, DriverError> {
        let device = Driver::get()?.device(ordinal)?;
        Self::get_or_start(device.uuid()?, || Ok(device))
    }

    fn get_or_start(
        uuid: GpuUuid,
        device: impl FnOnce() -> Result<Device, DriverError>,
    ) -> Result<Arc<DeviceRuntime>, DriverError> {
        let slot = {
            let mut all = RUNTIMES.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(all.entry(uuid).or_default())
        };
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(runtime) = &*slot
            && runtime.state.check() != Err(StaleReason::ShutDown)
        {
            return Ok(Arc::clone(runtime));
        }
        let context = device()?.primary_context()?;
        let state = ErrorMonitor::global().new_state();
        let pool = Pool::new(Direct::new(&context), &context, PoolSettings::default())?;
        let runtime = Arc::new(DeviceRuntime {
            context,
            resource: Arc::new(StateGate::new(pool, Arc::clone(&state))),
            state,
        });
        Ok(Arc::clone(slot.insert(runtime)))
    }

    /// Returns a runtime of the same GPU with another resource, such as an adaptor over this one's.
    ///
    /// This runtime and the result of [`DeviceRuntime::for_gpu`] do not change.
    #[must_use]
    pub fn with_resource<R: DeviceMemoryResource + 'static>(
        &self,
        compose: impl FnOnce(SharedResource) -> R,
    ) -> DeviceRuntime {
        DeviceRuntime {
            context: self.context.clone(),
            resource: Arc::new(compose(Arc::clone(&self.resource))),
            state: Arc::clone(&self.state),
        }
    }

    /// Returns the GPU's context.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Returns the GPU's UUID.
    pub fn uuid(&self) -> GpuUuid {
        self.context.uuid()
    }

    /// Returns the GPU's ordinal.
    pub fn ordinal(&self) -> u32 {
        self.context.ordinal()
    }

    /// Returns the resource to allocate from.
    pub fn resource(&self) -> &SharedResource {
        &self.resource
    }

    /// Returns the state that says whether memory of this runtime is still valid.
    pub fn state(&self) -> &Arc<DeviceState> {
        &self.state
    }

    /// Shuts the runtime down for all its users. Its memory becomes stale, blocks can still be
    /// freed, and the next caller starts a new runtime.
    pub fn shut_down(&self) {
        self.state.shut_down();
    }

    /// Creates a stream.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn stream(&self) -> Result<Stream, CudaError> {
        self.context.stream()
    }
}
