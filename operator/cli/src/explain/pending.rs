//! Explains a pod for which the scheduler has found no node.

use bursar_crds::conditions::gpu_node as names;
use bursar_crds::{GpuNode, GpuNodeStatus};

use super::gpu::unusable;
use super::room::{Room, Wanted, free_bytes};
use super::waiting::reservation;
use super::{Cause, Explanation, Verdict};
use crate::amounts::{count, memory, since};
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
    let has_room = nodes(explanation, snapshot, pod);
    let causes = [Cause::LargerThanNodes, Cause::TooFewGpus];
    let is_known = causes
        .iter()
        .any(|cause| explanation.causes.contains(cause));
    // The nodes' GPUs say nothing of managed memory.
    let lacks_managed = message.contains("Insufficient bursar.dev/managed-memory");
    let is_full = message.contains("Insufficient bursar.dev/") && (lacks_managed || !has_room);
    if (is_full || lacks_everywhere(message)) && !is_known {
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

/// Whether the scheduler counts every node as one without enough GPU memory:
/// `0/2 nodes are available: 2 Insufficient bursar.dev/gpu-memory-gib.`
fn lacks_everywhere(message: &str) -> bool {
    let nodes = message
        .strip_prefix("0/")
        .and_then(|rest| rest.split_once(' '));
    nodes.is_some_and(|(all, reasons)| {
        let lack = format!("{all} Insufficient bursar.dev/");
        reasons
            .split([':', ','])
            .any(|reason| reason.trim_start().starts_with(&lack))
    })
}

/// States for each node with GPUs what it has for the largest container, and whether any has room
/// for all. What keeps the pod from one node is no cause while GPU memory does not keep it from
/// another.
fn nodes(explanation: &mut Explanation, snapshot: &Snapshot, pod: &Pod) -> bool {
    let wanted = Wanted::of(pod);
    let (mut reported, mut are_too_small, mut has_room) = (0, true, false);
    let mut aside = Explanation::new(String::new());
    for node in &snapshot.gpu_nodes {
        let Some(Obstacle { text, room }) = obstacle(&mut aside, snapshot, node, wanted) else {
            continue;
        };
        reported += 1;
        are_too_small &= room == Some(Room::TooSmall);
        let holds_all = free_bytes(node) >= pod.device_memory();
        has_room |= holds_all && matches!(room, Some(Room::Now(_)));
        if reported <= MAX_NODES {
            explanation.say("node", format!("{}: {text}", name(node)));
        }
    }
    if reported > MAX_NODES {
        explanation.say("node", format!("and {} more", reported - MAX_NODES));
    }
    if !has_room {
        aside
            .causes
            .into_iter()
            .for_each(|cause| explanation.add(cause));
    }
    if reported > 0 && are_too_small {
        explanation.add(Cause::LargerThanNodes);
    }
    has_room
}

/// The room of a node for a container.
pub(super) struct Obstacle {
    /// The text behind the node's name.
    pub(super) text: String,
    /// The room on its GPUs; `None` where no agent offers them.
    room: Option<Room>,
}

/// Why a node has no GPU for a container; `None` for a node without GPUs.
pub(super) fn obstacle(
    explanation: &mut Explanation,
    snapshot: &Snapshot,
    node: &GpuNode,
    wanted: Wanted,
) -> Option<Obstacle> {
    let without_agent = |text| Some(Obstacle { text, room: None });
    let status = node.status.as_ref()?;
    let found = condition(&status.conditions, names::GPUS_FOUND);
    if let Some(found) = found.filter(|found| found.status == "False") {
        if matches!(
            found.reason.as_str(),
            names::DRIVER_MISSING | names::DRIVER_FAILED
        ) {
            explanation.add(Cause::DriverMissing);
            return without_agent(format!("{}: {}", found.reason, found.message));
        }
        if status.gpus.is_empty() {
            return None;
        }
    }
    if let Some(text) = dead_agent(explanation, snapshot, name(node)) {
        return without_agent(text);
    }
    if status.gpus.is_empty() {
        return None;
    }
    let mut away = Vec::new();
    for gpu in &status.gpus {
        if bytes(&gpu.memory) >= wanted.bytes.div_ceil(wanted.gpus.into())
            && let Some((cause, text)) = unusable(node, gpu)
        {
            explanation.add(cause);
            away.push(text);
        }
    }
    away.insert(0, room_text(explanation, node, status, wanted));
    let (text, room) = (away.join("; "), Some(wanted.room(node)));
    Some(Obstacle { text, room })
}

/// Describes the room of a node for a container, and the cause where that is not enough.
fn room_text(
    explanation: &mut Explanation,
    node: &GpuNode,
    status: &GpuNodeStatus,
    wanted: Wanted,
) -> String {
    let quantum = quantum_bytes(node);
    let free = quanta(status.device_memory.free, quantum);
    let gpus = status.gpus.iter();
    let largest = gpus.map(|gpu| GpuMemory::of(node, gpu).largest).max();
    let largest = largest.unwrap_or(0);
    match wanted.room(node) {
        Room::Now(1) => format!("has {} free on one GPU", memory(largest)),
        Room::Now(gpus) => format!("has room on {gpus} GPUs"),
        Room::TooFewGpus(gpus) => {
            explanation.add(Cause::TooFewGpus);
            format!("has {}", count(gpus, "GPU"))
        }
        Room::TooSmall => {
            let all = quanta(status.device_memory.allocatable, quantum);
            format!("has {} in all", memory(all))
        }
        Room::Later(_) if free >= wanted.bytes => {
            explanation.add(Cause::Fragmentation);
            format!(
                "has {} free in all, and at most {} on one GPU",
                memory(free),
                memory(largest)
            )
        }
        Room::Later(_) => {
            explanation.add(Cause::NoNodeWithRoom);
            format!("has {} free", memory(free))
        }
    }
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
