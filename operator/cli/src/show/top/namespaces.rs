//! Makes the table of namespaces.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Value, json};

use super::super::{budgets, bytes};
use crate::amounts::memory;
use crate::snapshot::{Kind, Snapshot};
use crate::table::{Cell, Style, Table, Terminal, column, expendable};

/// The memory of a namespace, as `-o json` has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NamespaceRow {
    /// The namespace.
    pub namespace: String,
    /// The guarantee, where there is a budget.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guaranteed_bytes: Option<u64>,
    /// The limit, where there is a budget.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// The memory that the pods request.
    pub requested_bytes: u64,
    /// The memory that borrowers request.
    pub borrowed_bytes: u64,
    /// The most in use within the last sampled minute, where there is a budget.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<u64>,
    /// The highest value of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_bytes: Option<u64>,
    /// Pods that wait on a node.
    pub waiting: usize,
}

/// The memory of each namespace with a budget or with pods that request GPU memory.
pub fn namespaces(snapshot: &Snapshot) -> Vec<NamespaceRow> {
    let mut rows: BTreeMap<&str, NamespaceRow> = BTreeMap::new();
    for pod in snapshot.pods.iter().filter(|pod| !pod.has_ended()) {
        let row = rows.entry(&pod.metadata.namespace).or_default();
        row.requested_bytes += pod.device_memory();
        if pod.borrows() {
            row.borrowed_bytes += pod.device_memory();
        }
        row.waiting += usize::from(pod.wait_message().is_some());
    }
    for budget in &snapshot.budgets {
        let row = rows.entry(budgets::namespace(budget)).or_default();
        let (guaranteed, limit) = budgets::bounds(budget);
        (row.guaranteed_bytes, row.limit_bytes) = (Some(guaranteed), Some(limit));
        let Some(status) = &budget.status else {
            continue;
        };
        let memory = &status.device_memory;
        row.used_bytes = Some(bytes(&memory.observed.bytes));
        row.peak_bytes = Some(bytes(&memory.peak.bytes));
    }
    // A GpuNode names every queued claim at once; the kubelet writes a pod's message later.
    let mut waiting: BTreeMap<&str, usize> = BTreeMap::new();
    let statuses = snapshot
        .gpu_nodes
        .iter()
        .filter_map(|node| node.status.as_ref());
    for claim in statuses.flat_map(|status| &status.waiting) {
        *waiting.entry(&claim.namespace).or_default() += 1;
    }
    let rows = rows.into_iter().map(|(namespace, row)| NamespaceRow {
        namespace: namespace.to_owned(),
        waiting: row
            .waiting
            .max(waiting.get(namespace).copied().unwrap_or(0)),
        ..row
    });
    rows.collect()
}

/// The table of namespaces.
pub fn render_namespaces(snapshot: &Snapshot, terminal: Terminal) -> String {
    let mut table = Table::new(&[
        column("NAMESPACE"),
        column("GUARANTEED"),
        column("LIMIT"),
        column("ASKED"),
        expendable("BORROWED", 2),
        column("USED"),
        expendable("PEAK", 3),
        expendable("IDLE", 1),
        column("WAITING"),
    ]);
    for row in namespaces(snapshot) {
        let or_none =
            |bytes: Option<u64>| bytes.map_or_else(Cell::none, |bytes| memory(bytes).into());
        let idle = row
            .used_bytes
            .map(|used| row.requested_bytes.saturating_sub(used));
        let waiting = if row.waiting > 0 {
            Style::Warning
        } else {
            Style::Plain
        };
        table.push(vec![
            row.namespace.into(),
            or_none(row.guaranteed_bytes),
            or_none(row.limit_bytes),
            memory(row.requested_bytes).into(),
            memory(row.borrowed_bytes).into(),
            or_none(row.used_bytes),
            or_none(row.peak_bytes),
            or_none(idle),
            Cell::new(row.waiting.to_string(), waiting),
        ]);
    }
    let mut text = table.render(terminal);
    let has_all = snapshot.has_all(Kind::Pods) && snapshot.has_all(Kind::Budgets);
    if table.is_empty() && !terminal.no_headers && has_all {
        text.push_str("No namespace has a budget or GPU memory.\n");
    }
    text
}

/// The namespaces in the documented `v1` shape.
pub fn namespaces_json(snapshot: &Snapshot) -> Value {
    json!({ "apiVersion": "cli.bursar.dev/v1", "kind": "TopNamespaces", "items": namespaces(snapshot),
            "notRead": snapshot.unread_notes() })
}
