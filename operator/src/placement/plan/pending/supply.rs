//! Computes what GPUs could give to a pod: free memory, and that of victims.

use std::collections::BTreeMap;

use bursar_crds::gpu_node::Reservation;

use super::reservations::lacking;
use super::shares::Shares;
use super::{JobAssumption, PendingPod, Planner};
use crate::cluster::facts::node::Gpu;
use crate::cluster::facts::pod::{Owner, PriorityKind};
use crate::placement::plan::victims::{Candidate, minimal_victims};
use crate::quanta::Quanta;

/// The number of victims, their highest priority and their memory.
type VictimCost = (usize, Option<i32>, Quanta);

/// The memory that one GPU could give to a pod.
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
        let reclaimable = self
            .candidates
            .iter()
            .map(|candidate| candidate.quanta)
            .sum();
        let all = self.free.plus(self.coming).plus(reclaimable);
        all.min(self.capacity)
    }
}

pub(super) fn highest_priority(victims: &[Candidate<'_>]) -> Option<i32> {
    victims.iter().map(|victim| victim.priority).max()
}

impl<'a> Planner<'a> {
    /// Chooses GPUs for a pod's shares, and what the pod needs on each. Each share goes where the
    /// fewest victims are evicted for it. `None` when no victims would suffice.
    pub(super) fn choose_gpus<'g>(
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
                let freed = victims.iter().map(|victim| victim.quanta).sum();
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
            let failed = self.history.failed_reservations(&pending.pod.uid, uuid);
            let more = victims.saturating_sub(earlier);
            Some((failed, more, highest, freed, uuid))
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
            earlier.extend(victims.iter().map(|victim| victim.uid));
            all.push(victims);
        }
        Some(all)
    }

    /// Whether free memory and that of terminating pods suffice on each GPU of a set.
    pub(super) fn suffices(
        &mut self,
        node: &str,
        pending: &PendingPod<'a>,
        set: &[(&Gpu, Quanta)],
    ) -> bool {
        let assumption = JobAssumption::FailsOnDisruption;
        set.iter().all(|(gpu, quanta)| {
            let supply = self.supply(node, gpu, pending, assumption, &[]);
            // A reservation of memory that is set aside for another pod would overtake it.
            gpu.free_for(&pending.pod.uid).plus(supply.coming) >= *quanta
        })
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
}
