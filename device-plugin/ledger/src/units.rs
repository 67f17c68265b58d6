//! Defines the node's units of account: amounts, device ids and identities, each parsed once at the
//! edge.

mod amount;
mod device_id;
mod identity;

pub use amount::{Bytes, Quanta};
pub use bursar_crds::Quantum;
pub use device_id::{DeviceId, DeviceIdSet, MAX_DEVICE_IDS, Resource};
pub use identity::{AllocationId, GpuUuid, LeaseId, PodUid};

/// Why a value from outside is not one of this module's units.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// A GPU name that is not NVML's `GPU-...` or `MIG-...`.
    #[error("GPU UUID {0:?} does not look like GPU-... or MIG-...")]
    Gpu(String),
    /// An allocation name that is not 16 lower-case hex digits.
    #[error("allocation id {0:?} is not 16 lower-case hex digits")]
    Allocation(String),
    /// A pod UID that is empty, too long, or unsafe in a path.
    #[error("pod UID {0:?} is not 1 to 64 letters, digits and dashes")]
    Pod(String),
    /// A device id that is not Bursar's.
    #[error("device id {0:?} is not m-0000..m-4095 or u-0000..u-4095")]
    DeviceId(String),
    /// A device id of the other resource.
    #[error("device id {device_id} is not of {expected}")]
    ForeignDeviceId {
        /// The device id that was found.
        device_id: DeviceId,
        /// The requested resource.
        expected: Resource,
    },
    /// A request without device ids.
    #[error("a set of device ids must not be empty")]
    NoDeviceIds,
    /// A compact list of device ids (`0-3,17`) that is malformed, unsorted or out of range.
    #[error("list of device ids {0:?} is malformed")]
    DeviceIdSet(String),
}

/// Derives serde for a type through its `Display` and `FromStr`.
macro_rules! serde_as_str {
    ($type:ty) => {
        impl serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}
use serde_as_str;
