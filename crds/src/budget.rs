//! `GpuMemoryBudget`: what a namespace may use of the cluster's GPU memory.
#![allow(
    unreachable_pub,
    reason = "KubeSchema copies each struct into a function, `pub` included"
)]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Amount, DEFAULT_COHORT, schema};

/// The most evictions in one status.
pub const MAX_EVICTIONS: usize = 8;

/// What a namespace may use of the cluster's GPU memory. A namespace has at most one, named `default`.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "bursar.dev",
    version = "v1alpha1",
    kind = "GpuMemoryBudget",
    plural = "gpumemorybudgets",
    namespaced,
    status = "GpuMemoryBudgetStatus",
    derive = "PartialEq",
    shortname = "gmb",
    category = "bursar",
    doc = "What a namespace may use of the cluster's GPU memory. A namespace has at most one, named `default`.",
    validation = Rule::new("self.metadata.name == 'default'")
        .message("a namespace has one budget, and its name is `default`"),
    printcolumn(name = "Guaranteed", type_ = "string", json_path = ".spec.deviceMemory.guaranteed"),
    printcolumn(name = "Limit", type_ = "string", json_path = ".spec.deviceMemory.limit"),
    printcolumn(
        name = "Requested",
        type_ = "string",
        description = "What the namespace's pods ask for",
        json_path = ".status.deviceMemory.requested.bytes"
    ),
    printcolumn(
        name = "Borrowed",
        type_ = "string",
        description = "What of it borrowed pods ask for",
        json_path = ".status.deviceMemory.borrowed.bytes",
        priority = 1
    ),
    printcolumn(name = "Cohort", type_ = "string", json_path = ".spec.cohort", priority = 1),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[cfg_attr(test, kube(cel))]
#[x_kube(validation = Rule::new(
    "!has(self.perContainer) || quantity(string(self.perContainer.max)).compareTo(quantity(string(has(self.deviceMemory.limit) ? self.deviceMemory.limit : self.deviceMemory.guaranteed))) <= 0"
).message("perContainer.max must not be more than the namespace may use"))]
#[serde(rename_all = "camelCase")]
pub struct GpuMemoryBudgetSpec {
    /// Memory of the GPUs themselves (`bursar.dev/gpu-memory-gib`).
    pub device_memory: DeviceMemory,

    /// CUDA managed (unified) memory (`bursar.dev/managed-memory-gib`). None may be used without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub managed_memory: Option<ManagedMemory>,

    /// Bounds on one container. Any size within the budget is allowed without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_container: Option<PerContainer>,

    /// The budgets that lend to each other, on the nodes with the label `bursar.dev/cohort` of the same
    /// value. Nodes without that label are the cohort `default`.
    #[serde(default = "default_cohort")]
    #[schemars(
        length(min = 1, max = 63),
        regex(pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    )]
    pub cohort: String,

    /// What becomes of a pod that no longer fits the guarantee and asks for no class of its own.
    #[serde(default)]
    pub overflow: Overflow,

    /// What is done about a pod whose CUDA context is poisoned.
    #[serde(default)]
    pub context_policy: ContextPolicy,

    /// Quotas of running pods, lower than what they asked for.
    // With a default, whoever applies may take the last one away that somebody else wrote too: null is no list.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("default" = []))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["pod".to_owned()]))]
    pub overrides: Vec<Override>,
}

fn default_cohort() -> String {
    DEFAULT_COHORT.to_owned()
}

/// Memory of the GPUs themselves. Parts of a quantum do not count.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[x_kube(validation = Rule::new(
    "!has(self.limit) || quantity(string(self.guaranteed)).compareTo(quantity(string(self.limit))) <= 0"
).message("guaranteed must not be more than limit"))]
#[serde(rename_all = "camelCase")]
pub struct DeviceMemory {
    /// What the namespace's guaranteed pods can always have, such as `64Gi`. It is taken back from
    /// borrowers when it is asked for. `0`: the namespace only borrows.
    #[x_kube(validation = Rule::new("quantity(string(self)).isInteger()").message("must be a whole number of bytes below 8Ei, without a fraction: 1536Mi, not 1.5Gi"))]
    pub guaranteed: Amount,

    /// The most that the namespace's pods may ask for together, guaranteed and borrowed. Equal to
    /// `guaranteed` where not given: nothing is borrowed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("quantity(string(self)).isInteger()").message("must be a whole number of bytes below 8Ei, without a fraction: 1536Mi, not 1.5Gi"))]
    pub limit: Option<Amount>,
}

/// CUDA managed (unified) memory. Parts of a quantum do not count.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ManagedMemory {
    /// The most that the namespace's pods may ask for together.
    #[x_kube(validation = Rule::new("quantity(string(self)).isInteger()").message("must be a whole number of bytes below 8Ei, without a fraction: 1536Mi, not 1.5Gi"))]
    pub limit: Amount,
}

/// Bounds on one container.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PerContainer {
    /// The most device memory that one container may ask for.
    #[x_kube(validation = Rule::new("quantity(string(self)).isInteger()").message("must be a whole number of bytes below 8Ei, without a fraction: 1536Mi, not 1.5Gi"))]
    pub max: Amount,
}

