//! Places the containers of one pod together, and sets memory aside for those that have not
//! started.
//!
//! The kubelet's checkpoint lists all containers of a pod before the first one starts. All of them
//! are placed then, or none. Otherwise pods with memory for one container could block each other
//! for ever while they wait for another. Containers that share a device id never run at the same
//! time and share their memory. The memory that a pod's containers can have at the same time stays
//! taken until the pod ends.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::Ledger;
use super::binder::{self, Part};
use super::claim::{Claim, State};
use super::types::{ClaimId, Health, Placement, Share};
use crate::units::{DeviceIdSet, GpuUuid, PodUid, Quanta, Resource};

/// The most containers that are placed together; those of a larger pod are placed one by one.
const MAX_CONTAINERS: usize = 16;

/// The most steps of the search for containers that may run at the same time.
const MAX_STEPS: u32 = 1_000;

/// A pod whose containers are placed together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct PodGroup {
    /// The device ids of its containers, each set once.
    containers: Vec<DeviceIdSet>,
    /// The places of the containers that were placed together.
    places: Vec<(DeviceIdSet, Vec<Share>)>,
    /// The most memory of each GPU that containers have at the same time with these places.
    peak: BTreeMap<GpuUuid, Quanta>,
}

impl PodGroup {
    fn drop_places(&mut self) {
        self.places.clear();
        self.peak.clear();
    }
}

impl Ledger {
    /// Records the pod's containers. Places for other containers are dropped.
    pub(super) fn register_containers(
        &mut self,
        pod: &PodUid,
        started: &DeviceIdSet,
        containers: Vec<DeviceIdSet>,
    ) {
        let mut containers = containers;
        containers.sort_unstable();
        containers.dedup();
        if containers.len() > 1 {
            let together = self.pod_groups.entry(pod.clone()).or_default();
            if together.containers != containers {
                together.containers = containers;
            }
        }
        if let Some(together) = self.pod_groups.get_mut(pod) {
            let is_placed = together.places.iter().any(|(tokens, _)| tokens == started);
            let all_there = |(tokens, _): &(DeviceIdSet, _)| together.containers.contains(tokens);
            if !is_placed || !together.places.iter().all(all_there) {
                together.drop_places();
            }
        }
    }

    /// Drops groups of pods without a claim, except that of `but`.
    pub(super) fn drop_groups_without_claim(&mut self, but: Option<&PodUid>) {
        let claims = &self.claims;
        self.pod_groups
            .retain(|pod, _| Some(pod) == but || claims.values().any(|claim| claim.pod == *pod));
    }

    /// The place that was planned for the claim when the pod's containers were placed.
    pub(super) fn planned_placement(&self, claim: &Claim) -> Option<Placement> {
        if claim.resource != Resource::DeviceMemory {
            return None;
        }
        let places = &self.pod_groups.get(&claim.pod)?.places;
        let (_, shares) = places
            .iter()
            .find(|(tokens, _)| *tokens == claim.device_ids)?;
        let is_well = |share: &Share| {
            self.is_healthy(&share.gpu) && self.isolation.may_use(&share.gpu, &claim.pod)
        };
        shares
            .iter()
            .all(is_well)
            .then(|| Placement::Device(shares.clone()))
    }

    fn is_healthy(&self, gpu: &GpuUuid) -> bool {
        let state = self.gpus.get(gpu);
        state.is_some_and(|state| state.health == Health::Healthy)
    }

    /// The claim's device ids, then those of its pod's other containers without memory.
    pub(super) fn placed_with(&self, claim: &Claim) -> Vec<DeviceIdSet> {
        let mut all = vec![claim.device_ids.clone()];
        if claim.resource == Resource::DeviceMemory
            && let Some(together) = self.pod_groups.get(&claim.pod)
            && together.containers.len() <= MAX_CONTAINERS
        {
            let had_turn = |tokens: &DeviceIdSet| {
                let mut claims = self.claims.values().filter(|other| other.pod == claim.pod);
                claims.any(|other| {
                    other.resource == claim.resource
                        && other.device_ids == *tokens
                        && !matches!(other.state, State::Queued { .. })
                })
            };
            let others = together.containers.iter();
            all.extend(
                others
                    .filter(|tokens| **tokens != claim.device_ids && !had_turn(tokens))
                    .cloned(),
            );
        }
        all
    }

