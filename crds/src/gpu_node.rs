//! `GpuNode`: a node's GPUs, as its agent reports them.
#![allow(
    unreachable_pub,
    reason = "KubeSchema copies each struct into a function, `pub` included"
)]
#![expect(
    clippy::duplicated_attributes,
    reason = "each printcolumn is a list of its own, so that two may have the same type or priority"
)]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::budget::ContextAction;
use crate::{Amount, schema};

/// The most GPUs (or MIG instances) in one object: 16 GPUs with 7 instances each.
pub const MAX_GPUS: usize = 112;
/// The most namespaces with an order about poisoned contexts.
pub const MAX_CONTEXTS: usize = 1024;
/// The most open faults in one object; others wait until some are closed.
pub const MAX_FAULTS: usize = 16;
/// The most waiting containers in one object, the longest waiting first.
pub const MAX_WAITING: usize = 16;
/// The most containers that are not held to their quota in one object.
pub const MAX_NOT_ENFORCED: usize = 16;
/// The most pods listed with one GPU, those with the most memory first.
pub const MAX_PODS: usize = 32;
/// The most lowered quotas in one object.
pub const MAX_QUOTAS: usize = 64;
/// The most ordered restarts in one object; others wait until those are done.
pub const MAX_RESTARTS: usize = 16;
/// The most owners of pods with moves in one object; older ones are dropped.
pub const MAX_MOVES: usize = 64;
/// The most namespaces whose use is told in one object: those with pods there first.
pub const MAX_NAMESPACES: usize = 32;

/// A node's GPUs. Named as the node; the agent owns the status, the operator the spec.
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
    doc = "A node's GPUs. Named as the node; the agent owns the status, the operator the spec.",
    printcolumn(name = "GPUs", type_ = "string", json_path = ".status.gpus[*].index"),
    printcolumn(
        name = "Allocatable",
        type_ = "integer",
        description = "Quanta of device memory that pods can be given",
        json_path = ".status.deviceMemory.allocatable"
    ),
    printcolumn(
        name = "Free",
        type_ = "integer",
        description = "Quanta that no pod is bound to",
        json_path = ".status.deviceMemory.free"
    ),
    printcolumn(
        name = "Largest",
        type_ = "integer",
        description = "The most quanta that one GPU can give now",
        json_path = ".status.deviceMemory.largestFree"
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
// A server-side apply that takes the last entry of a list away leaves null otherwise, for the list where somebody else
// wrote it too and for the spec where not, and is refused.
#[schemars(extend("default" = {}))]
#[serde(rename_all = "camelCase")]
pub struct GpuNodeSpec {
    /// GPUs that are held for a waiting container of higher priority while room is made for it. One
    /// plan per GPU at a time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 112), extend("default" = []))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["gpu".to_owned()]))]
    pub reservations: Vec<Reservation>,
    /// Quotas of running containers that are lowered below what they asked for; without an entry a container has
    /// what it asked for. An entry above that changes nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("default" = []))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["podUid".to_owned(), "container".to_owned(), "account".to_owned()]))]
    pub quotas: Vec<QuotaOrder>,
    /// What is done about poisoned contexts in pods of these namespaces, known to the agent before it happens. In all
    /// others the container is restarted, at most 5 times in 10 minutes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024), extend("default" = []))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["namespace".to_owned()]))]
    pub context_policies: Vec<ContextOrder>,
    /// Poisoned contexts that were left as they are, and are to be restarted now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("default" = []))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["fault".to_owned()]))]
    pub restarts: Vec<RestartOrder>,
    /// How often the operator moved waiting pods of an owner away from here. Nothing for the agent.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("default" = []))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["owner".to_owned()]))]
    pub moves: Vec<Moved>,
    /// UUIDs of GPUs that nothing is to hold, for a reset or another driver. Containers with memory of them are killed
    /// and not started again, what is kept there is lost. A GPU's names its MIG instances too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 112), inner(length(min = 1, max = 96)), extend("default" = []))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub drain: Vec<String>,
}

/// A poisoned context that is to be restarted. It says where that ends, so that it may be read twice.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RestartOrder {
    /// The fault that it is about, as `status.faults` names it.
    #[schemars(length(min = 1, max = 64))]
    pub fault: String,
    /// The pod's UID.
    #[schemars(length(min = 1, max = 64))]
    pub pod_uid: String,
    /// The container's name.
    #[schemars(length(min = 1, max = 63))]
    pub container: String,
    /// P that the container has at least when it is done: poisoned images of a lower one are ended.
    pub process_generation: i64,
}

