//! Describes the node's state in the agent's own types.

use std::collections::BTreeMap;

use bursar_crds::conditions::ConditionUpdate;
use bursar_crds::gpu_node::{FaultAction, GpuState};
use jiff::Timestamp;

use crate::gpu_node::quota_overrides::AppliedSpec;
use bursar_ledger::units::{Bytes, GpuUuid, PodUid, Quanta, Quantum};

/// The node's state. Equal reports cause no write.
///
/// Nothing in a report may change continuously; such figures are metrics.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeReport {
    /// The boot id (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
    /// The NVIDIA driver's version, while it answers.
    pub driver_version: Option<String>,
    /// The size of one device id.
    pub quantum: Quantum,
    /// Device memory of all healthy GPUs.
    pub device_memory: MemoryReport,
    /// Managed memory; all zero if the node offers none.
    pub managed_memory: MemoryReport,
    /// The GPUs in NVML's order, including lost ones.
    pub gpus: Vec<GpuReport>,
    /// Queued containers, the longest waiting first. The status has the first 16.
    pub waiting: Vec<WaitingReport>,
    /// Containers whose quota is not enforced. The status has the first 16 and the number of all.
    pub not_enforced: Vec<NotEnforcedReport>,
    /// The outcomes of the spec's quotas.
    pub applied_spec: AppliedSpec,
    /// Open faults. The status has the first 16.
    pub faults: Vec<FaultReport>,
    /// The use and the incidents of each namespace. The status has the first 32.
    pub namespaces: Vec<NamespaceReport>,
    /// The state of each condition of [`bursar_crds::conditions::gpu_node`] except `Ready`, which
    /// [`render`](super::render) derives.
    pub conditions: Vec<ConditionUpdate>,
}

/// Amounts of one kind of memory on the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryReport {
    /// The amount that the agent reports to the kubelet.
    pub allocatable: Quanta,
    /// The amount that is bound to no container.
    pub free: Quanta,
    /// The largest amount that a new container can be bound to now.
    pub largest_free: Quanta,
}

/// One GPU or MIG instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuReport {
    /// NVML's UUID.
    pub uuid: GpuUuid,
    /// The number of its device node; for a MIG instance, its parent's.
    pub index: u32,
    /// The name of the model.
    pub model: String,
    /// The total memory.
    pub memory: Bytes,
    /// Whether new pods are placed on it.
    pub state: GpuState,
    /// The GPU's generation.
    pub generation: u64,
    /// The health.
    pub health: GpuHealth,
    /// The amount that can be bound to pods; zero while the GPU is unhealthy.
    pub capacity: Quanta,
    /// The amount that is bound to no container.
    pub free: Quanta,
    /// The part of `free` that is reserved for no pod.
    pub largest_free: Quanta,
    /// Bytes that ended pods left and others still hold.
    pub leaked: Bytes,
    /// Bytes that are in use and charged to no container.
    pub withheld: Bytes,
    /// The pod that a reservation of the operator names.
    pub reserved_for: Option<PodUid>,
    /// The pods with memory on it, and how much each has. The status has the 32 largest.
    pub pods: BTreeMap<PodUid, Quanta>,
}

/// The health of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GpuHealth {
    /// The GPU works.
    Healthy,
    /// The GPU does not work.
    Unhealthy {
        /// The reason in one word: `GpuLost`, `NoAnswer`, `Xid79`.
        reason: String,
    },
}

/// A container in the node's queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingReport {
    /// The pod's UID.
    pub pod_uid: PodUid,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The container's name.
    pub container: String,
    /// The amount that the container asks for.
    pub quanta: Quanta,
    /// When the container was queued.
    pub since: Timestamp,
}

/// A container whose quota is not enforced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotEnforcedReport {
    /// The pod's UID.
    pub pod_uid: PodUid,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The container's name.
    pub container: String,
    /// The reason in one word.
    pub reason: &'static str,
    /// The message. An unchanged state has an unchanged message.
    pub message: String,
}

/// The use and the incidents of a namespace's pods on the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceReport {
    /// The namespace.
    pub namespace: String,
    /// The peak of their use in the recent past, rounded up.
    pub observed: Quanta,
    /// How many allocations were denied to them.
    pub denials: u64,
    /// How many of their process images were poisoned.
    pub poisoned: u64,
    /// How often they were restarted for that.
    pub restarts: u64,
}

/// A process image with a poisoned context, or a faulty GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultReport {
    /// A unique id of this occurrence.
    pub id: String,
    /// The GPU.
    pub gpu: GpuUuid,
    /// The GPU's generation when the fault was first seen.
    pub gpu_generation: u64,
    /// The CUDA error, if the process reported one.
    pub cuda_error: Option<i32>,
    /// The XID, if there was one.
    pub xid: Option<u32>,
    /// The decided action, if any.
    pub action: Option<FaultAction>,
    /// The process image; none for a fault of the GPU itself.
    pub image: Option<ImageReport>,
    /// When the fault was reported; none takes the time of the first write.
    pub time: Option<Timestamp>,
}

/// A process image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageReport {
    /// The pod's UID, if known.
    pub pod_uid: Option<PodUid>,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The container's name.
    pub container: String,
    /// The image's process generation.
    pub process_generation: u64,
}
