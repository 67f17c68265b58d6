//! Makes the table of GPUs. Other commands name a GPU, its drain and its faults as this table does.

use bursar_crds::context_policy::FaultAction;
use bursar_crds::gpu_node::{Fault, FaultKind, GpuState, GpuStatus, HealthStatus};
use bursar_crds::{GpuNode, conditions};

use super::{bytes, condition, model, name, quanta, quantum_bytes};
use crate::amounts::{count, memory, part};
use crate::snapshot::Snapshot;
use crate::table::{Cell, Style, Table, Terminal, clean, column, expendable, wide};

/// The index of a GPU on its node. A MIG instance has its number behind that of its GPU.
pub fn index(node: &GpuNode, gpu: &GpuStatus) -> String {
    let is_instance = |gpu: &GpuStatus| gpu.uuid.starts_with("MIG-");
    if !is_instance(gpu) {
        return gpu.index.to_string();
    }
    let all = node.status.iter().flat_map(|status| &status.gpus);
    let before = all
        .filter(|other| is_instance(other) && other.index == gpu.index)
        .take_while(|other| other.uuid != gpu.uuid);
    format!("{}/{}", gpu.index, before.count())
}

/// The memory of a GPU in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuMemory {
    /// The memory that the GPU offers to pods.
    pub capacity: u64,
    /// The memory that is bound to pods.
    pub bound: u64,
    /// The memory without a binding, also that which is set aside for waiting pods.
    pub free: u64,
    /// The most that a new pod can have: the free memory that is not set aside.
    pub largest: u64,
}

impl GpuMemory {
    /// Converts the quanta of a GPU's status.
    pub fn of(node: &GpuNode, gpu: &GpuStatus) -> Self {
        let quantum = quantum_bytes(node);
        Self {
            capacity: quanta(gpu.capacity, quantum),
            // Neither figure suffices: an unhealthy GPU has no capacity while pods are bound to it,
            // and the status lists at most 32 pods.
            bound: gpu
                .pods
                .iter()
                .map(|pod| quanta(pod.quanta, quantum))
                .sum::<u64>()
                .max(quanta(gpu.capacity.saturating_sub(gpu.free), quantum)),
            free: quanta(gpu.free, quantum),
            largest: quanta(gpu.largest_free, quantum),
        }
    }
}

/// How far a requested drain of the GPU is, in words. `None` where no drain keeps pods from it: a
/// fault that only a reset mends sets the same state for another reason.
pub fn drain_progress(gpu: &GpuStatus) -> Option<&'static str> {
    if gpu.state != GpuState::Draining {
        return None;
    }
    match gpu.health.reason.as_str() {
        "Draining" => Some("is being drained"),
        "Drained" => Some("is drained"),
        _ => None,
    }
}

/// The first open fault of a GPU itself, rather than of a process's context.
pub fn fault<'a>(node: &'a GpuNode, gpu: &GpuStatus) -> Option<&'a Fault> {
    let faults = node.status.iter().flat_map(|status| &status.faults);
    let mut of_gpu = faults.filter(|fault| fault.kind == FaultKind::Gpu && fault.gpu == gpu.uuid);
    of_gpu.next()
}

/// The remedy of an admin for a fault of a GPU.
pub fn remedy(fault: &Fault) -> &'static str {
    match fault.action {
        Some(FaultAction::ResetGpu) => "drain and reset the GPU",
        Some(FaultAction::RestartNode) => "restart the machine",
        Some(FaultAction::Wait) => "the GPU is away and may come back",
        _ => "see the agent's log",
    }
}

/// A pod for which free memory of a GPU is set aside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldFor<'a> {
    /// The pod's UID.
    pub uid: &'a str,
    /// The pod's `namespace/name`, or its UID where the name is not known.
    pub pod: String,
    /// The bytes that are set aside. `None` where the status has no amount. An older agent reports
    /// none, and a GPU without free memory has none to set aside for its reservation.
    pub bytes: Option<u64>,
}

