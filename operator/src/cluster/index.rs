//! Indexes the cluster from watch events. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bursar_crds::context_policy::{ContextAction, ContextPolicy, ContextPolicyEntry};
use bursar_crds::gpu_node::{MAX_CONTEXTS, MAX_RESTARTS, NamespaceUse, RestartRequest};
use bursar_crds::resources::ENFORCED;
use bursar_crds::{DEFAULT_COHORT, Quantum};
use kube::runtime::watcher::Event;
use tokio::time::Instant;

use super::aggregates::{Aggregates, CohortMember};
use super::cache::{Cache, CacheEntry, Key};
use super::node_liveness::NodeLiveness;
use super::projections::{BudgetSummary, Capacity, GpuNodeSummary, NodeSummary, OpenFault};
use crate::budget::{
    AffectedPod, BudgetInputs, ObservedQuota, QuotaKind, Remedy, action_of, remedy,
};
use crate::cluster::on_node::on_node;
use crate::cluster::pod_request::PodRequest;
use crate::nodes::nvidia_labels::due_drain;
use crate::nodes::ssa_diff::needs_apply;
use crate::placement::{PlacementEvent, PlacementIndex};
use crate::quanta::Quanta;

/// The watched kinds, as probes, logs and metrics name them.
pub mod kinds {
    /// Budgets: what namespaces may use.
    pub const BUDGETS: &str = "GpuMemoryBudgets";
    /// Pods: what they request.
    pub const PODS: &str = "Pods";
    /// GpuNodes: GPUs and their use.
    pub const GPU_NODES: &str = "GpuNodes";
    /// Nodes: cohort label, allocatable resources, readiness.
    pub const NODES: &str = "Nodes";
    /// Quotas: how admission refuses pods.
    pub const QUOTAS: &str = "ResourceQuotas";
    /// Namespaces with a budget label.
    pub const NAMESPACES: &str = "Namespaces";
    /// All kinds.
    pub const ALL: [&str; 6] = [BUDGETS, PODS, GPU_NODES, NODES, QUOTAS, NAMESPACES];
}

/// The bytes of one context policy in a GpuNode, with its managed fields and a name of 20 letters.
const POLICY_BYTES: usize = 256;

/// The bytes that all policies on all nodes may take. The API server stores the whole object at
/// each write of an agent.
const MAX_POLICY_BYTES: usize = 64 << 20;

/// The fewest policies that every node gets, in a cluster of any size.
const MIN_ON_EVERY_NODE: usize = 32;

/// The actions of agents of earlier versions, which list none.
const UNLISTED_ACTIONS: [ContextAction; 4] = [
    ContextAction::InPlace,
    ContextAction::Restart,
    ContextAction::Evict,
    ContextAction::Report,
];

/// The orders for one node: context policies by namespace, and restart requests.
pub type NodeOrders = (Arc<Vec<ContextPolicyEntry>>, Vec<RestartRequest>);

/// One event of one watch.
#[derive(Debug)]
pub enum WatchEvent {
    /// An event of a budget.
    Budget(Event<CacheEntry<BudgetSummary>>),
    /// An event of a pod.
    Pod(Event<CacheEntry<PodRequest>>),
    /// An event of a GpuNode.
    GpuNode(Event<CacheEntry<GpuNodeSummary>>),
    /// An event of a Node.
    Node(Event<CacheEntry<NodeSummary>>),
    /// An event of one of the operator's ResourceQuotas.
    Quota(Event<CacheEntry<ObservedQuota>>),
    /// An event of a namespace with a budget label.
    Namespace(Event<CacheEntry<String>>),
    /// An event for the placement index.
    Placement(PlacementEvent),
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
    budgets: Cache<BudgetSummary>,
    budget_lists: u64,
    pods: Cache<PodRequest>,
    gpu_nodes: Cache<GpuNodeSummary>,
    nodes: Cache<NodeSummary>,
    liveness: NodeLiveness,
    quotas: Cache<ObservedQuota>,
    labels: Cache<String>,
    aggregates: Aggregates,
    placement_index: PlacementIndex,
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
            nodes: Cache::default(),
            liveness: NodeLiveness::default(),
            quotas: Cache::default(),
            labels: Cache::default(),
            aggregates: Aggregates::default(),
            placement_index: PlacementIndex::default(),
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

