//! Keeps the slices of a GPU's groups at what the weights of their pods say.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::node::{Node, Place};
use crate::turns::{self, DEFAULT_SLICE, PodGroups, Weight};

/// A group counts as active for this long after its process was. The agent tells it more often,
/// also where NVML and the search for groups are slow.
const ACTIVE_FOR: Duration = Duration::from_secs(2);

/// The most groups whose slices one look reads, so that its time is bounded: 10 us each.
const MAX_LOOKS: usize = 4;

/// A slice is set again where it should differ by more than this part. Each call takes the group
/// off the GPU for a moment.
const TOLERANCE: u32 = 16;

/// The most groups of one pod whose slices are held. The others keep the driver's.
const MAX_GROUPS: usize = 256;

/// A pod on the GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodOrder {
    /// The pod's UID.
    pub uid: String,
    /// Its weight, if it has one.
    pub weight: Option<Weight>,
    /// Its processes on this GPU.
    pub processes: BTreeSet<u32>,
}

/// A pod as the holder has seen it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodReport {
    /// Groups that run kernels.
    pub groups: usize,
    /// Groups that count as active.
    pub active: usize,
}

/// The GPU as the holder has seen it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The pods by UID.
    pub pods: BTreeMap<String, PodReport>,
    /// How often each process has changed a slice that the holder had set.
    pub changed: BTreeMap<u32, u64>,
    /// All groups of known processes whose slices are held, and the others that these have.
    pub known: usize,
    /// The groups that the GPU has, whoever made them.
    pub in_use: Option<u32>,
}

#[derive(Debug)]
struct Held {
    pod: usize,
    /// The slice that the driver had when the group was found, and answered after each call.
    slice: Duration,
    /// The slice that was set last.
    wanted: Duration,
    /// The slice follows from weights, so it is set back when somebody else changes it.
    is_kept: bool,
}

/// The holder of one GPU.
#[derive(Debug)]
pub struct Holder {
    round: Duration,
    pods: Vec<PodOrder>,
    held: BTreeMap<Place, Held>,
    active_until: BTreeMap<u32, Instant>,
    /// Several pods were active when slices were set last.
    is_contended: bool,
    /// The last group whose slice was looked at.
    looked_at: Option<Place>,
    changed: BTreeMap<u32, u64>,
    known: usize,
    in_use: Option<u32>,
}

impl Holder {
    /// A holder that divides a round of this length.
    pub fn new(round: Duration) -> Self {
        Self {
            round,
            pods: Vec::new(),
            held: BTreeMap::new(),
            active_until: BTreeMap::new(),
            is_contended: false,
            looked_at: None,
            changed: BTreeMap::new(),
            known: 0,
            in_use: None,
        }
    }

    /// Takes the pods of the GPU, and looks for their groups.
    pub fn order(&mut self, node: &mut impl Node, pods: Vec<PodOrder>, now: Instant) {
        self.pods = pods;
        let processes = self
            .pods
            .iter()
            .flat_map(|pod| pod.processes.iter().copied())
            .collect::<BTreeSet<u32>>();
        self.active_until.retain(|pid, _| processes.contains(pid));
        self.changed.retain(|pid, _| processes.contains(pid));
        let (places, known) = node.look(&processes);
        (self.known, self.in_use) = (known, node.groups_in_use());
        let pod_of = |pid| {
            self.pods
                .iter()
                .position(|pod| pod.processes.contains(&pid))
        };
        let mut held = BTreeMap::new();
        let mut count = BTreeMap::<usize, usize>::new();
        for place in places {
            let Some(pod) = pod_of(place.pid) else {
                continue;
            };
            let of_pod = count.entry(pod).or_default();
            *of_pod += 1;
            if *of_pod > MAX_GROUPS {
                // No slice of it is held, so it counts as hidden.
                self.known = self.known.saturating_sub(1);
            } else {
                let before = self.held.remove(&place).map(|held| Held { pod, ..held });
                // An agent before may have set it.
                let found = || {
                    let slice = node.slice(&place).ok()?;
                    Some(Held {
                        pod,
                        slice,
                        wanted: slice,
                        is_kept: false,
                    })
                };
                held.extend(before.or_else(found).map(|one| (place, one)));
            }
        }
        self.held = held;
        self.apply(node, now);
    }

