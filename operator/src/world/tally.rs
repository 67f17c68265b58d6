//! What budgets and nodes come to together, kept up with each change: a look at one budget reads no others.

use std::collections::{BTreeMap, BTreeSet};

use super::{Claim, Cohort, Gpus, Key, Offer};
use crate::demand::Demand;
use crate::quanta::Quanta;

/// It.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    cohorts: BTreeMap<String, Sum>,
    /// The nodes that say something of a namespace.
    saying: BTreeMap<String, BTreeSet<Key>>,
    /// The nodes with a GPU at fault: that may concern any namespace.
    faulty: BTreeSet<Key>,
    /// How many pods of each namespace are on each node.
    placed: BTreeMap<String, BTreeMap<String, usize>>,
}

/// A cohort. Sums are exact: what is taken off again must be what was added.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Sum {
    budgets: usize,
    guaranteed: u128,
    nodes: usize,
    allocatable: u128,
    other_quantum: BTreeMap<String, String>,
}

impl Tally {
    /// A budget was `before` and is now. Whether that concerns others.
    pub(super) fn budget(&mut self, before: Option<&Claim>, now: Option<&Claim>) -> bool {
        let share = |claim: &Claim| (claim.cohort.clone(), claim.guaranteed);
        let (before, now) = (before.map(share), now.map(share));
        if before == now {
            return false;
        }
        if let Some((cohort, guaranteed)) = before {
            self.change(cohort, |sum| {
                sum.budgets -= 1;
                sum.guaranteed -= exact(guaranteed);
            });
        }
        if let Some((cohort, guaranteed)) = now {
            self.change(cohort, |sum| {
                sum.budgets += 1;
                sum.guaranteed += exact(guaranteed);
            });
        }
        true
    }

    /// A node was `before` and is now, each with its cohort.
    pub(super) fn node(
        &mut self,
        key: &Key,
        before: Option<(&Gpus, &str)>,
        now: Option<(&Gpus, &str)>,
    ) {
        if let Some((gpus, cohort)) = before {
            self.change(cohort.to_owned(), |sum| match &gpus.offer {
                None => {}
                Some(Offer::Counted(quanta)) => {
                    sum.nodes -= 1;
                    sum.allocatable -= exact(*quanta);
                }
                Some(Offer::OtherQuantum(_)) => drop(sum.other_quantum.remove(&key.name)),
            });
            for namespace in told_of(gpus) {
                if let Some(nodes) = self.saying.get_mut(namespace) {
                    nodes.remove(key);
                    if nodes.is_empty() {
                        self.saying.remove(namespace);
                    }
                }
            }
            self.faulty.remove(key);
        }
        if let Some((gpus, cohort)) = now {
            self.change(cohort.to_owned(), |sum| match &gpus.offer {
                None => {}
                Some(Offer::Counted(quanta)) => {
                    sum.nodes += 1;
                    sum.allocatable += exact(*quanta);
                }
                Some(Offer::OtherQuantum(size)) => {
                    sum.other_quantum.insert(key.name.clone(), size.clone());
                }
            });
            for namespace in told_of(gpus) {
                let nodes = self.saying.entry(namespace.to_owned()).or_default();
                nodes.insert(key.clone());
            }
            if gpus.faults.iter().any(|open| !open.pods.is_empty()) {
                self.faulty.insert(key.clone());
            }
        }
    }

    /// A pod of a namespace was `before` and is now.
    pub(super) fn pod(&mut self, namespace: &str, before: Option<&Demand>, now: Option<&Demand>) {
        let node = |demand: Option<&Demand>| demand.and_then(|demand| demand.node.clone());
        let (before, now) = (node(before), node(now));
        if before == now {
            return;
        }
        if let Some(node) = before
            && let Some(here) = self.placed.get_mut(&node)
        {
            if let Some(pods) = here.get_mut(namespace) {
                *pods -= 1;
            }
            here.retain(|_, pods| *pods > 0);
            if here.is_empty() {
                self.placed.remove(&node);
            }
        }
        if let Some(node) = now {
            let here = self.placed.entry(node).or_default();
            *here.entry(namespace.to_owned()).or_default() += 1;
        }
    }

    fn change(&mut self, cohort: String, how: impl FnOnce(&mut Sum)) {
        let sum = self.cohorts.entry(cohort.clone()).or_default();
        how(sum);
        if *sum == Sum::default() {
            self.cohorts.remove(&cohort);
        }
    }

    /// A cohort.
    pub(super) fn cohort(&self, name: &str) -> Cohort {
        let Some(sum) = self.cohorts.get(name) else {
            return Cohort::default();
        };
        let counted = |sum| Quanta::new(u64::try_from(sum).unwrap_or(u64::MAX));
        let other_quantum = sum.other_quantum.iter();
        Cohort {
            guaranteed: counted(sum.guaranteed),
            nodes: sum.nodes,
            allocatable: counted(sum.allocatable),
            other_quantum: other_quantum
                .map(|(node, size)| (node.clone(), size.clone()))
                .collect(),
        }
    }

    /// All cohorts.
    pub(super) fn cohorts(&self) -> impl Iterator<Item = (&str, Cohort)> {
        let names = self.cohorts.keys().map(String::as_str);
        names.map(|name| (name, self.cohort(name)))
    }

    /// The namespaces that have pods on a node, in order.
    pub(super) fn placed(&self, node: &str) -> impl Iterator<Item = &str> {
        let here = self.placed.get(node).into_iter().flatten();
        here.map(|(namespace, _)| namespace.as_str())
    }

    /// Whether a namespace has pods on a node.
    pub(super) fn is_placed(&self, node: &str, namespace: &str) -> bool {
        let here = self.placed.get(node);
        here.is_some_and(|here| here.contains_key(namespace))
    }

    /// The nodes that say something of a namespace.
    pub(super) fn saying(&self, namespace: &str) -> impl Iterator<Item = &Key> {
        self.saying.get(namespace).into_iter().flatten()
    }

    /// Those on which its pods may suffer from a fault, in order.
    pub(super) fn suffering(&self, namespace: &str) -> BTreeSet<&Key> {
        self.saying(namespace).chain(&self.faulty).collect()
    }
}

/// The namespaces of which a node says something.
fn told_of(gpus: &Gpus) -> impl Iterator<Item = &str> {
    let uses = gpus.namespaces.iter().map(|one| one.namespace.as_str());
    let faults = gpus.faults.iter();
    let faults = faults.filter_map(|open| open.fault.container.as_ref());
    uses.chain(faults.map(|container| container.namespace.as_str()))
}

fn exact(quanta: Quanta) -> u128 {
    u128::from(quanta.count().unsigned_abs())
}
