//! Decides what the holder of a GPU is told, and which pods have more than their part: pure.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use bursar_ledger::GpuView;
use bursar_ledger::units::PodUid;

use crate::holder::PodOrder;
use crate::turns::{self, PodGroups, Weight};

/// The samples of a second that show a pod above its part, and the points of a hundred that NVML's
/// estimate may be off.
const WINDOW: usize = 10;
const TOLERATED_POINTS: u64 = 10;

/// A doubted pod's part is divided by all of its groups for this long.
const DOUBTED_FOR: Duration = Duration::from_secs(60);

/// The processes of each pod that may have groups on the GPU.
pub(crate) type Processes = BTreeMap<PodUid, BTreeSet<u32>>;

/// The pods of a GPU for its holder. Processes that the driver `listed` and that belong to none of
/// them are a pod of their own, without a name and a weight.
pub(crate) fn orders(
    view: &GpuView,
    processes: &Processes,
    listed: &BTreeSet<u32>,
    doubted: &BTreeSet<PodUid>,
) -> Vec<PodOrder> {
    let order = |pod: &PodUid| PodOrder {
        uid: pod.to_string(),
        weight: weight_of(view, pod),
        processes: processes.get(pod).cloned().unwrap_or_default(),
        is_doubted: doubted.contains(pod),
    };
    let known: BTreeSet<u32> = processes.values().flatten().copied().collect();
    let others = PodOrder {
        uid: String::new(),
        weight: None,
        processes: listed.difference(&known).copied().collect(),
        is_doubted: false,
    };
    let pods = view.pods.keys().map(order);
    pods.chain((!others.processes.is_empty()).then_some(others))
        .collect()
}

fn weight_of(view: &GpuView, pod: &PodUid) -> Option<Weight> {
    Weight::try_from(*view.weights.get(pod)?).ok()
}

/// Watches for pods whose share of a contended GPU is above their part, as NVML estimates it.
#[derive(Debug, Default)]
pub(crate) struct Doubts {
    samples: VecDeque<BTreeMap<PodUid, u64>>,
    until: BTreeMap<PodUid, Instant>,
}

/// A pod above its part, in hundredths of the GPU's busy time.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Excess {
    pub(crate) pod: PodUid,
    pub(crate) share: u64,
    pub(crate) part: u64,
}

impl Doubts {
    /// The pods that are doubted.
    pub(crate) fn doubted(&self, now: Instant) -> BTreeSet<PodUid> {
        let doubted = self.until.iter().filter(|(_, until)| **until > now);
        doubted.map(|(pod, _)| pod.clone()).collect()
    }

    /// Adds the utilization of a second, by process. Returns the pods that are doubted from now on.
    pub(crate) fn add(
        &mut self,
        view: &GpuView,
        processes: &Processes,
        percents: &BTreeMap<u32, u8>,
        now: Instant,
    ) -> Vec<Excess> {
        let percent = |pid: &u32| percents.get(pid).map_or(0, |percent| u64::from(*percent));
        let of_pods = processes.iter();
        let sample = of_pods.map(|(pod, pids)| (pod.clone(), pids.iter().map(percent).sum()));
        let sample = sample.filter(|(_, percent)| *percent > 0);
        self.samples.push_back(sample.collect());
        self.samples
            .drain(..self.samples.len().saturating_sub(WINDOW));
        self.until.retain(|_, until| *until > now);
        let is_contended = |sample: &BTreeMap<PodUid, u64>| sample.len() > 1;
        if self.samples.len() < WINDOW || !self.samples.iter().all(is_contended) {
            return Vec::new();
        }
        let mut sums = BTreeMap::<PodUid, u64>::new();
        for (pod, percent) in self.samples.iter().flatten() {
            *sums.entry(pod.clone()).or_default() += percent;
        }
        let total: u64 = sums.values().sum();
        let pods: Vec<PodGroups<&PodUid>> = sums
            .keys()
            .map(|pod| PodGroups {
                weight: weight_of(view, pod),
                groups: vec![(pod, true)],
                is_doubted: false,
            })
            .collect();
        // Of a round of 100 s, each second is a hundredth.
        let parts = turns::divide(Duration::from_secs(100), &pods);
        let excesses = parts.into_iter().filter_map(|(pod, part)| {
            let (share, part) = (sums[pod] * 100 / total.max(1), part.as_secs());
            let is_new = share > part + TOLERATED_POINTS && !self.until.contains_key(pod);
            let pod = pod.clone();
            (is_new && !view.weights.is_empty()).then_some(Excess { pod, share, part })
        });
        let excesses: Vec<Excess> = excesses.collect();
        let doubted = excesses.iter().map(|excess| excess.pod.clone());
        self.until
            .extend(doubted.map(|pod| (pod, now + DOUBTED_FOR)));
        excesses
    }
}