/// How often pods of one owner were moved.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Moved {
    /// The owner's UID.
    #[schemars(length(min = 1, max = 64))]
    pub owner: String,
    /// How often.
    pub count: i32,
    /// When last.
    #[schemars(schema_with = "schema::time")]
    pub last: Time,
}

/// What is done about poisoned contexts in a namespace's pods.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContextOrder {
    /// The namespace.
    #[schemars(length(min = 1, max = 63))]
    pub namespace: String,
    /// What is done first.
    pub action: ContextAction,
    /// How many restarts, in place or not, one container gets within the window.
    #[schemars(range(min = 0, max = 100))]
    pub max_restarts: i32,
    /// The window of `maxRestarts`, in seconds.
    #[schemars(range(min = 1, max = 86_400))]
    pub window_seconds: i32,
}

/// The quota of one account of a running container.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct QuotaOrder {
    /// The pod's UID.
    #[schemars(length(min = 1, max = 64))]
    pub pod_uid: String,
    /// The container's name.
    #[schemars(length(min = 1, max = 63))]
    pub container: String,
    /// Which memory: `device`, spread evenly over its GPUs; one GPU's, by its UUID; or `managed`.
    #[serde(default = "device")]
    #[schemars(length(min = 1, max = 96))]
    pub account: String,
    /// What it may use.
    pub quota: Amount,
}

/// [`QuotaOrder::account`] of device memory.
pub const DEVICE: &str = "device";
/// [`QuotaOrder::account`] of managed memory.
pub const MANAGED: &str = "managed";

fn device() -> String {
    DEVICE.to_owned()
}

/// A GPU held for one pod that waits on this node.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Reservation {
    /// The GPU's UUID.
    #[schemars(length(min = 1, max = 96))]
    pub gpu: String,
    /// The UID of the pod that it is held for.
    #[schemars(length(min = 1, max = 64))]
    pub waiter: String,
    /// How much is held, in quanta; what is bound for the pod there already is included.
    #[schemars(range(min = 1, max = 4096))]
    pub quanta: i32,
}

/// What is true of the node's GPUs. Written on transitions, no heartbeat; use is in the metrics.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[schemars(transform = schema::without_defaults)]
pub struct GpuNodeStatus {
    /// The metadata.generation whose quotas the agent has seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The boot that the rest belongs to (`/proc/sys/kernel/random/boot_id`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boot_id: Option<String>,
    /// The agent's version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent_version: Option<String>,
    /// The NVIDIA driver's version. Absent while no driver answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver_version: Option<String>,
    /// The size of one quantum, such as `1Gi`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantum: Option<Amount>,
    /// Device memory of the healthy GPUs together, in quanta.
    pub device_memory: NodeMemory,
    /// Managed memory, in quanta. All zero where the node offers none.
    pub managed_memory: NodeMemory,
    /// The GPUs, and MIG instances as GPUs of their own.
    #[schemars(length(max = 112), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["uuid"]))]
    pub gpus: Vec<GpuStatus>,
    /// Containers that wait for room on one GPU, the longest waiting first; at most 16.
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "atomic"))]
    pub waiting: Vec<Waiting>,
    /// How many containers are not held to their quota.
    #[serde(skip_serializing_if = "is_zero")]
    pub not_enforced_count: i32,
    /// Containers that are not held to their quota, and why; at most 16.
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "atomic"))]
    pub not_enforced: Vec<NotEnforced>,
    /// What became of `spec.quotas`.
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub quotas: Vec<QuotaStatus>,
    /// Faults that nobody has dealt with, those that somebody else has to deal with before others; at most 16.
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["id"]))]
    pub faults: Vec<Fault>,
    /// What the pods of each namespace use here, and what befell them; at most 32.
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["namespace"]))]
    pub namespaces: Vec<NamespaceUse>,
    /// What the agent says of the node: Ready, GpusFound, Registered, CdiReady, WithinTokenLimit,
    /// CheckpointIntact, Audited, DriverLimits, KeptMemory, MemoryScrubbed, Accepted.
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
}

