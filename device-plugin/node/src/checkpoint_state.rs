//! Defines the content of the node's checkpoint.

use std::collections::BTreeMap;

use bursar_ledger::Snapshot;
use bursar_ledger::units::AllocationId;
use serde::{Deserialize, Serialize};

/// The state that an agent leaves to the next agent of the same boot.
///
/// Where the checkpoint is missing or malformed, the next agent restores bindings from the CDI
/// files and the kubelet's checkpoint. An agent ignores fields that it does not know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct NodeCheckpoint {
    /// The kernel's boot id. Times and bindings are void after a reboot, so an agent of another
    /// boot ignores the checkpoint.
    pub boot: String,
    /// The ledger's state.
    pub ledger: Snapshot,
    /// The containers' names, as far as they are known. The file keeps its first name for them.
    #[serde(rename = "holders")]
    pub container_names: BTreeMap<AllocationId, ContainerName>,
}

/// The names of an allocation's container and pod, for messages and metrics.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ContainerName {
    /// The container's name.
    pub container: String,
    /// The pod's namespace and name, if the kubelet has reported them.
    pub pod: Option<PodName>,
}

impl ContainerName {
    /// The namespace, pod and container of a name; empty where the agent does not know them.
    pub fn parts(name: Option<&ContainerName>) -> [String; 3] {
        let pod = name.and_then(|name| name.pod.as_ref());
        [
            pod.map(|pod| pod.namespace.clone()).unwrap_or_default(),
            pod.map(|pod| pod.name.clone()).unwrap_or_default(),
            name.map(|name| name.container.clone()).unwrap_or_default(),
        ]
    }
}

/// A pod's namespace and name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct PodName {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
}

impl std::fmt::Display for PodName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}
