//! Defines `GpuNode`: a node's GPUs as its agent reports them, and the operator's orders.
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

use crate::context_policy::{ContextPolicyEntry, FaultAction};
use crate::{Amount, schema};

/// The most GPUs (or MIG instances) in one object: 16 GPUs with 7 instances each.
pub const MAX_GPUS: usize = 112;
/// The most namespaces with a context policy.
pub const MAX_CONTEXTS: usize = 1024;
/// The most open faults in one object; the agent adds others when some are closed.
pub const MAX_FAULTS: usize = 64;
/// The most waiting containers in one object, the longest waiting first.
pub const MAX_WAITING: usize = 16;
/// The most containers without enforcement in one object.
pub const MAX_NOT_ENFORCED: usize = 16;
/// The most pods listed with one GPU, those with the most memory first.
pub const MAX_PODS: usize = 32;
/// The most pods with a name in the lists of all GPUs; further ones have a UID alone.
pub const MAX_POD_NAMES: usize = 512;
/// The most pods for which one GPU has memory set aside.
pub const MAX_SET_ASIDE: usize = 4;
/// The most lowered quotas in one object.
pub const MAX_QUOTAS: usize = 64;
/// The most ordered restarts in one object; the operator adds others when some are done.
pub const MAX_RESTARTS: usize = 16;
/// The most owners with moved pods in one object; the operator drops older ones.
pub const MAX_RECORDED_RELOCATIONS: usize = 64;
/// The most namespaces in one object, those with pods on the node first.
pub const MAX_NAMESPACES: usize = 32;
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
    doc = "A node's GPUs. The object has the node's name; the agent owns the status, the operator the spec.",
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
        description = "Containers that wait for room on one GPU",
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
    #[schemars(length(max = 112), extend("default" = []))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["gpu".to_owned()]))]
    pub reservations: Vec<Reservation>,
    /// Quotas of running containers that are lower than their requests. A container without an
    /// entry has its request, and an entry above the request changes nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("default" = []))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["podUid".to_owned(), "container".to_owned(), "account".to_owned()]))]
    pub quotas: Vec<QuotaOverride>,
    /// Context policies of namespaces. In every other namespace the cluster's default applies, with
    /// at most 5 restarts in 10 minutes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024), extend("default" = []))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["namespace".to_owned()]))]
    pub context_policies: Vec<ContextPolicyEntry>,
    /// Restarts of containers whose fault the agent has only reported so far.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("default" = []))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["fault".to_owned()]))]
    pub restarts: Vec<RestartRequest>,
    /// How often the operator moved pending pods of an owner to other nodes. The agent ignores it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("default" = []))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["owner".to_owned()]))]
    pub relocations: Vec<Relocation>,
    /// UUIDs of GPUs to drain for a reset or another driver. The agent kills the containers with
    /// memory on them, starts none there, and discards their retained memory. A GPU stands for its
    /// MIG instances too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 112), inner(length(min = 1, max = 96)), extend("default" = []))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub drain: Vec<String>,
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
    pub waiter: String,
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
    /// The context actions that the agent carries out. The operator writes no other one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(min = 1, max = 32)), extend("x-kubernetes-list-type" = "set"))]
    pub context_actions: Vec<String>,
    /// Device memory of the healthy GPUs together, in quanta.
    pub device_memory: NodeMemory,
    /// Managed memory, in quanta. Zero where the node offers none.
    pub managed_memory: NodeMemory,
    /// The GPUs, and MIG instances as GPUs of their own.
    #[schemars(length(max = 112), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["uuid"]))]
    pub gpus: Vec<GpuStatus>,
    /// Containers that wait until one GPU has room, the longest waiting first; at most 16.
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "atomic"))]
    pub waiting: Vec<PendingContainer>,
    /// The number of containers without enforcement of their quota.
    #[serde(skip_serializing_if = "is_zero")]
    pub not_enforced_count: i32,
    /// Containers without enforcement of their quota, and the reasons; at most 16.
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "atomic"))]
    pub not_enforced: Vec<EnforcementGap>,
    /// The state of each entry of `spec.quotas`.
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub quotas: Vec<QuotaStatus>,
    /// Open faults, those that need the operator or an admin first; at most 64.
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["id"]))]
    pub faults: Vec<Fault>,
    /// The containers with memory on the node, those with faults first; at most 256.
    #[schemars(length(max = 256), extend("x-kubernetes-list-type" = "atomic"))]
    pub containers: Vec<GpuContainer>,
    /// The number of leases of retained memory.
    #[serde(skip_serializing_if = "is_zero")]
    pub retained_count: i32,
    /// The leases of retained memory, by namespace and name; at most 128, the largest of each
    /// namespace.
    #[schemars(length(max = 128), extend("x-kubernetes-list-type" = "atomic"))]
    pub retained: Vec<RetainedLease>,
    /// Use and fault counters of each namespace's pods on this node; at most 32.
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["namespace"]))]
    pub namespaces: Vec<NamespaceUse>,
    /// The node's conditions: Ready, GpusFound, Registered, CdiReady, WithinTokenLimit,
    /// CheckpointIntact, StateWritten, Audited, DriverLimits, RetainedMemory, MemoryScrubbed,
    /// Accepted, SoleOwner, ManagedMemory, PageableMemoryOnGpu.
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
}

