//! Explains a pod for which the scheduler has found no node.

use bursar_crds::GpuNode;
use bursar_crds::conditions::gpu_node as names;
use bursar_crds::gpu_node::GpuStatus;

use super::waiting::{reservation, unusable};
use super::{Cause, Explanation, Verdict};
use crate::amounts::{memory, since};
use crate::objects::Pod;
use crate::show::gpus::GpuMemory;
use crate::show::{bytes, condition, name, quanta, quantum_bytes};
use crate::snapshot::{Kind, Snapshot};

/// The most nodes with a line of their own.
const MAX_NODES: usize = 5;

pub(super) fn explain(explanation: &mut Explanation, snapshot: &Snapshot, pod: &Pod) {
    let created = pod.metadata.creation_timestamp;
    let age = created.map_or_else(String::new, |created| {
        format!(", for {}", since(created, snapshot.now))
    });
    explanation.conclude(
        Verdict::Waits,
        format!("{} waits for a node{age}.", pod.key()),
    );
    let scheduled = pod
        .status
        .conditions
        .iter()
        .find(|condition| condition.type_ == "PodScheduled");
    let message = scheduled.map_or("", |condition| condition.message.as_str());
    match message {
        "" => explanation.say("scheduler", "has not looked at the pod yet"),
        message => explanation.say("scheduler", message),
    }
    let wanted = largest_request(pod);
    nodes(explanation, snapshot, wanted);
    let is_known = explanation.causes.contains(&Cause::LargerThanNodes);
    if message.contains("Insufficient bursar.dev/") && !is_known {
        explanation.add(Cause::NoNodeWithRoom);
    }
    without_gpu_nodes(explanation, snapshot);
    reservation(explanation, snapshot, pod);
    let nominated = &pod.status.nominated_node_name;
    if !nominated.is_empty() {
        explanation.say(
            "next",
            format!("room is being made on {nominated}, which holds it for the pod"),
        );
    }
    if explanation.causes.is_empty() && !message.is_empty() && snapshot.has_all(Kind::GpuNodes) {
        explanation.say(
            "not known",
            "GPU memory does not keep the pod from a node, as far as the API says",
        );
    }
}

/// The most that one container of a pod requests.
pub(super) fn largest_request(pod: &Pod) -> u64 {
    pod.gpu_containers()
        .map(|(_, request)| request.bytes())
        .max()
        .unwrap_or(0)
}

/// States for each node with GPUs why a container does not fit there.
fn nodes(explanation: &mut Explanation, snapshot: &Snapshot, wanted: u64) {
    let (mut said, mut are_too_small) = (0, true);
    for node in &snapshot.gpu_nodes {
        let Some(text) = obstacle(explanation, snapshot, node, wanted) else {
            continue;
        };
        said += 1;
        are_too_small &= is_too_small(node, wanted);
        if said <= MAX_NODES {
            explanation.say("node", format!("{}: {text}", name(node)));
        }
    }
    if said > MAX_NODES {
        explanation.say("node", format!("and {} more", said - MAX_NODES));
    }
    if said > 0 && are_too_small {
        explanation.add(Cause::LargerThanNodes);
    }
}

/// Whether all GPUs of a node together have less than `wanted` bytes for pods, and no GPU that is
/// away has as much alone.
fn is_too_small(node: &GpuNode, wanted: u64) -> bool {
    let Some(status) = &node.status else {
        return false;
    };
    let all = quanta(status.device_memory.allocatable, quantum_bytes(node));
    let may_come_back =
        |gpu: &GpuStatus| bytes(&gpu.memory) >= wanted && unusable(node, gpu).is_some();
    !status.gpus.is_empty() && all < wanted && !status.gpus.iter().any(may_come_back)
}

/// Why a node has no GPU for a container of `wanted` bytes; `None` for a node without GPUs.
pub(super) fn obstacle(
    explanation: &mut Explanation,
    snapshot: &Snapshot,
    node: &GpuNode,
    wanted: u64,
) -> Option<String> {
    let status = node.status.as_ref()?;
    let found = condition(&status.conditions, names::GPUS_FOUND);
    if let Some(found) = found.filter(|found| found.status == "False") {
        if matches!(
            found.reason.as_str(),
            names::DRIVER_MISSING | names::DRIVER_FAILED
        ) {
            explanation.add(Cause::DriverMissing);
            return Some(format!("{}: {}", found.reason, found.message));
        }
        if status.gpus.is_empty() {
            return None;
        }
    }
    if let Some(text) = dead_agent(explanation, snapshot, name(node)) {
        return Some(text);
    }
    let mut away = Vec::new();
    for gpu in &status.gpus {
        if bytes(&gpu.memory) >= wanted
            && let Some((cause, text)) = unusable(node, gpu)
        {
            explanation.add(cause);
            away.push(text);
        }
    }
    let quantum = quantum_bytes(node);
    let free = quanta(status.device_memory.free, quantum);
    let largest = status
        .gpus
        .iter()
        .map(|gpu| GpuMemory::of(node, gpu).largest)
        .max()
        .unwrap_or(0);
    let text = if largest >= wanted {
        format!("has {} free on one GPU", memory(largest))
    } else if free >= wanted {
        explanation.add(Cause::Fragmentation);
        format!(
            "has {} free in all, and at most {} on one GPU",
            memory(free),
            memory(largest)
        )
    } else if is_too_small(node, wanted) {
        let all = quanta(status.device_memory.allocatable, quantum);
        format!("has {} in all", memory(all))
    } else {
        explanation.add(Cause::NoNodeWithRoom);
        format!("has {} free", memory(free))
    };
    away.insert(0, text);
    Some(away.join("; "))
}

/// Whether the agent of a node does not work, and why.
pub(super) fn dead_agent(
    explanation: &mut Explanation,
    snapshot: &Snapshot,
    node: &str,
) -> Option<String> {
    if !snapshot.has_all(Kind::OwnPods) || snapshot.own_pods.is_empty() {
        return None;
    }
    let text = match snapshot.agent_on(node) {
        None => "no agent runs there".to_owned(),
        Some(agent) => {
            let ready = agent
                .status
                .conditions
                .iter()
                .find(|condition| condition.type_ == "Ready");
            if ready.is_some_and(|ready| ready.status == "True") {
                return None;
            }
            format!("its agent ({}) is not ready", agent.metadata.name)
        }
    };
    explanation.add(Cause::NodeWithoutAgent);
    Some(text)
}

/// States nodes that have GPUs by another plugin, or no GpuNode.
fn without_gpu_nodes(explanation: &mut Explanation, snapshot: &Snapshot) {
    let foreign = snapshot
        .nodes
        .iter()
        .filter(|node| !node.foreign_gpus().is_empty());
    for node in foreign.take(MAX_NODES) {
        let (resource, amount) = node.foreign_gpus()[0];
        explanation.add(Cause::OtherPlugin);
        explanation.say(
            "node",
            format!(
                "{}: another plugin offers {amount} {resource}",
                node.metadata.name
            ),
        );
    }
    if snapshot.gpu_nodes.is_empty() && snapshot.has_all(Kind::GpuNodes) {
        explanation.add(Cause::NodeWithoutAgent);
        explanation.say(
            "node",
            "no node has a GpuNode: no agent has started in this cluster",
        );
    }
}
