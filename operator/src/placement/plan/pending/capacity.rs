//! Checks whether a node can hold a pod once its victims are gone.

use std::collections::BTreeSet;

use bursar_crds::gpu_node::Reservation;

use super::{JobAssumption, PendingPod, Planner};
use crate::cluster::Key;
use crate::placement::plan::victims::Candidate;
use crate::placement::pod::PodFacts;
use crate::quanta::Quanta;

impl<'a> Planner<'a> {
    /// Whether the node has room now: on one GPU, in its allocatable quanta and in all other
    /// resources.
    pub(super) fn has_room(&self, node: &str, pending: &PendingPod<'_>) -> bool {
        let pod = pending.pod;
        let planned = self.relocations.iter().filter(|(_, to, _)| *to == node);
        let planned: Quanta = planned.map(|(.., victims)| *victims).sum();
        let promised = self.history.assumed_room(node).plus(planned);
        let gpus = self.snapshot.gpu_nodes.get(node);
        let largest = gpus.and_then(|gpus| gpus.gpus.iter().map(|gpu| gpu.largest_free).max());
        largest.unwrap_or_default().minus(promised) >= pod.request
            && self.snapshot.unrequested(node).minus(promised) >= pod.request
            && self.snapshot.fits(node, pending.key, &[])
    }

    /// Whether the node's quanta suffice for the pod once its victims are gone.
    ///
    /// Room for the reservations in `taken` and for other nominated pods is deducted. The scheduler
    /// does the same, so that pods nominated to one node may block each other.
    pub(super) fn quanta_fit(
        &mut self,
        node: &str,
        reservation: &Reservation,
        taken: &[Reservation],
    ) -> bool {
        let waiter = self.snapshot.pod(&reservation.waiter);
        let Some(waiter) = waiter.filter(|pod| pod.node().is_none()) else {
            return true;
        };
        // A victim with memory on several GPUs frees the node's quanta once.
        let mut counted = BTreeSet::new();
        let mut deducted = Quanta::ZERO;
        for reservation in taken {
            deducted = deducted.plus(self.net_request(node, reservation, &mut counted));
        }
        let needs = self.net_request(node, reservation, &mut counted);
        if needs == Quanta::ZERO {
            return true;
        }
        let is_ours = |uid: &String| {
            taken
                .iter()
                .chain([reservation])
                .any(|reservation| reservation.waiter == *uid)
        };
        let nominated = self.nominated.get(node).into_iter().flatten();
        let others = nominated.filter(|pod| pod.priority >= waiter.priority && !is_ours(&pod.uid));
        let others: Vec<&PodFacts> = others.copied().collect();
        let gpus = self.snapshot.gpu_nodes.get(node);
        let written = gpus.map(|gpus| gpus.reservations.as_slice());
        let written = written.unwrap_or_default();
        for pod in others {
            deducted = deducted.plus(
                match written
                    .iter()
                    .find(|reservation| reservation.waiter == pod.uid)
                {
                    // Victims make room for this pod too, in a later step.
                    Some(later) => self.net_request(node, later, &mut counted),
                    None => pod.request,
                },
            );
        }
        let terminating = self.terminating.get(node).copied().unwrap_or_default();
        self.snapshot.unrequested(node).plus(terminating) >= needs.plus(deducted)
    }

    /// Whether the node's other resources suffice for the pod. It assumes no victims, because
    /// preemption for other resources is the scheduler's task.
    pub(super) fn other_resources_fit(
        &self,
        node: &str,
        waiter: &str,
        taken: &[Reservation],
    ) -> bool {
        let Some((key, waiter)) = self.snapshot.pods.get(waiter) else {
            return false;
        };
        if waiter.node().is_some() {
            return true;
        }
        let nominated = self.nominated.get(node).into_iter().flatten();
        let nominated = nominated.filter(|pod| pod.priority >= waiter.priority);
        let others = nominated.map(|pod| pod.uid.as_str());
        let others = others.chain(taken.iter().map(|reservation| reservation.waiter.as_str()));
        // A pod in both groups counts once.
        let others: BTreeSet<&str> = others.filter(|uid| *uid != waiter.uid).collect();
        let others = others.iter().filter_map(|uid| self.snapshot.pods.get(uid));
        let others = others.filter(|(_, pod)| pod.node().is_none());
        let others: Vec<&Key> = others.map(|(key, _)| *key).collect();
        self.snapshot.fits(node, key, &others)
    }

    /// The quanta that a pod needs beyond what its victims free. Victims in `counted` are not
    /// counted again. A pod on the node needs none.
    pub(super) fn net_request(
        &mut self,
        node: &str,
        reservation: &Reservation,
        counted: &mut BTreeSet<&'a str>,
    ) -> Quanta {
        let Some(pod) = self
            .snapshot
            .pod(&reservation.waiter)
            .filter(|pod| pod.node().is_none())
        else {
            return Quanta::ZERO;
        };
        let pending = self.pending.get(reservation.waiter.as_str()).copied();
        let gpu = self.snapshot.gpu(node, &reservation.gpu);
        let victims = pending.zip(gpu).and_then(|(pending, gpu)| {
            self.victims_on(node, gpu, &pending, JobAssumption::IgnoresDisruption)
        });
        let victims = victims.unwrap_or_default().into_iter();
        let new_victims = victims.filter(|one| counted.insert(one.uid));
        let of = |one: Candidate<'_>| self.snapshot.pod(one.uid).map(|pod| pod.request);
        pod.request.minus(new_victims.filter_map(of).sum())
    }
}
