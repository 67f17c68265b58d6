//! Makes the tables of `top`: containers with GPU memory, and namespaces.

mod namespaces;

use std::collections::BTreeMap;

use bursar_crds::gpu_node::{EnforcementGap, MemoryResource, PendingContainer};
use serde::Serialize;
use serde_json::{Value, json};

use super::{bytes, gpus, name, quanta, quantum_bytes};
use crate::agent_metrics::{ContainerKey, ContainerMetrics};
use crate::amounts::{memory, since};
use crate::objects::{Container, Pod, Request};
use crate::snapshot::{Kind, Snapshot};
use crate::table::{Cell, Style, Table, Terminal, column, expendable, wide};

pub use namespaces::{NamespaceRow, namespaces, namespaces_json, render_namespaces};

/// A container with GPU memory, as `-o json` has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Row {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod.
    pub pod: String,
    /// The container.
    pub container: String,
    /// The node; empty before the scheduler has chosen.
    pub node: String,
    /// The indices of its GPUs; empty where they are not known.
    pub gpus: Vec<String>,
    /// The quota in bytes: the request, or a lower override.
    pub quota_bytes: u64,
    /// The memory in use, where the agent could be asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<u64>,
    /// The most memory at a time, where the agent could be asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_bytes: Option<u64>,
    /// Denied allocations, where the agent could be asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub denied: Option<u64>,
    /// The process generation, where the agent could be asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
    /// The hundredths of a GPU's compute time that it requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute_weight: Option<u64>,
    /// Whether the quota is enforced, or why the container does not run.
    pub state: State,
    /// Whether the pod borrows.
    pub borrows: bool,
    /// The pod's priority.
    pub priority: i32,
}

/// The state of a container with GPU memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", tag = "name", content = "detail")]
pub enum State {
    /// The agent enforces the quota.
    Enforced,
    /// The agent does not enforce the quota, for this reason.
    NotEnforced(String),
    /// The container waits on its node.
    Waiting(String),
    /// The scheduler has found no node.
    Pending,
    /// The pod has ended, or is being deleted.
    Ending,
    /// The user may not read it.
    NotKnown,
}

/// The reports of the GpuNodes on each pod, by UID.
#[derive(Default)]
struct Index<'a> {
    gpus: BTreeMap<&'a str, Vec<String>>,
    gaps: BTreeMap<(&'a str, &'a str), &'a EnforcementGap>,
    waiting: BTreeMap<(&'a str, &'a str), &'a PendingContainer>,
    quotas: BTreeMap<(&'a str, &'a str), u64>,
    /// By UUID.
    indices: BTreeMap<&'a str, String>,
}

impl<'a> Index<'a> {
    fn of(snapshot: &'a Snapshot) -> Self {
        let mut found = Self::default();
        for node in &snapshot.gpu_nodes {
            let Some(status) = &node.status else { continue };
            for gpu in &status.gpus {
                let index = gpus::index(node, gpu);
                for pod in &gpu.pods {
                    found.gpus.entry(&pod.uid).or_default().push(index.clone());
                }
                found.indices.insert(&gpu.uuid, index);
            }
            for gap in &status.not_enforced {
                found.gaps.insert((&gap.pod_uid, &gap.container), gap);
            }
            for claim in &status.waiting {
                found
                    .waiting
                    .insert((&claim.pod_uid, &claim.container), claim);
            }
            for quota in &status.quotas {
                if let Some(amount) = &quota.quota {
                    found
                        .quotas
                        .insert((&quota.pod_uid, &quota.container), bytes(amount));
                }
            }
        }
        found
    }
}

/// The containers with GPU memory of the snapshot's pods that have not ended.
pub fn rows(snapshot: &Snapshot) -> Vec<Row> {
    let index = Index::of(snapshot);
    let pods = snapshot.pods.iter().filter(|pod| !pod.has_ended());
    let rows = pods.flat_map(|pod| {
        let containers = pod.gpu_containers();
        let several = containers.count() > 1;
        let index = &index;
        pod.gpu_containers()
            .map(move |(container, request)| row(snapshot, index, pod, container, request, several))
    });
    rows.collect()
}

fn row(
    snapshot: &Snapshot,
    index: &Index<'_>,
    pod: &Pod,
    container: &Container,
    request: Request,
    several: bool,
) -> Row {
    let key = ContainerKey {
        namespace: pod.metadata.namespace.clone(),
        pod: pod.metadata.name.clone(),
        container: container.name.clone(),
    };
    let metrics = snapshot.metrics.get(&pod.spec.node_name);
    let metrics = metrics.and_then(|metrics| metrics.containers.get(&key));
    let at = (pod.metadata.uid.as_str(), container.name.as_str());
    // A pod of several containers may have each on another GPU, which only the metrics tell.
    let gpus = match metrics.map(ContainerMetrics::gpus) {
        Some(uuids) if several && !uuids.is_empty() => uuids
            .iter()
            .map(|uuid| index.indices.get(uuid).cloned().unwrap_or_default())
            .collect(),
        _ => index.gpus.get(at.0).cloned().unwrap_or_default(),
    };
    let requested = request.bytes();
    Row {
        namespace: key.namespace,
        pod: key.pod,
        container: key.container,
        node: pod.spec.node_name.clone(),
        gpus,
        quota_bytes: index
            .quotas
            .get(&at)
            .copied()
            .unwrap_or(requested)
            .min(requested),
        used_bytes: metrics.and_then(|metrics| metrics.device("used")),
        peak_bytes: metrics.and_then(|metrics| metrics.device("peak")),
        denied: metrics.map(ContainerMetrics::denials),
        generation: metrics.and_then(|metrics| metrics.generation),
        compute_weight: container.compute_weight(),
        state: state(snapshot, index, pod, at),
        borrows: pod.borrows(),
        priority: pod.spec.priority,
    }
}

