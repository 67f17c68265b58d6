//! Parses the fields of a Pod that the operator reads, and no others.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{NodeSelector, Pod, PodCondition, Toleration};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::Resource;
use kube::core::ObjectMeta;
use serde::Deserialize;
use serde::de::IgnoredAny;

/// The fields of a Pod that the operator reads. The parser skips all others.
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

/// `spec`.
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

/// `spec.affinity`.
#[derive(Deserialize, Clone, Debug, Default)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "the names are the Pod's own")]
pub struct Affinity {
    pub node_affinity: NodeAffinity,
    pub pod_affinity: Required<Vec<IgnoredAny>>,
    pub pod_anti_affinity: Required<Vec<IgnoredAny>>,
}

/// The required node affinity.
pub type NodeAffinity = Required<Option<NodeSelector>>;

/// The required part of an affinity. The preferred part is not parsed.
#[derive(Deserialize, Clone, Debug, Default)]
#[serde(default)]
pub struct Required<T: Default> {
    /// The required terms.
    #[serde(rename = "requiredDuringSchedulingIgnoredDuringExecution")]
    pub required: T,
}

/// A topology spread constraint.
#[derive(Deserialize, Clone, Debug, Default)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "the names are the Pod's own")]
pub struct TopologySpread {
    pub when_unsatisfiable: String,
}

/// A volume, as far as it may bind the pod to a node.
#[derive(Deserialize, Clone, Debug, Default)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "the names are the Pod's own")]
pub struct Volume {
    pub persistent_volume_claim: Option<IgnoredAny>,
    pub ephemeral: Option<IgnoredAny>,
}

/// `status`.
#[derive(Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are the Pod's own")]
pub struct PodStatus {
    pub phase: Option<String>,
    #[serde(rename = "nominatedNodeName")]
    pub nominated_node_name: Option<String>,
    pub conditions: Vec<PodCondition>,
}

/// A container.
#[derive(Deserialize, Clone, Debug, Default)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "the names are the Pod's own")]
pub struct Container {
    pub name: String,
    pub resources: Resources,
    pub restart_policy: Option<String>,
    pub ports: Vec<Port>,
}

/// A container's port.
#[derive(Deserialize, Clone, Debug, Default)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "the names are the Pod's own")]
pub struct Port {
    pub host_port: Option<i32>,
}

/// Resources of a container or a pod. The API server defaults `requests` from `limits`.
#[derive(Deserialize, Clone, Debug, Default)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are the Pod's own")]
pub struct Resources {
    pub requests: BTreeMap<String, Quantity>,
}

impl Container {
    /// Whether an init container runs as long as the pod.
    pub fn is_sidecar(&self) -> bool {
        self.restart_policy.as_deref() == Some("Always")
    }
}