/// What a namespace's pods use of a node, and what befell them. The counts only grow, for as long as the node is there.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NamespaceUse {
    /// The namespace.
    #[schemars(length(min = 1, max = 63))]
    pub namespace: String,
    /// The most device memory that they had at a time within the last minute that was looked at, in quanta, rounded up.
    pub observed: i32,
    /// Allocations that were denied to them.
    pub denials: i64,
    /// Process images of theirs whose context was poisoned.
    pub poisoned: i64,
    /// Restarts of theirs for that, in place or not.
    pub restarts: i64,
}

/// Memory of a node, in quanta.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeMemory {
    /// What the kubelet is told there is.
    pub allocatable: i32,
    /// What nothing is bound to.
    pub free: i32,
    /// The most that one newcomer can be bound to now: the freest GPU, less what is held for others.
    pub largest_free: i32,
}

/// One GPU or MIG instance.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuStatus {
    /// Its UUID, as NVML and CUDA write it (`GPU-...`, `MIG-...`).
    #[schemars(length(min = 1, max = 96))]
    pub uuid: String,
    /// Its index in NVML's order; a MIG instance has its GPU's.
    pub index: i32,
    /// The model's name.
    pub model: String,
    /// All of its memory, as NVML says.
    pub memory: Amount,
    /// What becomes of new pods on it.
    pub state: GpuState,
    /// G, the generation of its memory: grows when nothing on it can have survived (reset, reboot,
    /// fatal fault), never shrinks.
    pub generation: i64,
    /// Whether it works.
    pub health: Health,
    /// Quanta that pods can be given; 0 while it is not healthy.
    pub capacity: i32,
    /// Quanta that nothing is bound to.
    pub free: i32,
    /// The most that one newcomer can be bound to now: `free`, less what is held for others.
    pub largest_free: i32,
    /// What pods that have ended had exported and others still hold; no pod is given it before they let it go.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leaked: Option<Amount>,
    /// What is in use and charged to no pod: no pod is given it while that lasts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub withheld: Option<Amount>,
    /// The reservation that the agent holds it by: the answer to `spec.reservations`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_for: Option<String>,
    /// The pods that have memory of it, those with the most first; at most 32.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "atomic"))]
    pub pods: Vec<GpuPod>,
}

/// A pod with memory of a GPU.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuPod {
    /// Its UID.
    #[schemars(length(min = 1, max = 64))]
    pub uid: String,
    /// What is bound for it, in quanta.
    pub quanta: i32,
}

/// What becomes of new pods on a GPU.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum GpuState {
    /// They are bound to it.
    #[default]
    Active,
    /// It is held for one waiting pod.
    Reserved,
    /// None are bound to it; what runs on it ends.
    Draining,
    /// It does not answer or is not there any more.
    Lost,
    /// A value of another version. It is read and never written: the schema refuses it.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// Whether a GPU works.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Health {
    /// The verdict.
    pub status: HealthStatus,
    /// Why, in one word: `Ok`, `GpuLost`, `Xid79`, `Draining`, and `Drained` once nothing of the node's agent holds it.
    #[schemars(length(min = 1, max = 64))]
    pub reason: String,
    /// When the status last changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::time")]
    pub since: Option<Time>,
}

