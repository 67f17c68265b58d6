//! Decides which nodes' agents have been away for so long that their GpuNodes are stale. Pure.

use std::collections::{BTreeMap, BTreeSet};

use tokio::time::Instant;

use super::Key;
use super::facts::pod::PodSummary;
use super::node_liveness::NodeLiveness;

/// The agents of all nodes.
#[derive(Debug, Default)]
pub(super) struct Agents {
    /// The agents' namespace. Without one the operator judges no agent.
    namespace: Option<String>,
    /// The Ready agents by node. A canary's DaemonSet may have one beside the other's.
    ready: BTreeMap<String, BTreeSet<Key>>,
    /// The nodes with a GpuNode and without a Ready agent.
    away: NodeLiveness,
}

impl Agents {
    /// The agents of a namespace. Pods of other namespaces may have any label.
    pub(super) fn of(namespace: Option<String>) -> Self {
        Self {
            namespace,
            ..Self::default()
        }
    }

    /// Replaces a pod. Returns the nodes whose agents may have changed.
    pub(super) fn update_pod(
        &mut self,
        key: &Key,
        before: Option<&PodSummary>,
        now: Option<&PodSummary>,
    ) -> BTreeSet<Key> {
        if self.namespace.as_ref() != Some(&key.namespace) {
            return BTreeSet::new();
        }
        let node = |pod: Option<&PodSummary>| {
            let pod = pod.filter(|pod| pod.is_ready_agent)?;
            pod.requests.node.clone()
        };
        let (before, now) = (node(before), node(now));
        if before == now {
            return BTreeSet::new();
        }
        if let Some(node) = &before
            && let Some(agents) = self.ready.get_mut(node)
        {
            agents.remove(key);
            if agents.is_empty() {
                self.ready.remove(node);
            }
        }
        if let Some(node) = &now {
            self.ready
                .entry(node.clone())
                .or_default()
                .insert(key.clone());
        }
        let nodes = before.iter().chain(&now);
        nodes.map(|node| Key::cluster_scoped(node)).collect()
    }

    /// Records whether a node has a GpuNode, after either changed.
    pub(super) fn observe(&mut self, node: &Key, has_gpu_node: bool) {
        if self.namespace.is_some() {
            let is_there = !has_gpu_node || self.ready.contains_key(&node.name);
            self.away.observe(node, is_there);
        }
    }

    /// Advances the clock.
    pub(super) fn advance_clock(&mut self, now: Instant) {
        self.away.advance_clock(now);
    }

    /// Whether any agent awaits its deadline.
    pub(super) fn have_deadlines(&self) -> bool {
        self.away.has_deadlines()
    }

    /// The nodes whose agents have been away for too long.
    pub(super) fn away(&self) -> impl Iterator<Item = &Key> {
        self.away.dead()
    }
}
