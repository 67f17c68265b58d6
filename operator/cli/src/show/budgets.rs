//! Makes the table of budgets, with a line for each cohort.

use std::collections::BTreeMap;

use bursar_crds::budget::DeviceMemoryStatus;
use bursar_crds::{COHORT_LABEL, DEFAULT_COHORT, GpuMemoryBudget, conditions};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use super::{bytes, condition, name, quanta, quantum_bytes};
use crate::amounts::{memory, part, since};
use crate::snapshot::{Kind, Snapshot};
use crate::table::{Cell, Style, Table, Terminal, column, expendable, wide};

/// The namespace of a budget.
pub fn namespace(budget: &GpuMemoryBudget) -> &str {
    budget.metadata.namespace.as_deref().unwrap_or_default()
}

/// The guarantee and the limit of a budget's spec.
pub fn bounds(budget: &GpuMemoryBudget) -> (u64, u64) {
    let memory = &budget.spec.device_memory;
    let guaranteed = bytes(&memory.guaranteed);
    (guaranteed, memory.limit.as_ref().map_or(guaranteed, bytes))
}

/// The first condition that is not as it should be. Those that make the budget unready come first.
pub fn problem(budget: &GpuMemoryBudget) -> Option<&Condition> {
    use conditions::budget as names;
    let all = &budget.status.as_ref()?.conditions;
    let wrong = [
        (names::ACCEPTED, "False"),
        (names::ENFORCED, "False"),
        (names::EXCEEDED, "True"),
        (names::COVERED, "False"),
    ];
    wrong.into_iter().find_map(|(type_, wrong)| {
        condition(all, type_).filter(|condition| condition.status == wrong)
    })
}

/// The table of budgets.
pub fn render(snapshot: &Snapshot, terminal: Terminal) -> String {
    let mut table = Table::new(&[
        column("NAMESPACE"),
        expendable("COHORT", 2),
        column("GUARANTEED"),
        column("LIMIT"),
        expendable("BORROWED", 1),
        wide("USED"),
        wide("PEAK"),
        wide("PODS"),
        wide("DENIALS"),
        wide("FAULTS"),
        column("READY"),
        column("REASON"),
    ]);
    for budget in &snapshot.budgets {
        table.push(row(snapshot, budget));
    }
    let mut text = table.render(terminal);
    if terminal.no_headers {
        return text;
    }
    if table.is_empty() {
        text.push_str("No budgets.\n");
    }
    for (cohort, sum) in cohorts(snapshot) {
        let offered = match sum.offered {
            Some(offered) => part(sum.guaranteed, offered, " of "),
            None => memory(sum.guaranteed),
        };
        text.push_str(&format!("cohort {cohort}: {offered} guaranteed\n"));
    }
    text
}

fn row(snapshot: &Snapshot, budget: &GpuMemoryBudget) -> Vec<Cell> {
    let status = budget.status.clone().unwrap_or_default();
    let DeviceMemoryStatus {
        requested,
        borrowed,
        observed,
        peak,
        ..
    } = &status.device_memory;
    let (guaranteed, limit) = bounds(budget);
    let (requested, borrowed) = (bytes(&requested.bytes), bytes(&borrowed.bytes));
    let ready = condition(&status.conditions, conditions::budget::READY);
    let reason = problem(budget).map_or_else(String::new, |condition| {
        let age = since(condition.last_transition_time.0, snapshot.now);
        format!("{}: {} (for {age})", condition.reason, condition.message)
    });
    let ready = ready.map_or("Unknown", |ready| ready.status.as_str());
    let style = match ready {
        "True" => Style::Good,
        "False" => Style::Bad,
        _ => Style::Warning,
    };
    let over = |used: u64, most: u64| {
        if used > most {
            Style::Bad
        } else {
            Style::Plain
        }
    };
    let owned = requested.saturating_sub(borrowed);
    vec![
        namespace(budget).into(),
        budget.spec.cohort.as_str().into(),
        Cell::new(part(owned, guaranteed, " of "), over(owned, guaranteed)),
        Cell::new(part(requested, limit, " of "), over(requested, limit)),
        memory(borrowed).into(),
        memory(bytes(&observed.bytes)).into(),
        memory(bytes(&peak.bytes)).into(),
        status.pods.to_string().into(),
        status.denials.to_string().into(),
        status.contexts.open.to_string().into(),
        Cell::new(ready, style),
        reason.into(),
    ]
}

/// The guarantees of a cohort, and what its nodes offer, if all nodes could be read.
#[derive(Default)]
struct Cohort {
    guaranteed: u64,
    offered: Option<u64>,
}

/// The sums of each cohort with a budget. With the budgets of one namespace only there is none.
fn cohorts(snapshot: &Snapshot) -> BTreeMap<&str, Cohort> {
    let mut cohorts: BTreeMap<&str, Cohort> = BTreeMap::new();
    let has_nodes = snapshot.has_all(Kind::Nodes) && snapshot.has_all(Kind::GpuNodes);
    if snapshot.namespace.is_some() || !has_nodes {
        return cohorts;
    }
    for budget in &snapshot.budgets {
        let cohort = cohorts.entry(&budget.spec.cohort).or_default();
        cohort.guaranteed += bounds(budget).0;
        cohort.offered.get_or_insert(0);
    }
    for node in &snapshot.gpu_nodes {
        let label = snapshot
            .node(name(node))
            .and_then(|node| node.metadata.labels.get(COHORT_LABEL));
        let cohort = label.map_or(DEFAULT_COHORT, String::as_str);
        let offered = node
            .status
            .as_ref()
            .map_or(0, |status| status.device_memory.allocatable);
        if let Some(sum) = cohorts
            .get_mut(cohort)
            .and_then(|cohort| cohort.offered.as_mut())
        {
            *sum += quanta(offered, quantum_bytes(node));
        }
    }
    cohorts
}

/// The names of the budgets, as `kubectl get -o name` prints them.
pub fn names(snapshot: &Snapshot) -> Vec<String> {
    let budgets = snapshot.budgets.iter();
    let names = budgets.filter_map(|budget| budget.metadata.name.as_deref());
    names
        .map(|name| format!("gpumemorybudget.bursar.dev/{name}"))
        .collect()
}
