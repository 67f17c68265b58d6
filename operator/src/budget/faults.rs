//! Decides which pods to evict for GPU faults. Pure.
//!
//! ```text
//!   context: the agent ends or restarts it ---------------------> closed with the process image
//!            left open, policy now InPlace, Process or Restart --> GpuNode.spec.restarts
//!            left open, policy Evict; or over the restart limit -> status.evictions --> evicted
//!   GPU:     memory lost for GPU_FAULT_GRACE -------------------> status.evictions --> evicted
//! ```
//!
//! An eviction is recorded in the budget's status before it is requested, so that its reason and
//! target survive a crash. In a namespace without a budget the pod has an Event in place of the
//! record ([`super::fault_evictions`]). The grace starts when this operator first sees the fault,
//! by its own monotonic clock.

use std::time::Duration;

use bursar_crds::GpuMemoryBudget;
use bursar_crds::budget::{FaultEviction, MAX_EVICTIONS};
use bursar_crds::context_policy::{ContextAction, ContextPolicy, FaultAction};
use bursar_crds::gpu_node::{Fault, FaultKind};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use super::plan::PodEviction;
use super::{AffectedPod, BudgetInputs};
use crate::cluster::facts::pod::JobRef;

/// How long a GPU may be missing before its pods are evicted. A reloaded driver is back by then.
pub(super) const GPU_FAULT_GRACE: Duration = Duration::from_secs(30);

/// How long an eviction may be requested without effect until its record makes room for another
/// pod's. This is longer than PodDisruptionBudgets may refuse, so that the deletion is tried
/// before.
const INEFFECTIVE_GRACE: Duration = Duration::from_secs(90);

/// The longest message of a recorded eviction.
const MAX_MESSAGE_LENGTH: usize = 512;

/// The operator's answer to a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// The operator orders the agent to end the process, or to restart its container.
    Restart,
    /// The operator evicts the pod, for this reason.
    Evict(&'static str),
}

/// The action for poisoned contexts in the namespace of a budget with this policy. Without one the
/// cluster's `default` applies.
pub fn action_of(policy: Option<&ContextPolicy>, default: ContextAction) -> ContextAction {
    policy.and_then(|policy| policy.action).unwrap_or(default)
}

/// The remedy for `fault` under today's action. `None` when the agent acts by itself or no action
/// is due.
pub fn remedy(fault: &Fault, wanted: ContextAction) -> Option<Remedy> {
    use FaultAction as Agent;
    match (fault.kind, fault.action?) {
        // An action of a later version may be milder than an eviction.
        (_, _) if matches!(wanted, ContextAction::Report | ContextAction::Unknown) => None,
        // This version does not know what an agent of a later version does.
        (_, Agent::Unknown) => None,
        (FaultKind::Gpu, _) => Some(Remedy::Evict("GpuFault")),
        (FaultKind::Context, Agent::BeyondMaximum) => Some(Remedy::Evict("TooManyRestarts")),
        (FaultKind::Context, Agent::Evict | Agent::Report) => match wanted {
            ContextAction::Evict => Some(Remedy::Evict("ContextPolicy")),
            _ => Some(Remedy::Restart),
        },
        (FaultKind::Context | FaultKind::Unknown, _) => None,
    }
}

/// The evictions that are due now.
#[derive(Debug, Default)]
pub(super) struct DueEvictions<'a> {
    /// Each affected pod with the reason.
    pub(super) evictions: Vec<(&'a AffectedPod, &'static str)>,
    /// The Jobs that the operator must read before it decides.
    pub(super) unread_jobs: Vec<&'a JobRef>,
    /// The time until the next GPU fault's grace ends.
    pub(super) retry_after: Option<Duration>,
}

/// The pods of the budget's namespace that have to be evicted for a fault.
pub(super) fn due_evictions_of<'a>(
    budget: &GpuMemoryBudget,
    inputs: &'a BudgetInputs,
) -> DueEvictions<'a> {
    let policy = budget.spec.context_policy.as_ref();
    let action = action_of(policy, inputs.default_action);
    due_evictions(action, current_records(budget), inputs)
}

