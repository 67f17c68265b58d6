//! Makes the Events that tell running pods about an uninstall.

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::MANAGER;
use crate::objects::Pod;
use crate::snapshot::Snapshot;

/// The reason of the Events.
pub const REASON: &str = "GpuMemoryUninstall";

/// The losses of a pod at an uninstall, as its Event states them.
const NOTE: &str = "Bursar is being uninstalled: without it a request for more GPU memory fails as \
    out of memory after 10 s, retained memory is lost, and a container that ends cannot start \
    again; finish the work of this pod and delete it";

/// The pods that run on a node and have not ended.
pub fn pods(snapshot: &Snapshot) -> impl Iterator<Item = &Pod> {
    let pods = snapshot.pods.iter();
    pods.filter(|pod| !pod.has_ended() && !pod.spec.node_name.is_empty())
}

/// The Event of a pod (`events.k8s.io/v1`). A pod has one, so that a second run adds none.
pub fn event(pod: &Pod, now: Timestamp) -> Value {
    let metadata = &pod.metadata;
    json!({
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {
            "name": format!("bursar-uninstall.{}", metadata.uid),
            "namespace": metadata.namespace,
        },
        "eventTime": format!("{now:.6}"),
        "type": "Warning",
        "reason": REASON,
        "action": "Uninstall",
        "note": NOTE,
        "regarding": {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": metadata.namespace,
            "name": metadata.name,
            "uid": metadata.uid,
        },
        "reportingController": MANAGER,
        "reportingInstance": MANAGER,
    })
}
