//! Defines `GpuMemoryBudget`: how much of the cluster's GPU memory a namespace may use.
#![allow(
    unreachable_pub,
    reason = "KubeSchema copies each struct into a function, `pub` included"
)]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::core::{Message, Rule};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::context_policy::ContextPolicy;
use crate::{Amount, DEFAULT_COHORT, schema};

/// The most evictions in one status.
pub const MAX_EVICTIONS: usize = 8;

/// The amounts of GPU memory that the namespace's pods may use, and how they borrow and recover.
/// Amounts are bytes: `8Gi`, not `8`.
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
    doc = "How much of the cluster's GPU memory a namespace may use. A namespace has at most one budget, named `default`.",
    validation = Rule::new("self.metadata.name == 'default'")
        .message("a namespace has one budget, and its name is `default`"),
    printcolumn(
        name = "Guaranteed",
        type_ = "string",
        description = "Device memory that the namespace's pods can always have, in whole quanta",
        json_path = ".status.deviceMemory.guaranteed.bytes"
    ),
    printcolumn(
        name = "Limit",
        type_ = "string",
        description = "The most device memory that the namespace's pods may request, in whole quanta",
        json_path = ".status.deviceMemory.limit.bytes"
    ),
    printcolumn(
        name = "Requested",
        type_ = "string",
        description = "Device memory that the namespace's pods request",
        json_path = ".status.deviceMemory.requested.bytes"
    ),
    printcolumn(
        name = "Used",
        type_ = "string",
        description = "The most device memory that the pods had in use within the last sampled minute",
        json_path = ".status.deviceMemory.observed.bytes"
    ),
    printcolumn(
        name = "Borrowed",
        type_ = "string",
        description = "The part of it that borrowed pods request",
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
    printcolumn(
        name = "Message",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].message",
        priority = 1
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[cfg_attr(test, kube(cel))]
#[x_kube(validation = Rule::new(
    "!has(self.perContainer) || !has(self.perContainer.max) || quantity(string(self.perContainer.max)).compareTo(quantity(string(has(self.deviceMemory.limit) ? self.deviceMemory.limit : self.deviceMemory.guaranteed))) <= 0"
).message("perContainer.max must not be more than the namespace may use"))]
#[x_kube(validation = Rule::new(
    "!has(self.perContainer) || !has(self.perContainer.maxManaged) || quantity(string(self.perContainer.maxManaged)).compareTo(quantity(string(has(self.managedMemory) ? self.managedMemory.limit : 0))) <= 0"
).message("perContainer.maxManaged must not be more than managedMemory.limit"))]
#[serde(rename_all = "camelCase")]
pub struct GpuMemoryBudgetSpec {
    /// Device memory (`bursar.dev/gpu-memory-gib`).
    pub device_memory: DeviceMemory,

    /// CUDA managed (unified) memory (`bursar.dev/managed-memory-gib`). Without this field the
    /// namespace's pods may request none; their device quota covers the managed memory they use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub managed_memory: Option<ManagedMemory>,

    /// The most hundredths of GPUs' compute time (`bursar.dev/gpu-compute`) that the namespace's
    /// pods may request together: 200 are two GPUs. Without this field they may request none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub compute: Option<i32>,

    /// Bounds on one container. Without this field a container may request the whole budget.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_container: Option<PerContainer>,

    /// The cohort of the budget. Budgets of a cohort lend to each other, on the nodes whose label
    /// `bursar.dev/cohort` has the same value. Nodes without that label belong to `default`.
    #[serde(default = "default_cohort")]
    #[schemars(
        length(min = 1, max = 63),
        regex(pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    )]
    pub cohort: String,

    /// How the API server admits a pod beyond the guarantee that names no priority class. `Refuse`
    /// rejects it. `Borrow` gives it the class `bursar-borrowed`, on Kubernetes 1.36 or later.
    #[serde(default)]
    pub overflow: Overflow,

    /// How a pod recovers from a CUDA context that a fault has poisoned. Without this field the
    /// cluster's default applies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context_policy: Option<ContextPolicy>,

    /// Quotas of running pods that are lower than their requests, by the names of the pods.
    // With the default, a server-side apply may remove the last entry: null would be refused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("default" = []))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["pod".to_owned()]))]
    pub overrides: Vec<Override>,
}

