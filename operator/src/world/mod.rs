//! What the operator knows of the cluster: a pure index over what its watches tell.

mod entries;
mod facts;
mod mirror;

use std::collections::{BTreeMap, BTreeSet};

use bursar_crds::budget::ContextPolicy;
use bursar_crds::gpu_node::{ContextOrder, MAX_CONTEXTS};
use bursar_crds::{DEFAULT_COHORT, Quantum};
use kube::runtime::watcher::Event;

pub use entries::{Claim, Gpus, Offer, budget_label, cohort_label};
pub use facts::{Cohort, Facts, Usage};
pub use mirror::{Entry, Key, Mirror, slimmed};

use crate::budget::{Quota, Which, is_enforced};
use crate::demand::Demand;
use crate::placement::{Landscape, Told};
use crate::quanta::Quanta;

/// What is watched, as probes, logs and metrics call it.
pub mod kinds {
    /// What namespaces may use.
    pub const BUDGETS: &str = "GpuMemoryBudgets";
    /// What asks.
    pub const PODS: &str = "Pods";
    /// What there is.
    pub const GPU_NODES: &str = "GpuNodes";
    /// Which cohort it belongs to.
    pub const NODES: &str = "Nodes";
    /// What refuses pods.
    pub const QUOTAS: &str = "ResourceQuotas";
    /// Which namespaces are labelled.
    pub const NAMESPACES: &str = "Namespaces";
    /// All of them.
    pub const ALL: [&str; 6] = [BUDGETS, PODS, GPU_NODES, NODES, QUOTAS, NAMESPACES];
}

/// One event of one watch.
#[derive(Debug)]
pub enum Change {
    /// Of the budgets.
    Budget(Event<Entry<Claim>>),
    /// Of the pods.
    Pod(Event<Entry<Demand>>),
    /// Of the nodes' GPUs.
    GpuNode(Event<Entry<Gpus>>),
    /// Of the nodes that have a cohort label.
    Node(Event<Entry<String>>),
    /// Of the operator's quotas.
    Quota(Event<Entry<Quota>>),
    /// Of the namespaces that are labelled as having a budget.
    Namespace(Event<Entry<String>>),
    /// What placement is told of the same.
    Placement(Told),
}

/// The budgets whose status may have changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dirty {
    all: bool,
    namespaces: BTreeSet<String>,
}

impl Dirty {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        !self.all && self.namespaces.is_empty()
    }

    /// Adds those of `other`.
    pub fn add(&mut self, other: Self) {
        let Self { all, namespaces } = other;
        self.all |= all;
        self.namespaces.extend(namespaces);
    }
}

/// Everything that is known.
#[derive(Debug)]
pub struct World {
    quantum: Quantum,
    budgets: Mirror<Claim>,
    pods: Mirror<Demand>,
    gpu_nodes: Mirror<Gpus>,
    cohorts: Mirror<String>,
    quotas: Mirror<Quota>,
    labels: Mirror<String>,
    landscape: Landscape,
}

impl World {
    /// Nothing is known yet.
    pub fn new(quantum: Quantum) -> Self {
        Self {
            quantum,
            budgets: Mirror::default(),
            pods: Mirror::default(),
            gpu_nodes: Mirror::default(),
            cohorts: Mirror::default(),
            quotas: Mirror::default(),
            labels: Mirror::default(),
            landscape: Landscape::default(),
        }
    }

    /// Takes in one event and says which budgets it may concern.
    pub fn apply(&mut self, change: Change) -> Dirty {
        match change {
            Change::Budget(event) => {
                let before = self.guarantees();
                let changed = self.budgets.apply(event);
                Dirty {
                    all: !changed.is_empty() && self.guarantees() != before,
                    namespaces: namespaces(changed),
                }
            }
            Change::Pod(event) => Dirty {
                all: false,
                namespaces: namespaces(self.pods.apply(event)),
            },
            Change::GpuNode(event) => everything(&self.gpu_nodes.apply(event)),
            Change::Node(event) => everything(&self.cohorts.apply(event)),
            Change::Quota(event) => Dirty {
                all: false,
                namespaces: namespaces(self.quotas.apply(event)),
            },
            Change::Namespace(event) => {
                let changed = self.labels.apply(event);
                Dirty {
                    all: false,
                    namespaces: changed.into_iter().map(|key| key.name).collect(),
                }
            }
            Change::Placement(told) => {
                self.landscape.apply(told);
                Dirty::default()
            }
        }
    }

    /// What placement knows.
    pub fn landscape(&self) -> &Landscape {
        &self.landscape
    }

