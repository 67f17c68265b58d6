//! Reports the state of the ledger.

use std::collections::{BTreeMap, BTreeSet};

use super::claim::{Claim, State};
use super::time::Moment;
use super::types::{
    Binding, Bound, ClaimId, GpuView, Health, ManagedView, Placement, View, Waiter,
};
use super::{GpuState, Ledger};
use crate::units::{AllocationId, Bytes, GpuUuid, PodUid, Quanta, Resource, TokenSet};

/// The bound and held memory of one GPU.
#[derive(Default)]
pub(super) struct Usage<'a> {
    pub(super) quanta: Quanta,
    pub(super) pods: BTreeMap<&'a PodUid, Quanta>,
}

impl Usage<'_> {
    fn of_pods(&self) -> BTreeMap<PodUid, Quanta> {
        let pods = self.pods.iter();
        pods.map(|(pod, quanta)| ((*pod).clone(), *quanta))
            .collect()
    }
}

impl Ledger {
    /// The node's memory at `now`.
    pub fn view(&self, now: Moment) -> View {
        let kept = self.plan(Resource::DeviceMemory, now).1.kept;
        let mut usage = self.usage();
        let mut gpus: Vec<GpuView> = self
            .gpus
            .iter()
            .zip(kept)
            .map(|((uuid, gpu), kept)| {
                let used = usage.remove(uuid).unwrap_or_default();
                let free = self.free_on(uuid, gpu, used.quanta);
                GpuView {
                    uuid: uuid.clone(),
                    health: gpu.health,
                    capacity: gpu.capacity,
                    bound: used.quanta,
                    left: self.left_on(uuid),
                    leaked: self.leaked_by(uuid, now),
                    kept: self.kept_on(uuid),
                    withheld: self.withheld_on(uuid),
                    free: free.saturating_sub(Quanta(kept)),
                    reserved: Quanta(kept),
                    pods: used.of_pods(),
                    held_for: self.held_for(uuid).cloned(),
                }
            })
            .collect();
        gpus.extend(usage.into_iter().map(|(uuid, used)| lost_gpu(uuid, &used)));
        gpus.sort_by(|a, b| a.uuid.cmp(&b.uuid));
        let unbound = self
            .claims
            .values()
            .filter(|claim| !matches!(claim.state, State::Bound { .. }));
        let bound = self.managed_bound();
        View {
            gpus,
            managed: ManagedView {
                capacity: self.managed,
                bound,
                free: self.managed.saturating_sub(bound),
            },
            waiting: unbound
                .clone()
                .filter(|claim| claim.state != State::Idle)
                .count(),
            booked: self.bookings.len()
                + unbound.map(|claim| claim.allocations.len()).sum::<usize>(),
        }
    }

    /// The memory of each GPU that may be bound now.
    pub fn free(&self) -> impl Iterator<Item = (GpuUuid, Bytes)> {
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
                State::Idle | State::Waiting { .. } | State::Held { .. } => None,
            })
    }

    /// Every binding by reference, in order of the claims' numbers: the agent reads all of them
    /// often.
    pub fn bound(&self) -> impl Iterator<Item = Bound<'_>> {
        self.claims
            .iter()
            .filter_map(|(&claim, of)| match &of.state {
                State::Bound { placement } => Some(Bound {
                    claim,
                    allocations: &of.allocations,
                    resource: of.resource,
                    pod: &of.pod,
                    placement,
                }),
                State::Idle | State::Waiting { .. } | State::Held { .. } => None,
            })
    }

    /// The queue, most urgent first: device memory, then managed memory. Claims without a retry for
    /// too long are not in it.
    pub fn waiters(&self, now: Moment) -> Vec<Waiter> {
        [Resource::DeviceMemory, Resource::ManagedMemory]
            .into_iter()
            .flat_map(|resource| self.queue(resource, now))
            .filter_map(|id| match &self.claims[&id] {
                Claim {
                    state: State::Waiting { want, .. },
                    pod,
                    tokens,
                    ..
                } => Some(Waiter {
                    claim: id,
                    pod: pod.clone(),
                    tokens: tokens.clone(),
                    priority: want.priority,
                    queued: want.queued,
                    reason: self.wait_reason(id, now),
                }),
                _ => None,
            })
            .collect()
    }

    /// Every known allocation, with its pod once one of its containers has started.
    pub fn allocations(&self) -> impl Iterator<Item = (AllocationId, Option<&PodUid>)> {
        let claimed = self
            .claims
            .values()
            .flat_map(|claim| claim.allocations.iter().map(|&id| (id, Some(&claim.pod))));
        self.bookings.keys().map(|&id| (id, None)).chain(claimed)
    }

    /// The allocations with any of these device ids, each with its pod once one of its containers
    /// has started.
    pub fn sharers<'a>(
        &'a self,
        resource: Resource,
        tokens: &'a TokenSet,
    ) -> impl Iterator<Item = (AllocationId, Option<&'a PodUid>)> {
        let bookings = self.bookings.iter().filter(move |(_, booking)| {
            booking.resource == resource && booking.tokens.overlaps(tokens)
        });
        let claims = self.claims.values();
        let claims = claims.filter(move |claim| claim.overlaps(resource, tokens));
        let claimed =
            claims.flat_map(|claim| claim.allocations.iter().map(|&id| (id, Some(&claim.pod))));
        bookings.map(|(&id, _)| (id, None)).chain(claimed)
    }

    /// The allocations of `resource` without a binding, waiting or not.
    pub fn booked(&self, resource: Resource) -> usize {
        let bookings = self
            .bookings
            .values()
            .filter(|booking| booking.resource == resource);
        let claims = self
            .claims
            .values()
            .filter(|claim| claim.resource == resource);
        let unbound = claims.filter(|claim| !matches!(claim.state, State::Bound { .. }));
        bookings.count() + unbound.map(|claim| claim.allocations.len()).sum::<usize>()
    }

    /// Whether the claim waits, with or without an open call.
    pub fn waits(&self, claim: ClaimId) -> bool {
        let claim = self.claims.get(&claim);
        claim.is_some_and(|claim| matches!(claim.state, State::Waiting { .. }))
    }

    /// The pods with a claim, whose end the agent watches for.
    pub fn pods(&self) -> BTreeSet<&PodUid> {
        self.claims.values().map(|claim| &claim.pod).collect()
    }

    /// The taken memory of each GPU with bound or held memory.
    pub(super) fn usage(&self) -> BTreeMap<&GpuUuid, Usage<'_>> {
        let mut usage: BTreeMap<&GpuUuid, Usage<'_>> = BTreeMap::new();
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

    /// The memory of a GPU that may be bound now: not bound, unreclaimed, of leases without an
    /// owner, or withheld.
    pub(super) fn free_on(&self, uuid: &GpuUuid, gpu: &GpuState, bound: Quanta) -> Quanta {
        match gpu.health {
            Health::Healthy => gpu
                .capacity
                .saturating_sub(bound)
                .saturating_sub(self.unowned_on(uuid)),
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

/// A GPU that left the inventory while memory was bound on it.
fn lost_gpu(uuid: &GpuUuid, used: &Usage<'_>) -> GpuView {
    GpuView {
        uuid: uuid.clone(),
        health: Health::Unhealthy,
        capacity: Quanta::ZERO,
        bound: used.quanta,
        left: Bytes::ZERO,
        leaked: Bytes::ZERO,
        kept: Bytes::ZERO,
        withheld: Bytes::ZERO,
        free: Quanta::ZERO,
        reserved: Quanta::ZERO,
        pods: used.of_pods(),
        held_for: None,
    }
}
