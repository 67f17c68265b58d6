//! Defines the parts of pods.

use bursar_crds::pod_total::pod_total;
use bursar_crds::quantity::parse_count;
use bursar_crds::resources::{BORROWED_PRIORITY_CLASS, GPU_COMPUTE, Quantum};
use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{Amounts, Condition, Meta};

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
#[serde(rename_all = "camelCase", default)]
pub struct Container {
    /// The name.
    pub name: String,
    /// The image.
    pub image: String,
    /// The resources.
    pub resources: Resources,
    /// The ports.
    pub ports: Vec<Port>,
    /// `Always` makes an init container a sidecar.
    pub restart_policy: String,
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
    /// When the kubelet admitted the pod.
    pub start_time: Option<Timestamp>,
    /// The conditions.
    pub conditions: Vec<Condition>,
    /// The states of init containers.
    pub init_container_statuses: Vec<ContainerStatus>,
    /// The states of containers.
    pub container_statuses: Vec<ContainerStatus>,
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
        self.request(Quantum::device_memory)
    }

    /// The managed memory that the container requests.
    pub fn managed_memory(&self) -> Option<Request> {
        self.request(Quantum::managed_memory)
    }

    /// The hundredths of a GPU's compute time that the container requests.
    pub fn compute_weight(&self) -> Option<u64> {
        let weight = parse_count(self.resources.limits.get(GPU_COMPUTE)?);
        (weight > 0).then_some(weight)
    }

    fn request(&self, resource: fn(Quantum) -> &'static str) -> Option<Request> {
        QUANTA.into_iter().find_map(|quantum| {
            let text = self.resources.limits.get(resource(quantum))?;
            let quanta = i64::try_from(parse_count(text)).ok();
            let quanta = quanta.filter(|quanta| *quanta > 0)?;
            Some(Request { quanta, quantum })
        })
    }
}

impl Pod {
    /// The init containers, and then the containers.
    pub fn all_containers(&self) -> impl Iterator<Item = &Container> {
        self.spec
            .init_containers
            .iter()
            .chain(&self.spec.containers)
    }

    /// The containers that run with the pod: sidecars, and then the containers.
    pub fn running_containers(&self) -> impl Iterator<Item = &Container> {
        let init_containers = self.spec.init_containers.iter();
        init_containers
            .filter(|container| container.restart_policy == "Always")
            .chain(&self.spec.containers)
    }

    /// The containers that request device memory, with their requests.
    pub fn gpu_containers(&self) -> impl Iterator<Item = (&Container, Request)> {
        self.all_containers()
            .filter_map(|container| Some((container, container.device_memory()?)))
    }

    /// The device memory that the pod requests.
    pub fn device_memory(&self) -> u64 {
        let bytes = |container: &Container| container.device_memory().map_or(0, Request::bytes);
        let init = self.spec.init_containers.iter();
        let init = init.map(|container| (container.restart_policy == "Always", bytes(container)));
        let containers = self.spec.containers.iter().map(bytes);
        pod_total(init, containers, u64::saturating_add)
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

    /// Whether the kubelet reports the pod as ready.
    pub fn is_ready(&self) -> bool {
        let mut conditions = self.status.conditions.iter();
        conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_beyond_any_gpu_counts_as_one() {
        let limits = [(
            "bursar.dev/gpu-memory-gib".to_owned(),
            "999999999999999999999".to_owned(),
        )];
        let container = Container {
            resources: Resources {
                limits: limits.into(),
            },
            ..Container::default()
        };
        assert!(container.device_memory().is_some(), "it waits for ever");
    }
}
