//! Explains a workload: pods that were refused at their creation, and pods that do not run.

use std::cmp::Reverse;

use bursar_crds::GpuMemoryBudget;

use super::{Cause, Explanation, Verdict, explain_pod};
use crate::amounts::{count, memory};
use crate::objects::{Condition, Event, Pod, Workload};
use crate::show::budgets;
use crate::snapshot::Snapshot;

/// A workload with the objects that create its pods.
#[derive(Clone, Debug)]
pub struct Controlled<'a> {
    /// The kind in lower case, such as `deployment`.
    pub kind: &'a str,
    /// The workload.
    pub workload: &'a Workload,
    /// The UIDs of the objects whose Events tell of refused pods: the workload or its ReplicaSets.
    pub creators: Vec<String>,
    /// The pods of the workload.
    pub pods: Vec<&'a Pod>,
}

impl Controlled<'_> {
    fn wanted(&self) -> i64 {
        let spec = &self.workload.spec;
        if spec.suspend {
            return 0;
        }
        if self.kind == "job" {
            let parallelism = spec.parallelism.unwrap_or(1);
            let succeeded = self.succeeded();
            return match spec.completions {
                Some(completions) => parallelism.min(completions.saturating_sub(succeeded).max(0)),
                // A work queue gets no more pods once one has succeeded.
                None if succeeded > 0 => self.workload.status.active,
                None => parallelism,
            };
        }
        spec.replicas.unwrap_or(1)
    }

    /// Why a Job has failed. The controller creates no more pods of it.
    fn failure(&self) -> Option<&Condition> {
        let mut conditions = self.workload.status.conditions.iter();
        let failed =
            |condition: &&Condition| condition.type_ == "Failed" && condition.status == "True";
        conditions.find(failed).filter(|_| self.kind == "job")
    }

    /// The pods that have succeeded. The status follows the pods, and outlives them.
    fn succeeded(&self) -> i64 {
        let pods = self.pods.iter();
        let succeeded = pods.filter(|pod| pod.status.phase == "Succeeded").count();
        let succeeded = i64::try_from(succeeded).unwrap_or(i64::MAX);
        succeeded.max(self.workload.status.succeeded)
    }
}

/// Explains a workload.
pub fn explain(snapshot: &Snapshot, controlled: &Controlled<'_>) -> Explanation {
    let key = controlled.workload.metadata.key();
    let mut explanation = Explanation::new(format!("{} {key}", controlled.kind));
    explanation.not_read = snapshot.unread_notes();
    let wanted = controlled.wanted();
    let alive: Vec<&&Pod> = controlled
        .pods
        .iter()
        .filter(|pod| !pod.has_ended())
        .collect();
    let runs = alive
        .iter()
        .filter(|pod| pod.status.phase == "Running")
        .count();
    let missing = wanted
        .saturating_sub(i64::try_from(alive.len()).unwrap_or(i64::MAX))
        .max(0);
    let failure = controlled.failure();
    let verdict = match missing > 0 || failure.is_some() {
        true => Verdict::Fails,
        false => Verdict::Runs,
    };
    explanation.conclude(
        verdict,
        match (failure, missing) {
            (Some(failure), _) => {
                let Condition {
                    reason, message, ..
                } = failure;
                format!("{key} has failed: {reason}: {message}")
            }
            (None, 0) => format!("{key} has {runs} of {} running.", pods(wanted)),
            (None, _) => format!(
                "{key} has {} of {}: {missing} not created.",
                alive.len(),
                pods(wanted)
            ),
        },
    );
    if missing > 0 && failure.is_none() {
        refusal(&mut explanation, snapshot, controlled);
    }
    // The workload has replaced a pod that ended, unless pods are missing.
    let is_current = |pod: &&&Pod| !pod.has_ended() || missing > 0 || failure.is_some();
    let current = controlled.pods.iter().filter(is_current);
    let failing = current
        .map(|pod| explain_pod(snapshot, pod))
        .filter(|pod| pod.verdict > Verdict::Runs);
    // The first pod of the gravest verdict.
    if let Some(worst) = failing.min_by_key(|pod| Reverse(pod.verdict)) {
        explanation.verdict = explanation.verdict.max(worst.verdict);
        explanation.say("pod", worst.headline);
        for cause in worst.causes {
            explanation.add(cause);
        }
        explanation.lines.extend(worst.lines);
    }
    explanation.remedies();
    explanation
}

fn pods(number: i64) -> String {
    count(usize::try_from(number).unwrap_or(0), "pod")
}

/// States why the API server refused the newest pod.
fn refusal(explanation: &mut Explanation, snapshot: &Snapshot, controlled: &Controlled<'_>) {
    let namespace = &controlled.workload.metadata.namespace;
    let creators = controlled
        .creators
        .iter()
        .flat_map(|uid| snapshot.events_on(uid));
    let refusals = creators.filter(|event| event.reason == "FailedCreate");
    let newest = refusals.max_by_key(|event| event.time());
    let budget = snapshot.budget(namespace);
    if let Some(event) = newest {
        read_refusal(explanation, event, budget);
    } else {
        explanation.say(
            "not known",
            "no event tells why; the API server keeps events for an hour",
        );
    }
    if let Some(problem) = budget.and_then(budgets::problem) {
        if problem.reason == bursar_crds::conditions::budget::QUOTA_PENDING {
            explanation.add(Cause::QuotaPending);
        }
        explanation.say("budget", format!("{}: {}", problem.reason, problem.message));
    }
}

/// Finds the cause in the message of the API server.
fn read_refusal(explanation: &mut Explanation, event: &Event, budget: Option<&GpuMemoryBudget>) {
    let message = &event.message;
    let has = |text: &str| message.contains(text);
    // The API server names either of two quotas that hold the same amount.
    let of_device_memory =
        has("exceeded quota: gpu-memory-budget") && !has("bursar.dev/managed-memory");
    let both = budget.map(budgets::bounds);
    let both = both.filter(|(guaranteed, limit)| guaranteed == limit && of_device_memory);
    let cause = if has("exceeded quota: gpu-memory-budget-guaranteed") || both.is_some() {
        Some(Cause::OverGuarantee)
    } else if has("exceeded quota: gpu-memory-budget-limit") {
        Some(Cause::OverLimit)
    } else if has("status unknown for quota: gpu-memory-budget") {
        Some(Cause::QuotaPending)
    } else if has("has no GpuMemoryBudget in force") {
        Some(Cause::NoBudget)
    } else if has("counts quanta of") {
        Some(Cause::WrongAmountForm)
    } else if has("spec.perContainer.max") {
        Some(Cause::OverContainerMaximum)
    } else {
        None
    };
    explanation.causes.extend(cause);
    // The cause stands behind the repetition of the pod's name.
    let reason = message
        .split_once("is forbidden: ")
        .map_or(message.as_str(), |(_, reason)| reason);
    explanation.say("refused", reason);
    if let Some((guaranteed, _)) = both {
        explanation.say(
            "quotas",
            format!(
                "guarantee and limit are both {}: two ResourceQuotas hold it, and either is named",
                memory(guaranteed)
            ),
        );
    }
}
