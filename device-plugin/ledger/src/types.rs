//! Defines the inputs and outputs of the ledger.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU16;

use serde::{Deserialize, Serialize};

use super::boot_time::BootTime;
use crate::units::{AllocationId, Bytes, DeviceIdSet, GpuUuid, PodUid, Quanta, Resource};

/// A GPU of the inventory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// The GPU's UUID.
    pub uuid: GpuUuid,
    /// The memory that may be bound: all of it less the configured reserve, in whole quanta.
    pub capacity: Quanta,
    /// Whether new claims may be bound.
    pub health: Health,
}

/// Whether a GPU takes new claims. Bound memory stays bound and accounted for either way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Health {
    /// The GPU takes claims.
    Healthy,
    /// The GPU is dead, drained or gone from the inventory.
    Unhealthy,
}

/// A pod's priority (`spec.priority`), higher first; 0 where unknown.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Priority(pub i32);

/// The least number of GPUs that a claim is spread over (annotation `bursar.dev/gpus`).
///
/// A spread grants no memory. A claim that no single GPU can hold is spread in any case, and a
/// claim never has more GPUs than quanta. Managed memory is never spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuSpread {
    /// The number of GPUs.
    pub gpus: NonZeroU16,
}

impl Default for GpuSpread {
    fn default() -> Self {
        Self {
            gpus: NonZeroU16::MIN,
        }
    }
}

/// A call of `PreStartContainer` with the pod that the agent has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BindRequest {
    /// The resource of the device ids.
    pub resource: Resource,
    /// The container's device ids, as the kubelet names them.
    pub device_ids: DeviceIdSet,
    /// The device ids of all containers of the pod, which are placed together. Empty where the
    /// kubelet's checkpoint does not list them.
    pub containers: Vec<DeviceIdSet>,
    /// The pod of the container.
    pub pod: PodUid,
    /// The requested spread.
    pub spread: GpuSpread,
    /// The pod's priority.
    pub priority: Priority,
}

/// The number of a claim: a pod's allocations with one set of device ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ClaimId(pub(super) u64);

/// A call of `PreStartContainer` that waits. A later call for the same claim makes this one stale,
/// so that its late end cannot close the later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WaitHandle {
    /// The queued claim; [`Binding::claim`] will name it.
    pub claim: ClaimId,
    pub(super) call: u64,
}

/// The result of [`Ledger::bind`](crate::Ledger::bind).
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct BindResponse {
    /// The outcome of this call.
    pub outcome: BindOutcome,
    /// Allocations of the same pod whose claims this start has ended (finished init containers);
    /// the agent removes their sessions and CDI files.
    pub ended: Vec<AllocationId>,
}

/// The binding, or the reason why the claim waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BindOutcome {
    /// The claim has its memory: the agent writes the CDI files and answers the kubelet.
    Bound(Binding),
    /// No GPU has room. The agent keeps the call open until `advance` names the claim, or ends it
    /// with `stop_waiting` and returns the reason to the kubelet.
    Queued(WaitHandle, WaitReason),
}

/// A claim with its memory. All its allocations share the memory. The kubelet does not say which
/// container of one set of device ids it starts, and such containers never run together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Binding {
    /// The claim.
    pub claim: ClaimId,
    /// The allocations that share the memory, oldest first; never empty.
    pub allocations: Vec<AllocationId>,
    /// The resource of the device ids.
    pub resource: Resource,
    /// The device ids.
    pub device_ids: DeviceIdSet,
    /// The pod.
    pub pod: PodUid,
    /// The place of the memory.
    pub placement: Placement,
}

/// A binding by reference, without its device ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BindingRef<'a> {
    /// The claim.
    pub claim: ClaimId,
    /// Its allocations, oldest first; never empty.
    pub allocations: &'a [AllocationId],
    /// The resource of its device ids.
    pub resource: Resource,
    /// The pod that has the claim.
    pub pod: &'a PodUid,
    /// The place of its memory.
    pub placement: &'a Placement,
}

/// The place of a claim's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Placement {
    /// On these GPUs, in order of UUID; never empty.
    Device(Vec<Share>),
    /// An amount of the node's managed memory.
    Managed(Quanta),
}

/// A claim's part of one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// The GPU.
    pub gpu: GpuUuid,
    /// The quota on it; never zero.
    pub quanta: Quanta,
}

