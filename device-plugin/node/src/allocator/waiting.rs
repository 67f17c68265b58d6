//! Keeps the calls that wait for room, until a claim fits or their deadline passes.

use bursar_kubelet::device_checkpoint::CheckpointEntry;
use bursar_kubelet::plugin::PrepareError;
use bursar_ledger::{BootTime, ClaimId, WaitReason};
use jiff::Timestamp;
use tokio::sync::oneshot;
use tracing::info;

use super::super::host::HostOps;
use super::{NodeAllocator, QueuedClaim, WaitingCall, send_result};

impl<H: HostOps> NodeAllocator<H> {
    /// Queues a call until its claim has room, and sends its caller the `reason`. An earlier call
    /// of the claim ends.
    ///
    /// `held` are the kubelet's entries for the container.
    pub(super) fn queue_call(
        &mut self,
        call: WaitingCall,
        held: &[CheckpointEntry],
        mut reason: WaitReason,
        wait_reason: oneshot::Sender<WaitReason>,
        now: BootTime,
    ) {
        self.name_pods(&mut reason);
        info!(pod = %call.request.pod, resource = %call.request.resource, %reason, "waiting");
        self.record_queued(&call, held, reason.gpus.is_some(), now);
        let message = reason.to_string();
        // The caller may have gone; its call ends with the next tick.
        let _ = wait_reason.send(reason);
        if let Some(before) = self.waiting_calls.insert(call.ticket.claim, call) {
            send_result(before.result, Err(PrepareError::NoRoom(message)));
        }
    }

    /// Records that a call's claim waits; the record begins with the first call of the kubelet.
    fn record_queued(
        &mut self,
        call: &WaitingCall,
        held: &[CheckpointEntry],
        fits_when_empty: bool,
        now: BootTime,
    ) {
        let request = &call.request;
        let wait = self.queued_claims.entry(call.ticket.claim);
        wait.and_modify(|wait| wait.fits_when_empty = fits_when_empty)
            .or_insert_with(|| QueuedClaim {
                name: held
                    .iter()
                    .find_map(|entry| self.container_names.get(&entry.allocation).cloned()),
                pod: request.pod.clone(),
                resource: request.resource,
                quanta: request.device_ids.quanta(),
                priority: request.priority,
                fits_when_empty,
                since: Timestamp::now(),
                queued_at: now,
            });
    }

    /// Binds queued claims until none fits.
    pub(super) async fn bind_queued(&mut self, now: BootTime) {
        for binding in self.ledger.advance(now) {
            self.checkpoint_dirty = true;
            self.record_wait(binding.claim, now);
            let result = self.commit_binding(&binding).await;
            if let Some(call) = self.waiting_calls.remove(&binding.claim) {
                send_result(call.result, result);
            }
        }
        // All changes are on record before the next event.
        let _ = self.save_checkpoint();
    }

    /// Ends the calls whose deadline has passed or whose caller has gone.
    pub(super) fn expire_waits(&mut self, now: BootTime) {
        let has_ended =
            |_: &ClaimId, call: &mut WaitingCall| call.deadline <= now || call.result.is_closed();
        let ended: Vec<WaitingCall> = self
            .waiting_calls
            .extract_if(.., has_ended)
            .map(|(_, call)| call)
            .collect();
        for WaitingCall {
            request,
            ticket,
            result,
            ..
        } in ended
        {
            let mut reason = self.ledger.reason(ticket.claim, now);
            reason.iter_mut().for_each(|reason| self.name_pods(reason));
            self.ledger.stop_waiting(ticket, now);
            self.checkpoint_dirty = true;
            let message = reason.map_or_else(|| "waiting".to_owned(), |reason| reason.to_string());
            info!(pod = %request.pod, reason = message, "no room before the deadline");
            send_result(result, Err(PrepareError::NoRoom(message)));
        }
    }

    /// Records the end of a claim's wait, over all calls of the kubelet. A claim that did not wait
    /// has no record.
    pub(super) fn record_wait(&mut self, claim: ClaimId, now: BootTime) {
        if let Some(wait) = self.queued_claims.remove(&claim) {
            self.metrics.observe_wait(now.since(wait.queued_at));
        }
    }

    pub(super) fn observe_oldest_wait(&mut self, now: BootTime) {
        self.queued_claims
            .retain(|claim, _| self.ledger.is_queued(*claim));
        let claims = self.queued_claims.values();
        let oldest = claims.map(|claim| now.since(claim.queued_at)).max();
        self.metrics.set_oldest_wait(oldest.unwrap_or_default());
    }
}