/// Use and fault counters of a namespace's pods on this node. The counters grow as long as the node
/// exists.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NamespaceUse {
    /// The namespace.
    #[schemars(length(min = 1, max = 63))]
    pub namespace: String,
    /// The most device memory in use at a time within the last sampled minute, in quanta, rounded
    /// up.
    pub observed: i32,
    /// Allocations that failed for lack of quota.
    pub denials: i64,
    /// Process images whose context a fault has poisoned.
    pub poisoned: i64,
    /// Restarts for poisoned contexts, in place or not.
    pub restarts: i64,
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

/// A container with GPU memory: the generation of its processes, and its restarts after faults.
/// The agent writes changes of `processGeneration` alone at most once a minute.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuContainer {
    /// The pod's UID.
    #[schemars(length(min = 1, max = 64))]
    pub pod_uid: String,
    /// The pod's namespace. Absent before the agent knows the pod's name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// The pod's name. Absent where the namespace is.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub pod: String,
    /// The container's name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub container: String,
    /// The generation of the container's last process image. It grows by one with each image that
    /// uses CUDA: with each new process, and with each program that a process executes again.
    pub process_generation: i64,
    /// Restarts for poisoned contexts, in place or not.
    #[serde(default)]
    pub restarts: i64,
    /// Restarts for poisoned contexts in the same process.
    #[serde(default)]
    pub restarts_in_place: i64,
    /// The last fault of the container, open or not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_fault: Option<LastFault>,
}

/// The last fault of a container.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LastFault {
    /// The GPU's UUID.
    #[schemars(length(min = 1, max = 96))]
    pub gpu: String,
    /// The generation of the process image at the fault.
    pub process_generation: i64,
    /// The CUDA error (`CUresult`), where a context reported one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda_error: Option<i32>,
    /// The XID, where the kernel's log reported one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub xid: Option<i32>,
    /// The measure against the fault. The schema has the type's description in place of this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub action: Option<FaultAction>,
    /// The time at which the agent saw the fault.
    #[schemars(schema_with = "schema::time")]
    pub time: Time,
}

/// A lease of retained memory. The agent writes changes of leases alone at most once a minute.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RetainedLease {
    /// The namespace whose pods share the lease.
    #[schemars(length(min = 1, max = 63))]
    pub namespace: String,
    /// The lease's name in its namespace.
    #[schemars(length(min = 1, max = 96))]
    pub name: String,
    /// The GPU's UUID.
    #[schemars(length(min = 1, max = 96))]
    pub gpu: String,
    /// The lease's generation: the successor of a lost or discarded lease has a higher one.
    pub generation: i64,
    /// The GPU's generation when the memory was created. In another generation the memory is lost.
    pub gpu_generation: i64,
    /// The size.
    pub size: Amount,
    /// The state of the lease. `Writing`: a process is writing it. `Committed`: pods of the
    /// namespace can open it. `Discarded`: no pod can open it, and a pod still has it open.
    /// `Releasing`: the agent is freeing it.
    pub state: LeaseState,
    /// The UID of the pod that is charged for it.
    #[schemars(length(min = 1, max = 64))]
    pub owner_uid: String,
    /// The name of that pod, where the agent knows it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub owner: String,
    /// The number of pods that have the lease open.
    pub openers: i32,
}

/// The state of a lease.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LeaseState {
    /// A process is writing the lease.
    Writing,
    /// Pods of the namespace can open the lease.
    Committed,
    /// No pod can open the lease, and a pod still has it open.
    Discarded,
    /// The agent is freeing the lease.
    Releasing,
    /// A value of another version of the API: readers accept it, and the schema refuses to store
    /// it.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
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

