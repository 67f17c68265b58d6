//! Accounts for the node's GPU memory: a pure state machine over events and their times.
//!
//! The kubelet's `Allocate` adds a *pending allocation*: it never fails, and does not name the pod.
//! Its `PreStartContainer` names the device ids, and the agent finds the pod. The pod's *claim* on
//! those device ids is then *bound* to GPUs, or queued until a GPU has room.
//!
//! ```text
//!   add_pending         bind                          room, call open
//!  -----------> pending -----> Idle --> Queued ------------------------> Bound
//!                |              ^        |   ^  \                         |  ^
//!     gc_pending |              |  5 min |   |   \ room, call ended       |  | bind
//!                v              |<-------+   |    v                       |  |
//!               gone            |            +-- AwaitingRetry -----------|--+
//!                               |     40 s without bound memory of the    |
//!                               |     pod, or the GPU failed              |
//!                               +-----------------------------------------+
//!                          bind: the pod starts another container with one of these device ids
//!  release_pod: from every state to gone.
//!  Queued: a call is open (`bind`), or ended (`stop_waiting`). The claim keeps its place in the
//!  queue after the call, because the kubelet retries.
//! ```
//!
//! - Device ids only count. The size of a claim is the number of its device ids; which ones does
//!   not matter.
//! - The kubelet gives the device ids of finished init containers to later containers of the pod.
//!   So containers that share a device id never run together, and the start of one ends the claims
//!   of the others. Containers with the same set share one claim, as nothing distinguishes them.
//! - The queue: higher priority first; then claims that have waited for a minute, in order of
//!   arrival; then the others, largest first.
//! - The containers of a pod are placed together at the first start ([`pod_groups`]). The memory of
//!   those that start later stays set aside until the pod is gone, so that no pod waits while it
//!   has memory.
//! - Memory counts until the pod is gone, even if the kubelet has given its device ids away. Memory
//!   of an ended pod that other processes may map is unreclaimed, and bound to no pod until it is
//!   proven free.
//! - A GPU whose driver is not proven to clear freed memory serves one namespace in a boot.
//! - A pod's weight of compute time is given out on each GPU of its memory, at most a whole GPU.
//! - A reservation sets a GPU's free memory aside for one pod.
//! - The ledger does no I/O and reads no clock. Every event may come twice.
//!
//! After each event, and at least once a second, call [`Ledger::advance`].

mod bind;
mod binder;
mod boot_time;
mod claim;
mod isolation;
mod orphaned_leases;
mod pod_groups;
mod release;
mod reservations;
mod schedule;
mod snapshot;
mod types;
pub mod units;
mod unreclaimed;
mod view;
mod weights;
mod withheld;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::units::{AllocationId, Bytes, DeviceIdSet, GpuUuid, PodUid, Quanta, Quantum, Resource};
use claim::{Claim, PendingAllocation, State};
use isolation::NamespaceIsolation;
use pod_groups::PodGroup;
use reservations::Unclaimed;
use unreclaimed::Unreclaimed;
use weights::Weights;

pub use boot_time::BootTime;
pub use claim::{AGING_AFTER, RETRY_DEADLINE, RETRY_GRACE};
pub use release::PENDING_GC_AGE;
pub use reservations::Reservation;
pub use snapshot::{RestoreError, Snapshot};
pub use types::{
    BindError, BindOutcome, BindRequest, BindResponse, Binding, BindingRef, ClaimId, Gpu,
    GpuSpread, GpuView, Health, LedgerView, ManagedView, Placement, Priority, QueuedClaim,
    SetAside, Share, WaitHandle, WaitReason,
};
pub use unreclaimed::LEAKED_AFTER;

/// The ledger of a node; the documentation of the crate describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ledger {
    /// The amount that one device id stands for; fixed for the ledger's life.
    quantum: Quantum,
    /// The GPUs of the inventory, and former ones with memory still bound.
    gpus: BTreeMap<GpuUuid, GpuState>,
    /// The managed memory that may be bound in all.
    managed: Quanta,
    pending: BTreeMap<AllocationId, PendingAllocation>,
    claims: BTreeMap<ClaimId, Claim>,
    /// The unreclaimed memory of ended pods.
    unreclaimed: BTreeMap<GpuUuid, Unreclaimed>,
    /// The operator's reservations.
    reservations: BTreeMap<GpuUuid, Reservation>,
    /// The GPUs with a reservation for a pod without a claim here.
    unclaimed: BTreeMap<GpuUuid, Unclaimed>,
    /// The leases that no bound container owns.
    orphaned_leases: orphaned_leases::OrphanedLeases,
    /// The namespaces whose pods may have memory of each GPU.
    isolation: NamespaceIsolation,
    /// The memory of each GPU that is in use and charged to no container.
    withheld: BTreeMap<GpuUuid, Bytes>,
    /// The GPUs that CUDA refused last: no more of their memory is bound.
    refused: BTreeSet<GpuUuid>,
    /// The GPUs on which CUDA was tried; `None` where nothing tries it.
    tried: Option<BTreeSet<GpuUuid>>,
    /// The pods whose containers are placed together.
    pod_groups: BTreeMap<PodUid, PodGroup>,
    /// The weights of pods in compute time.
    weights: Weights,
    /// The next number for a claim, an arrival or a call.
    next_id: u64,
}

