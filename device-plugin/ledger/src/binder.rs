//! Places queued claims on GPUs: a pure function of free memory and queue.
//!
//! The binder goes through the queue in its order. A claim that fits takes the fullest GPU with
//! room (best fit). The first claim that does not fit has the smallest shortage on some GPU. The
//! binder sets the free memory of that GPU aside for it, and later claims must fit into the rest.
//!
//! No state is kept between two runs. The memory set aside only grows until the claim fits, and
//! moves only to a GPU with more of it. So small claims cannot starve a large one.
//!
//! A request is all containers of a pod that have no memory yet: all of them are placed, or none.
//! The largest is placed first. The search backtracks from a choice that leaves no place for
//! another container, within `MAX_TRIES`.
//!
//! Memory that the operator reserved on a GPU is free for one pod alone. That pod takes it there if
//! it can, and nothing else is set aside for it meanwhile.

mod search;

use std::collections::BTreeSet;

use bursar_crds::shares::{self, GpuCapacity};
use search::{Aim, Search};

/// A GPU, or the node's managed memory, in quanta.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bin {
    /// The memory that may be bound in all; zero on an unhealthy GPU.
    pub(super) capacity: u32,
    /// The capacity without memory that stays unavailable. A request waits for more of the bin only
    /// if no other bin can hold it.
    pub(super) attainable: u32,
    /// The capacity without memory that no end of a pod frees: a request waits for no more.
    pub(super) eventual: u32,
    /// The free part of the capacity.
    pub(super) free: u32,
    /// Whether one program can use the bin together with others. It cannot for a MIG instance.
    pub(super) is_combinable: bool,
}

/// The containers of a pod that are placed together.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Request {
    /// The quanta of each container.
    pub(super) quanta: Vec<u32>,
    /// The least number of bins that each container is spread over.
    pub(super) min_bins: u16,
    /// The bins that are reserved for the pod.
    pub(super) reserved_bins: Vec<usize>,
    /// The memory that other containers of the pod have already.
    pub(super) bound: Vec<Vec<Part>>,
    /// The sets of containers that may run at the same time, by number: those of `quanta` first,
    /// then `bound`.
    pub(super) concurrent_sets: Vec<u64>,
}

/// One bin's part: its index and an amount.
pub(super) type Part = (usize, u32);

/// The result of one run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// For each request of the queue, the parts of each container in order of bins. None where it
    /// keeps waiting.
    pub(super) places: Vec<Option<Vec<Vec<Part>>>>,
    /// For each bin, the free memory that is set aside for a request.
    pub(super) set_aside: Vec<u32>,
    /// The position of the request for which more than reservations is set aside: the first that
    /// does not fit.
    pub(super) first_waiting: Option<usize>,
}

/// Places the requests of `queue`, most urgent first, into `bins`, of which `reserved` is set
/// aside.
pub(super) fn plan(bins: &[Bin], reserved: &[u32], queue: &[Request]) -> Plan {
    let mut memory = Memory::with_reservations(bins, reserved);
    let mut first_waiting = None;
    // Bins only lose free memory here: a request like one that did not fit needs no search.
    let mut unplaced = BTreeSet::new();
    let mut places = Vec::with_capacity(queue.len());
    for (position, request) in queue.iter().enumerate() {
        let shares = match unplaced.contains(request) {
            true => None,
            false => all_shares(&memory.bins, request),
        };
        let Some(shares) = shares else {
            places.push(None);
            continue;
        };
        let own = memory.free_reservations(request);
        let place = memory.find_place(request, &shares);
        match &place {
            Some(place) => memory.take(request, place),
            None if own.is_empty() => {
                unplaced.insert(request);
                if first_waiting.is_none() && memory.set_aside_shortage(request, &shares) {
                    first_waiting = Some(position);
                }
            }
            None => {}
        }
        memory.restore_reservations(own, request, place.as_deref());
        places.push(place);
    }
    Plan {
        places,
        set_aside: memory.set_aside,
        first_waiting,
    }
}

