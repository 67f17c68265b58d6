//! Reduces budgets and GpuNodes to the fields that the index needs.

use std::collections::{BTreeMap, BTreeSet};

use bursar_crds::budget::Override;
use bursar_crds::context_policy::{ContextAction, ContextPolicy};
use bursar_crds::gpu_node::{Fault, FaultKind, NamespaceUse, PodSettings, RestartRequest};
use bursar_crds::resources::BUDGET_LABEL;
use bursar_crds::{Amount, GpuMemoryBudget, GpuNamespace, GpuNode, Quantum};
use kube::ResourceExt;

use crate::budget::ParsedSpec;
use crate::cluster::facts::node::GpuFacts;
use crate::cluster::unknown_values::unknown_in_node;
use crate::quanta::Quanta;

/// The longest name of a GPU in `spec.drain`.
const MAX_UUID: usize = 96;

/// The overrides of quotas by pod name.
pub type QuotaOverrides = BTreeMap<String, Override>;

/// The fields of a budget that other budgets and nodes need.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BudgetSummary {
    /// The budget's cohort.
    pub cohort: String,
    /// The guaranteed amount; zero while the spec is invalid.
    pub guaranteed: Quanta,
    /// The policy for poisoned contexts of the namespace's pods, if the budget has one.
    pub context_policy: Option<ContextPolicy>,
    /// The overrides of quotas by pod name.
    pub overrides: QuotaOverrides,
    /// The resource version, so that the operator notices a foreign status edit.
    pub resource_version: Option<String>,
}

impl BudgetSummary {
    /// The summary of `budget`.
    pub fn of(budget: &GpuMemoryBudget, quantum: Quantum) -> Self {
        let parsed = ParsedSpec::of(&budget.spec, quantum);
        let overrides = budget.spec.overrides.iter();
        Self {
            cohort: budget.spec.cohort.clone(),
            guaranteed: parsed.map_or(Quanta::ZERO, |parsed| parsed.guaranteed),
            context_policy: budget.spec.context_policy.as_ref().map(known_policy),
            overrides: overrides
                .map(|one| (one.pod.clone(), one.clone()))
                .collect(),
            resource_version: budget.resource_version(),
        }
    }
}

/// The policy that agents can execute. An unknown action cannot be written, and without a policy
/// agents would act by the cluster's default.
fn known_policy(policy: &ContextPolicy) -> ContextPolicy {
    let action = match policy.action {
        Some(ContextAction::Unknown) => Some(ContextAction::Report),
        known => known,
    };
    ContextPolicy {
        action,
        ..policy.clone()
    }
}

/// An open fault on a node.
#[derive(Clone, Debug, PartialEq)]
pub struct OpenFault {
    /// The fault as the agent reports it.
    pub fault: Fault,
    /// For a GPU fault: the UIDs of the pods that have memory on that GPU.
    pub pods: Vec<String>,
}

/// The fields of a GpuNamespace that the operator compares.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuNamespaceSummary {
    /// The object's UID.
    pub uid: String,
    /// The policy for poisoned contexts. `None` without one, and where it cannot be parsed.
    pub context_policy: Option<ContextPolicy>,
}

impl GpuNamespaceSummary {
    /// The summary of `namespace`.
    pub fn of(namespace: &GpuNamespace) -> Self {
        Self {
            uid: namespace.uid().unwrap_or_default(),
            context_policy: namespace.spec.context_policy.clone(),
        }
    }
}

/// The fields of a GpuNode that the index needs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuNodeSummary {
    /// The node's capacity. `None` while the node has no memory to give.
    pub capacity: Option<Capacity>,
    /// The most memory that one GPU of the node has free for a new pod.
    pub largest_free: Quanta,
    /// A field of the object whose value this version does not know.
    pub unknown_field: Option<&'static str>,
    /// The restart requests in the node's spec.
    pub restarts: Vec<RestartRequest>,
    /// The open faults.
    pub faults: Vec<OpenFault>,
    /// The usage that the agent reports for each namespace.
    pub namespaces: Vec<NamespaceUse>,
    /// The type and status of each condition.
    pub conditions: Vec<(String, String)>,
    /// The UUIDs of the node's GPUs, as far as a drain may name them.
    pub gpus: Vec<String>,
    /// The GPUs in `spec.drain`.
    pub drain: Vec<String>,
    /// The settings of pods in the node's spec.
    pub pods: Vec<PodSettings>,
    /// The facts for the planner. A recreated GpuNode, which has another UID, has no orders.
    pub facts: Box<GpuFacts>,
}

