//! Explains a pod by its phase.

use super::room::Wanted;
use super::{Cause, Explanation, Verdict, pending, rollout, running, waiting};
use crate::amounts::memory;
use crate::objects::{Event, Pod};
use crate::snapshot::Snapshot;

/// Explains a pod of the snapshot.
pub fn explain(snapshot: &Snapshot, pod: &Pod) -> Explanation {
    let key = pod.key();
    let mut explanation = Explanation::new(format!("pod {key}"));
    explanation.not_read = snapshot.unread_notes();
    if pod.gpu_containers().next().is_none() {
        explanation.conclude(Verdict::Runs, format!("{key} requests no GPU memory."));
        return explanation;
    }
    add_requests(&mut explanation, pod);
    if pod.has_ended() {
        ended(&mut explanation, snapshot, pod);
    } else if pod.spec.node_name.is_empty() {
        pending::explain(&mut explanation, snapshot, pod);
    } else if waiting::waits(snapshot, pod) {
        waiting::explain(&mut explanation, snapshot, pod);
    } else {
        running::explain(&mut explanation, snapshot, pod);
    }
    rollout::explain(&mut explanation, snapshot, pod);
    if explanation.causes.contains(&Cause::Fragmentation)
        && !Wanted::of(pod).is_spread(snapshot)
        && let Some(remedy) = Cause::Fragmentation.remedy()
    {
        let spread = "spread the container over GPUs with the annotation bursar.dev/gpus";
        explanation.say("remedy", format!("{remedy}; or {spread}"));
    }
    explanation.remedies();
    explanation
}

fn add_requests(explanation: &mut Explanation, pod: &Pod) {
    let all = pod.gpu_containers();
    let requests: Vec<String> = all
        .map(|(container, request)| {
            format!("{} (container {})", memory(request.bytes()), container.name)
        })
        .collect();
    let borrows = if pod.borrows() { ", borrowed" } else { "" };
    explanation.say("asks for", format!("{}{borrows}", requests.join(", ")));
}

/// The newest Event of a reason on a pod.
pub(super) fn newest<'a>(snapshot: &'a Snapshot, pod: &Pod, reason: &str) -> Option<&'a Event> {
    let events = snapshot.events_on(&pod.metadata.uid);
    events
        .into_iter()
        .rev()
        .find(|event| event.reason == reason)
}

/// The kubelet's words about a pod that requests more devices than it has free.
const UNAVAILABLE: &str = "requested number of devices unavailable";

fn ended(explanation: &mut Explanation, snapshot: &Snapshot, pod: &Pod) {
    let key = pod.key();
    if pod.status.phase == "Succeeded" {
        explanation.conclude(Verdict::Runs, format!("{key} has succeeded."));
        return;
    }
    let status = &pod.status;
    let mut why = format!("{} {}", status.reason, status.message);
    let mut containers = status.container_statuses.iter();
    let ended = containers.find_map(|container| {
        let ended = container.state.terminated.as_ref()?;
        (ended.exit_code != 0).then_some((&container.name, ended))
    });
    if let Some((name, ended)) = ended {
        why = format!(
            "container {name} ended with {} ({})",
            ended.exit_code, ended.reason
        );
        let command = format!(
            "kubectl -n {} logs {} -c {name}",
            pod.metadata.namespace, pod.metadata.name
        );
        explanation.say("log", command);
    }
    explanation.conclude(Verdict::Fails, format!("{key} has failed: {}", why.trim()));
    if status.message.contains(UNAVAILABLE) {
        explanation.add(Cause::NoNodeWithRoom);
        explanation.say(
            "node",
            format!(
                "the kubelet of {} has not as much free, and spec.nodeName passes the scheduler by; \
                 choose the node by nodeSelector kubernetes.io/hostname, so that the pod waits",
                pod.spec.node_name
            ),
        );
    } else if status.reason == "UnexpectedAdmissionError" {
        explanation.add(Cause::NodeWithoutAgent);
        explanation.say(
            "node",
            format!(
                "the kubelet of {} could not reach the plugin relay",
                pod.spec.node_name
            ),
        );
    }
    running::faults(explanation, snapshot, pod);
    for reason in [
        "GpuMemoryReclaimed",
        "GpuMemoryBudgetExceeded",
        "GpuFault",
        "RelocatedForGpuMemory",
    ] {
        if let Some(event) = newest(snapshot, pod, reason) {
            explanation.say("evicted", format!("{reason}: {}", event.message));
        }
    }
}