#[cfg(test)]
mod tests {
    use bursar_ledger::units::Quanta;

    use super::*;

    fn uid(pod: &str) -> PodUid {
        pod.parse().unwrap()
    }

    fn view(weights: &[(&str, u16)]) -> GpuView {
        let mut view = GpuView::empty("GPU-a".parse().unwrap());
        for (pod, weight) in weights {
            view.pods.insert(uid(pod), Quanta(1));
            if *weight > 0 {
                view.weights.insert(uid(pod), *weight);
            }
        }
        view
    }

    fn processes(of: &[(&str, &[u32])]) -> Processes {
        let of = of.iter();
        of.map(|(pod, pids)| (uid(pod), pids.iter().copied().collect()))
            .collect()
    }

    #[test]
    fn processes_of_no_pod_are_held_without_a_weight() {
        let view = view(&[("a", 75), ("b", 0)]);
        let processes = processes(&[("a", &[1, 2])]);
        let orders = orders(&view, &processes, &[2, 3].into(), &[uid("b")].into());
        let told: Vec<_> = orders
            .iter()
            .map(|pod| (pod.uid.as_str(), pod.weight.map(u16::from), pod.is_doubted))
            .collect();
        assert_eq!(
            told,
            [("a", Some(75), false), ("b", None, true), ("", None, false)]
        );
        assert_eq!(orders[2].processes, [3].into());
    }

    /// The pods that are doubted after so many seconds of this utilization.
    fn doubted(seconds: usize, percents: &[(u32, u8)], weights: &[(&str, u16)]) -> Vec<String> {
        let (mut doubts, now) = (Doubts::default(), Instant::now());
        let (view, percents) = (view(weights), percents.iter().copied().collect());
        let processes = processes(&[("a", &[1]), ("b", &[2])]);
        for _ in 0..seconds {
            doubts.add(&view, &processes, &percents, now);
        }
        assert!(doubts.doubted(now + DOUBTED_FOR).is_empty());
        let doubted = doubts.doubted(now).into_iter();
        doubted.map(|pod| pod.to_string()).collect()
    }

    #[test]
    fn pod_far_above_its_part_is_doubted_for_a_minute() {
        let halves: &[_] = &[("a", 50), ("b", 50)];
        assert_eq!(doubted(10, &[(1, 70), (2, 25)], halves), ["a"]);
        assert!(doubted(9, &[(1, 70), (2, 25)], halves).is_empty());
        assert!(doubted(20, &[(1, 55), (2, 42)], halves).is_empty());
        // Without a neighbour the whole GPU is its part, and without weights nothing is promised.
        assert!(doubted(20, &[(1, 99)], halves).is_empty());
        assert!(doubted(20, &[(1, 90), (2, 9)], &[("a", 0), ("b", 0)]).is_empty());
        assert_eq!(
            doubted(10, &[(1, 30), (2, 68)], &[("a", 60), ("b", 0)]),
            ["b"]
        );
    }
}
