//! Explains a pod that waits on its node until a GPU has room.

use bursar_crds::GpuNode;
use bursar_crds::gpu_node::{GpuState, GpuStatus};

use super::pending::{largest_request, obstacle};
use super::pod::newest;
use super::{Cause, Explanation, Verdict};
use crate::amounts::{count, memory, since};
use crate::objects::Pod;
use crate::show::gpus::{self, GpuMemory};
use crate::show::{name, quanta, quantum_bytes};
use crate::snapshot::{Kind, Snapshot};

/// The most pods that are named as in the way.
const MAX_PODS: usize = 5;

/// Whether the pod waits on its node.
pub(super) fn waits(snapshot: &Snapshot, pod: &Pod) -> bool {
    let node = snapshot.gpu_node(&pod.spec.node_name);
    let waiting = node
        .and_then(|node| node.status.as_ref())
        .map(|status| &status.waiting);
    let is_listed =
        waiting.is_some_and(|all| all.iter().any(|one| one.pod_uid == pod.metadata.uid));
    is_listed || pod.wait_message().is_some() || waits_by_event(snapshot, pod)
}

/// Whether the newest of the agent's Events about the start says that the pod waits.
fn waits_by_event(snapshot: &Snapshot, pod: &Pod) -> bool {
    let runs = pod
        .container_statuses()
        .any(|status| status.state.running.is_some());
    let waits = newest(snapshot, pod, "WaitingForGpuMemory").and_then(|event| event.time());
    let bound = newest(snapshot, pod, "GpuMemoryBound").and_then(|event| event.time());
    !runs && waits > bound
}

/// `GPU 0`, or `GPU 0/1` for a MIG instance.
pub(super) fn gpu_name(node: &GpuNode, gpu: &GpuStatus) -> String {
    format!("GPU {}", gpus::index(node, gpu))
}

pub(super) fn explain(explanation: &mut Explanation, snapshot: &Snapshot, pod: &Pod) {
    let node_name = &pod.spec.node_name;
    let node = snapshot.gpu_node(node_name);
    let status = node.and_then(|node| node.status.as_ref());
    let waiter = status.and_then(|status| {
        status
            .waiting
            .iter()
            .find(|waiter| waiter.pod_uid == pod.metadata.uid)
    });
    let age = waiter.map_or_else(String::new, |waiter| {
        format!(", for {}", since(waiter.since.0, snapshot.now))
    });
    explanation.conclude(
        Verdict::Waits,
        format!("{} waits on {node_name}{age}.", pod.key()),
    );
    let said = pod.wait_message().map(str::to_owned);
    let event = newest(snapshot, pod, "WaitingForGpuMemory");
    if let Some(said) = said.or_else(|| event.map(|event| event.message.clone())) {
        explanation.say("agent", said.trim());
    }
    let Some(node) = node else {
        explanation.add(Cause::Fragmentation);
        explanation.say("node", "the GPUs of the node could not be read");
        return;
    };
    let wanted = largest_request(pod);
    gpus_of_node(explanation, snapshot, node, pod, wanted);
    reservation(explanation, snapshot, pod);
    elsewhere(explanation, snapshot, node, wanted);
}

/// States what each GPU of the node has for the pod.
fn gpus_of_node(
    explanation: &mut Explanation,
    snapshot: &Snapshot,
    node: &GpuNode,
    pod: &Pod,
    wanted: u64,
) {
    let Some(status) = &node.status else { return };
    let names = snapshot.pods_by_uid();
    let mut parts = Vec::new();
    for gpu in &status.gpus {
        let free = memory(GpuMemory::of(node, gpu).free);
        let name = gpu_name(node, gpu);
        parts.push(match (gpu.state, &gpu.reserved_for) {
            (GpuState::Draining, _) => {
                explanation.add(Cause::GpuDrained);
                format!("{name} is drained")
            }
            (GpuState::Lost, _) => {
                explanation.add(Cause::GpuLost);
                format!("{name} is lost ({})", gpu.health.reason)
            }
            (_, Some(uid)) if *uid == pod.metadata.uid => {
                format!("{name} has {free} (held for this pod)")
            }
            (_, Some(uid)) => {
                explanation.add(Cause::HeldForAnother);
                let other = names
                    .get(uid.as_str())
                    .map_or_else(|| "another pod".to_owned(), |pod| pod.key());
                format!("{name} has {free} (held for {other})")
            }
            (_, None) => format!("{name} has {free}"),
        });
    }
    if quanta(status.device_memory.free, quantum_bytes(node)) >= wanted {
        explanation.add(Cause::Fragmentation);
    } else {
        explanation.add(Cause::NoNodeWithRoom);
    }
    explanation.say(
        "node",
        format!("no GPU has {} for it: {}", memory(wanted), parts.join(", ")),
    );
}

