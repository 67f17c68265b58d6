//! Defines the parts of Kubernetes objects that the commands use.
//!
//! These types keep a list of 10,000 pods small. `support` writes them too, so that an archive has
//! no environment variable, argument or annotation of a tenant.

use std::collections::BTreeMap;

use bursar_crds::resources::{BORROWED_PRIORITY_CLASS, Quantum};
use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// Amounts by resource name, as Kubernetes writes them.
pub type Amounts = BTreeMap<String, String>;

/// An object's metadata.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Meta {
    /// The name.
    pub name: String,
    /// The namespace; empty for an object of the cluster.
    pub namespace: String,
    /// The UID.
    pub uid: String,
    /// The version that a patch has to meet.
    #[serde(skip_serializing)]
    pub resource_version: String,
    /// The generation of the spec.
    pub generation: i64,
    /// The time of the creation.
    pub creation_timestamp: Option<Timestamp>,
    /// The time at which a terminating object is gone at the latest.
    pub deletion_timestamp: Option<Timestamp>,
    /// The labels.
    pub labels: BTreeMap<String, String>,
    /// The owners.
    pub owner_references: Vec<Owner>,
}

/// The reference to an owner.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Owner {
    /// The kind.
    pub kind: String,
    /// The name.
    pub name: String,
    /// The UID.
    pub uid: String,
    /// Whether the owner is the controller.
    pub controller: bool,
}

/// An object of which only metadata matter.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Named {
    /// The metadata.
    pub metadata: Meta,
}

/// A pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pod {
    /// The metadata.
    pub metadata: Meta,
    /// The spec.
    pub spec: PodSpec,
    /// The status.
    pub status: PodStatus,
}

/// A pod's spec.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodSpec {
    /// The node; empty before the scheduler has chosen.
    pub node_name: String,
    /// The priority.
    pub priority: i32,
    /// The priority class.
    pub priority_class_name: String,
    /// Init containers.
    pub init_containers: Vec<Container>,
    /// Containers.
    pub containers: Vec<Container>,
}

/// A container's spec.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Container {
    /// The name.
    pub name: String,
    /// The image.
    pub image: String,
    /// The resources.
    pub resources: Resources,
    /// The ports.
    pub ports: Vec<Port>,
}

/// A port of a container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Port {
    /// The name.
    pub name: String,
    /// The number.
    pub container_port: u16,
}

/// A container's resources.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Resources {
    /// The limits.
    pub limits: Amounts,
}

/// A pod's status.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodStatus {
    /// The phase.
    pub phase: String,
    /// The reason of a failed pod.
    pub reason: String,
    /// The message of a failed pod.
    pub message: String,
    /// The node for which the scheduler or the operator holds room.
    pub nominated_node_name: String,
    /// The conditions.
    pub conditions: Vec<Condition>,
    /// The states of init containers.
    pub init_container_statuses: Vec<ContainerStatus>,
    /// The states of containers.
    pub container_statuses: Vec<ContainerStatus>,
}

/// A condition of any object.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Condition {
    /// The type.
    #[serde(rename = "type")]
    pub type_: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// The reason as one word.
    pub reason: String,
    /// The message.
    pub message: String,
    /// The time of the last change of the status.
    pub last_transition_time: Option<Timestamp>,
}

/// The state of a container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerStatus {
    /// The name.
    pub name: String,
    /// Starts after the first.
    pub restart_count: i32,
    /// The present state.
    pub state: ContainerState,
    /// The state before the last restart.
    pub last_state: ContainerState,
}

/// One of three states.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ContainerState {
    /// The container waits.
    pub waiting: Option<StateReason>,
    /// The container runs.
    pub running: Option<Running>,
    /// The container has ended.
    pub terminated: Option<StateReason>,
}

/// The reason of a state.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct StateReason {
    /// The reason as one word.
    pub reason: String,
    /// The message.
    pub message: String,
    /// The exit code of a container that has ended.
    pub exit_code: i32,
}

/// The state of a running container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Running {
    /// The time of the start.
    pub started_at: Option<Timestamp>,
}

/// The quanta that a container requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The number of quanta.
    pub quanta: i64,
    /// The size of one.
    pub quantum: Quantum,
}

