//! Checks whether a node can hold a pod once its victims are gone.

use std::collections::BTreeSet;

use bursar_crds::gpu_node::Reservation;

use super::reservations::group_by_pod;
use super::shares::Shares;
use super::{JobAssumption, PendingPod, Planner};
use crate::cluster::Key;
use crate::cluster::facts::node::GpuFacts;
use crate::cluster::facts::pod::PodFacts;
use crate::placement::plan::victims::Candidate;
use crate::quanta::Quanta;

impl<'a> Planner<'a> {
    /// Whether the node has room for the whole pod now: on its GPUs, in its allocatable quanta and
    /// in all other resources.
    pub(super) fn has_room(&self, node: &str, pending: &PendingPod<'_>) -> bool {
        let pod = pending.pod;
        let planned = self.relocations.iter().filter(|(_, to, _)| *to == node);
        let planned: Quanta = planned.map(|(.., room)| *room).sum();
        let promised = self.history.assumed_room(node).plus(planned);
        let has_room = |gpus: &GpuFacts| {
            let namespace = &pending.key.namespace;
            let free = |gpu: usize| {
                let gpu = &gpus.gpus[gpu];
                let free = gpu.largest_free.minus(promised);
                gpu.is_open_to(namespace).then_some(free)
            };
            let best_fit = |gpu, _, after| {
                let free = free(gpu).filter(|free| *free >= after)?;
                Some(free.minus(after))
            };
            let shares = Shares::of_pod(pod, &gpus.capacities_for(namespace));
            shares.is_some_and(|shares| shares.assign(gpus.gpus.len(), best_fit).is_some())
        };
        // The sums come first: the search may take long.
        self.snapshot.unrequested(node).minus(promised) >= pod.device
            && self.snapshot.fits(node, pending.key, &[])
            && self
                .snapshot
                .gpu_nodes
                .get(node)
                .is_some_and(|gpus| has_room(gpus))
    }

    /// Whether the node's quanta suffice for the pod of these reservations once its victims are
    /// gone.
    ///
    /// Room for the reservations in `taken` and for other nominated pods is deducted. The scheduler
    /// does the same, so that pods nominated to one node may block each other.
    pub(super) fn quanta_fit(
        &mut self,
        node: &str,
        reservations: &[Reservation],
        taken: &[Reservation],
    ) -> bool {
        let Some(pending_pod) = self.unscheduled_pod(reservations) else {
            return true;
        };
        // A victim with memory on several GPUs frees the node's quanta once.
        let mut counted = BTreeSet::new();
        let mut deducted = Quanta::ZERO;
        for of_pod in group_by_pod(taken) {
            deducted = deducted.plus(self.net_request(node, &of_pod, &mut counted));
        }
        let needs = self.net_request(node, reservations, &mut counted);
        if needs == Quanta::ZERO {
            return true;
        }
        let is_planned = |uid: &String| {
            let planned = taken.iter().chain(reservations);
            planned
                .map(|reservation| &reservation.pod_uid)
                .any(|pod_uid| pod_uid == uid)
        };
        let nominated = self.nominated.get(node).into_iter().flatten();
        let others =
            nominated.filter(|pod| pod.priority >= pending_pod.priority && !is_planned(&pod.uid));
        let others: Vec<&PodFacts> = others.copied().collect();
        let gpus = self.snapshot.gpu_nodes.get(node);
        let written = gpus.map(|gpus| gpus.reservations.as_slice());
        let written = written.unwrap_or_default();
        for pod in others {
            let later = written.iter();
            let later = later.filter(|reservation| reservation.pod_uid == pod.uid);
            let later: Vec<Reservation> = later.cloned().collect();
            deducted = deducted.plus(match later.is_empty() {
                true => pod.device,
                // Victims make room for this pod too, in a later step.
                false => self.net_request(node, &later, &mut counted),
            });
        }
        let terminating = self.terminating.get(node).copied().unwrap_or_default();
        self.snapshot.unrequested(node).plus(terminating) >= needs.plus(deducted)
    }

    /// Whether the node's other resources suffice for the pod. It assumes no victims, because
    /// preemption for other resources is the scheduler's task.
    pub(super) fn other_resources_fit(
        &self,
        node: &str,
        pod_uid: &str,
        taken: &[Reservation],
    ) -> bool {
        let Some((key, pending_pod)) = self.snapshot.pods.get(pod_uid) else {
            return false;
        };
        if pending_pod.node().is_some() {
            return true;
        }
        let nominated = self.nominated.get(node).into_iter().flatten();
        let nominated = nominated.filter(|pod| pod.priority >= pending_pod.priority);
        let others = nominated.map(|pod| pod.uid.as_str());
        let others = others.chain(taken.iter().map(|reservation| reservation.pod_uid.as_str()));
        // A pod in both groups counts once.
        let others: BTreeSet<&str> = others.filter(|uid| *uid != pending_pod.uid).collect();
        let others = others.iter().filter_map(|uid| self.snapshot.pods.get(uid));
        let others = others.filter(|(_, pod)| pod.node().is_none());
        let others: Vec<&Key> = others.map(|(key, _)| *key).collect();
        self.snapshot.fits(node, key, &others)
    }

    /// The pod of these reservations, unless it has a node.
    fn unscheduled_pod(&self, reservations: &[Reservation]) -> Option<&'a PodFacts> {
        let pending_pod = self.snapshot.pod(&reservations.first()?.pod_uid)?;
        pending_pod.node().is_none().then_some(pending_pod)
    }

    /// The quanta that the pod of these reservations needs beyond what its victims free. Victims in
    /// `counted` are not counted again. A pod on the node needs none.
    pub(super) fn net_request(
        &mut self,
        node: &str,
        reservations: &[Reservation],
        counted: &mut BTreeSet<&'a str>,
    ) -> Quanta {
        let Some(pod) = self.unscheduled_pod(reservations) else {
            return Quanta::ZERO;
        };
        let pending = self.pending.get(pod.uid.as_str()).copied();
        let victims = pending.and_then(|pending| {
            self.reserved_victims(
                node,
                &pending,
                reservations,
                JobAssumption::IgnoresDisruption,
            )
        });
        let victims = victims.into_iter().flatten().flatten();
        let new_victims = victims.filter(|candidate| counted.insert(candidate.uid));
        let of = |candidate: Candidate<'_>| self.snapshot.pod(candidate.uid).map(|pod| pod.device);
        pod.device.minus(new_victims.filter_map(of).sum())
    }
}
