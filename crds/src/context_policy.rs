//! Defines the measures against poisoned CUDA contexts and lost GPUs.
#![allow(
    unreachable_pub,
    reason = "KubeSchema copies each struct into a function, `pub` included"
)]

use std::str::FromStr;

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How a pod recovers from a CUDA context that a fault has poisoned.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContextPolicy {
    /// The first measure. Without this field the cluster's default applies.
    // The schema of an optional enum has the enum's description.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub action: Option<ContextAction>,

    /// How many restarts, in place or not, a container has within the window before its pod is
    /// evicted. Also how many of its processes end alone before the container is restarted.
    #[serde(default = "default_max_restarts")]
    #[schemars(range(min = 0, max = 100))]
    pub max_restarts: i32,

    /// The window of `maxRestarts`, in seconds.
    #[serde(default = "default_window_seconds")]
    #[schemars(range(min = 1, max = 86_400))]
    pub window_seconds: i32,

    /// How long a process may take to end by itself after its error, before the agent kills it. 0
    /// kills at once.
    #[serde(default = "default_grace_seconds")]
    #[schemars(range(min = 0, max = 300))]
    pub grace_seconds: i32,
}

impl Default for ContextPolicy {
    fn default() -> Self {
        Self {
            action: None,
            max_restarts: default_max_restarts(),
            window_seconds: default_window_seconds(),
            grace_seconds: default_grace_seconds(),
        }
    }
}

fn default_max_restarts() -> i32 {
    5
}

fn default_window_seconds() -> i32 {
    600
}

fn default_grace_seconds() -> i32 {
    10
}

/// The first measure against a poisoned context; absent for the cluster's default. `InPlace`: the
/// shim executes the program again in its process. `Process`: the agent kills the process whose
/// context is poisoned, and other processes of the container go on. `Restart`: the agent kills the
/// container, and the kubelet restarts it. `Evict`: the operator evicts the pod. `Report`: the
/// agent only reports the fault.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ContextAction {
    /// The shim executes the program again in its own process: same pod, same pid, about 0.3 s. The
    /// program's own error handling does not run.
    InPlace,
    /// The agent kills the process whose context is poisoned, and other processes of the container
    /// go on. Where that is the container's main process, the kubelet restarts the container.
    #[default]
    Process,
    /// The agent kills the container's main process; the kubelet restarts the container with
    /// back-off.
    Restart,
    /// The operator evicts the pod.
    Evict,
    /// The agent only reports the fault.
    Report,
    /// A value of another version of the API: readers accept it, and the schema refuses to store
    /// it.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

impl ContextAction {
    /// The actions that a cluster may have by default. A namespace has to choose `Evict` itself.
    pub const DEFAULTS: [Self; 4] = [Self::InPlace, Self::Process, Self::Restart, Self::Report];
    /// The actions of this version.
    pub const ALL: [Self; 5] = [
        Self::InPlace,
        Self::Process,
        Self::Restart,
        Self::Evict,
        Self::Report,
    ];

    /// The word of the API.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::InPlace => "InPlace",
            Self::Process => "Process",
            Self::Restart => "Restart",
            Self::Evict => "Evict",
            Self::Report => "Report",
            Self::Unknown => "Unknown",
        }
    }
}

/// The cluster's default for poisoned contexts, as the chart writes it.
impl FromStr for ContextAction {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut defaults = Self::DEFAULTS.into_iter();
        let found = defaults.find(|action| action.as_str() == text);
        let names = || Self::DEFAULTS.map(Self::as_str).join(", ");
        found.ok_or_else(|| format!("write one of {}", names()))
    }
}

/// The measure against the fault; absent while the agent has not decided. Of a context: `InPlace`,
/// `Process`, `Restart`, `Evict` and `Report` as in a budget's `contextPolicy`, `BeyondMaximum`
/// after too many restarts. Of a GPU: `ResetGpu` and `RestartNode` for an admin, `Wait` while it
/// may come back.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FaultAction {
    /// For a context: the process executes its program again.
    InPlace,
    /// For a context: the agent kills the process, and the container goes on.
    Process,
    /// For a context: the agent kills the container, and the kubelet restarts it.
    Restart,
    /// For a context: the container was restarted too often. The agent kills it, and the operator
    /// evicts the pod.
    BeyondMaximum,
    /// For a context: the operator evicts the pod.
    Evict,
    /// For a context: nothing, the fault is only reported.
    Report,
    /// For a GPU: an admin resets the GPU.
    ResetGpu,
    /// For a GPU: an admin restarts the machine.
    RestartNode,
    /// For a GPU: the GPU is away and may come back.
    Wait,
    /// A value of another version of the API: readers accept it, and the schema refuses to store
    /// it.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

impl FaultAction {
    /// Whether the fault is open until the operator has evicted the pod.
    pub const fn awaits_eviction(self) -> bool {
        matches!(self, Self::Evict | Self::BeyondMaximum)
    }

    /// The value of the label `action` of metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::InPlace => "in-place",
            Self::Process => "process",
            Self::Restart => "restart",
            Self::BeyondMaximum => "beyond-maximum",
            Self::Evict => "evict",
            Self::Report => "report",
            Self::ResetGpu => "reset-gpu",
            Self::RestartNode => "restart-node",
            Self::Wait => "wait",
            Self::Unknown => "unknown",
        }
    }
}
