//! Decides which context policies have to be written to namespaces, and which restart requests and
//! drains to nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bursar_crds::conditions::gpu_node as names;
use bursar_crds::context_policy::{ContextAction, ContextPolicy};
use bursar_crds::gpu_node::{MAX_RESTARTS, RestartRequest};
use tokio::time::Instant;

use super::{ClusterIndex, kinds};
use crate::budget::{Remedy, action_of, remedy};
use crate::cluster::nvidia_labels::due_drain;
use crate::cluster::projections::{GpuNodeSummary, OpenFault};
use crate::cluster::ssa_diff::needs_apply;

/// An agent in a crash loop takes its condition back at each start, so it is reported again after
/// this time.
const REPORT_AGAIN: Duration = Duration::from_secs(600);

/// The write that a GpuNamespace needs.
#[derive(Clone, Debug, PartialEq)]
pub enum NamespaceWrite {
    /// The object needs this policy.
    Apply(ContextPolicy),
    /// The object with this UID says what no budget says.
    Delete(String),
}

impl ClusterIndex {
    /// The namespaces whose GpuNamespace has to be written, because it does not say what the budget
    /// says. None before a list of these objects: nothing else waits for it, because the CRD may be
    /// missing.
    pub fn outdated_namespaces(&self) -> Vec<(String, NamespaceWrite)> {
        if !self.gpu_namespaces.is_listed() {
            return Vec::new();
        }
        let policies = self.budgets.iter().filter_map(|(key, budget)| {
            Some((key.namespace.as_str(), budget.context_policy.as_ref()?))
        });
        let mut wanted: BTreeMap<&str, &ContextPolicy> = policies.collect();
        wanted.retain(|_, policy| **policy != ContextPolicy::default());
        let apply = |policy: &ContextPolicy| NamespaceWrite::Apply(policy.clone());
        let mut due = Vec::new();
        for (key, written) in self.gpu_namespaces.iter() {
            match wanted.remove(key.name.as_str()) {
                Some(policy) if written.context_policy.as_ref() == Some(policy) => {}
                Some(policy) => due.push((key.name.clone(), apply(policy))),
                // The budget may say the same in a later version's words.
                None if self.is_budget_unreadable(&key.name) => {}
                None => {
                    let delete = NamespaceWrite::Delete(written.uid.clone());
                    due.push((key.name.clone(), delete));
                }
            }
        }
        let missing = wanted.into_iter();
        due.extend(missing.map(|(name, policy)| (name.to_owned(), apply(policy))));
        due
    }

    fn is_budget_unreadable(&self, namespace: &str) -> bool {
        let budgets = self.unreadable.get(kinds::BUDGETS).into_iter();
        let mut there = budgets.flat_map(|budgets| budgets.in_namespace(namespace));
        there.next().is_some()
    }

    /// The nodes whose restart requests have to be written: name, UID and requests.
    ///
    /// `written` holds what the operator applied last, by UID. Drops the entries of deleted nodes.
    pub fn outdated_restarts(
        &self,
        written: &mut BTreeMap<String, Vec<RestartRequest>>,
    ) -> Vec<(String, String, Vec<RestartRequest>)> {
        self.forget_deleted_uids(written);
        let nodes = self.gpu_nodes.iter().filter(|(_, node)| node.is_readable());
        let nodes = nodes.filter_map(|(key, node)| {
            let due = self.restart_requests(node);
            let uid = &node.facts.uid;
            needs_apply(&node.restarts, &due, written.get(uid))
                .then(|| (key.name.clone(), uid.clone(), due))
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