/// Refuses fractions of a byte, which no amount of memory has.
fn whole_bytes() -> Rule {
    Rule::new("quantity(string(self)).isInteger()")
        .message("must be a whole number of bytes below 8Ei, without a fraction: 1536Mi, not 1.5Gi")
}

/// Refuses a number without a suffix, which means bytes here and quanta in a pod.
fn no_plain_number() -> Rule {
    Rule::new(
        "!string(self).matches('^[0-9]+$') || quantity(string(self)).compareTo(quantity('0')) == 0 \
         || quantity(string(self)).compareTo(quantity('1Mi')) >= 0",
    )
    .message(Message::Expression(
        "'is ' + string(self) + ' bytes, less than 1Mi: write ' + string(self) + 'Gi, not ' + string(self)"
            .to_owned(),
    ))
}

fn default_cohort() -> String {
    DEFAULT_COHORT.to_owned()
}

/// Device memory. Fractions of a quantum do not count.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[x_kube(validation = Rule::new(
    "!has(self.limit) || quantity(string(self.guaranteed)).compareTo(quantity(string(self.limit))) <= 0"
).message("guaranteed must not be more than limit"))]
#[serde(rename_all = "camelCase")]
pub struct DeviceMemory {
    /// The device memory that the namespace's guaranteed pods can always have, in bytes: `64Gi`.
    /// Borrowers are evicted when these pods need it. With `0` the namespace only borrows.
    #[x_kube(validation = whole_bytes(), validation = no_plain_number())]
    pub guaranteed: Amount,

    /// The most device memory that the namespace's pods may request together, guaranteed and
    /// borrowed, in bytes: `96Gi`. Defaults to `guaranteed`: the namespace borrows nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = whole_bytes(), validation = no_plain_number())]
    pub limit: Option<Amount>,
}

/// CUDA managed (unified) memory. Fractions of a quantum do not count.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ManagedMemory {
    /// The most managed memory that the namespace's pods may request together, in bytes: `64Gi`.
    #[x_kube(validation = whole_bytes(), validation = no_plain_number())]
    pub limit: Amount,
}

/// Bounds on one container.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PerContainer {
    /// The most device memory that one container may request, in bytes: `40Gi`. Without this field
    /// a container may request all that the namespace may use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = whole_bytes(), validation = no_plain_number())]
    pub max: Option<Amount>,

    /// The most managed memory that one container may request, in bytes: `16Gi`. Without this field
    /// a container may request all of `managedMemory.limit`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = whole_bytes(), validation = no_plain_number())]
    pub max_managed: Option<Amount>,
}

/// How the API server admits a pod beyond the guarantee.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Overflow {
    /// The API server refuses the pod.
    #[default]
    Refuse,
    /// The pod becomes a borrower: it uses idle memory, and is evicted when owners need that.
    Borrow,
    /// A value of another version of the API: readers accept it, and the schema refuses to store
    /// it.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// Quotas of a running pod that are lower than its requests.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[x_kube(validation = Rule::new(
    "has(self.deviceMemory) || has(self.managedMemory)"
).message("set deviceMemory, managedMemory or both"))]
#[serde(rename_all = "camelCase")]
pub struct Override {
    /// The pod's name.
    #[schemars(length(min = 1, max = 253))]
    pub pod: String,
    /// The quota of each container of the pod, per GPU, in bytes: `8Gi`. A container with a lower
    /// request keeps its request: an override raises nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = whole_bytes(), validation = no_plain_number())]
    pub device_memory: Option<Amount>,
    /// The quota of managed memory of each container of the pod that requests managed memory, in
    /// bytes: `4Gi`. A container with a lower request keeps its request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = whole_bytes(), validation = no_plain_number())]
    pub managed_memory: Option<Amount>,
}