/// A GPU without its claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct GpuState {
    capacity: Quanta,
    health: Health,
}

impl Ledger {
    /// An empty ledger of a node without GPUs.
    pub fn new(quantum: Quantum) -> Self {
        Self {
            quantum,
            gpus: BTreeMap::new(),
            managed: Quanta::ZERO,
            pending: BTreeMap::new(),
            claims: BTreeMap::new(),
            unreclaimed: BTreeMap::new(),
            reservations: BTreeMap::new(),
            unclaimed: BTreeMap::new(),
            orphaned_leases: BTreeMap::new(),
            isolation: NamespaceIsolation::default(),
            withheld: BTreeMap::new(),
            refused: BTreeSet::new(),
            tried: None,
            pod_groups: BTreeMap::new(),
            weights: Weights::default(),
            next_id: 0,
        }
    }

    /// The amount that one device id stands for.
    pub fn quantum(&self) -> Quantum {
        self.quantum
    }

    /// Replaces the inventory. A missing GPU counts as unhealthy while memory is bound on it, and
    /// is dropped by a later call. Memory of claims that await a retry on an unhealthy GPU is
    /// freed; bound memory stays bound.
    pub fn set_gpus(&mut self, gpus: impl IntoIterator<Item = Gpu>) {
        let mut listed: BTreeMap<GpuUuid, GpuState> = gpus
            .into_iter()
            .map(|gpu| {
                let Gpu {
                    uuid,
                    capacity,
                    health,
                } = gpu;
                (uuid, GpuState { capacity, health })
            })
            .collect();
        let used = self.usage();
        for (uuid, gpu) in &self.gpus {
            if used.contains_key(uuid) && !listed.contains_key(uuid) {
                let health = Health::Unhealthy;
                listed.insert(uuid.clone(), GpuState { health, ..*gpu });
            }
        }
        self.gpus = listed;
        self.requeue_unhealthy();
    }

    /// The managed memory that may be bound on this node; zero switches it off.
    pub fn set_managed_capacity(&mut self, capacity: Quanta) {
        self.managed = capacity;
    }

    /// Adds the answer of an `Allocate` for these device ids. A known id changes nothing. After a
    /// lost checkpoint, the agent adds every entry of the kubelet's checkpoint.
    pub fn add_pending(
        &mut self,
        id: AllocationId,
        resource: Resource,
        device_ids: DeviceIdSet,
        now: BootTime,
    ) {
        if self.has_allocation(id) {
            return;
        }
        self.pending.insert(
            id,
            PendingAllocation {
                resource,
                device_ids,
                allocated_at: now,
                was_missing: false,
            },
        );
    }

    /// Restores a binding from its CDI file after the checkpoint was lost. Never fails, even where
    /// that overcommits a GPU. True where the binding was not known.
    pub fn restore_binding(
        &mut self,
        id: AllocationId,
        resource: Resource,
        device_ids: DeviceIdSet,
        pod: PodUid,
        placement: Placement,
    ) -> bool {
        self.pending.remove(&id);
        if self.has_allocation(id) {
            return false;
        }
        self.record_tenant(&pod, &placement);
        let claim = self.find_claim(&pod, resource, &device_ids);
        match claim.and_then(|claim| self.claims.get_mut(&claim)) {
            Some(claim) => {
                claim.allocations.push(id);
                if claim.placement().is_none() {
                    claim.state = State::Bound { placement };
                }
            }
            None => {
                let arrival = self.next_id();
                let claim = Claim {
                    pod,
                    resource,
                    device_ids,
                    allocations: vec![id],
                    arrival,
                    state: State::Bound { placement },
                };
                let number = ClaimId(self.next_id());
                self.claims.insert(number, claim);
            }
        }
        true
    }

    /// The claim of `pod` on exactly these device ids.
    fn find_claim(
        &self,
        pod: &PodUid,
        resource: Resource,
        device_ids: &DeviceIdSet,
    ) -> Option<ClaimId> {
        self.claims
            .iter()
            .find(|(_, claim)| {
                claim.pod == *pod && claim.resource == resource && claim.device_ids == *device_ids
            })
            .map(|(&number, _)| number)
    }

    /// Whether the allocation is pending or part of a claim.
    pub fn has_allocation(&self, id: AllocationId) -> bool {
        self.pending.contains_key(&id)
            || self
                .claims
                .values()
                .any(|claim| claim.allocations.contains(&id))
    }

    /// A number that no claim, arrival or call had before.
    fn next_id(&mut self) -> u64 {
        let number = self.next_id;
        self.next_id += 1;
        number
    }
}
