//! What is said of a budget: its conditions.

use bursar_crds::conditions::{Statement, budget as names};
use bursar_crds::{COHORT_LABEL, DEFAULT_COHORT, Quantum};

use super::{InvalidSpec, Terms};
use crate::quanta::Quanta;
use crate::world::{Cohort, Facts, Usage};

/// The conditions of a budget of `cohort`: Ready, Accepted, Covered, Exceeded, Enforced.
pub(super) fn statements(
    cohort: &str,
    terms: &Result<Terms, InvalidSpec>,
    facts: &Facts,
) -> Vec<Statement> {
    let accepted = accepted(terms, facts.quantum);
    let (covered, exceeded) = match terms {
        Ok(terms) => (
            covered(cohort, &facts.cohort, facts.quantum),
            exceeded(terms, &facts.usage, facts.quantum),
        ),
        Err(_) => (unknown(names::COVERED), unknown(names::EXCEEDED)),
    };
    let ready = ready(&accepted, &covered, &exceeded);
    vec![ready, accepted, covered, exceeded, enforced()]
}

/// The first thing amiss, in the words of the condition that tells it.
fn ready(accepted: &Statement, covered: &Statement, exceeded: &Statement) -> Statement {
    let wanted = [(accepted, true), (covered, true), (exceeded, false)];
    let amiss = wanted
        .into_iter()
        .find(|(said, good)| said.holds != Some(*good));
    match amiss {
        Some((said, _)) => Statement::new(names::READY, false, said.reason, &said.message),
        None => Statement::new(
            names::READY,
            true,
            names::AS_DECLARED,
            "accepted, covered, and not exceeded",
        ),
    }
}

fn accepted(terms: &Result<Terms, InvalidSpec>, quantum: Quantum) -> Statement {
    let terms = match terms {
        Ok(terms) => terms,
        Err(why) => {
            return Statement::new(names::ACCEPTED, false, names::INVALID_SPEC, why.to_string());
        }
    };
    let message = if terms.rounded.is_empty() {
        "the spec is understood".to_owned()
    } else {
        let rounded = terms.rounded.join(", ");
        format!("the spec is understood; {rounded}, for memory is counted in quanta of {quantum}")
    };
    Statement::new(names::ACCEPTED, true, names::AS_DECLARED, message)
}

fn covered(name: &str, cohort: &Cohort, quantum: Quantum) -> Statement {
    let Cohort {
        budgets,
        guaranteed,
        nodes,
        allocatable,
        other_quantum,
    } = cohort;
    let left_out = match other_quantum.as_slice() {
        [] => String::new(),
        [(node, size), rest @ ..] => format!(
            "; {} left out, for {node} counts in {size} and the cluster in {quantum}: \
             give the operator and every agent one quantum",
            count(rest.len() + 1, "node")
        ),
    };
    let say = |holds, reason, message: String| {
        Statement::new(names::COVERED, holds, reason, message + &left_out)
    };
    if *nodes == 0 {
        return say(
            false,
            names::NO_NODES,
            format!(
                "cohort {name} has no node that offers GPU memory: {}",
                node_remedy(name)
            ),
        );
    }
    let sums = format!(
        "cohort {name}: {} guaranteed by {}, {} on {}",
        guaranteed.text(quantum),
        count(*budgets, "budget"),
        allocatable.text(quantum),
        count(*nodes, "node"),
    );
    if guaranteed <= allocatable {
        return say(true, names::GUARANTEES_FIT, sums);
    }
    let missing = guaranteed.minus(*allocatable).text(quantum);
    say(
        false,
        names::OVERCOMMITTED,
        format!("{sums}: lower guarantees by {missing}, or add GPUs"),
    )
}

fn node_remedy(cohort: &str) -> String {
    if cohort == DEFAULT_COHORT {
        format!("see `kubectl get gpunodes`; nodes without the label {COHORT_LABEL} belong to it")
    } else {
        format!("label its nodes {COHORT_LABEL}={cohort}, or correct spec.cohort")
    }
}

fn exceeded(terms: &Terms, usage: &Usage, quantum: Quantum) -> Statement {
    let total = usage.guaranteed.plus(usage.borrowed);
    let bounds = [
        (
            total,
            terms.limit,
            names::OVER_LIMIT,
            "pods",
            "delete pods or raise spec.deviceMemory.limit",
        ),
        (
            usage.guaranteed,
            terms.guaranteed,
            names::OVER_GUARANTEE,
            "guaranteed pods",
            "give some the PriorityClass bursar-borrowed or raise spec.deviceMemory.guaranteed",
        ),
        (
            usage.managed,
            terms.managed,
            names::OVER_MANAGED_LIMIT,
            "managed memory: pods",
            "delete pods or raise spec.managedMemory.limit",
        ),
    ];
    let over: Vec<_> = bounds
        .into_iter()
        .filter(|(asked, most, ..)| asked > most)
        .collect();
    let Some((_, _, reason, ..)) = over.first() else {
        return Statement::new(
            names::EXCEEDED,
            false,
            names::WITHIN_BUDGET,
            "pods ask for no more than is allowed",
        );
    };
    let told: Vec<_> = over
        .iter()
        .map(|(asked, most, _, who, remedy)| told(who, *asked, *most, remedy, quantum))
        .collect();
    Statement::new(names::EXCEEDED, true, reason, told.join("; "))
}

fn told(who: &str, asked: Quanta, most: Quanta, remedy: &str, quantum: Quantum) -> String {
    let (asked, most) = (asked.text(quantum), most.text(quantum));
    format!("{who} ask for {asked}, {most} is allowed: {remedy}")
}

fn enforced() -> Statement {
    Statement::new(
        names::ENFORCED,
        false,
        names::REPORT_ONLY,
        "use is counted and reported; pods over the budget are not refused",
    )
}

fn unknown(type_: &'static str) -> Statement {
    Statement {
        type_,
        holds: None,
        reason: names::INVALID_SPEC,
        message: "not looked at until the spec is valid".to_owned(),
    }
}

fn count(number: usize, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {noun}{plural}")
}
