//! From a budget and the facts to what is to be done: pure.
//!
//! ```text
//!   quotas as the spec says --> namespace labelled once both are in force --> surplus pods ended --> status
//! ```
//!
//! Each step is planned from what is there, never from what an earlier step will have done, so a crash after
//! any of them is repaired by planning again; with nothing left to do the plan is empty.

use std::time::Duration;

use bursar_crds::conditions::budget as names;
use bursar_crds::{GpuMemoryBudget, GpuMemoryBudgetStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;

use super::quota::{Cap, Which};
use super::repair::{Surplus, surplus};
use super::{Terms, status};
use crate::world::Facts;

/// Pods are ended that go beyond the budget for this long: a delete that is on its way may settle it.
const REPAIR_AFTER: Duration = Duration::from_secs(5);

/// How long disruption budgets keep such a pod.
const GRACE: Duration = Duration::from_secs(60);

/// One write.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Apply a quota.
    Quota(Which, Cap),
    /// Label the namespace as one whose budget is in force.
    Label,
    /// End a pod.
    Evict {
        /// Which, and why.
        pod: Surplus,
        /// Past its disruption budget: that had its time.
        by_force: bool,
    },
    /// Apply the status.
    Status(Box<GpuMemoryBudgetStatus>),
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
    // The quotas of a spec that cannot be read stay what they were.
    if let Ok(terms) = &terms {
        let mut in_force = true;
        for which in Which::ALL {
            let wanted = Cap::wanted(which, budget, terms, facts.quantum);
            let quota = facts.quota(which);
            if quota.is_none_or(|quota| quota.cap != wanted) {
                plan.steps.push(Step::Quota(which, wanted.clone()));
            }
            in_force &= quota.is_some_and(|quota| quota.enforces(&wanted));
        }
        if in_force && !facts.labelled {
            plan.steps.push(Step::Label);
        }
        if in_force {
            repair(&mut plan, budget, terms, facts, now.0);
        }
    }
    let wanted = status(budget, facts, now);
    if budget.status.as_ref() != Some(&wanted) {
        plan.steps.push(Step::Status(Box::new(wanted)));
    }
    plan
}

fn repair(plan: &mut Plan, budget: &GpuMemoryBudget, terms: &Terms, facts: &Facts, now: Timestamp) {
    let (Some(enforced), Some(exceeded)) = (
        since(budget, names::ENFORCED),
        since(budget, names::EXCEEDED),
    ) else {
        return;
    };
    let surplus = surplus(terms, &facts.pods, enforced);
    if surplus.is_empty() {
        return;
    }
    let lasted = Duration::try_from(now.duration_since(exceeded)).unwrap_or_default();
    if lasted < REPAIR_AFTER {
        plan.again = Some(REPAIR_AFTER - lasted);
        return;
    }
    let by_force = lasted >= GRACE;
    plan.again = Some(REPAIR_AFTER);
    let steps = surplus.into_iter().map(|pod| Step::Evict { pod, by_force });
    plan.steps.extend(steps);
}

/// Since when a condition of the budget is True.
fn since(budget: &GpuMemoryBudget, type_: &str) -> Option<Timestamp> {
    let conditions = budget.status.iter().flat_map(|status| &status.conditions);
    let holds = |condition: &&Condition| condition.type_ == type_ && condition.status == "True";
    let condition = conditions.into_iter().find(holds)?;
    Some(condition.last_transition_time.0)
}