    /// Counts processes as active from now on, and applies what changes by that.
    pub fn mark_active(&mut self, node: &mut impl Node, processes: &BTreeSet<u32>, now: Instant) {
        for pid in processes {
            self.active_until.insert(*pid, now + ACTIVE_FOR);
        }
        self.apply(node, now);
    }

    /// Whether several pods compete for the GPU, so that changed slices have to be set back soon.
    pub fn is_contended(&self) -> bool {
        self.is_contended
    }

    /// Reads the slices of some groups by turns, and sets back those that somebody else has
    /// changed: of busy groups, or of all.
    pub fn watch(&mut self, node: &mut impl Node, all: bool, now: Instant) {
        let is_due = |(place, held): &(&Place, &Held)| {
            held.is_kept && (all || self.is_active(place.pid, now))
        };
        let due: Vec<Place> = self.held.iter().filter(is_due).map(|(at, _)| *at).collect();
        let next = due.partition_point(|place| Some(place) <= self.looked_at.as_ref());
        let by_turns = due.iter().cycle().skip(next).take(due.len().min(MAX_LOOKS));
        let mut gone = Vec::new();
        for place in by_turns {
            let Some(held) = self.held.get_mut(place) else {
                continue;
            };
            self.looked_at = Some(*place);
            match node.slice(place) {
                Ok(slice) if slice == held.slice => {}
                Ok(slice) => {
                    // libcuda sets this one after its group is scheduled.
                    if slice != DEFAULT_SLICE {
                        *self.changed.entry(place.pid).or_default() += 1;
                    }
                    if node.set_slice(place, held.wanted).is_err() {
                        gone.push(*place);
                    }
                }
                Err(_) => gone.push(*place),
            }
        }
        for place in gone {
            self.held.remove(&place);
        }
    }

    /// Reports the groups of the pods.
    pub fn report(&self, now: Instant) -> Report {
        let mut pods = BTreeMap::new();
        for (at, pod) in self.pods.iter().enumerate() {
            let own = || self.held.iter().filter(move |(_, held)| held.pod == at);
            let report = PodReport {
                groups: own().count(),
                active: own()
                    .filter(|(place, _)| self.is_active(place.pid, now))
                    .count(),
            };
            pods.insert(pod.uid.clone(), report);
        }
        Report {
            pods,
            changed: self.changed.clone(),
            known: self.known,
            in_use: self.in_use,
        }
    }

    fn is_active(&self, pid: u32, now: Instant) -> bool {
        self.active_until
            .get(&pid)
            .is_some_and(|until| *until > now)
    }

