//! Computes whether the memory of a cohort covers its guarantees.

use std::collections::{BTreeMap, BTreeSet};

use bursar_crds::conditions::{ConditionUpdate, budget as names};
use bursar_crds::{COHORT_LABEL, DEFAULT_COHORT, Quantum};

use crate::budget::Cohort;
use crate::cluster::ExclusionReason;
use crate::cluster::unknown_values::REMEDY;

/// The most budgets of a cohort whose messages have the cohort's sums, and name and count its
/// excluded nodes. Each change of a node may rewrite these messages.
const MAX_BUDGETS_WITH_SUMS: usize = 64;

pub(super) fn covered(name: &str, cohort: &Cohort, quantum: Quantum) -> ConditionUpdate {
    let Cohort {
        budgets,
        guaranteed,
        nodes,
        allocatable,
        excluded: _,
        unknown_field: _,
    } = cohort;
    let excluded = match *budgets <= MAX_BUDGETS_WITH_SUMS {
        true => excluded_nodes(cohort, quantum),
        false => exclusion_reasons(cohort, quantum),
    };
    let statement = |holds, reason, message: String| {
        ConditionUpdate::new(names::COVERED, holds, reason, message + &excluded)
    };
    if *nodes == 0 {
        return statement(
            false,
            names::NO_NODES,
            format!(
                "cohort {name} has no node that offers GPU memory: {}",
                node_remedy(name)
            ),
        );
    }
    // This message holds no sums, or each change of one node would rewrite every budget's status.
    if guaranteed <= allocatable {
        let fit = format!("cohort {name}: the guarantees fit into the memory of its nodes");
        return statement(true, names::GUARANTEES_FIT, fit);
    }
    let sums = match *budgets <= MAX_BUDGETS_WITH_SUMS {
        true => format!(
            "{} guaranteed by {}, {} offered by {}",
            guaranteed.text(quantum),
            plural(*budgets, "budget"),
            allocatable.text(quantum),
            plural(*nodes, "node"),
        ),
        false => "the guarantees exceed the memory of its nodes (metrics \
                  bursar_cohort_memory_guaranteed_bytes and bursar_cohort_memory_allocatable_bytes)"
            .to_owned(),
    };
    statement(
        false,
        names::OVERCOMMITTED,
        format!("cohort {name}: {sums}: lower guarantees, or add GPUs"),
    )
}

/// The excluded nodes by reason, with one example and the remedy for each reason.
fn excluded_nodes(cohort: &Cohort, quantum: Quantum) -> String {
    let mut reasons: BTreeMap<&ExclusionReason, Vec<&str>> = BTreeMap::new();
    for (node, reason) in &cohort.excluded {
        reasons.entry(reason).or_default().push(node);
    }
    let messages = reasons.into_iter().map(|(reason, nodes)| {
        let (nodes, node) = (plural(nodes.len(), "node"), nodes[0]);
        match reason {
            ExclusionReason::OtherQuantum(size) => format!(
                "; {nodes} excluded, because {node} uses quantum {size} and the cluster {quantum}: \
                 give the operator and every agent one quantum"
            ),
            ExclusionReason::Unreadable => {
                format!("; {nodes} excluded, because GpuNode {node} cannot be parsed: {REMEDY}")
            }
            ExclusionReason::Dead => format!(
                "; {nodes} excluded, because node {node} is not Ready or its kubelet has no agent: \
                 see `kubectl describe node {node}` and the agent's pod there"
            ),
        }
    });
    let unknown = cohort.unknown_field.iter().map(|(node, field)| {
        format!("; GpuNode {node} has a value of another version in {field}: {REMEDY}")
    });
    messages.chain(unknown).collect()
}

/// The reasons for which nodes are excluded, each with its remedy.
fn exclusion_reasons(cohort: &Cohort, quantum: Quantum) -> String {
    let other_quantum = format!(
        "their quantum is not the cluster's {quantum}: give the operator and every agent one quantum"
    );
    let unreadable = format!("their GpuNodes cannot be parsed: {REMEDY}");
    let reasons = cohort.excluded.iter().map(|(_, reason)| match reason {
        ExclusionReason::OtherQuantum(_) => other_quantum.as_str(),
        ExclusionReason::Unreadable => unreadable.as_str(),
        ExclusionReason::Dead => {
            "they are not Ready or their kubelets have no agent: see `kubectl get nodes` and the \
             agents' pods"
        }
    });
    let reasons: BTreeSet<_> = reasons.collect();
    let messages = reasons
        .into_iter()
        .map(|reason| format!("; nodes excluded, because {reason}"));
    let unknown = cohort
        .unknown_field
        .iter()
        .map(|_| format!("; a GpuNode has a value of another version: {REMEDY}"));
    messages.chain(unknown).collect()
}

fn node_remedy(cohort: &str) -> String {
    if cohort == DEFAULT_COHORT {
        format!("see `kubectl get gpunodes`; nodes without the label {COHORT_LABEL} belong to it")
    } else {
        format!("label its nodes {COHORT_LABEL}={cohort}, or correct spec.cohort")
    }
}

fn plural(number: usize, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {noun}{plural}")
}
