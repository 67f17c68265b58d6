//! Reduces Nodes and GpuNodes to what the planner needs.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Deref;

use bursar_crds::gpu_node::{
    GpuPod, GpuStatus, HealthStatus, MemoryResource, QuotaOverride, Relocation, Reservation,
};
use bursar_crds::shares::GpuCapacity;
use bursar_crds::{COHORT_LABEL, DEFAULT_COHORT, GpuNode, Quantum};
use k8s_openapi::api::core::v1::Taint;
use kube::ResourceExt as _;

use super::node_usage::to_milli;
use super::pod::PodFacts;
use crate::cluster::Key;
use crate::cluster::nvidia_labels::Maintenance;
use crate::cluster::on_node::on_node;
use crate::cluster::slim_node::SlimNode;
use crate::quanta::Quanta;

/// The fields of a Node that the index needs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeFacts {
    /// The node's UID.
    pub uid: String,
    /// The node's labels.
    pub labels: BTreeMap<String, String>,
    /// The node's taints.
    pub taints: Vec<Taint>,
    /// The node's condition `Ready` is True.
    pub is_ready: bool,
    /// New pods are kept away from the node.
    pub is_cordoned: bool,
    /// The allocatable device memory.
    pub allocatable: Quanta,
    /// All allocatable resources, in thousandths.
    pub allocatable_milli: BTreeMap<String, u64>,
}

impl NodeFacts {
    /// The facts of `node`.
    pub fn of(node: &SlimNode, quantum: Quantum) -> Self {
        Self {
            uid: node.uid().unwrap_or_default(),
            labels: node.labels().clone(),
            taints: node.spec.taints.clone(),
            is_ready: node.is_ready(),
            is_cordoned: node.spec.unschedulable,
            allocatable: node.allocatable(quantum),
            allocatable_milli: node
                .status
                .allocatable
                .iter()
                .map(|(resource, amount)| (resource.clone(), to_milli(amount)))
                .collect(),
        }
    }

    /// The cohort from the node's label.
    pub(crate) fn cohort(&self) -> &str {
        let label = self.labels.get(COHORT_LABEL);
        label.map_or(DEFAULT_COHORT, String::as_str)
    }

    /// Whether the node is Ready and its kubelet offers device memory.
    ///
    /// The kubelet withdraws the offer when the agent's stream ends. The node lifecycle controller
    /// withdraws `Ready` when the kubelet is silent.
    pub fn is_alive(&self) -> bool {
        self.is_ready && self.allocatable != Quanta::ZERO
    }

    /// The maintenance of the node's GPUs by NVIDIA's operators.
    pub(crate) fn maintenance(&self) -> Maintenance {
        Maintenance::of(&self.labels)
    }
}

/// A node's GPUs as the agent reports them, and the orders for the agent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuFacts {
    /// The `GpuNode`'s UID.
    pub uid: String,
    /// The node's GPUs.
    pub gpus: Vec<Gpu>,
    /// The containers that wait there for room on a GPU, those of a pod the longest waiting first.
    pub pending: Vec<PendingContainer>,
    /// `spec.reservations`.
    pub reservations: Vec<Reservation>,
    /// `spec.quotas`.
    pub quotas: Vec<QuotaOverride>,
    /// `spec.relocations`.
    pub relocations: Vec<Relocation>,
}

/// One GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gpu {
    /// The GPU's UUID.
    pub uuid: String,
    /// The memory for pods; zero while the GPU is unhealthy.
    pub capacity: Quanta,
    /// The memory that is bound to no pod.
    pub free: Quanta,
    /// The largest amount that a new pod can get.
    pub largest_free: Quanta,
    /// The UID of the pod that the agent keeps the GPU for.
    pub reserved_for: Option<String>,
    /// The namespace whose pods alone get memory of the GPU, if it is not for all.
    pub only_for: Option<String>,
    /// The free memory that the agent sets aside for waiting pods, by UID.
    pub set_aside: BTreeMap<String, Quanta>,
    /// The pods with memory on the GPU, by UID.
    pub pods: BTreeMap<String, Quanta>,
    /// Whether `pods` lacks some, those with the least memory.
    pub omits_pods: bool,
}