impl GpuNodeSummary {
    /// The summary of `node`.
    pub fn of(node: &GpuNode, quantum: Quantum) -> Self {
        let status = node.status.as_ref();
        let conditions = status.into_iter().flat_map(|status| &status.conditions);
        Self {
            capacity: Capacity::of(node, quantum),
            largest_free: status.map_or(Quanta::ZERO, |status| {
                let largest = u64::try_from(status.device_memory.largest_free);
                Quanta::new(largest.unwrap_or(0))
            }),
            unknown_field: unknown_in_node(node),
            restarts: node.spec.restarts.clone(),
            faults: OpenFault::all(node),
            namespaces: status
                .map(|status| status.namespaces.clone())
                .unwrap_or_default(),
            conditions: conditions
                .map(|condition| (condition.type_.clone(), condition.status.clone()))
                .collect(),
            gpus: status
                .into_iter()
                .flat_map(|status| &status.gpus)
                .map(|gpu| gpu.uuid.clone())
                .filter(|uuid| (1..=MAX_UUID).contains(&uuid.len()))
                .collect(),
            drain: node.spec.drain.clone(),
            pods: node.spec.pods.clone(),
            facts: Box::new(GpuFacts::of(node, quantum)),
        }
    }

    /// The summary of a GpuNode that cannot be parsed.
    pub fn unreadable() -> Self {
        Self {
            capacity: Some(Capacity::Excluded(ExclusionReason::Unreadable)),
            ..Self::default()
        }
    }

    /// Whether the object can be parsed, and therefore be written to.
    pub fn is_readable(&self) -> bool {
        self.capacity != Some(Capacity::Excluded(ExclusionReason::Unreadable))
    }

    /// Whether the two differ in what the status of a budget is computed from.
    pub(super) fn differs_for_budgets(&self, other: &Self) -> bool {
        self.capacity != other.capacity
            || self.unknown_field != other.unknown_field
            || self.faults != other.faults
            || self.namespaces != other.namespaces
    }

    /// The namespaces that the node reports on. `None` when a fault may affect all.
    pub fn affected_namespaces(&self) -> Option<BTreeSet<&str>> {
        let faults = self.faults.iter();
        let faults = faults.map(|open| Some(open.fault.container.as_ref()?.namespace.as_str()));
        let uses = self.namespaces.iter();
        faults
            .chain(uses.map(|usage| Some(usage.namespace.as_str())))
            .collect()
    }
}

impl OpenFault {
    fn all(node: &GpuNode) -> Vec<Self> {
        let Some(status) = &node.status else {
            return Vec::new();
        };
        let on = |gpu: &str| {
            let gpu = status.gpus.iter().find(|listed| listed.uuid == gpu);
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

/// The capacity that a node offers to pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Capacity {
    /// Device memory that the kubelet advertises.
    Counted(Quanta),
    /// Capacity that counts in no cohort.
    Excluded(ExclusionReason),
}

/// Why a node's memory does not count in its cohort.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ExclusionReason {
    /// The node uses another quantum of this size, so that its resource has another name.
    OtherQuantum(String),
    /// The `GpuNode` cannot be parsed.
    Unreadable,
    /// The node has not been Ready, or its kubelet had no agent, for too long.
    Dead,
}

impl ExclusionReason {
    /// The reason as a metric label.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::OtherQuantum(_) => "OtherQuantum",
            Self::Unreadable => "Unreadable",
            Self::Dead => "Dead",
        }
    }
}

impl Capacity {
    /// The capacity of `node`. `None` while the node has no memory to give.
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

/// The value of the namespace's budget label.
pub fn budget_label(namespace: &impl ResourceExt) -> Option<String> {
    namespace.labels().get(BUDGET_LABEL).cloned()
}
