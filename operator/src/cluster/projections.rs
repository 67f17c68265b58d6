//! What is kept of each object.

use std::collections::BTreeSet;

use bursar_crds::budget::{ContextAction, ContextPolicy};
use bursar_crds::gpu_node::{ContextOrder, Fault, FaultKind, NamespaceUse, RestartOrder};
use bursar_crds::resources::BUDGET_LABEL;
use bursar_crds::{Amount, COHORT_LABEL, GpuMemoryBudget, GpuNode, Quantum};
use kube::ResourceExt;

use crate::budget::ParsedSpec;
use crate::cluster::unknown_values::unknown_in_node;
use crate::placement::node::SlimNode;
use crate::quanta::Quanta;

/// What other budgets need to know of a budget.
#[derive(Clone, Debug, PartialEq)]
pub struct BudgetSummary {
    /// Its cohort.
    pub cohort: String,
    /// What it guarantees; nothing while its spec cannot be read.
    pub guaranteed: Quanta,
    /// What is done about poisoned contexts of its pods.
    pub context_policy: ContextPolicy,
    /// The version of the object, so that a status changed by another hand is noticed.
    pub resource_version: Option<String>,
}

impl BudgetSummary {
    /// The claim of `budget`.
    pub fn of(budget: &GpuMemoryBudget, quantum: Quantum) -> Self {
        let parsed = ParsedSpec::of(&budget.spec, quantum);
        Self {
            cohort: budget.spec.cohort.clone(),
            guaranteed: parsed.map_or(Quanta::ZERO, |parsed| parsed.guaranteed),
            context_policy: known_policy(&budget.spec.context_policy),
            resource_version: budget.resource_version(),
        }
    }
}

/// What agents are ordered for a policy. One of another version cannot be written, and without an order they restart.
fn known_policy(policy: &ContextPolicy) -> ContextPolicy {
    let action = match policy.action {
        ContextAction::Unknown => ContextAction::Report,
        known => known,
    };
    ContextPolicy {
        action,
        ..policy.clone()
    }
}

/// A fault that is open on a node.
#[derive(Clone, Debug, PartialEq)]
pub struct OpenFault {
    /// It.
    pub fault: Fault,
    /// Where a GPU is at fault: the UIDs of the pods that have memory of it.
    pub pods: Vec<String>,
}

/// What is known of a node's GPUs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuNodeSummary {
    /// What it offers; none while it has no memory to give.
    pub capacity: Option<Capacity>,
    /// A field of the object that has a value of another version.
    pub unknown_field: Option<&'static str>,
    /// The object's UID: one that was made anew under the same name has nothing ordered.
    pub uid: String,
    /// What is ordered about poisoned contexts there, by namespace.
    pub context_policies: Vec<ContextOrder>,
    /// Which poisoned contexts are ordered to be restarted there.
    pub restarts: Vec<RestartOrder>,
    /// The faults that are open.
    pub faults: Vec<OpenFault>,
    /// What the pods of each namespace use there.
    pub namespaces: Vec<NamespaceUse>,
    /// The type and the status of each condition.
    pub conditions: Vec<(String, String)>,
}

impl GpuNodeSummary {
    /// The GPUs of `node`.
    pub fn of(node: &GpuNode, quantum: Quantum) -> Self {
        let status = node.status.as_ref();
        let conditions = status.into_iter().flat_map(|status| &status.conditions);
        let mut contexts = node.spec.context_policies.clone();
        contexts.sort_by(|one, other| one.namespace.cmp(&other.namespace));
        Self {
            capacity: Capacity::of(node, quantum),
            unknown_field: unknown_in_node(node),
            uid: node.uid().unwrap_or_default(),
            context_policies: contexts,
            restarts: node.spec.restarts.clone(),
            faults: OpenFault::all(node),
            namespaces: status
                .map(|status| status.namespaces.clone())
                .unwrap_or_default(),
            conditions: conditions
                .map(|one| (one.type_.clone(), one.status.clone()))
                .collect(),
        }
    }

