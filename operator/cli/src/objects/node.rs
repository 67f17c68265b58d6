//! Defines the parts of nodes.

use serde::{Deserialize, Serialize};

use super::{Amounts, Condition, Meta};

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
    /// The memory that pods may request together.
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
