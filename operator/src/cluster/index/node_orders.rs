//! Decides which context policies, restart requests and drains have to be written to nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bursar_crds::conditions::gpu_node as names;
use bursar_crds::context_policy::{ContextAction, ContextPolicy, ContextPolicyEntry};
use bursar_crds::gpu_node::{MAX_CONTEXTS, MAX_RESTARTS, RestartRequest};
use tokio::time::Instant;

use super::{ClusterIndex, NodeOrders};
use crate::budget::{Remedy, action_of, remedy};
use crate::cluster::nvidia_labels::due_drain;
use crate::cluster::projections::{GpuNodeSummary, OpenFault};
use crate::cluster::ssa_diff::needs_apply;

/// The bytes that all policies on all nodes may take. The API server stores the whole object at
/// each write of an agent.
const MAX_POLICY_BYTES: usize = 64 << 20;
/// The bytes of one context policy in a GpuNode, with its managed fields and a name of 20 letters.
pub(super) const POLICY_BYTES: usize = 256;
/// An agent in a crash loop takes its condition back at each start, so it is reported again after
/// this time.
const REPORT_AGAIN: Duration = Duration::from_secs(600);
/// The fewest policies that every node gets, in a cluster of any size.
const MIN_ON_EVERY_NODE: usize = 32;
/// The actions of agents of earlier versions, which list none.
const UNLISTED_ACTIONS: [ContextAction; 4] = [
    ContextAction::InPlace,
    ContextAction::Restart,
    ContextAction::Evict,
    ContextAction::Report,
];

impl ClusterIndex {
    /// The context policies by namespace, without those that equal the agents' default.
    pub(super) fn context_policies(&self) -> Vec<ContextPolicyEntry> {
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
            let idle = |entry: &ContextPolicyEntry| {
                policy_of(&orders, &entry.namespace) != Some(entry)
                    && policy_of(all, &entry.namespace) == Some(entry)
            };
            let differs = node.context_policies != *orders && {
                let current = node.context_policies.iter().filter(|entry| !idle(entry));
                needs_apply(&current.cloned().collect::<Vec<_>>(), &orders, contexts)
            };
            let differs = differs || needs_apply(&node.restarts, &due, restarts);
            differs.then(|| (key.name.clone(), node.facts.uid.clone(), (orders, due)))
        });
        nodes.collect()
    }

    /// Drops the entries of deleted GpuNodes from what was `applied`, by UID.
    pub(in crate::cluster) fn forget_deleted_uids<T>(&self, applied: &mut BTreeMap<String, T>) {
        let nodes = self.gpu_nodes.iter();
        let uids: BTreeSet<&String> = nodes.map(|(_, node)| &node.facts.uid).collect();
        applied.retain(|uid, _| uids.contains(uid));
    }

    /// The GpuNodes whose drain for NVIDIA's operators has to be written: name, UID and GPUs.
    ///
    /// `applied` holds what the operator applied last, by UID. Drops the entries of deleted nodes.
    pub(crate) fn due_drains(
        &self,
        applied: &mut BTreeMap<String, Vec<String>>,
    ) -> Vec<(String, String, Vec<String>)> {
        self.forget_deleted_uids(applied);
        let nodes = self.gpu_nodes.iter().filter(|(_, node)| node.is_readable());
        let due = nodes.filter_map(|(key, gpus)| {
            let maintenance = self.nodes.get(key)?.maintenance();
            let before = applied.get(&gpus.facts.uid);
            let drain = due_drain(maintenance, &gpus.gpus, &gpus.drain, before)?;
            Some((key.name.clone(), gpus.facts.uid.clone(), drain))
        });
        due.collect()
    }

    /// The GpuNodes to be reported as not Ready, because their agents have been away for too long:
    /// name and UID.
    ///
    /// `reported` has when each was, by UID. Drops those whose agents are back.
    pub(crate) fn unreported_absences(
        &self,
        reported: &mut BTreeMap<String, Instant>,
        now: Instant,
    ) -> Vec<(String, String)> {
        let away = self.agents.away();
        let away: Vec<_> = away
            .filter_map(|key| Some((key, self.gpu_nodes.get(key)?)))
            .filter(|(_, node)| node.is_readable())
            .collect();
        let uids: BTreeSet<&String> = away.iter().map(|(_, node)| &node.facts.uid).collect();
        reported.retain(|uid, _| uids.contains(uid));
        let is_unknown = |node: &GpuNodeSummary| {
            let mut conditions = node.conditions.iter();
            conditions.any(|(type_, status)| type_ == names::READY && status == "Unknown")
        };
        let is_due = |node: &GpuNodeSummary| {
            let last = reported.get(&node.facts.uid);
            last.is_none_or(|last| now.saturating_duration_since(*last) >= REPORT_AGAIN)
        };
        let due = away.into_iter();
        due.filter(|(_, node)| !is_unknown(node) && is_due(node))
            .map(|(key, node)| (key.name.clone(), node.facts.uid.clone()))
            .collect()
    }

    /// The policies of the namespaces that have pods on a node.
    pub(super) fn context_policies_of_pods_on(
        &self,
        node: &str,
        all: &[ContextPolicyEntry],
    ) -> Arc<Vec<ContextPolicyEntry>> {
        let namespaces = self.aggregates.namespaces_on(node);
        let namespaces = namespaces.filter_map(|namespace| policy_of(all, namespace));
        Arc::new(namespaces.take(MAX_CONTEXTS).cloned().collect())
    }

    /// The restart requests for faults that the agent left open and that today's policy restarts.
    pub(super) fn restart_requests(&self, node: &GpuNodeSummary) -> Vec<RestartRequest> {
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

    pub(super) fn context_action(&self, namespace: &str) -> ContextAction {
        let summary = self.budgets.in_namespace(namespace).next();
        let policy = summary.and_then(|(_, summary)| summary.context_policy.as_ref());
        action_of(policy, self.default_action)
    }
}

/// How many context policies every node of a cluster gets. If there are more, a node gets those of
/// its pods' namespaces.
pub(super) fn max_on_every_node(nodes: usize) -> usize {
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
    let at = orders.binary_search_by(|entry| entry.namespace.as_str().cmp(namespace));
    at.ok().map(|at| &orders[at])
}
