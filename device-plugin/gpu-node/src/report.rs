//! Describes the node's state as the status of its `GpuNode`, with what the API does not have.

use std::collections::BTreeMap;

use bursar_crds::GpuNodeStatus;
use bursar_crds::conditions::{ConditionUpdate, gpu_node as names};
use bursar_ledger::units::Bytes;

/// The node's state. Equal reports cause no write.
///
/// Nothing in a report may change continuously; such figures are metrics. Process generations and
/// leases change as tenants like: the publisher delays a write for them alone, and for the counts
/// of allocator runtimes.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeReport {
    /// The status as far as the agent's own state gives it, with whole lists and without
    /// conditions. [`carry_over`](super::carry_over) completes it.
    pub status: GpuNodeStatus,
    /// The state of each condition of [`bursar_crds::conditions::gpu_node`] except `Ready`, which
    /// [`ready_condition`] derives. A condition's time depends on the last status.
    pub conditions: Vec<ConditionUpdate>,
    /// By GPU, the memory that ended pods had exported and others hold: for an Event and a metric,
    /// because the status adds the memory of processes that run on.
    pub exported: BTreeMap<String, ExportedMemory>,
    /// How many entries of the spec this agent does not know: for a metric.
    pub unknown_spec_entries: usize,
}

/// Memory of one GPU that ended pods had exported and others hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportedMemory {
    /// The amount.
    pub bytes: Bytes,
    /// Whether managed memory on the GPU may hide that it is free.
    pub is_beside_managed: bool,
}

/// `Ready` holds if all other conditions hold; the first that does not hold supplies the message.
pub fn ready_condition(others: &[ConditionUpdate]) -> ConditionUpdate {
    match others.iter().find(|condition| condition.is_problem()) {
        None if others.is_empty() => ConditionUpdate {
            type_: names::READY,
            holds: None,
            reason: names::PENDING,
            message: "the agent is starting".to_owned(),
        },
        None => ConditionUpdate::new(names::READY, true, names::OK, "pods are given GPU memory"),
        Some(problem) => ConditionUpdate {
            type_: names::READY,
            holds: problem.holds,
            reason: match problem.holds {
                Some(_) => names::NOT_READY,
                None => names::PENDING,
            },
            message: format!("{}: {}", problem.type_, problem.message),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_names_the_condition_that_does_not_hold() {
        let message = "the driver has no GPU";
        let broken = ConditionUpdate::new(names::GPUS_FOUND, false, names::NO_GPUS, message);
        let ready = ready_condition(&[broken]);
        assert_eq!((ready.type_, ready.holds), (names::READY, Some(false)));
        assert_eq!(ready.message, "GpusFound: the driver has no GPU");
    }
}
