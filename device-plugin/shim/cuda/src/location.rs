//! Decides from a `CUmemLocation` which account pays for memory.

use std::ffi::c_int;

use crate::accounting::Account;

/// `CUmemLocation` (CUDA 10.2).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemLocation {
    kind: c_int,
    id: c_int,
}

/// The first fields of `CUmemAllocationProp` and of `CUmemPoolProps`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemProperties {
    kind: c_int,
    handle_types: c_int,
    location: MemLocation,
}

/// The account that pays for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChargeTo {
    /// An account of the container.
    Account(Account),
    /// No account, because the memory is the host's.
    Host,
}

/// `CU_MEM_ALLOCATION_TYPE_MANAGED`.
const ALLOCATION_TYPE_MANAGED: c_int = 2;
/// `CU_MEM_LOCATION_TYPE_HOST`, `_HOST_NUMA`, `_HOST_NUMA_CURRENT` and `_INVISIBLE`.
const HOST_LOCATION_TYPES: std::ops::RangeInclusive<c_int> = 2..=5;
/// `CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN` (CUDA 13.5): the device is the lowest byte.
const LOCATION_TYPE_LOCALITY_DOMAIN: c_int = 6;

impl MemProperties {
    /// Returns the account that pays for memory of these properties.
    pub(crate) fn charge_to(&self) -> ChargeTo {
        charge_to(self.kind, self.location)
    }
}

/// Returns the account that pays for memory of an allocation type at a location. Managed memory has
/// an account of its own, whatever its preferred location. An unknown kind of location counts as a
/// device.
pub(crate) fn charge_to(kind: c_int, location: MemLocation) -> ChargeTo {
    if kind == ALLOCATION_TYPE_MANAGED {
        return ChargeTo::Account(Account::Managed);
    }
    match location.kind {
        place if HOST_LOCATION_TYPES.contains(&place) => ChargeTo::Host,
        LOCATION_TYPE_LOCALITY_DOMAIN => ChargeTo::Account(Account::Device(location.id & 0xff)),
        _ => ChargeTo::Account(Account::Device(location.id)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn location_decides_the_charged_account() {
        let at = |kind, id| MemLocation { kind, id };
        let device = |id| ChargeTo::Account(Account::Device(id));
        assert_eq!(charge_to(1, at(1, 3)), device(3));
        for host in 2..=4 {
            assert_eq!(charge_to(1, at(host, 0)), ChargeTo::Host);
        }
        for place in 0..=4 {
            assert_eq!(
                charge_to(2, at(place, 1)),
                ChargeTo::Account(Account::Managed)
            );
        }
        assert_eq!(charge_to(1, at(6, 0x0102)), device(2));
        assert_eq!(charge_to(1, at(99, 1)), device(1));
    }
}