/// The pods of a namespace that have to be evicted for a fault under `action`. `records` has the
/// recorded evictions.
pub(super) fn due_evictions<'a>(
    action: ContextAction,
    records: &[FaultEviction],
    inputs: &'a BudgetInputs,
) -> DueEvictions<'a> {
    let mut due = DueEvictions::default();
    for affected in inputs
        .affected_pods
        .iter()
        .filter(|affected| !affected.request.terminating)
    {
        let Some(Remedy::Evict(reason)) = remedy(&affected.fault, action) else {
            continue;
        };
        let is_gpu_fault = affected.fault.kind == FaultKind::Gpu;
        let remaining_grace = GPU_FAULT_GRACE.saturating_sub(affected.observed_for);
        // For a recorded eviction an earlier operator has already waited for the grace.
        let is_recorded = find_record(records, affected).is_some();
        if is_gpu_fault && !remaining_grace.is_zero() && !is_recorded {
            due.retry_after = Some(
                due.retry_after
                    .map_or(remaining_grace, |again| again.min(remaining_grace)),
            );
            continue;
        }
        // The pod did not cause a GPU fault. The operator evicts it when a controller recreates it
        // or the policy says Evict, and never when its Job would fail.
        let evict = match &affected.request.job() {
            Some(job) if is_gpu_fault => inputs
                .jobs_ignoring_disruption
                .get(&job.uid)
                .copied()
                .unwrap_or_else(|| {
                    due.unread_jobs.push(job);
                    false
                }),
            _ if is_gpu_fault => affected.request.is_recreated() || action == ContextAction::Evict,
            _ => true,
        };
        if evict {
            due.evictions.push((affected, reason));
        }
    }
    due
}

/// The evictions that the status should list.
///
/// Pending evictions keep their entries. The status therefore bounds how many evictions are in
/// progress. An eviction that has been ineffective for [`INEFFECTIVE_GRACE`] may lose its entry, so
/// that it blocks no others. Its pod gets a new entry once the ineffective requests are forgotten.
pub(super) fn recorded_evictions(
    budget: &GpuMemoryBudget,
    due: &DueEvictions<'_>,
    inputs: &BudgetInputs,
    now: &Time,
) -> Vec<FaultEviction> {
    let before = current_records(budget);
    let is_ineffective = |uid: &str| {
        let lasted = inputs.evictions_ineffective_for.get(uid);
        lasted.is_some_and(|lasted| *lasted >= INEFFECTIVE_GRACE)
    };
    let keeps_entry = |record: &&FaultEviction| {
        let mut leaving = due.evictions.iter();
        leaving.any(|(affected, _)| matches(record, affected)) && !is_ineffective(&record.pod_uid)
    };
    let room = MAX_EVICTIONS.saturating_sub(before.iter().filter(keeps_entry).count());
    let new = due.evictions.iter().filter(|(affected, _)| {
        find_record(before, affected).is_none() && !is_ineffective(&affected.request.api_uid)
    });
    let policy = budget.spec.context_policy.clone().unwrap_or_default();
    let mut wanted: Vec<_> = new
        .take(room)
        .map(|(affected, reason)| new_record(affected, reason, &policy, now))
        .collect();
    wanted.extend_from_slice(before);
    let mut over = wanted.len().saturating_sub(MAX_EVICTIONS);
    let mut remaining: Vec<_> = wanted
        .into_iter()
        .rev()
        .filter(|record| {
            let remove = over > 0 && !keeps_entry(&record);
            over -= usize::from(remove);
            !remove
        })
        .collect();
    remaining.reverse();
    remaining
}