fn state(snapshot: &Snapshot, index: &Index<'_>, pod: &Pod, at: (&str, &str)) -> State {
    if pod.metadata.deletion_timestamp.is_some() {
        return State::Ending;
    }
    if pod.spec.node_name.is_empty() {
        return State::Pending;
    }
    if let Some(gap) = index.gaps.get(&at) {
        return State::NotEnforced(gap.reason.clone());
    }
    if let Some(claim) = index.waiting.get(&at) {
        let age = since(claim.since.0, snapshot.now);
        let node = snapshot.gpu_node(&pod.spec.node_name);
        let largest = node.and_then(|node| {
            let status = node.status.as_ref()?;
            let of_resource = match claim.resource {
                MemoryResource::ManagedMemory => &status.managed_memory,
                MemoryResource::DeviceMemory
                | MemoryResource::Compute
                | MemoryResource::Unknown => &status.device_memory,
            };
            Some(quanta(of_resource.largest_free, quantum_bytes(node)))
        });
        return State::Waiting(format!(
            "{age}: largest free {}",
            memory(largest.unwrap_or(0))
        ));
    }
    if let Some(message) = pod.wait_message() {
        let detail = message
            .split_once(": ")
            .map_or(message, |(_, detail)| detail);
        return State::Waiting(detail.trim().to_owned());
    }
    if snapshot.has_all(Kind::GpuNodes) && index.gpus.contains_key(at.0) {
        State::Enforced
    } else {
        State::NotKnown
    }
}

/// The table of containers with GPU memory.
pub fn render_pods(snapshot: &Snapshot, terminal: Terminal) -> String {
    let mut table = Table::new(&[
        column("NAMESPACE"),
        column("POD"),
        expendable("CONTAINER", 5),
        expendable("NODE", 2),
        expendable("GPU", 2),
        column("QUOTA"),
        column("USED"),
        expendable("PEAK", 3),
        expendable("DENIED", 4),
        expendable("GEN", 6),
        wide("WEIGHT"),
        wide("PRIORITY"),
        wide("BORROWS"),
        column("ENFORCED"),
    ]);
    for row in rows(snapshot) {
        table.push(cells(row));
    }
    let mut text = table.render(terminal);
    if table.is_empty() && !terminal.no_headers && snapshot.has_all(Kind::Pods) {
        text.push_str("No pod has GPU memory.\n");
    }
    text
}

fn cells(row: Row) -> Vec<Cell> {
    let or_none = |bytes: Option<u64>| bytes.map_or_else(Cell::none, |bytes| memory(bytes).into());
    let number =
        |number: Option<u64>| number.map_or_else(Cell::none, |number| number.to_string().into());
    let text = |text: String| {
        if text.is_empty() {
            Cell::none()
        } else {
            text.into()
        }
    };
    let denied = match row.denied {
        Some(denied @ 1..) => Cell::new(denied.to_string(), Style::Warning),
        other => number(other),
    };
    let state = match row.state {
        State::Enforced => Cell::new("yes", Style::Good),
        State::NotEnforced(reason) => Cell::new(format!("NO: {reason}"), Style::Bad),
        State::Waiting(detail) => Cell::new(format!("waiting {detail}"), Style::Warning),
        State::Pending => Cell::new("pending", Style::Warning),
        State::Ending => Cell::from("ending"),
        State::NotKnown => Cell::none(),
    };
    vec![
        row.namespace.into(),
        row.pod.into(),
        row.container.into(),
        text(row.node),
        text(row.gpus.join(",")),
        memory(row.quota_bytes).into(),
        or_none(row.used_bytes),
        or_none(row.peak_bytes),
        denied,
        number(row.generation),
        number(row.compute_weight),
        row.priority.to_string().into(),
        if row.borrows { "yes" } else { "no" }.into(),
        state,
    ]
}

/// The containers in the documented `v1` shape.
pub fn pods_json(snapshot: &Snapshot) -> Value {
    json!({ "apiVersion": "cli.bursar.dev/v1", "kind": "TopPods", "items": rows(snapshot),
            "notRead": snapshot.unread_notes() })
}

/// The names of the pods.
pub fn pod_names(snapshot: &Snapshot) -> Vec<String> {
    let pods = snapshot.pods.iter().filter(|pod| !pod.has_ended());
    pods.map(|pod| format!("pod/{}", pod.metadata.name))
        .collect()
}

/// The UUID, index and node of each GPU of a pod.
pub fn gpus_of<'a>(snapshot: &'a Snapshot, uid: &str) -> Vec<(&'a str, String, &'a str)> {
    let mut found = Vec::new();
    for node in &snapshot.gpu_nodes {
        for gpu in node.status.iter().flat_map(|status| &status.gpus) {
            if gpu.pods.iter().any(|pod| pod.uid == uid) {
                found.push((gpu.uuid.as_str(), gpus::index(node, gpu), name(node)));
            }
        }
    }
    found
}
