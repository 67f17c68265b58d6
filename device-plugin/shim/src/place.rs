//! Where a program asks for memory, and so which account pays for it.

use std::ffi::c_int;

use crate::ledger::Kind;

/// `CUmemLocation` (CUDA 10.2).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Location {
    kind: c_int,
    id: c_int,
}

/// What `CUmemAllocationProp` and `CUmemPoolProps` begin with.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Properties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
}

/// Who pays for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Payer {
    /// An account of the container.
    Account(Kind),
    /// No account: the memory is the host's.
    Nobody,
}

/// `CU_MEM_ALLOCATION_TYPE_MANAGED`.
const MANAGED: c_int = 2;
/// `CU_MEM_LOCATION_TYPE_HOST`, `_HOST_NUMA`, `_HOST_NUMA_CURRENT` and `_INVISIBLE`.
const HOST: std::ops::RangeInclusive<c_int> = 2..=5;
/// `CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN` (CUDA 13.5): the device is the lowest byte.
const LOCALITY_DOMAIN: c_int = 6;

impl Properties {
    /// Who pays for memory of these properties.
    pub(crate) fn payer(&self) -> Payer {
        payer(self.kind, self.location)
    }
}

/// Who pays for memory of an allocation type at a location. Managed memory has an account of its own,
/// wherever it prefers to be. A kind of location that is not known yet is taken for a device's.
pub(crate) fn payer(kind: c_int, location: Location) -> Payer {
    if kind == MANAGED {
        return Payer::Account(Kind::Managed);
    }
    match location.kind {
        place if HOST.contains(&place) => Payer::Nobody,
        LOCALITY_DOMAIN => Payer::Account(Kind::Device(location.id & 0xff)),
        _ => Payer::Account(Kind::Device(location.id)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_pays_for_its_own_the_host_for_nothing_and_managed_memory_has_its_account() {
        let at = |kind, id| Location { kind, id };
        let device = |id| Payer::Account(Kind::Device(id));
        assert_eq!(payer(1, at(1, 3)), device(3));
        for host in 2..=4 {
            assert_eq!(payer(1, at(host, 0)), Payer::Nobody);
        }
        for place in 0..=4 {
            assert_eq!(payer(2, at(place, 1)), Payer::Account(Kind::Managed));
        }
        assert_eq!(payer(1, at(6, 0x0102)), device(2));
        assert_eq!(payer(1, at(99, 1)), device(1));
    }
}
