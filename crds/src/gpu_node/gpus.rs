//! The GPUs in the status of a `GpuNode`.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Amount, schema};

/// One GPU or MIG instance.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
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
    /// Memory that ended pods had exported and other processes still hold, and memory of pods whose
    /// processes run on after the pod's end. No pod is bound to it before those processes end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leaked: Option<Amount>,
    /// Memory that is in use and charged to no pod. No pod is bound to it meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub withheld: Option<Amount>,
    /// The UID of the pod whose reservation the agent has accepted (`spec.reservations`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserved_for: Option<String>,
    /// The namespace whose pods alone get memory of the GPU until the node restarts, because the
    /// GPU did not pass the scrub check. Empty where no pod gets any; absent where pods of all
    /// namespaces do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub only_for: Option<String>,
    /// The waiting pods for which free memory is set aside, and how much. They are the pod of the
    /// reservation, and the first pod of the node's queue.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = super::MAX_SET_ASIDE), extend("x-kubernetes-list-type" = "atomic"))]
    pub set_aside: Vec<GpuPod>,
    /// The pods with memory on the GPU, those with the most first; at most 256, and at most 3,584
    /// entries on the whole node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = super::MAX_PODS), extend("x-kubernetes-list-type" = "atomic"))]
    pub pods: Vec<GpuPod>,
    /// The number of pods with memory on the GPU that `pods` does not list.
    #[serde(default, skip_serializing_if = "super::is_zero")]
    pub pods_omitted: i32,
    /// The allocator runtime of the GPU, which creates its retained memory. Absent where retained
    /// memory is switched off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runtime: Option<GpuRuntime>,
    /// How the GPU's compute time is divided. Absent where the agent offers none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute: Option<GpuCompute>,
}

/// How a GPU's compute time is divided among pods with a weight (`bursar.dev/gpu-compute`).
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuCompute {
    /// Whether weights hold. `Enforced`: a test on this GPU model, driver and firmware has shown
    /// it. `NotEnforced`: it has shown that they do not, the agent cannot hold them now, or the GPU
    /// has MIG instances. `NotTested`: no test has run yet, because the GPU was not idle, or its
    /// outcome was unclear; the agent sets slices.
    pub state: ComputeState,
    /// The reason where weights may not hold.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 256))]
    pub reason: String,
    /// The time in which each pod with work has its part once, such as `4ms`.
    #[schemars(length(max = 16))]
    pub round: String,
    /// Channel groups on the GPU that no weight holds: of no known process, or too many of one pod.
    #[serde(default, skip_serializing_if = "super::is_zero")]
    pub hidden_groups: i32,
}

/// Whether weights of compute time hold on a GPU.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ComputeState {
    /// A test has shown that they hold.
    Enforced,
    /// A test has shown that they do not hold, or the GPU has MIG instances.
    NotEnforced,
    /// No test has run yet, or it failed.
    NotTested,
    /// A value of another version of the API: readers accept it, and the schema refuses to store
    /// it.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
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
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
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
