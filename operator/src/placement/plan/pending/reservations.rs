//! Keeps useful reservations and writes those that differ.

use std::collections::BTreeSet;

use bursar_crds::gpu_node::Reservation;

use super::{JobAssumption, Planner, ReservationsByNode, reservation_for};
use crate::nodes::ssa_diff::needs_apply;
use crate::placement::plan::{Step, gpu_node_ref};
use crate::placement::pod::Placement;

impl<'a> Planner<'a> {
    /// The reservations that are still useful, one for each pod, so that no pod has victims on two
    /// nodes.
    pub(super) fn useful_reservations(&mut self) -> ReservationsByNode {
        let mut reservation = Vec::new();
        for (node, gpus) in &self.snapshot.gpu_nodes {
            // A watch may deliver the last write late.
            let written = self.history.reservations.get(*node).into_iter().flatten();
            let late = written.filter(|reservation| !gpus.reservations.contains(reservation));
            let watched = gpus
                .reservations
                .iter()
                .map(|reservation| (false, reservation));
            for (late, one) in watched.chain(late.map(|reservation| (true, reservation))) {
                if self.is_useful(node, one) {
                    reservation.push((late, *node, one));
                }
            }
        }
        let snapshot = self.snapshot;
        let is_nominated = |waiter: &str, node: &str| match snapshot
            .pod(waiter)
            .map(|pod| &pod.placement)
        {
            Some(Placement::Unscheduled { nominated, .. }) => nominated.as_deref() == Some(node),
            Some(Placement::Node(_)) | None => false,
        };
        reservation.sort_by_key(|(late, node, reservation)| {
            let gpu = snapshot.gpu(node, &reservation.gpu);
            let answered =
                gpu.is_some_and(|gpu| gpu.reserved_for.as_ref() == Some(&reservation.waiter));
            (!is_nominated(&reservation.waiter, node), !answered, *late)
        });
        let (mut waiters, mut gpus) = (BTreeSet::new(), BTreeSet::new());
        let mut useful = ReservationsByNode::new();
        for (_, node, reservation) in reservation {
            let taken = useful.entry(node.to_owned()).or_default();
            if !gpus.contains(&(node, &reservation.gpu))
                && !waiters.contains(&reservation.waiter)
                && self.quanta_fit(node, reservation, taken)
                // The nomination followed this check. Pods that come now make room for themselves.
                && (is_nominated(&reservation.waiter, node)
                    || self.other_resources_fit(node, &reservation.waiter, taken))
            {
                gpus.insert((node, &reservation.gpu));
                waiters.insert(&reservation.waiter);
                // Another container of the pod may have got memory there since.
                let updated = self
                    .pending
                    .get(reservation.waiter.as_str())
                    .zip(self.snapshot.gpu(node, &reservation.gpu));
                let updated = updated.and_then(|(pending, gpu)| reservation_for(pending, gpu));
                taken.push(updated.unwrap_or_else(|| reservation.clone()));
            }
        }
        useful
    }

    /// Whether the pod still waits for this GPU and permitted victims would suffice.
    pub(super) fn is_useful(&mut self, node: &str, reservation: &Reservation) -> bool {
        let (Some(pod), Some(gpu)) = (
            self.snapshot.pod(&reservation.waiter),
            self.snapshot.gpu(node, &reservation.gpu),
        ) else {
            return false;
        };
        let elsewhere = match &pod.placement {
            Placement::Node(at) => at != node,
            // Another operator or the scheduler has chosen another node.
            Placement::Unscheduled { nominated, .. } => {
                nominated.as_ref().is_some_and(|at| at != node)
            }
        };
        let in_backoff = self.history.in_backoff(&reservation.waiter, self.now);
        if pod.terminating || !pod.pending || elsewhere || in_backoff {
            return false;
        }
        match self.pending.get(reservation.waiter.as_str()).copied() {
            Some(pending) => self
                .victims_on(node, gpu, &pending, JobAssumption::IgnoresDisruption)
                .is_some(),
            // The pod is bound, or it is scheduled and not started, or between two scheduling
            // attempts.
            None => !gpu.pods.contains_key(&reservation.waiter),
        }
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