/// One GPU or MIG instance.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuStatus {
    /// The UUID as NVML and CUDA write it (`GPU-...`, `MIG-...`).
    #[schemars(length(min = 1, max = 96))]
    pub uuid: String,
    /// The index in NVML's order; a MIG instance has the index of its GPU.
    pub index: i32,
    /// The product name.
    pub model: String,
    /// The memory that NVML reports, without the driver's own reserve.
    pub memory: Amount,
    /// Whether the agent binds new pods to the GPU. `Active`: it does. `Reserved`: it sets memory
    /// aside for the pod of `reservedFor`. `Draining`: it ends the pods with memory there. `Lost`:
    /// the GPU does not answer.
    pub state: GpuState,
    /// The generation of the GPU's memory. The agent increments it whenever the contents may have
    /// been lost: by a reset, a reboot or a fatal fault.
    pub generation: i64,
    /// The GPU's health.
    pub health: Health,
    /// Quanta that the GPU offers to pods; 0 while it is unhealthy.
    pub capacity: i32,
    /// Quanta that are bound to no pod.
    pub free: i32,
    /// The most that a new pod can have: `free` without `setAside`.
    pub largest_free: i32,
    /// Memory that ended pods had exported and other processes still hold. No pod is bound to it
    /// before those processes release it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leaked: Option<Amount>,
    /// Memory that is in use and charged to no pod. No pod is bound to it meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub withheld: Option<Amount>,
    /// The UID of the pod whose reservation the agent has accepted (`spec.reservations`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserved_for: Option<String>,
    /// The waiting pods for which free memory is set aside, and how much: the pod of the
    /// reservation, and the first pod of the node's queue.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 4), extend("x-kubernetes-list-type" = "atomic"))]
    pub set_aside: Vec<GpuPod>,
    /// The pods with memory on the GPU, those with the most first; at most 32.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "atomic"))]
    pub pods: Vec<GpuPod>,
    /// The allocator runtime of the GPU, which creates its retained memory. Absent where retained
    /// memory is switched off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runtime: Option<GpuRuntime>,
}

/// The allocator runtime of a GPU: the process (provisioner) with which the agent creates retained
/// memory there. The agent writes changes of `starts`, `lent` and `failures` alone at most once a
/// minute.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuRuntime {
    /// The state of the process. `Stopped`: it does not run. `Starting`: the agent starts it, or
    /// starts it again after a failure. `Ready`: it runs. `Refused`: CUDA refuses the GPU at each
    /// start. `Stuck`: it hangs in the driver and cannot be killed. `Drained`: the GPU is drained.
    pub state: RuntimeState,
    /// How often the process has started since the agent's own start.
    pub starts: i64,
    /// The memory that it has lent: the leases of the GPU.
    pub lent: Amount,
    /// How often a start has failed, or the process has ended by itself or missed a deadline, since
    /// the agent's own start.
    pub failures: i64,
    /// The last failure, until the next start succeeds.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 256))]
    pub reason: String,
}

/// The state of a GPU's allocator runtime.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RuntimeState {
    /// The process does not run.
    #[default]
    Stopped,
    /// The agent starts the process, or starts it again after a failure.
    Starting,
    /// The process runs.
    Ready,
    /// CUDA refuses the GPU at each start.
    Refused,
    /// The process hangs in the driver and cannot be killed.
    Stuck,
    /// The GPU is drained.
    Drained,
    /// A value of another version of the API: readers accept it, and the schema refuses to store
    /// it.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

impl RuntimeState {
    /// The states that an agent reports.
    pub const ALL: [Self; 6] = [
        Self::Stopped,
        Self::Starting,
        Self::Ready,
        Self::Refused,
        Self::Stuck,
        Self::Drained,
    ];
}

/// A pod with an amount of a GPU's memory.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuPod {
    /// The pod's UID.
    #[schemars(length(min = 1, max = 64))]
    pub uid: String,
    /// The pod's namespace. Absent before the agent knows the pod's name, and for pods beyond the
    /// first 512 of the node.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// The pod's name. Absent where the namespace is.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The pod's memory, in quanta.
    pub quanta: i32,
}

