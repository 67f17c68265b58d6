//! Answers what concerns budgets and namespaces: their inputs, affected pods and cohorts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bursar_crds::DEFAULT_COHORT;
use bursar_crds::gpu_node::NamespaceUse;
use bursar_crds::resources::ENFORCED;

use super::{Affected, ClusterIndex, cohort_of, kinds};
use crate::budget::{AffectedPod, BudgetInputs, ObservedQuota, QuotaKind};
use crate::cluster::cache::Key;
use crate::cluster::facts::node::NodeFacts;
use crate::cluster::facts::pod::PodFacts;
use crate::cluster::on_node::on_node;
use crate::cluster::projections::{Capacity, OpenFault};
use crate::quanta::Quanta;

impl ClusterIndex {
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
        let pods = || self.requesting_pods(namespace);
        let label = self.labels.get(&Key::cluster_scoped(namespace));
        BudgetInputs {
            default_action: self.default_action,
            quantum: self.quantum,
            requested: pods().map(|(_, facts)| &**facts).collect(),
            pods: pods()
                .map(|(key, facts)| (key.name.clone(), Arc::clone(facts)))
                .collect(),
            refused_for: BTreeMap::new(),
            evictions_ineffective_for: BTreeMap::new(),
            exceeded_for: None,
            affected_pods: self.affected_pods(namespace),
            jobs_ignoring_disruption: BTreeMap::new(),
            reported: self.reported_usage(namespace).collect(),
            cohort: self.aggregates.cohort(cohort),
            guaranteed_quota: self.quota(namespace, QuotaKind::Guaranteed),
            limit_quota: self.quota(namespace, QuotaKind::Limit),
            failed_step: None,
            is_labelled: label.is_some_and(|label| label == ENFORCED),
        }
    }

    pub(super) fn quota(&self, namespace: &str, kind: QuotaKind) -> Option<ObservedQuota> {
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
    pub(super) fn has_budget_in(&self, namespace: &str) -> bool {
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

    /// The pods of a namespace that request GPU memory.
    fn requesting_pods<'a>(
        &'a self,
        namespace: &'a str,
    ) -> impl Iterator<Item = (&'a Key, &'a Arc<PodFacts>)> {
        let pods = self.pods.in_namespace(namespace);
        pods.filter_map(|(key, pod)| Some((key, pod.facts.as_ref()?)))
    }

    /// The pods of a namespace that a fault affects.
    pub(super) fn affected_pods(&self, namespace: &str) -> Vec<AffectedPod> {
        let mut affected_pods = Vec::new();
        let nodes = self.aggregates.nodes_affecting(namespace).into_iter();
        let nodes = nodes.filter_map(|key| Some((&key.name, self.gpu_nodes.get(key)?)));
        let faults =
            nodes.flat_map(|(node, gpus)| gpus.faults.iter().map(move |fault| (node, fault)));
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
            let pods_affected = self.requesting_pods(namespace);
            let pods_affected = pods_affected.filter(|(_, facts)| uids.contains(&facts.api_uid));
            affected_pods.extend(pods_affected.filter_map(|(key, facts)| {
                Some(AffectedPod {
                    pod: key.name.clone(),
                    request: on_node(node, Arc::clone(facts))?,
                    fault: fault.clone(),
                    observed_for: Duration::ZERO,
                })
            }));
        }
        affected_pods
    }

    /// The nodes' reports about a namespace, each with whether a pod of the namespace is on the
    /// node.
    pub(super) fn reported_usage(
        &self,
        namespace: &str,
    ) -> impl Iterator<Item = (&NamespaceUse, bool)> {
        let nodes = self.aggregates.nodes_reporting(namespace);
        let uses = nodes.flat_map(move |key| {
            let is_there = self.aggregates.has_pods_on(&key.name, namespace);
            let uses = self.gpu_nodes.get(key).map(|node| node.namespaces.iter());
            uses.into_iter()
                .flatten()
                .map(move |usage| (usage, is_there))
        });
        uses.filter(move |(usage, _)| usage.namespace == namespace)
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
            let is_alive = node.is_some_and(NodeFacts::is_alive);
            if is_alive && matches!(gpus.capacity, Some(Capacity::Counted(_))) {
                let of_cohort = largest.entry(cohort_of(node)).or_default();
                *of_cohort = gpus.largest_free.bytes(self.quantum).max(*of_cohort);
            }
        }
        largest
    }
}
