//! Defines the device ids that the kubelet counts and assigns.
//!
//! A device id stands for one quantum of the node, not of a GPU. The kubelet accepts at most 4 MiB
//! a message, and needs time quadratic in the number of ids when they change. So ids are short and
//! few.

use std::fmt;
use std::str::FromStr;

use bursar_crds::resources::GPU_COMPUTE;

use super::{Quanta, Quantum, UnitError, serde_as_str};

/// The most device ids of one resource that a node registers.
pub const MAX_DEVICE_IDS: u16 = 4096;

/// An extended resource of the node.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Resource {
    /// Memory of the node's GPUs: a claim is bound to one GPU, or spread over several.
    DeviceMemory,
    /// CUDA managed memory, counted for the node and not for a GPU.
    ManagedMemory,
    /// Hundredths of a GPU's compute time. The ledger has no claim of it, because a pod's weight
    /// goes where its device memory is.
    Compute,
}

impl Resource {
    /// The extended resource's name, such as `bursar.dev/gpu-memory-gib`.
    pub fn name(self, quantum: Quantum) -> &'static str {
        match self {
            Self::DeviceMemory => quantum.device_memory(),
            Self::ManagedMemory => quantum.managed_memory(),
            Self::Compute => GPU_COMPUTE,
        }
    }

    /// The resource with this name, in any quantum.
    pub fn of_name(name: &str) -> Option<Self> {
        let quanta = Quantum::ALL.into_iter();
        quanta
            .flat_map(|quantum| {
                [Self::DeviceMemory, Self::ManagedMemory, Self::Compute]
                    .map(|resource| (resource, resource.name(quantum)))
            })
            .find_map(|(resource, known)| (known == name).then_some(resource))
    }

    /// The first letter of its device ids, which keeps them unique across resources.
    const fn letter(self) -> char {
        match self {
            Self::DeviceMemory => 'm',
            Self::ManagedMemory => 'u',
            Self::Compute => 'c',
        }
    }
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DeviceMemory => "device memory",
            Self::ManagedMemory => "managed memory",
            Self::Compute => "compute time",
        })
    }
}

/// One device id: `m-0417`, `u-0003`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId {
    resource: Resource,
    index: u16,
}

impl DeviceId {
    /// The resource of the device id.
    pub const fn resource(self) -> Resource {
        self.resource
    }

    /// The number of the device id, below [`MAX_DEVICE_IDS`].
    pub const fn index(self) -> u16 {
        self.index
    }

    /// The first `count` device ids of `resource`, at most [`MAX_DEVICE_IDS`]. A node of `count`
    /// quanta registers these.
    pub fn first(resource: Resource, count: u16) -> impl Iterator<Item = Self> {
        (0..count.min(MAX_DEVICE_IDS)).map(move |index| Self { resource, index })
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{:04}", self.resource.letter(), self.index)
    }
}

impl FromStr for DeviceId {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let parse = || {
            let (resource, digits) = match text.split_at_checked(2)? {
                ("m-", digits) => (Resource::DeviceMemory, digits),
                ("u-", digits) => (Resource::ManagedMemory, digits),
                ("c-", digits) => (Resource::Compute, digits),
                _ => return None,
            };
            let canonical = digits.len() == 4 && digits.bytes().all(|b| b.is_ascii_digit());
            let index = digits
                .parse()
                .ok()
                .filter(|&index| index < MAX_DEVICE_IDS)?;
            canonical.then_some(Self { resource, index })
        };
        parse().ok_or_else(|| UnitError::DeviceId(text.to_owned()))
    }
}

serde_as_str!(DeviceId);

/// The device ids of one container's allocation: a sorted set, never empty. The kubelet's order and
/// duplicates mean nothing and are dropped. Stored as `0-3,17`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceIdSet(Box<[u16]>);

impl DeviceIdSet {
    /// The set of these device ids, all of `resource`.
    ///
    /// # Errors
    /// [`UnitError::DeviceId`], [`UnitError::ForeignDeviceId`] or [`UnitError::NoDeviceIds`].
    pub fn from_ids<S: AsRef<str>>(
        resource: Resource,
        ids: impl IntoIterator<Item = S>,
    ) -> Result<Self, UnitError> {
        let mut indexes = Vec::new();
        for id in ids {
            let device_id: DeviceId = id.as_ref().parse()?;
            if device_id.resource != resource {
                return Err(UnitError::ForeignDeviceId {
                    device_id,
                    expected: resource,
                });
            }
            indexes.push(device_id.index);
        }
        Self::from_indexes(indexes)
    }

