//! Manages virtual memory: handles, address reservations, mappings, export and import.

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
    // SAFETY: the struct consists of integers and a nullable pointer.
    let mut properties: CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes =
        CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.location = location(device)?;
    Ok(properties)
}

/// Physical memory of `cuMemCreate`. The driver releases the memory after the last handle, mapping
/// and file descriptor. Needs no context.
#[derive(Debug)]
pub struct Handle {
    driver: &'static Driver,
    raw: u64,
    bytes: u64,
}

impl Drop for Handle {
    fn drop(&mut self) {
        // If the release fails, the process image is poisoned and its handles end with it.
        let _ = call!(self.driver, cuMemRelease(self.raw));
    }
}

impl Device {
    /// Returns the granularity of mappings in bytes.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn granularity(&self) -> Result<u64, CudaError> {
        let (mut bytes, wanted) = (0, properties(self)?);
        call!(
            self.driver(),
            cuMemGetAllocationGranularity(&raw mut bytes, &raw const wanted, GRANULARITY_MINIMUM)
        )?;
        Ok(bytes as u64)
    }

    /// Creates exportable memory, whose size is a multiple of the granularity.
    ///
    /// # Errors
    /// The error that the driver returned.
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
    /// Imports memory from a file descriptor, which stays the caller's. Only the exporter knows the
    /// size.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn import(
        &'static self,
        descriptor: BorrowedFd<'_>,
        bytes: u64,
    ) -> Result<Handle, CudaError> {
        // Driver 580 takes descriptor 0 for a null pointer; a duplicate is never below 3.
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
    /// Releases the handle. Unlike a drop, this returns the result.
    ///
    /// # Errors
    /// The handle, and the error that the driver returned.
    pub fn release(self) -> Result<(), (Handle, CudaError)> {
        match call!(self.driver, cuMemRelease(self.raw)) {
            Ok(()) => {
                std::mem::forget(self);
                Ok(())
            }
            Err(error) => Err((self, error)),
        }
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Exports the memory as a file descriptor, which keeps it. Imported memory cannot be exported
    /// (F4 in `docs/internals/facts.md`).
    ///
    /// # Errors
    /// The error that the driver returned.
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
        // SAFETY: the driver returns a new descriptor, close-on-exec.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }
}

/// Reserved address range without memory, freed when dropped.
#[derive(Debug)]
pub struct Reservation {
    driver: &'static Driver,
    address: u64,
    bytes: u64,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // Freeing fails while memory is mapped there; `Mapping` prevents this by keeping its
        // reservation.
        let _ = call!(
            self.driver,
            cuMemAddressFree(self.address, self.bytes as usize)
        );
    }
}

impl Driver {
    /// Reserves addresses, whose size is a multiple of the granularity.
    ///
    /// # Errors
    /// The error that the driver returned.
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
    /// Returns the first address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Maps a handle's memory at an offset, for a context's device. The mapping keeps the
    /// reservation.
    ///
    /// # Errors
    /// The driver's error; the driver refuses a range outside the reservation.
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

/// Access of work to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read.
    Read,
    /// Write, without a read of the earlier content.
    Write,
    /// Read and write.
    ReadWrite,
}

impl Access {
    /// Returns whether the access changes the memory. Such an access follows all earlier ones; a
    /// read follows the earlier writes only.
    pub fn writes(self) -> bool {
        self != Access::Read
    }
}

/// Mapped memory, unmapped when dropped. The unmapping does not wait for work that uses the memory.
#[derive(Debug)]
pub struct Mapping {
    reservation: Arc<Reservation>,
    address: u64,
    bytes: u64,
    mapped: bool,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // If the call fails, the process image is poisoned and its mappings end with it.
        let _ = self.unmap();
    }
}

impl Mapping {
    /// Returns the first address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Unmaps the memory once. The caller must first wait for work that uses it.
    ///
    /// # Errors
    /// The driver's error; the memory is still mapped then.
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

    /// Leaves the memory mapped until the process ends, because work may still use it.
    pub fn leave_mapped(&mut self) {
        self.mapped = false;
        std::mem::forget(Arc::clone(&self.reservation));
    }

    /// Changes the access of kernels of a context's device. The driver has no mapping that can only
    /// be written, so `Write` permits reads too.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn set_access(&self, access: Access, context: &Context) -> Result<(), CudaError> {
        let wanted = CUmemAccessDesc {
            location: location(context.device())?,
            flags: match access {
                Access::Read => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ,
                Access::Write | Access::ReadWrite => {
                    CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                }
            },
        };
        call!(
            self.reservation.driver,
            cuMemSetAccess(self.address, self.bytes as usize, &raw const wanted, 1)
        )
    }
}
