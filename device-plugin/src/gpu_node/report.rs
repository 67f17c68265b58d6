//! What the agent knows of its node, in its own types.

use std::collections::BTreeMap;

use bursar_crds::conditions::Statement;
use bursar_crds::gpu_node::{FaultAction, GpuState};
use jiff::Timestamp;

use crate::gpu_node::quota_overrides::AppliedSpec;
use crate::units::{Bytes, GpuUuid, PodUid, Quanta, Quantum};

/// The node as the agent sees it. Two equal reports make no write.
///
/// It should hold nothing that changes all the time: use belongs in the metrics.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeReport {
    /// This boot (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
    /// The NVIDIA driver's version, while it answers.
    pub driver_version: Option<String>,
    /// How much one token stands for.
    pub quantum: Quantum,
    /// Device memory of the healthy GPUs together.
    pub device_memory: MemoryReport,
    /// Managed memory; all zero where none is offered.
    pub managed_memory: MemoryReport,
    /// The GPUs, in NVML's order, lost ones included.
    pub gpus: Vec<GpuReport>,
    /// Containers that wait for room, the longest waiting first. More than 16 are cut off.
    pub waiting: Vec<WaitingReport>,
    /// Containers that are not held to their quota. More than 16 are counted and cut off.
    pub not_enforced: Vec<NotEnforcedReport>,
    /// What became of the quotas that `spec` orders.
    pub applied_spec: AppliedSpec,
    /// Faults that nobody has dealt with. More than 16 are cut off.
    pub faults: Vec<FaultReport>,
    /// What the pods of each namespace use, and what befell them. More than 32 are cut off.
    pub namespaces: Vec<NamespaceReport>,
    /// One statement per condition type of [`bursar_crds::conditions::gpu_node`], but for `Ready`, which
    /// [`render`](super::render) concludes from them.
    pub conditions: Vec<Statement>,
}

/// Memory of the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryReport {
    /// What the kubelet is told there is.
    pub allocatable: Quanta,
    /// What nothing is bound to.
    pub free: Quanta,
    /// The most that one newcomer can be bound to now.
    pub largest_free: Quanta,
}

/// One GPU or MIG instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuReport {
    /// NVML's UUID.
    pub uuid: GpuUuid,
    /// The number of its device node; a MIG instance has its parent's.
    pub index: u32,
    /// The model's name.
    pub model: String,
    /// All of its memory.
    pub memory: Bytes,
    /// What becomes of new pods on it.
    pub state: GpuState,
    /// G, the generation of its memory.
    pub generation: u64,
    /// Whether it works.
    pub health: GpuHealth,
    /// What pods can be given; zero while it is unhealthy.
    pub capacity: Quanta,
    /// What nothing is bound to.
    pub free: Quanta,
    /// `free`, less what is held for others.
    pub largest_free: Quanta,
    /// What ended pods left, and others hold.
    pub leaked: Bytes,
    /// What is in use and charged to no pod.
    pub withheld: Bytes,
    /// The pod that it is held for by a reservation of the operator.
    pub reserved_for: Option<PodUid>,
    /// The pods with memory on it, each with how much. Those with least are cut off beyond 32.
    pub pods: BTreeMap<PodUid, Quanta>,
}

/// Whether a GPU works.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GpuHealth {
    /// It does.
    Healthy,
    /// It does not.
    Unhealthy {
        /// One word: `GpuLost`, `Timeout`, `Xid79`.
        reason: String,
    },
}

/// A container that waits for room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingReport {
    /// Its pod.
    pub pod_uid: PodUid,
    /// Its pod's namespace.
    pub namespace: String,
    /// Its pod's name.
    pub pod: String,
    /// Its name.
    pub container: String,
    /// What it waits for.
    pub quanta: Quanta,
    /// Since when.
    pub since: Timestamp,
}

/// A container that is not held to its quota.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotEnforcedReport {
    /// Its pod.
    pub pod_uid: PodUid,
    /// Its pod's namespace.
    pub namespace: String,
    /// Its pod's name.
    pub pod: String,
    /// Its name.
    pub container: String,
    /// Why, in one word.
    pub reason: &'static str,
    /// Why, for people. Does not change while nothing changes.
    pub message: String,
}

/// What a namespace's pods use of the node, and what befell them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceReport {
    /// The namespace.
    pub namespace: String,
    /// The most that they had at a time lately, rounded up.
    pub observed: Quanta,
    /// Allocations that were denied to them.
    pub denials: u64,
    /// Images of theirs that were poisoned.
    pub poisoned: u64,
    /// Restarts of theirs for that.
    pub restarts: u64,
}

/// A process image whose context is poisoned, or a GPU that is at fault itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultReport {
    /// Names this occurrence for ever.
    pub id: String,
    /// The GPU.
    pub gpu: GpuUuid,
    /// G of the GPU when the fault was first seen.
    pub gpu_generation: u64,
    /// The CUDA error, where the process reported one.
    pub cuda_error: Option<i32>,
    /// The XID, where there was one.
    pub xid: Option<u32>,
    /// What is done about it, or has to be, once that is decided.
    pub action: Option<FaultAction>,
    /// Whose context it was; none where the GPU itself is at fault.
    pub image: Option<ImageReport>,
    /// When it was first told; none: when it is first written.
    pub time: Option<Timestamp>,
}

/// A process image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageReport {
    /// Its pod, where that is known.
    pub pod_uid: Option<PodUid>,
    /// Its pod's namespace.
    pub namespace: String,
    /// Its pod's name.
    pub pod: String,
    /// Its container's name.
    pub container: String,
    /// P of the image.
    pub process_generation: u64,
}
