//! Virtual memory management: handles, reserved addresses, mappings, export and import.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use cudarc::driver::sys::{
    CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationType, CUmemLocation, CUmemLocationType,
};

use super::{Context, Device, Driver, call};
use crate::error::CudaError;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`
const POSIX_FILE_DESCRIPTOR: i32 = 1;
/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`
const GRANULARITY_MINIMUM: i32 = 0;
/// `CUDA_ERROR_OPERATING_SYSTEM`
const OPERATING_SYSTEM: i32 = 304;
/// `CUDA_ERROR_INVALID_DEVICE`
const INVALID_DEVICE: i32 = 101;

fn location(device: &Device) -> Result<CUmemLocation, CudaError> {
    let (call, code) = ("cuMemCreate", INVALID_DEVICE);
    Ok(CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: i32::try_from(device.ordinal()).map_err(|_| CudaError { call, code })?,
    })
}

fn properties(device: &Device) -> Result<CUmemAllocationProp, CudaError> {
    // SAFETY: a struct of integers and a pointer that may be null.
    let mut properties: CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes =
        CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.location = location(device)?;
    Ok(properties)
}

/// Physical memory of a device, `cuMemCreate`'s; released when dropped, and free once every mapping and descriptor is
/// gone too. Needs no context.
#[derive(Debug)]
pub struct Handle {
    driver: &'static Driver,
    raw: u64,
    bytes: u64,
}

impl Drop for Handle {
    fn drop(&mut self) {
        // Where it fails the process image is poisoned, and its handles end with it.
        let _ = call!(self.driver, cuMemRelease(self.raw));
    }
}

impl Device {
    /// What sizes and addresses of mappings are multiples of, in bytes.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn granularity(&self) -> Result<u64, CudaError> {
        let (mut bytes, wanted) = (0, properties(self)?);
        call!(
            self.driver(),
            cuMemGetAllocationGranularity(&raw mut bytes, &raw const wanted, GRANULARITY_MINIMUM)
        )?;
        Ok(bytes as u64)
    }

    /// Makes memory that can be exported, a multiple of the granularity.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn create(&self, bytes: u64) -> Result<Handle, CudaError> {
        let (mut raw, wanted) = (0, properties(self)?);
        call!(
            self.driver(),
            cuMemCreate(&raw mut raw, bytes as usize, &raw const wanted, 0)
        )?;
        Ok(Handle {
            driver: self.driver(),
            raw,
            bytes,
        })
    }
}

impl Driver {
    /// Imports memory from a descriptor, which stays the caller's. How much it is only its exporter knows.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn import(
        &'static self,
        descriptor: BorrowedFd<'_>,
        bytes: u64,
    ) -> Result<Handle, CudaError> {
        // The driver takes descriptor 0 for a null pointer (seen on driver 580); a copy is never below 3.
        let copy = (descriptor.as_raw_fd() == 0)
            .then(|| descriptor.try_clone_to_owned())
            .transpose()
            .map_err(|_| CudaError {
                call: "cuMemImportFromShareableHandle",
                code: OPERATING_SYSTEM,
            })?;
        let number = copy.as_ref().map_or(descriptor, AsFd::as_fd).as_raw_fd();
        let (mut raw, shared) = (0, number as usize as *mut std::ffi::c_void);
        call!(
            self,
            cuMemImportFromShareableHandle(&raw mut raw, shared, POSIX_FILE_DESCRIPTOR)
        )?;
        Ok(Handle {
            driver: self,
            raw,
            bytes,
        })
    }
}

impl Handle {
    /// Bytes that it was made with.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A descriptor of the memory, which keeps it; not for what was imported (design F4).
    ///
    /// # Errors
    /// What the driver answered.
    pub fn export(&self) -> Result<OwnedFd, CudaError> {
        let mut descriptor: i32 = -1;
        call!(
            self.driver,
            cuMemExportToShareableHandle(
                (&raw mut descriptor).cast(),
                self.raw,
                POSIX_FILE_DESCRIPTOR,
                0
            )
        )?;
        // SAFETY: the driver made it for us, close-on-exec (F4).
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }
}

/// Addresses without memory; given back when dropped.
#[derive(Debug)]
pub struct Reservation {
    driver: &'static Driver,
    address: u64,
    bytes: u64,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // It fails while something is mapped there, which `Mapping` prevents by keeping its reservation.
        let _ = call!(
            self.driver,
            cuMemAddressFree(self.address, self.bytes as usize)
        );
    }
}

impl Driver {
    /// Reserves addresses, a multiple of the granularity.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn reserve(&'static self, bytes: u64) -> Result<Reservation, CudaError> {
        let mut address = 0;
        call!(
            self,
            cuMemAddressReserve(&raw mut address, bytes as usize, 0, 0, 0)
        )?;
        Ok(Reservation {
            driver: self,
            address,
            bytes,
        })
    }
}

impl Reservation {
    /// The first address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How many bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Maps a handle's memory at an offset, for a context's device. The reservation stays until the mapping is dropped.
    ///
    /// # Errors
    /// What the driver answered; a range outside of the reservation is refused.
    pub fn map(
        self: &Arc<Self>,
        offset: u64,
        handle: &Handle,
        access: Access,
        context: &Context,
    ) -> Result<Mapping, CudaError> {
        let (address, bytes) = (self.address.saturating_add(offset), handle.bytes);
        call!(
            self.driver,
            cuMemMap(address, bytes as usize, 0, handle.raw, 0)
        )?;
        let mapping = Mapping {
            reservation: Arc::clone(self),
            address,
            bytes,
            mapped: true,
        };
        mapping.set_access(access, context)?;
        Ok(mapping)
    }
}

/// What kernels may do with a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read.
    Read,
    /// Read and write.
    ReadWrite,
}

/// Memory at an address; unmapped when dropped, which does not wait for work that uses it.
#[derive(Debug)]
pub struct Mapping {
    reservation: Arc<Reservation>,
    address: u64,
    bytes: u64,
    mapped: bool,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Where it fails the process image is poisoned, and its mappings end with it.
        let _ = self.unmap();
    }
}

impl Mapping {
    /// The first address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How many bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Unmaps it, once. The driver does not wait for work that uses it: wait before.
    ///
    /// # Errors
    /// What the driver answered; then it is still mapped.
    pub fn unmap(&mut self) -> Result<(), CudaError> {
        if self.mapped {
            call!(
                self.reservation.driver,
                cuMemUnmap(self.address, self.bytes as usize)
            )?;
            self.mapped = false;
        }
        Ok(())
    }

    /// Changes what kernels of a context's device may do with it.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn set_access(&self, access: Access, context: &Context) -> Result<(), CudaError> {
        let wanted = CUmemAccessDesc {
            location: location(context.device())?,
            flags: match access {
                Access::Read => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ,
                Access::ReadWrite => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            },
        };
        call!(
            self.reservation.driver,
            cuMemSetAccess(self.address, self.bytes as usize, &raw const wanted, 1)
        )
    }
}
