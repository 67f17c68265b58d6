//! Finds a GPU to reserve for a pod, and the pods of lower priority that make room there.

use bursar_crds::gpu_node::Reservation;

use super::{
    JobAssumption, MAX_STEPS, PendingPod, Planner, ReservationsByNode, pod_ref, reservation_for,
};
use crate::cluster::pod_request::PriorityKind;
use crate::placement::filters::passes_filters;
use crate::placement::node::Gpu;
use crate::placement::plan::victims::{Candidate, minimal_victims};
use crate::placement::plan::{Step, Victim};
use crate::placement::pod::{Owner, Placement};
use crate::quanta::Quanta;

impl<'a> Planner<'a> {
    /// The GPU to reserve for a pod: with the fewest failed reservations, then with the fewest
    /// victims.
    pub(super) fn find_reservation(
        &mut self,
        pending: &PendingPod<'a>,
        reserved: &ReservationsByNode,
    ) -> Option<(String, Reservation)> {
        if !pending.pod.preempts || self.history.in_backoff(&pending.pod.uid, self.now) {
            return None;
        }
        let nodes: Vec<&str> = match pending.node {
            Some(node) => vec![node],
            None => self.candidate_nodes(pending)?,
        };
        let kind = |pending: &PendingPod<'a>| {
            let PendingPod { key, pod, .. } = *pending;
            let rest = self.snapshot.requests_of(key).map(|load| &load.milli);
            (pod.priority, pod.request, &pod.constraints, rest)
        };
        let mut hopeless = self.unsatisfiable.iter();
        if pending.node.is_none() && hopeless.any(|other| kind(other) == kind(pending)) {
            return None;
        }
        let mut choices = Vec::new();
        for node in nodes {
            let Some(gpus) = self.snapshot.gpu_nodes.get(node) else {
                continue;
            };
            let taken = reserved.get(node).map(Vec::as_slice).unwrap_or_default();
            if !self.other_resources_fit(node, &pending.pod.uid, taken) {
                continue;
            }
            for gpu in &gpus.gpus {
                if gpu.reserved_for.is_some()
                    || taken.iter().any(|reservation| reservation.gpu == gpu.uuid)
                {
                    continue;
                }
                let Some(selected) =
                    self.victims_on(node, gpu, pending, JobAssumption::FailsOnDisruption)
                else {
                    continue;
                };
                if selected.is_empty() && pending.node.is_some() {
                    // The memory of terminating pods suffices.
                    return None;
                }
                let reservation = reservation_for(pending, gpu)?;
                if !self.quanta_fit(node, &reservation, taken) {
                    continue;
                }
                let highest = selected.iter().map(|one| one.priority).max();
                let freed: Quanta = selected.iter().map(|one| one.quanta).sum();
                let in_vain = self
                    .history
                    .failed_reservations(&pending.pod.uid, &gpu.uuid);
                let rank = (
                    in_vain,
                    selected.len(),
                    highest,
                    freed,
                    node,
                    gpu.uuid.as_str(),
                );
                choices.push((rank, reservation));
            }
        }
        if pending.node.is_none() && choices.is_empty() {
            self.unsatisfiable.push(*pending);
        }
        let best = choices.into_iter().min_by_key(|(rank, _)| *rank);
        best.map(|((.., node, _), reservation)| (node.to_owned(), reservation))
    }

    /// The nodes that an unscheduled pod may use. `None` when the scheduler will place the pod: it
    /// is nominated, or a node has room.
    pub(super) fn candidate_nodes(&self, pending: &PendingPod<'a>) -> Option<Vec<&'a str>> {
        let Placement::Unscheduled {
            nominated: None, ..
        } = pending.pod.placement
        else {
            return None;
        };
        let allowed = self.snapshot.nodes.iter();
        let allowed =
            allowed.filter(|(name, node)| passes_filters(&pending.pod.constraints, name, node));
        let allowed: Vec<&'a str> = allowed.map(|(name, _)| *name).collect();
        let some = allowed.iter().any(|name| self.has_room(name, pending));
        (!some).then_some(allowed)
    }

    /// The victims on a GPU for a pod, beside terminating pods. `None` when no victims would
    /// suffice.
    pub(super) fn victims_on(
        &mut self,
        node: &str,
        gpu: &Gpu,
        pending: &PendingPod<'a>,
        assumption: JobAssumption,
    ) -> Option<Vec<Candidate<'a>>> {
        if gpu.capacity < pending.quanta {
            return None;
        }
        let (mut coming, mut candidates) = (self.history.recently_freed(node, gpu), Vec::new());
        for (uid, quanta) in &gpu.pods {
            // An ended pod holds its memory until the agent notices the end.
            let known = self.snapshot.pods.get_key_value(uid.as_str());
            let live = known.filter(|(uid, (_, pod))| !self.is_ending(uid, pod));
            let Some((uid, (key, pod))) = live else {
                if !self.history.termination_overdue(uid, self.now) {
                    coming = coming.plus(*quanta);
                }
                continue;
            };
            if pod.priority < pending.pod.priority
                && pending.pod.preempts
                && pod.owner != Owner::Node
                && (pod.kind == PriorityKind::Borrowed
                    || self.ignores_disruption(key, pod, assumption))
            {
                candidates.push(Candidate {
                    uid,
                    priority: pod.priority,
                    quanta: *quanta,
                });
            }
        }
        minimal_victims(&candidates, pending.quanta.minus(gpu.free).minus(coming))
    }

    /// The step that evicts the victims on a GPU that the agent keeps for the pod.
    pub(super) fn preempt(&mut self, node: &str, reservation: &Reservation) -> Option<Step> {
        let pending = *self.pending.get(reservation.waiter.as_str())?;
        let gpu = self.snapshot.gpu(node, &reservation.gpu)?;
        if gpu.reserved_for.as_ref() != Some(&reservation.waiter) {
            return None;
        }
        let nominate = match &pending.pod.placement {
            Placement::Unscheduled { nominated, .. } => nominated.as_deref() != Some(node),
            Placement::Node(_) => false,
        };
        let selected = self.victims_on(node, gpu, &pending, JobAssumption::FailsOnDisruption)?;
        let victims: Vec<Victim> = selected
            .iter()
            .filter(|one| self.history.may_evict(one.uid, self.now))
            .filter_map(|one| self.victim(one))
            .take(MAX_STEPS)
            .collect();
        (nominate || !victims.is_empty()).then(|| Step::Preempt {
            waiter: pod_ref(pending.key, pending.pod),
            node: node.to_owned(),
            gpu: reservation.gpu.clone(),
            nominate,
            victims,
        })
    }

    pub(super) fn victim(&self, one: &Candidate<'_>) -> Option<Victim> {
        let (key, facts) = self.snapshot.pods.get(one.uid)?;
        let refused = self.history.refused_for(one.uid, self.now);
        let grace = self.options.forced_after();
        // A Job counts a deleted pod, unlike an evicted pod, as a failure whatever its policy says.
        // A borrowed pod has consented to the deletion.
        let is_protected =
            matches!(facts.owner, Owner::Job(_)) && facts.kind == PriorityKind::Guaranteed;
        Some(Victim {
            pod: pod_ref(key, facts),
            force: !is_protected && refused.is_some_and(|refused| refused >= grace),
            protected: is_protected,
        })
    }
}