/// Whether the agent binds new pods to a GPU.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum GpuState {
    /// The agent binds new pods.
    #[default]
    Active,
    /// The agent sets memory aside for one pod.
    Reserved,
    /// The agent binds no pod and ends those that have memory on the GPU.
    Draining,
    /// The GPU does not answer, or the driver lists it no more.
    Lost,
    /// A value of another version of the API: readers accept it, and the schema refuses to store
    /// it.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// The health of a GPU.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Health {
    /// `Healthy`, or `Unhealthy`: the agent has withdrawn the GPU's quanta from the kubelet.
    pub status: HealthStatus,
    /// The reason as one word: `Ok`, `GpuLost`, `Xid79`, `CudaRefused`, `Draining`, or `Drained`
    /// once the agent and its processes have released the GPU.
    #[schemars(length(min = 1, max = 64))]
    pub reason: String,
    /// The time of the last change of the status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::time")]
    pub since: Option<Time>,
}

/// Whether a GPU is fit for pods.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum HealthStatus {
    /// The agent offers the GPU's quanta to the kubelet.
    #[default]
    Healthy,
    /// The agent has withdrawn the GPU's quanta from the kubelet.
    Unhealthy,
    /// A value of another version of the API: readers accept it, and the schema refuses to store
    /// it.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// A container that waits until one GPU has room.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PendingContainer {
    /// The pod's UID.
    pub pod_uid: String,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The container's name.
    pub container: String,
    /// The requested memory, in quanta.
    pub quanta: i32,
    /// The time since which the container waits.
    #[schemars(schema_with = "schema::time")]
    pub since: Time,
}

/// A container without enforcement of its quota.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EnforcementGap {
    /// The pod's UID.
    pub pod_uid: String,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The container's name.
    pub container: String,
    /// The reason as one word: `Privileged`, `MountMissing`, `MountedOver`, `ForeignDriver`,
    /// `DriverWithoutShim`, `OtherGpus`, `NotAttested`, `SysNice`.
    #[schemars(length(min = 1, max = 64))]
    pub reason: String,
    /// The reason as a sentence.
    #[schemars(length(max = 512))]
    pub message: String,
}

/// The state of an entry of `spec.quotas`.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct QuotaStatus {
    /// The pod's UID, as in the entry.
    pub pod_uid: String,
    /// The container's name, as in the entry.
    pub container: String,
    /// The account, as in the entry.
    pub account: String,
    /// The state of the quota. `Applied`: it is in force. `Pending`: the container still uses more,
    /// and gets nothing meanwhile. `NotFound`: the node has no such container.
    pub state: QuotaState,
    /// The quota in force, at most the container's request. Absent where no such container exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota: Option<Amount>,
    /// The memory in use, while that is above the quota.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used: Option<Amount>,
}

/// The state of a lowered quota.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum QuotaState {
    /// The quota is in force, and the container uses no more.
    Applied,
    /// The quota is in force and the container uses more: the agent grants nothing until enough is
    /// freed.
    Pending,
    /// No such container has memory of that account on this node.
    NotFound,
    /// A value of another version of the API: readers accept it, and the schema refuses to store
    /// it.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

fn is_zero(count: &i32) -> bool {
    *count == 0
}

/// An open fault of a CUDA context or a GPU.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Fault {
    /// The id of this occurrence, which is never used again.
    #[schemars(length(min = 1, max = 64))]
    pub id: String,
    /// The subject of the fault: `Context` for the CUDA context of a process, `Gpu` for the GPU.
    pub kind: FaultKind,
    /// The GPU's UUID.
    #[schemars(length(min = 1, max = 96))]
    pub gpu: String,
    /// The GPU's generation at the fault.
    pub gpu_generation: i64,
    /// The CUDA error (`CUresult`), where a context reported one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda_error: Option<i32>,
    /// The XID, where the kernel's log reported one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub xid: Option<i32>,
    /// The measure against the fault. The schema has the type's description in place of this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub action: Option<FaultAction>,
    /// The container of the context. Absent for faults of the GPU itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<FaultContainer>,
    /// The time at which the agent saw the fault.
    #[schemars(schema_with = "schema::time")]
    pub time: Time,
}

/// The kind of a fault.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FaultKind {
    /// A CUDA context of a process.
    Context,
    /// The GPU.
    Gpu,
    /// A value of another version of the API: readers accept it, and the schema refuses to store
    /// it.
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
    /// The generation of the process image at the fault.
    pub process_generation: i64,
}
