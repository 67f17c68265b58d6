//! Cuts what a pod waits for into shares, each on one GPU, and chooses their GPUs.

use crate::placement::node::{Gpu, GpuFacts};
use crate::placement::pod::PodFacts;
use crate::quanta::Quanta;

/// The most choices that are tried for one pod and node. The agent has such a bound too.
const MAX_TRIES: u32 = 64;

/// The shares of a pod, largest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shares {
    pub(super) quanta: Vec<Quanta>,
    /// Whether each share needs its own GPU: the shares are parts of one container.
    apart: bool,
}

impl Shares {
    fn one(quanta: Quanta) -> Shares {
        Shares {
            quanta: vec![quanta],
            apart: false,
        }
    }

    /// The shares of a pod of which no container has memory on the node. `None` where the node's
    /// GPUs are too few, or several containers are spread.
    pub(super) fn of_pod(pod: &PodFacts, gpus: &GpuFacts) -> Option<Shares> {
        let mut quanta: Vec<Quanta> = pod.containers.iter().map(|(_, quanta)| *quanta).collect();
        if quanta.len() < 2 || !pod.is_sum_of_containers() {
            return Shares::of_container(pod.request, pod.min_gpus, gpus);
        }
        quanta.sort_unstable_by(|a, b| b.cmp(a));
        (pod.min_gpus == 1).then_some(Shares {
            quanta,
            apart: false,
        })
    }

    /// The shares of a container: evenly over the fewest GPUs that could hold it, as the agent
    /// cuts it. No program uses several MIG instances.
    pub(super) fn of_container(quanta: Quanta, least: u16, gpus: &GpuFacts) -> Option<Shares> {
        let holds = |gpu: &Gpu| gpu.capacity >= quanta;
        let least = i64::from(least).min(quanta.count()) as usize;
        if least == 1 && gpus.gpus.iter().any(holds) {
            return Some(Shares::one(quanta));
        }
        let whole = gpus.gpus.iter().filter(|gpu| !gpu.is_mig());
        let mut capacities: Vec<Quanta> = whole.map(|gpu| gpu.capacity).collect();
        capacities.sort_unstable_by(|a, b| b.cmp(a));
        let even = |count: usize| -> Vec<Quanta> {
            let (all, count) = (quanta.count().unsigned_abs(), count as u64);
            let share = |index: u64| Quanta::new(all / count + u64::from(index < all % count));
            (0..count).map(share).collect()
        };
        let fits =
            |shares: &Vec<Quanta>| shares.iter().zip(&capacities).all(|(one, all)| one <= all);
        let quanta = (least..=capacities.len()).map(even).find(fits)?;
        Some(Shares {
            quanta,
            apart: true,
        })
    }

    /// Whether these amounts of different GPUs are exactly what the shares need.
    pub(super) fn fill(&self, mut amounts: Vec<Quanta>) -> bool {
        if self.apart {
            amounts.sort_unstable_by(|a, b| b.cmp(a));
            return amounts == self.quanta;
        }
        let (all, needed) = (amounts.iter().copied(), self.quanta.iter().copied());
        all.sum::<Quanta>() == needed.sum()
            && self
                .assign(amounts.len(), |gpu, _, with| {
                    (amounts[gpu] >= with).then_some(gpu)
                })
                .is_some()
    }

    /// Chooses a GPU for each share, and returns what each chosen GPU has to hold.
    ///
    /// `rank` ranks a GPU that holds an amount of the pod already and gets a share: the amounts
    /// before and after. The first place of each share has the least rank, where the others still
    /// have one.
    pub(super) fn assign<R: Ord>(
        &self,
        gpus: usize,
        mut rank: impl FnMut(usize, Quanta, Quanta) -> Option<R>,
    ) -> Option<Vec<(usize, Quanta)>> {
        let (mut held, mut tries) = (vec![Quanta::ZERO; gpus], MAX_TRIES);
        let found = self.place(&self.quanta, &mut held, &mut rank, &mut tries);
        let held = held.into_iter().enumerate();
        found.then(|| held.filter(|(_, quanta)| *quanta > Quanta::ZERO).collect())
    }