/// The bins during one run, and what is set aside of each.
struct Memory {
    /// The free parts of the bins are without the memory that is set aside.
    bins: Vec<Bin>,
    set_aside: Vec<u32>,
}

impl Memory {
    fn with_reservations(bins: &[Bin], reserved: &[u32]) -> Self {
        let mut bins = bins.to_vec();
        let set_aside: Vec<u32> = bins
            .iter()
            .zip(reserved)
            .map(|(bin, reserved)| bin.free.min(*reserved))
            .collect();
        for (bin, set_aside) in bins.iter_mut().zip(&set_aside) {
            bin.free -= set_aside;
        }
        Self { bins, set_aside }
    }

    /// Frees what is reserved for a request. Returns it by bin.
    fn free_reservations(&mut self, request: &Request) -> Vec<Part> {
        let own: Vec<Part> = request
            .reserved_bins
            .iter()
            .map(|&bin| (bin, std::mem::take(&mut self.set_aside[bin])))
            .collect();
        for &(bin, set_aside) in &own {
            self.bins[bin].free += set_aside;
        }
        own
    }

    /// Finds a place for all containers of a request.
    fn find_place(&self, request: &Request, shares: &[Vec<u32>]) -> Option<Vec<Vec<Part>>> {
        if !request.may_fit(&self.bins) {
            return None;
        }
        let search = |aim| Search::new(&self.bins, request, shares, aim).run();
        let reserved_last = |aim| {
            let search = Search::new(&self.bins, request, shares, aim).with_reserved_bins_last();
            request.reserved_bins.first().and_then(|_| search.run())
        };
        // A request that empty bins could hold must fit empty bins: the second search is that of
        // `fits_when_empty`. The operator reserves for what fits on no other bin, which the last
        // two searches place.
        search(Aim::BestFit)
            .or_else(|| search(Aim::WorstFit))
            .or_else(|| reserved_last(Aim::BestFit))
            .or_else(|| reserved_last(Aim::WorstFit))
    }

    /// Takes the memory of a place from the bins.
    fn take(&mut self, request: &Request, place: &[Vec<Part>]) {
        for (index, bin) in self.bins.iter_mut().enumerate() {
            bin.free = bin.free.saturating_sub(request.taken(place, index));
        }
    }

    /// Sets free memory aside where a request lacks least. Returns false, and sets nothing aside,
    /// if empty bins could not hold the request.
    fn set_aside_shortage(&mut self, request: &Request, shares: &[Vec<u32>]) -> bool {
        let search = |aim| Search::new(&self.bins, request, shares, aim).run();
        let Some(lacking) = search(Aim::SmallestShortage).or_else(|| search(Aim::EventualShortage))
        else {
            return false;
        };
        for (index, bin) in self.bins.iter_mut().enumerate() {
            let keep = bin.free.min(request.taken(&lacking, index));
            self.set_aside[index] += keep;
            bin.free -= keep;
        }
        true
    }

    /// Sets aside again what was reserved for a request and is not taken by its place.
    fn restore_reservations(
        &mut self,
        own: Vec<Part>,
        request: &Request,
        place: Option<&[Vec<Part>]>,
    ) {
        for (bin, before) in own {
            let taken = place.map_or(0, |place| request.taken(place, bin));
            let kept = before.saturating_sub(taken).min(self.bins[bin].free);
            self.set_aside[bin] = kept;
            self.bins[bin].free -= kept;
        }
    }
}

impl Request {
    /// Whether the free memory of all bins together suffices. The search is only for where it does.
    fn may_fit(&self, bins: &[Bin]) -> bool {
        let new = self.quanta.iter().map(|quanta| u64::from(*quanta));
        let parts = self.bound.iter().map(|parts| parts.iter());
        let bound = parts.map(|parts| parts.map(|(_, share)| u64::from(*share)).sum());
        let sizes: Vec<u64> = new.chain(bound.clone()).collect();
        let size_of_set = |set: &u64| -> u64 {
            let sizes = sizes.iter().enumerate();
            sizes
                .map(|(number, size)| size * ((set >> number) & 1))
                .sum()
        };
        let most = self.concurrent_sets.iter().map(size_of_set).max();
        let free = bins.iter().map(|bin| u64::from(bin.free));
        most.unwrap_or_default() <= free.chain(bound).sum()
    }

