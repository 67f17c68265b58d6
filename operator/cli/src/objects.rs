//! Defines the parts of Kubernetes objects that the commands use.
//!
//! These types keep a list of 10,000 pods small. `support` writes them too, so that an archive has
//! no environment variable, argument or annotation of a tenant.

mod event;
mod node;
mod pod;
mod workload;

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};

pub use event::{Event, ObjectRef, Series};
pub use node::{Node, NodeInfo, NodeSpec, NodeStatus};
pub use pod::{
    Container, ContainerState, ContainerStatus, Pod, PodSpec, PodStatus, Port, QUANTA, Request,
    Resources, Running, StateReason,
};
pub use workload::{Template, Workload, WorkloadSpec, WorkloadStatus};

/// The chart's label for the component (agent, operator, relay, fdstore) that owns an object.
pub const COMPONENT_LABEL: &str = "app.kubernetes.io/component";

/// Amounts by resource name, as Kubernetes writes them.
pub type Amounts = BTreeMap<String, String>;

/// An object's metadata.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Meta {
    /// The name.
    pub name: String,
    /// The namespace; empty for an object of the cluster.
    pub namespace: String,
    /// The UID.
    pub uid: String,
    /// The version that a patch has to meet.
    #[serde(skip_serializing)]
    pub resource_version: String,
    /// The generation of the spec.
    pub generation: i64,
    /// The time of the creation.
    pub creation_timestamp: Option<Timestamp>,
    /// The time at which a terminating object is gone at the latest.
    pub deletion_timestamp: Option<Timestamp>,
    /// The labels.
    pub labels: BTreeMap<String, String>,
    /// The annotations that Bursar reads.
    #[serde(skip_serializing)]
    pub annotations: Annotations,
    /// The owners.
    pub owner_references: Vec<Owner>,
}

impl Meta {
    /// Whether the object belongs to this part of Bursar: `agent`, `relay`.
    pub fn is_component(&self, wanted: &str) -> bool {
        let component = self.labels.get(COMPONENT_LABEL);
        component.is_some_and(|component| component == wanted)
    }
}

/// An object's annotations, without those that nothing here reads.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Annotations {
    /// The least number of GPUs that each container of a pod is spread over.
    #[serde(rename = "bursar.dev/gpus")]
    pub gpus: String,
}

/// The reference to an owner.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Owner {
    /// The kind.
    pub kind: String,
    /// The name.
    pub name: String,
    /// The UID.
    pub uid: String,
    /// Whether the owner is the controller.
    pub controller: bool,
}

/// An object of which only metadata matter.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Named {
    /// The metadata.
    pub metadata: Meta,
}

/// A condition of any object.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Condition {
    /// The type.
    #[serde(rename = "type")]
    pub type_: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// The reason as one word.
    pub reason: String,
    /// The message.
    pub message: String,
    /// The time of the last change of the status.
    pub last_transition_time: Option<Timestamp>,
}

impl Meta {
    /// `namespace/name`, or the name of an object of the cluster.
    pub fn key(&self) -> String {
        if self.namespace.is_empty() {
            self.name.clone()
        } else {
            format!("{}/{}", self.namespace, self.name)
        }
    }

    /// Whether an object with this UID is the controller.
    pub fn is_controlled_by(&self, uid: &str) -> bool {
        let mut owners = self.owner_references.iter();
        owners.any(|owner| owner.controller && owner.uid == uid)
    }
}

/// A ResourceQuota.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Quota {
    /// The metadata.
    pub metadata: Meta,
    /// The amounts in force.
    pub status: QuotaStatus,
}

/// A ResourceQuota's status.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct QuotaStatus {
    /// The most that pods may request.
    pub hard: Amounts,
    /// The memory that pods request.
    pub used: Amounts,
}

/// The Lease that a kubelet renews.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Lease {
    /// The metadata.
    pub metadata: Meta,
    /// The spec.
    pub spec: LeaseSpec,
}

/// A Lease's spec.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LeaseSpec {
    /// The time of the last renewal, by the holder's clock.
    pub renew_time: Option<Timestamp>,
}
