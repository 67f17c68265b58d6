//! Indexes the cluster from watch events. Pure.

use std::collections::{BTreeMap, BTreeSet};

use bursar_crds::context_policy::ContextAction;
use bursar_crds::{DEFAULT_COHORT, Quantum};
use kube::runtime::watcher::Event;
use tokio::time::Instant;

mod apply;
mod budgets;
mod node_orders;

pub use node_orders::NamespaceWrite;

use super::agents::Agents;
use super::aggregates::Aggregates;
use super::cache::{Cache, CacheEntry, Key};
use super::facts::node::NodeFacts;
use super::facts::pod::PodSummary;
use super::facts::snapshot::PlacementView;
use super::node_liveness::NodeLiveness;
use super::projections::{BudgetSummary, GpuNamespaceSummary, GpuNodeSummary};
use crate::budget::ObservedQuota;

/// The watched kinds, as probes, logs and metrics name them.
pub mod kinds {
    /// Budgets: what namespaces may use.
    pub const BUDGETS: &str = "GpuMemoryBudgets";
    /// Pods: what they request.
    pub const PODS: &str = "Pods";
    /// GpuNodes: GPUs and their use.
    pub const GPU_NODES: &str = "GpuNodes";
    /// GpuNamespaces: what agents know of namespaces.
    pub const GPU_NAMESPACES: &str = "GpuNamespaces";
    /// Nodes: cohort label, allocatable resources, readiness.
    pub const NODES: &str = "Nodes";
    /// Quotas: how admission refuses pods.
    pub const QUOTAS: &str = "ResourceQuotas";
    /// Namespaces with a budget label.
    pub const NAMESPACES: &str = "Namespaces";
    /// All kinds.
    pub const ALL: [&str; 7] = [
        BUDGETS,
        PODS,
        GPU_NODES,
        GPU_NAMESPACES,
        NODES,
        QUOTAS,
        NAMESPACES,
    ];
}

/// One event of one watch.
#[derive(Debug)]
pub enum WatchEvent {
    /// An event of a budget.
    Budget(Event<CacheEntry<BudgetSummary>>),
    /// An event of a pod.
    Pod(Event<CacheEntry<PodSummary>>),
    /// An event of a GpuNode.
    GpuNode(Event<CacheEntry<GpuNodeSummary>>),
    /// An event of a GpuNamespace.
    GpuNamespace(Event<CacheEntry<GpuNamespaceSummary>>),
    /// An event of a Node.
    Node(Event<CacheEntry<NodeFacts>>),
    /// An event of one of the operator's ResourceQuotas.
    Quota(Event<CacheEntry<ObservedQuota>>),
    /// An event of a namespace with a budget label.
    Namespace(Event<CacheEntry<String>>),
    /// An event of an unreadable object, with the reason.
    Unreadable(&'static str, Event<CacheEntry<String>>),
    /// The operator's monotonic clock advanced to this time.
    Clock(Instant),
}

/// The budgets whose status may have changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Affected {
    all: bool,
    namespaces: BTreeSet<String>,
}

impl Affected {
    /// Whether no budget is affected.
    pub fn is_empty(&self) -> bool {
        !self.all && self.namespaces.is_empty()
    }

    /// Adds the budgets of `other`.
    pub fn add(&mut self, other: Self) {
        let Self { all, namespaces } = other;
        self.all |= all;
        self.namespaces.extend(namespaces);
    }
}

/// The indexed state of the cluster.
#[derive(Debug)]
pub struct ClusterIndex {
    quantum: Quantum,
    pub(super) budgets: Cache<BudgetSummary>,
    budget_lists: u64,
    pub(super) pods: Cache<PodSummary>,
    pub(super) gpu_nodes: Cache<GpuNodeSummary>,
    gpu_namespaces: Cache<GpuNamespaceSummary>,
    pub(super) nodes: Cache<NodeFacts>,
    liveness: NodeLiveness,
    agents: Agents,
    quotas: Cache<ObservedQuota>,
    labels: Cache<String>,
    pub(super) aggregates: Aggregates,
    /// The number of changes that concern placement.
    placement_changes: usize,
    unreadable: BTreeMap<&'static str, Cache<String>>,
    /// The action for poisoned contexts in namespaces whose budget names none.
    default_action: ContextAction,
}

