//! Makes bindings visible to their containers, also those of waiting calls, and takes ended ones
//! down.

use bursar_kubelet::device_checkpoint::CheckpointEntry;
use bursar_kubelet::plugin::PrepareError;
use bursar_ledger::units::{AllocationId, Bytes, PodUid, Quanta};
use bursar_ledger::{Binding, BootTime, ClaimId, Placement, WaitReason};
use tokio::sync::oneshot;
use tracing::{info, warn};

use super::super::host::{HostError, HostOps};
use super::leases::device_bindings;
use super::records::BoundMemory;
use super::waiting::WaitingCall;
use super::{NodeAllocator, prepare_failed, send_result};
use crate::cdi;

impl<H: HostOps> NodeAllocator<H> {
    /// Performs the steps of a binding that follow the ledger's.
    pub(super) async fn commit_binding(
        &mut self,
        binding: &Binding,
    ) -> Result<BoundMemory, PrepareError> {
        self.save_checkpoint().map_err(prepare_failed)?;
        self.tear_down_ended().await;
        let result = self.set_up(binding).await;
        match &result {
            Ok(()) => {
                info!(pod = %binding.pod, claim = ?binding.claim, placement = ?binding.placement, "bound");
                self.problems.host = None;
            }
            Err(error) => {
                warn!(pod = %binding.pod, reason = error.reason(), %error, "failed to set up a binding; the agent tries again");
                self.problems.host = Some((error.subsystem(), error.to_string()));
            }
        }
        result.map_err(prepare_failed)?;
        Ok(self.bound_memory(&binding.placement))
    }

    pub(super) fn bound_memory(&self, placement: &Placement) -> BoundMemory {
        let bytes = |quanta: Quanta| quanta.bytes(self.config.quantum);
        match placement {
            Placement::Managed(quanta) => BoundMemory::Managed(bytes(*quanta)),
            Placement::Device(shares) => {
                let shares = shares.iter();
                let shares = shares.map(|share| (share.gpu.clone(), bytes(share.quanta)));
                BoundMemory::Device(shares.collect())
            }
        }
    }

    /// Creates the effects of a binding on the host.
    ///
    /// Each allocation of device memory gets a socket and a CDI file. A binding of managed memory
    /// sets the quotas of its containers.
    pub(super) async fn set_up(&mut self, binding: &Binding) -> Result<(), HostError> {
        let shares = match &binding.placement {
            Placement::Device(shares) => shares,
            Placement::Managed(_) => return self.set_managed_quotas(&binding.pod),
        };
        self.effects
            .begin_setup(binding.allocations.iter().copied());
        for &allocation in &binding.allocations {
            self.effects.cancel_teardown(allocation);
            let gpus = shares
                .iter()
                .map(|share| {
                    let nodes = self.gpus.device_nodes(&share.gpu)?;
                    let quota = share.quanta.bytes(self.config.quantum);
                    Ok(cdi::BoundGpu {
                        uuid: share.gpu.clone(),
                        quota,
                        nodes,
                    })
                })
                .collect::<Result<_, HostError>>()?;
            let device = cdi::CdiBinding {
                allocation,
                pod: binding.pod.clone(),
                container: self
                    .names
                    .container(allocation)
                    .cloned()
                    .unwrap_or_default(),
                device_ids: binding.device_ids.clone(),
                gpus,
            };
            let managed = self.managed_quota(&binding.pod, allocation);
            self.host.serve_session(&device, managed).await?;
            self.host.write_cdi(&device).await?;
            self.effects.finish_setup(allocation);
        }
        Ok(())
    }

    /// Sets the managed quota of every container of a pod.
    ///
    /// A container without device memory has no GPU from which to use managed memory.
    pub(super) fn set_managed_quotas(&mut self, pod: &PodUid) -> Result<(), HostError> {
        let exposed: Vec<AllocationId> = device_bindings(&self.ledger)
            .filter(|bound| bound.pod == pod)
            .flat_map(|bound| bound.allocations.iter().copied())
            .collect();
        for allocation in exposed {
            let managed = self.managed_quota(pod, allocation);
            self.host.set_managed_quota(allocation, managed)?;
        }
        Ok(())
    }

