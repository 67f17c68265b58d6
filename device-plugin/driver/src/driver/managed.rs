//! Allocates, attaches, prefetches and advises managed memory.

use cudarc::driver::sys::{CUmemLocation, CUmemLocationType};

use super::{Context, Stream, call, check};
use crate::error::CudaError;

/// Users that may access managed memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attach {
    /// Any stream of any device: `CU_MEM_ATTACH_GLOBAL`.
    Global,
    /// Only the host, until the memory is attached to a stream: `CU_MEM_ATTACH_HOST`.
    Host,
    /// Only the stream of the attachment: `CU_MEM_ATTACH_SINGLE`. Not permitted for an allocation.
    Single,
}

impl Attach {
    fn flag(self) -> u32 {
        match self {
            Attach::Global => 1,
            Attach::Host => 2,
            Attach::Single => 4,
        }
    }
}

/// Location of managed memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Location {
    /// Device with this ordinal.
    Device(u32),
    /// Host memory.
    Host,
    /// Memory of a NUMA node of the host; CUDA 12.2 and later.
    HostNuma(u32),
}

/// `CUmem_advise`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// The memory is mostly read, so the driver may keep several copies.
    SetReadMostly,
    /// Reverts `SetReadMostly`.
    UnsetReadMostly,
    /// The driver should keep the memory at the location.
    SetPreferredLocation,
    /// Reverts `SetPreferredLocation`.
    UnsetPreferredLocation,
    /// The device accesses the memory, so the driver should keep it mapped there.
    SetAccessedBy,
    /// Reverts `SetAccessedBy`.
    UnsetAccessedBy,
}

impl Advice {
    fn number(self) -> i32 {
        match self {
            Advice::SetReadMostly => 1,
            Advice::UnsetReadMostly => 2,
            Advice::SetPreferredLocation => 3,
            Advice::UnsetPreferredLocation => 4,
            Advice::SetAccessedBy => 5,
            Advice::UnsetAccessedBy => 6,
        }
    }
}

/// Last advice and prefetch for a whole range of managed memory; unset where parts of the range
/// differ.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Residency {
    /// Whether the driver may keep several copies.
    pub read_mostly: bool,
    /// Preferred location.
    pub preferred: Option<Location>,
    /// Devices that keep the memory mapped.
    pub accessed_by: Vec<Location>,
    /// Location of the last prefetch.
    pub prefetched: Option<Location>,
}

/// Stands for the host in the functions before CUDA 12.2.
const CU_DEVICE_CPU: i32 = -1;
/// Upper bound on the devices of a process.
const MAX_DEVICES: usize = 64;
/// `CUDA_ERROR_INVALID_DEVICE`
const INVALID_DEVICE: i32 = 101;
/// `CUDA_ERROR_NOT_SUPPORTED`
const NOT_SUPPORTED: i32 = 801;

impl Location {
    fn device_id(id: u32, call: &'static str) -> Result<i32, CudaError> {
        let code = INVALID_DEVICE;
        i32::try_from(id).map_err(|_| CudaError { call, code })
    }

    /// Decodes an attribute of a range: a device, the host, or neither (`CU_DEVICE_INVALID`).
    fn from_attribute(device: i32) -> Option<Location> {
        match device {
            CU_DEVICE_CPU => Some(Location::Host),
            device => u32::try_from(device).ok().map(Location::Device),
        }
    }

    /// Returns the location for the functions of CUDA 12.2 and later.
    fn to_mem_location(self, call: &'static str) -> Result<CUmemLocation, CudaError> {
        let (type_, id) = match self {
            Location::Device(id) => (
                CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                Self::device_id(id, call)?,
            ),
            Location::Host => (CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST, 0),
            Location::HostNuma(id) => (
                CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA,
                Self::device_id(id, call)?,
            ),
        };
        Ok(CUmemLocation { type_, id })
    }

    /// Returns the location for the functions before CUDA 12.2: a device or the host.
    fn to_legacy_device(self, call: &'static str) -> Result<i32, CudaError> {
        match self {
            Location::Device(id) => Self::device_id(id, call),
            Location::Host => Ok(CU_DEVICE_CPU),
            Location::HostNuma(_) => Err(CudaError {
                call,
                code: NOT_SUPPORTED,
            }),
        }
    }
}

