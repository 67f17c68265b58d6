//! Plans the writes for one budget. Pure.
//!
//! ```text
//!   label the namespace once both quotas are in force --> status --> quotas --> evict excess pods
//!     --> evict pods whose fault eviction is recorded in the status
//! ```
//!
//! The status comes before the quotas. It first says that the quotas of a new spec are not in
//! force. So no pod is evicted by the age of the former ones. A failed label or quota blocks no
//! other step, and the next status names it.
//!
//! Each step follows from the observed state and never from an earlier step. After a crash at any
//! step the next plan repairs the rest. A plan with nothing to do is empty.

use std::time::Duration;

use bursar_crds::{GpuMemoryBudget, GpuMemoryBudgetStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::BudgetInputs;
use super::ParsedSpec;
use super::faults;
use super::overage::{EXCEEDED, excess_pods};
use super::quotas::{QuotaKind, QuotaSpec};
use super::status::desired_status;
use crate::cluster::facts::pod::{JobRef, PodFacts};

/// How long a budget has to be exceeded before pods are evicted. A pending delete may end it.
const OVERAGE_GRACE: Duration = Duration::from_secs(5);

/// The delay of the next reconcile after a Job was read.
const JOB_READ_REQUEUE: Duration = Duration::from_millis(100);

/// How long PodDisruptionBudgets may refuse an eviction, from their first refusal.
const DISRUPTION_GRACE: Duration = Duration::from_secs(60);

/// A pod to evict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodEviction {
    /// The pod's name.
    pub pod: String,
    /// The pod's UID.
    pub uid: String,
    /// The reason of the Event.
    pub reason: &'static str,
    /// The note of the Event.
    pub message: String,
}

/// One write or one read.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Apply a quota.
    ApplyQuota(QuotaKind, QuotaSpec),
    /// Label the namespace as one whose budget is in force.
    LabelNamespace,
    /// Evict a pod.
    Evict {
        /// The pod and the reason.
        pod: PodEviction,
        /// Delete the pod, because the grace of its PodDisruptionBudgets is over.
        by_force: bool,
    },
    /// Read whether a Job ignores the disruption of its pods.
    ReadJob(JobRef),
    /// Apply the status.
    ApplyStatus(Box<GpuMemoryBudgetStatus>),
}

impl Step {
    /// Whether the later steps wait until this one succeeds.
    pub(super) fn blocks_later_steps(&self) -> bool {
        matches!(self, Self::ApplyStatus(_))
    }

    fn is_excess_eviction(&self) -> bool {
        matches!(self, Self::Evict { pod, .. } if pod.reason == EXCEEDED)
    }
}

/// The steps for one budget, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// The steps.
    pub steps: Vec<Step>,
    /// When to reconcile again although nothing changes.
    pub requeue_after: Option<Duration>,
}

/// Plans the steps for `budget`.
pub fn plan(budget: &GpuMemoryBudget, inputs: &BudgetInputs, now: &Time) -> Plan {
    let mut plan = Plan::default();
    let parsed = ParsedSpec::of(&budget.spec, inputs.quantum);
    // An invalid spec leaves the quotas as they are.
    let quotas = parsed.as_ref().map_or_else(
        |_| Vec::new(),
        |parsed| QuotaSpec::all_desired(budget, parsed, inputs.quantum),
    );
    let enforces = |(kind, wanted): &(QuotaKind, QuotaSpec)| {
        let quota = inputs.quota(*kind);
        quota.is_some_and(|quota| quota.enforces(wanted))
    };
    let in_force = parsed.is_ok() && quotas.iter().all(enforces);
    let due = faults::due_evictions_of(budget, inputs);
    let recorded = faults::recorded_evictions(budget, &due, inputs, now);
    let pending = faults::pending_evictions(budget, &due);
    if in_force && !inputs.is_labelled {
        plan.steps.push(Step::LabelNamespace);
    }
    let wanted = desired_status(budget, &parsed, &quotas, recorded, inputs, now);
    if budget.status.as_ref() != Some(&wanted) {
        plan.steps.push(Step::ApplyStatus(Box::new(wanted)));
    }
    for (kind, wanted) in quotas {
        let quota = inputs.quota(kind);
        if quota.is_none_or(|quota| quota.spec != wanted) {
            plan.steps.push(Step::ApplyQuota(kind, wanted));
        }
    }
    if let Ok(parsed) = &parsed
        && in_force
    {
        plan_excess_evictions(&mut plan, budget, parsed, inputs);
    }
    for pod in pending {
        plan.evict(pod, inputs);
    }
    if !due.evictions.is_empty() {
        // A pod without a record waits for room, which no watch announces.
        plan.requeue_within(Some(OVERAGE_GRACE));
    }
    for job in &due.unread_jobs {
        plan.read_job((*job).clone());
    }
    plan.requeue_within(due.retry_after);
    plan
}

