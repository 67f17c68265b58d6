//! What budgets and nodes come to together, kept up with each change: a look at one budget reads no others.

use std::collections::{BTreeMap, BTreeSet};

use super::{Claim, Cohort, Gpus, Key, Offer};
use crate::quanta::Quanta;

/// It.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    cohorts: BTreeMap<String, Sum>,
    /// The nodes that say something of a namespace.
    saying: BTreeMap<String, BTreeSet<Key>>,
    /// The nodes with a GPU at fault: that may concern any namespace.
    faulty: BTreeSet<Key>,
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
