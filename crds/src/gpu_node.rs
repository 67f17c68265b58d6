//! Defines `GpuNode`: a node's GPUs as its agent reports them, and the operator's orders.
#![allow(
    unreachable_pub,
    reason = "KubeSchema copies each struct into a function, `pub` included"
)]
#![expect(
    clippy::duplicated_attributes,
    reason = "each printcolumn is a list of its own, so that two may have the same type or priority"
)]

mod containers;
mod gpus;
mod pod_settings;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Amount, schema};

pub use containers::{
    EnforcementGap, Fault, FaultContainer, FaultKind, GpuContainer, LastFault, LeaseState,
    MemoryResource, NamespaceUse, PendingContainer, QuotaState, QuotaStatus, RetainedLease,
};
pub use gpus::{
    ComputeState, GpuCompute, GpuPod, GpuRuntime, GpuState, GpuStatus, Health, HealthStatus,
    RuntimeState,
};
pub use pod_settings::{GPUS_ANNOTATION, PodSettings};

/// The most GPUs (or MIG instances) in one object: 16 GPUs with 7 instances each.
pub const MAX_GPUS: usize = 112;
/// The most open faults in one object; the agent adds others when some are closed.
pub const MAX_FAULTS: usize = 64;
/// The most waiting containers in one object.
pub const MAX_WAITING: usize = 64;
/// The most containers without enforcement in one object.
pub const MAX_NOT_ENFORCED: usize = 16;
/// The most pods listed with one GPU, those with the most memory first.
pub const MAX_PODS: usize = 256;
/// The most entries in the pods' lists of all GPUs.
pub const MAX_POD_ENTRIES: usize = 3_584;
/// The most pods with a name in the lists of all GPUs; further ones have a UID alone.
pub const MAX_POD_NAMES: usize = 512;
/// The most pods for which one GPU has memory set aside.
pub const MAX_SET_ASIDE: usize = 4;
/// The most lowered quotas in one object; the operator writes no more, and logs how many it omits.
pub const MAX_QUOTAS: usize = 64;
/// The most ordered restarts in one object; the operator adds others when some are done.
pub const MAX_RESTARTS: usize = 16;
/// The most owners with moved pods in one object; the operator drops older ones.
pub const MAX_RECORDED_RELOCATIONS: usize = 64;
/// The most namespaces in one object, those with pods on the node first.
pub const MAX_NAMESPACES: usize = 32;
/// The most pods with settings in one object, far above the kubelet's `maxPods`.
pub const MAX_POD_SETTINGS: usize = 1024;
/// The most containers with memory in one object, those with faults first.
pub const MAX_CONTAINERS: usize = 256;
/// The most leases of retained memory in one object; each namespace has its largest.
pub const MAX_RETAINED: usize = 128;

/// Orders to the node's agent. The operator writes them, and an admin `drain`.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "bursar.dev",
    version = "v1alpha1",
    kind = "GpuNode",
    plural = "gpunodes",
    status = "GpuNodeStatus",
    derive = "PartialEq",
    derive = "Default",
    shortname = "gpun",
    category = "bursar",
    doc = "A node's GPUs. The object has the node's name; the agent owns the status, and the operator the spec and, of an agent that is away, the condition Ready.",
    printcolumn(
        name = "GPUs",
        type_ = "string",
        description = "The number and the model of the GPUs",
        json_path = ".status.summary.gpus"
    ),
    printcolumn(
        name = "Free",
        type_ = "string",
        description = "Device memory that is bound to no pod, of what the node offers to pods",
        json_path = ".status.summary.free"
    ),
    printcolumn(
        name = "Largest",
        type_ = "string",
        description = "The most device memory that a new pod can have on one GPU",
        json_path = ".status.summary.largestFree"
    ),
    printcolumn(
        name = "Set aside",
        type_ = "string",
        description = "Free device memory that is set aside for waiting pods, and for which",
        json_path = ".status.summary.setAside"
    ),
    printcolumn(
        name = "Waiting",
        type_ = "integer",
        description = "Containers that wait for room on the node",
        json_path = ".status.summary.waiting"
    ),
    printcolumn(
        name = "Faults",
        type_ = "integer",
        description = "Open faults of GPUs and of programs",
        json_path = ".status.summary.faults"
    ),
    printcolumn(
        name = "Generations",
        type_ = "string",
        description = "The generation of each GPU's memory; one number if all GPUs have the same",
        json_path = ".status.summary.generations"
    ),
    printcolumn(
        name = "Not enforced",
        type_ = "integer",
        description = "Containers without enforcement of their quota",
        json_path = ".status.summary.notEnforced",
        priority = 1
    ),
    printcolumn(
        name = "Quantum",
        type_ = "string",
        json_path = ".status.quantum",
        priority = 1
    ),
    printcolumn(
        name = "Driver",
        type_ = "string",
        json_path = ".status.driverVersion",
        priority = 1
    ),
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
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[cfg_attr(test, kube(cel))]
// With the default, a server-side apply may remove the last entry of a list: the API server would
// store null otherwise, which the schema refuses.
#[schemars(extend("default" = {}))]
#[serde(rename_all = "camelCase")]
pub struct GpuNodeSpec {
    /// GPUs on which the agent sets memory aside for a pod of higher priority, whose victims are
    /// being evicted. A GPU has one reservation at a time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_GPUS), extend("default" = []))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["gpu".to_owned()]))]
    pub reservations: Vec<Reservation>,
    /// Quotas of running containers that are lower than their requests. A container without an
    /// entry has its request, and an entry above the request changes nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_QUOTAS), extend("default" = []))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["podUid".to_owned(), "container".to_owned(), "account".to_owned()]))]
    pub quotas: Vec<QuotaOverride>,
    /// Restarts of containers whose fault the agent has only reported so far.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_RESTARTS), extend("default" = []))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["fault".to_owned()]))]
    pub restarts: Vec<RestartRequest>,
    /// How often the operator moved pending pods of an owner to other nodes. The agent ignores it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_RECORDED_RELOCATIONS), extend("default" = []))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["owner".to_owned()]))]
    pub relocations: Vec<Relocation>,
    /// UUIDs of GPUs to drain for a reset or another driver. The agent kills the containers with
    /// memory on them, starts none there, and discards their retained memory. A GPU stands for its
    /// MIG instances too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_GPUS), inner(length(min = 1, max = 96)), extend("default" = []))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub drain: Vec<String>,
    /// The settings of the pods on the node that request GPU memory, which the agent must know. The
    /// operator has not seen a pod that is absent, or the pod has ended.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_POD_SETTINGS), extend("default" = [], "x-kubernetes-list-type" = "atomic"))]
    pub pods: Vec<PodSettings>,
}

