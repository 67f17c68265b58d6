//! Ends claims: at a pod's end, when a container's successor starts, and after a deadline.

use std::collections::BTreeSet;
use std::time::Duration;

use super::Ledger;
use super::boot_time::BootTime;
use super::claim::{Call, Claim, RETRY_DEADLINE, RETRY_GRACE, State};
use super::types::{Health, Placement};
use crate::units::{AllocationId, DeviceIdSet, PodUid, Resource};

/// The youngest age at which a pending allocation is dropped. The kubelet writes its checkpoint
/// soon after the agent's answer, however long it pulls images afterwards.
pub const PENDING_GC_AGE: Duration = Duration::from_secs(60);

impl Ledger {
    /// Releases all memory of a pod whose cgroup is gone. Returns its allocations, whose CDI files
    /// and sockets the agent removes; none for an unknown pod.
    pub fn release_pod(&mut self, pod: &PodUid) -> Vec<AllocationId> {
        // The reservation for an ended pod is of no use, even if the operator still requests it.
        self.reservations.retain(|_, reserved| reserved.pod != *pod);
        self.pod_groups.remove(pod);
        self.claims
            .extract_if(.., |_, claim| claim.pod == *pod)
            .flat_map(|(_, claim)| claim.allocations)
            .collect()
    }

    /// Drops pending allocations that the kubelet's checkpoint lacks; `known` are the allocations
    /// in the checkpoint. Not called from `Allocate`, whose answer is not in the checkpoint yet.
    ///
    /// An allocation without a pod is dropped, and returned, when it is [`PENDING_GC_AGE`] old and
    /// two reads in a row lacked it. A claim ends with its pod.
    pub fn gc_pending(
        &mut self,
        known: &BTreeSet<AllocationId>,
        now: BootTime,
    ) -> Vec<AllocationId> {
        self.pending
            .extract_if(.., |id, allocation| {
                if now.since(allocation.allocated_at) < PENDING_GC_AGE {
                    return false;
                }
                let missed_before = allocation.was_missing;
                allocation.was_missing = !known.contains(id);
                missed_before && allocation.was_missing
            })
            .map(|(id, _)| id)
            .collect()
    }

    /// Ends the pod's claims of `resource` that are over by their device ids and allocations.
    /// Returns their allocations.
    pub fn end_claims(
        &mut self,
        pod: &PodUid,
        resource: Resource,
        is_over: impl Fn(&DeviceIdSet, &[AllocationId]) -> bool,
    ) -> Vec<AllocationId> {
        self.claims
            .extract_if(.., |_, claim| {
                claim.pod == *pod
                    && claim.resource == resource
                    && is_over(&claim.device_ids, &claim.allocations)
            })
            .flat_map(|(_, claim)| claim.allocations)
            .collect()
    }

    /// Ends the claims that the start of `started` proves to be over. They are those of its pod
    /// that share a device id, and those of other pods that share one and have no memory. Returns
    /// the allocations that lost a binding or were dropped.
    pub(super) fn end_overlapping(&mut self, started: &Claim) -> Vec<AllocationId> {
        let mut ended = Vec::new();
        self.claims.retain(|_, other| {
            if !other.overlaps(started.resource, &started.device_ids) {
                return true;
            }
            let is_same_pod = other.pod == started.pod;
            let bound = matches!(other.state, State::Bound { .. });
            if bound != is_same_pod {
                // A claim of this pod without a binding has no memory to free. Memory of another
                // pod counts until that pod is gone.
                if is_same_pod {
                    other.state = State::Idle;
                }
                return true;
            }
            ended.extend(other.allocations.iter().copied());
            other.state = State::Idle;
            is_same_pod
        });
        self.drop_groups_without_claim(Some(&started.pod));
        ended
    }

    /// Ends queued claims, and frees memory set aside, where the kubelet did not retry in time.
    ///
    /// A pod with bound device memory keeps what is set aside for its other containers until it
    /// ends. The kubelet may retry late, and two such pods could wait for each other's memory.
    pub(super) fn expire(&mut self, now: BootTime) {
        let mut given_up = Vec::new();
        for (&id, claim) in &mut self.claims {
            match claim.state {
                State::AwaitingRetry { since, .. } if now.since(since) >= RETRY_GRACE => {
                    given_up.push(id);
                }
                State::Queued {
                    call: Call::Ended { since },
                    ..
                } if now.since(since) >= RETRY_DEADLINE => claim.state = State::Idle,
                _ => {}
            }
        }
        given_up.retain(|id| !self.has_device_memory(&self.claims[id].pod));
        for id in given_up {
            if let Some(claim) = self.claims.get_mut(&id) {
                claim.requeue();
                let pod = claim.pod.clone();
                self.drop_places_of(&pod);
            }
        }
    }

    /// Whether a container of the pod has device memory.
    fn has_device_memory(&self, pod: &PodUid) -> bool {
        self.claims.values().any(|claim| {
            claim.pod == *pod
                && claim.resource == Resource::DeviceMemory
                && matches!(claim.state, State::Bound { .. })
        })
    }

    /// Queues claims again whose memory was set aside on an unhealthy GPU.
    pub(super) fn requeue_unhealthy(&mut self) {
        let gpus = &self.gpus;
        let healthy = |placement: &Placement| match placement {
            Placement::Managed(_) => true,
            Placement::Device(shares) => shares.iter().all(|share| {
                gpus.get(&share.gpu)
                    .is_some_and(|gpu| gpu.health == Health::Healthy)
            }),
        };
        let held = self.claims.values_mut().filter(
            |claim| matches!(&claim.state, State::AwaitingRetry { placement, .. } if !healthy(placement)),
        );
        held.for_each(Claim::requeue);
        self.drop_unhealthy_places();
    }
}
