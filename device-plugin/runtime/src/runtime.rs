//! One runtime for each GPU that this process uses: its context and the resource that it allocates from, a pool that
//! takes nothing before it is first used.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use crate::driver::{Context, Device, Driver, DriverError, GpuUuid, Stream};
use crate::error::CudaError;
use crate::resource::DeviceMemoryResource;
use crate::state::{DeviceState, ErrorMonitor, StaleReason};
use crate::{Direct, Pool, PoolSettings, StateGate};

/// A resource that several may use.
pub type SharedResource = Arc<dyn DeviceMemoryResource>;

/// A GPU's context, and the resource to allocate from.
#[derive(Debug)]
pub struct DeviceRuntime {
    context: Context,
    resource: SharedResource,
    state: Arc<DeviceState>,
}

/// A GPU's runtime, once it has started. Whoever is first holds the lock while it starts, which others wait for; where
/// that fails the next one tries again.
type RuntimeSlot = Arc<Mutex<Option<Arc<DeviceRuntime>>>>;

static RUNTIMES: LazyLock<Mutex<HashMap<GpuUuid, RuntimeSlot>>> = LazyLock::new(Mutex::default);

impl DeviceRuntime {
    /// The runtime of a GPU: the same one for everybody in this process, until it is shut down. In a poisoned process image
    /// that one stays, for no other would be any better.
    ///
    /// # Errors
    /// There is no driver, this process does not see the GPU, or what the driver answered. The next call tries again.
    pub fn for_gpu(uuid: GpuUuid) -> Result<Arc<DeviceRuntime>, DriverError> {
        Self::get_or_start(uuid, || Driver::get()?.device_by_uuid(uuid))
    }

    /// The runtime of the GPU that has this ordinal now.
    ///
    /// # Errors
    /// As [`DeviceRuntime::of`].
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

    /// A runtime of the same GPU that allocates from something else, such as a layer over this one's resource. This one stays
    /// as it is, and so does what [`DeviceRuntime::of`] answers.
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

    /// The GPU's context.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The GPU.
    pub fn uuid(&self) -> GpuUuid {
        self.context.uuid()
    }

    /// Its ordinal.
    pub fn ordinal(&self) -> u32 {
        self.context.ordinal()
    }

    /// What to allocate from.
    pub fn resource(&self) -> &SharedResource {
        &self.resource
    }

    /// Whether what was allocated here can be used.
    pub fn state(&self) -> &Arc<DeviceState> {
        &self.state
    }

    /// Ends the runtime for everybody: what was allocated from it is stale, and whoever asks next starts another. Blocks
    /// are still freed by giving them back.
    pub fn shut_down(&self) {
        self.state.shut_down();
    }

    /// Makes a stream.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn stream(&self) -> Result<Stream, CudaError> {
        self.context.stream()
    }
}
