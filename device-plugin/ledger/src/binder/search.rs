//! Searches a placement for one request.

use std::cmp::Reverse;

use super::{Bin, Part, Request, amount_on};

/// The most places that are tried for one request. This bounds the agent's work for a pod's spread.
const MAX_TRIES: u32 = 256;

/// The criterion by which a place is chosen.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Aim {
    /// The bin that is left with the least free memory.
    BestFit,
    /// The bin with the most free memory.
    WorstFit,
    /// The bin with the most free memory, among those that have room once no pod has any of it.
    SmallestShortage,
    /// The bin with the most free memory, among those that will have room. They have it once no pod
    /// has any of their memory and the memory of ended pods is free too.
    EventualShortage,
}

impl Aim {
    fn is_shortage(self) -> bool {
        matches!(self, Self::SmallestShortage | Self::EventualShortage)
    }
}

/// The search for a place for every container of a request.
pub(super) struct Search<'a> {
    bins: &'a [Bin],
    request: &'a Request,
    shares: &'a [Vec<u32>],
    aim: Aim,
    /// Whether the reserved bins are the first choice. Otherwise they are the last one.
    is_reserved_first: bool,
    placed: Vec<Vec<Part>>,
    tries_left: u32,
}

impl<'a> Search<'a> {
    pub(super) fn new(
        bins: &'a [Bin],
        request: &'a Request,
        shares: &'a [Vec<u32>],
        aim: Aim,
    ) -> Self {
        Self {
            bins,
            request,
            shares,
            aim,
            is_reserved_first: true,
            placed: vec![Vec::new(); request.quanta.len()],
            tries_left: MAX_TRIES,
        }
    }

    pub(super) fn with_reserved_bins_last(self) -> Self {
        Self {
            is_reserved_first: false,
            ..self
        }
    }

    pub(super) fn run(mut self) -> Option<Vec<Vec<Part>>> {
        let mut order: Vec<usize> = (0..self.request.quanta.len()).collect();
        order.sort_by_key(|container| Reverse(self.request.quanta[*container]));
        self.place(&order).then_some(self.placed)
    }

    /// Places these containers, in their order.
    fn place(&mut self, order: &[usize]) -> bool {
        let Some((&container, rest)) = order.split_first() else {
            return true;
        };
        let shares = self.shares;
        let choices = match shares[container].as_slice() {
            [share] => self
                .ranked_bins(container, *share)
                .map(|bin| vec![(bin, *share)])
                .collect(),
            shares => Vec::from_iter(self.spread(container, shares)),
        };
        for choice in choices {
            let Some(tries) = self.tries_left.checked_sub(1) else {
                break;
            };
            self.tries_left = tries;
            self.placed[container] = choice;
            if self.place(rest) {
                return true;
            }
        }
        self.placed[container].clear();
        false
    }

    /// The bins that can take a share of a container, the best first: the reserved ones first
    /// or last, the others by `aim`.
    fn ranked_bins(&self, container: usize, share: u32) -> std::vec::IntoIter<usize> {
        let usable = self
            .bins
            .iter()
            .enumerate()
            .filter(|(_, bin)| bin.capacity > 0);
        let mut ranked: Vec<_> = usable
            .filter_map(|(index, bin)| {
                let concurrent = self
                    .request
                    .concurrent_usage(container, &self.placed, index);
                // Memory bound to the pod is not free, and is part of the concurrent usage.
                let bound: u32 = self
                    .request
                    .bound
                    .iter()
                    .map(|parts| amount_on(parts, index))
                    .sum();
                let free = bin.free.saturating_add(bound).saturating_sub(concurrent);
                let available = match self.aim {
                    Aim::BestFit | Aim::WorstFit => free,
                    Aim::SmallestShortage => bin.attainable.saturating_sub(concurrent),
                    Aim::EventualShortage => bin.eventual.saturating_sub(concurrent),
                };
                let is_own = self.request.reserved_bins.contains(&index);
                let is_late = !self.aim.is_shortage() && is_own != self.is_reserved_first;
                let rank = match self.aim {
                    Aim::BestFit => free,
                    Aim::WorstFit | Aim::SmallestShortage | Aim::EventualShortage => {
                        u32::MAX - free
                    }
                };
                // A container may add nothing to the pod's peak if it runs only while other
                // containers do not.
                let peak = self.request.peak(&self.placed, index);
                let adds = concurrent
                    .saturating_add(share)
                    .saturating_sub(peak)
                    .min(share);
                (available >= share).then_some((is_late, adds, rank, index))
            })
            .collect();
        ranked.sort_unstable();
        let ranked: Vec<_> = ranked.into_iter().map(|(.., index)| index).collect();
        ranked.into_iter()
    }

    /// Gives every share of a container its own bin, the best one. Shares come largest first: a bin
    /// that can take one share can take every later one, so the greedy choice never misses a
    /// complete one.
    fn spread(&self, container: usize, shares: &[u32]) -> Option<Vec<Part>> {
        let mut parts: Vec<Part> = Vec::with_capacity(shares.len());
        for &share in shares {
            let is_free = |bin: &usize| {
                self.bins[*bin].is_combinable && parts.iter().all(|(taken, _)| taken != bin)
            };
            let bin = self.ranked_bins(container, share).find(is_free)?;
            parts.push((bin, share));
        }
        parts.sort_unstable();
        Some(parts)
    }
}
