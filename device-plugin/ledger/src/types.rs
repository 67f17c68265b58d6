//! What goes into the ledger and what comes out of it.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU16;

use serde::{Deserialize, Serialize};

use super::time::Moment;
use crate::units::{AllocationId, Bytes, GpuUuid, PodUid, Quanta, Resource, TokenSet};

/// A GPU as the inventory sees it now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// Its name.
    pub uuid: GpuUuid,
    /// What may be bound on it (memory less the configured reserve, in whole quanta).
    pub capacity: Quanta,
    /// Whether anything new may be bound on it.
    pub health: Health,
}

/// Whether a GPU takes new claims. What is bound on it stays bound, and accounted, either way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Health {
    /// It takes claims.
    Healthy,
    /// It is dead, drained or gone from the inventory.
    Unhealthy,
}

/// A pod's priority (`spec.priority`): higher binds first. 0 where it is not known.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Priority(pub i32);

/// Over how many GPUs a claim is spread, at least (the annotation `bursar.dev/gpus`): it grants
/// nothing. A claim that no single GPU can hold is spread whatever it asks for, and a claim never
/// has more GPUs than quanta. Managed memory has no shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// The number of GPUs.
    pub gpus: NonZeroU16,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            gpus: NonZeroU16::MIN,
        }
    }
}

/// `PreStartContainer`, with what the agent found out about the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    /// The resource of the tokens.
    pub resource: Resource,
    /// The container's tokens, as the kubelet names them.
    pub tokens: TokenSet,
    /// The tokens of all containers of the pod, this one's too; empty where the kubelet did not tell. They are placed
    /// together.
    pub containers: Vec<TokenSet>,
    /// The pod that holds them now.
    pub pod: PodUid,
    /// How it wants to be spread.
    pub shape: Shape,
    /// Its priority.
    pub priority: Priority,
}

/// A pod's hold on memory: the bookings of that pod with one token set. Numbered by the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ClaimId(pub(super) u64);

/// One call of `PreStartContainer` that waits. A later call for the same claim makes this one
/// stale, so that its late end cannot close the later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket {
    /// The claim that waits; [`Binding::claim`] will name it.
    pub claim: ClaimId,
    pub(super) call: u64,
}

/// What `start` did.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct Started {
    /// The answer for this call.
    pub answer: Answer,
    /// Allocations of the same pod whose claims this one ended (finished init containers): their
    /// sessions and CDI files go.
    pub ended: Vec<AllocationId>,
}

/// Bound, or the reason why not yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The claim has its memory: write the CDI files and answer the kubelet.
    Bound(Binding),
    /// No room yet: hold the call until `advance` names the claim, or end it with
    /// `stop_waiting` and tell the kubelet the reason.
    Wait(Ticket, WaitReason),
}

/// A claim with its memory. All its allocations share it: the kubelet does not say which of a
/// pod's containers with one token set it starts, and such containers never live together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Binding {
    /// The claim.
    pub claim: ClaimId,
    /// The allocations that share it, oldest first; never empty.
    pub allocations: Vec<AllocationId>,
    /// The resource of the tokens.
    pub resource: Resource,
    /// The tokens.
    pub tokens: TokenSet,
    /// The pod.
    pub pod: PodUid,
    /// Where its memory is.
    pub placement: Placement,
}

/// A binding as the ledger has it, but for its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound<'a> {
    /// The claim.
    pub claim: ClaimId,
    /// Its allocations, the oldest first; never empty.
    pub allocations: &'a [AllocationId],
    /// The resource that its tokens count.
    pub resource: Resource,
    /// The pod that has the claim.
    pub pod: &'a PodUid,
    /// Where its memory is.
    pub placement: &'a Placement,
}

/// Where a claim's memory is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Placement {
    /// On these GPUs, in order of UUID; never empty.
    Device(Vec<Share>),
    /// So much of the node's managed memory.
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

/// Why a claim is not bound. Its text is what the pod's status shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitReason {
    /// The resource that it waits for.
    pub resource: Resource,
    /// What it needs, in all.
    pub needed: Bytes,
    /// What the other containers of its pod need, which are placed with it.
    pub others: Vec<Bytes>,
    /// Over how many GPUs; none for managed memory, and none where the node's healthy GPUs
    /// together could not hold it, with the others.
    pub gpus: Option<NonZeroU16>,
    /// Whether it is more than one MIG instance holds, and other instances have the rest: nothing is spread over them.
    pub beyond_instance: bool,
    /// The most that is free on one healthy GPU (or of the managed memory), kept or not.
    pub largest_free: Bytes,
    /// That GPU; none for managed memory, and none without a healthy GPU.
    pub largest_free_gpu: Option<GpuUuid>,
    /// A healthy GPU that it gets nothing of, whatever is free: another namespace's pods had memory of it, and its
    /// driver was not seen to clear that.
    pub barred: Option<GpuUuid>,
    /// How many claims are before it in the queue.
    pub ahead: usize,
    /// What of the healthy GPUs is in use and charged to nobody.
    pub withheld: Bytes,
}