    /// Applies one event. Returns the budgets that it may affect.
    pub fn apply(&mut self, change: WatchEvent) -> Affected {
        match change {
            WatchEvent::Budget(event) => {
                self.budget_lists += u64::from(matches!(event, Event::InitDone));
                let changed = self.budgets.apply(event);
                let mut all = false;
                for (key, before) in &changed {
                    all |= self
                        .aggregates
                        .update_budget(before.as_ref(), self.budgets.get(key));
                }
                Affected {
                    all,
                    namespaces: namespaces_of(changed),
                }
            }
            WatchEvent::Pod(event) => {
                let changed = self.pods.apply(event);
                for (key, before) in &changed {
                    let now = self.pods.get(key);
                    self.aggregates
                        .update_pod(&key.namespace, before.as_ref(), now);
                }
                Affected {
                    all: false,
                    namespaces: namespaces_of(changed),
                }
            }
            WatchEvent::GpuNode(event) => self.apply_gpu_node(event),
            WatchEvent::Node(event) => self.apply_node(event),
            WatchEvent::Quota(event) => Affected {
                all: false,
                namespaces: namespaces_of(self.quotas.apply(event)),
            },
            WatchEvent::Namespace(event) => {
                let changed = self.labels.apply(event);
                Affected {
                    all: false,
                    namespaces: changed.into_iter().map(|(key, _)| key.name).collect(),
                }
            }
            WatchEvent::Placement(event) => {
                self.placement_index.apply(event);
                Affected::default()
            }
            WatchEvent::Unreadable(kind, event) => {
                self.unreadable.entry(kind).or_default().apply(event);
                Affected::default()
            }
            WatchEvent::Clock(now) => self.advance_clock(now),
        }
    }

    /// A changed capacity affects every budget. A report on a namespace affects the budget of that
    /// namespace.
    fn apply_gpu_node(&mut self, event: Event<CacheEntry<GpuNodeSummary>>) -> Affected {
        let mut affected = Affected::default();
        for (key, before) in self.gpu_nodes.apply(event) {
            let node = self.nodes.get(&key).cloned();
            affected.all |= self.update_node(&key, before.as_ref(), node.as_ref());
            match affected_namespaces(before.as_ref(), self.gpu_nodes.get(&key)) {
                Some(namespaces) => affected
                    .namespaces
                    .extend(namespaces.into_iter().map(str::to_owned)),
                None => affected.all = true,
            }
        }
        affected
    }

    /// A node's cohort affects every budget.
    fn apply_node(&mut self, event: Event<CacheEntry<NodeSummary>>) -> Affected {
        let mut affected = Affected::default();
        for (key, before) in self.nodes.apply(event) {
            let gpus = self.gpu_nodes.get(&key).cloned();
            affected.all |= self.update_node(&key, gpus.as_ref(), before.as_ref());
            affected.all |= cohort_of(before.as_ref()) != cohort_of(self.nodes.get(&key));
        }
        affected
    }

    /// Nodes that count as dead from now on leave their cohorts, which affects every budget.
    fn advance_clock(&mut self, now: Instant) -> Affected {
        let newly_dead = self.liveness.advance_clock(now);
        for key in &newly_dead {
            let cohort = cohort_of(self.nodes.get(key));
            let member = |is_dead| {
                let gpus = self.gpu_nodes.get(key)?;
                Some(CohortMember {
                    gpus,
                    cohort,
                    is_dead,
                })
            };
            self.aggregates
                .update_node(key, member(false), member(true));
        }
        Affected {
            all: !newly_dead.is_empty(),
            namespaces: BTreeSet::new(),
        }
    }