/// The verdict on a GPU's health.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum HealthStatus {
    /// It works.
    #[default]
    Healthy,
    /// It does not; its quanta are taken from what the kubelet is told.
    Unhealthy,
    /// A value of another version. It is read and never written: the schema refuses it.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// A container that waits for room on one GPU.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Waiting {
    /// The pod's UID.
    pub pod_uid: String,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The container's name.
    pub container: String,
    /// What it waits for, in quanta.
    pub quanta: i32,
    /// Since when.
    #[schemars(schema_with = "schema::time")]
    pub since: Time,
}

/// A container that is not held to its quota.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NotEnforced {
    /// The pod's UID.
    pub pod_uid: String,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The container's name.
    pub container: String,
    /// Why, in one word: `Privileged`, `MountMissing`, `MountedOver`, `ForeignDriver`, `DriverWithoutShim`,
    /// `OtherGpus`, `NotAttested`, `SysNice`.
    #[schemars(length(min = 1, max = 64))]
    pub reason: String,
    /// Why, for people.
    #[schemars(length(max = 512))]
    pub message: String,
}

/// What became of an order in `spec.quotas`.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct QuotaStatus {
    /// The pod's UID, as ordered.
    pub pod_uid: String,
    /// The container's name, as ordered.
    pub container: String,
    /// Which memory, as ordered.
    pub account: String,
    /// What became of it.
    pub state: QuotaState,
    /// The quota that is in force, at most what the container asked for. Absent where there is no such container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota: Option<Amount>,
    /// What is used, while that is above the quota.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used: Option<Amount>,
}

/// What became of an ordered quota.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum QuotaState {
    /// It is in force, and no more than it is used.
    Applied,
    /// It is in force, and more than it is used: nothing more is granted until frees have caught up.
    Pending,
    /// No such container has memory of that kind here.
    NotFound,
    /// A value of another version. It is read and never written: the schema refuses it.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

fn is_zero(count: &i32) -> bool {
    *count == 0
}

/// A fault of a context or a GPU that nobody has dealt with.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Fault {
    /// Names this occurrence for ever: what a command about it quotes.
    #[schemars(length(min = 1, max = 64))]
    pub id: String,
    /// What broke.
    pub kind: FaultKind,
    /// The GPU's UUID.
    #[schemars(length(min = 1, max = 96))]
    pub gpu: String,
    /// G of the GPU when it happened.
    pub gpu_generation: i64,
    /// The CUDA error (`CUresult`), where a context reported one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda_error: Option<i32>,
    /// The XID, where the kernel's log reported one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub xid: Option<i32>,
    /// What is done about it, or has to be. Absent while that is not decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub action: Option<FaultAction>,
    /// Whose context it was. Absent where the GPU itself is at fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<FaultContainer>,
    /// When it was seen.
    #[schemars(schema_with = "schema::time")]
    pub time: Time,
}

/// What broke.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FaultKind {
    /// A process's CUDA context.
    Context,
    /// The GPU.
    Gpu,
    /// A value of another version. It is read and never written: the schema refuses it.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// What is done about a fault, or has to be.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FaultAction {
    /// Of a context: its process executes its program again.
    InPlace,
    /// Of a context: its container is killed, and restarted by the kubelet.
    Restart,
    /// Of a context: its container was restarted too often, and is killed. Its pod has to go.
    BeyondMaximum,
    /// Of a context: its pod has to go.
    Evict,
    /// Of a context: nothing.
    Report,
    /// Of a GPU: only a reset cures it.
    ResetGpu,
    /// Of a GPU: only a restart of the machine cures it.
    RestartNode,
    /// Of a GPU: it is away, and may come back.
    Wait,
    /// A value of another version. It is read and never written: the schema refuses it.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// The container whose context a fault poisoned.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FaultContainer {
    /// The pod's UID.
    pub pod_uid: String,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The container's name.
    pub container: String,
    /// P, the generation of the process image at the fault.
    pub process_generation: i64,
}
