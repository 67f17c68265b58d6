//! Pods, nodes, their GPUs and the overrides of budgets, indexed.

use std::collections::BTreeMap;

use bursar_crds::{Amount, GpuMemoryBudget};
use kube::runtime::watcher::Event;

use super::node::{Gpu, GpuFacts, Local, NodeFacts};
use super::node_usage::{Load, Taken};
use super::pod::{Owner, PodFacts};
use crate::cluster::{Entry, Key, Mirror};
use crate::quanta::Quanta;

/// One event of one watch.
#[derive(Debug)]
pub enum Told {
    /// Of the pods that ask for device memory.
    Pod(Event<Entry<PodFacts>>),
    /// Of all pods.
    Load(Event<Entry<Load>>),
    /// Of the nodes.
    Node(Event<Entry<NodeFacts>>),
    /// Of the nodes' GPUs.
    Gpus(Event<Entry<GpuFacts>>),
    /// Of the budgets that lower pods' quotas.
    Lowered(Event<Entry<Lowered>>),
}

/// The pods, by name, whose quotas a budget lowers.
pub type Lowered = BTreeMap<String, Amount>;

/// What `budget` lowers; none where it lowers nothing.
pub fn lowered(budget: &GpuMemoryBudget) -> Option<Lowered> {
    let overrides = budget.spec.overrides.iter();
    let lowered: Lowered = overrides
        .map(|lowered| (lowered.pod.clone(), lowered.device_memory.clone()))
        .collect();
    (!lowered.is_empty()).then_some(lowered)
}

/// Everything that placement knows.
#[derive(Debug, Default)]
pub struct Landscape {
    pods: Mirror<PodFacts>,
    loads: Mirror<Load>,
    taken: Taken,
    nodes: Mirror<NodeFacts>,
    gpu_nodes: Mirror<GpuFacts>,
    lowered: Mirror<Lowered>,
    changes: usize,
}

impl Landscape {
    /// Takes in one event.
    pub fn apply(&mut self, told: Told) {
        self.changes += match told {
            Told::Pod(event) => self.pods.apply(event).len(),
            Told::Load(event) => {
                for (pod, was) in self.loads.apply(event) {
                    self.taken.change(was.as_ref(), self.loads.get(&pod));
                }
                // They matter while somebody waits, and then it is planned anyway.
                0
            }
            Told::Node(event) => self.nodes.apply(event).len(),
            Told::Gpus(event) => self.gpu_nodes.apply(event).len(),
            Told::Lowered(event) => self.lowered.apply(event).len(),
        };
    }

    /// How often it has changed: where that is the same, so is all of it.
    pub(super) fn changes(&self) -> usize {
        self.changes
    }

    /// It as plans look at it.
    pub(super) fn scene(&self) -> Scene<'_> {
        let mut asked: BTreeMap<&str, Quanta> = BTreeMap::new();
        for (_, pod) in self.pods.iter() {
            if let Some(node) = pod.node() {
                let sum = asked.entry(node).or_default();
                *sum = sum.plus(pod.asks);
            }
        }
        let mut pods = BTreeMap::new();
        // A static pod's mirror goes by a UID that its annotation says: it stands in for no other
        // pod.
        let (mirrors, others): (Vec<_>, Vec<_>) = self
            .pods
            .iter()
            .partition(|(_, pod)| pod.owner == Owner::Node);
        for (key, pod) in others.into_iter().chain(mirrors) {
            pods.entry(pod.uid.as_str()).or_insert((key, pod));
        }
        Scene {
            nodes: self
                .nodes
                .iter()
                .map(|(key, node)| (key.name.as_str(), node))
                .collect(),
            gpu_nodes: self
                .gpu_nodes
                .iter()
                .map(|(key, said)| (key.name.as_str(), Local::of(&key.name, said, &pods)))
                .collect(),
            pods,
            lowered: self.lowered.iter().collect(),
            asked,
            loads: &self.loads,
            taken: &self.taken,
        }
    }
}

/// The landscape by what plans look things up by.
pub(super) struct Scene<'a> {
    /// Pods by UID.
    pub(super) pods: BTreeMap<&'a str, (&'a Key, &'a PodFacts)>,
    /// Nodes by name.
    pub(super) nodes: BTreeMap<&'a str, &'a NodeFacts>,
    /// Nodes' GPUs, by the node's name.
    pub(super) gpu_nodes: BTreeMap<&'a str, Local<'a>>,
    /// What budgets lower.
    pub(super) lowered: Vec<(&'a Key, &'a Lowered)>,
    /// What the pods on a node ask for in all.
    asked: BTreeMap<&'a str, Quanta>,
    loads: &'a Mirror<Load>,
    taken: &'a Taken,
}

impl<'a> Scene<'a> {
    /// A pod by its UID.
    pub(super) fn pod(&self, uid: &str) -> Option<&'a PodFacts> {
        self.pods.get(uid).map(|(_, pod)| *pod)
    }

    /// A GPU.
    pub(super) fn gpu(&self, node: &str, uuid: &str) -> Option<&Gpu> {
        let gpus = &self.gpu_nodes.get(node)?.gpus;
        gpus.iter().find(|gpu| gpu.uuid == uuid)
    }

    /// What of a node's memory no pod on it asks for: what the scheduler can still give.
    pub(super) fn unasked(&self, node: &str) -> Quanta {
        let all = self
            .nodes
            .get(node)
            .map_or(Quanta::ZERO, |node| node.allocatable);
        all.minus(self.asked.get(node).copied().unwrap_or_default())
    }

    /// What a pod takes of its node.
    pub(super) fn load(&self, pod: &Key) -> Option<&'a Load> {
        self.loads.get(pod)
    }

    /// Whether a node has what a pod asks for beside device memory, and for those who come `beside` it. Nobody is
    /// thought away: to make others go for that is the scheduler's own part.
    pub(super) fn takes(&self, node: &str, pod: &Key, beside: &[&Key]) -> bool {
        let (Some(facts), Some(load)) = (self.nodes.get(node), self.loads.get(pod)) else {
            return false;
        };
        load.asks.iter().all(|(resource, asks)| {
            let beside = beside.iter().filter_map(|pod| self.loads.get(pod));
            let beside: u128 = beside.map(|load| u128::from(load.of(resource))).sum();
            let offers = facts.offers.get(&**resource).copied().unwrap_or(0);
            self.taken.of(node, resource) + beside + u128::from(*asks) <= offers.into()
        })
    }
}
