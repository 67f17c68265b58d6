//! Reduces a pod that requests GPU memory to what budgets and the planner need.

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::sync::Arc;

use bursar_crds::Quantum;
use bursar_crds::gpu_node::GPUS_ANNOTATION;
use bursar_crds::resources::BORROWED_PRIORITY_CLASS;
use k8s_openapi::api::core::v1::{NodeSelector, PodCondition, Toleration};
use k8s_openapi::jiff::Timestamp;

use super::node_usage::PodRequests;
use super::pod_on_node::PodOnNode;
use crate::cluster::facts::pod_request::{
    aggregate_requests, gpu_request, has_ended, mirrored_uid,
};
use crate::cluster::on_node::Placed;
use crate::cluster::slim_pod::{Container, PodSpec, SlimPod};
use crate::quanta::Quanta;

/// The scheduler of pods that name none.
const SCHEDULER: &str = "default-scheduler";

/// The labels that the chart gives an agent.
const AGENT_LABELS: [(&str, &str); 2] = [
    ("app.kubernetes.io/name", "bursar"),
    ("app.kubernetes.io/component", "agent"),
];

/// The facts that the operator keeps of a pod that has not ended.
#[derive(Clone, Debug, PartialEq)]
pub struct PodSummary {
    /// The pod's node, and what it requests there beside device memory.
    pub requests: PodRequests,
    /// The pod, if it requests GPU memory.
    pub facts: Option<Arc<PodFacts>>,
    /// The settings for the agent, if the pod is on a node and requests a resource of Bursar.
    pub on_node: Option<Box<PodOnNode>>,
    /// Whether the pod has the agents' labels, and is Ready. Its namespace is not compared.
    pub is_ready_agent: bool,
}

impl PodSummary {
    /// The summary of `pod`. `None` when it has ended.
    pub fn of(pod: &SlimPod, quantum: Quantum) -> Option<Self> {
        Some(Self {
            requests: PodRequests::parse(pod, quantum)?,
            facts: PodFacts::of(pod, quantum).map(Arc::new),
            on_node: PodOnNode::of(pod).map(Box::new),
            is_ready_agent: is_agent(pod) && is_ready(pod),
        })
    }

    /// The summary of a pod that requests this much, and nothing else.
    #[cfg(test)]
    pub(crate) fn of_facts(facts: PodFacts) -> Self {
        let node = facts.node().map(str::to_owned);
        Self {
            requests: PodRequests {
                node,
                milli: Box::default(),
            },
            facts: Some(Arc::new(facts)),
            on_node: None,
            is_ready_agent: false,
        }
    }

    /// Whether the pod requests a resource of Bursar.
    pub(crate) fn requests_gpu_memory(&self) -> bool {
        self.facts.is_some() || self.on_node.is_some()
    }
}

/// A reference to the Job that controls a pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct JobRef {
    /// The Job's name.
    pub name: String,
    /// The Job's UID.
    pub uid: String,
}

/// The kind of a pod's claim on memory, which its PriorityClass determines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PriorityKind {
    /// The pod's request counts against the namespace's guarantee.
    #[default]
    Guaranteed,
    /// The pod uses idle memory and is preempted when its owner needs it.
    Borrowed,
}

/// A pod that requests GPU memory, device or managed, and has not ended.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(test, derive(Default))]
pub struct PodFacts {
    /// The UID that the node uses. The API server has another one for a static pod's mirror pod.
    pub uid: String,
    /// The pod's UID in the API server.
    pub api_uid: String,
    /// When the API server created the pod.
    pub created: Timestamp,
    /// Whether the request counts against the namespace's guarantee, or borrows idle memory.
    pub kind: PriorityKind,
    /// The device memory of the whole pod.
    pub device: Quanta,
    /// The managed memory of the whole pod.
    pub managed: Quanta,
    /// The requesting containers and sidecars, with their requests.
    pub containers: Vec<(String, Quanta)>,
    /// The containers and sidecars that request managed memory.
    pub managed_containers: Vec<String>,
    /// Whether an init container that ends requests more than each container after it.
    pub has_larger_init: bool,
    /// The priority that admission set.
    pub priority: i32,
    /// Whether the pod may preempt others (`preemptionPolicy`).
    pub preempts: bool,
    /// The pod's node, or whether the scheduler has found none.
    pub placement: Placement,
    /// The pod has a deletion timestamp.
    pub terminating: bool,
    /// The pod's phase is Pending: only init containers may have started.
    pub pending: bool,
    /// The least number of GPUs over which the memory of each container is spread.
    pub min_gpus: u16,
    /// The controller that recreates the pod.
    pub owner: Owner,
    /// The pod's constraints on nodes.
    pub constraints: Constraints,
}