    /// Sets the slices that differ from what the weights say now.
    fn apply(&mut self, node: &mut impl Node, now: Instant) {
        let mut pods: Vec<PodGroups<Place>> = Vec::new();
        for (at, pod) in self.pods.iter().enumerate() {
            let own = self.held.iter().filter(|(_, held)| held.pod == at);
            pods.push(PodGroups {
                weight: pod.weight,
                groups: own
                    .map(|(place, _)| (*place, self.is_active(place.pid, now)))
                    .collect(),
            });
        }
        let active = pods.iter().filter(|pod| pod.is_active());
        self.is_contended = active.count() > 1;
        let is_kept = pods.iter().any(|pod| pod.weight.is_some());
        for (place, slice) in turns::divide(self.round, &pods) {
            let Some(held) = self.held.get_mut(&place) else {
                continue;
            };
            held.is_kept = is_kept;
            if held.wanted.abs_diff(slice) * TOLERANCE <= held.wanted {
                continue;
            }
            // The kernel module counts microseconds.
            let slice = Duration::from_micros(slice.as_micros() as u64);
            match node.set_slice(&place, slice) {
                Ok(()) => {
                    held.wanted = slice;
                    held.slice = node.slice(&place).unwrap_or(slice);
                }
                Err(_) => drop(self.held.remove(&place)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use bursar_gpu::channel_groups::ChannelGroup;

    use super::*;
    use crate::node::NodeError;

    /// A driver's groups, each with the process that made it and its slice.
    #[derive(Default)]
    struct Fake {
        groups: BTreeMap<Place, Duration>,
        sets: usize,
        hidden: u32,
    }

    impl Fake {
        fn start(&mut self, pid: u32) -> Place {
            let group = ChannelGroup {
                client: pid,
                handle: 1,
            };
            let place = Place {
                pid,
                descriptor: 3,
                group,
            };
            self.groups.insert(place, DEFAULT_SLICE);
            place
        }

        fn micros(&self, place: &Place) -> u128 {
            self.groups[place].as_micros()
        }
    }

    fn gone() -> NodeError {
        std::io::Error::from(std::io::ErrorKind::NotFound).into()
    }

    impl Node for Fake {
        fn look(&mut self, processes: &BTreeSet<u32>) -> (Vec<Place>, usize) {
            let known = self
                .groups
                .keys()
                .filter(|place| processes.contains(&place.pid));
            let known: Vec<Place> = known.copied().collect();
            let count = known.len();
            (known, count)
        }

        fn groups_in_use(&mut self) -> Option<u32> {
            Some(self.groups.len() as u32 + self.hidden)
        }

        fn slice(&mut self, at: &Place) -> Result<Duration, NodeError> {
            self.groups.get(at).copied().ok_or_else(gone)
        }

        fn set_slice(&mut self, at: &Place, slice: Duration) -> Result<(), NodeError> {
            self.sets += 1;
            *self.groups.get_mut(at).ok_or_else(gone)? = slice;
            Ok(())
        }
    }

    fn pod(uid: &str, weight: Option<u16>, processes: &[u32]) -> PodOrder {
        PodOrder {
            uid: uid.to_owned(),
            weight: weight.map(|weight| Weight::try_from(weight).unwrap()),
            processes: processes.iter().copied().collect(),
        }
    }

    const ROUND: Duration = Duration::from_millis(20);

    fn all(pids: &[u32]) -> BTreeSet<u32> {
        pids.iter().copied().collect()
    }

    #[test]
    fn groups_of_active_processes_divide_the_part_of_their_pod() {
        let (mut fake, now) = (Fake::default(), Instant::now());
        let places: Vec<Place> = (1..=5).map(|pid| fake.start(pid)).collect();
        let mut holder = Holder::new(ROUND);
        let pods = vec![pod("a", Some(50), &[1, 2, 3, 4]), pod("b", Some(50), &[5])];
        holder.order(&mut fake, pods, now);
        holder.mark_active(&mut fake, &all(&[1, 5]), now);
        assert_eq!(fake.micros(&places[0]), 10_000);
        assert_eq!(fake.micros(&places[1]), 2_500);
        assert_eq!(fake.micros(&places[4]), 10_000);
        holder.mark_active(&mut fake, &all(&[1, 2, 5]), now);
        assert_eq!(fake.micros(&places[1]), 5_000);
        let report = holder.report(now);
        assert_eq!((report.pods["a"].groups, report.pods["a"].active), (4, 2));
    }

    #[test]
    fn changed_slice_is_set_back_and_counted_but_not_that_of_libcuda() {
        let (mut fake, now) = (Fake::default(), Instant::now());
        let [one, other] = [fake.start(1), fake.start(2)];
        let mut holder = Holder::new(ROUND);
        holder.order(
            &mut fake,
            vec![pod("a", Some(75), &[1]), pod("b", Some(25), &[2])],
            now,
        );
        holder.mark_active(&mut fake, &all(&[1, 2]), now);
        for slice in [DEFAULT_SLICE, Duration::from_millis(100), DEFAULT_SLICE] {
            fake.groups.insert(other, slice);
            holder.watch(&mut fake, false, now);
            assert_eq!(fake.micros(&other), 5_000);
        }
        assert_eq!(fake.micros(&one), 15_000);
        assert_eq!(holder.report(now).changed, [(2, 1)].into());
        // Nothing is set where nothing differs.
        let sets = fake.sets;
        holder.watch(&mut fake, true, now);
        holder.mark_active(&mut fake, &all(&[1, 2]), now);
        assert_eq!(fake.sets, sets);
    }

    #[test]
    fn slice_that_needed_no_change_at_first_is_kept_too() {
        let (mut fake, now) = (Fake::default(), Instant::now());
        let [one, _] = [fake.start(1), fake.start(2)];
        let mut holder = Holder::new(Duration::from_millis(4));
        let pods = vec![pod("a", Some(50), &[1]), pod("b", Some(50), &[2])];
        holder.order(&mut fake, pods, now);
        holder.mark_active(&mut fake, &all(&[1, 2]), now);
        assert_eq!(fake.micros(&one), 2_048);
        fake.groups.insert(one, Duration::from_millis(100));
        holder.watch(&mut fake, false, now);
        assert_eq!(fake.micros(&one), 2_048);
        assert_eq!(holder.report(now).changed, [(1, 1)].into());
    }

    #[test]
    fn look_is_bounded_and_comes_to_all_groups_by_turns() {
        let (mut fake, now) = (Fake::default(), Instant::now());
        let pids: Vec<u32> = (1..=10).collect();
        let places: Vec<Place> = pids.iter().map(|pid| fake.start(*pid)).collect();
        let mut holder = Holder::new(ROUND);
        let pods = vec![
            pod("a", Some(50), &pids[..5]),
            pod("b", Some(50), &pids[5..]),
        ];
        holder.order(&mut fake, pods, now);
        holder.mark_active(&mut fake, &all(&pids), now);
        assert!(holder.is_contended());
        let mut left = Vec::new();
        for place in &places {
            fake.groups.insert(*place, Duration::from_millis(100));
        }
        for _ in 0..3 {
            holder.watch(&mut fake, false, now);
            let changed = places.iter().filter(|place| fake.micros(place) == 100_000);
            left.push(changed.count());
        }
        assert_eq!(left, [6, 2, 0]);
        // A group that is not active is looked at too, in a look at all.
        fake.groups.insert(places[0], Duration::from_millis(100));
        let later = now + ACTIVE_FOR;
        holder.mark_active(&mut fake, &BTreeSet::new(), later);
        assert!(!holder.is_contended());
        holder.watch(&mut fake, false, later);
        assert_eq!(fake.micros(&places[0]), 100_000);
        for _ in 0..3 {
            holder.watch(&mut fake, true, later);
        }
        assert_ne!(fake.micros(&places[0]), 100_000);
    }

    #[test]
    fn next_holder_takes_over_the_slices_that_it_finds() {
        let (mut fake, now) = (Fake::default(), Instant::now());
        let [one, other] = [fake.start(1), fake.start(2)];
        fake.groups.insert(one, Duration::from_millis(15));
        let mut holder = Holder::new(ROUND);
        holder.order(
            &mut fake,
            vec![pod("a", None, &[1]), pod("b", None, &[2])],
            now,
        );
        assert_eq!([fake.micros(&one), fake.micros(&other)], [2_048, 2_048]);
        assert_eq!(fake.sets, 1);
    }

    #[test]
    fn ended_processes_and_hidden_groups_are_in_the_report() {
        let (mut fake, now) = (Fake::default(), Instant::now());
        let place = fake.start(1);
        fake.start(2);
        let mut holder = Holder::new(ROUND);
        let pods = vec![pod("a", Some(50), &[1]), pod("b", Some(50), &[2])];
        holder.order(&mut fake, pods.clone(), now);
        fake.groups.remove(&place);
        fake.hidden = 3;
        holder.watch(&mut fake, true, now);
        holder.order(&mut fake, pods, now);
        let report = holder.report(now);
        assert_eq!((report.known, report.in_use), (1, Some(4)));
        assert_eq!((report.pods["a"].groups, report.pods["b"].groups), (0, 1));
    }
}
