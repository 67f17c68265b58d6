//! The binder: which waiters get which memory now, as a pure function of free memory and queue.
//!
//! The queue is walked in its order. A waiter that fits takes the fullest GPU that has room (best
//! fit). The first that does not fit gets a reservation: the free memory of the GPU that lacks
//! least is kept for it, and whoever comes later must fit into the rest. Nothing needs to be
//! remembered between two runs: kept memory only grows until the waiter fits (a reservation moves
//! only to a GPU with more of it), so small claims cannot starve a large one.
//!
//! What the operator reserved on a GPU is free for one waiter alone. That one takes it there if it can, and keeps
//! no other GPU while it waits.

/// A GPU, or the node's managed memory, in quanta.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bin {
    /// What may be bound in all; zero where nothing may be bound now.
    pub(super) capacity: u32,
    /// What is free of it.
    pub(super) free: u32,
}

/// A waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Want {
    /// How much it needs.
    pub(super) quanta: u32,
    /// Over how many bins at least.
    pub(super) bins: u16,
    /// The bin that is reserved for it.
    pub(super) reserved: Option<usize>,
}

/// One bin's part: its index and an amount.
pub(super) type Part = (usize, u32);

/// Who gets what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// For each waiter of the queue its parts, in order of bins; none: it goes on waiting.
    pub(super) places: Vec<Option<Vec<Part>>>,
    /// For each bin what is free there and kept by a reservation.
    pub(super) kept: Vec<u32>,
}

/// Places the waiters of `queue`, most urgent first, into `bins`. Of each bin so much is reserved.
pub(super) fn plan(bins: &[Bin], reserved: &[u32], queue: &[Want]) -> Plan {
    let mut bins = bins.to_vec();
    let mut kept: Vec<u32> = bins
        .iter()
        .zip(reserved)
        .map(|(bin, reserved)| bin.free.min(*reserved))
        .collect();
    for (bin, kept) in bins.iter_mut().zip(&kept) {
        bin.free -= kept;
    }
    let mut waits = false;
    let mut places = Vec::with_capacity(queue.len());
    for want in queue {
        let Some(shares) = shares(&bins, *want) else {
            places.push(None);
            continue;
        };
        let own = want
            .reserved
            .map(|bin| (bin, std::mem::take(&mut kept[bin])));
        if let Some((bin, kept)) = own {
            bins[bin].free += kept;
        }
        let place = in_own(&bins, &shares, want.reserved).or_else(|| best_fit(&bins, &shares));
        match &place {
            Some(parts) => {
                for &(bin, share) in parts {
                    bins[bin].free -= share;
                }
            }
            None if !waits && own.is_none() => {
                waits = true;
                for (bin, share) in least_lacking(&bins, &shares) {
                    let keep = bins[bin].free.min(share);
                    kept[bin] += keep;
                    bins[bin].free -= keep;
                }
            }
            None => {}
        }
        if let Some((bin, before)) = own {
            let taken = place.iter().flatten().find(|(at, _)| *at == bin);
            kept[bin] = before.saturating_sub(taken.map_or(0, |(_, share)| *share));
            bins[bin].free -= kept[bin];
        }
        places.push(place);
    }
    Plan { places, kept }
}

/// How `want` is cut, largest share first: evenly over as few bins as could hold it if they were
/// empty. Where no even cut fits (bins of different size), shares are capped by the bins.
/// None if all bins together are too small or too few.
pub(super) fn shares(bins: &[Bin], want: Want) -> Option<Vec<u32>> {
    let mut capacities: Vec<u32> = bins
        .iter()
        .map(|bin| bin.capacity)
        .filter(|&capacity| capacity > 0)
        .collect();
    capacities.sort_unstable_by(|a, b| b.cmp(a));
    let most = capacities.len().min(want.quanta as usize);
    let least = usize::from(want.bins).clamp(1, want.quanta.max(1) as usize);
    (least..=most)
        .map(|n| even(want.quanta, n))
        .find(|shares| shares.iter().zip(&capacities).all(|(s, c)| s <= c))
        .or_else(|| {
            (least..=most)
                .map(|n| &capacities[..n])
                .find(|largest| largest.iter().sum::<u32>() >= want.quanta)
                .map(|largest| capped(want.quanta, largest))
        })
}

/// `quanta` in `n` parts that differ by one at most.
fn even(quanta: u32, n: usize) -> Vec<u32> {
    capped(quanta, &vec![u32::MAX; n])
}

/// `quanta` as evenly as `caps` (descending, enough together) allow, in their order.
fn capped(quanta: u32, caps: &[u32]) -> Vec<u32> {
    let mut left = quanta;
    let mut shares = vec![0; caps.len()];
    for (i, (share, &cap)) in shares.iter_mut().zip(caps).enumerate().rev() {
        *share = cap.min(left / (i as u32 + 1));
        left -= *share;
    }
    shares
}

/// The bin that is reserved for a waiter, where it can take all of its memory there.
fn in_own(bins: &[Bin], shares: &[u32], reserved: Option<usize>) -> Option<Vec<Part>> {
    let (bin, [share]) = (reserved?, shares) else {
        return None;
    };
    (bins[bin].capacity > 0 && bins[bin].free >= *share).then(|| vec![(bin, *share)])
}

/// A bin for each share: the one that is left with least.
fn best_fit(bins: &[Bin], shares: &[u32]) -> Option<Vec<Part>> {
    choose(bins, shares, |bin, share| {
        (bin.free >= share).then(|| bin.free.wrapping_neg())
    })
}

/// A bin for each share: the one with most free. Complete, for `shares` fit the capacities.
fn least_lacking(bins: &[Bin], shares: &[u32]) -> Vec<Part> {
    choose(bins, shares, |bin, share| {
        (bin.capacity >= share).then_some(bin.free)
    })
    .unwrap_or_default()
}