impl ClusterIndex {
    /// An empty index.
    pub fn new(quantum: Quantum) -> Self {
        Self {
            quantum,
            budgets: Cache::default(),
            budget_lists: 0,
            pods: Cache::default(),
            gpu_nodes: Cache::default(),
            gpu_namespaces: Cache::default(),
            nodes: Cache::default(),
            liveness: NodeLiveness::default(),
            agents: Agents::default(),
            quotas: Cache::default(),
            labels: Cache::default(),
            aggregates: Aggregates::default(),
            placement_changes: 0,
            unreadable: BTreeMap::new(),
            default_action: ContextAction::default(),
        }
    }

    /// The index of a cluster where `action` applies to poisoned contexts by default.
    #[must_use]
    pub fn with_default_action(mut self, action: ContextAction) -> Self {
        self.default_action = action;
        self
    }

    /// The index of a cluster whose agents are in `namespace`.
    #[must_use]
    pub fn with_agents_in(mut self, namespace: Option<String>) -> Self {
        self.agents = Agents::of(namespace);
        self
    }

    /// Whether time alone will change something.
    pub fn has_deadlines(&self) -> bool {
        self.liveness.has_deadlines() || self.agents.have_deadlines()
    }

    /// The unreadable objects by kind.
    pub fn unreadable(&self) -> impl Iterator<Item = (&'static str, &Key)> {
        let kinds = self.unreadable.iter();
        kinds.flat_map(|(kind, all)| all.iter().map(|(key, _)| (*kind, key)))
    }

    /// Whether an object is indexed as unreadable.
    pub fn is_unreadable(&self, kind: &str, key: &Key) -> bool {
        let of_kind = self.unreadable.get(kind);
        of_kind.is_some_and(|all| all.get(key).is_some())
    }

    /// How many nodes are excluded from their cohort, by reason.
    pub fn excluded_nodes(&self) -> BTreeMap<&'static str, i64> {
        let mut counts = BTreeMap::new();
        for (_, cohort) in self.aggregates.cohorts() {
            for (_, reason) in cohort.excluded {
                *counts.entry(reason.reason()).or_default() += 1;
            }
        }
        counts
    }

    /// The number of changes that concern placement, so far.
    pub(crate) fn placement_changes(&self) -> usize {
        self.placement_changes
    }

    /// The part that the planner needs, as it is now.
    pub(crate) fn placement_view(&self) -> PlacementView {
        PlacementView {
            budgets: self.budgets.objects(),
            pods: self.pods.objects(),
            gpu_nodes: self.gpu_nodes.objects(),
            nodes: self.nodes.objects(),
            gpu_pods: self.aggregates.gpu_pods.clone(),
            node_requested: self.aggregates.node_requested.clone(),
        }
    }

    /// The pods that request a resource of Bursar.
    pub(super) fn gpu_pods(&self) -> impl Iterator<Item = (&Key, &PodSummary)> {
        let keys = self.aggregates.gpu_pods.iter();
        keys.filter_map(|key| Some((key, self.pods.get(key)?)))
    }

    /// The kinds without a complete list, of those on which a status depends. The operator computes
    /// one only when there are none.
    pub fn unlisted_kinds(&self) -> Vec<&'static str> {
        let all = [
            (kinds::BUDGETS, self.budgets.is_listed()),
            (kinds::PODS, self.pods.is_listed()),
            (kinds::GPU_NODES, self.gpu_nodes.is_listed()),
            (kinds::NODES, self.nodes.is_listed()),
            (kinds::QUOTAS, self.quotas.is_listed()),
            (kinds::NAMESPACES, self.labels.is_listed()),
        ];
        let missing = all.into_iter().filter(|(_, listed)| !listed);
        missing.map(|(kind, _)| kind).collect()
    }

    /// How many nodes have each condition in each status.
    pub fn nodes_by_condition(&self) -> BTreeMap<(&str, &str), i64> {
        let mut counts = BTreeMap::new();
        let conditions = self.gpu_nodes.iter().flat_map(|(_, node)| &node.conditions);
        for (type_, status) in conditions {
            *counts.entry((type_.as_str(), status.as_str())).or_default() += 1;
        }
        counts
    }
}

fn cohort_of(node: Option<&NodeFacts>) -> &str {
    node.map_or(DEFAULT_COHORT, NodeFacts::cohort)
}

#[cfg(test)]
mod tests;
