//! Makes a binding visible to its container, and takes ended ones down.

use bursar_gpu::GpuState;
use bursar_gpu::health::{Health, UnhealthyReason};
use bursar_kubelet::plugin::PrepareError;
use bursar_ledger::units::{AllocationId, Bytes, GpuUuid, PodUid, Quanta};
use bursar_ledger::{Binding, Placement};
use tracing::{info, warn};

use super::super::host::{HostError, HostOps};
use super::records::BoundMemory;
use super::{NodeAllocator, prepare_failed};
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
        self.pending_setup.extend(&binding.allocations);
        for &allocation in &binding.allocations {
            // The allocation of an init container that had ended may start again.
            self.pending_teardown.remove(&allocation);
            let gpus = shares
                .iter()
                .map(|share| {
                    let nodes = self.device_nodes(&share.gpu)?;
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
                    .container_names
                    .get(&allocation)
                    .map(|holder| holder.container.clone())
                    .unwrap_or_default(),
                device_ids: binding.device_ids.clone(),
                gpus,
            };
            let managed = self.managed_quota(&binding.pod, allocation);
            self.host.serve_session(&device, managed).await?;
            self.host.write_cdi(&device).await?;
            self.pending_setup.remove(&allocation);
        }
        Ok(())
    }

    /// Sets the managed quota of every container of a pod.
    ///
    /// A container without device memory has no GPU from which to use managed memory.
    pub(super) fn set_managed_quotas(&mut self, pod: &PodUid) -> Result<(), HostError> {
        let exposed: Vec<AllocationId> = self
            .device_bindings()
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
        let container =
            |id: &AllocationId| self.container_names.get(id).map(|holder| &holder.container);
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

    /// A GPU of the binding that is being drained.
    pub(super) fn find_drained_gpu(&self, binding: &Binding) -> Option<GpuUuid> {
        let Placement::Device(shares) = &binding.placement else {
            return None;
        };
        let is_drained = |state: &&GpuState| {
            let why = state.health;
            matches!(
                why,
                Health::Unhealthy(UnhealthyReason::Draining | UnhealthyReason::Drained)
            )
        };
        let mut drained = self.gpus.iter().filter(is_drained);
        let bound = |state: &&GpuState| shares.iter().any(|share| share.gpu == state.gpu.uuid);
        drained.find(bound).map(|state| state.gpu.uuid.clone())
    }

    pub(super) fn device_nodes(&self, uuid: &GpuUuid) -> Result<Vec<String>, HostError> {
        let state = self.gpus.iter().find(|state| state.gpu.uuid == *uuid);
        let gpu = &state
            .ok_or_else(|| HostError::GpuNotListed(uuid.clone()))?
            .gpu;
        let capability = |number: &u32| format!("nvidia-caps/nvidia-cap{number}");
        let nodes = [format!("nvidia{}", gpu.minor)].into_iter();
        Ok(nodes
            .chain(gpu.capabilities.iter().map(capability))
            .collect())
    }

    /// Repeats the steps that failed before.
    pub(super) async fn retry_pending(&mut self) {
        if self.save_checkpoint().is_err() {
            return;
        }
        self.tear_down_ended().await;
        if self.pending_setup.is_empty() {
            if self.pending_teardown.is_empty() {
                self.problems.host = None;
            }
            return;
        }
        let unfinished = |binding: &Binding| {
            binding
                .allocations
                .iter()
                .any(|id| self.pending_setup.contains(id))
        };
        let bindings: Vec<Binding> = self.ledger.bindings().filter(unfinished).collect();
        for binding in bindings {
            match self.set_up(&binding).await {
                Ok(()) => self.problems.host = None,
                // A missing GPU must not delay the other bindings.
                Err(HostError::GpuNotListed(_)) => {}
                Err(error) => self.problems.host = Some((error.subsystem(), error.to_string())),
            }
        }
        if self.pending_teardown.is_empty() && self.pending_setup.is_empty() {
            self.problems.host = None;
        }
    }

    /// Tears down ended allocations; the next tick repeats what fails.
    pub(in super::super) async fn tear_down_ended(&mut self) {
        for allocation in self.pending_teardown.clone() {
            match self.host.tear_down(allocation).await {
                Ok(()) => {
                    self.pending_teardown.remove(&allocation);
                    self.pending_setup.remove(&allocation);
                }
                Err(error) => self.problems.host = Some((error.subsystem(), error.to_string())),
            }
        }
    }
}