/// Plans the evictions for faults in a namespace without a budget, by the cluster's default action.
pub(super) fn plan_without_budget(inputs: &BudgetInputs) -> Plan {
    let mut plan = Plan::default();
    let due = faults::due_evictions(inputs.default_action, &[], inputs);
    for pod in faults::unrecorded_evictions(&due, inputs) {
        plan.evict(pod, inputs);
    }
    for job in &due.unread_jobs {
        plan.read_job((*job).clone());
    }
    plan.requeue_within(due.retry_after);
    plan
}

impl Plan {
    /// Whether the plan evicts excess pods.
    pub fn evicts_excess(&self) -> bool {
        self.steps.iter().any(Step::is_excess_eviction)
    }

    /// Keeps only those evictions of excess pods that `other` has too.
    pub fn retain_excess_in(&mut self, other: &Self) {
        self.steps
            .retain(|step| !step.is_excess_eviction() || other.steps.contains(step));
    }

    fn evict(&mut self, pod: PodEviction, inputs: &BudgetInputs) {
        let refused = inputs.refused_for.get(&pod.uid);
        // A Job counts a deleted pod, unlike an evicted pod, as a failure whatever its policy says.
        // A borrowed pod has consented to lose excess memory.
        let is_excess = pod.reason == EXCEEDED;
        let is_protected = |request: &PodFacts| match is_excess {
            true => request.job_if_guaranteed().is_some(),
            false => request.job().is_some(),
        };
        let mut staying = inputs
            .pods
            .iter()
            .filter(|(_, request)| is_protected(request));
        let by_force = refused.is_some_and(|lasted| *lasted >= DISRUPTION_GRACE)
            && !staying.any(|(_, request)| request.api_uid == pod.uid);
        self.steps.push(Step::Evict { pod, by_force });
        self.requeue_within(Some(OVERAGE_GRACE));
    }

    fn read_job(&mut self, job: JobRef) {
        let step = Step::ReadJob(job);
        if !self.steps.contains(&step) {
            self.steps.push(step);
        }
        self.requeue_within(Some(JOB_READ_REQUEUE));
    }

    fn requeue_within(&mut self, time: Option<Duration>) {
        self.requeue_after = self.requeue_after.into_iter().chain(time).min();
    }
}

fn plan_excess_evictions(
    plan: &mut Plan,
    budget: &GpuMemoryBudget,
    parsed: &ParsedSpec,
    inputs: &BudgetInputs,
) {
    let enforced = budget.status.as_ref();
    let enforced = enforced.and_then(|status| status.enforced_since.as_ref());
    let (Some(Time(enforced)), Some(exceeded_for)) = (enforced, inputs.exceeded_for) else {
        return;
    };
    let known = |job: &JobRef| inputs.jobs_ignoring_disruption.get(&job.uid).copied();
    let surplus_of = |or: bool| {
        let ignores_disruption = |job: &JobRef| known(job).unwrap_or(or);
        excess_pods(parsed, &inputs.pods, *enforced, ignores_disruption)
    };
    let possible = surplus_of(true);
    if possible.is_empty() {
        return;
    }
    if exceeded_for < OVERAGE_GRACE {
        plan.requeue_within(Some(OVERAGE_GRACE - exceeded_for));
        return;
    }
    let jobs = inputs.pods.iter().filter_map(|(_, request)| {
        let is_candidate = possible.iter().any(|pod| pod.uid == request.api_uid);
        request
            .job_if_guaranteed()
            .filter(|job| is_candidate && known(job).is_none())
    });
    let unknown: Vec<_> = jobs.collect();
    if !unknown.is_empty() {
        // The selection depends on the Jobs' policies.
        unknown
            .into_iter()
            .for_each(|job| plan.read_job(job.clone()));
        return;
    }
    for pod in surplus_of(false) {
        plan.evict(pod, inputs);
    }
}
