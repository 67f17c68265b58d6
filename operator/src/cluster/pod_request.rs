//! What a pod asks for.

use std::collections::BTreeMap;

use bursar_crds::Quantum;
use bursar_crds::quantity::{QuantityError, parse_bytes};
use bursar_crds::resources::BORROWED_PRIORITY_CLASS;
use k8s_openapi::api::core::v1::{NodeSelector, Pod, PodCondition, Toleration};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::jiff::Timestamp;
use kube::Resource;
use kube::core::ObjectMeta;
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::cluster::on_node::Placed;
use crate::quanta::Quanta;

/// The fields of a Pod that are read here. The rest of it is not even kept while it is parsed.
#[derive(Resource, Deserialize, Clone, Debug, Default)]
#[resource(inherit = Pod)]
#[expect(missing_docs, reason = "the names are the Pod's own")]
pub struct SlimPod {
    #[serde(deserialize_with = "crate::cluster::slim_metadata::metadata")]
    pub metadata: ObjectMeta,
    #[serde(default)]
    pub spec: PodSpec,
    #[serde(default)]
    pub status: PodStatus,
}

/// Of `spec`.
#[derive(Deserialize, Clone, Debug, Default)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "the names are the Pod's own")]
pub struct PodSpec {
    pub priority_class_name: Option<String>,
    pub containers: Vec<Container>,
    pub init_containers: Vec<Container>,
    pub node_name: Option<String>,
    pub priority: Option<i32>,
    pub preemption_policy: Option<String>,
    pub node_selector: BTreeMap<String, String>,
    pub affinity: Affinity,
    pub tolerations: Vec<Toleration>,
    pub topology_spread_constraints: Vec<TopologySpread>,
    pub volumes: Vec<Volume>,
    pub resources: Resources,
    pub overhead: BTreeMap<String, Quantity>,
    pub resource_claims: Vec<IgnoredAny>,
    pub scheduler_name: Option<String>,
}

/// Of `spec.affinity`.
#[derive(Deserialize, Clone, Debug, Default)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "the names are the Pod's own")]
pub struct Affinity {
    pub node_affinity: NodeAffinity,
    pub pod_affinity: Required<Vec<IgnoredAny>>,
    pub pod_anti_affinity: Required<Vec<IgnoredAny>>,
}

/// The node affinity that must hold.
pub type NodeAffinity = Required<Option<NodeSelector>>;

/// What must hold of an affinity; what is only preferred is not kept.
#[derive(Deserialize, Clone, Debug, Default)]
#[serde(default)]
pub struct Required<T: Default> {
    /// It.
    #[serde(rename = "requiredDuringSchedulingIgnoredDuringExecution")]
    pub required: T,
}

/// Of a topology spread constraint.
#[derive(Deserialize, Clone, Debug, Default)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "the names are the Pod's own")]
pub struct TopologySpread {
    pub when_unsatisfiable: String,
}

/// Of a volume: whether it may bind the pod to a node.
#[derive(Deserialize, Clone, Debug, Default)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "the names are the Pod's own")]
pub struct Volume {
    pub persistent_volume_claim: Option<IgnoredAny>,
    pub ephemeral: Option<IgnoredAny>,
}

/// Of `status`.
#[derive(Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are the Pod's own")]
pub struct PodStatus {
    pub phase: Option<String>,
    #[serde(rename = "nominatedNodeName")]
    pub nominated_node_name: Option<String>,
    pub conditions: Vec<PodCondition>,
}

/// Of a container.
#[derive(Deserialize, Clone, Debug, Default)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "the names are the Pod's own")]
pub struct Container {
    pub name: String,
    pub resources: Resources,
    pub restart_policy: Option<String>,
    pub ports: Vec<Port>,
}

/// Of a container's port.
#[derive(Deserialize, Clone, Debug, Default)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "the names are the Pod's own")]
pub struct Port {
    pub host_port: Option<i32>,
}

/// Of a container's resources, or a pod's. The API server fills `requests` in from `limits`.
#[derive(Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are the Pod's own")]
pub struct Resources {
    pub requests: BTreeMap<String, Quantity>,
}

/// What made a pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct JobRef {
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
}

