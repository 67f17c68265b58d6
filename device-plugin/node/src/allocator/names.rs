//! Keeps the names of containers and their pods, for messages, metrics and leases.
//!
//! The kubelet may not have reported a pod's name when its container starts, and a rebuilt
//! checkpoint lacks names too. Missing ones are resolved later.

use std::collections::{BTreeMap, BTreeSet};

use bursar_kubelet::device_checkpoint::CheckpointEntry;
use bursar_kubelet::pod_resources::{ListedContainer, find_container};
use bursar_ledger::units::{AllocationId, PodUid, Resource};
use bursar_ledger::{Binding, Ledger, SetAside, WaitReason};

use crate::checkpoint_state::{ContainerName, PodName};

/// The names of the ledger's allocations.
#[derive(Debug, Default)]
pub(crate) struct ContainerNames(BTreeMap<AllocationId, ContainerName>);

impl ContainerNames {
    /// The names of a checkpoint.
    pub(crate) fn from_record(names: BTreeMap<AllocationId, ContainerName>) -> Self {
        Self(names)
    }

    /// The names for the checkpoint.
    pub(super) fn record(&self) -> BTreeMap<AllocationId, ContainerName> {
        self.0.clone()
    }

    /// The names of an allocation's container and pod.
    pub(super) fn get(&self, allocation: AllocationId) -> Option<&ContainerName> {
        self.0.get(&allocation)
    }

    /// The name of an allocation's container.
    pub(super) fn container(&self, allocation: AllocationId) -> Option<&String> {
        self.get(allocation).map(|name| &name.container)
    }

    /// The name of an allocation's pod.
    pub(super) fn pod(&self, allocation: AllocationId) -> Option<&PodName> {
        self.get(allocation)?.pod.as_ref()
    }

    /// Names an allocation's container, unless it has a name.
    pub(crate) fn add_container(&mut self, allocation: AllocationId, container: &str) {
        self.0.entry(allocation).or_insert_with(|| ContainerName {
            container: container.to_owned(),
            pod: None,
        });
    }

    pub(super) fn remove(&mut self, allocation: AllocationId) {
        self.0.remove(&allocation);
    }

    /// Drops the names of all other allocations.
    pub(crate) fn retain(&mut self, known: &BTreeSet<AllocationId>) {
        self.0.retain(|allocation, _| known.contains(allocation));
    }

    /// Names a pod and its containers. A container has the name of its entry in `entries`, or else
    /// `container`.
    pub(super) fn set_pod(
        &mut self,
        ledger: &Ledger,
        pod: &PodUid,
        name: Option<&PodName>,
        container: &str,
        entries: &[CheckpointEntry],
    ) {
        let allocations = ledger.allocations();
        let of_pod = allocations.filter(|(_, owner)| *owner == Some(pod));
        for (id, _) in of_pod {
            let mut entries = entries.iter();
            let entry = entries.find(|entry| entry.allocation == id);
            self.add_container(id, entry.map_or(container, |entry| &entry.container));
            if let (Some(names), Some(name)) = (self.0.get_mut(&id), name) {
                names.pod = Some(name.clone());
            }
        }
    }

    /// Whether a container with device memory has a pod without a name.
    pub(super) fn lacks_pods(&self, ledger: &Ledger) -> bool {
        self.unnamed_bindings(ledger).next().is_some()
    }

    /// Names pods from the containers that the kubelet lists and from its checkpoint entries
    /// `held`. Returns whether there are new names.
    ///
    /// Device ids that another pod has by now identify no pod. Memory stays bound until its pod has
    /// ended; the kubelet may give the ids away earlier.
    pub(super) fn resolve(
        &mut self,
        ledger: &Ledger,
        listed: &[ListedContainer],
        held: &[CheckpointEntry],
    ) -> bool {
        let mut has_new = false;
        for binding in self.unnamed_bindings(ledger).collect::<Vec<_>>() {
            let Binding {
                pod, device_ids, ..
            } = &binding;
            let is_held_by_pod = |id| {
                let mut held = held.iter();
                held.any(|held| held.allocation == id && held.pod == *pod)
            };
            let mut sharers = ledger.allocations_sharing(binding.resource, device_ids);
            let is_alone = sharers
                .all(|(id, owner)| owner.map_or_else(|| is_held_by_pod(id), |owner| owner == pod));
            if let Some(named) = find_container(listed, device_ids).filter(|_| is_alone) {
                let name = PodName {
                    namespace: named.namespace.clone(),
                    name: named.pod.clone(),
                };
                self.set_pod(ledger, pod, Some(&name), &named.container, held);
                has_new = true;
            }
        }
        has_new
    }

    /// Replaces the UIDs of pods in a wait's reason by the names that are known.
    pub(super) fn name_pods(&self, ledger: &Ledger, reason: &mut WaitReason) {
        for SetAside { pod, name, .. } in &mut reason.set_aside {
            let mut allocations = ledger.allocations();
            let known = allocations.find_map(|(id, of)| {
                let named = self.pod(id)?;
                (of == Some(pod)).then_some(named)
            });
            if let Some(known) = known {
                *name = known.to_string();
            }
        }
    }

    fn unnamed_bindings(&self, ledger: &Ledger) -> impl Iterator<Item = Binding> {
        let has_name = |id: &AllocationId| self.pod(*id).is_some();
        ledger.bindings().filter(move |binding| {
            let is_device = binding.resource == Resource::DeviceMemory;
            is_device && !binding.allocations.iter().all(has_name)
        })
    }

    #[cfg(test)]
    pub(super) fn allocations(&self) -> BTreeSet<AllocationId> {
        self.0.keys().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn container_keeps_its_first_name_and_goes_with_its_allocation() {
        let [first, second] = [1, 2].map(AllocationId::from_bits);
        let mut names = ContainerNames::default();
        names.add_container(first, "main");
        names.add_container(first, "later");
        names.add_container(second, "sidecar");
        assert_eq!(names.container(first).map(String::as_str), Some("main"));
        assert_eq!(names.pod(first), None);
        names.retain(&[second].into());
        assert_eq!(names.allocations(), [second].into());
        names.remove(second);
        assert_eq!(names.record(), BTreeMap::new());
    }
}
