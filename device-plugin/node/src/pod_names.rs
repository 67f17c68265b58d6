//! Resolves pod names that the kubelet had not reported when the containers started.
//!
//! A rebuilt checkpoint lacks names too.

use bursar_kubelet::device_checkpoint::CheckpointEntry;
use bursar_kubelet::pod_resources::{ListedContainer, find_container};
use bursar_ledger::units::{AllocationId, Resource};
use bursar_ledger::{Binding, SetAside, WaitReason};

use super::allocator::NodeAllocator;
use super::checkpoint_state::PodName;
use super::host::HostOps;

impl<H: HostOps> NodeAllocator<H> {
    /// Whether a container with device memory has a pod without a name.
    pub(crate) fn has_unnamed_pods(&self) -> bool {
        self.unnamed_bindings().next().is_some()
    }

    /// Names pods from the containers that the kubelet lists and from its checkpoint entries
    /// `held`.
    ///
    /// Device ids that another pod has by now identify no pod. Memory stays bound until its pod has
    /// ended; the kubelet may give the ids away earlier.
    pub(crate) fn resolve_missing_names(
        &mut self,
        listed: &[ListedContainer],
        held: &[CheckpointEntry],
    ) {
        for binding in self.unnamed_bindings().collect::<Vec<_>>() {
            let Binding {
                pod, device_ids, ..
            } = &binding;
            let is_held_by_pod = |id| {
                let mut held = held.iter();
                held.any(|held| held.allocation == id && held.pod == *pod)
            };
            let is_alone = {
                let mut sharers = self
                    .ledger
                    .allocations_sharing(binding.resource, device_ids);
                sharers.all(|(id, owner)| {
                    owner.map_or_else(|| is_held_by_pod(id), |owner| owner == pod)
                })
            };
            let named = find_container(listed, device_ids).filter(|_| is_alone);
            if let Some(named) = named.cloned() {
                let name = PodName {
                    namespace: named.namespace,
                    name: named.pod,
                };
                self.record_pod_name(pod, Some(name), &named.container, held);
                self.checkpoint_dirty = true;
            }
        }
    }

    /// Replaces the UIDs of pods in a wait's reason by the names that are known.
    pub(crate) fn name_pods(&self, reason: &mut WaitReason) {
        for SetAside { pod, name, .. } in &mut reason.set_aside {
            let mut allocations = self.ledger.allocations();
            let known = allocations.find_map(|(id, of)| {
                let container = self.container_names.get(&id)?;
                container.pod.as_ref().filter(|_| of == Some(pod))
            });
            if let Some(known) = known {
                *name = known.to_string();
            }
        }
    }

    fn unnamed_bindings(&self) -> impl Iterator<Item = Binding> {
        let has_name = |id: &AllocationId| {
            self.container_names
                .get(id)
                .is_some_and(|holder| holder.pod.is_some())
        };
        let bindings = self.ledger.bindings();
        bindings.filter(move |binding| {
            let is_device = binding.resource == Resource::DeviceMemory;
            is_device && !binding.allocations.iter().all(has_name)
        })
    }
}