    /// What is known of an object that cannot be read: that the node is there.
    pub fn unreadable() -> Self {
        Self {
            capacity: Some(Capacity::Excluded(ExclusionReason::Unreadable)),
            ..Self::default()
        }
    }

    /// Whether the object can be read, and so be written to.
    pub fn is_readable(&self) -> bool {
        self.capacity != Some(Capacity::Excluded(ExclusionReason::Unreadable))
    }

    /// The namespaces of which something is said here; none where it may concern all.
    pub fn affected_namespaces(&self) -> Option<BTreeSet<&str>> {
        let faults = self.faults.iter();
        let faults = faults.map(|open| Some(open.fault.container.as_ref()?.namespace.as_str()));
        let uses = self.namespaces.iter();
        faults
            .chain(uses.map(|one| Some(one.namespace.as_str())))
            .collect()
    }
}

impl OpenFault {
    fn all(node: &GpuNode) -> Vec<Self> {
        let Some(status) = &node.status else {
            return Vec::new();
        };
        let on = |gpu: &str| {
            let gpu = status.gpus.iter().find(|one| one.uuid == gpu);
            let pods = gpu.into_iter().flat_map(|gpu| &gpu.pods);
            pods.map(|pod| pod.uid.clone()).collect()
        };
        let faults = status.faults.iter().map(|fault| Self {
            pods: match fault.kind {
                FaultKind::Gpu => on(&fault.gpu),
                FaultKind::Context | FaultKind::Unknown => Vec::new(),
            },
            fault: fault.clone(),
        });
        faults.collect()
    }
}

/// What a node offers to pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Capacity {
    /// Device memory that the kubelet is told of.
    Counted(Quanta),
    /// Nothing that a cohort counts.
    Excluded(ExclusionReason),
}

/// Why a node's memory does not count in its cohort.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ExclusionReason {
    /// The node counts in a quantum of this size, so that its resource has another name.
    OtherQuantum(String),
    /// The `GpuNode` cannot be read.
    Unreadable,
    /// The node is not Ready, or its kubelet has no agent, and that lasts.
    Dead,
}

impl ExclusionReason {
    /// The reason, as metrics call it.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::OtherQuantum(_) => "OtherQuantum",
            Self::Unreadable => "Unreadable",
            Self::Dead => "Dead",
        }
    }
}

impl Capacity {
    /// The offer of `node`; `None` while it has no memory to give.
    pub fn of(node: &GpuNode, quantum: Quantum) -> Option<Self> {
        let status = node.status.as_ref()?;
        let allocatable = u64::try_from(status.device_memory.allocatable).unwrap_or(0);
        if allocatable == 0 {
            return None;
        }
        let bytes = status.quantum.as_ref().map(Amount::bytes);
        Some(match (bytes, &status.quantum) {
            (Some(Ok(bytes)), _) if bytes == quantum.bytes() => {
                Self::Counted(Quanta::new(allocatable))
            }
            (_, other) => Self::Excluded(ExclusionReason::OtherQuantum(
                other
                    .as_ref()
                    .map_or_else(|| "no quantum".to_owned(), |size| size.0.0.clone()),
            )),
        })
    }
}

/// What is known of a node itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeSummary {
    /// The cohort that the node's label puts it into; absent without the label.
    pub cohort: Option<String>,
    /// The node is Ready, and its kubelet offers device memory. The kubelet takes the offer back when the agent's stream
    /// ends, and the node lifecycle controller takes `Ready` back when the kubelet is silent.
    pub is_alive: bool,
}

impl NodeSummary {
    /// What is known of `node`.
    pub fn of(node: &SlimNode, quantum: Quantum) -> Self {
        Self {
            cohort: node.labels().get(COHORT_LABEL).cloned(),
            is_alive: node.is_ready() && node.allocatable(quantum) != Quanta::ZERO,
        }
    }
}

/// What a namespace's label says of its budget; `None` without the label.
pub fn budget_label(namespace: &impl ResourceExt) -> Option<String> {
    namespace.labels().get(BUDGET_LABEL).cloned()
}