/// A pod's class, given at birth by its PriorityClass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PriorityKind {
    /// It has what it asks for within the namespace's guarantee.
    Guaranteed,
    /// It runs on what is idle and makes room when that is asked for.
    Borrowed,
}

/// What one pod asks for. Never nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodRequest {
    /// The pod's UID.
    pub uid: String,
    /// When the API server made it.
    pub created: Timestamp,
    /// The node that it is on.
    pub node: Option<String>,
    /// Its end was asked for already.
    pub terminating: bool,
    /// The Job that it belongs to, which may take its deletion for a failure.
    pub job: Option<JobRef>,
    /// Something makes another one when it goes, and may put it elsewhere.
    pub is_recreated: bool,
    /// Its class.
    pub kind: PriorityKind,
    /// Device memory.
    pub device: Quanta,
    /// Managed memory.
    pub managed: Quanta,
}

impl PodRequest {
    /// What `pod` asks for in the resources that count in `quantum`. `None` where it asks for nothing,
    /// or has ended: what a pod held is its namespace's again when its phase says so, and that of a
    /// deleted pod when it is gone.
    pub fn of(pod: &SlimPod, quantum: Quantum) -> Option<Self> {
        if has_ended(pod) {
            return None;
        }
        let borrows = pod.spec.priority_class_name.as_deref() == Some(BORROWED_PRIORITY_CLASS);
        let meta = &pod.metadata;
        let mut owners = meta.owner_references.iter().flatten();
        let controller = owners.find(|owner| owner.controller == Some(true));
        let quanta = |resource| {
            aggregate_requests(
                &pod.spec,
                |container| gpu_request(container, resource),
                Quanta::plus,
            )
        };
        let request = Self {
            uid: meta.uid.clone().unwrap_or_default(),
            created: meta
                .creation_timestamp
                .as_ref()
                .map_or(Timestamp::UNIX_EPOCH, |time| time.0),
            node: pod.spec.node_name.clone(),
            terminating: meta.deletion_timestamp.is_some(),
            is_recreated: controller.is_some_and(|owner| owner.kind != "Node"),
            job: controller
                .filter(|owner| owner.kind == "Job")
                .map(|owner| JobRef {
                    name: owner.name.clone(),
                    uid: owner.uid.clone(),
                }),
            kind: if borrows {
                PriorityKind::Borrowed
            } else {
                PriorityKind::Guaranteed
            },
            device: quanta(quantum.device_memory()),
            managed: quanta(quantum.managed_memory()),
        };
        let asks = request.device != Quanta::ZERO || request.managed != Quanta::ZERO;
        asks.then_some(request)
    }

    /// The Job that is asked before the pod goes for others. A borrower has agreed to that by its
    /// class.
    pub fn job_if_guaranteed(&self) -> Option<&JobRef> {
        self.job
            .as_ref()
            .filter(|_| self.kind == PriorityKind::Guaranteed)
    }
}

impl Placed for PodRequest {
    fn node(&self) -> Option<&str> {
        self.node.as_deref()
    }
}

/// Whether a pod takes nothing any more.
pub fn has_ended(pod: &SlimPod) -> bool {
    matches!(pod.status.phase.as_deref(), Some("Succeeded" | "Failed"))
}

/// How much the scheduler and quotas count for a pod of what each container asks for by `of`
/// (`k8s.io/component-helpers/resource/helpers.go`, `AggregateContainerRequests`): its containers and
/// sidecars together, or the most that one init container needs beside the sidecars before it.
pub fn aggregate_requests<T: Copy + Default + Ord>(
    spec: &PodSpec,
    of: impl Fn(&Container) -> T,
    plus: impl Fn(T, T) -> T,
) -> T {
    let (mut sidecars, mut starting) = (T::default(), T::default());
    for container in &spec.init_containers {
        if container.restart_policy.as_deref() == Some("Always") {
            sidecars = plus(sidecars, of(container));
        } else {
            starting = starting.max(plus(sidecars, of(container)));
        }
    }
    let running = spec.containers.iter().map(of).fold(sidecars, plus);
    starting.max(running)
}

/// How much of `resource` one container asks for.
pub fn gpu_request(container: &Container, resource: &str) -> Quanta {
    let asked = container.resources.requests.get(resource);
    asked.map_or(Quanta::ZERO, parse_count)
}

