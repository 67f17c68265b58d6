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

use super::Facts;
use super::overage::{EXCEEDED, surplus};
use super::quotas::{Cap, Which};
use super::status::holding;
use super::{Terms, faults, status};
use crate::cluster::pod_request::{Demand, Owner};

/// Pods are ended that go beyond the budget for this long: a delete that is on its way may settle it.
const REPAIR_AFTER: Duration = Duration::from_secs(5);

/// How soon it is looked again after a look at a Job.
const LOOKED_AT: Duration = Duration::from_millis(100);

/// How long disruption budgets keep a pod that has to go, from their first refusal.
const GRACE: Duration = Duration::from_secs(60);

/// A pod that has to go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaver {
    /// Its name.
    pub pod: String,
    /// Its UID.
    pub uid: String,
    /// The reason of the Event.
    pub reason: &'static str,
    /// Why, for people.
    pub why: String,
}

/// One write, or one look.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Make a quota what it should be.
    Quota(Which, Cap),
    /// Label the namespace as one whose budget is in force.
    Label,
    /// End a pod.
    Evict {
        /// Which, and why.
        pod: Leaver,
        /// Past its disruption budget: that had its time.
        by_force: bool,
    },
    /// Find out whether a Job lets its pods be disrupted.
    LookAtJob(Owner),
    /// Apply the status.
    Status(Box<GpuMemoryBudgetStatus>),
}

impl Step {
    fn is_repair(&self) -> bool {
        matches!(self, Self::Evict { pod, .. } if pod.reason == EXCEEDED)
    }
}

/// What is to be done, in this order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// The writes.
    pub steps: Vec<Step>,
    /// When to look again even if nothing changes.
    pub again: Option<Duration>,
}

/// What is to be done about `budget`.
pub fn plan(budget: &GpuMemoryBudget, facts: &Facts, now: &Time) -> Plan {
    let mut plan = Plan::default();
    let terms = Terms::of(&budget.spec, facts.quantum);
    let (mut quotas, mut in_force) = (Vec::new(), terms.is_ok());
    // The quotas of a spec that cannot be read stay what they were.
    if let Ok(terms) = &terms {
        for which in Which::ALL {
            let wanted = Cap::wanted(which, budget, terms, facts.quantum);
            let quota = facts.quota(which);
            if quota.is_none_or(|quota| quota.cap != wanted) {
                quotas.push(Step::Quota(which, wanted.clone()));
            }
            in_force &= quota.is_some_and(|quota| quota.enforces(&wanted));
        }
    }
    if in_force && !facts.labelled {
        plan.steps.push(Step::Label);
    }
    let wanted = status(budget, facts, now);
    if budget.status.as_ref() != Some(&wanted) {
        plan.steps.push(Step::Status(Box::new(wanted)));
    }
    plan.steps.extend(quotas);
    if let Ok(terms) = &terms
        && in_force
    {
        repair(&mut plan, budget, terms, facts);
    }
    let due = faults::due(budget, facts);
    for pod in faults::leavers(budget, &due) {
        plan.evict(pod, facts);
    }
    for job in &due.looks {
        plan.look_at((*job).clone());
    }
    plan.look_within(due.again);
    plan
}

impl Plan {
    /// Whether it ends pods that a quota let in by mistake.
    pub fn repairs(&self) -> bool {
        self.steps.iter().any(Step::is_repair)
    }

    /// Ends those of them only whom `other` ends too.
    pub fn repair_only_by(&mut self, other: &Self) {
        self.steps
            .retain(|step| !step.is_repair() || other.steps.contains(step));
    }

    fn evict(&mut self, pod: Leaver, facts: &Facts) {
        let refused = facts.refused.get(&pod.uid);
        // A Job takes a pod that was deleted, and not evicted, for a failed one whatever its policy
        // says. What a borrower has agreed to is to give back what it has too much of.
        let surplus = pod.reason == EXCEEDED;
        let stays = |demand: &Demand| match surplus {
            true => demand.asked_job().is_some(),
            false => demand.job.is_some(),
        };
        let mut staying = facts.pods.iter().filter(|(_, demand)| stays(demand));
        let by_force = refused.is_some_and(|lasted| *lasted >= GRACE)
            && !staying.any(|(_, demand)| demand.uid == pod.uid);
        self.steps.push(Step::Evict { pod, by_force });
        self.look_within(Some(REPAIR_AFTER));
    }

    fn look_at(&mut self, job: Owner) {
        let look = Step::LookAtJob(job);
        if !self.steps.contains(&look) {
            self.steps.push(look);
        }
        self.look_within(Some(LOOKED_AT));
    }

    fn look_within(&mut self, time: Option<Duration>) {
        self.again = self.again.into_iter().chain(time).min();
    }
}

fn repair(plan: &mut Plan, budget: &GpuMemoryBudget, terms: &Terms, facts: &Facts) {
    let enforced = budget.status.as_ref();
    let enforced = enforced.and_then(|status| status.enforced_since.as_ref());
    let Some(Time(enforced)) = enforced.filter(|_| is_exceeded(budget)) else {
        return;
    };
    let known = |job: &Owner| facts.jobs.get(&job.uid).copied();
    let surplus_of = |or: bool| {
        let lets_go = |job: &Owner| known(job).unwrap_or(or);
        surplus(terms, &facts.pods, *enforced, lets_go)
    };
    let possible = surplus_of(true);
    if possible.is_empty() {
        return;
    }
    if facts.exceeded_for < REPAIR_AFTER {
        plan.look_within(Some(REPAIR_AFTER - facts.exceeded_for));
        return;
    }
    let jobs = facts.pods.iter().filter_map(|(_, demand)| {
        let goes = possible.iter().any(|pod| pod.uid == demand.uid);
        demand
            .asked_job()
            .filter(|job| goes && known(job).is_none())
    });
    let unknown: Vec<_> = jobs.collect();
    if !unknown.is_empty() {
        // Who goes depends on what they say.
        unknown
            .into_iter()
            .for_each(|job| plan.look_at(job.clone()));
        return;
    }
    for pod in surplus_of(false) {
        plan.evict(pod, facts);
    }
}

/// Whether the budget, as its spec is now, is exceeded by its status.
pub fn is_exceeded(budget: &GpuMemoryBudget) -> bool {
    let status = budget.status.as_ref();
    let exceeded = status.and_then(|status| holding(status, names::EXCEEDED));
    exceeded.is_some_and(|told| told.observed_generation == budget.metadata.generation)
}
