//! Selects a minimal set of victims on one GPU.

use crate::quanta::Quanta;

/// A pod that may be evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Candidate<'a> {
    pub(super) uid: &'a str,
    pub(super) priority: i32,
    /// The candidate's memory on the GPU.
    pub(super) quanta: Quanta,
}

/// The fewest `candidates` that together free `lacking`, in eviction order. `None` when all of them
/// do not suffice.
///
/// Among equal counts the highest priority of the victims is minimal, and then the excess is small.
/// After some victims are gone, the selection among equal priorities yields the rest of them.
pub(super) fn minimal_victims<'a>(
    candidates: &[Candidate<'a>],
    lacking: Quanta,
) -> Option<Vec<Candidate<'a>>> {
    let mut largest = candidates.to_vec();
    largest.sort_by(|a, b| (b.quanta, a.priority, a.uid).cmp(&(a.quanta, b.priority, b.uid)));
    let count = count_covering(&largest, lacking)?;
    let mut priorities: Vec<i32> = candidates
        .iter()
        .map(|candidate| candidate.priority)
        .collect();
    priorities.sort_unstable();
    priorities.dedup();
    let low_priority = |most: i32| -> Vec<Candidate<'a>> {
        let low_priority = largest
            .iter()
            .filter(|candidate| candidate.priority <= most);
        low_priority.copied().collect()
    };
    let low_priority = priorities
        .into_iter()
        .map(low_priority)
        .find(|low_priority| count_covering(low_priority, lacking) == Some(count))
        .unwrap_or_default();
    let (chosen, others) = low_priority.split_at(count);
    let mut chosen = chosen.to_vec();
    // The last victim may be larger than necessary.
    if let Some(last) = chosen.pop() {
        let still = lacking.minus(chosen.iter().map(|candidate| candidate.quanta).sum());
        let smallest = others
            .iter()
            .rev()
            .find(|candidate| candidate.quanta >= still);
        chosen.push(*smallest.unwrap_or(&last));
    }
    Some(chosen)
}

/// How many of the largest candidates suffice.
fn count_covering(largest_first: &[Candidate<'_>], lacking: Quanta) -> Option<usize> {
    let mut sum = Quanta::ZERO;
    if lacking == Quanta::ZERO {
        return Some(0);
    }
    let last = largest_first.iter().position(|candidate| {
        sum = sum.plus(candidate.quanta);
        sum >= lacking
    });
    last.map(|last| last + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NAMES: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];

    fn candidates(of: &[(u64, i32)]) -> Vec<Candidate<'static>> {
        let candidate = |(uid, &(quanta, priority)): (&&'static str, &(u64, i32))| Candidate {
            uid,
            priority,
            quanta: Quanta::new(quanta),
        };
        NAMES.iter().zip(of).map(candidate).collect()
    }

    fn chosen(of: &[(u64, i32)], lacking: u64) -> Option<String> {
        let all = candidates(of);
        let chosen = minimal_victims(&all, Quanta::new(lacking))?;
        Some(chosen.iter().map(|candidate| candidate.uid).collect())
    }

    #[test]
    fn one_large_victim_is_preferred_over_two_small() {
        assert_eq!(chosen(&[(4, -10), (8, -10), (4, -10)], 8).unwrap(), "b");
    }

    #[test]
    fn lowest_priority_then_smallest_victims_are_chosen() {
        assert_eq!(chosen(&[(8, 0), (8, -10)], 6).unwrap(), "b");
        assert_eq!(chosen(&[(12, -10), (6, -10), (8, -10)], 6).unwrap(), "b");
        assert_eq!(chosen(&[(12, -10), (6, -10), (3, -10)], 14).unwrap(), "ac");
    }

    #[test]
    fn no_victim_when_none_is_needed_or_none_suffices() {
        assert_eq!(chosen(&[(8, 0)], 0).unwrap(), "");
        assert_eq!(chosen(&[], 0).unwrap(), "");
        assert_eq!(chosen(&[(8, 0), (4, 0)], 13), None);
    }

    proptest! {
        /// Another operator may have evicted some of the victims.
        #[test]
        fn choice_is_stable_after_some_victims_are_gone(
            sizes in prop::collection::vec(1_u64..8, 1..8), lacking in 1_u64..30, went in 0_usize..8,
        ) {
            let of: Vec<_> = sizes.into_iter().map(|size| (size, -10)).collect();
            let mut all = candidates(&of);
            let Some(chosen) = minimal_victims(&all, Quanta::new(lacking)) else { return Ok(()) };
            let (went, rest) = chosen.split_at(went.min(chosen.len()));
            all.retain(|candidate| !went.contains(candidate));
            let lacking = Quanta::new(lacking).minus(went.iter().map(|victim| victim.quanta).sum());
            prop_assert_eq!(minimal_victims(&all, lacking), Some(rest.to_vec()));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100_000))]
        /// Compares with every possible choice.
        #[test]
        fn victims_are_minimal_by_count_then_priority(
            of in prop::collection::vec((1_u64..20, -2_i32..3), 0..7),
            lacking in 0_u64..60,
        ) {
            let all = candidates(&of);
            let every = (0..1_u32 << all.len()).filter_map(|set| {
                let picked: Vec<_> = (0..all.len()).filter(|at| set >> at & 1 == 1).map(|at| all[at]).collect();
                let sum: Quanta = picked.iter().map(|victim| victim.quanta).sum();
                let highest = picked.iter().map(|victim| victim.priority).max();
                (sum >= Quanta::new(lacking)).then_some((picked.len(), highest))
            });
            let best = every.min();
            let found = minimal_victims(&all, Quanta::new(lacking));
            prop_assert_eq!(best, found.as_ref().map(|found| {
                (found.len(), found.iter().map(|victim| victim.priority).max())
            }));
            if let Some(found) = found {
                let sum: Quanta = found.iter().map(|victim| victim.quanta).sum();
                prop_assert!(sum >= Quanta::new(lacking));
                // No victim is superfluous.
                for victim in &found {
                    prop_assert!(sum.minus(victim.quanta) < Quanta::new(lacking));
                }
            }
        }
    }
}
