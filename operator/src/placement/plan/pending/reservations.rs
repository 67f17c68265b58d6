//! Keeps useful reservations and writes those that differ.

use std::collections::BTreeSet;

use bursar_crds::gpu_node::Reservation;

use super::{JobAssumption, PendingPod, Planner, ReservationsByNode};
use crate::cluster::facts::node::Gpu;
use crate::cluster::facts::pod::Placement;
use crate::cluster::ssa_diff::needs_apply;
use crate::placement::plan::{Step, gpu_node_ref};
use crate::quanta::Quanta;

impl<'a> Planner<'a> {
    /// The reservations that are still useful, for each pod on one node, so that no pod has victims
    /// on two nodes.
    pub(super) fn useful_reservations(&mut self) -> ReservationsByNode {
        let mut useful = Vec::new();
        for (node, gpus) in &self.snapshot.gpu_nodes {
            // A watch may deliver the last write late.
            let written = group_by_pod(self.history.reservations.get(*node).into_iter().flatten());
            let late = written.into_iter().filter(|of_pod| {
                let mut of_pod = of_pod.iter();
                of_pod.any(|reservation| !gpus.reservations.contains(reservation))
            });
            let watched = group_by_pod(&gpus.reservations).into_iter();
            let all = watched.map(|of_pod| (false, of_pod));
            for (late, of_pod) in all.chain(late.map(|of_pod| (true, of_pod))) {
                if let Some(renewed) = self.renewed(node, &of_pod) {
                    useful.push((late, *node, renewed));
                }
            }
        }
        let snapshot = self.snapshot;
        let is_nominated = |pod_uid: &str, node: &str| match snapshot
            .pod(pod_uid)
            .map(|pod| &pod.placement)
        {
            Some(Placement::Unscheduled { nominated, .. }) => nominated.as_deref() == Some(node),
            Some(Placement::Node(_)) | None => false,
        };
        useful.sort_by_key(|(late, node, reservations)| {
            let are_kept = snapshot.are_kept(node, reservations);
            let nominated = is_nominated(&reservations[0].pod_uid, node);
            (!nominated, !are_kept, *late)
        });
        let (mut reserved_pods, mut gpus) = (BTreeSet::new(), BTreeSet::new());
        let mut kept = ReservationsByNode::new();
        for (_, node, reservations) in useful {
            let taken = kept.entry(node.to_owned()).or_default();
            let pod_uid = reservations[0].pod_uid.clone();
            let is_taken =
                |reservation: &Reservation| gpus.contains(&(node, reservation.gpu.clone()));
            if !reservations.iter().any(is_taken)
                && !reserved_pods.contains(&pod_uid)
                && self.quanta_fit(node, &reservations, taken)
                // The nomination followed this check. Pods that come now make room for themselves.
                && (is_nominated(&pod_uid, node) || self.other_resources_fit(node, &pod_uid, taken))
            {
                let of_pod = reservations.iter();
                gpus.extend(of_pod.map(|reservation| (node, reservation.gpu.clone())));
                reserved_pods.insert(pod_uid);
                taken.extend(reservations);
            }
        }
        kept
    }

