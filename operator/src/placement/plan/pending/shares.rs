//! Cuts what a pod waits for into shares, each on one GPU, and chooses their GPUs.

use bursar_crds::shares::{GpuCapacity, split_quanta};

use crate::cluster::facts::pod::PodFacts;
use crate::quanta::Quanta;

/// The most choices that are tried for one pod and node.
const MAX_TRIES: u32 = 64;

/// The most containers that the agent places together. It places those of a larger pod when they
/// start.
pub(super) const MAX_CONTAINERS: usize = 16;

/// The shares of a pod, largest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shares {
    pub(super) quanta: Vec<Quanta>,
    /// Whether each share needs its own GPU: the shares are parts of one container.
    on_distinct_gpus: bool,
}

impl Shares {
    fn one(quanta: Quanta) -> Shares {
        Shares {
            quanta: vec![quanta],
            on_distinct_gpus: false,
        }
    }

    /// The shares of a pod of which no container has memory on the node. `None` where the node's
    /// GPUs are too few or too small, the containers too many, or several containers are spread.
    ///
    /// Where an init container needs more than the containers, all of them have to be on one GPU:
    /// their places elsewhere would not hold it.
    pub(super) fn of_pod(pod: &PodFacts, gpus: &[GpuCapacity]) -> Option<Shares> {
        let mut quanta: Vec<Quanta> = pod.containers.iter().map(|(_, quanta)| *quanta).collect();
        match quanta.len() {
            0 | 1 => Shares::of_container(pod.device, pod.min_gpus, gpus),
            2..=MAX_CONTAINERS if pod.min_gpus == 1 => {
                if !pod.is_sum_of_containers() {
                    let holds = |gpu: &GpuCapacity| Quanta::new(gpu.quanta.into()) >= pod.device;
                    let is_held = gpus.iter().any(holds);
                    return is_held.then(|| Shares::one(pod.device));
                }
                quanta.sort_unstable_by(|a, b| b.cmp(a));
                Some(Shares {
                    quanta,
                    on_distinct_gpus: false,
                })
            }
            _ => None,
        }
    }

    /// The shares of a container, as the agent cuts it.
    pub(super) fn of_container(quanta: Quanta, least: u16, gpus: &[GpuCapacity]) -> Option<Shares> {
        let shares = split_quanta(gpus, quanta.count().try_into().ok()?, least)?;
        let shares = shares.into_iter();
        let quanta: Vec<_> = shares.map(|share| Quanta::new(share.into())).collect();
        let on_distinct_gpus = quanta.len() > 1;
        Some(Shares {
            quanta,
            on_distinct_gpus,
        })
    }

    /// Whether these amounts of different GPUs are those of a choice for the shares. Of several
    /// containers they need to be as much together: another search would not find each choice
    /// again.
    pub(super) fn are_filled_by(&self, mut amounts: Vec<Quanta>) -> bool {
        amounts.sort_unstable_by(|a, b| b.cmp(a));
        if self.on_distinct_gpus {
            return amounts == self.quanta;
        }
        let (all, needed) = (amounts.iter().copied(), self.quanta.iter().copied());
        all.sum::<Quanta>() == needed.sum() && amounts.first() >= self.quanta.first()
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
            .filter(|gpu| !self.on_distinct_gpus || held[*gpu] == Quanta::ZERO)
            .filter_map(|gpu| Some((rank(gpu, held[gpu], held[gpu].plus(*share))?, gpu)))
            .collect();
        choices.sort_unstable();
        // A GPU that can take a share of one container can take every later one, so no other first
        // choice places more of them.
        let most = if self.on_distinct_gpus {
            1
        } else {
            choices.len()
        };
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

    fn gpus(capacities: &[u32]) -> Vec<GpuCapacity> {
        let gpu = |&quanta: &u32| GpuCapacity {
            quanta,
            is_combinable: true,
        };
        capacities.iter().map(gpu).collect()
    }

    fn counts(shares: Option<Shares>) -> Option<Vec<i64>> {
        shares.map(|shares| shares.quanta.iter().map(|quanta| quanta.count()).collect())
    }

    #[test]
    fn pod_with_a_larger_init_container_needs_one_gpu() {
        let pod = |inits: &str| {
            let container = |name: &str, gib: &str| serde_json::json!({ "name": name, "resources": { "requests": { "bursar.dev/gpu-memory-gib": gib } } });
            let pod = serde_json::json!({ "metadata": { "uid": "u" }, "spec": {
                "initContainers": [container("init", inits)],
                "containers": [container("a", "4"), container("b", "4")],
            } });
            let pod = serde_json::from_value(pod).unwrap();
            PodFacts::of(&pod, bursar_crds::Quantum::Gib1).unwrap()
        };
        let of_pod =
            |inits, capacities: &[u32]| counts(Shares::of_pod(&pod(inits), &gpus(capacities)));
        assert_eq!(of_pod("4", &[6, 6]), Some(vec![4, 4]));
        assert_eq!(of_pod("6", &[8, 6]), Some(vec![8]));
        assert_eq!(of_pod("6", &[7, 7]), None);
    }

    /// Places shares into free memory by best fit.
    fn placed(shares: &[u64], on_distinct_gpus: bool, free: &[u64]) -> Option<Vec<(usize, i64)>> {
        let shares = Shares {
            quanta: shares.iter().map(|share| Quanta::new(*share)).collect(),
            on_distinct_gpus,
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
    fn each_choice_for_containers_is_filled_by_its_amounts() {
        // A first fit of 3 into 8 leaves 5 for containers of 2.
        let quanta = [3, 2, 2, 2, 2, 2, 2, 2, 2].map(Quanta::new).to_vec();
        let shares = Shares {
            quanta,
            on_distinct_gpus: false,
        };
        for (amounts, is_filled) in [([8, 11], true), ([11, 8], true), ([8, 10], false)] {
            let amounts = amounts.map(Quanta::new).to_vec();
            assert_eq!(
                shares.are_filled_by(amounts.clone()),
                is_filled,
                "{amounts:?}"
            );
        }
        let in_crumbs = [2, 2, 2, 2, 2, 2, 2, 2, 2, 1].map(Quanta::new);
        assert!(!shares.are_filled_by(in_crumbs.to_vec()), "3 is in none");
    }

    #[test]
    fn choice_that_leaves_no_place_for_another_share_is_undone() {
        // The best fit of 5 is the GPU of 8, which leaves a place for two of the others.
        let all = Some(vec![(0, 9), (1, 8)]);
        assert_eq!(placed(&[5, 4, 4, 4], false, &[9, 8]), all);
    }
}