impl Context {
    /// `cuMemAllocManaged`: allocates memory at an address of both the host and the devices.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn allocate_managed(&self, bytes: usize, attach: Attach) -> Result<u64, CudaError> {
        let _current = self.enter()?;
        let mut address = 0;
        call!(
            self.driver(),
            cuMemAllocManaged(&raw mut address, bytes, attach.flag())
        )?;
        Ok(address)
    }

    /// `cuStreamAttachMemAsync`: changes the users of the managed memory at `address`, in the order
    /// of a stream.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn attach(&self, stream: &Stream, address: u64, attach: Attach) -> Result<(), CudaError> {
        let _current = self.enter()?;
        call!(
            self.driver(),
            cuStreamAttachMemAsync(stream.raw(), address, 0, attach.flag())
        )
    }

    /// Moves managed memory to a location, in the order of a stream.
    ///
    /// # Errors
    /// The driver's error, and NOT_SUPPORTED for a NUMA node if the driver does not support them.
    pub fn prefetch(
        &self,
        address: u64,
        bytes: usize,
        to: Location,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let _current = self.enter()?;
        match self.driver().table().cuMemPrefetchAsync_v2 {
            Some(prefetch) => {
                let name = "cuMemPrefetchAsync_v2";
                let to = to.to_mem_location(name)?;
                // SAFETY: the prototype is that of cuda.h; the driver checks the range.
                check(name, unsafe {
                    prefetch(address, bytes, to, 0, stream.raw())
                })
            }
            None => {
                let to = to.to_legacy_device("cuMemPrefetchAsync")?;
                call!(
                    self.driver(),
                    cuMemPrefetchAsync(address, bytes, to, stream.raw())
                )
            }
        }
    }

    /// Advises the driver about the use of managed memory.
    ///
    /// # Errors
    /// The driver's error, and NOT_SUPPORTED for a NUMA node if the driver does not support them.
    pub fn advise(
        &self,
        address: u64,
        bytes: usize,
        advice: Advice,
        of: Location,
    ) -> Result<(), CudaError> {
        let _current = self.enter()?;
        match self.driver().table().cuMemAdvise_v2 {
            Some(advise) => {
                let name = "cuMemAdvise_v2";
                let of = of.to_mem_location(name)?;
                // SAFETY: the prototype is that of cuda.h; the driver checks the range.
                check(name, unsafe { advise(address, bytes, advice.number(), of) })
            }
            None => {
                let of = of.to_legacy_device("cuMemAdvise")?;
                call!(
                    self.driver(),
                    cuMemAdvise(address, bytes, advice.number(), of)
                )
            }
        }
    }

    /// Returns the last advice and prefetch for managed memory.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn residency(&self, address: u64, bytes: usize) -> Result<Residency, CudaError> {
        // `CUmem_range_attribute`
        let [read_mostly] = self.range_attribute(1, address, bytes)?;
        let [preferred] = self.range_attribute(2, address, bytes)?;
        let accessed_by: [i32; MAX_DEVICES] = self.range_attribute(3, address, bytes)?;
        let [prefetched] = self.range_attribute(4, address, bytes)?;
        Ok(Residency {
            read_mostly: read_mostly != 0,
            preferred: Location::from_attribute(preferred),
            accessed_by: accessed_by
                .into_iter()
                .filter_map(Location::from_attribute)
                .collect(),
            prefetched: Location::from_attribute(prefetched),
        })
    }

    /// Reads an attribute that consists of `N` integers.
    fn range_attribute<const N: usize>(
        &self,
        attribute: i32,
        address: u64,
        bytes: usize,
    ) -> Result<[i32; N], CudaError> {
        let _current = self.enter()?;
        let mut values = [0i32; N];
        call!(
            self.driver(),
            cuMemRangeGetAttribute(
                values.as_mut_ptr().cast(),
                size_of_val(&values),
                attribute,
                address,
                bytes
            )
        )?;
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn location_keeps_its_device_on_cuda_12_and_13() {
        use CUmemLocationType as Type;
        for (location, kind, id) in [
            (Location::Device(3), Type::CU_MEM_LOCATION_TYPE_DEVICE, 3),
            (Location::Host, Type::CU_MEM_LOCATION_TYPE_HOST, 0),
            (
                Location::HostNuma(2),
                Type::CU_MEM_LOCATION_TYPE_HOST_NUMA,
                2,
            ),
        ] {
            let today = location.to_mem_location("test").expect("small numbers");
            assert_eq!((today.type_, today.id), (kind, id));
        }
    }

    #[test]
    fn location_host_is_minus_one_before_cuda_12_2() {
        assert_eq!(Location::Device(3).to_legacy_device("test"), Ok(3));
        assert_eq!(Location::Host.to_legacy_device("test"), Ok(-1));
        let refused = Location::HostNuma(0).to_legacy_device("test");
        assert_eq!(refused.map_err(|error| error.code), Err(NOT_SUPPORTED));
    }

    #[test]
    fn location_is_refused_when_the_ordinal_is_too_large() {
        let location = Location::Device(u32::MAX);
        assert!(
            location.to_mem_location("test").is_err() && location.to_legacy_device("test").is_err()
        );
    }

    #[test]
    fn location_of_an_unset_attribute_is_none() {
        assert_eq!(Location::from_attribute(-1), Some(Location::Host));
        assert_eq!(Location::from_attribute(0), Some(Location::Device(0)));
        assert_eq!(Location::from_attribute(-2), None);
    }
}
