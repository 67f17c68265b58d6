//! Reports the state of the ledger.

use std::collections::{BTreeMap, BTreeSet};

use super::boot_time::BootTime;
use super::claim::State;
use super::schedule::Planned;
use super::types::{
    Binding, BindingRef, ClaimId, GpuView, Health, LedgerView, ManagedView, Placement, QueuedClaim,
};
use super::{GpuState, Ledger};
use crate::units::{AllocationId, Bytes, DeviceIdSet, GpuUuid, PodUid, Quanta, Resource};

/// The taken memory of one GPU: bound, or set aside until a retry.
#[derive(Default)]
pub(super) struct GpuUsage<'a> {
    pub(super) quanta: Quanta,
    pub(super) pods: BTreeMap<&'a PodUid, Quanta>,
}

impl GpuUsage<'_> {
    fn quanta_by_pod(&self) -> BTreeMap<PodUid, Quanta> {
        let pods = self.pods.iter();
        pods.map(|(pod, quanta)| ((*pod).clone(), *quanta))
            .collect()
    }
}

impl Ledger {
    /// The node's memory at `now`.
    pub fn view(&self, now: BootTime) -> LedgerView {
        let set_aside = self.set_aside_by(&self.plan(Resource::DeviceMemory, now));
        let mut usage = self.usage();
        let mut gpus: Vec<GpuView> = self
            .gpus
            .iter()
            .zip(set_aside)
            .map(|((uuid, gpu), (reserved, set_aside))| {
                let used = usage.remove(uuid).unwrap_or_default();
                let free = self.free_on(uuid, gpu, used.quanta);
                GpuView {
                    uuid: uuid.clone(),
                    health: gpu.health,
                    capacity: gpu.capacity,
                    bound: used.quanta,
                    unreclaimed: self.unreclaimed_on(uuid),
                    leaked: self.leaked_on(uuid, now),
                    orphaned_leases: self.orphaned_leases_on(uuid),
                    withheld: self.withheld_on(uuid),
                    free: free.saturating_sub(reserved),
                    reserved,
                    set_aside,
                    pods: used.quanta_by_pod(),
                    weights: self.weights.of(used.pods.keys().copied()),
                    reserved_for: self.reserved_for(uuid).cloned(),
                    only_for: self.isolation.only_for(uuid).map(str::to_owned),
                }
            })
            .collect();
        // A GPU that left the inventory while memory was bound on it.
        gpus.extend(usage.into_iter().map(|(uuid, used)| GpuView {
            bound: used.quanta,
            pods: used.quanta_by_pod(),
            weights: self.weights.of(used.pods.keys().copied()),
            ..GpuView::empty(uuid.clone())
        }));
        gpus.sort_by(|a, b| a.uuid.cmp(&b.uuid));
        let unbound = self
            .claims
            .values()
            .filter(|claim| !matches!(claim.state, State::Bound { .. }));
        let bound = self.managed_bound();
        LedgerView {
            gpus,
            managed: ManagedView {
                capacity: self.managed,
                bound,
                free: self.managed.saturating_sub(bound),
            },
            queued_claims: unbound
                .clone()
                .filter(|claim| claim.state != State::Idle)
                .count(),
            unbound_allocations: self.pending.len()
                + unbound.map(|claim| claim.allocations.len()).sum::<usize>(),
        }
    }

    /// The memory of each GPU that is set aside, in order of GPUs, in all and by pod. It is set
    /// aside for the pod of a reservation, and for the first pod of the queue that does not fit.
    pub(super) fn set_aside_by(
        &self,
        (queue, plan): &Planned,
    ) -> Vec<(Quanta, BTreeMap<PodUid, Quanta>)> {
        let first = plan.first_waiting.and_then(|position| queue.get(position));
        let first = first.map(|id| &self.claims[id].pod);
        let set_aside_on = |(gpu, all): (&GpuUuid, &u32)| {
            let all = Quanta(*all);
            let reserved = self.reserved_on(gpu).min(all);
            let parts = [
                (self.reserved_for(gpu), reserved),
                (first, all.saturating_sub(reserved)),
            ];
            let mut pods = BTreeMap::new();
            for (pod, quanta) in parts {
                if let Some(pod) = pod.filter(|_| quanta > Quanta::ZERO) {
                    *pods.entry(pod.clone()).or_default() += quanta;
                }
            }
            (all, pods)
        };
        self.gpus
            .keys()
            .zip(&plan.set_aside)
            .map(set_aside_on)
            .collect()
    }

    /// The memory of each GPU that may be bound now.
    pub fn free_by_gpu(&self) -> impl Iterator<Item = (GpuUuid, Bytes)> {
        let used = self.usage();
        self.gpus.iter().map(move |(uuid, gpu)| {
            let used = used.get(uuid).map_or(Quanta::ZERO, |used| used.quanta);
            let free = self.free_on(uuid, gpu, used);
            (uuid.clone(), free.bytes(self.quantum))
        })
    }

    /// Every binding in order of the claims' numbers, for CDI files and sockets.
    pub fn bindings(&self) -> impl Iterator<Item = Binding> {
        self.claims
            .iter()
            .filter_map(|(&id, claim)| match &claim.state {
                State::Bound { placement } => Some(claim.binding(id, placement.clone())),
                State::Idle | State::Queued { .. } | State::AwaitingRetry { .. } => None,
            })
    }