    /// The memory of a bin that the pod takes with these places, besides what is bound to it.
    pub(super) fn taken(&self, placed: &[Vec<Part>], bin: usize) -> u32 {
        self.peak(placed, bin)
            .saturating_sub(self.bound.iter().map(|parts| amount_on(parts, bin)).sum())
    }

    /// The most that containers which run at the same time have of a bin.
    pub(super) fn peak(&self, placed: &[Vec<Part>], bin: usize) -> u32 {
        let sets = self.concurrent_sets.iter();
        sets.map(|set| self.usage_of_set(*set, placed, bin))
            .max()
            .unwrap_or_default()
    }

    /// The memory of a bin that the containers of a set have.
    fn usage_of_set(&self, set: u64, placed: &[Vec<Part>], bin: usize) -> u32 {
        let of = |(number, parts): (usize, &Vec<Part>)| match (set >> number) & 1 {
            0 => 0,
            _ => amount_on(parts, bin),
        };
        let (new, bound) = (placed.iter().enumerate(), self.bound.iter().enumerate());
        let bound = bound.map(|(number, parts)| (self.quanta.len() + number, parts));
        new.chain(bound).map(of).sum()
    }

    /// The memory of a bin that other containers of the pod may have while this one runs.
    fn concurrent_usage(&self, container: usize, placed: &[Vec<Part>], bin: usize) -> u32 {
        let sets = self
            .concurrent_sets
            .iter()
            .filter(|set| (**set >> container) & 1 == 1);
        sets.map(|set| self.usage_of_set(*set & !(1 << container), placed, bin))
            .max()
            .unwrap_or_default()
    }
}

/// The amount of the part on this bin.
fn amount_on(parts: &[Part], bin: usize) -> u32 {
    let part = parts.iter().find(|(at, _)| *at == bin);
    part.map_or(0, |(_, share)| *share)
}

/// The shares of each container of `request`.
fn all_shares(bins: &[Bin], request: &Request) -> Option<Vec<Vec<u32>>> {
    let quanta = request.quanta.iter();
    quanta
        .map(|quanta| split_quanta(bins, *quanta, request.min_bins))
        .collect()
}

/// Whether empty bins could hold all containers of `request` together.
pub(super) fn fits_when_empty(bins: &[Bin], request: &Request) -> bool {
    let empty = |bin: &Bin| Bin {
        attainable: bin.capacity,
        ..*bin
    };
    let bins: Vec<Bin> = bins.iter().map(empty).collect();
    all_shares(&bins, request).is_some_and(|shares| {
        Search::new(&bins, request, &shares, Aim::SmallestShortage)
            .run()
            .is_some()
    })
}