    /// The managed memory bound to the container of `pod` that has `allocation`.
    pub(in super::super) fn managed_quota(&self, pod: &PodUid, allocation: AllocationId) -> Bytes {
        let container = |id: &AllocationId| self.names.container(*id);
        let quanta = self
            .ledger
            .binding_refs()
            .filter(|bound| {
                let mut containers = bound.allocations.iter().map(container);
                bound.pod == pod && containers.any(|name| name == container(&allocation))
            })
            .map(|bound| match bound.placement {
                Placement::Managed(quanta) => quanta.0,
                Placement::Device(_) => 0,
            })
            .fold(0_u32, u32::saturating_add);
        Quanta(quanta).bytes(self.config.quantum)
    }

    /// Lets the next tick perform the steps of all bindings of device memory again.
    pub(in super::super) fn repeat_setups(&mut self) {
        let bindings = device_bindings(&self.ledger);
        let allocations = bindings.flat_map(|bound| bound.allocations.iter().copied());
        self.effects.begin_setup(allocations);
    }

    /// Repeats the steps that failed before.
    pub(super) async fn retry_pending(&mut self) {
        if self.save_checkpoint().is_err() {
            return;
        }
        self.tear_down_ended().await;
        let unfinished = |binding: &Binding| self.effects.lacks_setup_of(binding);
        let bindings: Vec<Binding> = self.ledger.bindings().filter(unfinished).collect();
        for binding in bindings {
            match self.set_up(&binding).await {
                Ok(()) => self.problems.host = None,
                // A missing GPU must not delay the other bindings.
                Err(HostError::GpuNotListed(_)) => {}
                Err(error) => self.problems.host = Some((error.subsystem(), error.to_string())),
            }
        }
        if self.effects.is_empty() {
            self.problems.host = None;
        }
    }

    /// Tears down ended allocations; the next tick repeats what fails.
    pub(in super::super) async fn tear_down_ended(&mut self) {
        for allocation in self.effects.teardowns() {
            match self.host.tear_down(allocation).await {
                Ok(()) => self.effects.finish_teardown(allocation),
                Err(error) => self.problems.host = Some((error.subsystem(), error.to_string())),
            }
        }
    }

    /// Queues a call until its claim has room, and sends its caller the `reason`.
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
        self.names.name_pods(&self.ledger, &mut reason);
        info!(pod = %call.request.pod, resource = %call.request.resource, %reason, "waiting");
        let mut held = held.iter();
        let name = held.find_map(|entry| self.names.get(entry.allocation).cloned());
        self.waits.add(call, name, &reason, now);
        // The caller may have gone; its call ends with the next tick.
        let _ = wait_reason.send(reason);
    }

    /// Binds queued claims until none fits.
    pub(super) async fn bind_queued(&mut self, now: BootTime) {
        for binding in self.ledger.advance(now) {
            self.checkpoint_dirty = true;
            self.record_wait(binding.claim, now);
            let result = self.commit_binding(&binding).await;
            if let Some(call) = self.waits.take_call(binding.claim) {
                send_result(call, result);
            }
        }
        // All changes are on record before the next event.
        let _ = self.save_checkpoint();
    }

    /// Ends the calls whose deadline has passed or whose caller has gone.
    pub(super) fn expire_waits(&mut self, now: BootTime) {
        for call in self.waits.take_expired(now) {
            let mut reason = self.ledger.reason(call.ticket.claim, now);
            if let Some(reason) = &mut reason {
                self.names.name_pods(&self.ledger, reason);
            }
            self.ledger.stop_waiting(call.ticket, now);
            self.checkpoint_dirty = true;
            let message = reason.map_or_else(|| "waiting".to_owned(), |reason| reason.to_string());
            info!(pod = %call.request.pod, reason = message, "no room before the deadline");
            send_result(call.result, Err(PrepareError::NoRoom(message)));
        }
    }

    /// Records the end of a claim's wait. A claim that did not wait has no record.
    pub(super) fn record_wait(&mut self, claim: ClaimId, now: BootTime) {
        if let Some(queued_at) = self.waits.end_claim(claim) {
            self.metrics.observe_wait(now.since(queued_at));
        }
    }

    pub(super) fn observe_oldest_wait(&mut self, now: BootTime) {
        self.waits.retain(|claim| self.ledger.is_queued(claim));
        let oldest = self.waits.oldest().map(|since| now.since(since));
        self.metrics.set_oldest_wait(oldest.unwrap_or_default());
    }
}