    /// The kinds that have not been listed yet. A status is computed only when there are none.
    pub fn missing(&self) -> Vec<&'static str> {
        let all = [
            (kinds::BUDGETS, self.budgets.is_listed()),
            (kinds::PODS, self.pods.is_listed()),
            (kinds::GPU_NODES, self.gpu_nodes.is_listed()),
            (kinds::NODES, self.cohorts.is_listed()),
            (kinds::QUOTAS, self.quotas.is_listed()),
            (kinds::NAMESPACES, self.labels.is_listed()),
        ];
        let missing = all.into_iter().filter(|(_, listed)| !listed);
        missing.map(|(kind, _)| kind).collect()
    }

    /// The budgets that `dirty` means, as far as they exist.
    pub fn budgets(&self, dirty: &Dirty) -> Vec<Key> {
        let concerned = |key: &&Key| dirty.all || dirty.namespaces.contains(&key.namespace);
        self.budgets
            .iter()
            .map(|(key, _)| key)
            .filter(concerned)
            .cloned()
            .collect()
    }

    /// Whether there is a budget called `key`.
    pub fn has_budget(&self, key: &Key) -> bool {
        self.budgets.get(key).is_some()
    }

    /// What the status of the budget of `namespace` is computed from, with the budget in `cohort`.
    pub fn facts(&self, namespace: &str, cohort: &str) -> Facts {
        let pods = || self.pods.within(namespace);
        let label = self.labels.get(&Key::cluster_scoped(namespace));
        Facts {
            quantum: self.quantum,
            usage: pods().map(|(_, demand)| demand).collect(),
            pods: pods()
                .map(|(key, demand)| (key.name.clone(), demand.clone()))
                .collect(),
            cohort: self.cohort(cohort),
            guaranteed_quota: self.quota(namespace, Which::Guaranteed),
            limit_quota: self.quota(namespace, Which::Limit),
            labelled: label.is_some_and(|label| is_enforced(label)),
        }
    }

    fn quota(&self, namespace: &str, which: Which) -> Option<Quota> {
        let key = Key {
            namespace: namespace.to_owned(),
            name: which.name().to_owned(),
        };
        self.quotas.get(&key).cloned()
    }

    /// The namespaces that are labelled as having a budget and have none. None is named before all is known.
    pub fn deserted(&self) -> Vec<String> {
        if !self.missing().is_empty() {
            return Vec::new();
        }
        let labelled = self.labels.iter().map(|(key, _)| &key.name);
        labelled
            .filter(|namespace| self.budgets.within(namespace).next().is_none())
            .cloned()
            .collect()
    }

    /// What is to be done about poisoned contexts, by namespace; of namespaces where it is what an agent does unasked
    /// there is nothing.
    pub fn contexts(&self) -> Vec<ContextOrder> {
        let claims = self.budgets.iter();
        let claims = claims.filter(|(_, claim)| claim.contexts != ContextPolicy::default());
        let orders = claims.map(|(key, claim)| ContextOrder {
            namespace: key.namespace.clone(),
            action: claim.contexts.action,
            max_restarts: claim.contexts.max_restarts,
            window_seconds: claim.contexts.window_seconds,
        });
        orders.take(MAX_CONTEXTS).collect()
    }

    /// The nodes that have other orders about poisoned contexts than these, with their objects' UIDs.
    pub fn nodes_without(&self, contexts: &[ContextOrder]) -> Vec<(String, String)> {
        let others = self.gpu_nodes.iter();
        let others = others.filter(|(_, node)| node.contexts != contexts);
        others
            .map(|(key, node)| (key.name.clone(), node.uid.clone()))
            .collect()
    }

    fn cohort(&self, name: &str) -> Cohort {
        let mut cohort = Cohort::default();
        for (_, claim) in self
            .budgets
            .iter()
            .filter(|(_, claim)| claim.cohort == name)
        {
            cohort.budgets += 1;
            cohort.guaranteed = cohort.guaranteed.plus(claim.guaranteed);
        }
        for (node, Gpus { offer, .. }) in self.gpu_nodes.iter() {
            if self
                .cohorts
                .get(node)
                .map_or(DEFAULT_COHORT, String::as_str)
                != name
            {
                continue;
            }
            match offer {
                None => {}
                Some(Offer::Counted(quanta)) => {
                    cohort.nodes += 1;
                    cohort.allocatable = cohort.allocatable.plus(*quanta);
                }
                Some(Offer::OtherQuantum(size)) => {
                    cohort.other_quantum.push((node.name.clone(), size.clone()));
                }
            }
        }
        cohort
    }

    /// Each cohort's budgets and what they guarantee together.
    fn guarantees(&self) -> BTreeMap<String, (usize, Quanta)> {
        let mut sums = BTreeMap::new();
        for (_, claim) in self.budgets.iter() {
            let (budgets, guaranteed) = sums
                .entry(claim.cohort.clone())
                .or_insert((0, Quanta::ZERO));
            *budgets += 1;
            *guaranteed = guaranteed.plus(claim.guaranteed);
        }
        sums
    }
}

fn namespaces(keys: Vec<Key>) -> BTreeSet<String> {
    keys.into_iter().map(|key| key.namespace).collect()
}

fn everything(changed: &[Key]) -> Dirty {
    Dirty {
        all: !changed.is_empty(),
        namespaces: BTreeSet::new(),
    }
}

#[cfg(test)]
mod tests;