impl Request {
    /// The bytes.
    pub fn bytes(self) -> u64 {
        u64::try_from(self.quanta)
            .unwrap_or(0)
            .saturating_mul(self.quantum.bytes())
    }
}

/// Every quantum that a cluster may use.
pub const QUANTA: [Quantum; 3] = [Quantum::Gib1, Quantum::Mib512, Quantum::Mib256];

impl Container {
    /// The device memory that the container requests.
    pub fn device_memory(&self) -> Option<Request> {
        QUANTA.into_iter().find_map(|quantum| {
            let text = self.resources.limits.get(quantum.device_memory())?;
            let quanta = bursar_crds::quantity::parse_bytes(text).ok()?;
            let quanta = i64::try_from(quanta).ok()?;
            Some(Request { quanta, quantum })
        })
    }
}

impl Pod {
    /// The containers that request device memory, with their requests.
    pub fn gpu_containers(&self) -> impl Iterator<Item = (&Container, Request)> {
        let all = self
            .spec
            .init_containers
            .iter()
            .chain(&self.spec.containers);
        all.filter_map(|container| Some((container, container.device_memory()?)))
    }

    /// The device memory that the pod requests: the sum of its containers.
    pub fn device_memory(&self) -> u64 {
        let containers = self.spec.containers.iter();
        containers
            .filter_map(|container| Some(container.device_memory()?.bytes()))
            .sum()
    }

    /// `namespace/name`.
    pub fn key(&self) -> String {
        self.metadata.key()
    }

    /// Whether the pod is a borrower.
    pub fn borrows(&self) -> bool {
        self.spec.priority_class_name == BORROWED_PRIORITY_CLASS
    }

    /// Whether the pod has ended.
    pub fn has_ended(&self) -> bool {
        matches!(self.status.phase.as_str(), "Succeeded" | "Failed")
    }

    /// The states of all containers.
    pub fn container_statuses(&self) -> impl Iterator<Item = &ContainerStatus> {
        let status = &self.status;
        status
            .init_container_statuses
            .iter()
            .chain(&status.container_statuses)
    }

    /// The message of a waiting container that names its wait for GPU memory.
    pub fn wait_message(&self) -> Option<&str> {
        self.container_statuses().find_map(|status| {
            let waiting = status.state.waiting.as_ref()?;
            let at = waiting.message.find("waiting for ")?;
            Some(&waiting.message[at..])
        })
    }
}

impl Meta {
    /// `namespace/name`, or the name of an object of the cluster.
    pub fn key(&self) -> String {
        if self.namespace.is_empty() {
            self.name.clone()
        } else {
            format!("{}/{}", self.namespace, self.name)
        }
    }

    /// Whether an object with this UID is the controller.
    pub fn is_controlled_by(&self, uid: &str) -> bool {
        let mut owners = self.owner_references.iter();
        owners.any(|owner| owner.controller && owner.uid == uid)
    }
}

/// A node of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Node {
    /// The metadata.
    pub metadata: Meta,
    /// The spec.
    pub spec: NodeSpec,
    /// The status.
    pub status: NodeStatus,
}

/// A node's spec.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeSpec {
    /// Whether the node is cordoned.
    pub unschedulable: bool,
}

/// A node's status.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeStatus {
    /// What pods may request together.
    pub allocatable: Amounts,
    /// The conditions.
    pub conditions: Vec<Condition>,
    /// Versions.
    pub node_info: NodeInfo,
}

/// A node's versions.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeInfo {
    /// The boot.
    #[serde(rename = "bootID")]
    pub boot_id: String,
    /// Such as `containerd://2.0.1`.
    pub container_runtime_version: String,
    /// The kubelet's version.
    pub kubelet_version: String,
}

impl Node {
    /// Whether the kubelet reports the node as ready.
    pub fn is_ready(&self) -> bool {
        let mut conditions = self.status.conditions.iter();
        conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
    }

