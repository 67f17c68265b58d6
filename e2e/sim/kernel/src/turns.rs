//! Gives the channel groups of a GPU turns: pure.
//!
//! A group with work runs for its slice, and then the next one with work. A group without work has
//! no turn, and a group whose work ends leaves the rest of its turn to the next.

use std::collections::BTreeMap;
use std::time::Duration;

use bursar_sim_state::rm::ENDLESS;

/// The shortest turn, so that a slice of nothing does not stop the others.
const LEAST: Duration = Duration::from_micros(10);

#[derive(Debug, Clone)]
struct Group {
    slice: Duration,
    /// Nanoseconds of the GPU alone, or [`ENDLESS`].
    work: u64,
    /// All nanoseconds that it was given.
    submitted: u64,
    finished: Duration,
}

impl Group {
    /// Runs for as long as there is work, and returns how long that was.
    fn run(&mut self, most: Duration) -> Duration {
        let nanos = u64::try_from(most.as_nanos()).unwrap_or(u64::MAX);
        let ran = Duration::from_nanos(nanos.min(self.work));
        if self.work != ENDLESS {
            self.work = self.work.saturating_sub(nanos);
        }
        self.finished += ran;
        ran
    }
}

/// The turns of one GPU. `K` identifies a group.
#[derive(Debug, Clone)]
pub struct Turns<K> {
    groups: BTreeMap<K, Group>,
    /// The group that has the GPU, and how long it has had it.
    current: Option<(K, Duration)>,
}

impl<K> Default for Turns<K> {
    fn default() -> Turns<K> {
        Turns {
            groups: BTreeMap::new(),
            current: None,
        }
    }
}

impl<K: Copy + Ord> Turns<K> {
    /// Adds a group without work.
    pub fn insert(&mut self, key: K, slice: Duration) {
        let group = Group {
            slice: slice.max(LEAST),
            work: 0,
            submitted: 0,
            finished: Duration::ZERO,
        };
        self.groups.insert(key, group);
    }

    /// Removes a group with its work.
    pub fn remove(&mut self, key: K) {
        self.groups.remove(&key);
    }

    /// Sets a slice, which ends the group's turn.
    pub fn set_slice(&mut self, key: K, slice: Duration) {
        if let Some(group) = self.groups.get_mut(&key) {
            group.slice = slice.max(LEAST);
            if let Some((current, had)) = &mut self.current
                && *current == key
            {
                *had = Duration::MAX;
            }
        }
    }

    /// Adds work to a group; 0 takes all of its work away, which counts as done. Returns all work
    /// that the group was given.
    pub fn submit(&mut self, key: K, nanos: u64) -> u64 {
        let Some(group) = self.groups.get_mut(&key) else {
            return 0;
        };
        group.work = match nanos {
            0 => 0,
            _ => group.work.saturating_add(nanos),
        };
        group.submitted = group.submitted.saturating_add(nanos);
        group.submitted
    }

    /// The work of a group that is done, of all that it was given.
    pub fn done(&self, key: K) -> u64 {
        let group = self.groups.get(&key);
        group.map_or(0, |group| group.submitted - group.work)
    }

    /// Whether a group has work, and how long it has had the GPU so far.
    pub fn progress(&self, key: K) -> Option<(bool, Duration)> {
        let group = self.groups.get(&key)?;
        Some((group.work > 0, group.finished))
    }

    /// Lets time pass.
    pub fn advance(&mut self, mut time: Duration) {
        while !time.is_zero() {
            let Some((key, had)) = self.next_turn() else {
                return;
            };
            if had.is_zero() {
                time -= self.whole_rounds(time);
            }
            let Some(group) = self.groups.get_mut(&key) else {
                return;
            };
            let ran = group.run(time.min(group.slice.saturating_sub(had)));
            time -= ran;
            self.current = Some((key, had + ran));
        }
    }

    /// The group that has the GPU now: the current one while it has work and a rest of its turn, or
    /// the next one with work.
    fn next_turn(&self) -> Option<(K, Duration)> {
        let has_rest = |(key, had): &(K, Duration)| {
            let group = self.groups.get(key);
            group.is_some_and(|group| group.work > 0 && *had < group.slice)
        };
        if let Some(current) = self.current.filter(has_rest) {
            return Some(current);
        }
        let mut busy = self.groups.iter().filter(|(_, group)| group.work > 0);
        let after = |key: &K| self.current.is_none_or(|(current, _)| *key > current);
        let next = busy.clone().find(|(key, _)| after(key));
        next.or_else(|| busy.next())
            .map(|(key, _)| (*key, Duration::ZERO))
    }