/// An order to end poisoned process images of a container, by the unit of its context policy. The
/// process generation makes the order idempotent.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RestartRequest {
    /// The id of the fault in `status.faults`.
    #[schemars(length(min = 1, max = 64))]
    pub fault: String,
    /// The pod's UID.
    #[schemars(length(min = 1, max = 64))]
    pub pod_uid: String,
    /// The container's name.
    #[schemars(length(min = 1, max = 63))]
    pub container: String,
    /// The process generation to reach: the agent ends poisoned process images of lower
    /// generations.
    pub process_generation: i64,
}

/// How often the operator moved pods of one owner.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Relocation {
    /// The owner's UID.
    #[schemars(length(min = 1, max = 64))]
    pub owner: String,
    /// The number of moves.
    #[schemars(range(min = 0))]
    pub count: i32,
    /// The time of the last move.
    #[schemars(schema_with = "schema::time")]
    pub last: Time,
}

/// The quota of one account of a running container.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct QuotaOverride {
    /// The pod's UID.
    #[schemars(length(min = 1, max = 64))]
    pub pod_uid: String,
    /// The container's name.
    #[schemars(length(min = 1, max = 63))]
    pub container: String,
    /// The account: `device` for all GPUs evenly, the UUID of one GPU, or `managed`.
    #[serde(default = "device")]
    #[schemars(length(min = 1, max = 96))]
    pub account: String,
    /// The most memory that the container may use, in bytes: `8Gi`.
    pub quota: Amount,
}

/// [`QuotaOverride::account`] of device memory.
pub const DEVICE: &str = "device";
/// [`QuotaOverride::account`] of managed memory.
pub const MANAGED: &str = "managed";

fn device() -> String {
    DEVICE.to_owned()
}

/// Memory of a GPU that the agent sets aside for one pod.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Reservation {
    /// The GPU's UUID.
    #[schemars(length(min = 1, max = 96))]
    pub gpu: String,
    /// The pod's UID.
    #[schemars(length(min = 1, max = 64))]
    pub pod_uid: String,
    /// The memory to set aside, in quanta, what is already bound to the pod included.
    #[schemars(range(min = 1, max = 4096))]
    pub quanta: i32,
}

