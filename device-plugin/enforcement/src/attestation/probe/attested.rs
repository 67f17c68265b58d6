//! Describes what the attestation knows of a container and its processes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use bursar_ledger::units::{AllocationId, PodUid};

use super::super::evaluate::EnforcementGap;
use super::file_name;

/// A pod with containers that have GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AttestationTarget {
    /// The pod's UID.
    pub pod: PodUid,
    /// The pod's cgroup.
    pub cgroup: PathBuf,
    /// The allocations of the pod's containers.
    pub allocations: BTreeSet<AllocationId>,
}

/// A running container with a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AttestedContainer {
    /// The container's allocation.
    pub allocation: AllocationId,
    /// The container's pod.
    pub pod: PodUid,
    /// The name of the container's cgroup.
    pub cgroup: String,
    /// The gap in its enforcement; none where it has none.
    pub gap: Option<EnforcementGap>,
    /// The container's processes, by pid.
    pub processes: BTreeMap<u32, AttestedProcess>,
}

impl AttestedContainer {
    /// A container of which nothing else is known.
    pub(super) fn new(allocation: AllocationId, pod: &PodUid, cgroup: &Path) -> Self {
        Self {
            allocation,
            pod: pod.clone(),
            cgroup: file_name(cgroup),
            gap: None,
            processes: BTreeMap::new(),
        }
    }
}

/// A process of a container with a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttestedProcess {
    /// The start time, in clock ticks since boot.
    pub start: u64,
    /// Whether the process has executed no program since it was forked.
    pub forked: bool,
    /// Whether the process has the shim's entry mapped, or the shim of an earlier build.
    pub has_shim: bool,
    /// The addresses at which the process has device nodes of the driver mapped.
    pub device_mappings: BTreeSet<u64>,
    /// The bytes of its mappings of managed memory, which no process can have more of.
    pub managed_mapped: u64,
}