    /// A pod's reservations on a node, with what the pod has there now. `None` unless the pod still
    /// waits for all of these GPUs and permitted victims would suffice.
    fn renewed(&mut self, node: &str, reservations: &[Reservation]) -> Option<Vec<Reservation>> {
        let pod_uid = &reservations.first()?.pod_uid;
        let (pod, gpus) = (
            self.snapshot.pod(pod_uid)?,
            self.snapshot.gpu_nodes.get(node)?,
        );
        let is_on_other_node = match &pod.placement {
            Placement::Node(at) => at != node,
            // Another operator or the scheduler has chosen another node.
            Placement::Unscheduled { nominated, .. } => {
                nominated.as_ref().is_some_and(|at| at != node)
            }
        };
        let in_backoff = self.history.in_backoff(pod_uid, self.now);
        if pod.terminating || !pod.pending || is_on_other_node || in_backoff {
            return None;
        }
        let Some(pending) = self.pending.get(pod_uid.as_str()).copied() else {
            // The pod is bound, or it is scheduled and not started, or between two scheduling
            // attempts.
            let is_there = |reservation: &Reservation| {
                let gpu = self.snapshot.gpu(node, &reservation.gpu);
                gpu.is_some()
            };
            return (!gpus.lists(pod_uid) && reservations.iter().all(is_there))
                .then(|| reservations.to_vec());
        };
        let shares = pending.shares(gpus)?;
        let renewed = match (shares.quanta.as_slice(), reservations) {
            ([share], [reservation]) => {
                // Another container of the pod may have got memory there since.
                let gpu = self.snapshot.gpu(node, &reservation.gpu)?;
                vec![reservation_for(&pending, gpu, *share)?]
            }
            _ => {
                let lacks = |reservation: &Reservation| {
                    let gpu = self.snapshot.gpu(node, &reservation.gpu);
                    gpu.map(|gpu| lacking(reservation, gpu))
                };
                let lacks: Option<Vec<Quanta>> = reservations.iter().map(lacks).collect();
                shares
                    .are_filled_by(lacks?)
                    .then(|| reservations.to_vec())?
            }
        };
        let assumption = JobAssumption::IgnoresDisruption;
        let victims = self.reserved_victims(node, &pending, &renewed, assumption);
        victims.map(|_| renewed)
    }

    /// The writes of the reservations that differ.
    pub(super) fn reservation_writes(&self, reserved: &ReservationsByNode) -> Vec<Step> {
        let mut steps = Vec::new();
        for (node, gpus) in &self.snapshot.gpu_nodes {
            let wanted = reserved.get(*node).map(Vec::as_slice).unwrap_or_default();
            let written = self.history.reservations.get(*node);
            if needs_apply(&gpus.reservations, wanted, written) {
                steps.push(Step::Reserve {
                    node: gpu_node_ref(self.snapshot, node),
                    over: gpus.reservations.clone(),
                    reservations: wanted.to_vec(),
                });
            }
        }
        steps
    }
}

/// The reservation of a GPU for a pod that needs an amount there. It includes what the pod already
/// has there, as the agent counts.
pub(super) fn reservation_for(
    pending: &PendingPod<'_>,
    gpu: &Gpu,
    quanta: Quanta,
) -> Option<Reservation> {
    Some(Reservation {
        gpu: gpu.uuid.clone(),
        pod_uid: pending.pod.uid.clone(),
        quanta: i32::try_from(quanta.plus(held_on(gpu, &pending.pod.uid)).count()).ok()?,
    })
}

/// The amount that the pod of a reservation still lacks on the GPU.
pub(super) fn lacking(reservation: &Reservation, gpu: &Gpu) -> Quanta {
    let reserved = Quanta::new(reservation.quanta.unsigned_abs().into());
    reserved.minus(held_on(gpu, &reservation.pod_uid))
}

/// The memory of a pod on a GPU.
fn held_on(gpu: &Gpu, pod: &str) -> Quanta {
    gpu.pods.get(pod).copied().unwrap_or_default()
}

/// The reservations of each pod, in the order of their first ones.
pub(super) fn group_by_pod<'r>(
    reservations: impl IntoIterator<Item = &'r Reservation>,
) -> Vec<Vec<Reservation>> {
    let mut groups: Vec<Vec<Reservation>> = Vec::new();
    for reservation in reservations {
        let is_same = |group: &&mut Vec<Reservation>| group[0].pod_uid == reservation.pod_uid;
        match groups.iter_mut().find(is_same) {
            Some(group) => group.push(reservation.clone()),
            None => groups.push(vec![reservation.clone()]),
        }
    }
    groups
}