    fn place<R: Ord>(
        &self,
        shares: &[Quanta],
        held: &mut [Quanta],
        rank: &mut impl FnMut(usize, Quanta, Quanta) -> Option<R>,
        tries: &mut u32,
    ) -> bool {
        let Some((share, rest)) = shares.split_first() else {
            return true;
        };
        let mut choices: Vec<(R, usize)> = (0..held.len())
            .filter(|gpu| !self.apart || held[*gpu] == Quanta::ZERO)
            .filter_map(|gpu| Some((rank(gpu, held[gpu], held[gpu].plus(*share))?, gpu)))
            .collect();
        choices.sort_unstable();
        // A GPU that can take a share of one container can take every later one, so no other first
        // choice places more of them.
        let most = if self.apart { 1 } else { choices.len() };
        for (_, gpu) in choices.into_iter().take(most) {
            let Some(left) = tries.checked_sub(1) else {
                break;
            };
            *tries = left;
            let before = held[gpu];
            held[gpu] = before.plus(*share);
            if self.place(rest, held, rank, tries) {
                return true;
            }
            held[gpu] = before;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus(capacities: &[u64]) -> GpuFacts {
        let gpu = |(index, capacity): (usize, &u64)| Gpu {
            uuid: format!("GPU-{index}"),
            capacity: Quanta::new(*capacity),
            ..Gpu::default()
        };
        GpuFacts {
            gpus: capacities.iter().enumerate().map(gpu).collect(),
            ..GpuFacts::default()
        }
    }

    fn counts(shares: Option<Shares>) -> Option<Vec<i64>> {
        shares.map(|shares| shares.quanta.iter().map(|quanta| quanta.count()).collect())
    }

    #[test]
    fn container_is_cut_evenly_over_the_fewest_gpus() {
        let of = |quanta, least, capacities: &[u64]| {
            counts(Shares::of_container(
                Quanta::new(quanta),
                least,
                &gpus(capacities),
            ))
        };
        assert_eq!(of(8, 1, &[16, 16]), Some(vec![8]));
        assert_eq!(of(9, 2, &[16, 16, 16]), Some(vec![5, 4]));
        assert_eq!(of(24, 1, &[16, 16]), Some(vec![12, 12]));
        assert_eq!(of(24, 3, &[16, 16]), None, "two GPUs are no three");
        assert_eq!(of(40, 1, &[16, 16]), None);
    }

    #[test]
    fn no_container_is_cut_over_mig_instances() {
        let mut instances = gpus(&[10, 10]);
        for gpu in &mut instances.gpus {
            gpu.uuid = gpu.uuid.replace("GPU", "MIG");
        }
        assert_eq!(Shares::of_container(Quanta::new(16), 1, &instances), None);
        let one = Shares::of_container(Quanta::new(10), 1, &instances);
        assert_eq!(counts(one), Some(vec![10]));
    }

    /// Places shares into free memory by best fit.
    fn placed(shares: &[u64], apart: bool, free: &[u64]) -> Option<Vec<(usize, i64)>> {
        let shares = Shares {
            quanta: shares.iter().map(|share| Quanta::new(*share)).collect(),
            apart,
        };
        let rank = |gpu: usize, _, with: Quanta| {
            let free = Quanta::new(free[gpu]);
            (free >= with).then(|| free.minus(with))
        };
        let placed = shares.assign(free.len(), rank)?.into_iter();
        Some(placed.map(|(gpu, quanta)| (gpu, quanta.count())).collect())
    }

    #[test]
    fn containers_share_gpus_and_parts_of_one_do_not() {
        assert_eq!(placed(&[8, 8], false, &[16, 4]), Some(vec![(0, 16)]));
        assert_eq!(placed(&[8, 8], true, &[16, 4]), None);
        assert_eq!(placed(&[8, 8], true, &[16, 9]), Some(vec![(0, 8), (1, 8)]));
    }

    #[test]
    fn choice_that_leaves_no_place_for_another_share_is_undone() {
        // The best fit of 5 is the GPU of 8, which leaves a place for two of the others.
        let all = Some(vec![(0, 9), (1, 8)]);
        assert_eq!(placed(&[5, 4, 4, 4], false, &[9, 8]), all);
    }
}