/// Gives every share its own bin, the one that `score` ranks highest (the first of equals).
/// Shares come largest first, so what can take one share can take every later one, and taking
/// greedily never misses a complete choice.
fn choose(
    bins: &[Bin],
    shares: &[u32],
    score: impl Fn(&Bin, u32) -> Option<u32>,
) -> Option<Vec<Part>> {
    let mut parts: Vec<Part> = Vec::with_capacity(shares.len());
    for &share in shares {
        let (_, bin) = bins
            .iter()
            .enumerate()
            .filter(|(i, bin)| bin.capacity > 0 && parts.iter().all(|(taken, _)| taken != i))
            .filter_map(|(i, bin)| Some((score(bin, share)?, std::cmp::Reverse(i))))
            .max()?;
        parts.push((bin.0, share));
    }
    parts.sort_unstable();
    Some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bins(free: &[u32]) -> Vec<Bin> {
        free.iter()
            .map(|&free| Bin { capacity: 16, free })
            .collect()
    }

    fn one(quanta: u32) -> Want {
        Want {
            quanta,
            bins: 1,
            reserved: None,
        }
    }

    fn spread(quanta: u32, bins: u16) -> Want {
        Want {
            bins,
            ..one(quanta)
        }
    }

    fn reserving(quanta: u32, bin: usize) -> Want {
        Want {
            reserved: Some(bin),
            ..one(quanta)
        }
    }

    #[test]
    fn what_is_reserved_goes_to_its_waiter_and_to_nobody_before_it() {
        let bins = bins(&[8, 3]);
        let others = plan(&bins, &[8, 0], &[one(8), one(3)]);
        assert_eq!(others.places, [None, None]);
        assert_eq!(others.kept, [8, 3], "the first of them keeps the other GPU");
        let owner = plan(&bins, &[8, 0], &[one(3), reserving(8, 0)]);
        assert_eq!(owner.places, [Some(vec![(1, 3)]), Some(vec![(0, 8)])]);
        assert_eq!(owner.kept, [0, 0]);
    }

    #[test]
    fn a_waiter_with_a_reservation_keeps_that_gpu_and_no_other() {
        let plan = plan(&bins(&[4, 6]), &[8, 0], &[reserving(8, 0), one(6)]);
        assert_eq!(plan.places, [None, Some(vec![(1, 6)])]);
        assert_eq!(plan.kept, [4, 0]);
    }

    #[test]
    fn a_reservation_smaller_than_what_is_free_leaves_the_rest() {
        let plan = plan(&bins(&[12]), &[8], &[one(4), one(5)]);
        assert_eq!(plan.places, [Some(vec![(0, 4)]), None]);
        assert_eq!(plan.kept, [8]);
    }

    #[test]
    fn a_waiter_that_fits_elsewhere_only_goes_there() {
        let plan = plan(&bins(&[4, 8]), &[8, 0], &[reserving(8, 0)]);
        assert_eq!(plan.places, [Some(vec![(1, 8)])]);
    }

    #[test]
    fn a_claim_goes_where_it_leaves_least() {
        let plan = plan(&bins(&[16, 5, 7]), &[0; 4], &[one(4)]);
        assert_eq!(plan.places, [Some(vec![(1, 4)])]);
        assert_eq!(plan.kept, [0, 0, 0]);
    }

    #[test]
    fn the_first_waiter_keeps_the_gpu_that_lacks_least() {
        let plan = plan(
            &bins(&[4, 6, 2]),
            &[0; 4],
            &[one(8), one(5), one(3), one(2)],
        );
        assert_eq!(
            plan.places,
            [None, None, Some(vec![(0, 3)]), Some(vec![(2, 2)])]
        );
        assert_eq!(plan.kept, [0, 6, 0]);
    }

    #[test]
    fn a_claim_larger_than_a_gpu_is_spread_evenly_over_as_few_as_hold_it() {
        let plan = plan(&bins(&[16, 16, 16, 16]), &[0; 4], &[one(33)]);
        assert_eq!(plan.places, [Some(vec![(0, 11), (1, 11), (2, 11)])]);
    }

    #[test]
    fn a_shape_is_spread_even_if_one_gpu_had_room() {
        let plan = plan(&bins(&[3, 16, 4]), &[0; 4], &[spread(7, 2)]);
        assert_eq!(plan.places, [Some(vec![(0, 3), (2, 4)])]);
    }

    #[test]
    fn a_spread_waiter_keeps_its_shares_and_no_more() {
        let plan = plan(&bins(&[10, 2, 1]), &[0; 4], &[spread(8, 2), one(6)]);
        assert_eq!(plan.places, [None, Some(vec![(0, 6)])]);
        assert_eq!(plan.kept, [4, 2, 0]);
    }

    #[test]
    fn gpus_of_different_size_take_what_they_can() {
        let bins = [
            Bin {
                capacity: 80,
                free: 80,
            },
            Bin {
                capacity: 20,
                free: 20,
            },
        ];
        assert_eq!(shares(&bins, one(90)), Some(vec![70, 20]));
        assert_eq!(shares(&bins, one(101)), None);
    }

    #[test]
    fn what_the_node_cannot_hold_reserves_nothing() {
        let plan = plan(&bins(&[4, 4]), &[0; 4], &[spread(4, 3), one(4)]);
        assert_eq!(plan.places, [None, Some(vec![(0, 4)])]);
        assert_eq!(plan.kept, [0, 0]);
    }

    #[test]
    fn a_bin_without_capacity_takes_nothing() {
        let dead = Bin {
            capacity: 0,
            free: 0,
        };
        assert_eq!(plan(&[dead], &[0], &[one(1)]).places, [None]);
    }
}