    /// The resources of another plugin's GPUs, with their amounts.
    pub fn foreign_gpus(&self) -> Vec<(&str, &str)> {
        let all = self.status.allocatable.iter();
        all.filter(|(name, amount)| {
            let is_gpu = *name == "nvidia.com/gpu"
                || name.starts_with("nvidia.com/gpu.")
                || name.starts_with("nvidia.com/mig-");
            is_gpu && *amount != "0"
        })
        .map(|(name, amount)| (name.as_str(), amount.as_str()))
        .collect()
    }
}

/// A ResourceQuota.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Quota {
    /// The metadata.
    pub metadata: Meta,
    /// The amounts in force.
    pub status: QuotaStatus,
}

/// A ResourceQuota's status.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct QuotaStatus {
    /// The most that pods may request.
    pub hard: Amounts,
    /// What pods request.
    pub used: Amounts,
}

/// An Event of the core API.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Event {
    /// The metadata.
    pub metadata: Meta,
    /// The object.
    pub involved_object: ObjectRef,
    /// Another object, such as the victim for a waiting pod.
    pub related: ObjectRef,
    /// The reason as one word.
    pub reason: String,
    /// The message.
    pub message: String,
    /// `Normal` or `Warning`.
    #[serde(rename = "type")]
    pub type_: String,
    /// The time of the first occurrence of an Event of `events.k8s.io`.
    pub event_time: Option<Timestamp>,
    /// The time of the last occurrence of an older Event.
    pub last_timestamp: Option<Timestamp>,
    /// The number of occurrences of an older Event.
    pub count: i64,
    /// Further occurrences.
    pub series: Option<Series>,
    /// The writer.
    pub reporting_component: String,
    /// The writer's instance: an agent's node.
    pub reporting_instance: String,
}

/// The object of an Event.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ObjectRef {
    /// The kind.
    pub kind: String,
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
    /// The UID.
    pub uid: String,
}

/// Further occurrences of an Event.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Series {
    /// The number.
    pub count: i64,
    /// The time of the last.
    pub last_observed_time: Option<Timestamp>,
}

impl Event {
    /// The time of the last occurrence.
    pub fn time(&self) -> Option<Timestamp> {
        let series = self.series.as_ref();
        series
            .and_then(|series| series.last_observed_time)
            .or(self.last_timestamp)
            .or(self.event_time)
            .or(self.metadata.creation_timestamp)
    }

    /// The number of occurrences.
    pub fn occurrences(&self) -> i64 {
        let series = self.series.as_ref().map_or(0, |series| series.count);
        series.max(self.count).max(1)
    }
}

/// An object that creates pods: a ReplicaSet, Deployment, StatefulSet, DaemonSet or Job.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Workload {
    /// The metadata.
    pub metadata: Meta,
    /// The spec.
    pub spec: WorkloadSpec,
    /// The status.
    pub status: WorkloadStatus,
}

/// A workload's spec.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkloadSpec {
    /// The wanted pods; 1 when absent.
    pub replicas: Option<i64>,
    /// The wanted pods of a Job at a time; 1 when absent.
    pub parallelism: Option<i64>,
    /// Whether a Job is suspended.
    pub suspend: bool,
    /// The pods that are made.
    pub template: Template,
}

/// The template of a workload's pods.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Template {
    /// The pods' metadata.
    pub metadata: Meta,
    /// The pods' spec.
    pub spec: PodSpec,
}

/// A workload's status.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct WorkloadStatus {
    /// Existing pods.
    pub replicas: i64,
    /// Ready pods.
    pub ready_replicas: i64,
    /// Pods of a Job that have not ended.
    pub active: i64,
    /// Pods of a Job that have succeeded.
    pub succeeded: i64,
    /// Nodes that should run a DaemonSet's pod.
    pub desired_number_scheduled: i64,
    /// Nodes that run a DaemonSet's pod.
    pub current_number_scheduled: i64,
    /// Nodes that run the newest pod of a DaemonSet.
    pub updated_number_scheduled: i64,
    /// Nodes whose DaemonSet pod is ready.
    pub number_ready: i64,
}

/// The Lease that a kubelet renews.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Lease {
    /// The metadata.
    pub metadata: Meta,
    /// The spec.
    pub spec: LeaseSpec,
}

/// A Lease's spec.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LeaseSpec {
    /// The time of the last renewal, by the holder's clock.
    pub renew_time: Option<Timestamp>,
}
