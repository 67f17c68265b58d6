//! From a budget and the facts to what is to be done and said: pure.

mod contexts;
mod judge;
mod plan;
mod quota;
mod repair;
mod status;
mod terms;

pub use contexts::{Remedy, remedy};
pub use plan::{Leaver, Plan, Step, is_exceeded, plan};
pub use quota::{Cap, Quota, Scope, Which, is_enforced};
pub use repair::surplus;
use status::status;
pub use terms::{InvalidSpec, Terms};

#[cfg(test)]
mod plan_tests;
#[cfg(test)]
mod tests;
