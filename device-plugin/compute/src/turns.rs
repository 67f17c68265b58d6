//! Divides a round of a GPU's time among pods by weight: pure.
//!
//! The driver lets channel groups take turns, and a turn lasts as long as the group's slice. A
//! group without work has no turn. So the parts of pods are those of the slices of their groups
//! *that compute*: a pod whose slice was divided by idle groups too would get less than its part.
#![forbid(unsafe_code)]

use std::time::Duration;

/// The slice that libcuda gives a group after it is scheduled.
pub const DEFAULT_SLICE: Duration = Duration::from_micros(2048);

/// Below this, a turn is mostly the change from one group to the next. Where the weights would give
/// an active group less, the round grows up to [`LONGEST_ROUND`], so that parts stay as they are.
pub const LEAST_SLICE: Duration = Duration::from_micros(50);

/// A longer round is a wait that programs notice.
pub const LONGEST_ROUND: Duration = Duration::from_millis(100);

/// All pods without a weight share what the weights leave of a GPU, and at least this part.
const LEAST_SHARED: u64 = 5;

/// A pod's weight, in hundredths of a GPU.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
#[serde(try_from = "u16", into = "u16")]
pub struct Weight(u16);

/// The error for a number that is no weight.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is no weight: write 1 to 100 hundredths of a GPU")]
pub struct NoWeight(u16);

impl TryFrom<u16> for Weight {
    type Error = NoWeight;

    fn try_from(hundredths: u16) -> Result<Self, NoWeight> {
        match hundredths {
            1..=100 => Ok(Self(hundredths)),
            _ => Err(NoWeight(hundredths)),
        }
    }
}

impl From<Weight> for u16 {
    fn from(weight: Weight) -> u16 {
        weight.0
    }
}

/// A pod's channel groups on one GPU. `K` identifies a group.
#[derive(Clone, Debug)]
pub struct PodGroups<K> {
    /// The pod's weight, if it has one.
    pub weight: Option<Weight>,
    /// Each group, and whether it has had work lately.
    pub groups: Vec<(K, bool)>,
}

impl<K> PodGroups<K> {
    /// Whether a group has had work lately.
    pub(crate) fn is_active(&self) -> bool {
        self.groups.iter().any(|(_, is_active)| *is_active)
    }

    /// The groups that the pod's part is divided by, at least one.
    fn divisor(&self) -> u64 {
        let active = self.groups.iter().filter(|(_, is_active)| *is_active);
        active.count().max(1) as u64
    }
}

/// Returns the slice of each group. Without any weight on the GPU that is [`DEFAULT_SLICE`].
///
/// Active pods divide the round. A group without work has the pod's smallest slice, which it would
/// have if all groups of all pods had work: it keeps that until its first launch is seen.
pub fn divide<K: Copy>(round: Duration, pods: &[PodGroups<K>]) -> Vec<(K, Duration)> {
    let groups = |pod: &PodGroups<K>| pod.groups.clone();
    let weights: u64 = pods
        .iter()
        .filter_map(|pod| pod.weight)
        .map(|w| u64::from(w.0))
        .sum();
    if weights == 0 {
        let all = pods.iter().flat_map(groups);
        return all.map(|(group, _)| (group, DEFAULT_SLICE)).collect();
    }
    let shared = 100_u64.saturating_sub(weights).max(LEAST_SHARED);
    let parts = |counts: fn(&PodGroups<K>) -> bool| {
        Parts::of(shared, pods.iter().filter(|pod| counts(pod)))
    };
    let among_active = parts(PodGroups::is_active);
    let among_all = parts(|_| true);
    let active = pods.iter().filter(|pod| pod.is_active());
    let nanos = active.map(|pod| among_active.nanos(round, pod.weight, pod.divisor()));
    let least = nanos.min().unwrap_or(u64::MAX).max(1);
    let longer = round.as_nanos() as u64 * LEAST_SLICE.as_nanos() as u64 / least;
    let round = Duration::from_nanos(longer).clamp(round, LONGEST_ROUND.max(round));
    let mut slices = Vec::new();
    for pod in pods {
        let busy = among_active.slice(round, pod.weight, pod.divisor());
        let idle = among_all.slice(round, pod.weight, pod.groups.len().max(1) as u64);
        let slice = |is_active| if is_active { busy } else { idle.min(busy) };
        slices.extend(
            pod.groups
                .iter()
                .map(|(group, is_active)| (*group, slice(*is_active))),
        );
    }
    slices
}

/// The parts of some pods of a GPU.
struct Parts {
    shared: u64,
    /// Pods that divide `shared`, at least one.
    sharing: u64,
    /// The sum of all parts, times `sharing`.
    sum: u64,
}

impl Parts {
    fn of<'a, K: 'a>(shared: u64, pods: impl Iterator<Item = &'a PodGroups<K>>) -> Self {
        let (mut weights, mut sharing) = (0, 0);
        for pod in pods {
            match pod.weight {
                Some(weight) => weights += u64::from(weight.0),
                None => sharing += 1,
            }
        }
        let parts = weights + if sharing > 0 { shared } else { 0 };
        let sharing = sharing.max(1);
        Self {
            shared,
            sharing,
            sum: (parts * sharing).max(1),
        }
    }