/// The namespace's use and the budget's state. The operator writes it on change only.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[schemars(transform = schema::without_defaults)]
pub struct GpuMemoryBudgetStatus {
    /// The metadata.generation that this status was computed from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The size of one quantum, such as `1Gi`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantum: Option<Amount>,
    /// Pods that request GPU memory and have not ended.
    pub pods: i64,
    /// How many of `pods` borrow.
    pub borrowed_pods: i64,
    /// The namespace's device memory: allowed, requested and in use.
    pub device_memory: DeviceMemoryStatus,
    /// The namespace's CUDA managed memory: allowed, requested and in use.
    pub managed_memory: ManagedMemoryStatus,
    /// Allocations of the namespace's pods that failed for lack of quota, on the present nodes.
    pub denials: i64,
    /// The CUDA contexts of the namespace's pods.
    pub contexts: ContextsStatus,
    /// The time since which the ResourceQuotas hold these amounts. The operator keeps it while it
    /// restores a changed quota, so that pods admitted meanwhile count as overage.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::time")]
    pub enforced_since: Option<Time>,
    /// Pods evicted for a fault, or about to be, newest first; at most 8.
    #[schemars(length(max = 8), extend("x-kubernetes-list-type" = "atomic"))]
    pub evictions: Vec<FaultEviction>,
    /// The budget's conditions: Ready, Accepted, Covered, Exceeded, Enforced.
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
}

/// An amount of memory in quanta and in bytes.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct QuantaAmount {
    /// The amount in whole quanta, the unit in which pods request it.
    pub quanta: i64,
    /// The amount as a quantity of bytes.
    pub bytes: Amount,
}

impl Default for QuantaAmount {
    fn default() -> Self {
        Self {
            quanta: 0,
            bytes: Amount::from_bytes(0),
        }
    }
}

/// Device memory of a namespace: allowed, requested and in use.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DeviceMemoryStatus {
    /// The guarantee, in whole quanta.
    pub guaranteed: QuantaAmount,
    /// The limit, in whole quanta.
    pub limit: QuantaAmount,
    /// The memory that the namespace's pods request, guaranteed and borrowed.
    pub requested: QuantaAmount,
    /// The memory that borrowed pods request.
    pub borrowed: QuantaAmount,
    /// The most that the pods had in use within the last sampled minute, rounded up on each node.
    pub observed: QuantaAmount,
    /// The highest value of `observed`.
    pub peak: QuantaAmount,
}

/// CUDA contexts of a namespace's pods, on the present nodes.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContextsStatus {
    /// Open faults, those of GPUs on which the pods have memory included.
    pub open: i64,
    /// Process images whose context a fault has poisoned so far.
    pub poisoned: i64,
    /// Restarts for poisoned contexts so far, in place or not.
    pub restarts: i64,
}

/// The eviction of a pod for a fault.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FaultEviction {
    /// The id of the fault in `GpuNode.status.faults`.
    #[schemars(length(min = 1, max = 64))]
    pub fault: String,
    /// The pod's name.
    #[schemars(length(min = 1, max = 253))]
    pub pod: String,
    /// The pod's UID.
    #[schemars(length(min = 1, max = 64))]
    pub pod_uid: String,
    /// The reason as one word: `ContextPolicy`, `TooManyRestarts`, `GpuFault`.
    #[schemars(length(min = 1, max = 64))]
    pub reason: String,
    /// The reason as a sentence.
    #[schemars(length(max = 512))]
    pub message: String,
    /// The time of the decision.
    #[schemars(schema_with = "schema::time")]
    pub time: Time,
}

/// Managed memory of a namespace: allowed, requested and in use.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ManagedMemoryStatus {
    /// The limit, in whole quanta.
    pub limit: QuantaAmount,
    /// The memory that the namespace's pods request.
    pub requested: QuantaAmount,
    /// The most that the pods had in use within the last sampled minute, on GPUs and on hosts,
    /// rounded up on each node. `deviceMemory.observed` has managed memory that GPU quotas cover.
    pub observed: QuantaAmount,
    /// The highest value of `observed`.
    pub peak: QuantaAmount,
}

#[cfg(test)]
#[path = "budget_tests.rs"]
mod tests;