    /// The set of these indexes.
    ///
    /// # Errors
    /// [`UnitError::NoDeviceIds`], or [`UnitError::DeviceIdSet`] for an index of [`MAX_DEVICE_IDS`]
    /// or more.
    pub fn from_indexes(indexes: impl IntoIterator<Item = u16>) -> Result<Self, UnitError> {
        let mut indexes: Vec<u16> = indexes.into_iter().collect();
        indexes.sort_unstable();
        indexes.dedup();
        match indexes.last() {
            None => Err(UnitError::NoDeviceIds),
            Some(&last) if last >= MAX_DEVICE_IDS => Err(UnitError::DeviceIdSet(last.to_string())),
            Some(_) => Ok(Self(indexes.into_boxed_slice())),
        }
    }

    /// The amount of memory that the device ids stand for.
    pub fn quanta(&self) -> Quanta {
        // A set has at most MAX_DEVICE_IDS elements.
        Quanta(self.0.len() as u32)
    }

    /// The indexes in ascending order.
    pub fn indexes(&self) -> impl Iterator<Item = u16> {
        self.0.iter().copied()
    }

    /// The device ids of `resource`, in ascending order.
    pub fn ids(&self, resource: Resource) -> impl Iterator<Item = DeviceId> {
        self.indexes()
            .map(move |index| DeviceId { resource, index })
    }

    /// Whether the two sets share a device id.
    pub fn overlaps(&self, other: &Self) -> bool {
        let (few, many) = if self.0.len() <= other.0.len() {
            (&self.0, &other.0)
        } else {
            (&other.0, &self.0)
        };
        few.iter().any(|index| many.binary_search(index).is_ok())
    }
}

impl fmt::Display for DeviceIdSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, run) in self.0.chunk_by(|a, b| a + 1 == *b).enumerate() {
            let comma = if i == 0 { "" } else { "," };
            match run {
                [one] => write!(f, "{comma}{one}")?,
                [first, .., last] => write!(f, "{comma}{first}-{last}")?,
                [] => {}
            }
        }
        Ok(())
    }
}

impl FromStr for DeviceIdSet {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let malformed = || UnitError::DeviceIdSet(text.to_owned());
        let mut indexes = Vec::new();
        for run in text.split(',') {
            let (first, last) = run.split_once('-').unwrap_or((run, run));
            let first: u16 = first.parse().map_err(|_| malformed())?;
            let last: u16 = last.parse().map_err(|_| malformed())?;
            let sorted = indexes.last().is_none_or(|&before| before < first);
            if !sorted || first > last || last >= MAX_DEVICE_IDS {
                return Err(malformed());
            }
            indexes.extend(first..=last);
        }
        Self::from_indexes(indexes)
    }
}

serde_as_str!(DeviceIdSet);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn device_id_is_a_letter_and_four_digits() {
        let device_id: DeviceId = "m-0417".parse().unwrap();
        assert_eq!(
            (device_id.resource(), device_id.index()),
            (Resource::DeviceMemory, 417)
        );
        assert_eq!(device_id.to_string(), "m-0417");
        for bad in [
            "", "m-", "m-417", "m-4096", "x-0001", "m-+417", "m-0417 ", "é-0001",
        ] {
            assert!(bad.parse::<DeviceId>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn device_id_set_ignores_order_and_duplicates() {
        let set = DeviceIdSet::from_ids(Resource::ManagedMemory, ["u-0003", "u-0001", "u-0003"]);
        assert_eq!(set.unwrap().to_string(), "1,3");
    }

    #[test]
    fn device_id_of_another_resource_is_rejected() {
        let set = DeviceIdSet::from_ids(Resource::DeviceMemory, ["m-0001", "u-0001"]);
        assert!(matches!(set, Err(UnitError::ForeignDeviceId { .. })));
    }

    #[test]
    fn empty_device_id_set_is_rejected() {
        let none: [&str; 0] = [];
        assert_eq!(
            DeviceIdSet::from_ids(Resource::DeviceMemory, none),
            Err(UnitError::NoDeviceIds)
        );
        for bad in ["", "3-1", "1,1", "2,1", "4096", "1-", "a"] {
            assert!(bad.parse::<DeviceIdSet>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn resource_name_contains_its_quantum() {
        let device = Resource::DeviceMemory;
        assert_eq!(device.name(Quantum::Gib1), "bursar.dev/gpu-memory-gib");
        assert_eq!(device.name(Quantum::Mib256), "bursar.dev/gpu-memory-256mib");
    }

    proptest! {
        #[test]
        fn device_id_set_round_trips_through_text(indexes in prop::collection::vec(0..MAX_DEVICE_IDS, 1..60)) {
            let set = DeviceIdSet::from_indexes(indexes).unwrap();
            prop_assert_eq!(set.to_string().parse(), Ok(set));
        }

        #[test]
        fn device_id_sets_overlap_when_they_share_an_index(
            a in prop::collection::btree_set(0..40u16, 1..10),
            b in prop::collection::btree_set(0..40u16, 1..10),
        ) {
            let share = a.intersection(&b).next().is_some();
            let (a, b) = (DeviceIdSet::from_indexes(a).unwrap(), DeviceIdSet::from_indexes(b).unwrap());
            prop_assert_eq!(a.overlaps(&b), share);
        }
    }
}
