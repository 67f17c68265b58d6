//! Makes the table of retained memory, from the agents' metrics.

use std::collections::BTreeMap;

use bursar_crds::conditions::gpu_node::RETAINED_MEMORY;
use serde_json::{Value, json};

use super::{condition, gpus, name};
use crate::amounts::memory;
use crate::snapshot::Snapshot;
use crate::table::{Cell, Style, Table, Terminal, column, expendable, wide};

/// The leases of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retained {
    /// The node.
    pub node: String,
    /// The GPU's index; its UUID where the GpuNode does not have it.
    pub gpu: String,
    /// The GPU's UUID.
    pub uuid: String,
    /// Leases, and their bytes; unknown where the agent could not be asked.
    pub leases: Option<(u64, u64)>,
    /// Containers with leased memory, as `namespace/pod`, with the bytes.
    pub owners: BTreeMap<String, u64>,
    /// The reason why the node retains no memory.
    pub off: Option<String>,
}

/// The leases of each GPU.
pub fn rows(snapshot: &Snapshot) -> Vec<Retained> {
    let mut rows = Vec::new();
    for node in &snapshot.gpu_nodes {
        let Some(status) = &node.status else { continue };
        let metrics = snapshot.metrics.get(name(node));
        let retains = condition(&status.conditions, RETAINED_MEMORY);
        let off = retains.filter(|retains| retains.status == "False");
        for gpu in &status.gpus {
            let mut owners: BTreeMap<String, u64> = BTreeMap::new();
            for (key, container) in metrics.iter().flat_map(|metrics| &metrics.containers) {
                let leased = container
                    .memory
                    .get(&(gpu.uuid.clone(), "leased".to_owned()));
                if let Some(bytes) = leased.filter(|bytes| **bytes > 0) {
                    *owners
                        .entry(format!("{}/{}", key.namespace, key.pod))
                        .or_default() += bytes;
                }
            }
            rows.push(Retained {
                node: name(node).to_owned(),
                gpu: gpus::index(node, gpu),
                uuid: gpu.uuid.clone(),
                leases: metrics
                    .map(|metrics| metrics.retained.get(&gpu.uuid).copied().unwrap_or((0, 0))),
                owners,
                off: off.map(|off| off.reason.clone()),
            });
        }
    }
    rows
}

/// The table of retained memory.
pub fn render(snapshot: &Snapshot, terminal: Terminal) -> String {
    let mut table = Table::new(&[
        column("NODE"),
        column("GPU"),
        column("LEASES"),
        column("RETAINED"),
        expendable("OWNERS", 1),
        wide("UUID"),
        column(""),
    ]);
    for row in rows(snapshot) {
        let owners: Vec<String> = row
            .owners
            .iter()
            .map(|(pod, bytes)| format!("{pod} {}", memory(*bytes)))
            .collect();
        let or_none = |text: Option<String>| text.map_or_else(Cell::none, Cell::from);
        table.push(vec![
            row.node.into(),
            row.gpu.into(),
            or_none(row.leases.map(|(leases, _)| leases.to_string())),
            or_none(row.leases.map(|(_, bytes)| memory(bytes))),
            or_none(Some(owners.join(", ")).filter(|owners| !owners.is_empty())),
            row.uuid.into(),
            row.off.map_or_else(Cell::default, |reason| {
                Cell::new(format!("off: {reason}"), Style::Warning)
            }),
        ]);
    }
    let mut text = table.render(terminal);
    if table.is_empty() && !terminal.no_headers {
        text.push_str("No node has GPUs.\n");
    }
    text
}

/// The leases in the documented `v1` shape.
pub fn json(snapshot: &Snapshot) -> Value {
    let items: Vec<Value> = rows(snapshot)
        .into_iter()
        .map(|row| {
            let (leases, bytes) = row.leases.unzip();
            json!({ "node": row.node, "gpu": row.gpu, "uuid": row.uuid, "leases": leases,
                    "retainedBytes": bytes, "owners": row.owners, "off": row.off })
        })
        .collect();
    json!({ "apiVersion": "cli.bursar.dev/v1", "kind": "Retained", "items": items,
            "notRead": snapshot.unread_notes() })
}
