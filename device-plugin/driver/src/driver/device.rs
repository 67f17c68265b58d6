//! Finds devices and reads their attributes.

use std::ffi::{CStr, c_char};

use bursar_protocol::gpu_uuid::GpuUuid;
use cudarc::driver::sys::{CUdevice, CUuuid};

use super::{Driver, DriverError, call};
use crate::error::CudaError;

/// Device that this process sees.
#[derive(Clone, Copy, Debug)]
pub struct Device {
    driver: &'static Driver,
    ordinal: u32,
    raw: CUdevice,
}

impl Driver {
    /// Returns the number of devices that this process sees.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn device_count(&self) -> Result<u32, CudaError> {
        let mut count = 0;
        call!(self, cuDeviceGetCount(&raw mut count))?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// Returns the device with this ordinal.
    ///
    /// # Errors
    /// [`DriverError::NoSuchDevice`], or the driver's error.
    pub fn device(&'static self, ordinal: u32) -> Result<Device, DriverError> {
        let count = self.device_count()?;
        let mut raw = 0;
        match i32::try_from(ordinal) {
            Ok(number) if ordinal < count => call!(self, cuDeviceGet(&raw mut raw, number))?,
            _ => return Err(DriverError::NoSuchDevice { ordinal, count }),
        }
        Ok(Device {
            driver: self,
            ordinal,
            raw,
        })
    }

    /// Returns the device with this UUID.
    ///
    /// # Errors
    /// [`DriverError::NoSuchGpu`], or the driver's error.
    pub fn device_by_uuid(&'static self, uuid: GpuUuid) -> Result<Device, DriverError> {
        for ordinal in 0..self.device_count()? {
            let device = self.device(ordinal)?;
            if device.uuid()? == uuid {
                return Ok(device);
            }
        }
        Err(DriverError::NoSuchGpu(uuid))
    }
}

impl Device {
    /// Returns the device's ordinal in this process.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Returns the driver.
    pub fn driver(&self) -> &'static Driver {
        self.driver
    }

    pub(super) fn raw(&self) -> CUdevice {
        self.raw
    }

    /// Returns the UUID of the GPU or MIG instance.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn uuid(&self) -> Result<GpuUuid, CudaError> {
        let mut uuid = CUuuid { bytes: [0; 16] };
        call!(self.driver, cuDeviceGetUuid_v2(&raw mut uuid, self.raw))?;
        Ok(GpuUuid::from_bytes(uuid.bytes.map(|byte| byte as u8)))
    }

    /// Returns the marketing name.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn name(&self) -> Result<String, CudaError> {
        let mut text: [c_char; 128] = [0; 128];
        call!(
            self.driver,
            cuDeviceGetName(text.as_mut_ptr(), 127, self.raw)
        )?;
        // SAFETY: the driver writes less than the array's length, so the text ends with a zero.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) };
        Ok(text.to_string_lossy().into_owned())
    }

    /// Returns the device's memory in bytes. Under the shim this is the quota.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn total_memory(&self) -> Result<u64, CudaError> {
        let mut bytes = 0;
        call!(self.driver, cuDeviceTotalMem_v2(&raw mut bytes, self.raw))?;
        Ok(bytes as u64)
    }

    /// Returns the container's quota of the device's memory in bytes, as the agent last wrote it,
    /// or the device's memory without a quota. Under the shim this costs two loads and no message.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn quota(&self) -> Result<u64, CudaError> {
        let quota = self.driver.quota.map(|quota| quota(self.raw));
        match quota {
            Some(bytes) if bytes > 0 => Ok(bytes),
            _ => self.total_memory(),
        }
    }

    /// Returns an attribute by its number in `CUdevice_attribute`.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn attribute(&self, attribute: i32) -> Result<i32, CudaError> {
        let mut value = 0;
        call!(
            self.driver,
            cuDeviceGetAttribute(&raw mut value, attribute, self.raw)
        )?;
        Ok(value)
    }

    /// Returns whether kernels of this device can access memory of another.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn can_access(&self, peer: &Device) -> Result<bool, CudaError> {
        let mut can = 0;
        call!(
            self.driver,
            cuDeviceCanAccessPeer(&raw mut can, self.raw, peer.raw)
        )?;
        Ok(can != 0)
    }
}
