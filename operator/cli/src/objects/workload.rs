//! Defines the parts of workloads.

use serde::{Deserialize, Serialize};

use super::pod::PodSpec;
use super::{Condition, Meta};

/// An object that creates pods: a ReplicaSet, Deployment, StatefulSet, DaemonSet or Job.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Workload {
    /// The metadata.
    pub metadata: Meta,
    /// The spec.
    pub spec: WorkloadSpec,
    /// The status.
    pub status: WorkloadStatus,
}

/// A workload's spec.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkloadSpec {
    /// The wanted pods; 1 when absent.
    pub replicas: Option<i64>,
    /// The wanted pods of a Job at a time; 1 when absent.
    pub parallelism: Option<i64>,
    /// The pods of a Job that must succeed; absent for a work queue.
    pub completions: Option<i64>,
    /// Whether a Job is suspended.
    pub suspend: bool,
    /// The pods that are made.
    pub template: Template,
}

/// The template of a workload's pods.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Template {
    /// The pods' metadata.
    pub metadata: Meta,
    /// The pods' spec.
    pub spec: PodSpec,
}

/// A workload's status.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct WorkloadStatus {
    /// The conditions, such as that of a failed Job.
    pub conditions: Vec<Condition>,
    /// Existing pods.
    pub replicas: i64,
    /// Ready pods.
    pub ready_replicas: i64,
    /// Pods of a Job that have not ended.
    pub active: i64,
    /// Pods of a Job that have succeeded.
    pub succeeded: i64,
    /// Nodes that should run a DaemonSet's pod.
    pub desired_number_scheduled: i64,
    /// Nodes that run a DaemonSet's pod.
    pub current_number_scheduled: i64,
    /// Nodes that run the newest pod of a DaemonSet.
    pub updated_number_scheduled: i64,
    /// Nodes whose DaemonSet pod is ready.
    pub number_ready: i64,
}
