//! Decides which plugin relays a roll replaces, and what it waits for.
//!
//! A kubelet fails the pods with GPU memory that it admits while no relay answers, and a DaemonSet
//! controller does not know which those are. So nothing replaces a relay but this roll. A cordon
//! keeps away only what the scheduler places from then on. The kubelet still admits pods of
//! DaemonSets, and pods whose binding waited for their volumes.

use bursar_crds::GpuNode;
use bursar_crds::conditions::gpu_node as names;
use serde_json::{Value, json};

use crate::objects::{Node, Pod};

/// The label of a DaemonSet's pod with its revision.
const REVISION: &str = "controller-revision-hash";

/// The newest revision among the `ControllerRevision`s of a DaemonSet.
pub fn newest_revision(revisions: &[Value]) -> Option<&str> {
    let newest = revisions
        .iter()
        .max_by_key(|revision| revision["revision"].as_i64());
    newest?["metadata"]["labels"][REVISION].as_str()
}

/// The relays of `nodes`, or those of an older revision on all nodes.
pub fn relays<'a>(own_pods: &'a [Pod], revision: &str, nodes: &[String]) -> Vec<&'a Pod> {
    let relays = own_pods
        .iter()
        .filter(|pod| pod.metadata.is_component("relay"));
    let wanted = relays.filter(|pod| match nodes {
        [] => pod
            .metadata
            .labels
            .get(REVISION)
            .is_none_or(|of| of != revision),
        nodes => nodes.contains(&pod.spec.node_name),
    });
    wanted.collect()
}

/// The patch that cordons a node, or ends that. `None` if the node is in that state already.
pub fn cordon_patch(node: &Node, cordons: bool) -> Option<Value> {
    let version = &node.metadata.resource_version;
    (node.spec.unschedulable != cordons).then(|| {
        json!({ "metadata": { "resourceVersion": version }, "spec": { "unschedulable": cordons } })
    })
}

/// The pods of a node that its kubelet may be admitting: it writes the start time of a pod that it
/// has admitted.
pub fn not_admitted(pods: &[Pod]) -> Vec<String> {
    let pods = pods.iter().filter(|pod| !pod.has_ended());
    let waiting = pods.filter(|pod| pod.status.start_time.is_none());
    waiting.map(Pod::key).collect()
}

/// The lack of a node for the next pod; `None` when one may come. A relay with the UID `old` does
/// not count.
pub fn lacks(own_pods: &[Pod], gpu_node: &GpuNode, node: &str, old: &str) -> Option<String> {
    let of_node = |component: &'static str| {
        let pods = own_pods.iter();
        pods.filter(move |pod| pod.metadata.is_component(component) && pod.spec.node_name == node)
    };
    let mut relays = of_node("relay").filter(|pod| pod.metadata.uid != old);
    if !relays.any(Pod::is_ready) {
        return Some("a relay that is Ready".to_owned());
    }
    // An agent that is away leaves its last word on the registration.
    if !of_node("agent").any(Pod::is_ready) {
        return Some("an agent that is Ready".to_owned());
    }
    let conditions = gpu_node.status.iter().flat_map(|status| &status.conditions);
    let mut registered = conditions.filter(|condition| condition.type_ == names::REGISTERED);
    match registered.next() {
        Some(registered) if registered.status == "True" => None,
        Some(registered) => Some(format!("its registration: {}", registered.message)),
        None => Some("its registration".to_owned()),
    }
}