    /// Gives each group with work all but one of the turns that it has in `time` for certain, and
    /// returns how long they take. The order of turns stays as it is.
    fn whole_rounds(&mut self, time: Duration) -> Duration {
        let mut busy: Vec<&mut Group> = self
            .groups
            .values_mut()
            .filter(|group| group.work > 0)
            .collect();
        let round: Duration = busy.iter().map(|group| group.slice).sum();
        let times =
            |of: u128, slice: Duration| u32::try_from(of / slice.as_nanos()).unwrap_or(u32::MAX);
        let by_work = busy
            .iter()
            .map(|group| times(group.work.into(), group.slice));
        let rounds = by_work
            .min()
            .unwrap_or(0)
            .min(times(time.as_nanos(), round));
        let rounds = rounds.saturating_sub(1);
        for group in &mut busy {
            group.run(group.slice * rounds);
        }
        round * rounds
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn turns(slices: &[u64]) -> Turns<usize> {
        let mut turns = Turns::default();
        for (key, micros) in slices.iter().enumerate() {
            turns.insert(key, Duration::from_micros(*micros));
        }
        turns
    }

    fn finished(turns: &Turns<usize>, key: usize) -> u128 {
        turns.progress(key).unwrap().1.as_micros()
    }

    #[test]
    fn busy_groups_share_by_their_slices() {
        let mut turns = turns(&[8_000, 500, 2_048]);
        turns.submit(0, ENDLESS);
        turns.submit(1, ENDLESS);
        turns.advance(Duration::from_micros(8_500 * 100));
        assert_eq!(finished(&turns, 0), 800_000);
        assert_eq!(finished(&turns, 1), 50_000);
        assert_eq!(finished(&turns, 2), 0, "a group without work has no turn");
    }

    #[test]
    fn turn_continues_over_several_advances() {
        let mut turns = turns(&[1_000, 1_000]);
        turns.submit(0, ENDLESS);
        turns.submit(1, ENDLESS);
        for _ in 0..3 {
            turns.advance(Duration::from_micros(600));
        }
        assert_eq!([finished(&turns, 0), finished(&turns, 1)], [1_000, 800]);
    }

    #[test]
    fn work_that_ends_leaves_its_turn_to_the_others() {
        let mut turns = turns(&[1_000, 1_000]);
        turns.submit(0, 1_500_000);
        turns.submit(1, ENDLESS);
        turns.advance(Duration::from_millis(10));
        assert_eq!([finished(&turns, 0), finished(&turns, 1)], [1_500, 8_500]);
        assert!(!turns.progress(0).unwrap().0);
        assert_eq!(turns.done(0), 1_500_000);
        assert_eq!(turns.submit(0, 7), 1_500_007);
        assert_eq!((turns.done(0), turns.done(1)), (1_500_000, 0));
        turns.submit(0, 0);
        assert_eq!(turns.done(0), 1_500_007);
        turns.submit(1, 0);
        turns.advance(Duration::from_millis(10));
        assert_eq!(finished(&turns, 1), 8_500);
    }

    #[test]
    fn set_slice_ends_the_turn_and_counts_from_then() {
        let mut turns = turns(&[10_000, 1_000]);
        turns.submit(0, ENDLESS);
        turns.submit(1, ENDLESS);
        turns.advance(Duration::from_micros(100));
        turns.set_slice(0, Duration::from_micros(1_000));
        turns.advance(Duration::from_micros(1_500));
        assert_eq!([finished(&turns, 0), finished(&turns, 1)], [600, 1_000]);
        turns.remove(0);
        turns.advance(Duration::from_micros(500));
        assert_eq!(finished(&turns, 1), 1_500);
    }

    proptest! {
        #[test]
        fn gpu_is_never_idle_beside_work_and_parts_are_the_slices(
            slices in proptest::collection::vec(50_u64..20_000, 1..6),
            busy in proptest::collection::vec(any::<bool>(), 6),
            steps in proptest::collection::vec(1_u64..300_000, 1..20),
        ) {
            let mut turns = turns(&slices);
            let busy: Vec<usize> = (0..slices.len()).filter(|key| busy[*key]).collect();
            for key in &busy {
                turns.submit(*key, ENDLESS);
            }
            for micros in &steps {
                turns.advance(Duration::from_micros(*micros));
            }
            let total: u64 = steps.iter().sum();
            let done: u128 = busy.iter().map(|key| finished(&turns, *key)).sum();
            prop_assert_eq!(done, if busy.is_empty() { 0 } else { u128::from(total) });
            let round: u64 = busy.iter().map(|key| slices[*key]).sum();
            for key in busy {
                let rounds = total / round;
                let slice = slices[key];
                let own = finished(&turns, key) as u64;
                prop_assert!((rounds * slice..=(rounds + 1) * slice).contains(&own));
            }
        }
    }
}
