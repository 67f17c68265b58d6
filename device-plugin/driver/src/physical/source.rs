//! Creates physical memory that can be exported, without a context: `cuMemCreate`.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use crate::driver::{Device, GpuUuid};
use crate::error::{CudaError, ResourceError};
use crate::physical::{PhysicalBlock, PhysicalMemoryResource, ReleaseError, check_physical_origin};
use crate::resource::{Origin, Tag};

/// Exportable physical memory of one GPU, one call of the driver for each block.
#[derive(Debug)]
pub struct Physical {
    device: Device,
    uuid: GpuUuid,
    granularity: u64,
    origin: Origin,
    /// Number of blocks so far.
    created: AtomicU64,
    outstanding: AtomicU64,
}

impl Physical {
    /// Creates memory of a device.
    ///
    /// # Errors
    /// The driver's error for the query of the UUID or the granularity.
    pub fn new(device: &Device) -> Result<Physical, CudaError> {
        Ok(Physical {
            device: *device,
            uuid: device.uuid()?,
            granularity: device.granularity()?,
            origin: Origin::unique(),
            created: AtomicU64::new(0),
            outstanding: AtomicU64::new(0),
        })
    }
}

impl PhysicalMemoryResource for Physical {
    fn create(&self, bytes: u64, _: Tag) -> Result<PhysicalBlock, ResourceError> {
        let handle = self
            .device
            .create(bytes)
            .map_err(|error| ResourceError::from_alloc_failure(self.ordinal(), bytes, error))?;
        self.outstanding.fetch_add(bytes, Ordering::Relaxed);
        let number = self.created.fetch_add(1, Ordering::Relaxed) + 1;
        Ok(PhysicalBlock::new(handle, self.origin, number))
    }

    fn release(&self, block: PhysicalBlock) -> Result<(), ReleaseError> {
        let block = check_physical_origin(self.origin, block)?;
        let (bytes, number) = (block.bytes(), block.number());
        block
            .into_handle()
            .release()
            .map_err(|(handle, error)| ReleaseError {
                block: PhysicalBlock::new(handle, self.origin, number),
                reason: error.into(),
            })?;
        self.outstanding.fetch_sub(bytes, Ordering::Relaxed);
        Ok(())
    }

    fn uuid(&self) -> GpuUuid {
        self.uuid
    }

    fn ordinal(&self) -> u32 {
        self.device.ordinal()
    }

    fn granularity(&self) -> u64 {
        self.granularity
    }

    fn origin(&self) -> Origin {
        self.origin
    }

    fn bytes_outstanding(&self) -> u64 {
        self.outstanding.load(Ordering::Relaxed)
    }

    fn kind(&self) -> &'static str {
        "physical"
    }
}