/// Where a pod is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// The pod is bound to this node.
    Node(String),
    /// The scheduler has not bound the pod.
    Unscheduled {
        /// When the scheduler found no node. `None` before its first attempt.
        unschedulable_since: Option<Timestamp>,
        /// The nominated node, on which the scheduler keeps room.
        nominated: Option<String>,
    },
}

/// The controller that recreates a pod after its deletion.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    /// Nothing recreates the pod.
    #[default]
    Unowned,
    /// The node itself: the pod is static.
    Node,
    /// A DaemonSet, on the same node.
    DaemonSet,
    /// A Job, which may count the deletion as a failure.
    Job(JobRef),
    /// Another controller.
    Other {
        /// The controller's UID.
        uid: String,
    },
}

impl Owner {
    /// The controller's UID, if the replacement may be on another node.
    pub(crate) fn relocatable_uid(&self) -> Option<&str> {
        match self {
            Self::Job(JobRef { uid, .. }) | Self::Other { uid } => Some(uid),
            Self::Unowned | Self::Node | Self::DaemonSet => None,
        }
    }
}

/// A pod's constraints on nodes, as far as the operator evaluates them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Constraints {
    /// `nodeSelector`.
    pub selector: BTreeMap<String, String>,
    /// The required node affinity.
    pub affinity: Option<NodeSelector>,
    /// The pod's tolerations.
    pub tolerations: Vec<Toleration>,
    /// The pod has constraints that the operator does not evaluate. They are persistent or
    /// ephemeral volumes, resource claims, required affinity to other pods, topology spread, host
    /// ports or another scheduler. No node passes for such a pod.
    pub unsupported: bool,
}

impl PodFacts {
    /// The facts of `pod`, whose request counts in `quantum`. `None` when it requests no GPU memory
    /// or has ended.
    ///
    /// A pod's request returns to its namespace with its final phase. That of a deleted pod returns
    /// when the object is gone.
    pub fn of(pod: &SlimPod, quantum: Quantum) -> Option<Self> {
        if has_ended(pod) {
            return None;
        }
        let (meta, spec) = (&pod.metadata, &pod.spec);
        let quanta = |resource| {
            let of_container = |container: &Container| gpu_request(container, resource);
            aggregate_requests(spec, of_container, Quanta::plus)
        };
        let device = quanta(quantum.device_memory());
        let managed = quanta(quantum.managed_memory());
        if device == Quanta::ZERO && managed == Quanta::ZERO {
            return None;
        }
        let annotation = |name| meta.annotations.as_ref().and_then(|all| all.get(name));
        let mirrored = mirrored_uid(meta);
        let created = meta.creation_timestamp.as_ref();
        let borrows = spec.priority_class_name.as_deref() == Some(BORROWED_PRIORITY_CLASS);
        Some(Self {
            uid: mirrored.or(meta.uid.as_ref()).cloned().unwrap_or_default(),
            api_uid: meta.uid.clone().unwrap_or_default(),
            created: created.map_or(Timestamp::UNIX_EPOCH, |time| time.0),
            kind: match borrows {
                true => PriorityKind::Borrowed,
                false => PriorityKind::Guaranteed,
            },
            device,
            managed,
            containers: requesting_containers(spec, quantum.device_memory()).collect(),
            managed_containers: requesting_containers(spec, quantum.managed_memory())
                .map(|(name, _)| name)
                .collect(),
            has_larger_init: has_larger_init(spec, quantum),
            priority: spec.priority.unwrap_or(0),
            preempts: spec.preemption_policy.as_deref() != Some("Never"),
            placement: Placement::of(pod),
            terminating: meta.deletion_timestamp.is_some(),
            pending: matches!(pod.status.phase.as_deref(), None | Some("Pending")),
            min_gpus: annotation(GPUS_ANNOTATION)
                .and_then(|gpus| gpus.parse::<NonZeroU16>().ok())
                .map_or(1, NonZeroU16::get),
            owner: owner(pod, mirrored.is_some()),
            constraints: Constraints {
                selector: spec.node_selector.clone(),
                affinity: spec.affinity.node_affinity.required.clone(),
                tolerations: spec.tolerations.clone(),
                unsupported: has_unsupported_constraints(spec),
            },
        })
    }

