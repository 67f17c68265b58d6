//! Parses the fields of a Node that the operator reads, and no others.

use std::collections::BTreeMap;

use bursar_crds::Quantum;
use bursar_crds::quantity::parse_bytes;
use k8s_openapi::api::core::v1::{Node, NodeCondition, Taint};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::Resource;
use kube::core::ObjectMeta;
use serde::Deserialize;

use crate::quanta::Quanta;

/// The fields of a Node that the operator reads. The parser skips all others.
#[derive(Resource, Deserialize, Clone, Debug, Default)]
#[resource(inherit = Node)]
#[expect(missing_docs, reason = "the names are the Node's own")]
pub struct SlimNode {
    #[serde(deserialize_with = "crate::cluster::slim_metadata::metadata")]
    pub metadata: ObjectMeta,
    #[serde(default)]
    pub spec: NodeSpec,
    #[serde(default)]
    pub status: NodeStatus,
}

/// `spec`.
#[derive(Deserialize, Clone, Debug, Default)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "the names are the Node's own")]
pub struct NodeSpec {
    pub taints: Vec<Taint>,
    pub unschedulable: bool,
}

/// `status`.
#[derive(Deserialize, Clone, Debug, Default)]
#[serde(rename_all = "camelCase", default)]
#[expect(missing_docs, reason = "the names are the Node's own")]
pub struct NodeStatus {
    pub allocatable: BTreeMap<String, Quantity>,
    pub conditions: Vec<NodeCondition>,
}

impl SlimNode {
    /// Whether the node's condition `Ready` is True.
    pub fn is_ready(&self) -> bool {
        let mut conditions = self.status.conditions.iter();
        conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
    }

    /// The device memory that the kubelet advertises as allocatable.
    pub fn allocatable(&self, quantum: Quantum) -> Quanta {
        let allocatable = self.status.allocatable.get(quantum.device_memory());
        let allocatable = allocatable.and_then(|count| parse_bytes(&count.0).ok());
        Quanta::new(allocatable.unwrap_or(0))
    }
}