    /// The device ids and shares that are bound to the pod, without those of `claim`.
    fn other_bindings(&self, claim: &Claim) -> Vec<(&DeviceIdSet, &[Share])> {
        let claims = self.claims.values().filter(|other| other.pod == claim.pod);
        claims
            .filter(|other| other.device_ids != claim.device_ids)
            .filter_map(|other| match other.placement()? {
                Placement::Device(shares) => Some((&other.device_ids, shares.as_slice())),
                Placement::Managed(_) => None,
            })
            .collect()
    }

    /// Adds the needs of the pod's other containers to the claim's request. A claim is placed alone
    /// where the containers have too many concurrent sets.
    pub(super) fn add_other_containers(&self, claim: &Claim, want: &mut binder::Request) {
        let tokens = self.placed_with(claim);
        if tokens.len() == 1 {
            return;
        }
        let bound = self.other_bindings(claim);
        let all: Vec<&DeviceIdSet> = tokens
            .iter()
            .chain(bound.iter().map(|(tokens, _)| *tokens))
            .collect();
        let Some(alive) = concurrent_sets(&all) else {
            return;
        };
        let index = |gpu: &GpuUuid| self.gpus.keys().position(|here| here == gpu);
        let parts = |shares: &[Share]| -> Vec<Part> {
            let shares = shares.iter();
            shares
                .filter_map(|share| Some((index(&share.gpu)?, share.quanta.0)))
                .collect()
        };
        want.quanta = tokens.iter().map(|tokens| tokens.quanta().0).collect();
        want.bound = bound.iter().map(|(_, shares)| parts(shares)).collect();
        want.concurrent_sets = alive;
    }

    /// Records the places of the claim and of the containers that are placed with it.
    pub(super) fn record_places(
        &mut self,
        id: ClaimId,
        want: &binder::Request,
        places: &[Vec<Part>],
    ) {
        let claim = &self.claims[&id];
        if places.len() < 2 {
            return;
        }
        let pod = claim.pod.clone();
        let tokens = self.placed_with(claim);
        let gpus: Vec<GpuUuid> = self.gpus.keys().cloned().collect();
        let shares = |parts: &Vec<Part>| -> Vec<Share> {
            let parts = parts.iter();
            parts
                .map(|&(bin, share)| Share {
                    gpu: gpus[bin].clone(),
                    quanta: Quanta(share),
                })
                .collect()
        };
        for placement in places.iter().map(shares).map(Placement::Device) {
            self.record_tenant(&pod, &placement);
        }
        let together = self.pod_groups.entry(pod).or_default();
        together.places = tokens.into_iter().zip(places.iter().map(shares)).collect();
        let peak = |(bin, gpu): (usize, &GpuUuid)| {
            let peak = want.peak(places, bin);
            (peak > 0).then(|| (gpu.clone(), Quanta(peak)))
        };
        together.peak = gpus.iter().enumerate().filter_map(peak).collect();
    }

    /// The most that each pod's containers, placed together, can have of a GPU at the same time.
    pub(super) fn peaks(&self) -> impl Iterator<Item = (&PodUid, &GpuUuid, Quanta)> {
        let pods = self.pod_groups.iter();
        pods.flat_map(|(pod, together)| {
            together
                .peak
                .iter()
                .map(move |(gpu, peak)| (pod, gpu, *peak))
        })
    }

    /// Drops the planned places of the pod's containers that have not started.
    pub(super) fn drop_places_of(&mut self, pod: &PodUid) {
        if let Some(together) = self.pod_groups.get_mut(pod) {
            together.drop_places();
        }
    }

