//! What budgets and nodes come to together, kept up with each change: a look at one budget reads no others.

use std::collections::{BTreeMap, BTreeSet};

use super::{Claim, Gpus, Key, LeftOut, Offer};
use crate::budget::Cohort;
use crate::cluster::pod_request::Demand;
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
    left_out: BTreeMap<String, LeftOut>,
    unknown: BTreeMap<String, &'static str>,
}

/// A node with GPUs, as a cohort counts it.
#[derive(Clone, Copy)]
pub(super) struct Member<'a> {
    pub(super) gpus: &'a Gpus,
    pub(super) cohort: &'a str,
    pub(super) is_dead: bool,
}

impl Member<'_> {
    /// What counts of its memory, or why nothing does; absent where it has none.
    fn share(&self) -> Option<Result<u128, LeftOut>> {
        Some(match self.gpus.offer.as_ref()? {
            Offer::LeftOut(why) => Err(why.clone()),
            Offer::Counted(_) if self.is_dead => Err(LeftOut::Dead),
            Offer::Counted(quanta) => Ok(exact(*quanta)),
        })
    }
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

    /// A node was `before` and is now.
    pub(super) fn node(&mut self, key: &Key, before: Option<Member<'_>>, now: Option<Member<'_>>) {
        if let Some(member) = before {
            self.change(member.cohort.to_owned(), |sum| match member.share() {
                None => {}
                Some(Ok(quanta)) => {
                    sum.nodes -= 1;
                    sum.allocatable -= quanta;
                }
                Some(Err(_)) => drop(sum.left_out.remove(&key.name)),
            });
            if member.gpus.unknown.is_some() {
                self.change(member.cohort.to_owned(), |sum| {
                    sum.unknown.remove(&key.name);
                });
            }
            for namespace in told_of(member.gpus) {
                if let Some(nodes) = self.saying.get_mut(namespace) {
                    nodes.remove(key);
                    if nodes.is_empty() {
                        self.saying.remove(namespace);
                    }
                }
            }
            self.faulty.remove(key);
        }
        if let Some(member) = now {
            self.change(member.cohort.to_owned(), |sum| match member.share() {
                None => {}
                Some(Ok(quanta)) => {
                    sum.nodes += 1;
                    sum.allocatable += quanta;
                }
                Some(Err(why)) => drop(sum.left_out.insert(key.name.clone(), why)),
            });
            if let Some(field) = member.gpus.unknown {
                self.change(member.cohort.to_owned(), |sum| {
                    sum.unknown.insert(key.name.clone(), field);
                });
            }
            for namespace in told_of(member.gpus) {
                let nodes = self.saying.entry(namespace.to_owned()).or_default();
                nodes.insert(key.clone());
            }
            if member.gpus.faults.iter().any(|open| !open.pods.is_empty()) {
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
        Cohort {
            guaranteed: counted(sum.guaranteed),
            nodes: sum.nodes,
            allocatable: counted(sum.allocatable),
            left_out: sum.left_out.clone().into_iter().collect(),
            unknown: sum
                .unknown
                .first_key_value()
                .map(|(node, field)| (node.clone(), *field)),
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
