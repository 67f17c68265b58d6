//! Restores the node's state from the previous agent's files.
//!
//! 1. The agent reads pending allocations, claims and bindings from the checkpoint. A checkpoint
//!    may be missing, malformed or of another boot. The agent then restores bindings from the CDI
//!    files, and those of managed memory from the kubelet's device checkpoint. In that case the
//!    unreclaimed memory is unknown: the agent binds no GPU before the free memory is proven. An
//!    unreadable CDI file of another agent version has the same effect.
//! 2. The kubelet's device checkpoint adds missing pending allocations of pods that still exist.
//! 3. The agent releases pods whose cgroup was removed.
//! 4. The agent removes files without a binding.
//! 5. The agent serves the sockets of all bindings again, with their managed quotas. The agent
//!    writes missing CDI files once the GPUs are known. Existing files stay, for containers run
//!    with them.

use std::collections::BTreeSet;

use bursar_host::checkpoint::LoadError;
use bursar_host::pod_cgroups::PodCgroup;
use bursar_kubelet::device_checkpoint::{CheckpointEntry, DeviceCheckpoint};
use bursar_ledger::units::{AllocationId, PodUid, Quanta, Quantum, Resource};
use bursar_ledger::{BootTime, Ledger, Placement, RestoreError, Share};
use tracing::{info, warn};

use super::allocator::{ContainerNames, NodeAllocator};
use super::checkpoint_state::NodeCheckpoint;
use super::host::{HostOps, HostSurvey};
use crate::cdi;

/// The reason why the checkpoint cannot be restored.
#[derive(Debug, thiserror::Error)]
enum NotRestored {
    #[error("the checkpoint is missing")]
    Missing,
    #[error("the checkpoint is of another boot")]
    OtherBoot,
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Restore(#[from] RestoreError),
}

impl<H: HostOps> NodeAllocator<H> {
    /// Restores the state from the files in `found` and from the kubelet's checkpoint entries.
    pub async fn recover(&mut self, found: HostSurvey, kubelet: &[CheckpointEntry], now: BootTime) {
        let HostSurvey {
            checkpoint,
            cdi_bindings: cdi,
            unreadable: unread,
            allocations,
        } = found;
        let mut unread_files = BTreeSet::new();
        if let Err(why) = self.restore(checkpoint, now) {
            self.rebuild_from_host(&cdi, kubelet, now);
            let bindings = self.ledger.bindings().count();
            // A reboot loses nothing: no process of the old boot is alive.
            let lost = match why {
                NotRestored::OtherBoot => false,
                NotRestored::Missing => bindings > 0 || !unread.is_empty(),
                NotRestored::Load(_) | NotRestored::Restore(_) => true,
            };
            if lost {
                warn!(%why, bindings, "failed to restore the checkpoint; state rebuilt from the host");
                self.problems.rebuilt = Some(match unread.len() {
                    0 => why.to_string(),
                    count => {
                        format!(
                            "{why}; {count} CDI files of another version of the agent were not read"
                        )
                    }
                });
                self.reclaim_all_pending = true;
                unread_files = unread;
            }
        }
        self.restore_pending_allocations(kubelet, now);
        self.restore_weights(kubelet);
        self.find_orphaned_files(&cdi, allocations, &unread_files);
        self.checkpoint_dirty = true;
        self.release_pods_without_cgroup(now).await;
        if self.save_checkpoint().is_ok() {
            self.tear_down_ended().await;
        }
        self.serve_sessions(cdi).await;
        info!(bindings = self.ledger.bindings().count(), "state recovered");
    }

    fn restore(
        &mut self,
        found: Result<Option<NodeCheckpoint>, LoadError>,
        now: BootTime,
    ) -> Result<(), NotRestored> {
        let NodeCheckpoint {
            boot,
            ledger,
            container_names,
        } = found?.ok_or(NotRestored::Missing)?;
        if boot != self.boot_id {
            return Err(NotRestored::OtherBoot);
        }
        let managed = super::capacity::managed_capacity(&self.offered());
        self.ledger = Ledger::restore(ledger, self.config.quantum, now)?;
        self.ledger.set_managed_capacity(managed);
        self.names = ContainerNames::from_record(container_names);
        Ok(())
    }

