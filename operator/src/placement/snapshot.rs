//! Pods, nodes, their GPUs and the overrides of budgets, indexed.

use std::collections::BTreeMap;

use bursar_crds::{Amount, GpuMemoryBudget};
use kube::runtime::watcher::Event;

use super::node::{Gpu, GpuFacts, NodeFacts, VerifiedGpus};
use super::node_usage::{NodeRequested, PodRequests};
use super::pod::{Owner, PodFacts};
use crate::cluster::{Cache, CacheEntry, Key};
use crate::quanta::Quanta;

/// One event of one watch.
#[derive(Debug)]
pub enum PlacementEvent {
    /// Of the pods that ask for device memory.
    Pod(Event<CacheEntry<PodFacts>>),
    /// Of all pods.
    Requests(Event<CacheEntry<PodRequests>>),
    /// Of the nodes.
    Node(Event<CacheEntry<NodeFacts>>),
    /// Of the nodes' GPUs.
    GpuNode(Event<CacheEntry<GpuFacts>>),
    /// Of the budgets that lower pods' quotas.
    Overrides(Event<CacheEntry<QuotaOverrides>>),
}

/// The pods, by name, whose quotas a budget lowers.
pub type QuotaOverrides = BTreeMap<String, Amount>;

/// What `budget` lowers; none where it lowers nothing.
pub fn quota_overrides(budget: &GpuMemoryBudget) -> Option<QuotaOverrides> {
    let specified = budget.spec.overrides.iter();
    let overrides: QuotaOverrides = specified
        .map(|one| (one.pod.clone(), one.device_memory.clone()))
        .collect();
    (!overrides.is_empty()).then_some(overrides)
}

/// Everything that placement knows.
#[derive(Debug, Default)]
pub struct PlacementIndex {
    pods: Cache<PodFacts>,
    requests: Cache<PodRequests>,
    node_requested: NodeRequested,
    nodes: Cache<NodeFacts>,
    gpu_nodes: Cache<GpuFacts>,
    overrides: Cache<QuotaOverrides>,
    changes: usize,
}

impl PlacementIndex {
    /// Takes in one event.
    pub fn apply(&mut self, event: PlacementEvent) {
        self.changes += match event {
            PlacementEvent::Pod(event) => self.pods.apply(event).len(),
            PlacementEvent::Requests(event) => {
                for (pod, was) in self.requests.apply(event) {
                    self.node_requested
                        .update(was.as_ref(), self.requests.get(&pod));
                }
                // They matter while somebody waits, and then it is planned anyway.
                0
            }
            PlacementEvent::Node(event) => self.nodes.apply(event).len(),
            PlacementEvent::GpuNode(event) => self.gpu_nodes.apply(event).len(),
            PlacementEvent::Overrides(event) => self.overrides.apply(event).len(),
        };
    }

    /// How often it has changed: where that is the same, so is all of it.
    pub(super) fn changes(&self) -> usize {
        self.changes
    }

    /// It as plans look at it.
    pub(super) fn snapshot(&self) -> Snapshot<'_> {
        let mut asked: BTreeMap<&str, Quanta> = BTreeMap::new();
        for (_, pod) in self.pods.iter() {
            if let Some(node) = pod.node() {
                let sum = asked.entry(node).or_default();
                *sum = sum.plus(pod.request);
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
        Snapshot {
            nodes: self
                .nodes
                .iter()
                .map(|(key, node)| (key.name.as_str(), node))
                .collect(),
            gpu_nodes: self
                .gpu_nodes
                .iter()
                .map(|(key, said)| (key.name.as_str(), VerifiedGpus::of(&key.name, said, &pods)))
                .collect(),
            pods,
            overrides: self.overrides.iter().collect(),
            requested: asked,
            requests: &self.requests,
            node_requested: &self.node_requested,
        }
    }
}

/// The landscape by what plans look things up by.
pub(super) struct Snapshot<'a> {
    /// Pods by UID.
    pub(super) pods: BTreeMap<&'a str, (&'a Key, &'a PodFacts)>,
    /// Nodes by name.
    pub(super) nodes: BTreeMap<&'a str, &'a NodeFacts>,
    /// Nodes' GPUs, by the node's name.
    pub(super) gpu_nodes: BTreeMap<&'a str, VerifiedGpus<'a>>,
    /// What budgets lower.
    pub(super) overrides: Vec<(&'a Key, &'a QuotaOverrides)>,
    /// What the pods on a node ask for in all.
    requested: BTreeMap<&'a str, Quanta>,
    requests: &'a Cache<PodRequests>,
    node_requested: &'a NodeRequested,
}

impl<'a> Snapshot<'a> {
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
    pub(super) fn unrequested(&self, node: &str) -> Quanta {
        let all = self
            .nodes
            .get(node)
            .map_or(Quanta::ZERO, |node| node.allocatable);
        all.minus(self.requested.get(node).copied().unwrap_or_default())
    }

    /// What a pod takes of its node.
    pub(super) fn requests_of(&self, pod: &Key) -> Option<&'a PodRequests> {
        self.requests.get(pod)
    }

    /// Whether a node has what a pod asks for beside device memory, and for those who come `beside` it. Nobody is
    /// thought away: to make others go for that is the scheduler's own part.
    pub(super) fn fits(&self, node: &str, pod: &Key, beside: &[&Key]) -> bool {
        let (Some(facts), Some(load)) = (self.nodes.get(node), self.requests.get(pod)) else {
            return false;
        };
        load.milli.iter().all(|(resource, asks)| {
            let beside = beside.iter().filter_map(|pod| self.requests.get(pod));
            let beside: u128 = beside.map(|load| u128::from(load.milli_of(resource))).sum();
            let offers = facts
                .allocatable_milli
                .get(&**resource)
                .copied()
                .unwrap_or(0);
            self.node_requested.milli_of(node, resource) + beside + u128::from(*asks)
                <= offers.into()
        })
    }
}
