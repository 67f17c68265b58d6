//! Takes a snapshot of pods, nodes, GPUs and budget overrides for each plan.

use std::collections::BTreeMap;

use bursar_crds::gpu_node::Reservation;
use rpds::RedBlackTreeSetSync;

use super::node::{Gpu, NodeFacts, VerifiedGpus};
use super::node_usage::{NodeRequested, PodRequests};
use super::pod::{Owner, PodFacts, PodSummary};
use crate::cluster::cache::Objects;
use crate::cluster::projections::{BudgetSummary, GpuNodeSummary};
use crate::cluster::{Key, QuotaOverrides};
use crate::quanta::Quanta;

/// The part of the index that a plan reads. It shares the index's objects, so that watches go on
/// while a plan is computed.
#[derive(Debug)]
pub(crate) struct PlacementView {
    pub(crate) budgets: Objects<BudgetSummary>,
    pub(crate) pods: Objects<PodSummary>,
    pub(crate) gpu_nodes: Objects<GpuNodeSummary>,
    pub(crate) nodes: Objects<NodeFacts>,
    /// The pods that request a resource of Bursar.
    pub(crate) gpu_pods: RedBlackTreeSetSync<Key>,
    /// The sums of all pods' requests by node.
    pub(crate) node_requested: NodeRequested,
}

/// A view of the cluster for one plan.
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
    view: &'a PlacementView,
}

impl<'a> Snapshot<'a> {
    /// The snapshot of `view`.
    pub(crate) fn of(view: &'a PlacementView) -> Self {
        let all = view.gpu_pods.iter().filter_map(|key| {
            let facts = view.pods.get(key)?.facts.as_deref()?;
            (facts.device != Quanta::ZERO).then_some((key, facts))
        });
        // A mirror pod's UID comes from an annotation that any creator can set. It must not replace
        // a real pod.
        let (mirrors, others): (Vec<_>, Vec<_>) =
            all.partition(|(_, pod)| pod.owner == Owner::Node);
        let mut requested: BTreeMap<&str, Quanta> = BTreeMap::new();
        let mut pods = BTreeMap::new();
        for (key, pod) in others.into_iter().chain(mirrors) {
            if let Some(node) = pod.node() {
                let sum = requested.entry(node).or_default();
                *sum = sum.plus(pod.device);
            }
            pods.entry(pod.uid.as_str()).or_insert((key, pod));
        }
        let nodes = view.nodes.iter();
        let reports = view.gpu_nodes.iter().filter(|(_, node)| node.is_readable());
        let overrides = view
            .budgets
            .iter()
            .map(|(key, budget)| (key, &budget.overrides));
        Snapshot {
            nodes: nodes.map(|(key, node)| (key.name.as_str(), node)).collect(),
            gpu_nodes: reports
                .map(|(key, node)| {
                    let verified = VerifiedGpus::of(&key.name, &node.facts, &pods);
                    (key.name.as_str(), verified)
                })
                .collect(),
            pods,
            overrides: overrides
                .filter(|(_, overrides)| !overrides.is_empty())
                .collect(),
            requested,
            view,
        }
    }

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

    /// Whether these reservations are written, and the agent keeps their GPUs for their pods.
    pub(crate) fn are_kept(&self, node: &str, reservations: &[Reservation]) -> bool {
        let written = self.gpu_nodes.get(node).map(|node| &node.reservations);
        reservations.iter().all(|reservation| {
            let gpu = self.gpu(node, &reservation.gpu);
            written.is_some_and(|written| written.contains(reservation))
                && gpu.is_some_and(|gpu| gpu.reserved_for.as_ref() == Some(&reservation.pod_uid))
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
        self.view.pods.get(pod).map(|pod| &pod.requests)
    }

    /// Whether the node has room for the pod's other resources, beside the pods in `beside`. It
    /// assumes no victims, because preemption for other resources is the scheduler's task.
    pub(crate) fn fits(&self, node: &str, pod: &Key, beside: &[&Key]) -> bool {
        let (Some(facts), Some(requests)) = (self.nodes.get(node), self.requests_of(pod)) else {
            return false;
        };
        requests.milli.iter().all(|(resource, milli)| {
            let beside = beside.iter().filter_map(|pod| self.requests_of(pod));
            let beside: u128 = beside
                .map(|requests| u128::from(requests.milli_of(resource)))
                .sum();
            let offers = facts
                .allocatable_milli
                .get(&**resource)
                .copied()
                .unwrap_or(0);
            self.view.node_requested.milli_of(node, resource) + beside + u128::from(*milli)
                <= offers.into()
        })
    }
}
