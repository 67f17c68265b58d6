//! Reconciles one budget: its quotas, conditions and evictions. Evicts for faults without a budget
//! too.

mod conditions;
pub mod fault_evictions;
mod faults;
mod inputs;
mod overage;
mod plan;
mod quota_patch;
mod quotas;
pub mod reconcile;
mod spec;
mod state;
mod status;

pub use faults::{Remedy, action_of, remedy};
pub use inputs::{AffectedPod, BudgetInputs, Cohort, ReportedUsage, RequestedUsage};
pub use overage::excess_pods;
pub use plan::{Plan, PodEviction, Step, plan};
pub use quotas::{ObservedQuota, QuotaKind, QuotaSpec, Scope};
pub use spec::{InvalidSpec, ParsedSpec};
pub use state::is_exceeded;

#[cfg(test)]
mod plan_tests;
#[cfg(test)]
mod tests;
