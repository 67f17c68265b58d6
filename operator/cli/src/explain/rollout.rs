//! Finds the pods that a new pod of a Deployment is to replace, and that hold its memory.

use super::{Cause, Explanation};
use crate::amounts::memory;
use crate::objects::Pod;
use crate::snapshot::Snapshot;

/// The label with the hash of a Deployment's pod template.
const TEMPLATE_HASH: &str = "pod-template-hash";

/// Names a predecessor of a waiting pod in place of the full GPUs, because it ends only once the
/// waiting pod is ready.
pub(super) fn explain(explanation: &mut Explanation, snapshot: &Snapshot, pod: &Pod) {
    let full = [Cause::Fragmentation, Cause::NoNodeWithRoom];
    let is_full = |cause: &Cause| full.contains(cause);
    if !explanation.causes.iter().any(is_full) {
        return;
    }
    let Some(predecessor) = predecessor(snapshot, pod) else {
        return;
    };
    explanation.causes.retain(|cause| !is_full(cause));
    explanation.add(Cause::HeldByPredecessor);
    let text = format!(
        "{} ({}) of an older ReplicaSet of the Deployment ends only when this pod is ready",
        predecessor.key(),
        memory(predecessor.device_memory())
    );
    explanation.say("in the way", text);
}

/// The Deployment of a pod, and the hash of the pod's template.
fn deployment(pod: &Pod) -> Option<(&str, &str)> {
    let hash = pod.metadata.labels.get(TEMPLATE_HASH)?;
    let mut owners = pod.metadata.owner_references.iter();
    let set = owners.find(|owner| owner.controller && owner.kind == "ReplicaSet")?;
    Some((set.name.strip_suffix(hash)?.strip_suffix('-')?, hash))
}

/// An older pod of the same Deployment, where the pod may go. If one is terminating, the rollout
/// goes on without the new pod.
fn predecessor<'a>(snapshot: &'a Snapshot, pod: &Pod) -> Option<&'a Pod> {
    let (name, hash) = deployment(pod)?;
    let node = &pod.spec.node_name;
    let is_older = |other: &&Pod| {
        other.metadata.namespace == pod.metadata.namespace
            && other.metadata.creation_timestamp < pod.metadata.creation_timestamp
            && !other.spec.node_name.is_empty()
            && (node.is_empty() || other.spec.node_name == *node)
            && !other.has_ended()
            && deployment(other).is_some_and(|(of, other)| of == name && other != hash)
    };
    let mut older = snapshot.pods.iter().filter(is_older).peekable();
    let first = older.peek().copied();
    first.filter(|_| older.all(|other| other.metadata.deletion_timestamp.is_none()))
}