impl Gpu {
    /// Whether this is a MIG instance.
    pub(crate) fn is_mig(&self) -> bool {
        self.uuid.starts_with("MIG-")
    }

    /// Whether pods of the namespace may have memory of the GPU.
    pub(crate) fn is_open_to(&self, namespace: &str) -> bool {
        let only_for = self.only_for.as_ref();
        only_for.is_none_or(|only_for| only_for == namespace)
    }

    /// The free memory that is not set aside for other pods.
    pub(crate) fn free_for(&self, pod: &str) -> Quanta {
        let others = self.set_aside.iter().filter(|(uid, _)| *uid != pod);
        self.free.minus(others.map(|(_, quanta)| *quanta).sum())
    }
}

/// A container that waits on its node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingContainer {
    /// The UID of its pod.
    pub pod: String,
    /// The amount that it waits for.
    pub quanta: Quanta,
}

impl GpuFacts {
    /// The facts of `node`. GPUs and containers are left out when the node uses another quantum.
    pub fn of(node: &GpuNode, quantum: Quantum) -> Self {
        let status = node.status.clone().unwrap_or_default();
        let size = status.quantum.as_ref().map(bursar_crds::Amount::bytes);
        let counts = size == Some(Ok(quantum.bytes()));
        Self {
            uid: node.uid().unwrap_or_default(),
            gpus: status.gpus.iter().filter(|_| counts).map(gpu).collect(),
            pending: status
                .waiting
                .iter()
                .filter(|waiting| counts && waiting.resource == MemoryResource::DeviceMemory)
                .map(|waiting| PendingContainer {
                    pod: waiting.pod_uid.clone(),
                    quanta: quanta(waiting.quanta),
                })
                .collect(),
            reservations: node.spec.reservations.clone(),
            quotas: node.spec.quotas.clone(),
            relocations: node.spec.relocations.clone(),
        }
    }

    /// Whether the pod with this UID has memory on a GPU of this node, as far as the lists tell.
    pub(crate) fn lists(&self, pod: &str) -> bool {
        self.gpus.iter().any(|gpu| gpu.pods.contains_key(pod))
    }

    /// The GPUs as pods of the namespace could have them if they were empty.
    pub(crate) fn capacities_for(&self, namespace: &str) -> Vec<GpuCapacity> {
        let gpus = self.gpus.iter().filter(|gpu| gpu.is_open_to(namespace));
        let capacity = |gpu: &Gpu| GpuCapacity {
            quanta: gpu.capacity.count().try_into().unwrap_or(u32::MAX),
            is_combinable: !gpu.is_mig(),
        };
        gpus.map(capacity).collect()
    }

    /// Whether a container of the pod may already have memory on this node.
    pub(crate) fn has_possibly_started(&self, pod: &PodFacts) -> bool {
        let one_of_several = pod.containers.len() > 1;
        let mut gpus = self.gpus.iter();
        gpus.any(|gpu| gpu.pods.contains_key(&pod.uid) || one_of_several && gpu.omits_pods)
    }
}

/// A node's report without pods that are on other nodes. Only [`VerifiedGpus::of`] constructs it,
/// so that no plan sees the rest.
///
/// A pod without an object stays, because only its node can report it.
pub(crate) struct VerifiedGpus<'a>(Cow<'a, GpuFacts>);

impl<'a> VerifiedGpus<'a> {
    /// The report of `node`, checked against all `pods` by UID.
    pub(super) fn of(
        node: &str,
        report: &'a GpuFacts,
        pods: &BTreeMap<&str, (&Key, &PodFacts)>,
    ) -> Self {
        let is_on_other_node = |uid: &String| {
            let pod = pods.get(uid.as_str());
            pod.is_some_and(|(_, pod)| on_node(node, *pod).is_none())
        };
        let pending = report.pending.iter().map(|container| &container.pod);
        let mut named = pending.chain(report.gpus.iter().flat_map(|gpu| gpu.pods.keys()));
        if !named.any(is_on_other_node) {
            return Self(Cow::Borrowed(report));
        }
        let mut report = report.clone();
        report
            .pending
            .retain(|container| !is_on_other_node(&container.pod));
        for gpu in &mut report.gpus {
            gpu.pods.retain(|uid, _| !is_on_other_node(uid));
        }
        Self(Cow::Owned(report))
    }
}

