//! Explains a pod that has its node and does not wait for room.

use bursar_crds::conditions::gpu_node as names;
use bursar_crds::context_policy::FaultAction;
use bursar_crds::gpu_node::ComputeState;
use k8s_openapi::jiff::Timestamp;

use super::gpu::{gpu_name, unusable};
use super::pending::dead_agent;
use super::pod::newest;
use super::{Cause, Explanation, Verdict};
use crate::agent_metrics::ContainerKey;
use crate::amounts::{count, memory, since};
use crate::objects::{Container, ContainerStatus, Event, Pod};
use crate::show::{condition, model};
use crate::snapshot::{Kind, Snapshot};

/// The shell's exit code for a program or library that was not found.
const NOT_FOUND: i32 = 127;
/// How long a program may run before its lack of a session is worth a line.
const SETTLED_SECONDS: i64 = 60;
/// How long after its creation a pod that has not started is worth another look.
const FRESH_SECONDS: i64 = 10;

pub(super) fn explain(explanation: &mut Explanation, snapshot: &Snapshot, pod: &Pod) {
    let key = pod.key();
    let node = &pod.spec.node_name;
    let runs = pod
        .container_statuses()
        .any(|status| status.state.running.is_some());
    if runs {
        explanation.conclude(Verdict::Runs, format!("{key} runs on {node}."));
    } else {
        explanation.conclude(
            Verdict::Waits,
            format!("{key} has node {node} and does not run yet."),
        );
        not_started(explanation, snapshot, pod);
    }
    place(explanation, snapshot, pod);
    faults(explanation, snapshot, pod);
    gaps(explanation, snapshot, pod);
    weights(explanation, snapshot, pod);
    denials(explanation, snapshot, pod);
    sessions(explanation, snapshot, pod);
    if runs && explanation.verdict > Verdict::Runs {
        let faulted = format!("{key} runs on {node}, and something is wrong.");
        explanation.headline = faulted;
    }
}

/// States why the containers of a pod with a node have not started.
fn not_started(explanation: &mut Explanation, snapshot: &Snapshot, pod: &Pod) {
    for status in pod.container_statuses() {
        if let Some(waiting) = &status.state.waiting {
            let reason = format!("{}: {} {}", status.name, waiting.reason, waiting.message);
            explanation.say("kubelet", reason.trim_end());
        }
    }
    let created = pod.metadata.creation_timestamp;
    if let Some(created) = created.filter(|created| is_fresh(snapshot, *created)) {
        let age = since(created, snapshot.now);
        explanation.say(
            "next",
            format!("the pod was created {age} ago: look again in some seconds"),
        );
    }
    if let Some(event) = newest(snapshot, pod, "GpuMemoryNotBound") {
        explanation.say("agent", event.message.clone());
        if event.message.contains("is drained") {
            explanation.add(Cause::GpuDrained);
        }
    }
    if let Some(text) = dead_agent(explanation, snapshot, &pod.spec.node_name) {
        explanation.say("node", format!("{}: {text}", pod.spec.node_name));
    }
    match snapshot.gpu_node(&pod.spec.node_name) {
        Some(node) => {
            let conditions = node
                .status
                .as_ref()
                .map_or(&[][..], |status| &status.conditions);
            let ready = condition(conditions, names::READY);
            if let Some(ready) = ready.filter(|ready| ready.status == "False") {
                explanation.say("node", format!("{}: {}", pod.spec.node_name, ready.message));
            }
            let found = condition(conditions, names::GPUS_FOUND);
            if found.is_some_and(|found| {
                matches!(
                    found.reason.as_str(),
                    names::DRIVER_MISSING | names::DRIVER_FAILED
                )
            }) {
                explanation.add(Cause::DriverMissing);
            }
        }
        None if snapshot.has_all(Kind::GpuNodes) => {
            explanation.add(Cause::NodeWithoutAgent);
            explanation.say("node", format!("{} has no GpuNode", pod.spec.node_name));
        }
        None => {}
    }
    if let Some(node) = snapshot.node(&pod.spec.node_name)
        && let Some((resource, amount)) = node.foreign_gpus().first()
    {
        explanation.add(Cause::OtherPlugin);
        explanation.say(
            "node",
            format!("another plugin offers {amount} {resource} there"),
        );
    }
}

