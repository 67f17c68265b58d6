//! Computes the status of a budget. Pure.

use bursar_crds::budget::{
    ContextsStatus, DeviceMemoryStatus, FaultEviction, ManagedMemoryStatus, QuantaAmount,
};
use bursar_crds::conditions::{ConditionUpdate, budget as names, update_conditions};
use bursar_crds::{Amount, GpuMemoryBudget, GpuMemoryBudgetStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::conditions::conditions;
use super::quotas::{QuotaKind, QuotaSpec};
use super::{BudgetInputs, InvalidSpec, ParsedSpec, ReportedUsage, RequestedUsage};
use crate::quanta::Quanta;

/// The status that `budget` should have. Without a change it equals the present status: only a
/// condition whose status changes takes the time `now`. `quotas` are the desired ones.
pub(super) fn desired_status(
    budget: &GpuMemoryBudget,
    parsed: &Result<ParsedSpec, InvalidSpec>,
    quotas: &[(QuotaKind, QuotaSpec)],
    evictions: Vec<FaultEviction>,
    inputs: &BudgetInputs,
    now: &Time,
) -> GpuMemoryBudgetStatus {
    let statements = conditions(budget, parsed, quotas, inputs);
    let generation = budget.metadata.generation;
    let counted = |quanta: Quanta| quanta.counted(inputs.quantum);
    let allowed = |of: fn(&ParsedSpec) -> Quanta| counted(parsed.as_ref().map_or(Quanta::ZERO, of));
    let guarantee = allowed(|parsed| parsed.guaranteed);
    let limit = allowed(|parsed| parsed.limit);
    let managed_limit = allowed(|parsed| parsed.managed);
    let before = budget.status.as_ref();
    let terms = (&guarantee, &limit, &managed_limit);
    let enforced_since = enforced_since(before, terms, &statements, inputs);
    let RequestedUsage {
        pods,
        borrowed_pods,
        guaranteed,
        borrowed,
        managed,
    } = inputs.requested;
    let ReportedUsage {
        observed,
        observed_managed,
        denials,
        poisoned,
        restarts,
    } = inputs.reported;
    let highest = |observed: Quanta, of: fn(&GpuMemoryBudgetStatus) -> &QuantaAmount| {
        let peak = before.and_then(|status| Quanta::within(&of(status).bytes, inputs.quantum).ok());
        counted(observed.max(peak.unwrap_or_default()))
    };
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
            peak: highest(observed, |status| &status.device_memory.peak),
        },
        managed_memory: ManagedMemoryStatus {
            limit: managed_limit,
            requested: counted(managed),
            observed: counted(observed_managed),
            peak: highest(observed_managed, |status| &status.managed_memory.peak),
        },
        denials,
        contexts: ContextsStatus {
            open: i64::try_from(inputs.affected_pods.len()).unwrap_or(i64::MAX),
            poisoned,
            restarts,
        },
        enforced_since,
        evictions,
        conditions: update_conditions(
            before.map_or(&[], |status| &status.conditions),
            &statements,
            generation,
            now,
        ),
    }
}

/// Since when the quotas have enforced these terms: the guaranteed amount, the limit and the limit
/// of managed memory. Other terms start anew.
fn enforced_since(
    before: Option<&GpuMemoryBudgetStatus>,
    terms: (&QuantaAmount, &QuantaAmount, &QuantaAmount),
    statements: &[ConditionUpdate],
    inputs: &BudgetInputs,
) -> Option<Time> {
    let same_terms = before.filter(|status| {
        let (device, managed) = (&status.device_memory, &status.managed_memory);
        (&device.guaranteed, &device.limit, &managed.limit) == terms
    });
    let in_force = statements
        .iter()
        .any(|statement| statement.type_ == names::ENFORCED && statement.holds == Some(true));
    same_terms
        .and_then(|status| status.enforced_since.clone())
        .or_else(|| inputs.quotas_synced_at().filter(|_| in_force))
}
