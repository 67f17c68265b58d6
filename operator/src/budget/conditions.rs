//! Computes the conditions of a budget. Pure.

mod covered;

use bursar_crds::conditions::{ConditionUpdate, budget as names};
use bursar_crds::{GpuMemoryBudget, Quantum};

use super::quotas::{QuotaKind, QuotaSpec};
use super::{BudgetInputs, InvalidSpec, ParsedSpec, RequestedUsage};
use crate::cluster::unknown_values::{REMEDY, unknown_in_budget};
use crate::quanta::Quanta;
use covered::covered;

/// The conditions of `budget`: Ready, Accepted, Covered, Exceeded, Enforced.
pub(super) fn conditions(
    budget: &GpuMemoryBudget,
    parsed: &Result<ParsedSpec, InvalidSpec>,
    quotas: &[(QuotaKind, QuotaSpec)],
    inputs: &BudgetInputs,
) -> Vec<ConditionUpdate> {
    let accepted = accepted(budget, parsed, inputs.quantum);
    let (covered, exceeded, enforced) = match parsed {
        Ok(parsed) => (
            covered(&budget.spec.cohort, &inputs.cohort, inputs.quantum),
            exceeded(parsed, &remaining_usage(inputs), inputs.quantum),
            enforced(quotas, inputs),
        ),
        Err(_) => (
            unknown(names::COVERED),
            unknown(names::EXCEEDED),
            unknown(names::ENFORCED),
        ),
    };
    // Overcommitted is the state of the whole cohort, of which this budget may have no part.
    let has_nodes = ConditionUpdate {
        holds: Some(covered.reason != names::NO_NODES),
        ..covered.clone()
    };
    let ready = ready(&[
        (&accepted, true),
        (&exceeded, false),
        (&enforced, true),
        (&has_nodes, true),
    ]);
    vec![ready, accepted, covered, exceeded, enforced]
}

/// `Ready` repeats the first condition that is not as wanted. It is about this budget only.
fn ready(desired: &[(&ConditionUpdate, bool)]) -> ConditionUpdate {
    let failing = desired
        .iter()
        .find(|(condition, expected)| condition.holds != Some(*expected));
    match failing {
        Some((condition, _)) => {
            ConditionUpdate::new(names::READY, false, condition.reason, &condition.message)
        }
        None => ConditionUpdate::new(
            names::READY,
            true,
            names::AS_DECLARED,
            "accepted, not exceeded, and in force",
        ),
    }
}

fn accepted(
    budget: &GpuMemoryBudget,
    parsed: &Result<ParsedSpec, InvalidSpec>,
    quantum: Quantum,
) -> ConditionUpdate {
    let invalid =
        |reason| ConditionUpdate::new(names::ACCEPTED, false, names::INVALID_SPEC, reason);
    let parsed = match parsed {
        Ok(parsed) => parsed,
        Err(reason) => return invalid(reason.to_string()),
    };
    let unreadable = parsed.invalid_overrides.iter();
    let unreadable: Vec<_> = unreadable.map(ToString::to_string).collect();
    if !unreadable.is_empty() {
        return invalid(format!("{}; the rest applies", unreadable.join(", ")));
    }
    if let Some(field) = unknown_in_budget(budget) {
        return invalid(format!(
            "{field} has a value of another version: {REMEDY}; the rest applies"
        ));
    }
    let message = if parsed.rounded.is_empty() {
        "the spec is valid".to_owned()
    } else {
        let rounded = parsed.rounded.join(", ");
        format!("the spec is valid; {rounded}, because memory is counted in quanta of {quantum}")
    };
    ConditionUpdate::new(names::ACCEPTED, true, names::AS_DECLARED, message)
}

/// The requests of the pods that do not terminate. A quota stops counting a terminating pod after
/// its grace period, however long its node keeps the pod.
fn remaining_usage(inputs: &BudgetInputs) -> RequestedUsage {
    let pods = inputs.pods.iter().map(|(_, request)| &**request);
    pods.filter(|request| !request.terminating).collect()
}

fn exceeded(parsed: &ParsedSpec, usage: &RequestedUsage, quantum: Quantum) -> ConditionUpdate {
    let total = usage.guaranteed.plus(usage.borrowed);
    let is_one_bound = parsed.guaranteed == parsed.limit;
    let bounds = [
        (
            total,
            parsed.limit,
            names::OVER_LIMIT,
            "pods",
            match is_one_bound {
                true => "delete pods or raise spec.deviceMemory.guaranteed and limit",
                false => "delete pods or raise spec.deviceMemory.limit",
            },
        ),
        (
            usage.guaranteed,
            parsed.guaranteed,
            names::OVER_GUARANTEE,
            "guaranteed pods",
            "give some the PriorityClass bursar-borrowed or raise spec.deviceMemory.guaranteed",
        ),
        (
            usage.managed,
            parsed.managed,
            names::OVER_MANAGED_LIMIT,
            "managed memory: pods",
            "delete pods or raise spec.managedMemory.limit",
        ),
    ];
    let over: Vec<_> = bounds
        .into_iter()
        .filter(|(requested, most, ..)| requested > most)
        .filter(|(_, _, reason, ..)| !is_one_bound || *reason != names::OVER_GUARANTEE)
        .collect();
    let Some((_, _, reason, ..)) = over.first() else {
        return ConditionUpdate::new(
            names::EXCEEDED,
            false,
            names::WITHIN_BUDGET,
            "the pods' requests are within the budget",
        );
    };
    let messages: Vec<_> = over
        .iter()
        .map(|(requested, most, _, subject, remedy)| {
            exceeded_bound(subject, *requested, *most, remedy, quantum)
        })
        .collect();
    ConditionUpdate::new(names::EXCEEDED, true, reason, messages.join("; "))
}

fn exceeded_bound(
    subject: &str,
    requested: Quanta,
    most: Quanta,
    remedy: &str,
    quantum: Quantum,
) -> String {
    let (requested, most) = (requested.text(quantum), most.text(quantum));
    format!("{subject} request {requested}, more than {most}: {remedy}")
}

fn enforced(quotas: &[(QuotaKind, QuotaSpec)], inputs: &BudgetInputs) -> ConditionUpdate {
    let failed = || {
        let failed = inputs.failed_step.as_ref();
        failed.map_or_else(String::new, |why| format!("; {why}"))
    };
    let pending =
        |message| ConditionUpdate::new(names::ENFORCED, false, names::QUOTA_PENDING, message);
    for (kind, desired) in quotas {
        let name = kind.name();
        match inputs.quota(*kind) {
            Some(quota) if quota.enforces(desired) => {}
            Some(quota) if quota.spec == *desired => {
                return pending(format!(
                    "ResourceQuota {name} is written but not in force yet: the controller manager has not copied it to the status"
                ));
            }
            Some(_) => {
                return pending(format!(
                    "ResourceQuota {name} differs from the spec, because one of them was changed: the operator updates it{}",
                    failed()
                ));
            }
            None => {
                return pending(format!(
                    "ResourceQuota {name} is not written yet{}",
                    failed()
                ));
            }
        }
    }
    let mut message = "the API server refuses pods that do not fit".to_owned();
    if !inputs.is_labelled {
        message += &failed();
    }
    ConditionUpdate::new(names::ENFORCED, true, names::QUOTAS_IN_FORCE, message)
}

fn unknown(type_: &'static str) -> ConditionUpdate {
    ConditionUpdate {
        type_,
        holds: None,
        reason: names::INVALID_SPEC,
        message: "unknown until the spec is valid".to_owned(),
    }
}
