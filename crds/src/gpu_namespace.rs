//! Defines `GpuNamespace`: what the agents of all nodes must know of a namespace.
#![allow(
    unreachable_pub,
    reason = "KubeSchema copies each struct into a function, `pub` included"
)]

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::context_policy::ContextPolicy;

/// The orders of the namespace's budget to agents. The operator writes them.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "bursar.dev",
    version = "v1alpha1",
    kind = "GpuNamespace",
    plural = "gpunamespaces",
    derive = "PartialEq",
    derive = "Default",
    shortname = "gpuns",
    category = "bursar",
    doc = "What the agents of all nodes must know of a namespace. The object has the namespace's name. The operator copies it from the namespace's GpuMemoryBudget, and deletes it when there is nothing to know.",
    printcolumn(
        name = "Context action",
        type_ = "string",
        description = "The first measure against a poisoned CUDA context, if not the cluster's default",
        json_path = ".spec.contextPolicy.action"
    ),
    printcolumn(
        name = "Max restarts",
        type_ = "integer",
        description = "How many restarts a container has within the window",
        json_path = ".spec.contextPolicy.maxRestarts"
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[cfg_attr(test, kube(cel))]
#[schemars(extend("default" = {}))]
#[serde(rename_all = "camelCase")]
pub struct GpuNamespaceSpec {
    /// How the namespace's pods recover from a poisoned CUDA context. Without it the cluster's
    /// default applies, with at most 5 restarts in 10 minutes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context_policy: Option<ContextPolicy>,
}
