//! Makes the tables of retained memory: of GPUs from the agents' metrics, of leases from GpuNodes.

use std::collections::BTreeMap;

use bursar_crds::conditions::gpu_node::RETAINED_MEMORY;
use bursar_crds::gpu_node::{LeaseState, RetainedLease};
use serde_json::{Value, json};

use super::{condition, gpus, name};
use crate::amounts::{count, memory};
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

/// A lease, and where it is.
#[derive(Clone, Debug, PartialEq)]
pub struct Lease<'a> {
    /// The node.
    pub node: &'a str,
    /// The GPU's index; its UUID where the GpuNode does not have it.
    pub gpu: String,
    /// The lease as the GpuNode lists it.
    pub lease: &'a RetainedLease,
    /// Whether the GPU's memory has another generation than the lease.
    pub is_stale: bool,
}

/// The listed leases of all nodes, by namespace and name.
pub fn leases(snapshot: &Snapshot) -> Vec<Lease<'_>> {
    let statuses = snapshot
        .gpu_nodes
        .iter()
        .filter_map(|node| Some((node, node.status.as_ref()?)));
    let leases = statuses.flat_map(|(node, status)| {
        status.retained.iter().map(move |lease| {
            let gpu = status.gpus.iter().find(|gpu| gpu.uuid == lease.gpu);
            Lease {
                node: name(node),
                gpu: gpu.map_or_else(|| lease.gpu.clone(), |gpu| gpus::index(node, gpu)),
                lease,
                is_stale: gpu.is_some_and(|gpu| gpu.generation != lease.gpu_generation),
            }
        })
    });
    let mut leases: Vec<_> = leases.collect();
    let key = |of: &Lease<'_>| (of.lease.namespace.clone(), of.lease.name.clone());
    leases.sort_by(|one, next| (key(one), one.node).cmp(&(key(next), next.node)));
    leases
}

/// The number of leases that GpuNodes count and do not list.
fn unlisted(snapshot: &Snapshot) -> usize {
    let statuses = snapshot
        .gpu_nodes
        .iter()
        .filter_map(|node| node.status.as_ref());
    let unlisted = statuses.map(|status| {
        let all = usize::try_from(status.retained_count).unwrap_or(0);
        all.saturating_sub(status.retained.len())
    });
    unlisted.sum()
}

fn state(lease: &Lease<'_>) -> Cell {
    let (text, style) = match lease.lease.state {
        _ if lease.is_stale => ("Lost", Style::Bad),
        LeaseState::Writing => ("Writing", Style::Plain),
        LeaseState::Committed => ("Committed", Style::Good),
        LeaseState::Discarded => ("Discarded", Style::Warning),
        LeaseState::Releasing => ("Releasing", Style::Plain),
        LeaseState::Unknown => ("Unknown", Style::Plain),
    };
    Cell::new(text, style)
}

fn render_leases(snapshot: &Snapshot, terminal: Terminal) -> String {
    let mut table = Table::new(&[
        column("NAMESPACE"),
        column("LEASE"),
        column("NODE"),
        column("GPU"),
        column("SIZE"),
        column("STATE"),
        column("OWNER"),
        expendable("GENERATION", 1),
        wide("GPU GENERATION"),
        wide("PODS"),
    ]);
    for row in leases(snapshot) {
        let lease = row.lease;
        let owner = match lease.owner.is_empty() {
            true => &lease.owner_uid,
            false => &lease.owner,
        };
        table.push(vec![
            lease.namespace.clone().into(),
            lease.name.clone().into(),
            row.node.to_owned().into(),
            row.gpu.clone().into(),
            lease
                .size
                .bytes()
                .map_or_else(|_| Cell::none(), |bytes| memory(bytes).into()),
            state(&row),
            owner.clone().into(),
            lease.generation.to_string().into(),
            lease.gpu_generation.to_string().into(),
            lease.openers.to_string().into(),
        ]);
    }
    if table.is_empty() {
        return String::new();
    }
    let mut text = table.render(terminal);
    match unlisted(snapshot) {
        0 => {}
        more => text.push_str(&format!("and {}\n", count(more, "smaller lease"))),
    }
    text
}

/// The table of GPUs, and below it the table of leases where there are any.
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
    let leases = render_leases(snapshot, terminal);
    if !leases.is_empty() {
        text.push('\n');
        text.push_str(&leases);
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
    let leases: Vec<Value> = leases(snapshot)
        .into_iter()
        .map(|row| json!({ "node": row.node, "gpu": row.gpu, "stale": row.is_stale, "lease": row.lease }))
        .collect();
    json!({ "apiVersion": "cli.bursar.dev/v1", "kind": "Retained", "items": items,
            "leases": leases, "unlistedLeases": unlisted(snapshot),
            "notRead": snapshot.unread_notes() })
}
