//! Explains a pod by its phase.

use super::room::Wanted;
use super::{Cause, Explanation, Verdict, pending, running, waiting};
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

fn ended(explanation: &mut Explanation, snapshot: &Snapshot, pod: &Pod) {
    let key = pod.key();
    if pod.status.phase == "Succeeded" {
        explanation.conclude(Verdict::Runs, format!("{key} has succeeded."));
        return;
    }
    let status = &pod.status;
    explanation.conclude(
        Verdict::Fails,
        format!("{key} has failed: {} {}", status.reason, status.message),
    );
    if status.reason == "UnexpectedAdmissionError" {
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
