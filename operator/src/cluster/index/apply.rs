//! Applies watch events to the index.

use std::collections::BTreeSet;

use kube::runtime::watcher::Event;
use tokio::time::Instant;

use super::{Affected, ClusterIndex, WatchEvent, cohort_of};
use crate::cluster::aggregates::CohortMember;
use crate::cluster::cache::{CacheEntry, Key};
use crate::cluster::projections::{GpuNodeSummary, NodeSummary};

impl ClusterIndex {
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
            WatchEvent::PodOnNode(event) => {
                self.pods_on_nodes.apply(event);
                Affected::default()
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