/// Whether a pod for which memory is set aside has no name in the status, so that the pods have to
/// be listed. An older agent reports no names, and a GPU without free memory none for its
/// reservation.
pub fn needs_pods(snapshot: &Snapshot) -> bool {
    let nodes = snapshot.gpu_nodes.iter();
    let statuses = nodes.filter_map(|node| node.status.as_ref());
    let mut gpus = statuses.flat_map(|status| &status.gpus);
    gpus.any(|gpu| {
        let is_listed = |uid: &String| gpu.set_aside.iter().any(|pod| pod.uid == *uid);
        gpu.set_aside.iter().any(|pod| pod.name.is_empty())
            || gpu.reserved_for.as_ref().is_some_and(|uid| !is_listed(uid))
    })
}

/// The pods for which free memory of a GPU is set aside: for a reservation of the operator, or by
/// the node's queue.
pub fn held_for<'a>(snapshot: &Snapshot, node: &GpuNode, gpu: &'a GpuStatus) -> Vec<HeldFor<'a>> {
    let by_uid = |uid: &str| {
        let mut pods = snapshot.pods.iter();
        let pod = pods.find(|pod| pod.metadata.uid == uid);
        pod.map_or_else(|| format!("the pod with UID {uid}"), |pod| pod.key())
    };
    let mut held: Vec<HeldFor<'_>> = gpu
        .set_aside
        .iter()
        .map(|pod| HeldFor {
            uid: &pod.uid,
            pod: match pod.name.as_str() {
                "" => by_uid(&pod.uid),
                name => format!("{}/{name}", pod.namespace),
            },
            bytes: Some(quanta(pod.quanta, quantum_bytes(node))),
        })
        .collect();
    if let Some(uid) = &gpu.reserved_for
        && !held.iter().any(|held| held.uid == uid)
    {
        held.push(HeldFor {
            uid,
            pod: by_uid(uid),
            bytes: None,
        });
    }
    held
}

/// The last column: a GPU's fault, or why its free memory is not for every pod.
fn note(snapshot: &Snapshot, node: &GpuNode, gpu: &GpuStatus) -> Cell {
    if let Some(fault) = fault(node, gpu) {
        return Cell::new(remedy(fault), Style::Bad);
    }
    let held: Vec<String> = held_for(snapshot, node, gpu)
        .into_iter()
        .map(|held| held.pod)
        .collect();
    if !held.is_empty() {
        return Cell::new(format!("held for {}", held.join(", ")), Style::Warning);
    }
    match (&gpu.leaked, &gpu.withheld) {
        (_, Some(withheld)) => Cell::new(
            format!("{} is in use outside of Bursar", memory(bytes(withheld))),
            Style::Warning,
        ),
        _ => Cell::default(),
    }
}

/// The table of GPUs of the nodes that [`shown`] selects, with a line of totals below it.
pub fn render(snapshot: &Snapshot, only: Option<&str>, terminal: Terminal) -> String {
    let mut table = Table::new(&[
        column("NODE"),
        column("GPU"),
        expendable("MODEL", 3),
        column("STATE"),
        column("BOUND"),
        expendable("FREE", 1),
        expendable("LARGEST", 2),
        expendable("LEAKED", 5),
        expendable("PODS", 4),
        expendable("HEALTH", 1),
        wide("MEMORY"),
        wide("GENERATION"),
        wide("DRIVER"),
        wide("UUID"),
        column(""),
    ]);
    let mut sum = Sum::default();
    for node in shown(snapshot, only) {
        let Some(status) = &node.status else {
            sum.without_gpus += 1;
            continue;
        };
        // The lists are bounded, and an older agent has no summary.
        let summary = status.summary.as_ref();
        let total = |listed: usize, of_summary: Option<i32>| {
            listed.max(of_summary.map_or(0, |total| usize::try_from(total).unwrap_or(0)))
        };
        sum.waiting += total(status.waiting.len(), summary.map(|summary| summary.waiting));
        sum.faults += total(status.faults.len(), summary.map(|summary| summary.faults));
        if status.gpus.is_empty() {
            sum.without_gpus += 1;
            continue;
        }
        sum.nodes += 1;
        for gpu in &status.gpus {
            let memory_of = GpuMemory::of(node, gpu);
            sum.add(memory_of);
            table.push(row(snapshot, node, gpu, memory_of));
        }
    }
    let mut text = table.render(terminal);
    if !terminal.no_headers {
        text.push_str(&sum.sentence());
    }
    text
}

