//! Binds the claim of a container that starts, or puts it into the queue.

use super::Ledger;
use super::boot_time::BootTime;
use super::claim::{Call, Claim, QueuedRequest, State};
use super::types::{BindError, BindOutcome, BindRequest, BindResponse, ClaimId, WaitHandle};
use crate::units::{AllocationId, DeviceIdSet, PodUid, Resource};

impl Ledger {
    /// Answers `PreStartContainer`: returns the claim's binding, binds it now, or puts it into the
    /// queue.
    ///
    /// The claim is bound where the queue's rules leave room for it and for all containers of its
    /// pod that are yet to start. Claims of the same pod that share a device id end. Claims of
    /// other pods that share one and have no memory are dropped, because the kubelet has given
    /// their device ids away.
    ///
    /// # Errors
    /// [`BindError::UnknownAllocation`]; nothing has changed then.
    pub fn bind(&mut self, request: BindRequest, now: BootTime) -> Result<BindResponse, BindError> {
        let BindRequest {
            resource,
            device_ids,
            containers,
            pod,
            spread,
            priority,
        } = request;
        let arrival = self.arrival_of(&pod);
        let (id, mut claim) = self.take_claim(resource, device_ids, pod)?;
        let placement = claim.placement().cloned();
        if resource == Resource::DeviceMemory && placement.is_none() {
            self.register_containers(&claim.pod, &claim.device_ids, containers);
        }
        let ended = self.end_overlapping(&claim);
        let call = self.next_id();
        if claim.state == State::Idle {
            claim.arrival = arrival.unwrap_or(call);
        }
        if let Some(placement) = placement.or_else(|| self.planned_placement(&claim)) {
            claim.state = State::Bound {
                placement: placement.clone(),
            };
            let outcome = BindOutcome::Bound(claim.binding(id, placement));
            self.claims.insert(id, claim);
            return Ok(BindResponse { outcome, ended });
        }
        let queued_at = match claim.state {
            State::Queued { request, .. } => request.queued_at,
            State::Idle | State::AwaitingRetry { .. } | State::Bound { .. } => now,
        };
        let queued = QueuedRequest {
            spread,
            priority,
            queued_at,
        };
        claim.state = State::Queued {
            request: queued,
            call: Call::Open { number: call },
        };
        self.claims.insert(id, claim);
        self.expire(now);
        let planned = self.plan(resource, now);
        let outcome = match self.bind_as_planned(id, &planned) {
            Some(binding) => BindOutcome::Bound(binding),
            None => {
                let reason = self.wait_reason(id, &planned, now);
                BindOutcome::Queued(WaitHandle { claim: id, call }, reason)
            }
        };
        Ok(BindResponse { outcome, ended })
    }

    /// Records that this call ended without a binding. The claim keeps its place for
    /// [`RETRY_DEADLINE`](super::RETRY_DEADLINE). Nothing happens if the claim was bound or called
    /// again.
    pub fn stop_waiting(&mut self, wait: WaitHandle, now: BootTime) {
        if let Some(claim) = self.claims.get_mut(&wait.claim)
            && let State::Queued { call, .. } = &mut claim.state
            && *call == (Call::Open { number: wait.call })
        {
            *call = Call::Ended { since: now };
        }
    }

    /// The pod's arrival, if it has or awaits memory.
    fn arrival_of(&self, pod: &PodUid) -> Option<u64> {
        self.claims
            .values()
            .filter(|claim| claim.pod == *pod && claim.state != State::Idle)
            .map(|claim| claim.arrival)
            .min()
    }

    /// Removes the pod's claim on these device ids, with every pending allocation of them, and
    /// returns it.
    fn take_claim(
        &mut self,
        resource: Resource,
        device_ids: DeviceIdSet,
        pod: PodUid,
    ) -> Result<(ClaimId, Claim), BindError> {
        let pending = self.take_pending(resource, &device_ids);
        let existing = self
            .find_claim(&pod, resource, &device_ids)
            .and_then(|id| self.claims.remove_entry(&id));
        match existing {
            Some((id, mut claim)) => {
                claim.allocations.extend(pending);
                Ok((id, claim))
            }
            None if pending.is_empty() => Err(BindError::UnknownAllocation {
                resource,
                device_ids,
                pod,
            }),
            None => {
                let claim = Claim {
                    pod,
                    resource,
                    device_ids,
                    allocations: pending,
                    arrival: self.next_id,
                    state: State::Idle,
                };
                Ok((ClaimId(self.next_id()), claim))
            }
        }
    }

    /// Removes the pending allocations of exactly these device ids, oldest first.
    fn take_pending(&mut self, resource: Resource, device_ids: &DeviceIdSet) -> Vec<AllocationId> {
        let taken = self
            .pending
            .extract_if(.., |_, allocation| {
                allocation.resource == resource && allocation.device_ids == *device_ids
            })
            .map(|(id, allocation)| (allocation.allocated_at, id));
        let mut taken: Vec<_> = taken.collect();
        taken.sort_unstable();
        taken.into_iter().map(|(_, id)| id).collect()
    }
}
