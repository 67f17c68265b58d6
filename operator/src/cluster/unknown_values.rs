//! Finds fields whose values belong to another version of the API. Pure.
//!
//! Such a value is parsed as `Unknown`. The operator evicts and restarts no pod for it, and uses
//! the rest of the object.

use bursar_crds::budget::Overflow;
use bursar_crds::context_policy::{ContextAction, FaultAction};
use bursar_crds::gpu_node::{FaultKind, GpuState, HealthStatus, MemoryResource, QuotaState};
use bursar_crds::{GpuMemoryBudget, GpuNode};

/// The remedy for values and objects of another version.
pub const REMEDY: &str = "give the operator, the agents and the CRDs one version";

/// The first field of a budget with an unknown value.
pub fn unknown_in_budget(budget: &GpuMemoryBudget) -> Option<&'static str> {
    let spec = &budget.spec;
    let fields = [
        (spec.overflow == Overflow::Unknown, "spec.overflow"),
        (
            spec.context_policy
                .as_ref()
                .is_some_and(|policy| policy.action == Some(ContextAction::Unknown)),
            "spec.contextPolicy.action",
        ),
    ];
    first_unknown(fields)
}

/// The first field of a `GpuNode` with an unknown value.
pub fn unknown_in_node(node: &GpuNode) -> Option<&'static str> {
    let status = node.status.as_ref();
    let gpus = || status.into_iter().flat_map(|status| &status.gpus);
    let waiting = || status.into_iter().flat_map(|status| &status.waiting);
    let quotas = || status.into_iter().flat_map(|status| &status.quotas);
    let faults = || status.into_iter().flat_map(|status| &status.faults);
    let fields = [
        (
            gpus().any(|gpu| gpu.state == GpuState::Unknown),
            "status.gpus[].state",
        ),
        (
            gpus().any(|gpu| gpu.health.status == HealthStatus::Unknown),
            "status.gpus[].health.status",
        ),
        (
            waiting().any(|wait| wait.resource == MemoryResource::Unknown),
            "status.waiting[].resource",
        ),
        (
            quotas().any(|quota| quota.state == QuotaState::Unknown),
            "status.quotas[].state",
        ),
        (
            faults().any(|fault| fault.kind == FaultKind::Unknown),
            "status.faults[].kind",
        ),
        (
            faults().any(|fault| fault.action == Some(FaultAction::Unknown)),
            "status.faults[].action",
        ),
    ];
    first_unknown(fields)
}

fn first_unknown<const N: usize>(fields: [(bool, &'static str); N]) -> Option<&'static str> {
    let mut unknown = fields.into_iter().filter(|(is_unknown, _)| *is_unknown);
    unknown.next().map(|(_, field)| field)
}