/// States the GPUs of the pod.
fn place(explanation: &mut Explanation, snapshot: &Snapshot, pod: &Pod) {
    let Some(node) = snapshot.gpu_node(&pod.spec.node_name) else {
        return;
    };
    for gpu in node.status.iter().flat_map(|status| &status.gpus) {
        if !gpu.pods.iter().any(|bound| bound.uid == pod.metadata.uid) {
            continue;
        }
        let name = gpu_name(node, gpu);
        explanation.say(
            "GPU",
            format!("{name} of {} ({})", pod.spec.node_name, model(&gpu.model)),
        );
        if let Some((cause, text)) = unusable(node, gpu) {
            explanation.blame(cause, Verdict::Degraded);
            let killed = match cause {
                Cause::GpuDrained => ": the pod's processes are killed there",
                _ => "",
            };
            explanation.say("GPU", format!("{text}{killed}"));
        }
    }
}

/// States the faults of the pod's contexts, from the GpuNode, the Events and the budget.
pub(super) fn faults(explanation: &mut Explanation, snapshot: &Snapshot, pod: &Pod) {
    let uid = &pod.metadata.uid;
    let node = snapshot
        .gpu_node(&pod.spec.node_name)
        .and_then(|node| node.status.as_ref());
    let open = node.into_iter().flat_map(|status| &status.faults);
    for fault in open.filter(|fault| {
        fault
            .container
            .as_ref()
            .is_some_and(|of| of.pod_uid == *uid)
    }) {
        let beyond = fault.action == Some(FaultAction::BeyondMaximum);
        let cause = if beyond {
            Cause::BeyondMaximum
        } else {
            Cause::Poisoned
        };
        explanation.blame(cause, Verdict::Degraded);
        let code = match (fault.cuda_error, fault.xid) {
            (Some(code), _) => format!("CUDA error {code}"),
            (None, Some(xid)) => format!("XID {xid}"),
            (None, None) => "a fault".to_owned(),
        };
        let done = fault.action.map_or_else(
            || "no measure yet".to_owned(),
            |action| format!("{action:?}"),
        );
        explanation.say(
            "fault",
            format!("{code}, {} ago: {done}", since(fault.time.0, snapshot.now)),
        );
    }
    if let Some(event) = newest(snapshot, pod, "GpuContextPoisoned") {
        let beyond = event.message.contains("too often");
        let cause = if beyond {
            Cause::BeyondMaximum
        } else {
            Cause::Poisoned
        };
        explanation.blame(cause, Verdict::Degraded);
        explanation.say("fault", with_age(snapshot, event));
    }
    if let Some(event) = newest(snapshot, pod, "GpuContextRestarted") {
        explanation.say("restart", with_age(snapshot, event));
    }
    let budget = snapshot
        .budget(&pod.metadata.namespace)
        .and_then(|budget| budget.status.as_ref());
    let evictions = budget.into_iter().flat_map(|status| &status.evictions);
    for eviction in evictions.filter(|eviction| eviction.pod_uid == *uid) {
        if eviction.reason == "TooManyRestarts" {
            explanation.add(Cause::BeyondMaximum);
        }
        explanation.say(
            "evicted",
            format!("{}: {}", eviction.reason, eviction.message),
        );
    }
}

/// An Event's message with its number and its age.
fn with_age(snapshot: &Snapshot, event: &Event) -> String {
    let age = event.time().map_or_else(String::new, |time| {
        format!(", {} ago", since(time, snapshot.now))
    });
    let times = count(usize::try_from(event.occurrences()).unwrap_or(1), "time");
    format!("{} ({times}{age})", event.message)
}

/// States gaps in the enforcement of the pod's quotas.
fn gaps(explanation: &mut Explanation, snapshot: &Snapshot, pod: &Pod) {
    let node = snapshot
        .gpu_node(&pod.spec.node_name)
        .and_then(|node| node.status.as_ref());
    let gaps = node.into_iter().flat_map(|status| &status.not_enforced);
    let mut named = false;
    for gap in gaps.filter(|gap| gap.pod_uid == pod.metadata.uid) {
        named = true;
        explanation.blame(Cause::NotEnforced, Verdict::Degraded);
        explanation.say(
            "quota",
            format!(
                "container {}: {}: {}",
                gap.container, gap.reason, gap.message
            ),
        );
    }
    let event = newest(snapshot, pod, "GpuQuotaNotEnforced");
    let closed = newest(snapshot, pod, "GpuQuotaEnforced").and_then(|event| event.time());
    if let Some(event) = event.filter(|event| !named && event.time() > closed) {
        explanation.blame(Cause::NotEnforced, Verdict::Degraded);
        explanation.say("quota", event.message.clone());
    }
}