    /// Drops planned places on unhealthy GPUs, which are of no use.
    pub(super) fn drop_unhealthy_places(&mut self) {
        let is_bound = |pod: &PodUid, tokens: &DeviceIdSet| {
            let mut claims = self.claims.values().filter(|claim| claim.pod == *pod);
            claims.any(|claim| claim.device_ids == *tokens && claim.placement().is_some())
        };
        let dead = |share: &Share| !self.is_healthy(&share.gpu);
        let given_up: BTreeSet<PodUid> = self
            .pod_groups
            .iter()
            .filter(|(pod, together)| {
                let mut places = together.places.iter();
                places.any(|(tokens, shares)| !is_bound(pod, tokens) && shares.iter().any(dead))
            })
            .map(|(pod, _)| pod.clone())
            .collect();
        for pod in &given_up {
            self.drop_places_of(pod);
        }
        let claims = self.claims.values_mut();
        claims
            .filter(|claim| given_up.contains(&claim.pod))
            .for_each(Claim::requeue);
    }
}

/// The maximal sets of containers that may run at the same time, because no two share a device id.
/// None where there are too many sets.
fn concurrent_sets(tokens: &[&DeviceIdSet]) -> Option<Vec<u64>> {
    if tokens.len() > 2 * MAX_CONTAINERS {
        return None;
    }
    let apart = |one: usize| {
        let others = (0..tokens.len()).filter(|other| *other != one);
        others
            .filter(|other| !tokens[one].overlaps(tokens[*other]))
            .fold(0, |set, other| set | (1_u64 << other))
    };
    let apart: Vec<u64> = (0..tokens.len()).map(apart).collect();
    let (mut sets, mut tries) = (Vec::new(), MAX_STEPS);
    let all = (1 << tokens.len()) - 1;
    extend_sets(&apart, 0, all, 0, &mut sets, &mut tries)?;
    (sets.len() <= MAX_CONTAINERS).then_some(sets)
}

/// The Bron-Kerbosch algorithm with a pivot: extends `set` by all of `more` that are compatible
/// with it, without those in `done`. None where that takes too many steps.
fn extend_sets(
    apart: &[u64],
    set: u64,
    mut more: u64,
    mut done: u64,
    sets: &mut Vec<u64>,
    tries: &mut u32,
) -> Option<()> {
    *tries = tries.checked_sub(1)?;
    if more == 0 && done == 0 {
        sets.push(set);
    }
    let pivot = (0..apart.len())
        .filter(|one| ((more | done) >> one) & 1 == 1)
        .max_by_key(|one| (more & apart[*one]).count_ones());
    let mut left = more & !pivot.map_or(0, |pivot| apart[pivot]);
    while left != 0 {
        let next = left.trailing_zeros() as usize;
        let go = apart[next];
        extend_sets(apart, set | (1 << next), more & go, done & go, sets, tries)?;
        left &= !(1 << next);
        more &= !(1 << next);
        done |= 1 << next;
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sets(containers: &[&[u16]]) -> Option<Vec<u64>> {
        let tokens: Vec<DeviceIdSet> = containers
            .iter()
            .map(|tokens| DeviceIdSet::from_indexes(tokens.iter().copied()).unwrap())
            .collect();
        let mut sets = concurrent_sets(&tokens.iter().collect::<Vec<_>>())?;
        sets.sort_unstable();
        Some(sets)
    }

    #[test]
    fn containers_without_shared_device_ids_are_concurrent() {
        assert_eq!(sets(&[&[1], &[2], &[3]]), Some(vec![0b111]));
        let init_and_two = sets(&[&[1, 2], &[1], &[2, 3]]);
        assert_eq!(init_and_two, Some(vec![0b001, 0b110]));
        let after_a_sidecar = sets(&[&[1, 2], &[3], &[1, 4]]);
        assert_eq!(after_a_sidecar, Some(vec![0b011, 0b110]));
    }

    #[test]
    fn too_many_concurrent_sets_are_not_enumerated() {
        let pairs: Vec<[u16; 1]> = (0..10).flat_map(|n| [[n], [n]]).collect();
        // Distinct sets that overlap in pairs: 2^10 ways.
        let tokens: Vec<Vec<u16>> = pairs
            .iter()
            .enumerate()
            .map(|(n, token)| vec![token[0], 100 + n as u16])
            .collect();
        let tokens: Vec<&[u16]> = tokens.iter().map(Vec::as_slice).collect();
        assert_eq!(sets(&tokens), None);
    }
}