/// What becomes of a pod that no longer fits the guarantee.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Overflow {
    /// It is refused.
    #[default]
    Refuse,
    /// It becomes a borrowed pod: it runs on memory that is idle and may be evicted for its owner.
    Borrow,
    /// A value of another version. It is read and never written: the schema refuses it.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// What is done about a pod whose CUDA context is poisoned.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContextPolicy {
    /// What is done first.
    #[serde(default)]
    pub action: ContextAction,

    /// How many restarts, in place or not, one container gets within the window; then its pod is evicted.
    #[serde(default = "default_max_restarts")]
    #[schemars(range(min = 0, max = 100))]
    pub max_restarts: i32,

    /// The window of `maxRestarts`, in seconds.
    #[serde(default = "default_window_seconds")]
    #[schemars(range(min = 1, max = 86_400))]
    pub window_seconds: i32,
}

impl Default for ContextPolicy {
    fn default() -> Self {
        Self {
            action: ContextAction::default(),
            max_restarts: default_max_restarts(),
            window_seconds: default_window_seconds(),
        }
    }
}

fn default_max_restarts() -> i32 {
    5
}

fn default_window_seconds() -> i32 {
    600
}

/// What is done first about a poisoned context.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ContextAction {
    /// The program is executed again in its own process: same pod, same pid, about 0.3 s. It comes
    /// before the program's own handling of the error.
    InPlace,
    /// The container's main process is killed; the kubelet restarts the container with its back-off.
    #[default]
    Restart,
    /// The pod is evicted.
    Evict,
    /// It is reported only.
    Report,
    /// A value of another version. It is read and never written: the schema refuses it.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// A running pod's quota, lower than what it asked for.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Override {
    /// The pod's name.
    #[schemars(length(min = 1, max = 253))]
    pub pod: String,
    /// The quota of each of its containers, per GPU. A container that asked for less keeps what it
    /// asked for: nothing is ever raised.
    #[x_kube(validation = Rule::new("quantity(string(self)).isInteger()").message("must be a whole number of bytes below 8Ei, without a fraction: 1536Mi, not 1.5Gi"))]
    pub device_memory: Amount,
}

/// What is true of the namespace now. Written by the operator, on change only.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[schemars(transform = schema::without_defaults)]
pub struct GpuMemoryBudgetStatus {
    /// The metadata.generation that the rest was computed from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The size of one quantum, such as `1Gi`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantum: Option<Amount>,
    /// Pods that ask for GPU memory and have not ended.
    pub pods: i64,
    /// Those of them that borrow.
    pub borrowed_pods: i64,
    /// Memory of the GPUs themselves.
    pub device_memory: DeviceMemoryStatus,
    /// CUDA managed memory.
    pub managed_memory: ManagedMemoryStatus,
    /// Allocations that were denied to the namespace's pods for want of quota, on the nodes that there are.
    pub denials: i64,
    /// The CUDA contexts of the namespace's pods.
    pub contexts: ContextsStatus,
    /// Since when the quotas hold these amounts. It stays while one that somebody changed is put back: pods that come
    /// meanwhile are too many all the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::time")]
    pub enforced_since: Option<Time>,
    /// Pods that have to go, or went, for a fault, the newest first; at most 8.
    #[schemars(length(max = 8), extend("x-kubernetes-list-type" = "atomic"))]
    pub evictions: Vec<FaultEviction>,
    /// What the operator says of the budget: Ready, Accepted, Covered, Exceeded, Enforced.
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
}

/// An amount, counted and in bytes.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Counted {
    /// Whole quanta: what a resource limit is written in.
    pub quanta: i64,
    /// The same as a quantity.
    pub bytes: Amount,
}

impl Default for Counted {
    fn default() -> Self {
        Self {
            quanta: 0,
            bytes: Amount::from_bytes(0),
        }
    }
}

/// Device memory: what is allowed and what is asked for.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DeviceMemoryStatus {
    /// What is guaranteed, in whole quanta.
    pub guaranteed: Counted,
    /// The most that may be asked for, in whole quanta.
    pub limit: Counted,
    /// What the namespace's pods ask for, guaranteed and borrowed.
    pub requested: Counted,
    /// What of it borrowed pods ask for.
    pub borrowed: Counted,
    /// What the pods have, as the agents saw it within the last minute that they looked at, rounded up on each node.
    pub observed: Counted,
    /// The most that `observed` has been.
    pub peak: Counted,
}

/// CUDA contexts of a namespace's pods, on the nodes that there are.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContextsStatus {
    /// Faults that are open now, of GPUs that the pods have memory of too.
    pub open: i64,
    /// Process images whose context was poisoned so far.
    pub poisoned: i64,
    /// Restarts for that so far, in place or not.
    pub restarts: i64,
}

/// A pod that has to go, or went, for a fault.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FaultEviction {
    /// The fault, as `GpuNode.status.faults` names it.
    #[schemars(length(min = 1, max = 64))]
    pub fault: String,
    /// The pod's name.
    #[schemars(length(min = 1, max = 253))]
    pub pod: String,
    /// The pod's UID.
    #[schemars(length(min = 1, max = 64))]
    pub pod_uid: String,
    /// Why, in one word: `ContextPolicy`, `TooManyRestarts`, `GpuFault`.
    #[schemars(length(min = 1, max = 64))]
    pub reason: String,
    /// Why, for people.
    #[schemars(length(max = 512))]
    pub message: String,
    /// When that was decided.
    #[schemars(schema_with = "schema::time")]
    pub time: Time,
}

/// Managed memory: what is allowed and what is asked for.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ManagedMemoryStatus {
    /// The most that may be asked for, in whole quanta.
    pub limit: Counted,
    /// What the namespace's pods ask for.
    pub requested: Counted,
}

#[cfg(test)]
#[path = "budget_tests.rs"]
mod tests;
