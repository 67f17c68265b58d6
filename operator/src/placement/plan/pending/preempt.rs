//! Finds GPUs to reserve for a pod, and the pods of lower priority that make room there.

use bursar_crds::gpu_node::Reservation;

use super::reservations::reservation_for;
use super::supply::highest_priority;
use super::{JobAssumption, MAX_STEPS, PendingPod, Planner, ReservationsByNode, pod_ref};
use crate::cluster::facts::node::Gpu;
use crate::cluster::facts::pod::{Owner, Placement, PriorityKind};
use crate::placement::filters::passes_filters;
use crate::placement::plan::victims::Candidate;
use crate::placement::plan::{Step, Victim};
use crate::quanta::Quanta;

/// Ranks reservations for a pod, the best first. The rank is by how many failed before, by the
/// number of victims, their highest priority and their memory, and then by node and GPU.
type ReservationRank<'a> = (u32, usize, Option<i32>, Quanta, &'a str, Option<&'a str>);

impl<'a> Planner<'a> {
    /// The GPUs to reserve for a pod, on one node: with the fewest failed reservations, then with
    /// the fewest victims.
    pub(super) fn find_reservations(
        &mut self,
        pending: &PendingPod<'a>,
        reserved: &ReservationsByNode,
    ) -> Option<(String, Vec<Reservation>)> {
        if !pending.pod.preempts || self.history.in_backoff(&pending.pod.uid, self.now) {
            return None;
        }
        let nodes: Vec<&str> = match pending.node {
            Some(node) => vec![node],
            None => self.candidate_nodes(pending)?,
        };
        let has_closed_gpus = self.has_closed_gpus;
        let kind = |pending: &PendingPod<'a>| {
            let PendingPod { key, pod, .. } = *pending;
            let rest = self.snapshot.requests_of(key).map(|load| &load.milli);
            let containers = pod.containers.iter().map(|(_, quanta)| *quanta);
            let containers: Vec<Quanta> = containers.collect();
            let shape = (pod.min_gpus, pod.has_larger_init, containers);
            // Pods of all namespaces are alike where every GPU is open to all.
            let namespace = has_closed_gpus.then_some(&key.namespace);
            let constraints = &pod.constraints;
            (
                pod.priority,
                pod.device,
                shape,
                constraints,
                namespace,
                rest,
            )
        };
        let mut hopeless = self.unsatisfiable.iter();
        if pending.node.is_none() && hopeless.any(|other| kind(other) == kind(pending)) {
            return None;
        }
        let mut choices = Vec::new();
        for node in nodes {
            let taken = reserved.get(node).map(Vec::as_slice).unwrap_or_default();
            choices.extend(self.reservation_choices(node, pending, taken));
        }
        if pending.node.is_none() && choices.is_empty() {
            self.unsatisfiable.push(*pending);
        }
        let best = choices.into_iter().min_by(|(a, ..), (b, ..)| a.cmp(b));
        best.map(|(_, node, reservations)| (node.to_owned(), reservations))
    }

    /// The reservations on a node that would let victims make room for a pod, with their ranks.
    /// None where free memory and that of terminating pods suffice for a pod on the node.
    fn reservation_choices(
        &mut self,
        node: &'a str,
        pending: &PendingPod<'a>,
        taken: &[Reservation],
    ) -> Vec<(ReservationRank<'a>, &'a str, Vec<Reservation>)> {
        let gpus = self.snapshot.gpu_nodes.get(node);
        let gpus = gpus.filter(|_| self.other_resources_fit(node, &pending.pod.uid, taken));
        let Some((gpus, shares)) = gpus.and_then(|gpus| Some((gpus, pending.shares(gpus)?))) else {
            return Vec::new();
        };
        let open = gpus.gpus.iter();
        let open: Vec<&Gpu> = open.filter(|gpu| !is_taken(gpu, pending, taken)).collect();
        let sets: Vec<Vec<(&Gpu, Quanta)>> = match shares.quanta.as_slice() {
            [share] => open.iter().map(|gpu| vec![(*gpu, *share)]).collect(),
            // For several shares a node has one choice.
            _ => Vec::from_iter(self.choose_gpus(node, &open, pending, &shares)),
        };
        let mut choices = Vec::new();
        for set in sets {
            let Some((reservations, victims)) = self.reserve(node, pending, &set) else {
                continue;
            };
            if victims.is_empty() && pending.node.is_some() {
                match self.suffices(node, pending, &set) {
                    true => return Vec::new(),
                    false => continue,
                }
            }
            if self.quanta_fit(node, &reservations, taken) {
                let rank = self.reservation_rank(node, pending, &set, &victims);
                choices.push((rank, node, reservations));
            }
        }
        choices
    }

    /// The reservations of a set of GPUs for a pod, with the victims there. `None` when no victims
    /// would suffice.
    fn reserve(
        &mut self,
        node: &str,
        pending: &PendingPod<'a>,
        set: &[(&Gpu, Quanta)],
    ) -> Option<(Vec<Reservation>, Vec<Candidate<'a>>)> {
        let reservations: Option<Vec<Reservation>> = set
            .iter()
            .map(|(gpu, quanta)| reservation_for(pending, gpu, *quanta))
            .collect();
        let reservations = reservations?;
        let assumption = JobAssumption::FailsOnDisruption;
        let victims = self.reserved_victims(node, pending, &reservations, assumption)?;
        Some((reservations, victims.concat()))
    }

    fn reservation_rank(
        &self,
        node: &'a str,
        pending: &PendingPod<'a>,
        set: &[(&'a Gpu, Quanta)],
        victims: &[Candidate<'a>],
    ) -> ReservationRank<'a> {
        let uid = &pending.pod.uid;
        let failed = set
            .iter()
            .map(|(gpu, _)| self.history.failed_reservations(uid, &gpu.uuid));
        (
            failed.sum(),
            victims.len(),
            highest_priority(victims),
            victims.iter().map(|victim| victim.quanta).sum(),
            node,
            set.first().map(|(gpu, _)| gpu.uuid.as_str()),
        )
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

    /// The step that evicts the victims on the GPUs of a pod's reservations, once the agent keeps
    /// all of them for the pod.
    pub(super) fn preempt(&mut self, node: &str, reservations: &[Reservation]) -> Option<Step> {
        let are_kept = self.snapshot.are_kept(node, reservations);
        let pod_uid = &reservations.first().filter(|_| are_kept)?.pod_uid;
        let pending = self.pending.get(pod_uid.as_str()).copied()?;
        let nominate = match &pending.pod.placement {
            Placement::Unscheduled { nominated, .. } => nominated.as_deref() != Some(node),
            Placement::Node(_) => false,
        };
        let assumption = JobAssumption::FailsOnDisruption;
        let selected = self.reserved_victims(node, &pending, reservations, assumption)?;
        let of_gpus = reservations
            .iter()
            .zip(&selected)
            .flat_map(|(reservation, of_gpu)| {
                of_gpu
                    .iter()
                    .map(|candidate| (candidate, reservation.gpu.as_str()))
            });
        let due: Vec<(&Candidate<'a>, &str)> = of_gpus
            .filter(|(candidate, _)| self.history.may_evict(candidate.uid, self.now))
            .filter(|(candidate, _)| self.victims.insert(candidate.uid))
            .take(MAX_STEPS)
            .collect();
        let victims = due.into_iter();
        let victims: Vec<Victim> = victims
            .filter_map(|(candidate, gpu)| self.victim(candidate, gpu))
            .collect();
        (nominate || !victims.is_empty()).then(|| Step::Preempt {
            pending_pod: pod_ref(pending.key, pending.pod),
            node: node.to_owned(),
            reservations: reservations.to_vec(),
            nominate,
            victims,
        })
    }

    fn victim(&self, candidate: &Candidate<'_>, gpu: &str) -> Option<Victim> {
        let (key, facts) = self.snapshot.pods.get(candidate.uid)?;
        let refused = self.history.refused_for(candidate.uid, self.now);
        let grace = self.options.forced_after();
        // A Job counts a deleted pod, unlike an evicted pod, as a failure whatever its policy says.
        // A borrowed pod has consented to the deletion.
        let is_protected =
            matches!(facts.owner, Owner::Job(_)) && facts.kind == PriorityKind::Guaranteed;
        Some(Victim {
            pod: pod_ref(key, facts),
            gpu: gpu.to_owned(),
            force: !is_protected && refused.is_some_and(|refused| refused >= grace),
            protected: is_protected,
        })
    }
}

/// Whether a GPU is reserved for another pod, or taken by a reservation of this plan.
fn is_taken(gpu: &Gpu, pending: &PendingPod<'_>, taken: &[Reservation]) -> bool {
    let is_other = |pod: &String| *pod != pending.pod.uid;
    let mut taken = taken.iter();
    gpu.reserved_for.as_ref().is_some_and(is_other)
        || taken.any(|reservation| reservation.gpu == gpu.uuid)
}