/// States where the pod's weight of compute time does not hold.
fn weights(explanation: &mut Explanation, snapshot: &Snapshot, pod: &Pod) {
    let weights = pod.all_containers().filter_map(Container::compute_weight);
    if weights.count() == 0 {
        return;
    }
    let node = snapshot.gpu_node(&pod.spec.node_name);
    let gpus = node.and_then(|node| node.status.as_ref()).into_iter();
    for gpu in gpus.flat_map(|status| &status.gpus) {
        let has_pod = gpu.pods.iter().any(|of| of.uid == pod.metadata.uid);
        if let Some(compute) = gpu.compute.as_ref().filter(|_| has_pod) {
            let reason = match (compute.state, compute.hidden_groups) {
                (ComputeState::Enforced, 0) => continue,
                (ComputeState::Enforced, hidden) => {
                    format!("{hidden} channel groups belong to no known process")
                }
                _ => compute.reason.clone(),
            };
            explanation.say(
                "compute",
                format!("weights may not hold on {}: {reason}", gpu.uuid),
            );
        }
    }
}

/// States the memory that the containers were denied.
fn denials(explanation: &mut Explanation, snapshot: &Snapshot, pod: &Pod) {
    if let Some(event) = newest(snapshot, pod, "GpuMemoryDenied") {
        explanation.blame(Cause::Denied, Verdict::Degraded);
        explanation.say("denied", with_age(snapshot, event));
    }
    let Some(agent) = snapshot.metrics.get(&pod.spec.node_name) else {
        return;
    };
    for (container, request) in pod.gpu_containers() {
        let Some(metrics) = agent.containers.get(&key(pod, &container.name)) else {
            continue;
        };
        let used = metrics
            .device("used")
            .map_or_else(|| "-".to_owned(), memory);
        let peak = metrics
            .device("peak")
            .map_or_else(|| "-".to_owned(), memory);
        let quota = metrics.device("quota").unwrap_or(request.bytes());
        explanation.say(
            "quota",
            format!(
                "container {}: {} used of {}, peak {peak}",
                container.name,
                used,
                memory(quota)
            ),
        );
        let Some((function, most)) = metrics.denied.iter().max_by_key(|(_, times)| **times) else {
            continue;
        };
        if *most > 0 {
            explanation.blame(Cause::Denied, Verdict::Degraded);
            let times = usize::try_from(metrics.denials()).unwrap_or(usize::MAX);
            explanation.say(
                "denied",
                format!(
                    "container {}: {} since its start, {most} of them by {function}",
                    container.name,
                    count(times, "time")
                ),
            );
        }
    }
}

fn key(pod: &Pod, container: &str) -> ContainerKey {
    ContainerKey {
        namespace: pod.metadata.namespace.clone(),
        pod: pod.metadata.name.clone(),
        container: container.to_owned(),
    }
}

/// States containers of which no process has loaded the driver.
fn sessions(explanation: &mut Explanation, snapshot: &Snapshot, pod: &Pod) {
    let agent = snapshot.metrics.get(&pod.spec.node_name);
    for status in pod.container_statuses() {
        let gpu = pod
            .gpu_containers()
            .any(|(container, _)| container.name == status.name);
        let ended = status
            .state
            .terminated
            .as_ref()
            .or(status.last_state.terminated.as_ref());
        if gpu && ended.is_some_and(|ended| ended.exit_code == NOT_FOUND) {
            explanation.blame(Cause::NoDriverInImage, Verdict::Degraded);
            explanation.say(
                "image",
                format!(
                    "container {} ended with exit code 127: a program or library was not found",
                    status.name
                ),
            );
        } else if gpu
            && is_settled(snapshot, status)
            && let Some(agent) = agent
        {
            let metrics = agent.containers.get(&key(pod, &status.name));
            if metrics.is_some_and(|metrics| metrics.generation.unwrap_or(0) == 0) {
                explanation.blame(Cause::NoDriverInImage, Verdict::Degraded);
                explanation.say(
                    "image",
                    format!(
                        "no process of container {} has loaded the driver: it has not used the GPU, or \
                         the image has no glibc",
                        status.name
                    ),
                );
            }
        }
    }
}

/// Whether agent and kubelet may not have published anything about the pod yet.
fn is_fresh(snapshot: &Snapshot, created: Timestamp) -> bool {
    snapshot.now.as_second().saturating_sub(created.as_second()) < FRESH_SECONDS
}

fn is_settled(snapshot: &Snapshot, status: &ContainerStatus) -> bool {
    let started = status
        .state
        .running
        .as_ref()
        .and_then(|running| running.started_at);
    started.is_some_and(|started| {
        snapshot.now.as_second().saturating_sub(started.as_second()) > SETTLED_SECONDS
    })
}
