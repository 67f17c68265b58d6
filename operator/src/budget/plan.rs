//! From a budget and the facts to what is to be done: pure.
//!
//! ```text
//!   namespace labelled once both quotas are in force --> status --> quotas as the spec says --> surplus pods ended
//!     --> pods ended for faults that are on record in the status
//! ```
//!
//! The status says first that the quotas of a new spec are not in force yet: nobody is ended by how long the ones
//! before were. And what fails after it keeps nobody from reading what is so.
//!
//! Each step is planned from what is there, never from what an earlier step will have done, so a crash after
//! any of them is repaired by planning again; with nothing left to do the plan is empty.

use std::time::Duration;

use bursar_crds::conditions::budget as names;
use bursar_crds::{GpuMemoryBudget, GpuMemoryBudgetStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::BudgetInputs;
use super::ParsedSpec;
use super::faults;
use super::overage::{EXCEEDED, excess_pods};
use super::quotas::{QuotaKind, QuotaSpec};
use super::status::desired_status;
use super::status::true_condition;
use crate::cluster::pod_request::{JobRef, PodRequest};

/// Pods are ended that go beyond the budget for this long: a delete that is on its way may settle it.
const OVERAGE_GRACE: Duration = Duration::from_secs(5);

/// How soon it is looked again after a look at a Job.
const JOB_READ_REQUEUE: Duration = Duration::from_millis(100);

/// How long disruption budgets keep a pod that has to go, from their first refusal.
const DISRUPTION_GRACE: Duration = Duration::from_secs(60);

/// A pod that has to go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodEviction {
    /// Its name.
    pub pod: String,
    /// Its UID.
    pub uid: String,
    /// The reason of the Event.
    pub reason: &'static str,
    /// Why, for people.
    pub message: String,
}

/// One write, or one look.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Make a quota what it should be.
    ApplyQuota(QuotaKind, QuotaSpec),
    /// Label the namespace as one whose budget is in force.
    LabelNamespace,
    /// End a pod.
    Evict {
        /// Which, and why.
        pod: PodEviction,
        /// Past its disruption budget: that had its time.
        by_force: bool,
    },
    /// Find out whether a Job lets its pods be disrupted.
    ReadJob(JobRef),
    /// Apply the status.
    ApplyStatus(Box<GpuMemoryBudgetStatus>),
}

impl Step {
    fn is_excess_eviction(&self) -> bool {
        matches!(self, Self::Evict { pod, .. } if pod.reason == EXCEEDED)
    }
}

/// What is to be done, in this order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// The writes.
    pub steps: Vec<Step>,
    /// When to look again even if nothing changes.
    pub requeue_after: Option<Duration>,
}

/// What is to be done about `budget`.
pub fn plan(budget: &GpuMemoryBudget, inputs: &BudgetInputs, now: &Time) -> Plan {
    let mut plan = Plan::default();
    let parsed = ParsedSpec::of(&budget.spec, inputs.quantum);
    let (mut quotas, mut in_force) = (Vec::new(), parsed.is_ok());
    // The quotas of a spec that cannot be read stay what they were.
    if let Ok(parsed) = &parsed {
        for kind in QuotaKind::ALL {
            let wanted = QuotaSpec::desired(kind, budget, parsed, inputs.quantum);
            let quota = inputs.quota(kind);
            if quota.is_none_or(|quota| quota.spec != wanted) {
                quotas.push(Step::ApplyQuota(kind, wanted.clone()));
            }
            in_force &= quota.is_some_and(|quota| quota.enforces(&wanted));
        }
    }
    if in_force && !inputs.is_labelled {
        plan.steps.push(Step::LabelNamespace);
    }
    let wanted = desired_status(budget, inputs, now);
    if budget.status.as_ref() != Some(&wanted) {
        plan.steps.push(Step::ApplyStatus(Box::new(wanted)));
    }
    plan.steps.extend(quotas);
    if let Ok(parsed) = &parsed
        && in_force
    {
        plan_excess_evictions(&mut plan, budget, parsed, inputs);
    }
    let due = faults::due_evictions(budget, inputs);
    for pod in faults::pending_evictions(budget, &due) {
        plan.evict(pod, inputs);
    }
    for job in &due.unread_jobs {
        plan.read_job((*job).clone());
    }
    plan.requeue_within(due.retry_after);
    plan
}

impl Plan {
    /// Whether it ends pods that a quota let in by mistake.
    pub fn evicts_excess(&self) -> bool {
        self.steps.iter().any(Step::is_excess_eviction)
    }

    /// Ends those of them only whom `other` ends too.
    pub fn retain_excess_in(&mut self, other: &Self) {
        self.steps
            .retain(|step| !step.is_excess_eviction() || other.steps.contains(step));
    }

    fn evict(&mut self, pod: PodEviction, inputs: &BudgetInputs) {
        let refused = inputs.refused_for.get(&pod.uid);
        // A Job takes a pod that was deleted, and not evicted, for a failed one whatever its policy
        // says. What a borrower has agreed to is to give back what it has too much of.
        let is_excess = pod.reason == EXCEEDED;
        let stays = |request: &PodRequest| match is_excess {
            true => request.job_if_guaranteed().is_some(),
            false => request.job.is_some(),
        };
        let mut staying = inputs.pods.iter().filter(|(_, request)| stays(request));
        let by_force = refused.is_some_and(|lasted| *lasted >= DISRUPTION_GRACE)
            && !staying.any(|(_, request)| request.uid == pod.uid);
        self.steps.push(Step::Evict { pod, by_force });
        self.requeue_within(Some(OVERAGE_GRACE));
    }

    fn read_job(&mut self, job: JobRef) {
        let look = Step::ReadJob(job);
        if !self.steps.contains(&look) {
            self.steps.push(look);
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
    let Some(Time(enforced)) = enforced.filter(|_| is_exceeded(budget)) else {
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
    if inputs.exceeded_for < OVERAGE_GRACE {
        plan.requeue_within(Some(OVERAGE_GRACE - inputs.exceeded_for));
        return;
    }
    let jobs = inputs.pods.iter().filter_map(|(_, request)| {
        let goes = possible.iter().any(|pod| pod.uid == request.uid);
        request
            .job_if_guaranteed()
            .filter(|job| goes && known(job).is_none())
    });
    let unknown: Vec<_> = jobs.collect();
    if !unknown.is_empty() {
        // Who goes depends on what they say.
        unknown
            .into_iter()
            .for_each(|job| plan.read_job(job.clone()));
        return;
    }
    for pod in surplus_of(false) {
        plan.evict(pod, inputs);
    }
}

/// Whether the budget, as its spec is now, is exceeded by its status.
pub fn is_exceeded(budget: &GpuMemoryBudget) -> bool {
    let status = budget.status.as_ref();
    let exceeded = status.and_then(|status| true_condition(status, names::EXCEEDED));
    exceeded.is_some_and(|told| told.observed_generation == budget.metadata.generation)
}
