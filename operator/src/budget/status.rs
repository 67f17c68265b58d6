//! Computes the status of a budget. Pure.

use bursar_crds::budget::{ContextsStatus, DeviceMemoryStatus, ManagedMemoryStatus};
use bursar_crds::conditions::{budget as names, update_conditions};
use bursar_crds::{Amount, GpuMemoryBudget, GpuMemoryBudgetStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::conditions::conditions;
use super::{BudgetInputs, ReportedUsage, RequestedUsage};
use super::{ParsedSpec, faults};
use crate::quanta::Quanta;

/// The status that `budget` should have. Without a change it equals the present status: only a
/// condition whose status changes takes the time `now`.
pub(super) fn desired_status(
    budget: &GpuMemoryBudget,
    inputs: &BudgetInputs,
    now: &Time,
) -> GpuMemoryBudgetStatus {
    let parsed = ParsedSpec::of(&budget.spec, inputs.quantum);
    let statements = conditions(budget, &parsed, inputs);
    let generation = budget.metadata.generation;
    let counted = |quanta: Quanta| quanta.counted(inputs.quantum);
    let allowed = |of: fn(&ParsedSpec) -> Quanta| counted(parsed.as_ref().map_or(Quanta::ZERO, of));
    let (guarantee, limit) = (
        allowed(|parsed| parsed.guaranteed),
        allowed(|parsed| parsed.limit),
    );
    let managed_limit = allowed(|parsed| parsed.managed);
    let before = budget.status.as_ref();
    let same_terms = before.filter(|status| {
        status.device_memory.guaranteed == guarantee
            && status.device_memory.limit == limit
            && status.managed_memory.limit == managed_limit
    });
    let in_force = statements
        .iter()
        .any(|statements| statements.type_ == names::ENFORCED && statements.holds == Some(true));
    let enforced_since = same_terms
        .and_then(|status| status.enforced_since.clone())
        .or_else(|| inputs.quotas_synced_at().filter(|_| in_force));
    let RequestedUsage {
        pods,
        borrowed_pods,
        guaranteed,
        borrowed,
        managed,
    } = inputs.requested;
    let ReportedUsage {
        observed,
        denials,
        poisoned,
        restarts,
    } = inputs.reported;
    let peak = before
        .and_then(|status| Quanta::within(&status.device_memory.peak.bytes, inputs.quantum).ok());
    GpuMemoryBudgetStatus {
        observed_generation: generation,
        quantum: Some(Amount::from_bytes(inputs.quantum.bytes())),
        pods,
        borrowed_pods,
        device_memory: DeviceMemoryStatus {
            guaranteed: guarantee,
            limit,
            requested: counted(guaranteed.plus(borrowed)),
            borrowed: counted(borrowed),
            observed: counted(observed),
            peak: counted(observed.max(peak.unwrap_or_default())),
        },
        managed_memory: ManagedMemoryStatus {
            limit: managed_limit,
            requested: counted(managed),
        },
        denials,
        contexts: ContextsStatus {
            open: i64::try_from(inputs.affected_pods.len()).unwrap_or(i64::MAX),
            poisoned,
            restarts,
        },
        enforced_since,
        evictions: faults::recorded_evictions(budget, inputs, now),
        conditions: update_conditions(
            before.map_or(&[], |status| &status.conditions),
            &statements,
            generation,
            now,
        ),
    }
}

/// The condition of this type, if it is True.
pub(super) fn true_condition<'a>(
    status: &'a GpuMemoryBudgetStatus,
    type_: &str,
) -> Option<&'a Condition> {
    let mut conditions = status.conditions.iter();
    conditions.find(|condition| condition.type_ == type_ && condition.status == "True")
}