impl Deref for VerifiedGpus<'_> {
    type Target = GpuFacts;

    fn deref(&self) -> &GpuFacts {
        &self.0
    }
}

fn gpu(gpu: &GpuStatus) -> Gpu {
    let works = gpu.health.status == HealthStatus::Healthy;
    let count = |count| if works { quanta(count) } else { Quanta::ZERO };
    let by_uid = |pods: &[GpuPod]| {
        let pods = pods.iter();
        pods.map(|pod| (pod.uid.clone(), quanta(pod.quanta)))
            .collect()
    };
    Gpu {
        uuid: gpu.uuid.clone(),
        capacity: count(gpu.capacity),
        free: count(gpu.free),
        largest_free: count(gpu.largest_free),
        reserved_for: gpu.reserved_for.clone(),
        only_for: gpu.only_for.clone(),
        set_aside: by_uid(&gpu.set_aside),
        pods: by_uid(&gpu.pods),
        // An agent without `podsOmitted` lists at most 32.
        omits_pods: gpu.pods_omitted > 0 || gpu.pods.len() == 32,
    }
}

fn quanta(count: i32) -> Quanta {
    Quanta::new(u64::try_from(count).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn room_is_made_for_waits_for_device_memory_only() {
        let wait = |pod: &str, resource: Option<&str>| {
            let mut wait = json!({ "podUid": pod, "namespace": "n", "pod": pod, "container": "c",
                "quanta": 8, "since": "2026-01-01T00:00:00Z" });
            if let Some(resource) = resource {
                wait["resource"] = json!(resource);
            }
            wait
        };
        let node = json!({
            "metadata": { "name": "n", "uid": "u" }, "spec": {},
            "status": { "quantum": "1Gi", "waiting": [
                wait("device", Some("DeviceMemory")), wait("managed", Some("ManagedMemory")),
                wait("later", Some("OtherMemory")), wait("earlier", None),
            ] },
        });
        let facts = GpuFacts::of(&serde_json::from_value(node).unwrap(), Quantum::Gib1);
        let pods: Vec<_> = facts.pending.iter().map(|wait| wait.pod.as_str()).collect();
        assert_eq!(pods, ["device", "earlier"]);
    }

    #[test]
    fn pod_cut_off_from_a_full_list_may_have_started() {
        let pod = |containers: u32| {
            let resources = json!({ "requests": { "bursar.dev/gpu-memory-gib": "1" } });
            let containers = (0..containers)
                .map(|number| json!({ "name": format!("c{number}"), "resources": resources }));
            let pod = json!({
                "metadata": { "name": "p", "namespace": "n", "uid": "p" },
                "spec": { "containers": containers.collect::<Vec<_>>() },
            });
            PodFacts::of(&serde_json::from_value(pod).unwrap(), Quantum::Gib1).unwrap()
        };
        let others = |omitted: u32| {
            let gpu = json!({
                "uuid": "GPU-a", "index": 0, "model": "m", "memory": "16Gi", "state": "Active",
                "generation": 1, "health": { "status": "Healthy", "reason": "Ok" },
                "capacity": 16, "free": 0, "largestFree": 0,
                "pods": [{ "uid": "other", "quanta": 1 }], "podsOmitted": omitted,
            });
            let node = json!({
                "metadata": { "name": "n", "uid": "u" }, "spec": {},
                "status": { "quantum": "1Gi", "gpus": [gpu] },
            });
            GpuFacts::of(&serde_json::from_value(node).unwrap(), Quantum::Gib1)
        };
        assert!(!others(0).has_possibly_started(&pod(2)));
        assert!(others(1).has_possibly_started(&pod(2)));
        assert!(!others(1).has_possibly_started(&pod(1)));
    }
}