/// The reason why a claim is not bound, as the pod's status shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitReason {
    /// The requested resource.
    pub resource: Resource,
    /// The claim's need, in all.
    pub needed: Bytes,
    /// The need of the pod's other containers, which are placed with it.
    pub other_containers: Vec<Bytes>,
    /// The number of GPUs; none for managed memory, and where the node's healthy GPUs together
    /// could not hold the claim and the others.
    pub gpus: Option<NonZeroU16>,
    /// The number of GPUs that the pod's annotation asks for, and that of the node's healthy GPUs,
    /// where these are fewer.
    pub too_few_gpus: Option<(u16, usize)>,
    /// Whether the claim exceeds one MIG instance while other instances have the rest. Nothing is
    /// spread over instances.
    pub beyond_instance: bool,
    /// The most free memory of one healthy GPU (or the managed memory), reserved or not.
    pub largest_free: Bytes,
    /// The GPU with the most; none for managed memory, and without a healthy GPU.
    pub largest_free_gpu: Option<GpuUuid>,
    /// The part of that GPU's free memory that is set aside for other pods.
    pub set_aside: Vec<SetAside>,
    /// A healthy GPU that is closed to the pod. Another namespace's pods had memory of it, and its
    /// driver is not proven to clear freed memory.
    pub closed_gpu: Option<GpuUuid>,
    /// A healthy GPU that CUDA refused last.
    pub refused_gpu: Option<GpuUuid>,
    /// A healthy GPU on which CUDA was not tried yet.
    pub untried_gpu: Option<GpuUuid>,
    /// The pod's weight, and the most that a healthy GPU has left of its weights; none where a GPU
    /// has enough.
    pub weight: Option<(u16, u16)>,
    /// The number of claims before this one in the queue.
    pub claims_ahead: usize,
    /// The withheld memory of the healthy GPUs.
    pub withheld: Bytes,
}

/// Free memory that is set aside for a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetAside {
    /// The pod.
    pub pod: PodUid,
    /// The pod's name for people; the UID where it is not known.
    pub name: String,
    /// The amount.
    pub amount: Bytes,
}

impl fmt::Display for WaitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "waiting for {}", self.needed)?;
        if let Some((wanted, present)) = self.too_few_gpus {
            let verb = if present == 1 { "GPU is" } else { "GPUs are" };
            return write!(
                f,
                " on {wanted} GPUs: {present} {verb} healthy on this node"
            );
        }
        match (self.resource, self.gpus.map(NonZeroU16::get)) {
            (Resource::ManagedMemory | Resource::Compute, _) => write!(f, " of managed memory")?,
            (Resource::DeviceMemory, Some(1)) => write!(f, " on one GPU")?,
            (Resource::DeviceMemory, Some(n)) => write!(f, " on {n} GPUs")?,
            (Resource::DeviceMemory, None) if self.beyond_instance => {
                write!(f, ", more than one MIG instance holds: no program uses two")?;
            }
            (Resource::DeviceMemory, None) if !self.other_containers.is_empty() => {}
            (Resource::DeviceMemory, None) => write!(f, ", more than the healthy GPUs hold")?,
        }
        if !self.other_containers.is_empty() {
            let sum = self.other_containers.iter().map(|bytes| bytes.0).sum();
            let count = self.other_containers.len();
            write!(
                f,
                ", with {} for {count} more of the pod's containers",
                Bytes(sum)
            )?;
            if self.gpus.is_none() && !self.beyond_instance {
                write!(f, ", together more than the healthy GPUs hold")?;
            }
        }
        write!(f, ": largest free {}", self.largest_free)?;
        if let Some(gpu) = &self.largest_free_gpu {
            write!(f, " ({gpu})")?;
        }
        for SetAside { name, amount, .. } in &self.set_aside {
            write!(f, ", {amount} of it set aside for {name}")?;
        }
        if let Some(gpu) = &self.closed_gpu {
            write!(
                f,
                "; {gpu} is not shared with other namespaces until its driver is seen to clear freed memory"
            )?;
        }
        if let Some(gpu) = &self.refused_gpu {
            write!(f, "; CUDA refuses {gpu}, and the agent tries it again")?;
        }
        if let Some(gpu) = &self.untried_gpu {
            write!(f, "; the agent is trying CUDA on {gpu}")?;
        }
        if let Some((weight, left)) = self.weight {
            write!(
                f,
                "; its weight of {weight} hundredths of a GPU fits on none: the most left is {left}"
            )?;
        }
        match self.claims_ahead {
            0 => {}
            1 => write!(f, ", 1 pod is before it")?,
            n => write!(f, ", {n} pods are before it")?,
        }
        match self.withheld {
            Bytes::ZERO => Ok(()),
            bytes => write!(
                f,
                "; {bytes} of the node's GPUs are in use and charged to no pod"
            ),
        }
    }
}