    /// Every binding by reference, in order of the claims' numbers: the agent reads all of them
    /// often.
    pub fn binding_refs(&self) -> impl Iterator<Item = BindingRef<'_>> {
        self.claims
            .iter()
            .filter_map(|(&claim, of)| match &of.state {
                State::Bound { placement } => Some(BindingRef {
                    claim,
                    allocations: &of.allocations,
                    resource: of.resource,
                    pod: &of.pod,
                    placement,
                }),
                State::Idle | State::Queued { .. } | State::AwaitingRetry { .. } => None,
            })
    }

    /// The queue, most urgent first: device memory, then managed memory. Claims without a retry for
    /// too long are not in it.
    pub fn queued_claims(&self, now: BootTime) -> Vec<QueuedClaim> {
        let mut queued = Vec::new();
        for resource in [Resource::DeviceMemory, Resource::ManagedMemory] {
            let planned = self.plan(resource, now);
            for id in self.queue(resource, now) {
                let claim = &self.claims[&id];
                if let State::Queued { request, .. } = claim.state {
                    queued.push(QueuedClaim {
                        claim: id,
                        pod: claim.pod.clone(),
                        device_ids: claim.device_ids.clone(),
                        priority: request.priority,
                        queued_at: request.queued_at,
                        reason: self.wait_reason(id, &planned, now),
                    });
                }
            }
        }
        queued
    }

    /// Every known allocation, with its pod once one of its containers has started.
    pub fn allocations(&self) -> impl Iterator<Item = (AllocationId, Option<&PodUid>)> {
        let claimed = self
            .claims
            .values()
            .flat_map(|claim| claim.allocations.iter().map(|&id| (id, Some(&claim.pod))));
        self.pending.keys().map(|&id| (id, None)).chain(claimed)
    }

    /// The allocations with any of these device ids, each with its pod once one of its containers
    /// has started.
    pub fn allocations_sharing<'a>(
        &'a self,
        resource: Resource,
        device_ids: &'a DeviceIdSet,
    ) -> impl Iterator<Item = (AllocationId, Option<&'a PodUid>)> {
        let pending = self.pending.iter().filter(move |(_, allocation)| {
            allocation.resource == resource && allocation.device_ids.overlaps(device_ids)
        });
        let claims = self.claims.values();
        let claims = claims.filter(move |claim| claim.overlaps(resource, device_ids));
        let claimed =
            claims.flat_map(|claim| claim.allocations.iter().map(|&id| (id, Some(&claim.pod))));
        pending.map(|(&id, _)| (id, None)).chain(claimed)
    }

    /// The device ids of every pending allocation and claim, with the memory that a claim occupies.
    pub fn held_device_ids(
        &self,
        resource: Resource,
    ) -> impl Iterator<Item = (&DeviceIdSet, Option<&Placement>)> {
        let pending = self.pending.values();
        let pending = pending.filter(move |allocation| allocation.resource == resource);
        let claims = self.claims.values();
        let claims = claims.filter(move |claim| claim.resource == resource);
        pending
            .map(|allocation| (&allocation.device_ids, None))
            .chain(claims.map(|claim| (&claim.device_ids, claim.placement())))
    }

    /// The allocations of `resource` without a binding, waiting or not.
    pub fn unbound_allocations(&self, resource: Resource) -> usize {
        let pending = self
            .pending
            .values()
            .filter(|allocation| allocation.resource == resource);
        let claims = self
            .claims
            .values()
            .filter(|claim| claim.resource == resource);
        let unbound = claims.filter(|claim| !matches!(claim.state, State::Bound { .. }));
        pending.count() + unbound.map(|claim| claim.allocations.len()).sum::<usize>()
    }

    /// Whether the claim waits, with or without an open call.
    pub fn is_queued(&self, claim: ClaimId) -> bool {
        let claim = self.claims.get(&claim);
        claim.is_some_and(|claim| matches!(claim.state, State::Queued { .. }))
    }

    /// The pods with a claim, whose end the agent watches for.
    pub fn pods(&self) -> BTreeSet<&PodUid> {
        self.claims.values().map(|claim| &claim.pod).collect()
    }

    /// The taken memory of each GPU.
    pub(super) fn usage(&self) -> BTreeMap<&GpuUuid, GpuUsage<'_>> {
        let mut usage: BTreeMap<&GpuUuid, GpuUsage<'_>> = BTreeMap::new();
        for claim in self.claims.values() {
            if let Some(Placement::Device(shares)) = claim.placement() {
                for share in shares {
                    let used = usage.entry(&share.gpu).or_default();
                    *used.pods.entry(&claim.pod).or_default() += share.quanta;
                }
            }
        }
        for (pod, gpu, peak) in self.peaks() {
            let used = usage.entry(gpu).or_default().pods.entry(pod).or_default();
            *used = peak.max(*used);
        }
        for used in usage.values_mut() {
            used.quanta = used.pods.values().copied().sum();
        }
        usage
    }

    /// The memory of a GPU that may be bound now: not bound, not unreclaimed, not of leases without
    /// an owner, and not withheld. None of a GPU that CUDA refused last.
    pub(super) fn free_on(&self, uuid: &GpuUuid, gpu: &GpuState, bound: Quanta) -> Quanta {
        match gpu.health {
            Health::Healthy if self.refused.contains(uuid) => Quanta::ZERO,
            Health::Healthy => gpu
                .capacity
                .saturating_sub(bound)
                .saturating_sub(self.unavailable_on(uuid)),
            Health::Unhealthy => Quanta::ZERO,
        }
    }

    /// The taken managed memory.
    pub(super) fn managed_bound(&self) -> Quanta {
        self.claims
            .values()
            .filter_map(|claim| match claim.placement() {
                Some(Placement::Managed(quanta)) => Some(*quanta),
                Some(Placement::Device(_)) | None => None,
            })
            .sum()
    }
}
