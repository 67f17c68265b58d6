//! From a budget and the facts to what is to be done and said: pure.

mod conditions;
mod faults;
mod inputs;
mod overage;
mod plan;
mod quotas;
pub mod reconcile;
mod spec;
mod state;
mod status;

pub use faults::{Remedy, remedy};
pub use inputs::{AgentsSay, Cohort, Facts, Sufferer, Usage};
pub use overage::surplus;
pub use plan::{Leaver, Plan, Step, is_exceeded, plan};
pub use quotas::{Cap, Quota, Scope, Which, is_enforced};
pub use spec::{InvalidSpec, Terms};
use status::status;

#[cfg(test)]
mod plan_tests;
#[cfg(test)]
mod tests;
