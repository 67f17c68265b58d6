//! What the node keeps in its checkpoint.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ledger::Snapshot;
use crate::units::AllocationId;

/// Everything that a successor cannot read off the host as quickly.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct NodeCheckpoint {
    /// The boot that it is of: moments and bindings mean nothing after it.
    pub boot: String,
    /// Who holds what.
    pub ledger: Snapshot,
    /// The containers' names, as far as they were told.
    pub holders: BTreeMap<AllocationId, ContainerName>,
}

/// Whose an allocation is, for people: messages and metrics.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ContainerName {
    /// The container.
    pub container: String,
    /// The pod's namespace and name, where the kubelet told them.
    pub pod: Option<PodName>,
}

/// A pod by its name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
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
