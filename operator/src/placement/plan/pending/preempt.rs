//! Finds GPUs to reserve for a pod, and the pods of lower priority that make room there.

use std::collections::BTreeMap;

use bursar_crds::gpu_node::Reservation;

use super::shares::Shares;
use super::{
    JobAssumption, MAX_STEPS, PendingPod, Planner, ReservationsByNode, lacking, pod_ref,
    reservation_for,
};
use crate::cluster::pod_request::PriorityKind;
use crate::placement::filters::passes_filters;
use crate::placement::node::Gpu;
use crate::placement::plan::victims::{Candidate, minimal_victims};
use crate::placement::plan::{Step, Victim};
use crate::placement::pod::{Owner, Placement};
use crate::quanta::Quanta;

/// Ranks reservations for a pod, the best first: by how many failed before, by the number of
/// victims, their highest priority and their memory, and then by node and GPU.
type ReservationRank<'a> = (u32, usize, Option<i32>, Quanta, &'a str, Option<&'a str>);

/// The number of victims, their highest priority and their memory.
type VictimCost = (usize, Option<i32>, Quanta);

/// What one GPU could give to a pod.
struct Supply<'a> {
    /// All that the pod could have there.
    capacity: Quanta,
    /// The memory that is bound to no pod.
    free: Quanta,
    /// The memory of terminating pods and of victims that are chosen already.
    coming: Quanta,
    /// The pods that the pod may preempt.
    candidates: Vec<Candidate<'a>>,
}

impl<'a> Supply<'a> {
    /// The victims for a pod that needs `quanta` there. `None` when no victims would suffice.
    fn victims(&self, quanta: Quanta) -> Option<Vec<Candidate<'a>>> {
        let lacking = quanta.minus(self.free).minus(self.coming);
        let is_possible = self.capacity >= quanta;
        is_possible.then(|| minimal_victims(&self.candidates, lacking))?
    }

    /// The most that victims could make free.
    fn most(&self) -> Quanta {
        let reclaimable = self.candidates.iter().map(|one| one.quanta).sum();
        let all = self.free.plus(self.coming).plus(reclaimable);
        all.min(self.capacity)
    }
}