/// The reason why a bind fails.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BindError {
    /// No known `Allocate` answered these device ids for this pod. The agent reads the kubelet's
    /// checkpoint, adds its entries, and retries.
    #[error("no pending allocation of {resource} with device ids {device_ids} for pod {pod}")]
    UnknownAllocation {
        /// The requested resource.
        resource: Resource,
        /// The requested device ids.
        device_ids: DeviceIdSet,
        /// The requesting pod.
        pod: PodUid,
    },
}

/// A claim in the queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueuedClaim {
    /// The claim.
    pub claim: ClaimId,
    /// The claim's pod.
    pub pod: PodUid,
    /// The claim's device ids.
    pub device_ids: DeviceIdSet,
    /// The pod's priority.
    pub priority: Priority,
    /// The time at which the claim joined the queue.
    pub queued_at: BootTime,
    /// The reason for the wait, with the resource and the place in the queue.
    pub reason: WaitReason,
}

/// The node's memory, for `GpuNode`'s status and the metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LedgerView {
    /// Every GPU that is in the inventory or has bound memory, in order of UUID.
    pub gpus: Vec<GpuView>,
    /// The managed memory.
    pub managed: ManagedView,
    /// Allocations without a binding, waiting or not.
    pub unbound_allocations: usize,
    /// Claims that wait until a GPU has room.
    pub queued_claims: usize,
}

/// One GPU's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuView {
    /// The GPU.
    pub uuid: GpuUuid,
    /// Whether the GPU takes claims.
    pub health: Health,
    /// The memory that may be bound in all.
    pub capacity: Quanta,
    /// The memory that is bound, or set aside until the kubelet's retry.
    pub bound: Quanta,
    /// Unreclaimed memory of ended pods.
    pub unreclaimed: Bytes,
    /// The unreclaimed memory whose proof is overdue, so that other processes hold it.
    pub leaked: Bytes,
    /// The memory of leases that no bound container owns.
    pub orphaned_leases: Bytes,
    /// Withheld memory: in use and charged to no container.
    pub withheld: Bytes,
    /// The memory that may be bound now; zero on an unhealthy GPU.
    pub free: Quanta,
    /// Free memory that is set aside, for the longest waiting claim or by a reservation.
    pub reserved: Quanta,
    /// The pods for which memory is set aside, and their parts of `reserved`.
    pub set_aside: BTreeMap<PodUid, Quanta>,
    /// The pods with memory on the GPU, and their amounts.
    pub pods: BTreeMap<PodUid, Quanta>,
    /// The weights of those pods in the GPU's compute time, for pods that have one.
    pub weights: BTreeMap<PodUid, u16>,
    /// The pod that has a reservation on this GPU.
    pub reserved_for: Option<PodUid>,
    /// The namespace whose pods alone may have memory of the GPU, which did not pass the scrub
    /// check. Empty where no pod may, none where pods of any namespace may.
    pub only_for: Option<String>,
}

/// The node's managed memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ManagedView {
    /// The memory that may be bound in all.
    pub capacity: Quanta,
    /// The bound memory.
    pub bound: Quanta,
    /// The free memory.
    pub free: Quanta,
}

impl GpuView {
    /// A GPU without memory to bind.
    pub fn empty(uuid: GpuUuid) -> Self {
        Self {
            uuid,
            health: Health::Unhealthy,
            capacity: Quanta::ZERO,
            bound: Quanta::ZERO,
            unreclaimed: Bytes::ZERO,
            leaked: Bytes::ZERO,
            orphaned_leases: Bytes::ZERO,
            withheld: Bytes::ZERO,
            free: Quanta::ZERO,
            reserved: Quanta::ZERO,
            set_aside: BTreeMap::new(),
            pods: BTreeMap::new(),
            weights: BTreeMap::new(),
            reserved_for: None,
            only_for: None,
        }
    }

    /// The memory without a binding, reserved memory included.
    pub fn unbound(&self) -> Quanta {
        self.free + self.reserved
    }
}

impl LedgerView {
    /// The largest claim that one GPU could take now.
    pub fn largest_free(&self) -> Quanta {
        self.gpus
            .iter()
            .map(|gpu| gpu.free)
            .max()
            .unwrap_or_default()
    }

    /// The capacity of the healthy GPUs. The agent lists as many device ids as Healthy.
    pub fn healthy_capacity(&self) -> Quanta {
        self.gpus
            .iter()
            .filter(|gpu| gpu.health == Health::Healthy)
            .map(|gpu| gpu.capacity)
            .sum()
    }
}