    /// Whether the memory of the containers is all that the pod needs, wherever they are. No init
    /// container needs more than they have together, or than one of them has.
    pub(crate) fn is_sum_of_containers(&self) -> bool {
        let containers = self.containers.iter().map(|(_, quanta)| *quanta);
        !self.has_larger_init && containers.sum::<Quanta>() == self.device
    }

    /// The Job that controls the pod. The Job may count a deletion as a failure.
    pub fn job(&self) -> Option<&JobRef> {
        match &self.owner {
            Owner::Job(job) => Some(job),
            _ => None,
        }
    }

    /// The Job that the operator must read before it evicts the pod. A borrowed pod has none,
    /// because its PriorityClass consents to the eviction.
    pub fn job_if_guaranteed(&self) -> Option<&JobRef> {
        self.job().filter(|_| self.kind == PriorityKind::Guaranteed)
    }

    /// Whether a controller recreates the pod after its deletion, possibly on another node.
    pub fn is_recreated(&self) -> bool {
        !matches!(self.owner, Owner::Unowned | Owner::Node)
    }

    /// The node that the pod is bound to.
    pub fn node(&self) -> Option<&str> {
        match &self.placement {
            Placement::Node(node) => Some(node),
            Placement::Unscheduled { .. } => None,
        }
    }
}

impl Placed for PodFacts {
    fn node(&self) -> Option<&str> {
        self.node()
    }
}

#[cfg(test)]
impl Default for Placement {
    fn default() -> Self {
        Self::Unscheduled {
            unschedulable_since: None,
            nominated: None,
        }
    }
}

impl Placement {
    fn of(pod: &SlimPod) -> Self {
        match &pod.spec.node_name {
            Some(node) if !node.is_empty() => Self::Node(node.clone()),
            _ => Self::Unscheduled {
                unschedulable_since: unschedulable_since(&pod.status.conditions),
                nominated: pod.status.nominated_node_name.clone(),
            },
        }
    }
}

/// The containers and sidecars that request a resource, with their requests.
fn requesting_containers<'a>(
    spec: &'a PodSpec,
    resource: &'a str,
) -> impl Iterator<Item = (String, Quanta)> + 'a {
    let sidecars = spec
        .init_containers
        .iter()
        .filter(|container| container.is_sidecar());
    let running = spec.containers.iter().chain(sidecars);
    running.filter_map(move |container| {
        let quanta = gpu_request(container, resource);
        (quanta != Quanta::ZERO).then(|| (container.name.clone(), quanta))
    })
}

/// Whether an init container that ends requests more than each container after it.
fn has_larger_init(spec: &PodSpec, quantum: Quantum) -> bool {
    let request = |container: &Container| gpu_request(container, quantum.device_memory());
    let ending = spec
        .init_containers
        .iter()
        .filter(|container| !container.is_sidecar());
    ending.map(request).max() > spec.containers.iter().map(request).max()
}

/// Whether a pod has constraints on nodes that the operator does not evaluate.
fn has_unsupported_constraints(spec: &PodSpec) -> bool {
    let affinity = &spec.affinity;
    let mut spreads = spec.topology_spread_constraints.iter();
    let mut volumes = spec.volumes.iter();
    let mut ports = spec
        .containers
        .iter()
        .chain(&spec.init_containers)
        .flat_map(|container| &container.ports);
    let scheduler = spec.scheduler_name.as_ref();
    !affinity.pod_affinity.required.is_empty()
        || !affinity.pod_anti_affinity.required.is_empty()
        || spreads.any(|spread| spread.when_unsatisfiable == "DoNotSchedule")
        || volumes
            .any(|volume| volume.persistent_volume_claim.is_some() || volume.ephemeral.is_some())
        || !spec.resource_claims.is_empty()
        || ports.any(|port| port.host_port.is_some_and(|port| port != 0))
        || scheduler.is_some_and(|name| name != SCHEDULER)
}