/// States the operator's reservation for a pod, and the pods that are in the way there.
pub(super) fn reservation(explanation: &mut Explanation, snapshot: &Snapshot, pod: &Pod) {
    let reserved = snapshot.gpu_nodes.iter().find_map(|node| {
        let mut all = node.spec.reservations.iter();
        let reservation = all.find(|reservation| reservation.waiter == pod.metadata.uid)?;
        let mut gpus = node.status.iter().flat_map(|status| &status.gpus);
        Some((node, gpus.find(|gpu| gpu.uuid == reservation.gpu)?))
    });
    let Some((node, gpu)) = reserved else {
        if snapshot.has_all(Kind::GpuNodes) && !pod.spec.node_name.is_empty() {
            explanation.say(
                "next",
                "the operator has reserved no GPU for it; it starts when a GPU has room",
            );
        }
        return;
    };
    explanation.add(Cause::VictimsLeave);
    let place = format!("{} of {}", gpu_name(node, gpu), name(node));
    explanation.say(
        "next",
        format!("the operator holds {place} for it, and evicts pods there"),
    );
    let names = snapshot.pods_by_uid();
    let quantum = quantum_bytes(node);
    let mut others = 0;
    for bound in &gpu.pods {
        let Some(other) = names.get(bound.uid.as_str()) else {
            others += 1;
            continue;
        };
        if other.spec.priority < pod.spec.priority {
            in_the_way(explanation, snapshot, other, quanta(bound.quanta, quantum));
        }
    }
    if others > 0 {
        explanation.say(
            "in the way",
            format!("{} that you may not read", count(others, "pod")),
        );
    }
}

/// States a pod of lower priority on the reserved GPU, and when it will be gone.
fn in_the_way(explanation: &mut Explanation, snapshot: &Snapshot, other: &Pod, bytes: u64) {
    let named = explanation
        .lines
        .iter()
        .filter(|line| line.label == "in the way")
        .count();
    if named >= MAX_PODS {
        return;
    }
    let borrows = if other.borrows() { ", borrows" } else { "" };
    let mut text = format!(
        "{} ({}, priority {}{borrows})",
        other.key(),
        memory(bytes),
        other.spec.priority
    );
    if let Some(gone) = other.metadata.deletion_timestamp {
        let seconds = gone
            .as_second()
            .saturating_sub(snapshot.now.as_second())
            .max(0);
        text.push_str(&format!(
            ": is being evicted, gone in {seconds}s at the latest"
        ));
        explanation.say("in the way", text);
        return;
    }
    let protecting = snapshot.disruption_budgets.iter().find(|budget| {
        budget.metadata.namespace == other.metadata.namespace
            && budget.status.disruptions_allowed <= 0
            && budget.spec.selector.matches(&other.metadata.labels)
    });
    if let Some(budget) = protecting {
        explanation.add(Cause::DisruptionBudget);
        text.push_str(&format!(
            ": disruption budget {} protects it, for placement.disruptionGraceSeconds (60s unless \
             the chart says otherwise) from the first refusal; the API does not tell how much of it is left",
            budget.metadata.key()
        ));
    } else {
        text.push_str(
            ": of lower priority; the API does not tell whether the operator has chosen it",
        );
    }
    explanation.say("in the way", text);
}

/// States what the other nodes have.
fn elsewhere(explanation: &mut Explanation, snapshot: &Snapshot, node: &GpuNode, wanted: u64) {
    // What keeps the pod from another node is no cause of its wait on this one.
    let mut aside = Explanation::new(String::new());
    let others = snapshot
        .gpu_nodes
        .iter()
        .filter(|other| name(other) != name(node));
    let mut parts: Vec<String> = others
        .filter_map(|other| {
            Some(format!(
                "{} {}",
                name(other),
                obstacle(&mut aside, snapshot, other, wanted)?
            ))
        })
        .collect();
    let more = parts.len().saturating_sub(MAX_PODS);
    parts.truncate(MAX_PODS);
    if more > 0 {
        parts.push(format!("and {}", count(more, "more node")));
    }
    if !parts.is_empty() {
        explanation.say("elsewhere", parts.join("; "));
    }
}