/// A count out of a pod. The API server admits whole numbers only, of any size.
fn parse_count(count: &Quantity) -> Quanta {
    match parse_bytes(&count.0) {
        Ok(count) => Quanta::new(count),
        Err(QuantityError::TooLarge(_)) => Quanta::MAX,
        Err(_) => Quanta::ZERO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    const GIB: &str = "bursar.dev/gpu-memory-gib";

    fn container(quanta: u64, sidecar: bool) -> serde_json::Value {
        let policy = sidecar.then_some("Always");
        json!({ "name": "c", "restartPolicy": policy, "resources": { "requests": { GIB: quanta.to_string() } } })
    }

    fn pod(init: &[(u64, bool)], app: &[u64]) -> SlimPod {
        let init: Vec<_> = init
            .iter()
            .map(|(n, sidecar)| container(*n, *sidecar))
            .collect();
        let app: Vec<_> = app.iter().map(|n| container(*n, false)).collect();
        serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "p", "namespace": "n" },
            "spec": { "containers": app, "initContainers": init, "nodeName": "elsewhere" },
            "status": { "phase": "Pending", "qosClass": "BestEffort" },
        }))
        .unwrap()
    }

    fn device(pod: &SlimPod) -> i64 {
        PodRequest::of(pod, Quantum::Gib1).map_or(0, |request| request.device.count())
    }

    #[test]
    fn containers_add_up_and_the_largest_init_container_counts() {
        assert_eq!(device(&pod(&[], &[4, 8])), 12);
        assert_eq!(device(&pod(&[(20, false), (6, false)], &[4, 8])), 20);
        assert_eq!(device(&pod(&[(3, false)], &[4, 8])), 12);
    }

    #[test]
    fn sidecar_adds_to_containers_and_later_init_containers() {
        assert_eq!(device(&pod(&[(2, true)], &[4])), 6);
        assert_eq!(device(&pod(&[(2, true), (8, false)], &[4])), 10);
        assert_eq!(device(&pod(&[(8, false), (2, true)], &[4])), 8);
    }

    #[test]
    fn ended_pod_or_one_without_request_is_none() {
        let mut ended = pod(&[], &[4]);
        for phase in ["Succeeded", "Failed"] {
            ended.status.phase = Some(phase.to_owned());
            assert_eq!(PodRequest::of(&ended, Quantum::Gib1), None);
        }
        assert_eq!(PodRequest::of(&pod(&[], &[0]), Quantum::Gib1), None);
        assert_eq!(PodRequest::of(&pod(&[], &[4]), Quantum::Mib512), None);
    }

    #[test]
    fn borrowed_pod_is_known_by_its_priority_class() {
        let mut borrowed = pod(&[], &[4]);
        borrowed.spec.priority_class_name = Some(BORROWED_PRIORITY_CLASS.to_owned());
        let request = PodRequest::of(&borrowed, Quantum::Gib1).unwrap();
        assert_eq!(request.kind, PriorityKind::Borrowed);
    }

    #[test]
    fn oversized_request_counts_as_the_maximum() {
        for text in ["9E", "9223372036854775807", "1e30"] {
            assert_eq!(parse_count(&Quantity(text.to_owned())), Quanta::MAX);
        }
        assert_eq!(parse_count(&Quantity("1k".to_owned())), Quanta::new(1000));
    }

    /// `AggregateContainerRequests` word for word, over one resource.
    fn upstream(init: &[(u64, bool)], app: &[u64]) -> u64 {
        let mut reqs: u64 = app.iter().sum();
        let (mut restartable, mut most) = (0, 0);
        for (asks, sidecar) in init {
            let during = if *sidecar {
                reqs += asks;
                restartable += asks;
                restartable
            } else {
                asks + restartable
            };
            most = most.max(during);
        }
        reqs.max(most)
    }

    proptest! {
        #[test]
        fn request_equals_the_schedulers_computation(
            init in prop::collection::vec((0u64..64, any::<bool>()), 0..6),
            app in prop::collection::vec(0u64..64, 1..6),
        ) {
            let counted = device(&pod(&init, &app));
            prop_assert_eq!(counted.unsigned_abs(), upstream(&init, &app));
        }
    }
}
