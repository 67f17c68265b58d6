//! Indexes pods, nodes, GPUs and budget overrides, and takes a snapshot for each plan.

use std::collections::BTreeMap;

use bursar_crds::GpuMemoryBudget;
use bursar_crds::budget::Override;
use bursar_crds::gpu_node::Reservation;
use kube::runtime::watcher::Event;

use super::node::{Gpu, GpuFacts, NodeFacts, VerifiedGpus};
use super::node_usage::{NodeRequested, PodRequests};
use super::pod::{Owner, PodFacts};
use crate::cluster::{Cache, CacheEntry, Key};
use crate::quanta::Quanta;

/// One event of one watch.
#[derive(Debug)]
pub enum PlacementEvent {
    /// An event of a pod that requests device memory.
    Pod(Event<CacheEntry<PodFacts>>),
    /// An event of any pod.
    Requests(Event<CacheEntry<PodRequests>>),
    /// An event of a Node.
    Node(Event<CacheEntry<NodeFacts>>),
    /// An event of a GpuNode.
    GpuNode(Event<CacheEntry<GpuFacts>>),
    /// An event of a budget with quota overrides.
    Overrides(Event<CacheEntry<QuotaOverrides>>),
}

/// The overrides of quotas by pod name.
pub type QuotaOverrides = BTreeMap<String, Override>;

/// The quota overrides of `budget`. `None` when there are none.
pub fn quota_overrides(budget: &GpuMemoryBudget) -> Option<QuotaOverrides> {
    let specified = budget.spec.overrides.iter();
    let overrides: QuotaOverrides = specified
        .map(|quota| (quota.pod.clone(), quota.clone()))
        .collect();
    (!overrides.is_empty()).then_some(overrides)
}

/// The index for placement.
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
    /// Applies one event.
    pub fn apply(&mut self, event: PlacementEvent) {
        self.changes += match event {
            PlacementEvent::Pod(event) => self.pods.apply(event).len(),
            PlacementEvent::Requests(event) => {
                for (pod, was) in self.requests.apply(event) {
                    self.node_requested
                        .update(was.as_ref(), self.requests.get(&pod));
                }
                // Requests matter only while a pod is pending, and then every interval plans
                // anyway.
                0
            }
            PlacementEvent::Node(event) => self.nodes.apply(event).len(),
            PlacementEvent::GpuNode(event) => self.gpu_nodes.apply(event).len(),
            PlacementEvent::Overrides(event) => self.overrides.apply(event).len(),
        };
    }

    /// The number of changes so far.
    pub(crate) fn changes(&self) -> usize {
        self.changes
    }

    /// The snapshot for one plan.
    pub(crate) fn snapshot(&self) -> Snapshot<'_> {
        let mut requested: BTreeMap<&str, Quanta> = BTreeMap::new();
        for (_, pod) in self.pods.iter() {
            if let Some(node) = pod.node() {
                let sum = requested.entry(node).or_default();
                *sum = sum.plus(pod.request);
            }
        }
        let mut pods = BTreeMap::new();
        // A mirror pod's UID comes from an annotation that any creator can set. It must not replace
        // a real pod.
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
                .map(|(key, report)| {
                    (
                        key.name.as_str(),
                        VerifiedGpus::of(&key.name, report, &pods),
                    )
                })
                .collect(),
            pods,
            overrides: self.overrides.iter().collect(),
            requested,
            requests: &self.requests,
            node_requested: &self.node_requested,
        }
    }
}

/// A view of the index for one plan.
pub(crate) struct Snapshot<'a> {
    /// The pods by UID.
    pub(crate) pods: BTreeMap<&'a str, (&'a Key, &'a PodFacts)>,
    /// The Nodes by name.
    pub(crate) nodes: BTreeMap<&'a str, &'a NodeFacts>,
    /// The verified GPU reports by node name.
    pub(crate) gpu_nodes: BTreeMap<&'a str, VerifiedGpus<'a>>,
    /// The quota overrides of budgets.
    pub(crate) overrides: Vec<(&'a Key, &'a QuotaOverrides)>,
    /// The device memory that the pods on each node request.
    requested: BTreeMap<&'a str, Quanta>,
    requests: &'a Cache<PodRequests>,
    node_requested: &'a NodeRequested,
}

impl<'a> Snapshot<'a> {
    /// The pod with this UID.
    pub(crate) fn pod(&self, uid: &str) -> Option<&'a PodFacts> {
        self.pods.get(uid).map(|(_, pod)| *pod)
    }

    /// Whether some GPU is open to one namespace alone.
    pub(crate) fn has_closed_gpus(&self) -> bool {
        let mut gpus = self.gpu_nodes.values().flat_map(|node| &node.gpus);
        gpus.any(|gpu| gpu.only_for.is_some())
    }

    pub(crate) fn gpu(&self, node: &str, uuid: &str) -> Option<&Gpu> {
        let gpus = &self.gpu_nodes.get(node)?.gpus;
        gpus.iter().find(|gpu| gpu.uuid == uuid)
    }

    /// Whether the agent keeps the GPUs of all these reservations for their pods.
    pub(crate) fn are_kept(&self, node: &str, reservations: &[Reservation]) -> bool {
        reservations.iter().all(|reservation| {
            let gpu = self.gpu(node, &reservation.gpu);
            gpu.is_some_and(|gpu| gpu.reserved_for.as_ref() == Some(&reservation.pod_uid))
        })
    }

    /// The allocatable device memory of a node that no pod requests, which the scheduler can still
    /// give.
    pub(crate) fn unrequested(&self, node: &str) -> Quanta {
        let all = self
            .nodes
            .get(node)
            .map_or(Quanta::ZERO, |node| node.allocatable);
        all.minus(self.requested.get(node).copied().unwrap_or_default())
    }

    /// The pod's requests beside GPU memory.
    pub(crate) fn requests_of(&self, pod: &Key) -> Option<&'a PodRequests> {
        self.requests.get(pod)
    }

    /// Whether the node has room for the pod's other resources, beside the pods in `beside`. It
    /// assumes no victims, because preemption for other resources is the scheduler's task.
    pub(crate) fn fits(&self, node: &str, pod: &Key, beside: &[&Key]) -> bool {
        let (Some(facts), Some(requests)) = (self.nodes.get(node), self.requests.get(pod)) else {
            return false;
        };
        requests.milli.iter().all(|(resource, milli)| {
            let beside = beside.iter().filter_map(|pod| self.requests.get(pod));
            let beside: u128 = beside
                .map(|requests| u128::from(requests.milli_of(resource)))
                .sum();
            let offers = facts
                .allocatable_milli
                .get(&**resource)
                .copied()
                .unwrap_or(0);
            self.node_requested.milli_of(node, resource) + beside + u128::from(*milli)
                <= offers.into()
        })
    }
}
