//! The containers in the status of a `GpuNode`: their memory, leases, waits, quotas and faults.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::context_policy::FaultAction;
use crate::{Amount, schema};

/// Use and fault counters of a namespace's pods on this node. The counters grow as long as the node
/// exists.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NamespaceUse {
    /// The namespace.
    #[schemars(length(min = 1, max = 63))]
    pub namespace: String,
    /// The most device memory in use at a time within the last sampled minute, in quanta, rounded
    /// up.
    pub observed: i32,
    /// The most managed memory charged at a time within the last sampled minute, in quanta, rounded
    /// up, of containers that request it. `observed` has managed memory that a GPU's quota covers.
    #[serde(default)]
    pub observed_managed: i32,
    /// Allocations that failed for lack of quota.
    pub denials: i64,
    /// Process images whose context a fault has poisoned.
    pub poisoned: i64,
    /// Restarts for poisoned contexts, in place or not.
    pub restarts: i64,
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
    /// The weight of the container's pod in the compute time of each of its GPUs, in hundredths.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_weight: Option<i32>,
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

/// A container that waits until its node has room for it.
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
    /// The memory that the container waits for. `DeviceMemory`: of GPUs. `ManagedMemory`: of the
    /// node's managed memory. `Compute`: of a GPU with room for the pod's weight too. Absent, as
    /// earlier agents write it: device memory.
    #[serde(default)]
    pub resource: MemoryResource,
    /// The requested memory, in quanta.
    pub quanta: i32,
    /// The time since which the container waits.
    #[schemars(schema_with = "schema::time")]
    pub since: Time,
}

/// A kind of memory that containers request.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum MemoryResource {
    /// Device memory, of one GPU or of several.
    #[default]
    DeviceMemory,
    /// Managed memory of the node.
    ManagedMemory,
    /// Device memory, on a GPU that has room for the pod's weight too, and none has.
    Compute,
    /// A value of another version of the API: readers accept it, and the schema refuses to store
    /// it.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
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
