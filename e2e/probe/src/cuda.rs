//! Allocates, describes and faults through the allocator runtime.
//!
//! Each allocation is a call of the driver, because the trials count those: a pool would take
//! memory ahead. The runtime of a device stays started until the process ends.

use std::alloc::Layout;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bursar_runtime::checksum::ChecksumError;
use bursar_runtime::driver::{Attach, Driver, DriverError, Location, Stream};
use bursar_runtime::memory::error::MemoryError;
use bursar_runtime::{
    Block, CudaError, DeviceChecksum, DeviceMemoryResource as _, DeviceRuntime, Direct, FreeError,
    ManagedRef, NoContextRuntime, PhysicalMemoryResource as _, ResourceError, Tag,
};

/// The tag of all allocations.
const TAG: Tag = Tag("probe");

/// The driver's error for an allocation that it refused.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Refusal {
    /// The CUresult.
    pub(crate) code: i32,
    /// Its name in cuda.h.
    pub(crate) name: String,
}

impl From<CudaError> for Refusal {
    fn from(error: CudaError) -> Self {
        Self {
            code: error.code,
            name: error.name().unwrap_or_else(|| error.to_string()),
        }
    }
}

impl From<ResourceError> for Refusal {
    fn from(error: ResourceError) -> Self {
        match error {
            ResourceError::OutOfMemory { source, .. } | ResourceError::Cuda(source) => {
                source.into()
            }
            other => Self::not_of_the_driver(&other),
        }
    }
}

impl From<MemoryError> for Refusal {
    fn from(error: MemoryError) -> Self {
        match error {
            MemoryError::Resource(error) => error.into(),
            MemoryError::Cuda(error) => error.into(),
            other => Self::not_of_the_driver(&other),
        }
    }
}

impl Refusal {
    /// A refusal that has no code, as of a size beyond the address space.
    fn not_of_the_driver(error: &dyn std::error::Error) -> Self {
        Self {
            code: 0,
            name: error.to_string(),
        }
    }
}

/// A device with the attributes that the driver reports.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Device {
    /// The device's ordinal.
    pub(crate) ordinal: u32,
    /// The UUID in NVML's format.
    pub(crate) uuid: String,
    /// The marketing name.
    pub(crate) name: String,
    /// `cuDeviceTotalMem`, in bytes.
    pub(crate) total_mem: u64,
    /// The free memory that `cuMemGetInfo` reports, in bytes.
    pub(crate) free: u64,
    /// The total memory that `cuMemGetInfo` reports, in bytes.
    pub(crate) total: u64,
}

/// Loads and initialises the driver.
pub(crate) fn init() -> Result<(), DriverError> {
    Driver::get().map(drop)
}

/// The number of visible devices.
pub(crate) fn device_count() -> Result<u32, DriverError> {
    Ok(Driver::get()?.device_count()?)
}

/// Reads a device's attributes, and retains its primary context.
pub(crate) fn describe(ordinal: u32) -> Result<Device, DriverError> {
    let runtime = DeviceRuntime::for_ordinal(ordinal)?;
    let context = runtime.context();
    let (free, total) = context.memory_info()?;
    Ok(Device {
        ordinal,
        uuid: runtime.uuid().to_string(),
        name: context.device().name()?,
        total_mem: runtime.total_memory()?,
        free,
        total,
    })
}

/// A device whose primary context is retained.
#[derive(Debug)]
pub(crate) struct Gpu {
    /// Allocates each block by a call of the driver.
    runtime: DeviceRuntime,
    stream: Stream,
}

/// Memory of a device. Linear memory lives until it is freed or the process ends, managed memory
/// until the value is dropped.
#[derive(Debug)]
pub(crate) enum Allocation {
    Linear(Block),
    Managed(ManagedRef<u8>),
}

impl Gpu {
    /// Retains the device's primary context.
    pub(crate) fn with_ordinal(ordinal: u32) -> Result<Self, DriverError> {
        let shared: Arc<DeviceRuntime> = DeviceRuntime::for_ordinal(ordinal)?;
        let direct = Direct::new(shared.context());
        Ok(Self {
            stream: shared.context().default_stream(),
            runtime: shared.with_resource(|_| direct),
        })
    }

    /// Allocates linear memory.
    pub(crate) fn allocate(&self, bytes: u64) -> Result<Allocation, Refusal> {
        let layout = Layout::from_size_align(items(bytes), 1)
            .map_err(|error| Refusal::not_of_the_driver(&error))?;
        let resource = self.runtime.resource();
        let block = resource.allocate(layout, &self.stream, TAG)?;
        Ok(Allocation::Linear(block))
    }

    /// Allocates managed memory, and moves it to the device.
    pub(crate) fn allocate_managed(&self, bytes: u64) -> Result<Allocation, Refusal> {
        let managed = self.runtime.managed();
        let memory: ManagedRef<u8> =
            managed.allocate(items(bytes), Attach::Global, &self.stream, TAG)?;
        let device = Location::Device(self.runtime.ordinal());
        memory.prefetch(0..memory.len(), device, &self.stream)?;
        Ok(Allocation::Managed(memory))
    }

    /// Frees memory.
    pub(crate) fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        match allocation {
            Allocation::Linear(block) => self.runtime.resource().deallocate(block, &self.stream),
            Allocation::Managed(memory) => memory.free(),
        }
    }

    /// Creates memory without an address, and exports a descriptor. The descriptor keeps the memory
    /// past the end of this process.
    pub(crate) fn export(&self, bytes: u64) -> anyhow::Result<OwnedFd> {
        let runtime = NoContextRuntime::start(self.runtime.uuid())?;
        let block = runtime.physical().create(bytes, TAG)?;
        Ok(block.export()?)
    }

    /// Launches a kernel that reads address 0, and returns the driver's error.
    pub(crate) fn fault(&self) -> anyhow::Result<Refusal> {
        let mut kernel = DeviceChecksum::new(self.runtime.context())?;
        match kernel.of(0, 16, &self.stream) {
            Err(ChecksumError::Cuda(error)) => Ok(error.into()),
            other => anyhow::bail!("a kernel that reads address 0 returned {other:?}"),
        }
    }
}

/// The number of single-byte items.
fn items(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}