    /// Replaces a node in the aggregates. Returns whether a dead node is alive again.
    fn update_node(
        &mut self,
        key: &Key,
        gpus: Option<&GpuNodeSummary>,
        node: Option<&NodeSummary>,
    ) -> bool {
        let was_dead = self.liveness.is_dead(key);
        let member = |gpus, node, is_dead| {
            Some(CohortMember {
                gpus: gpus?,
                cohort: cohort_of(node),
                is_dead,
            })
        };
        let before = member(gpus, node, was_dead);
        let (gpus, node) = (self.gpu_nodes.get(key), self.nodes.get(key));
        // A node without GPUs cannot be missed.
        let is_alive = gpus.is_none() || node.is_some_and(|node| node.is_alive);
        self.liveness.observe(key, is_alive);
        let is_dead = self.liveness.is_dead(key);
        self.aggregates
            .update_node(key, before, member(gpus, node, is_dead));
        was_dead && !is_dead
    }

    /// Whether time alone will change something.
    pub fn has_deadlines(&self) -> bool {
        self.liveness.has_deadlines()
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

    /// The index for placement.
    pub fn placement(&self) -> &PlacementIndex {
        &self.placement_index
    }

    /// The kinds without a complete list. The operator computes a status only when there are none.
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

    /// The existing budgets among `affected`.
    pub fn affected_budgets(&self, affected: &Affected) -> Vec<Key> {
        let concerned = |key: &&Key| affected.all || affected.namespaces.contains(&key.namespace);
        self.budgets
            .iter()
            .map(|(key, _)| key)
            .filter(concerned)
            .cloned()
            .collect()
    }

    /// How many lists of budgets have completed.
    pub fn budget_lists(&self) -> u64 {
        self.budget_lists
    }

    /// Whether the budget exists.
    pub fn has_budget(&self, key: &Key) -> bool {
        self.budgets.get(key).is_some()
    }

    /// The inputs for the status of the budget in `namespace`, which belongs to `cohort`.
    pub fn budget_inputs(&self, namespace: &str, cohort: &str) -> BudgetInputs {
        let pods = || self.pods.in_namespace(namespace);
        let label = self.labels.get(&Key::cluster_scoped(namespace));
        BudgetInputs {
            default_action: self.default_action,
            quantum: self.quantum,
            requested: pods().map(|(_, request)| request).collect(),
            pods: pods()
                .map(|(key, request)| (key.name.clone(), request.clone()))
                .collect(),
            refused_for: BTreeMap::new(),
            exceeded_for: None,
            affected_pods: self.affected_pods(namespace),
            jobs_ignoring_disruption: BTreeMap::new(),
            reported: self.reported_usage(namespace).collect(),
            cohort: self.aggregates.cohort(cohort),
            guaranteed_quota: self.quota(namespace, QuotaKind::Guaranteed),
            limit_quota: self.quota(namespace, QuotaKind::Limit),
            is_labelled: label.is_some_and(|label| label == ENFORCED),
        }
    }

    fn quota(&self, namespace: &str, kind: QuotaKind) -> Option<ObservedQuota> {
        let key = Key {
            namespace: namespace.to_owned(),
            name: kind.name().to_owned(),
        };
        self.quotas.get(&key).cloned()
    }

    /// The namespaces with a budget label and no budget. Empty until all kinds are listed.
    pub fn namespaces_without_budget(&self) -> Vec<String> {
        if !self.unlisted_kinds().is_empty() {
            return Vec::new();
        }
        let labelled = self.labels.iter().map(|(key, _)| &key.name);
        labelled
            .filter(|namespace| !self.has_budget_in(namespace))
            .cloned()
            .collect()
    }

    /// Whether a namespace has a budget, readable or not.
    fn has_budget_in(&self, namespace: &str) -> bool {
        let unreadable = self.unreadable.get(kinds::BUDGETS);
        let unreadable = unreadable.and_then(|all| all.in_namespace(namespace).next());
        self.budgets.in_namespace(namespace).next().is_some() || unreadable.is_some()
    }

    /// The inputs for each namespace that has no budget, and pods that a fault affects. `None`
    /// until all kinds are listed.
    pub(crate) fn inputs_without_budget(&self) -> Option<Vec<(String, BudgetInputs)>> {
        if !self.unlisted_kinds().is_empty() {
            return None;
        }
        let nodes = self
            .gpu_nodes
            .iter()
            .filter(|(_, gpus)| !gpus.faults.is_empty());
        let namespaces: BTreeSet<&str> = nodes
            .flat_map(|(key, _)| self.aggregates.namespaces_on(&key.name))
            .collect();
        let affected = namespaces
            .into_iter()
            .filter(|namespace| !self.has_budget_in(namespace))
            .map(|namespace| {
                let inputs = self.budget_inputs(namespace, DEFAULT_COHORT);
                (namespace.to_owned(), inputs)
            })
            .filter(|(_, inputs)| !inputs.affected_pods.is_empty());
        Some(affected.collect())
    }

    /// The context policies by namespace, without those that equal the agents' default.
    fn context_policies(&self) -> Vec<ContextPolicyEntry> {
        let entry = |namespace: &str, policy: &ContextPolicy| ContextPolicyEntry {
            namespace: namespace.to_owned(),
            action: action_of(Some(policy), self.default_action),
            max_restarts: policy.max_restarts,
            window_seconds: policy.window_seconds,
            grace_seconds: policy.grace_seconds,
        };
        let orders = self.budgets.iter().filter_map(|(key, summary)| {
            let order = entry(&key.namespace, summary.context_policy.as_ref()?);
            let default = entry(&key.namespace, &ContextPolicy::default());
            (order != default).then_some(order)
        });
        orders.collect()
    }

    /// Drops the orders `written` to deleted nodes, because autoscalers never reuse a node's name.
    pub fn forget_deleted_nodes(&self, written: &mut BTreeMap<String, NodeOrders>) {
        let names: BTreeSet<&str> = self
            .gpu_nodes
            .iter()
            .map(|(key, _)| key.name.as_str())
            .collect();
        written.retain(|node, _| names.contains(node.as_str()));
    }

    /// The nodes whose context policies or restart requests have to be written: name, UID and
    /// orders.
    ///
    /// `written` holds what the operator applied last to each node.
    pub fn outdated_node_orders(
        &self,
        written: &BTreeMap<String, NodeOrders>,
    ) -> Vec<(String, String, NodeOrders)> {
        let policies = self.context_policies();
        let are_few = policies.len() <= max_on_every_node(self.gpu_nodes.iter().count());
        let mut by_actions = BTreeMap::new();
        let nodes = self.gpu_nodes.iter().filter(|(_, node)| node.is_readable());
        let nodes = nodes.filter_map(|(key, node)| {
            let all: &Arc<_> = by_actions
                .entry(&node.context_actions)
                .or_insert_with_key(|actions| Arc::new(supported_policies(&policies, actions)));
            let orders = match are_few {
                true => all.clone(),
                false => self.context_policies_of_pods_on(&key.name, all),
            };
            let due = self.restart_requests(node);
            let (contexts, restarts) = written
                .get(&key.name)
                .map(|(contexts, restarts)| (contexts.as_ref(), restarts))
                .unzip();
            // A correct policy stays until another write, although no pod needs it: the next pod
            // may.
            let idle = |one: &ContextPolicyEntry| {
                policy_of(&orders, &one.namespace) != Some(one)
                    && policy_of(all, &one.namespace) == Some(one)
            };
            let differs = node.context_policies != *orders && {
                let current = node.context_policies.iter().filter(|one| !idle(one));
                needs_apply(&current.cloned().collect::<Vec<_>>(), &orders, contexts)
            };
            let differs = differs || needs_apply(&node.restarts, &due, restarts);
            differs.then(|| (key.name.clone(), node.uid.clone(), (orders, due)))
        });
        nodes.collect()
    }

    /// The GpuNodes whose drain for NVIDIA's operators has to be written: name, UID and GPUs.
    ///
    /// `applied` holds what the operator applied last, by UID. Drops the entries of deleted nodes.
    pub(crate) fn due_drains(
        &self,
        applied: &mut BTreeMap<String, Vec<String>>,
    ) -> Vec<(String, String, Vec<String>)> {
        let uids: BTreeSet<&String> = self.gpu_nodes.iter().map(|(_, node)| &node.uid).collect();
        applied.retain(|uid, _| uids.contains(uid));
        let nodes = self.gpu_nodes.iter().filter(|(_, node)| node.is_readable());
        let due = nodes.filter_map(|(key, gpus)| {
            let maintenance = self.nodes.get(key)?.maintenance;
            let before = applied.get(&gpus.uid);
            let drain = due_drain(maintenance, &gpus.gpus, &gpus.drain, before)?;
            Some((key.name.clone(), gpus.uid.clone(), drain))
        });
        due.collect()
    }

    /// The policies of the namespaces that have pods on a node.
    fn context_policies_of_pods_on(
        &self,
        node: &str,
        all: &[ContextPolicyEntry],
    ) -> Arc<Vec<ContextPolicyEntry>> {
        let namespaces = self.aggregates.namespaces_on(node);
        let namespaces = namespaces.filter_map(|namespace| policy_of(all, namespace));
        Arc::new(namespaces.take(MAX_CONTEXTS).cloned().collect())
    }

    /// The restart requests for faults that the agent left open and that today's policy restarts.
    fn restart_requests(&self, node: &GpuNodeSummary) -> Vec<RestartRequest> {
        let due = node.faults.iter().filter_map(|OpenFault { fault, .. }| {
            let container = fault.container.as_ref()?;
            let action = self.context_action(&container.namespace);
            (remedy(fault, action) == Some(Remedy::Restart)).then(|| RestartRequest {
                fault: fault.id.clone(),
                pod_uid: container.pod_uid.clone(),
                container: container.container.clone(),
                process_generation: container.process_generation.saturating_add(1),
            })
        });
        due.take(MAX_RESTARTS).collect()
    }

    fn context_action(&self, namespace: &str) -> ContextAction {
        let summary = self.budgets.in_namespace(namespace).next();
        let policy = summary.and_then(|(_, summary)| summary.context_policy.as_ref());
        action_of(policy, self.default_action)
    }

    /// The pods of a namespace that a fault affects.
    fn affected_pods(&self, namespace: &str) -> Vec<AffectedPod> {
        let mut affected_pods = Vec::new();
        let nodes = self.aggregates.nodes_affecting(namespace).into_iter();
        let nodes = nodes.filter_map(|key| Some((&key.name, self.gpu_nodes.get(key)?)));
        let faults = nodes.flat_map(|(node, gpus)| gpus.faults.iter().map(move |one| (node, one)));
        for (node, OpenFault { fault, pods }) in faults {
            let of_container = fault
                .container
                .iter()
                .filter(|container| container.namespace == namespace)
                .map(|container| &container.pod_uid);
            let uids: BTreeSet<&String> = of_container.chain(pods).collect();
            if uids.is_empty() {
                continue;
            }
            let pods_affected = self.pods.in_namespace(namespace);
            let pods_affected = pods_affected.filter(|(_, request)| uids.contains(&request.uid));
            affected_pods.extend(pods_affected.filter_map(|(key, request)| {
                Some(AffectedPod {
                    pod: key.name.clone(),
                    request: on_node(node, request)?.cloned(),
                    fault: fault.clone(),
                    observed_for: Duration::ZERO,
                })
            }));
        }
        affected_pods
    }

    /// The nodes' reports about a namespace, each with whether a pod of the namespace is on the
    /// node.
    fn reported_usage(&self, namespace: &str) -> impl Iterator<Item = (&NamespaceUse, bool)> {
        let nodes = self.aggregates.nodes_reporting(namespace);
        let uses = nodes.flat_map(move |key| {
            let is_there = self.aggregates.has_pods_on(&key.name, namespace);
            let uses = self.gpu_nodes.get(key).map(|node| node.namespaces.iter());
            uses.into_iter().flatten().map(move |one| (one, is_there))
        });
        uses.filter(move |(one, _)| one.namespace == namespace)
    }

    /// The guaranteed and the allocatable bytes of each cohort.
    pub fn cohorts(&self) -> impl Iterator<Item = (&str, u64, u64)> {
        let bytes = |amount: Quanta| amount.bytes(self.quantum);
        let cohorts = self.aggregates.cohorts();
        cohorts.map(move |(name, sum)| (name, bytes(sum.guaranteed), bytes(sum.allocatable)))
    }

    /// The bytes of each cohort that a new pod can have on one GPU, of the nodes that count.
    pub fn largest_free(&self) -> BTreeMap<&str, u64> {
        let mut largest: BTreeMap<&str, u64> = BTreeMap::new();
        for (key, gpus) in self.gpu_nodes.iter() {
            let node = self.nodes.get(key);
            let is_alive = node.is_some_and(|node| node.is_alive);
            if is_alive && matches!(gpus.capacity, Some(Capacity::Counted(_))) {
                let of_cohort = largest.entry(cohort_of(node)).or_default();
                *of_cohort = gpus.largest_free.bytes(self.quantum).max(*of_cohort);
            }
        }
        largest
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

/// How many context policies every node of a cluster gets. If there are more, a node gets those of
/// its pods' namespaces.
fn max_on_every_node(nodes: usize) -> usize {
    let per_node = MAX_POLICY_BYTES / nodes.max(1);
    (per_node / POLICY_BYTES).clamp(MIN_ON_EVERY_NODE, MAX_CONTEXTS)
}

/// The policies for an agent that lists these actions. For every other one it restarts the
/// container, and keeps the maximum and the window.
fn supported_policies(
    policies: &[ContextPolicyEntry],
    listed: &[String],
) -> Vec<ContextPolicyEntry> {
    let mut policies = policies.to_vec();
    for policy in &mut policies {
        let action = policy.action;
        let is_listed = listed.iter().any(|one| one == action.as_str());
        if !is_listed && !UNLISTED_ACTIONS.contains(&action) {
            policy.action = ContextAction::Restart;
        }
    }
    policies
}

/// The policy of a namespace among `orders`, which are sorted by namespace.
fn policy_of<'a>(
    orders: &'a [ContextPolicyEntry],
    namespace: &str,
) -> Option<&'a ContextPolicyEntry> {
    let at = orders.binary_search_by(|one| one.namespace.as_str().cmp(namespace));
    at.ok().map(|at| &orders[at])
}

fn cohort_of(node: Option<&NodeSummary>) -> &str {
    let label = node.and_then(|node| node.cohort.as_deref());
    label.unwrap_or(DEFAULT_COHORT)
}

/// The namespaces that a changed GpuNode affects. `None` when it may affect all.
fn affected_namespaces<'a>(
    before: Option<&'a GpuNodeSummary>,
    now: Option<&'a GpuNodeSummary>,
) -> Option<BTreeSet<&'a str>> {
    let (before, now) = before.zip(now)?;
    let mut both = before.affected_namespaces()?;
    both.extend(now.affected_namespaces()?);
    (before.capacity == now.capacity).then_some(both)
}

fn namespaces_of<V>(changed: Vec<CacheEntry<V>>) -> BTreeSet<String> {
    changed.into_iter().map(|(key, _)| key.namespace).collect()
}

#[cfg(test)]
mod tests;