fn highest_priority(victims: &[Candidate<'_>]) -> Option<i32> {
    victims.iter().map(|one| one.priority).max()
}

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
                pod.request,
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
        let snapshot = self.snapshot;
        let gpus = snapshot.gpu_nodes.get(node);
        let gpus = gpus.filter(|_| self.other_resources_fit(node, &pending.pod.uid, taken));
        let Some((gpus, shares)) = gpus.and_then(|gpus| Some((gpus, pending.shares(gpus)?))) else {
            return Vec::new();
        };
        let is_other = |pod: &String| *pod != pending.pod.uid;
        let is_taken = |gpu: &Gpu| {
            let mut taken = taken.iter();
            gpu.reserved_for.as_ref().is_some_and(is_other)
                || taken.any(|reservation| reservation.gpu == gpu.uuid)
        };
        let open: Vec<&Gpu> = gpus.gpus.iter().filter(|gpu| !is_taken(gpu)).collect();
        let sets: Vec<Vec<(&Gpu, Quanta)>> = match shares.quanta.as_slice() {
            [share] => open.iter().map(|gpu| vec![(*gpu, *share)]).collect(),
            // For several shares a node has one choice.
            _ => Vec::from_iter(self.choose_gpus(node, &open, pending, &shares)),
        };
        let mut choices = Vec::new();
        for set in sets {
            let reservations: Option<Vec<Reservation>> = set
                .iter()
                .map(|(gpu, quanta)| reservation_for(pending, gpu, *quanta))
                .collect();
            let assumption = JobAssumption::FailsOnDisruption;
            let selected = reservations.and_then(|reservations| {
                let victims = self.reserved_victims(node, pending, &reservations, assumption)?;
                Some((reservations, victims.concat()))
            });
            let Some((reservations, victims)) = selected else {
                continue;
            };
            if victims.is_empty() && pending.node.is_some() {
                // A reservation of memory that is set aside for another pod would overtake it.
                let suffices = set.iter().all(|(gpu, quanta)| {
                    let supply = self.supply(node, gpu, pending, assumption, &[]);
                    gpu.free_for(&pending.pod.uid).plus(supply.coming) >= *quanta
                });
                match suffices {
                    true => return Vec::new(),
                    false => continue,
                }
            }
            if self.quanta_fit(node, &reservations, taken) {
                let uid = &pending.pod.uid;
                let failed = set
                    .iter()
                    .map(|(gpu, _)| self.history.failed_reservations(uid, &gpu.uuid));
                let rank = (
                    failed.sum(),
                    victims.len(),
                    highest_priority(&victims),
                    victims.iter().map(|one| one.quanta).sum(),
                    node,
                    set.first().map(|(gpu, _)| gpu.uuid.as_str()),
                );
                choices.push((rank, node, reservations));
            }
        }
        choices
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

    /// Chooses GPUs for a pod's shares, and what the pod needs on each. Each share goes where the
    /// fewest victims are evicted for it. `None` when no victims would suffice.
    fn choose_gpus<'g>(
        &mut self,
        node: &str,
        gpus: &[&'g Gpu],
        pending: &PendingPod<'a>,
        shares: &Shares,
    ) -> Option<Vec<(&'g Gpu, Quanta)>> {
        let assumption = JobAssumption::FailsOnDisruption;
        let supplies = gpus.iter().map(|gpu| {
            let mut supply = self.supply(node, gpu, pending, assumption, &[]);
            if pending.node.is_some() {
                // Memory that is set aside for another pod would be taken from it.
                supply.free = supply.free.min(gpu.free_for(&pending.pod.uid));
            }
            supply
        });
        let supplies: Vec<Supply<'_>> = supplies.collect();
        let needed: Quanta = shares.quanta.iter().copied().sum();
        if supplies.iter().map(Supply::most).sum::<Quanta>() < needed {
            return None;
        }
        // The search asks for the same amounts again and again.
        let mut costs = BTreeMap::new();
        let mut cost = |gpu: usize, quanta: Quanta| -> Option<VictimCost> {
            let cost = costs.entry((gpu, quanta));
            *cost.or_insert_with(|| {
                let victims = supplies[gpu].victims(quanta)?;
                let freed = victims.iter().map(|one| one.quanta).sum();
                Some((victims.len(), highest_priority(&victims), freed))
            })
        };
        let rank = |index: usize, before: Quanta, with: Quanta| {
            let uuid = gpus.get(index)?.uuid.as_str();
            let earlier = match before {
                Quanta::ZERO => 0,
                _ => cost(index, before)?.0,
            };
            let (victims, highest, freed) = cost(index, with)?;
            let in_vain = self.history.failed_reservations(&pending.pod.uid, uuid);
            let more = victims.saturating_sub(earlier);
            Some((in_vain, more, highest, freed, uuid))
        };
        let chosen = shares.assign(gpus.len(), rank)?.into_iter();
        Some(
            chosen
                .map(|(index, quanta)| (gpus[index], quanta))
                .collect(),
        )
    }

    /// The victims on each GPU of a pod's reservations. `None` when some GPU is gone, or no victims
    /// would suffice there.
    pub(super) fn reserved_victims(
        &mut self,
        node: &str,
        pending: &PendingPod<'a>,
        reservations: &[Reservation],
        assumption: JobAssumption,
    ) -> Option<Vec<Vec<Candidate<'a>>>> {
        let (mut all, mut earlier) = (Vec::new(), Vec::new());
        for reservation in reservations {
            let gpu = self.snapshot.gpu(node, &reservation.gpu)?;
            let supply = self.supply(node, gpu, pending, assumption, &earlier);
            let victims = supply.victims(lacking(reservation, gpu))?;
            earlier.extend(victims.iter().map(|one| one.uid));
            all.push(victims);
        }
        Some(all)
    }

    /// Returns the memory of a GPU that a pod could get. The victims in `chosen` count as evicted.
    fn supply(
        &mut self,
        node: &str,
        gpu: &Gpu,
        pending: &PendingPod<'a>,
        assumption: JobAssumption,
        chosen: &[&str],
    ) -> Supply<'a> {
        let (mut coming, mut candidates) = (self.history.recently_freed(node, gpu), Vec::new());
        for (uid, held) in &gpu.pods {
            if chosen.contains(&uid.as_str()) {
                coming = coming.plus(*held);
                continue;
            }
            // An ended pod holds its memory until the agent notices the end.
            let known = self.snapshot.pods.get_key_value(uid.as_str());
            let live = known.filter(|(uid, (_, pod))| !self.is_ending(uid, pod));
            let Some((uid, (key, pod))) = live else {
                if !self.history.termination_overdue(uid, self.now) {
                    coming = coming.plus(*held);
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
                    quanta: *held,
                });
            }
        }
        let is_open = gpu.is_open_to(&pending.key.namespace);
        Supply {
            capacity: if is_open { gpu.capacity } else { Quanta::ZERO },
            free: gpu.free,
            coming,
            candidates,
        }
    }

    /// The step that evicts the victims on the GPUs of a pod's reservations, once the agent keeps
    /// all of them for the pod.
    pub(super) fn preempt(&mut self, node: &str, reservations: &[Reservation]) -> Option<Step> {
        let are_kept = self.snapshot.are_kept(node, reservations);
        let waiter = &reservations.first().filter(|_| are_kept)?.waiter;
        let pending = self.pending.get(waiter.as_str()).copied()?;
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
                of_gpu.iter().map(|one| (one, reservation.gpu.as_str()))
            });
        let victims: Vec<Victim> = of_gpus
            .filter(|(one, _)| self.history.may_evict(one.uid, self.now))
            .filter_map(|(one, gpu)| self.victim(one, gpu))
            .take(MAX_STEPS)
            .collect();
        (nominate || !victims.is_empty()).then(|| Step::Preempt {
            waiter: pod_ref(pending.key, pending.pod),
            node: node.to_owned(),
            gpus: reservations.iter().map(|one| one.gpu.clone()).collect(),
            nominate,
            victims,
        })
    }

    fn victim(&self, one: &Candidate<'_>, gpu: &str) -> Option<Victim> {
        let (key, facts) = self.snapshot.pods.get(one.uid)?;
        let refused = self.history.refused_for(one.uid, self.now);
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