fn row(snapshot: &Snapshot, node: &GpuNode, gpu: &GpuStatus, memory_of: GpuMemory) -> Vec<Cell> {
    let (state, style) = match gpu.state {
        GpuState::Active => ("Active", Style::Plain),
        GpuState::Reserved => ("Reserved", Style::Warning),
        GpuState::Draining if gpu.health.reason == "Drained" => ("Drained", Style::Warning),
        GpuState::Draining => ("Draining", Style::Warning),
        GpuState::Lost => ("Lost", Style::Bad),
        GpuState::Unknown => ("Unknown", Style::Warning),
    };
    let health = match gpu.health.status {
        HealthStatus::Healthy => Style::Good,
        _ if gpu.state == GpuState::Draining => Style::Warning,
        _ => Style::Bad,
    };
    let driver = node
        .status
        .as_ref()
        .and_then(|status| status.driver_version.as_deref());
    let or_none = |amount: &Option<bursar_crds::Amount>| {
        amount.as_ref().map_or_else(Cell::none, |amount| {
            Cell::new(memory(bytes(amount)), Style::Warning)
        })
    };
    vec![
        name(node).into(),
        index(node, gpu).into(),
        model(&gpu.model).into(),
        Cell::new(state, style),
        part(memory_of.bound, memory_of.capacity, "/").into(),
        memory(memory_of.free).into(),
        memory(memory_of.largest).into(),
        or_none(&gpu.leaked),
        gpu.pods.len().to_string().into(),
        Cell::new(gpu.health.reason.as_str(), health),
        memory(bytes(&gpu.memory)).into(),
        gpu.generation.to_string().into(),
        driver.unwrap_or("-").into(),
        gpu.uuid.as_str().into(),
        note(snapshot, node, gpu),
    ]
}

/// The nodes to show: all, or the one of this name.
pub fn shown<'a>(
    snapshot: &'a Snapshot,
    only: Option<&'a str>,
) -> impl Iterator<Item = &'a GpuNode> {
    let nodes = snapshot.gpu_nodes.iter();
    nodes.filter(move |node| only.is_none_or(|only| name(node) == only))
}

/// A sentence about a node whose agent found no GPU. `None` for a node with GPUs, and for a node
/// whose agent has not written a status yet.
pub fn without_gpus(node: &GpuNode) -> Option<String> {
    let status = node.status.as_ref()?;
    if !status.gpus.is_empty() {
        return None;
    }
    let found = condition(&status.conditions, conditions::gpu_node::GPUS_FOUND);
    Some(clean(found.map_or_else(
        || format!("{} has no GPUs.", name(node)),
        |found| {
            format!(
                "{} has no GPUs: {}: {}",
                name(node),
                found.reason,
                found.message
            )
        },
    )))
}

/// The sums of all shown GPUs.
#[derive(Default)]
struct Sum {
    /// The nodes with GPUs.
    nodes: usize,
    gpus: usize,
    /// The nodes whose status has no GPU, and those without a status.
    without_gpus: usize,
    waiting: usize,
    faults: usize,
    bound: u64,
    capacity: u64,
    largest: u64,
}

impl Sum {
    fn add(&mut self, memory_of: GpuMemory) {
        self.gpus += 1;
        self.bound += memory_of.bound;
        self.capacity += memory_of.capacity;
        self.largest = self.largest.max(memory_of.largest);
    }

    fn sentence(&self) -> String {
        let mut text = if self.gpus == 0 {
            "No node has GPUs".to_owned()
        } else {
            format!(
                "{} on {}: {} bound, largest free {}, {} waiting, {}",
                count(self.gpus, "GPU"),
                count(self.nodes, "node"),
                part(self.bound, self.capacity, " of "),
                memory(self.largest),
                self.waiting,
                count(self.faults, "fault"),
            )
        };
        if self.without_gpus > 0 {
            text.push_str(&format!(
                "; {} without GPUs",
                count(self.without_gpus, "node")
            ));
        }
        text.push('\n');
        text
    }
}

/// The names of the GpuNodes.
pub fn names(snapshot: &Snapshot, only: Option<&str>) -> Vec<String> {
    shown(snapshot, only)
        .map(|node| format!("gpunode.bursar.dev/{}", name(node)))
        .collect()
}
