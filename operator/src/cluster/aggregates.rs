//! Aggregates over budgets and nodes, updated incrementally.
//!
//! A reconcile of one budget therefore reads no other budget.

use std::collections::{BTreeMap, BTreeSet};

use rpds::RedBlackTreeSetSync;

use super::{BudgetSummary, Capacity, ExclusionReason, GpuNodeSummary, Key};
use crate::budget::Cohort;
use crate::cluster::facts::node_usage::NodeRequested;
use crate::cluster::facts::pod::PodSummary;
use crate::quanta::Quanta;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Aggregates {
    cohorts: BTreeMap<String, CohortTotals>,
    /// The nodes that report on each namespace.
    reporters: BTreeMap<String, BTreeSet<Key>>,
    /// The nodes with a GPU fault. Such a fault may affect any namespace.
    nodes_with_gpu_faults: BTreeSet<Key>,
    /// The pods that request a resource of Bursar.
    pub(super) gpu_pods: RedBlackTreeSetSync<Key>,
    /// The sums of all pods' requests by node.
    pub(super) node_requested: NodeRequested,
    /// The number of pods that request GPU memory, by node and namespace.
    pods_by_node: BTreeMap<String, BTreeMap<String, usize>>,
}

/// Totals of one cohort. They are exact, so that subtraction restores the earlier value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct CohortTotals {
    budgets: usize,
    guaranteed: u128,
    nodes: usize,
    allocatable: u128,
    excluded: BTreeMap<String, ExclusionReason>,
    unknown_fields: BTreeMap<String, &'static str>,
}

/// A node with GPUs as a member of its cohort.
#[derive(Clone, Copy)]
pub(super) struct CohortMember<'a> {
    pub(super) gpus: &'a GpuNodeSummary,
    pub(super) cohort: &'a str,
    pub(super) is_dead: bool,
}

impl CohortMember<'_> {
    /// The quanta that count, or why none do. `None` when the node has no memory to give.
    fn contribution(&self) -> Option<Result<u128, ExclusionReason>> {
        Some(match self.gpus.capacity.as_ref()? {
            Capacity::Excluded(reason) => Err(reason.clone()),
            Capacity::Counted(_) if self.is_dead => Err(ExclusionReason::Dead),
            Capacity::Counted(quanta) => Ok(as_u128(*quanta)),
        })
    }
}

impl Aggregates {
    /// Replaces a budget. Returns whether other budgets are affected.
    pub(super) fn update_budget(
        &mut self,
        before: Option<&BudgetSummary>,
        now: Option<&BudgetSummary>,
    ) -> bool {
        let share = |summary: &BudgetSummary| (summary.cohort.clone(), summary.guaranteed);
        let (before, now) = (before.map(share), now.map(share));
        if before == now {
            return false;
        }
        if let Some((cohort, guaranteed)) = before {
            self.update_cohort(cohort, |sum| {
                sum.budgets -= 1;
                sum.guaranteed -= as_u128(guaranteed);
            });
        }
        if let Some((cohort, guaranteed)) = now {
            self.update_cohort(cohort, |sum| {
                sum.budgets += 1;
                sum.guaranteed += as_u128(guaranteed);
            });
        }
        true
    }

    /// Replaces a node.
    pub(super) fn update_node(
        &mut self,
        key: &Key,
        before: Option<CohortMember<'_>>,
        now: Option<CohortMember<'_>>,
    ) {
        if let Some(member) = before {
            self.update_cohort(member.cohort.to_owned(), |sum| {
                match member.contribution() {
                    None => {}
                    Some(Ok(quanta)) => {
                        sum.nodes -= 1;
                        sum.allocatable -= quanta;
                    }
                    Some(Err(_)) => drop(sum.excluded.remove(&key.name)),
                }
            });
            if member.gpus.unknown_field.is_some() {
                self.update_cohort(member.cohort.to_owned(), |sum| {
                    sum.unknown_fields.remove(&key.name);
                });
            }
            for namespace in namespaces_reported(member.gpus) {
                if let Some(nodes) = self.reporters.get_mut(namespace) {
                    nodes.remove(key);
                    if nodes.is_empty() {
                        self.reporters.remove(namespace);
                    }
                }
            }
            self.nodes_with_gpu_faults.remove(key);
        }
        if let Some(member) = now {
            self.update_cohort(member.cohort.to_owned(), |sum| {
                match member.contribution() {
                    None => {}
                    Some(Ok(quanta)) => {
                        sum.nodes += 1;
                        sum.allocatable += quanta;
                    }
                    Some(Err(reason)) => drop(sum.excluded.insert(key.name.clone(), reason)),
                }
            });
            if let Some(field) = member.gpus.unknown_field {
                self.update_cohort(member.cohort.to_owned(), |sum| {
                    sum.unknown_fields.insert(key.name.clone(), field);
                });
            }
            for namespace in namespaces_reported(member.gpus) {
                let nodes = self.reporters.entry(namespace.to_owned()).or_default();
                nodes.insert(key.clone());
            }
            if member.gpus.faults.iter().any(|open| !open.pods.is_empty()) {
                self.nodes_with_gpu_faults.insert(key.clone());
            }
        }
    }

