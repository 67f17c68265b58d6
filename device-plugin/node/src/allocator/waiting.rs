//! Keeps the calls that wait for room, and the claims that outlive them.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use bursar_kubelet::plugin::PrepareError;
use bursar_ledger::units::{PodUid, Resource};
use bursar_ledger::{BindRequest, BootTime, ClaimId, WaitHandle, WaitReason};
use jiff::Timestamp;

use super::records::{QueuedClaim, ResultSender};
use super::send_result;
use crate::checkpoint_state::ContainerName;

/// A PreStartContainer call that waits for room.
#[derive(Debug)]
pub(super) struct WaitingCall {
    pub(super) request: BindRequest,
    pub(super) ticket: WaitHandle,
    pub(super) deadline: BootTime,
    pub(super) result: ResultSender,
}

/// The calls and the claims that wait.
#[derive(Debug, Default)]
pub(super) struct WaitQueue {
    calls: BTreeMap<ClaimId, WaitingCall>,
    /// Every claim that waits. A claim outlives the single calls of the kubelet.
    claims: BTreeMap<ClaimId, QueuedClaim>,
}

impl WaitQueue {
    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.calls.is_empty() && self.claims.is_empty()
    }

    /// Adds a call of the container `name`. An earlier call of its claim ends with the reason.
    pub(super) fn add(
        &mut self,
        call: WaitingCall,
        name: Option<ContainerName>,
        reason: &WaitReason,
        now: BootTime,
    ) {
        let request = &call.request;
        let fits_when_empty = reason.gpus.is_some();
        let resource = match reason.weight {
            Some(_) => Resource::Compute,
            None => request.resource,
        };
        // The record begins with the kubelet's first call.
        self.claims
            .entry(call.ticket.claim)
            .and_modify(|claim| {
                (claim.fits_when_empty, claim.resource) = (fits_when_empty, resource);
            })
            .or_insert_with(|| QueuedClaim {
                name,
                pod: request.pod.clone(),
                resource,
                quanta: request.device_ids.quanta(),
                priority: request.priority,
                fits_when_empty,
                since: Timestamp::now(),
                queued_at: now,
            });
        if let Some(before) = self.calls.insert(call.ticket.claim, call) {
            let refused = PrepareError::NoRoom(reason.to_string());
            send_result(before.result, Err(refused));
        }
    }

    /// Removes a bound claim's call, which gets its result from the caller.
    pub(super) fn take_call(&mut self, claim: ClaimId) -> Option<ResultSender> {
        self.calls.remove(&claim).map(|call| call.result)
    }

    /// Ends a claim's wait, over all calls of the kubelet. Returns when it began; `None` for a
    /// claim that did not wait.
    pub(super) fn end_claim(&mut self, claim: ClaimId) -> Option<BootTime> {
        self.claims.remove(&claim).map(|claim| claim.queued_at)
    }

    /// Removes the calls whose deadline has passed or whose caller has gone.
    pub(super) fn take_expired(&mut self, now: BootTime) -> Vec<WaitingCall> {
        let has_ended =
            |_: &ClaimId, call: &mut WaitingCall| call.deadline <= now || call.result.is_closed();
        let ended = self.calls.extract_if(.., has_ended);
        ended.map(|(_, call)| call).collect()
    }

    /// Fails the calls of a pod that has ended.
    pub(super) fn fail_calls_of(&mut self, pod: &PodUid) {
        for (_, call) in self
            .calls
            .extract_if(.., |_, call| call.request.pod == *pod)
        {
            let ended = PrepareError::Failed("the pod has ended".to_owned());
            send_result(call.result, Err(ended));
        }
    }

    /// Drops the claims that are no longer queued.
    pub(super) fn retain(&mut self, is_queued: impl Fn(ClaimId) -> bool) {
        self.claims.retain(|claim, _| is_queued(*claim));
    }

    /// When the claim that waits longest began to wait.
    pub(super) fn oldest(&self) -> Option<BootTime> {
        self.claims.values().map(|claim| claim.queued_at).min()
    }

    /// The number of waiting claims for a resource.
    pub(super) fn count(&self, resource: Resource) -> usize {
        let claims = self.claims.values();
        claims.filter(|claim| claim.resource == resource).count()
    }

    /// The claims: first those that emptier GPUs could hold, by priority, and the oldest first.
    pub(super) fn by_urgency(&self) -> Vec<QueuedClaim> {
        let mut claims: Vec<QueuedClaim> = self.claims.values().cloned().collect();
        claims.sort_by_cached_key(|claim| {
            let urgency = (!claim.fits_when_empty, Reverse(claim.priority));
            (urgency, claim.queued_at, claim.pod.clone())
        });
        claims
    }

    #[cfg(test)]
    pub(super) fn claims_mut(&mut self) -> impl Iterator<Item = &mut QueuedClaim> {
        self.claims.values_mut()
    }
}
