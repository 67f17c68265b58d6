//! Describes the node's state. An entry of the status has the API's types if it depends on nothing
//! that an earlier status said, otherwise the agent's own.

use std::collections::BTreeMap;

use bursar_crds::conditions::ConditionUpdate;
use bursar_crds::gpu_node::{
    EnforcementGap, Fault, GpuContainer, GpuState, NamespaceUse, PendingContainer, RetainedLease,
};
use bursar_gpu::Gpu;
use bursar_ledger::GpuView;
use bursar_ledger::units::{Bytes, PodUid, Quanta, Quantum};
use bursar_node::checkpoint_state::PodName;
use bursar_retained::runtimes::RuntimeReport;
use bursar_retained::tokens::NodePublicKey;

use crate::quota_overrides::AppliedSpec;

/// The node's state. Equal reports cause no write.
///
/// Nothing in a report may change continuously; such figures are metrics. Process generations and
/// leases change as tenants like: the publisher delays a write for them alone, and for the counts
/// of allocator runtimes.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeReport {
    /// The boot id (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
    /// The NVIDIA driver's version, while it answers.
    pub driver_version: Option<String>,
    /// The public key of the node's memory tokens.
    pub token_key: NodePublicKey,
    /// The size of one device id.
    pub quantum: Quantum,
    /// Device memory of all healthy GPUs.
    pub device_memory: MemoryReport,
    /// Managed memory; all zero if the node offers none.
    pub managed_memory: MemoryReport,
    /// The GPUs in NVML's order, including lost ones.
    pub gpus: Vec<GpuReport>,
    /// The names of pods with memory or a place in the queue, where the agent knows them.
    pub pod_names: BTreeMap<PodUid, PodName>,
    /// Queued containers in the order of the status, which has the first 16.
    pub waiting: Vec<PendingContainer>,
    /// Containers whose quota is not enforced. The status has the first 16 and the number of all.
    pub not_enforced: Vec<EnforcementGap>,
    /// The outcomes of the spec's quotas.
    pub applied_spec: AppliedSpec,
    /// Open faults. The status has at most 64, those that need the operator or an admin first.
    /// Those of GPUs have no time yet.
    pub faults: Vec<Fault>,
    /// The containers with memory. The status has the first 256, those with faults first.
    pub containers: Vec<GpuContainer>,
    /// The number of leases of retained memory.
    pub retained_count: usize,
    /// Leases of retained memory, at most 128.
    pub retained: Vec<RetainedLease>,
    /// The use and the incidents of each namespace. The status has the first 32.
    pub namespaces: Vec<NamespaceUse>,
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
    /// The GPU as NVML describes it.
    pub gpu: Gpu,
    /// Whether new pods are placed on it.
    pub state: GpuState,
    /// The GPU's generation.
    pub generation: u64,
    /// The health.
    pub health: GpuHealth,
    /// Its memory in the ledger.
    pub memory: GpuView,
    /// The allocator runtime, and the bytes that it has lent; none where retained memory is off.
    pub runtime: Option<(RuntimeReport, Bytes)>,
    /// The memory of pods that have ended and whose processes run on.
    pub leftover: Bytes,
    /// Whether managed memory on the GPU may hide that other memory is free.
    pub has_managed_memory: bool,
}

impl GpuReport {
    /// The amount that can be bound to pods; zero while the GPU is unhealthy.
    pub fn capacity(&self) -> Quanta {
        match self.health {
            GpuHealth::Healthy => self.memory.capacity,
            GpuHealth::Unhealthy { .. } => Quanta::ZERO,
        }
    }
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