impl fmt::Display for WaitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "waiting for {}", self.needed)?;
        match (self.resource, self.gpus.map(NonZeroU16::get)) {
            (Resource::ManagedMemory, _) => write!(f, " of managed memory")?,
            (Resource::DeviceMemory, Some(1)) => write!(f, " on one GPU")?,
            (Resource::DeviceMemory, Some(n)) => write!(f, " on {n} GPUs")?,
            (Resource::DeviceMemory, None) if self.beyond_instance => {
                write!(f, ", more than one MIG instance holds: no program uses two")?;
            }
            (Resource::DeviceMemory, None) if !self.others.is_empty() => {}
            (Resource::DeviceMemory, None) => write!(f, ", more than the healthy GPUs hold")?,
        }
        if !self.others.is_empty() {
            let sum = self.others.iter().map(|bytes| bytes.0).sum();
            let count = self.others.len();
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
        if let Some(gpu) = &self.barred {
            write!(
                f,
                "; {gpu} is not shared with other namespaces: its driver was not seen to clear freed memory"
            )?;
        }
        match self.ahead {
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

/// Why `start` has nothing to start.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// No `Allocate` of ours answered these tokens for this pod: read the kubelet's checkpoint,
    /// `book` what it says, and try again.
    #[error("no booking of {resource} with tokens {tokens} for pod {pod}")]
    NotBooked {
        /// The resource asked for.
        resource: Resource,
        /// The tokens asked for.
        tokens: TokenSet,
        /// The pod that asked.
        pod: PodUid,
    },
}

/// A claim in the queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiter {
    /// The claim.
    pub claim: ClaimId,
    /// Its pod.
    pub pod: PodUid,
    /// Its tokens.
    pub tokens: TokenSet,
    /// The pod's priority.
    pub priority: Priority,
    /// When it joined the queue.
    pub queued: Moment,
    /// Why it waits; has the resource and its place in the queue.
    pub reason: WaitReason,
}

/// The node's memory, for `GpuNode`'s status and the metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// Every GPU that is in the inventory or still has something bound, in order of UUID.
    pub gpus: Vec<GpuView>,
    /// The managed memory.
    pub managed: ManagedView,
    /// Allocations that are booked and not bound, waiting or not.
    pub booked: usize,
    /// Claims that wait for room.
    pub waiting: usize,
}

/// One GPU's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuView {
    /// The GPU.
    pub uuid: GpuUuid,
    /// Whether it takes claims.
    pub health: Health,
    /// What may be bound in all.
    pub capacity: Quanta,
    /// What is bound, or held for a claim whose kubelet is about to come back.
    pub bound: Quanta,
    /// What ended pods left, and is not proven free.
    pub left: Bytes,
    /// The same once proving it free would have been done: somebody holds it.
    pub leaked: Bytes,
    /// What kept leases have that no bound container owns.
    pub kept: Bytes,
    /// What is in use and charged to nobody.
    pub withheld: Bytes,
    /// What is neither bound, reserved nor left by ended pods and may be bound now; zero on an unhealthy GPU.
    pub free: Quanta,
    /// What is free but kept: for the longest waiter, or by a reservation.
    pub reserved: Quanta,
    /// The pods with memory on it, each with how much.
    pub pods: BTreeMap<PodUid, Quanta>,
    /// The pod that some of it is reserved for.
    pub held_for: Option<PodUid>,
}

/// The node's managed memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ManagedView {
    /// What may be bound in all.
    pub capacity: Quanta,
    /// What is bound.
    pub bound: Quanta,
    /// What is free.
    pub free: Quanta,
}

impl View {
    /// The largest claim that one GPU could take now.
    pub fn largest_free(&self) -> Quanta {
        self.gpus
            .iter()
            .map(|gpu| gpu.free)
            .max()
            .unwrap_or_default()
    }

    /// The capacity of the healthy GPUs: as many tokens are Healthy.
    pub fn healthy_capacity(&self) -> Quanta {
        self.gpus
            .iter()
            .filter(|gpu| gpu.health == Health::Healthy)
            .map(|gpu| gpu.capacity)
            .sum()
    }
}