    fn slice(&self, round: Duration, weight: Option<Weight>, divisor: u64) -> Duration {
        Duration::from_nanos(self.nanos(round, weight, divisor)).clamp(LEAST_SLICE, round)
    }

    fn nanos(&self, round: Duration, weight: Option<Weight>, divisor: u64) -> u64 {
        let part = match weight {
            Some(weight) => u64::from(weight.0) * self.sharing,
            None => self.shared,
        };
        round.as_nanos() as u64 * part / self.sum / divisor
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ROUND: Duration = Duration::from_millis(20);

    fn pod(weight: Option<u16>, groups: &[bool]) -> PodGroups<()> {
        PodGroups {
            weight: weight.map(|hundredths| Weight::try_from(hundredths).unwrap()),
            groups: groups.iter().map(|is_active| ((), *is_active)).collect(),
        }
    }

    fn micros(pods: &[PodGroups<()>]) -> Vec<u128> {
        let slices = divide(ROUND, pods);
        slices.iter().map(|(_, slice)| slice.as_micros()).collect()
    }

    #[test]
    fn pods_divide_the_round_by_weight() {
        let pods = [pod(Some(75), &[true]), pod(Some(25), &[true])];
        assert_eq!(micros(&pods), [15_000, 5_000]);
    }

    #[test]
    fn part_of_a_pod_is_divided_by_its_active_groups() {
        let one_of_four = [true, false, false, false];
        let pods = [pod(Some(50), &one_of_four), pod(Some(50), &[true])];
        assert_eq!(micros(&pods), [10_000, 2_500, 2_500, 2_500, 10_000]);
    }

    #[test]
    fn round_grows_where_a_pod_has_many_active_groups() {
        let round = Duration::from_millis(4);
        let pods = [pod(Some(10), &[true; 30]), pod(Some(90), &[true])];
        let slices = divide(round, &pods);
        let total = |groups: std::ops::Range<usize>| {
            let slices = slices[groups].iter().map(|(_, slice)| slice.as_micros());
            slices.sum::<u128>()
        };
        assert_eq!((total(0..30), total(30..31)), (1_500, 13_500));
    }

    #[test]
    fn active_pods_have_the_time_of_the_others() {
        let pods = [
            pod(Some(50), &[true]),
            pod(Some(25), &[true]),
            pod(Some(25), &[false]),
        ];
        assert_eq!(micros(&pods), [13_333, 6_666, 5_000]);
    }

    #[test]
    fn pods_without_a_weight_share_what_the_weights_leave() {
        let pods = [
            pod(Some(60), &[true]),
            pod(None, &[true]),
            pod(None, &[true]),
        ];
        assert_eq!(micros(&pods), [12_000, 4_000, 4_000]);
        let given_out = [pod(Some(100), &[true]), pod(None, &[true])];
        assert_eq!(micros(&given_out), [19_047, 952]);
    }

    #[test]
    fn gpu_without_a_weight_keeps_the_drivers_slices() {
        assert_eq!(
            micros(&[pod(None, &[true]), pod(None, &[false])]),
            [2_048, 2_048]
        );
        assert_eq!(micros(&[]), []);
    }

    #[test]
    fn weight_is_one_to_a_hundred() {
        assert_eq!(Weight::try_from(0), Err(NoWeight(0)));
        assert_eq!(Weight::try_from(101), Err(NoWeight(101)));
        assert_eq!(u16::from(Weight::try_from(100).unwrap()), 100);
    }

    fn any_pod() -> impl Strategy<Value = PodGroups<()>> {
        let weight = proptest::option::of(1..=100_u16);
        let groups = proptest::collection::vec(any::<bool>(), 0..6);
        (weight, groups).prop_map(|(weight, groups)| pod(weight, &groups))
    }

    proptest! {
        #[test]
        fn parts_of_pods_are_their_weights(pods in proptest::collection::vec(any_pod(), 0..8)) {
            let slices = divide(ROUND, &pods);
            prop_assert_eq!(slices.len(), pods.iter().map(|pod| pod.groups.len()).sum::<usize>());
            let mut slices = slices.into_iter();
            let mut parts = Vec::new();
            for pod in &pods {
                let own: Vec<Duration> = slices.by_ref().take(pod.groups.len()).map(|(_, slice)| slice).collect();
                prop_assert!(own.iter().all(|slice| (LEAST_SLICE..=LONGEST_ROUND).contains(slice)));
                let busy = own.iter().zip(&pod.groups).filter(|(_, (_, is_active))| *is_active);
                let busy: Duration = busy.map(|(slice, _)| *slice).sum();
                let floored = own.contains(&LEAST_SLICE);
                if let Some(Weight(weight)) = pod.weight && pod.is_active() && !floored {
                    parts.push(busy.as_secs_f64() / f64::from(weight));
                }
            }
            for part in &parts {
                prop_assert!((part / parts[0] - 1.0).abs() < 0.01, "{:?}", parts);
            }
        }
    }
}