/// The shares of a container in bins that were empty.
pub(super) fn split_quanta(bins: &[Bin], quanta: u32, least: u16) -> Option<Vec<u32>> {
    let bins = bins.iter().map(|bin| GpuCapacity {
        quanta: bin.capacity,
        is_combinable: bin.is_combinable,
    });
    shares::split_quanta(&bins.collect::<Vec<_>>(), quanta, least)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bin(capacity: u32, free: u32) -> Bin {
        Bin {
            capacity,
            attainable: capacity,
            eventual: capacity,
            free,
            is_combinable: true,
        }
    }

    fn bins(free: &[u32]) -> Vec<Bin> {
        free.iter().map(|&free| bin(16, free)).collect()
    }

    fn single(quanta: u32) -> Request {
        Request {
            quanta: vec![quanta],
            min_bins: 1,
            reserved_bins: Vec::new(),
            bound: Vec::new(),
            concurrent_sets: vec![1],
        }
    }

    /// Containers of one pod that run at the same time.
    fn concurrent(quanta: &[u32]) -> Request {
        Request {
            quanta: quanta.to_vec(),
            concurrent_sets: vec![(1 << quanta.len()) - 1],
            ..single(0)
        }
    }

    /// The places of requests with one container.
    fn single_places(plan: &Plan) -> Vec<Option<Vec<Part>>> {
        let places = plan.places.iter();
        places
            .map(|place| place.as_ref().map(|parts| parts[0].clone()))
            .collect()
    }

    fn spread(quanta: u32, bins: u16) -> Request {
        Request {
            min_bins: bins,
            ..single(quanta)
        }
    }

    fn reserving(quanta: u32, bin: usize) -> Request {
        Request {
            reserved_bins: vec![bin],
            ..single(quanta)
        }
    }

    #[test]
    fn request_waits_for_leaked_memory_where_no_other_bin_holds_it() {
        let leaking = |eventual| Bin {
            attainable: 15,
            eventual,
            ..bin(16, 7)
        };
        let waits = plan(&[leaking(16)], &[0], &[single(16), single(4)]);
        assert_eq!(single_places(&waits), [None, None]);
        assert_eq!(waits.set_aside, [7]);
        let impossible = plan(&[leaking(15)], &[0], &[single(16), single(4)]);
        assert_eq!(single_places(&impossible), [None, Some(vec![(0, 4)])]);
        let two_bins = plan(&[leaking(16), bin(16, 3)], &[0, 0], &[single(16)]);
        assert_eq!(two_bins.set_aside, [0, 3], "the clean bin comes first");
    }

    #[test]
    fn reservation_serves_its_request_and_no_earlier_one() {
        let bins = bins(&[8, 3]);
        let others = plan(&bins, &[8, 0], &[single(8), single(3)]);
        assert_eq!(single_places(&others), [None, None]);
        assert_eq!(
            others.set_aside,
            [8, 3],
            "the first of them keeps the other GPU"
        );
        let owner = plan(&bins, &[8, 0], &[single(3), reserving(8, 0)]);
        assert_eq!(
            single_places(&owner),
            [Some(vec![(1, 3)]), Some(vec![(0, 8)])]
        );
        assert_eq!(owner.set_aside, [0, 0]);
    }

    #[test]
    fn reserved_bin_holds_only_what_fits_on_no_other_bin() {
        let request = Request {
            min_bins: 2,
            reserved_bins: vec![1],
            ..concurrent(&[11, 6])
        };
        // The largest share takes the reserved bin first, and then the other bin has room for one
        // share only of the second container.
        let plan = plan(&bins(&[16, 8]), &[0, 8], &[request]);
        let places = [vec![(0, 6), (1, 5)], vec![(0, 3), (1, 3)]];
        assert_eq!(plan.places, [Some(places.to_vec())]);
    }

    #[test]
    fn reserving_request_sets_aside_its_gpu_and_no_other() {
        let plan = plan(&bins(&[4, 6]), &[8, 0], &[reserving(8, 0), single(6)]);
        assert_eq!(single_places(&plan), [None, Some(vec![(1, 6)])]);
        assert_eq!(plan.set_aside, [4, 0]);
        assert_eq!(plan.first_waiting, None);
    }

    #[test]
    fn spread_request_has_all_of_its_reserved_bins() {
        let owner = || Request {
            reserved_bins: vec![0, 1],
            ..spread(16, 2)
        };
        let waits = plan(&bins(&[8, 3, 1]), &[8, 8, 0], &[single(2), owner()]);
        assert_eq!(single_places(&waits), [None, None]);
        assert_eq!(
            waits.set_aside,
            [8, 3, 1],
            "the first request has the third"
        );
        let placed = plan(&bins(&[8, 8, 8]), &[8, 8, 0], &[single(8), owner()]);
        let places = [Some(vec![(2, 8)]), Some(vec![(0, 8), (1, 8)])];
        assert_eq!(single_places(&placed), places);
        assert_eq!(placed.set_aside, [0, 0, 0]);
    }

    #[test]
    fn reservation_leaves_free_memory_beyond_its_size() {
        let plan = plan(&bins(&[12]), &[8], &[single(4), single(5)]);
        assert_eq!(single_places(&plan), [Some(vec![(0, 4)]), None]);
        assert_eq!(plan.set_aside, [8]);
    }

    #[test]
    fn reserving_request_is_placed_elsewhere_when_it_fits() {
        let plan = plan(&bins(&[4, 8]), &[8, 0], &[reserving(8, 0)]);
        assert_eq!(single_places(&plan), [Some(vec![(1, 8)])]);
    }

    #[test]
    fn request_is_placed_by_best_fit() {
        let plan = plan(&bins(&[16, 5, 7]), &[0; 4], &[single(4)]);
        assert_eq!(single_places(&plan), [Some(vec![(1, 4)])]);
        assert_eq!(plan.set_aside, [0, 0, 0]);
    }

    #[test]
    fn first_waiting_request_sets_aside_smallest_shortage() {
        let plan = plan(
            &bins(&[4, 6, 2]),
            &[0; 4],
            &[single(8), single(5), single(3), single(2)],
        );
        assert_eq!(
            single_places(&plan),
            [None, None, Some(vec![(0, 3)]), Some(vec![(2, 2)])]
        );
        assert_eq!(plan.set_aside, [0, 6, 0]);
        assert_eq!(plan.first_waiting, Some(0));
    }

    #[test]
    fn request_larger_than_a_gpu_is_split_over_fewest_gpus() {
        let plan = plan(&bins(&[16, 16, 16, 16]), &[0; 4], &[single(33)]);
        assert_eq!(
            single_places(&plan),
            [Some(vec![(0, 11), (1, 11), (2, 11)])]
        );
    }

    #[test]
    fn requested_spread_is_honored_when_one_gpu_has_room() {
        let plan = plan(&bins(&[3, 16, 4]), &[0; 4], &[spread(7, 2)]);
        assert_eq!(single_places(&plan), [Some(vec![(0, 3), (2, 4)])]);
    }

    #[test]
    fn waiting_spread_request_sets_aside_only_its_shares() {
        let plan = plan(&bins(&[10, 2, 1]), &[0; 4], &[spread(8, 2), single(6)]);
        assert_eq!(single_places(&plan), [None, Some(vec![(0, 6)])]);
        assert_eq!(plan.set_aside, [4, 2, 0]);
    }

    #[test]
    fn request_larger_than_the_node_sets_nothing_aside() {
        let plan = plan(&bins(&[4, 4]), &[0; 4], &[spread(4, 3), single(4)]);
        assert_eq!(single_places(&plan), [None, Some(vec![(0, 4)])]);
        assert_eq!(plan.set_aside, [0, 0]);
        assert_eq!(plan.first_waiting, None);
    }

    #[test]
    fn bin_without_capacity_takes_nothing() {
        assert_eq!(plan(&[bin(0, 0)], &[0], &[single(1)]).places, [None]);
    }

    #[test]
    fn pod_is_placed_whole_or_not_at_all() {
        let fits = plan(&bins(&[16, 16]), &[0; 2], &[concurrent(&[4, 4, 12, 12])]);
        assert_eq!(
            fits.places,
            [Some(vec![
                vec![(0, 4)],
                vec![(1, 4)],
                vec![(0, 12)],
                vec![(1, 12)]
            ])]
        );
        let lacks = plan(
            &bins(&[16, 15]),
            &[0; 2],
            &[concurrent(&[4, 4, 12, 12]), single(1)],
        );
        assert_eq!(
            lacks.places,
            [None, None],
            "all free memory of both is set aside"
        );
        assert_eq!(lacks.set_aside, [16, 15]);
    }

    #[test]
    fn search_backtracks_when_a_choice_blocks_a_container() {
        let plan = plan(
            &[bin(10, 10), bin(10, 10)],
            &[0; 2],
            &[concurrent(&[4, 4, 3, 3, 3, 3])],
        );
        let place = plan.places[0].as_ref().unwrap();
        let on = |index| {
            place
                .iter()
                .map(|parts| amount_on(parts, index))
                .sum::<u32>()
        };
        assert_eq!((on(0), on(1)), (10, 10));
    }

    #[test]
    fn containers_that_never_overlap_share_memory() {
        let request = Request {
            concurrent_sets: vec![0b01, 0b10],
            ..concurrent(&[8, 16])
        };
        let plan = plan(&bins(&[16, 9]), &[0; 2], &[request, single(9)]);
        assert_eq!(
            plan.places[0],
            Some(vec![vec![(0, 8)], vec![(0, 16)]]),
            "an init container has part of what the main one will have, not another GPU"
        );
        assert_eq!(plan.places[1], Some(vec![vec![(1, 9)]]));
    }

    #[test]
    fn bound_memory_of_the_pod_counts_once() {
        let request = Request {
            bound: vec![vec![(0, 6)]],
            concurrent_sets: vec![0b11],
            ..concurrent(&[10])
        };
        // Six of the first are bound for the pod and not free.
        let plan = plan(&bins(&[10, 16]), &[0; 2], &[request]);
        assert_eq!(plan.places, [Some(vec![vec![(0, 10)]])]);
    }

    #[test]
    fn request_beyond_all_free_memory_is_not_searched() {
        let request = |quanta: &[u32], sets: Vec<u64>| Request {
            concurrent_sets: sets,
            ..concurrent(quanta)
        };
        let may_fit = |request: Request, free: &[u32]| request.may_fit(&bins(free));
        assert!(may_fit(request(&[8, 8], vec![0b11]), &[9, 7]));
        assert!(!may_fit(request(&[8, 8], vec![0b11]), &[9, 6]));
        assert!(may_fit(request(&[8, 8], vec![0b01, 0b10]), &[8]));
        let bound = |free| {
            let request = Request {
                bound: vec![vec![(0, 6)]],
                ..request(&[4], vec![0b11])
            };
            may_fit(request, &[free])
        };
        assert!(bound(4) && !bound(3));
    }

    #[test]
    fn equal_requests_are_searched_once_when_none_fits() {
        // The first request leaves 15 bins for 16 containers.
        let bins: Vec<Bin> = (0..56)
            .map(|n| bin(16, if n < 16 { 11 } else { 5 }))
            .collect();
        let mut queue = vec![concurrent(&[6; 16]); 20_000];
        queue[0] = single(16);
        let start = std::time::Instant::now();
        let plan = plan(&bins, &[0; 56], &queue);
        assert_eq!(plan.first_waiting, Some(0));
        assert!(plan.places.iter().all(Option::is_none));
        assert!(start.elapsed() < std::time::Duration::from_secs(5));
    }

    #[test]
    fn request_sets_aside_no_bin_that_cannot_hold_it() {
        let withheld = Bin {
            attainable: 15,
            ..bin(16, 15)
        };
        let plan = plan(
            &[withheld, bin(16, 8)],
            &[0; 2],
            &[single(16), single(15), single(8)],
        );
        assert_eq!(single_places(&plan), [None, Some(vec![(0, 15)]), None]);
        assert_eq!(plan.set_aside, [0, 8]);
        assert!(fits_when_empty(&[withheld], &single(16)), "it is as large");
    }

    #[test]
    fn search_is_bounded_when_a_pod_has_many_containers() {
        let bins = vec![bin(100, 100); 16];
        let start = std::time::Instant::now();
        assert!(plan(&bins, &[0; 16], &[concurrent(&[51; 16])]).places[0].is_some());
        assert!(plan(&bins[..15], &[0; 15], &[concurrent(&[51; 16])]).places[0].is_none());
        assert!(start.elapsed() < std::time::Duration::from_secs(5));
    }

    #[test]
    fn request_is_not_split_over_mig_instances() {
        let mig = |capacity| Bin {
            is_combinable: false,
            ..bin(capacity, capacity)
        };
        let plan = plan(&[mig(10), bin(8, 8), bin(8, 8)], &[0; 3], &[spread(8, 2)]);
        assert_eq!(single_places(&plan), [Some(vec![(1, 4), (2, 4)])]);
    }
}
