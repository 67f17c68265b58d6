//! Provides one shared runtime for each GPU of the process.
//!
//! The default resource is a pool that takes no memory before its first use. In a container its
//! budget is the container's quota, which it follows when the agent changes that.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

use crate::adaptor::default_stack::DefaultStack;
use crate::adaptor::logging::Sink;
use crate::driver::{Attach, Context, Device, Driver, DriverError, GpuUuid, Stream};
use crate::error::CudaError;
use crate::memory::stream_pool::StreamPool;
use crate::resource::{BudgetSnapshot, DeviceMemoryResource};
use crate::state::{DeviceGeneration, DeviceState, ErrorMonitor, StaleReason};
use crate::{Managed, PoolStatistics, StateGate, Statistics};

/// Resource that several owners share.
pub type SharedResource = Arc<dyn DeviceMemoryResource>;

/// Source of a runtime's managed memory.
pub(crate) type ManagedSource = Statistics<StateGate<Managed>>;

/// Number of streams in a runtime's own pool.
const STREAMS: NonZeroUsize = NonZeroUsize::new(8).expect("not zero");

/// State, context, streams and memory resource of one GPU.
///
/// | part | method | default |
/// |---|---|---|
/// | device memory | [`resource`](Self::resource) | a pool over `cuMemAlloc` |
/// | budget in bytes | [`budget`](Self::budget) | the container's quota, or the GPU's memory |
/// | log of each call | [`set_log`](Self::set_log) | off |
/// | streams | [`streams`](Self::streams) | 8, each created on first use |
/// | managed memory | [`managed`](Self::managed) | `cuMemAllocManaged`, with statistics |
/// | validity | [`state`](Self::state) | valid until a fault, a drain or a shutdown |
#[derive(Debug)]
pub struct DeviceRuntime {
    state: Arc<DeviceState>,
    context: Context,
    resource: SharedResource,
    shared: Arc<SharedParts>,
}

/// Parts that all runtimes of one start share, whatever their resource.
#[derive(Debug)]
struct SharedParts {
    stack: Arc<DefaultStack>,
    streams: StreamPool,
    managed: OnceLock<Arc<ManagedSource>>,
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
        let stack = DefaultStack::with_container_quota(&context, Arc::clone(&state))?;
        let runtime = Arc::new(DeviceRuntime {
            resource: Arc::clone(&stack) as SharedResource,
            shared: Arc::new(SharedParts {
                stack,
                streams: StreamPool::with_parts(&context, &state, STREAMS),
                managed: OnceLock::new(),
            }),
            context,
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
        self.with_shared_resource(Arc::new(compose(Arc::clone(self.resource()))))
    }

    /// Returns a runtime of the same GPU with another resource.
    pub(crate) fn with_shared_resource(&self, resource: SharedResource) -> DeviceRuntime {
        DeviceRuntime {
            state: Arc::clone(&self.state),
            context: self.context.clone(),
            resource,
            shared: Arc::clone(&self.shared),
        }
    }

    /// Returns the GPU's context.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Returns the resource to allocate from.
    pub fn resource(&self) -> &SharedResource {
        &self.resource
    }

    /// Returns the runtime's own streams, which its users share by turns.
    pub fn streams(&self) -> &StreamPool {
        &self.shared.streams
    }

    /// Returns the budget of the default resource: its limit, and the requested bytes of its live
    /// blocks.
    pub fn budget(&self) -> BudgetSnapshot {
        self.shared.stack.budget()
    }

    /// Sets a limit of live bytes for the default resource, in addition to the quota; `None` leaves
    /// the quota alone in force. Every allocation after the return obeys it, and live blocks stay.
    pub fn set_limit(&self, bytes: Option<u64>) {
        self.shared.stack.set_limit(bytes);
    }

    /// Returns the statistics of the default resource's pool.
    pub fn statistics(&self) -> PoolStatistics {
        self.shared.stack.statistics()
    }

    /// Writes a record of each later call of the default resource to a sink; `None` ends the log.
    pub fn set_log(&self, sink: Option<Arc<dyn Sink>>) {
        self.shared.stack.log().set(sink);
    }

    /// Returns the source of managed memory, and creates it on the first call.
    pub(crate) fn managed_source(&self) -> &Arc<ManagedSource> {
        self.shared.managed.get_or_init(|| {
            let source = Managed::with_allocator(self.context(), Attach::Global);
            let gated = StateGate::new(source, Arc::clone(&self.state));
            Arc::new(Statistics::new(gated))
        })
    }

    /// Creates a stream.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn stream(&self) -> Result<Stream, CudaError> {
        self.context().stream()
    }

    /// Returns the GPU's UUID.
    pub fn uuid(&self) -> GpuUuid {
        self.context.uuid()
    }

    /// Returns the GPU's ordinal.
    pub fn ordinal(&self) -> u32 {
        self.context.device().ordinal()
    }

    /// Returns the state that says whether memory of this runtime is still valid.
    pub fn state(&self) -> &Arc<DeviceState> {
        &self.state
    }

    /// Returns the generation of the runtime's memory. A later start of the runtime has a later
    /// one.
    pub fn generation(&self) -> DeviceGeneration {
        self.state.generation()
    }

    /// Returns the GPU's memory in bytes. Under the shim this is the quota.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn total_memory(&self) -> Result<u64, CudaError> {
        self.context.device().total_memory()
    }

    /// Returns the CUDA version that the driver reports: 13000 is 13.0.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn driver_version(&self) -> Result<i32, CudaError> {
        self.context.device().driver().version()
    }

    /// Shuts the runtime down for all its users. Its memory becomes stale, blocks can still be
    /// freed, and the next caller starts a new runtime.
    pub fn shut_down(&self) {
        self.state.shut_down();
    }
}