/// The state of the node's GPUs. The agent writes it on transitions, without a heartbeat; current
/// use is in the metrics.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[schemars(transform = schema::without_defaults)]
pub struct GpuNodeStatus {
    /// The metadata.generation whose orders the agent has read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The boot of this status (`/proc/sys/kernel/random/boot_id`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boot_id: Option<String>,
    /// The agent's version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent_version: Option<String>,
    /// The NVIDIA driver's version. Absent while no driver answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver_version: Option<String>,
    /// The key that verifies the memory tokens of this node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_key: Option<TokenKey>,
    /// The size of one quantum, such as `1Gi`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantum: Option<Amount>,
    /// The node in short, for the columns of `kubectl get`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub summary: Option<NodeSummary>,
    /// Device memory of the healthy GPUs together, in quanta.
    pub device_memory: NodeMemory,
    /// Managed memory, in quanta. Zero where the node offers none.
    pub managed_memory: NodeMemory,
    /// The GPUs, and MIG instances as GPUs of their own.
    #[schemars(length(max = MAX_GPUS), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["uuid"]))]
    pub gpus: Vec<GpuStatus>,
    /// Containers that wait until the node has room for them; at most 64. Those that wait for
    /// device memory come before those that wait for managed memory. Of these, the first are those
    /// that the node's GPUs could hold if they were empty, by priority, the longest waiting first.
    #[schemars(length(max = MAX_WAITING), extend("x-kubernetes-list-type" = "atomic"))]
    pub waiting: Vec<PendingContainer>,
    /// The number of containers without enforcement of their quota.
    #[serde(skip_serializing_if = "is_zero")]
    pub not_enforced_count: i32,
    /// Containers without enforcement of their quota, and the reasons; at most 16.
    #[schemars(length(max = MAX_NOT_ENFORCED), extend("x-kubernetes-list-type" = "atomic"))]
    pub not_enforced: Vec<EnforcementGap>,
    /// The state of each entry of `spec.quotas`.
    #[schemars(length(max = MAX_QUOTAS), extend("x-kubernetes-list-type" = "atomic"))]
    pub quotas: Vec<QuotaStatus>,
    /// Open faults, those that need the operator or an admin first; at most 64.
    #[schemars(length(max = MAX_FAULTS), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["id"]))]
    pub faults: Vec<Fault>,
    /// The containers with memory on the node, those with faults first; at most 256.
    #[schemars(length(max = MAX_CONTAINERS), extend("x-kubernetes-list-type" = "atomic"))]
    pub containers: Vec<GpuContainer>,
    /// The number of leases of retained memory.
    #[serde(skip_serializing_if = "is_zero")]
    pub retained_count: i32,
    /// The leases of retained memory, by namespace and name; at most 128, the largest of each
    /// namespace.
    #[schemars(length(max = MAX_RETAINED), extend("x-kubernetes-list-type" = "atomic"))]
    pub retained: Vec<RetainedLease>,
    /// Use and fault counters of each namespace's pods on this node; at most 32.
    #[schemars(length(max = MAX_NAMESPACES), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["namespace"]))]
    pub namespaces: Vec<NamespaceUse>,
    /// The node's conditions: Ready, GpusFound, Registered, CdiReady, WithinDeviceIdLimit,
    /// CheckpointIntact, StateWritten, Audited, DriverLimits, RetainedMemory, MemoryScrubbed,
    /// Accepted, SoleOwner, ManagedMemory, PageableMemoryOnGpu, KubeletCheckpointReadable,
    /// DriverChanged.
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
}

/// The public half of a node's key for memory tokens. A reboot replaces the key, and so ends the
/// tokens; a lost or unreadable key file does so too.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TokenKey {
    /// The algorithm of the signatures: `Ed25519` (RFC 8032).
    #[schemars(length(min = 1, max = 32))]
    pub algorithm: String,
    /// The public key as hex digits, 64 for `Ed25519`.
    #[schemars(length(min = 1, max = 128))]
    pub public_key: String,
}

/// The node in short, as text for people. Programs read the other fields.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeSummary {
    /// The number and the model of the GPUs: `8x H100 80GB HBM3, 1 unhealthy`.
    #[schemars(length(max = 256))]
    pub gpus: String,
    /// Device memory that is bound to no pod: `37 of 632 GiB`.
    #[schemars(length(max = 64))]
    pub free: String,
    /// The most device memory that a new pod can have on one GPU: `15 GiB`.
    #[schemars(length(max = 64))]
    pub largest_free: String,
    /// Free device memory that is set aside for waiting pods: `12 GiB for team-b/train-0`.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 1024))]
    pub set_aside: String,
    /// The generation of each GPU's memory in NVML's order, or one number if all are equal: `3,1`.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 512))]
    pub generations: String,
    /// The number of containers that wait for room, those beyond `status.waiting` included.
    pub waiting: i32,
    /// The number of open faults, those beyond `status.faults` included.
    pub faults: i32,
    /// The number of containers without enforcement of their quota.
    pub not_enforced: i32,
}

/// Memory of a node, in quanta.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeMemory {
    /// Quanta that the agent offers to the kubelet.
    pub allocatable: i32,
    /// Quanta that are bound to no pod.
    pub free: i32,
    /// The most that a new pod can have on one GPU, without memory that is set aside for waiting
    /// pods.
    pub largest_free: i32,
}

fn is_zero(count: &i32) -> bool {
    *count == 0
}