/// When the scheduler found no node; the epoch where the condition has no time.
fn unschedulable_since(conditions: &[PodCondition]) -> Option<Timestamp> {
    let scheduled = conditions
        .iter()
        .find(|condition| condition.type_ == "PodScheduled" && condition.status == "False")?;
    let refused = scheduled.reason.as_deref() == Some("Unschedulable");
    let since = scheduled.last_transition_time.as_ref();
    refused.then(|| since.map_or(Timestamp::UNIX_EPOCH, |time| time.0))
}

fn is_agent(pod: &SlimPod) -> bool {
    let labels = pod.metadata.labels.as_ref();
    let has = |(label, value): &(&str, &str)| {
        labels.is_some_and(|labels| labels.get(*label).is_some_and(|of| of == value))
    };
    AGENT_LABELS.iter().all(has)
}

fn is_ready(pod: &SlimPod) -> bool {
    let mut conditions = pod.status.conditions.iter();
    conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn owner(pod: &SlimPod, mirror: bool) -> Owner {
    let mut owners = pod.metadata.owner_references.iter().flatten();
    let controller = owners.find(|owner| owner.controller == Some(true));
    match controller {
        _ if mirror => Owner::Node,
        None => Owner::Unowned,
        Some(owner) => match owner.kind.as_str() {
            // Any creator of a pod can set this reference, and nothing recreates such a pod.
            "Node" => Owner::Unowned,
            "DaemonSet" => Owner::DaemonSet,
            "Job" => Owner::Job(JobRef {
                name: owner.name.clone(),
                uid: owner.uid.clone(),
            }),
            _ => Owner::Other {
                uid: owner.uid.clone(),
            },
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn facts(meta: Value, spec: Value, status: Value) -> PodFacts {
        let mut pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": "p", "namespace": "n", "uid": "u" },
            "spec": { "containers": [
                { "name": "c", "resources": { "requests": { "bursar.dev/gpu-memory-gib": "4" } } },
                { "name": "web" },
            ] },
            "status": status,
        });
        for (part, more) in [("metadata", meta), ("spec", spec)] {
            for (key, value) in more.as_object().unwrap() {
                pod[part][key] = value.clone();
            }
        }
        PodFacts::of(&serde_json::from_value(pod).unwrap(), Quantum::Gib1).unwrap()
    }

    #[test]
    fn unscheduled_pod_has_refusal_time_and_nomination() {
        let status = json!({ "phase": "Pending", "nominatedNodeName": "n1", "conditions": [
            { "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "lastTransitionTime": "1970-01-01T00:00:09Z" }] });
        let place = facts(json!({}), json!({}), status).placement;
        let unschedulable_since = Some(Timestamp::from_second(9).unwrap());
        let nominated = Some("n1".to_owned());
        assert_eq!(
            place,
            Placement::Unscheduled {
                unschedulable_since,
                nominated
            }
        );
        let gated = json!({ "conditions": [{ "type": "PodScheduled", "status": "False", "reason": "SchedulingGated" }] });
        let place = facts(json!({}), json!({}), gated).placement;
        assert_eq!(
            place,
            Placement::Unscheduled {
                unschedulable_since: None,
                nominated: None
            }
        );
    }

    #[test]
    fn owner_is_read_from_the_controller_reference() {
        let owned = |kind: &str| {
            let owner = json!([{ "apiVersion": "v1", "kind": kind, "name": "o", "uid": "ou", "controller": true }]);
            facts(json!({ "ownerReferences": owner }), json!({}), json!({})).owner
        };
        assert_eq!(facts(json!({}), json!({}), json!({})).owner, Owner::Unowned);
        assert_eq!(owned("DaemonSet"), Owner::DaemonSet);
        assert_eq!(
            owned("Node"),
            Owner::Unowned,
            "an annotation tells of those"
        );
        assert!(matches!(owned("Job"), Owner::Job(_)));
        assert!(matches!(owned("ReplicaSet"), Owner::Other { .. }));
    }

    #[test]
    fn static_pod_has_the_uid_its_node_knows() {
        let mirror = |owner: &str| {
            let meta = json!({ "annotations": { "kubernetes.io/config.mirror": "5e1f" }, "ownerReferences": [
                { "apiVersion": "v1", "kind": owner, "name": "o", "uid": "ou", "controller": true }] });
            let facts = facts(meta, json!({ "nodeName": "n1" }), json!({}));
            (facts.uid, facts.owner)
        };
        assert_eq!(mirror("Node"), ("5e1f".to_owned(), Owner::Node));
        assert_eq!(mirror("DaemonSet"), ("u".to_owned(), Owner::DaemonSet));
    }

    #[test]
    fn containers_with_managed_memory_are_named() {
        let container = |name: &str, managed: &str| {
            let requests = json!({ "bursar.dev/gpu-memory-gib": "4", "bursar.dev/managed-memory-gib": managed });
            json!({ "name": name, "restartPolicy": "Always", "resources": { "requests": requests } })
        };
        let spec = json!({
            "containers": [container("covered", "0"), container("more", "8")],
            "initContainers": [container("sidecar", "1")],
        });
        let facts = facts(json!({}), spec, json!({}));
        assert_eq!(facts.containers.len(), 3);
        assert_eq!(facts.managed_containers, ["more", "sidecar"]);
    }

    #[test]
    fn unsupported_constraints_are_detected() {
        let more = |spec| facts(json!({}), spec, json!({})).constraints.unsupported;
        assert!(!more(
            json!({ "volumes": [{ "name": "v", "emptyDir": {} }] })
        ));
        assert!(more(
            json!({ "volumes": [{ "name": "v", "persistentVolumeClaim": { "claimName": "c" } }] })
        ));
        let anti_affinity = json!({ "podAntiAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": [
            { "topologyKey": "kubernetes.io/hostname" }] } });
        assert!(more(json!({ "affinity": anti_affinity })));
        assert!(more(json!({ "topologySpreadConstraints": [
            { "maxSkew": 1, "topologyKey": "z", "whenUnsatisfiable": "DoNotSchedule" }] })));
        assert!(more(json!({ "resourceClaims": [{ "name": "nic" }] })));
        assert!(more(json!({ "schedulerName": "mine" })));
        assert!(!more(json!({ "schedulerName": "default-scheduler" })));
        let listens = |port| {
            let resources = json!({ "requests": { "bursar.dev/gpu-memory-gib": "4" } });
            json!({ "containers": [{ "name": "c", "resources": resources, "ports": [port] }] })
        };
        assert!(more(listens(
            json!({ "containerPort": 80, "hostPort": 80 })
        )));
        assert!(!more(listens(json!({ "containerPort": 80 }))));
    }

    #[test]
    fn larger_init_container_has_no_place_beside_containers() {
        let container = |gib: u32, policy: Option<&str>| {
            json!({ "name": format!("c{gib}"), "restartPolicy": policy,
                "resources": { "requests": { "bursar.dev/gpu-memory-gib": gib.to_string() } } })
        };
        let always = Some("Always");
        for (inits, containers, is_sum) in [
            (vec![], vec![4, 4], true),
            (vec![(4, None)], vec![4, 4], true),
            (vec![(6, None)], vec![4, 4], false),
            (vec![(9, None)], vec![4, 4], false),
            (vec![(6, always)], vec![4, 4], true),
            // The sidecar keeps its place while the init container needs another.
            (vec![(6, always), (5, None)], vec![3, 3], false),
        ] {
            let inits = inits.iter().map(|(gib, policy)| container(*gib, *policy));
            let spec = json!({
                "initContainers": inits.collect::<Vec<_>>(),
                "containers": containers.iter().map(|gib| container(*gib, None)).collect::<Vec<_>>(),
            });
            let facts = facts(json!({}), spec.clone(), json!({}));
            assert_eq!(facts.is_sum_of_containers(), is_sum, "{spec}");
        }
    }

    #[test]
    fn only_requesting_containers_are_listed() {
        let facts = facts(json!({}), json!({ "nodeName": "n1" }), json!({}));
        assert_eq!(facts.containers, [("c".to_owned(), Quanta::new(4))]);
        assert_eq!(facts.node(), Some("n1"));
    }
}
