//! Explains a pod that waits until its node has room.

use std::collections::BTreeMap;

use bursar_crds::GpuNode;
use bursar_crds::gpu_node::{GpuStatus, MemoryResource};

use super::gpu::{gpu_name, unusable};
use super::pending::obstacle;
use super::pod::newest;
use super::room::{Room, Wanted};
use super::{Cause, Explanation, Verdict};
use crate::amounts::{count, memory, since};
use crate::objects::{Event, ObjectRef, Pod};
use crate::show::gpus::{self, GpuMemory};
use crate::show::{name, quanta, quantum_bytes};
use crate::snapshot::{Kind, Snapshot};

/// The most pods in the way, or other nodes, that have a line.
const MAX_PODS: usize = 5;

/// Whether the pod waits on its node.
pub(super) fn waits(snapshot: &Snapshot, pod: &Pod) -> bool {
    let node = snapshot.gpu_node(&pod.spec.node_name);
    let waiting = node
        .and_then(|node| node.status.as_ref())
        .map(|status| &status.waiting);
    let is_listed =
        waiting.is_some_and(|all| all.iter().any(|claim| claim.pod_uid == pod.metadata.uid));
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

pub(super) fn explain(explanation: &mut Explanation, snapshot: &Snapshot, pod: &Pod) {
    let node_name = &pod.spec.node_name;
    let node = snapshot.gpu_node(node_name);
    let status = node.and_then(|node| node.status.as_ref());
    let claim = status.and_then(|status| {
        status
            .waiting
            .iter()
            .find(|claim| claim.pod_uid == pod.metadata.uid)
    });
    let age = claim.map_or_else(String::new, |claim| {
        format!(", for {}", since(claim.since.0, snapshot.now))
    });
    explanation.conclude(
        Verdict::Waits,
        format!("{} waits on {node_name}{age}.", pod.key()),
    );
    let message = pod.wait_message().map(str::to_owned);
    let event = newest(snapshot, pod, "WaitingForGpuMemory");
    if let Some(message) = message.or_else(|| event.map(|event| event.message.clone())) {
        explanation.say("agent", message.trim());
        if message.trim_end().ends_with("healthy on this node") {
            explanation.add(Cause::TooFewGpus);
        }
    }
    let Some(node) = node else {
        explanation.add(Cause::Fragmentation);
        explanation.say("node", "the GPUs of the node could not be read");
        reservation(explanation, snapshot, pod);
        return;
    };
    if claim.is_some_and(|claim| claim.resource == MemoryResource::ManagedMemory) {
        let free = status.map_or(0, |status| status.managed_memory.free);
        let free = memory(quanta(free, quantum_bytes(node)));
        explanation.say("node", format!("{free} of managed memory is free"));
        return;
    }
    let wanted = Wanted::of(pod);
    gpus_of_node(explanation, snapshot, node, pod, wanted);
    reservation(explanation, snapshot, pod);
    other_nodes(explanation, snapshot, node, wanted);
}

/// States what each GPU of the node has for the pod.
fn gpus_of_node(
    explanation: &mut Explanation,
    snapshot: &Snapshot,
    node: &GpuNode,
    pod: &Pod,
    wanted: Wanted,
) {
    let Some(status) = &node.status else { return };
    let mut parts = Vec::new();
    for gpu in &status.gpus {
        let free = memory(GpuMemory::of(node, gpu).free);
        parts.push(match unusable(node, gpu) {
            Some((cause, text)) => {
                explanation.add(cause);
                text
            }
            None => format!(
                "{} has {free}{}",
                gpu_name(node, gpu),
                held(explanation, snapshot, node, gpu, pod)
            ),
        });
    }
    let parts = parts.join(", ");
    let room = wanted.room(node);
    let free = quanta(status.device_memory.free, quantum_bytes(node));
    match room {
        // The pod waits for something else, which the agent's message names.
        Room::Now(_) => {
            explanation.say("node", parts);
            return;
        }
        Room::TooFewGpus(_) => explanation.add(Cause::TooFewGpus),
        _ if free >= wanted.bytes => explanation.add(Cause::Fragmentation),
        _ => explanation.add(Cause::NoNodeWithRoom),
    }
    let amount = memory(wanted.bytes);
    let missing = match room {
        Room::Later(gpus @ 2..) => format!("no {gpus} GPUs have their shares of {amount} for it"),
        Room::TooFewGpus(gpus) => format!("{gpus} of the {} GPUs for it are there", wanted.gpus),
        _ => format!("no GPU has {amount} for it"),
    };
    explanation.say("node", format!("{missing}: {parts}"));
}

/// The pods for which the GPU's free memory is set aside: ` (held for this pod)`.
fn held(
    explanation: &mut Explanation,
    snapshot: &Snapshot,
    node: &GpuNode,
    gpu: &GpuStatus,
    pod: &Pod,
) -> String {
    let free = GpuMemory::of(node, gpu).free;
    let mut parts = Vec::new();
    for held in gpus::held_for(snapshot, node, gpu) {
        let whom = if held.uid == pod.metadata.uid {
            "this pod"
        } else {
            explanation.add(Cause::HeldForAnother);
            held.pod.as_str()
        };
        let amount = held.bytes.filter(|bytes| *bytes != free);
        let amount = amount.map_or_else(String::new, |bytes| format!("{} ", memory(bytes)));
        parts.push(format!("{amount}held for {whom}"));
    }
    match parts.is_empty() {
        true => String::new(),
        false => format!(" ({})", parts.join(", ")),
    }
}

/// States the operator's reservation for a pod, and the victims that the operator has published.
pub(super) fn reservation(explanation: &mut Explanation, snapshot: &Snapshot, pod: &Pod) {
    let reserved = snapshot.gpu_nodes.iter().find_map(|node| {
        let mut all = node.spec.reservations.iter();
        let reservation = all.find(|reservation| reservation.pod_uid == pod.metadata.uid)?;
        let mut gpus = node.status.iter().flat_map(|status| &status.gpus);
        Some((node, gpus.find(|gpu| gpu.uuid == reservation.gpu)?))
    });
    let Some((node, gpu)) = reserved else {
        if !snapshot.has_all(Kind::GpuNodes) {
            victims(explanation, snapshot, pod);
        } else if !pod.spec.node_name.is_empty() && !explanation.causes.contains(&Cause::TooFewGpus)
        {
            explanation.say(
                "next",
                "the operator has reserved no GPU for it; it starts when a GPU has room",
            );
        }
        return;
    };
    explanation.add(Cause::VictimsLeave);
    let place = format!("{} of {}", gpu_name(node, gpu), name(node));
    explanation.say("next", format!("the operator holds {place} for it"));
    victims(explanation, snapshot, pod);
}

/// The operator's Events on a waiting pod that name a victim.
const VICTIM_EVICTED: &str = "GpuMemoryVictimEvicted";
const VICTIM_PROTECTED: &str = "GpuMemoryVictimProtected";

/// The victim that an Event of the operator names.
pub fn victim(event: &Event) -> Option<&ObjectRef> {
    let names_victim = [VICTIM_EVICTED, VICTIM_PROTECTED].contains(&event.reason.as_str());
    names_victim.then_some(&event.related)
}

/// States the victims that the operator has published on the pod, as far as they are not gone.
fn victims(explanation: &mut Explanation, snapshot: &Snapshot, pod: &Pod) {
    // The newest Event of each victim: its eviction follows its protection.
    let mut newest: BTreeMap<&str, &Event> = BTreeMap::new();
    for event in snapshot.events_on(&pod.metadata.uid) {
        if let Some(victim) = victim(event) {
            newest.insert(&victim.uid, event);
        }
    }
    let known = snapshot.pods_by_uid();
    for (uid, event) in newest.into_iter().take(MAX_PODS) {
        let victim = known.get(uid).copied();
        if victim.is_none() && snapshot.has_all(Kind::Pods) {
            continue;
        }
        explanation.add(Cause::VictimsLeave);
        if event.reason == VICTIM_PROTECTED {
            explanation.add(Cause::DisruptionBudget);
        }
        explanation.say("in the way", victim_text(snapshot, event, victim));
    }
}

/// A victim with what the operator has published about it, or with the end of its grace.
fn victim_text(snapshot: &Snapshot, event: &Event, victim: Option<&Pod>) -> String {
    let age = event.time().map_or_else(String::new, |time| {
        format!(" ({} ago)", since(time, snapshot.now))
    });
    let published = format!("{}{age}", event.message);
    let Some(victim) = victim else {
        return published;
    };
    let borrows = if victim.borrows() { ", borrows" } else { "" };
    let name = format!(
        "{} ({}, priority {}{borrows})",
        victim.key(),
        memory(victim.device_memory()),
        victim.spec.priority
    );
    match victim.metadata.deletion_timestamp {
        Some(gone) => {
            let left = gone.as_second().saturating_sub(snapshot.now.as_second());
            format!(
                "{name}: is being evicted, gone in {}s at the latest",
                left.max(0)
            )
        }
        None => match published.strip_prefix(&victim.key()) {
            Some(rest) => format!("{name}{rest}"),
            None => format!("{name}: {published}"),
        },
    }
}

/// States what the other nodes have.
fn other_nodes(explanation: &mut Explanation, snapshot: &Snapshot, node: &GpuNode, wanted: Wanted) {
    // An obstacle on another node is no cause of the pod's wait on this one.
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
                obstacle(&mut aside, snapshot, other, wanted)?.text
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
