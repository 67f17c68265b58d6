//! Applies watch events to the index.

use std::collections::BTreeSet;

use kube::runtime::watcher::Event;
use tokio::time::Instant;

use super::{Affected, ClusterIndex, WatchEvent, cohort_of};
use crate::cluster::aggregates::CohortMember;
use crate::cluster::cache::{CacheEntry, Key};
use crate::cluster::facts::node::NodeFacts;
use crate::cluster::facts::pod::PodSummary;
use crate::cluster::projections::GpuNodeSummary;

impl ClusterIndex {
    /// Applies one event. Returns the budgets that it may affect.
    pub fn apply(&mut self, change: WatchEvent) -> Affected {
        match change {
            WatchEvent::Budget(event) => {
                self.budget_lists += u64::from(matches!(event, Event::InitDone));
                let changed = self.budgets.apply(event);
                let mut all = false;
                for (key, before) in &changed {
                    let now = self.budgets.get(key);
                    all |= self.aggregates.update_budget(before.as_ref(), now);
                    let before = before.as_ref().map(|budget| &budget.overrides);
                    let differ = before != now.map(|budget| &budget.overrides);
                    self.placement_changes += usize::from(differ);
                }
                Affected {
                    all,
                    namespaces: namespaces_of(changed),
                }
            }
            WatchEvent::Pod(event) => {
                let mut affected = Affected::default();
                for (key, before) in self.pods.apply(event) {
                    let now = self.pods.get(&key);
                    self.aggregates.update_pod(&key, before.as_ref(), now);
                    for node in self.agents.update_pod(&key, before.as_ref(), now) {
                        let has_gpu_node = self.gpu_nodes.get(&node).is_some();
                        self.agents.observe(&node, has_gpu_node);
                    }
                    // The other requests matter only while a pod is pending, and then every
                    // interval plans anyway.
                    let facts = |pod: Option<&PodSummary>| pod?.facts.clone();
                    if facts(before.as_ref()) != facts(now) {
                        self.placement_changes += 1;
                        affected.namespaces.insert(key.namespace);
                    }
                }
                affected
            }
            WatchEvent::GpuNode(event) => self.apply_gpu_node(event),
            WatchEvent::GpuNamespace(event) => {
                self.gpu_namespaces.apply(event);
                Affected::default()
            }
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
            let now = self.gpu_nodes.get(&key);
            self.agents.observe(&key, now.is_some());
            self.placement_changes +=
                usize::from(before.as_ref().map(|node| &node.facts) != now.map(|node| &node.facts));
            match affected_namespaces(before.as_ref(), now) {
                Some(namespaces) => affected
                    .namespaces
                    .extend(namespaces.into_iter().map(str::to_owned)),
                None => affected.all = true,
            }
        }
        affected
    }

    /// A node's cohort affects every budget.
    fn apply_node(&mut self, event: Event<CacheEntry<NodeFacts>>) -> Affected {
        let mut affected = Affected::default();
        for (key, before) in self.nodes.apply(event) {
            self.placement_changes += 1;
            let gpus = self.gpu_nodes.get(&key).cloned();
            affected.all |= self.update_node(&key, gpus.as_ref(), before.as_ref());
            affected.all |= cohort_of(before.as_ref()) != cohort_of(self.nodes.get(&key));
        }
        affected
    }

    /// Nodes that count as dead from now on leave their cohorts, which affects every budget.
    fn advance_clock(&mut self, now: Instant) -> Affected {
        self.agents.advance_clock(now);
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
        node: Option<&NodeFacts>,
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
        let is_alive = gpus.is_none() || node.is_some_and(NodeFacts::is_alive);
        self.liveness.observe(key, is_alive);
        let is_dead = self.liveness.is_dead(key);
        self.aggregates
            .update_node(key, before, member(gpus, node, is_dead));
        was_dead && !is_dead
    }
}

/// The namespaces that a changed GpuNode affects. `None` when it may affect all.
fn affected_namespaces<'a>(
    before: Option<&'a GpuNodeSummary>,
    now: Option<&'a GpuNodeSummary>,
) -> Option<BTreeSet<&'a str>> {
    let (before, now) = before.zip(now)?;
    if !before.differs_for_budgets(now) {
        return Some(BTreeSet::new());
    }
    let mut both = before.affected_namespaces()?;
    both.extend(now.affected_namespaces()?);
    (before.capacity == now.capacity).then_some(both)
}

fn namespaces_of<V>(changed: Vec<CacheEntry<V>>) -> BTreeSet<String> {
    changed.into_iter().map(|(key, _)| key.namespace).collect()
}