/// The recorded evictions that are still due.
pub(super) fn pending_evictions(
    budget: &GpuMemoryBudget,
    due: &DueEvictions<'_>,
) -> Vec<PodEviction> {
    let evictions = due.evictions.iter().filter_map(|(affected, _)| {
        let record = find_record(current_records(budget), affected)?;
        Some(PodEviction {
            pod: affected.pod.clone(),
            uid: affected.request.api_uid.clone(),
            reason: event_reason(&affected.fault),
            message: record.message.clone(),
        })
    });
    evictions.collect()
}

/// The next evictions in a namespace without a budget, in which no eviction is on record. Those
/// that have been ineffective for longest come last, and so block no others.
pub(super) fn unrecorded_evictions(
    due: &DueEvictions<'_>,
    inputs: &BudgetInputs,
) -> Vec<PodEviction> {
    let policy = ContextPolicy::default();
    let mut evictions: Vec<_> = due
        .evictions
        .iter()
        .map(|(affected, _)| PodEviction {
            pod: affected.pod.clone(),
            uid: affected.request.api_uid.clone(),
            reason: event_reason(&affected.fault),
            message: eviction_message(&affected.fault, &policy),
        })
        .collect();
    evictions.sort_by_key(|pod| inputs.evictions_ineffective_for.get(&pod.uid).copied());
    evictions.truncate(MAX_EVICTIONS);
    evictions
}

/// The reason of the pod's Event.
fn event_reason(fault: &Fault) -> &'static str {
    match fault.kind {
        FaultKind::Context | FaultKind::Unknown => "GpuContextPoisoned",
        FaultKind::Gpu => "GpuFault",
    }
}

fn current_records(budget: &GpuMemoryBudget) -> &[FaultEviction] {
    budget
        .status
        .as_ref()
        .map_or(&[], |status| &status.evictions)
}

fn find_record<'a>(
    recorded: &'a [FaultEviction],
    affected: &AffectedPod,
) -> Option<&'a FaultEviction> {
    recorded.iter().find(|record| matches(record, affected))
}

fn matches(record: &FaultEviction, affected: &AffectedPod) -> bool {
    record.fault == affected.fault.id && record.pod_uid == affected.request.api_uid
}

fn new_record(
    affected: &AffectedPod,
    reason: &str,
    policy: &ContextPolicy,
    now: &Time,
) -> FaultEviction {
    let AffectedPod {
        pod,
        request,
        fault,
        observed_for: _,
    } = affected;
    let mut message = eviction_message(fault, policy);
    message.truncate(message.floor_char_boundary(MAX_MESSAGE_LENGTH));
    FaultEviction {
        fault: fault.id.clone(),
        pod: pod.clone(),
        pod_uid: request.api_uid.clone(),
        reason: reason.to_owned(),
        message,
        // The API stores whole seconds.
        time: Time(Timestamp::from_second(now.0.as_second()).unwrap_or(now.0)),
    }
}

fn eviction_message(fault: &Fault, policy: &ContextPolicy) -> String {
    let gpu = &fault.gpu;
    let cause = match (fault.cuda_error, fault.xid) {
        (Some(code), _) => format!("CUDA error {code}"),
        (None, Some(xid)) => format!("XID {xid}"),
        (None, None) => "a fault".to_owned(),
    };
    match (&fault.container, fault.action) {
        (Some(container), Some(FaultAction::BeyondMaximum)) => format!(
            "{cause} poisoned the context of container {} on {gpu} after {} restarts within {} s",
            container.container, policy.max_restarts, policy.window_seconds
        ),
        (Some(container), _) => format!(
            "{cause} poisoned the context of container {} on {gpu}",
            container.container
        ),
        (None, Some(FaultAction::ResetGpu)) => {
            format!("{cause} on {gpu}: only a reset of the GPU recovers it")
        }
        (None, Some(FaultAction::RestartNode)) => {
            format!("{cause} on {gpu}: only a restart of the node recovers it")
        }
        (None, _) => format!("{gpu} does not respond"),
    }
}