    /// Replaces a pod.
    pub(super) fn update_pod(
        &mut self,
        key: &Key,
        before: Option<&PodSummary>,
        now: Option<&PodSummary>,
    ) {
        let was = self.gpu_pods.contains(key);
        match now.is_some_and(PodSummary::requests_gpu_memory) {
            is if is == was => {}
            true => self.gpu_pods.insert_mut(key.clone()),
            false => drop(self.gpu_pods.remove_mut(key)),
        }
        self.node_requested.update(
            before.map(|pod| &pod.requests),
            now.map(|pod| &pod.requests),
        );
        let namespace = &key.namespace;
        let node = |pod: Option<&PodSummary>| Some(pod?.facts.as_ref()?.node()?.to_owned());
        let (before, now) = (node(before), node(now));
        if before == now {
            return;
        }
        if let Some(node) = before
            && let Some(namespaces) = self.pods_by_node.get_mut(&node)
        {
            if let Some(pods) = namespaces.get_mut(namespace) {
                *pods -= 1;
            }
            namespaces.retain(|_, pods| *pods > 0);
            if namespaces.is_empty() {
                self.pods_by_node.remove(&node);
            }
        }
        if let Some(node) = now {
            let namespaces = self.pods_by_node.entry(node).or_default();
            *namespaces.entry(namespace.clone()).or_default() += 1;
        }
    }

    fn update_cohort(&mut self, cohort: String, how: impl FnOnce(&mut CohortTotals)) {
        let sum = self.cohorts.entry(cohort.clone()).or_default();
        how(sum);
        if *sum == CohortTotals::default() {
            self.cohorts.remove(&cohort);
        }
    }

    pub(super) fn cohort(&self, name: &str) -> Cohort {
        let Some(sum) = self.cohorts.get(name) else {
            return Cohort::default();
        };
        let counted = |sum| Quanta::new(u64::try_from(sum).unwrap_or(u64::MAX));
        Cohort {
            budgets: sum.budgets,
            guaranteed: counted(sum.guaranteed),
            nodes: sum.nodes,
            allocatable: counted(sum.allocatable),
            excluded: sum.excluded.clone().into_iter().collect(),
            unknown_field: sum
                .unknown_fields
                .first_key_value()
                .map(|(node, field)| (node.clone(), *field)),
        }
    }

    pub(super) fn cohorts(&self) -> impl Iterator<Item = (&str, Cohort)> {
        let names = self.cohorts.keys().map(String::as_str);
        names.map(|name| (name, self.cohort(name)))
    }

    /// The namespaces that have pods on a node, sorted.
    pub(super) fn namespaces_on(&self, node: &str) -> impl Iterator<Item = &str> {
        let namespaces = self.pods_by_node.get(node).into_iter().flatten();
        namespaces.map(|(namespace, _)| namespace.as_str())
    }

    pub(super) fn has_pods_on(&self, node: &str, namespace: &str) -> bool {
        let namespaces = self.pods_by_node.get(node);
        namespaces.is_some_and(|namespaces| namespaces.contains_key(namespace))
    }

    /// The nodes that report on a namespace.
    pub(super) fn nodes_reporting(&self, namespace: &str) -> impl Iterator<Item = &Key> {
        self.reporters.get(namespace).into_iter().flatten()
    }

    /// The nodes whose faults may affect pods of a namespace, sorted.
    pub(super) fn nodes_affecting(&self, namespace: &str) -> BTreeSet<&Key> {
        self.nodes_reporting(namespace)
            .chain(&self.nodes_with_gpu_faults)
            .collect()
    }
}

fn namespaces_reported(gpus: &GpuNodeSummary) -> impl Iterator<Item = &str> {
    let uses = gpus.namespaces.iter().map(|usage| usage.namespace.as_str());
    let faults = gpus.faults.iter();
    let faults = faults.filter_map(|open| open.fault.container.as_ref());
    uses.chain(faults.map(|container| container.namespace.as_str()))
}

fn as_u128(quanta: Quanta) -> u128 {
    u128::from(quanta.count().unsigned_abs())
}