    fn rebuild_from_host(
        &mut self,
        cdi: &[cdi::CdiBinding],
        kubelet: &[CheckpointEntry],
        now: BootTime,
    ) {
        for binding in cdi {
            let cdi::CdiBinding {
                allocation,
                pod,
                container,
                device_ids,
                gpus,
            } = binding;
            let placement = placement_of(gpus, self.config.quantum);
            self.ledger.restore_binding(
                *allocation,
                Resource::DeviceMemory,
                device_ids.clone(),
                pod.clone(),
                placement,
            );
            self.names.add_container(*allocation, container);
        }
        // Managed memory has no file. The container may not have started yet, but counting its
        // memory is harmless, because the kubelet has given its device ids to no other container.
        for entry in kubelet
            .iter()
            .filter(|entry| entry.resource == Resource::ManagedMemory)
        {
            let placement = Placement::Managed(entry.device_ids.quanta());
            self.add_pending(entry, now);
            self.ledger.restore_binding(
                entry.allocation,
                entry.resource,
                entry.device_ids.clone(),
                entry.pod.clone(),
                placement,
            );
            self.names.add_container(entry.allocation, &entry.container);
        }
    }

    /// The kubelet lists pods that have ended until its next allocation.
    fn restore_pending_allocations(&mut self, kubelet: &[CheckpointEntry], now: BootTime) {
        for entry in kubelet {
            if self.pod_cgroups.watch(&entry.pod) != PodCgroup::Gone {
                self.add_pending(entry, now);
                self.names.add_container(entry.allocation, &entry.container);
            }
        }
    }

    /// Takes the weights of the ledger's pods from the kubelet: an agent that knew none, such as
    /// one of an earlier version, has not recorded them.
    fn restore_weights(&mut self, kubelet: &[CheckpointEntry]) {
        let pods: Vec<PodUid> = self.ledger.pods().into_iter().cloned().collect();
        for pod in pods {
            match DeviceCheckpoint::weight_of(kubelet, &pod) {
                0 => {}
                weight => self.ledger.set_weight(&pod, weight),
            }
        }
    }

    async fn release_pods_without_cgroup(&mut self, now: BootTime) {
        let pods: Vec<PodUid> = self.ledger.pods().into_iter().cloned().collect();
        for pod in pods {
            if self.pod_cgroups.watch(&pod) == PodCgroup::Gone {
                self.release_pod(&pod, now).await;
            }
        }
    }

    /// Marks files without a binding for teardown. An unreadable CDI file in `unread_files` stays
    /// until the kubelet forgets its allocation.
    fn find_orphaned_files(
        &mut self,
        cdi: &[cdi::CdiBinding],
        allocations: BTreeSet<AllocationId>,
        unread_files: &BTreeSet<AllocationId>,
    ) {
        let bound: BTreeSet<AllocationId> = self
            .ledger
            .bindings()
            .flat_map(|binding| binding.allocations)
            .collect();
        let on_host = cdi
            .iter()
            .map(|binding| binding.allocation)
            .chain(allocations);
        let known: BTreeSet<AllocationId> = self.ledger.allocations().map(|(id, _)| id).collect();
        let must_stay = |id: &AllocationId| {
            bound.contains(id) || unread_files.contains(id) && known.contains(id)
        };
        self.effects
            .begin_teardown(on_host.filter(|id| !must_stay(id)));
        self.names.retain(&known);
    }

    async fn serve_sessions(&mut self, cdi: Vec<cdi::CdiBinding>) {
        let bindings = self
            .ledger
            .bindings()
            .filter(|binding| binding.resource == Resource::DeviceMemory);
        self.effects
            .begin_setup(bindings.flat_map(|binding| binding.allocations));
        for device in cdi {
            if !self.effects.lacks_setup(device.allocation) {
                continue;
            }
            let managed = self.managed_quota(&device.pod, device.allocation);
            match self.host.serve_session(&device, managed).await {
                Ok(()) => self.effects.finish_setup(device.allocation),
                Err(error) => self.problems.host = Some((error.subsystem(), error.to_string())),
            }
        }
    }
}

/// The placement in a CDI file. Its quotas may be multiples of another quantum than the present
/// one.
fn placement_of(gpus: &[cdi::BoundGpu], quantum: Quantum) -> Placement {
    let share = |gpu: &cdi::BoundGpu| Share {
        gpu: gpu.uuid.clone(),
        quanta: Quanta(u32::try_from(gpu.quota.0.div_ceil(quantum.bytes())).unwrap_or(u32::MAX)),
    };
    Placement::Device(gpus.iter().map(share).collect())
}
