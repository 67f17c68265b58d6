//! Places the containers of one pod together, and sets memory aside for those that have not
//! started.
//!
//! The kubelet's checkpoint lists all containers of a pod before the first one starts. All of them
//! are placed then, or none. Otherwise pods with memory for one container could block each other
//! for ever while they wait for another. Containers that share a device id never run at the same
//! time and share their memory. The memory that a pod's containers can have at the same time stays
//! taken until the pod ends.

mod concurrent_sets;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::Ledger;
use super::binder::{self, Part};
use super::claim::{Claim, State};
use super::types::{ClaimId, Health, Placement, Share};
use crate::units::{DeviceIdSet, GpuUuid, PodUid, Quanta, Resource};
use concurrent_sets::concurrent_sets;

/// The most containers that are placed together; those of a larger pod are placed one by one.
const MAX_CONTAINERS: usize = 16;

/// A pod whose containers are placed together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
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
            let group = self.pod_groups.entry(pod.clone()).or_default();
            if group.containers != containers {
                group.containers = containers;
            }
        }
        if let Some(group) = self.pod_groups.get_mut(pod) {
            let is_placed = group
                .places
                .iter()
                .any(|(device_ids, _)| device_ids == started);
            let is_registered =
                |(device_ids, _): &(DeviceIdSet, _)| group.containers.contains(device_ids);
            if !is_placed || !group.places.iter().all(is_registered) {
                group.drop_places();
            }
        }
    }

    /// Drops groups of pods without a claim, except that of `except`.
    pub(super) fn drop_groups_without_claim(&mut self, except: Option<&PodUid>) {
        let claims = &self.claims;
        self.pod_groups
            .retain(|pod, _| Some(pod) == except || claims.values().any(|claim| claim.pod == *pod));
    }

    /// The place that was planned for the claim when the pod's containers were placed.
    pub(super) fn planned_placement(&self, claim: &Claim) -> Option<Placement> {
        if claim.resource != Resource::DeviceMemory {
            return None;
        }
        let places = &self.pod_groups.get(&claim.pod)?.places;
        let (_, shares) = places
            .iter()
            .find(|(device_ids, _)| *device_ids == claim.device_ids)?;
        let is_usable = |share: &Share| {
            self.is_healthy(&share.gpu) && self.isolation.may_use(&share.gpu, &claim.pod)
        };
        shares
            .iter()
            .all(is_usable)
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
            && let Some(group) = self.pod_groups.get(&claim.pod)
            && group.containers.len() <= MAX_CONTAINERS
        {
            let pod_claims = || {
                let claims = self.claims.values();
                claims.filter(|other| other.pod == claim.pod && other.resource == claim.resource)
            };
            // A claim that is idle without a successor has waited too long for a retry.
            let had_turn = |device_ids: &DeviceIdSet| {
                let has_successor = || {
                    pod_claims().any(|other| {
                        other.device_ids != *device_ids && other.device_ids.overlaps(device_ids)
                    })
                };
                pod_claims()
                    .filter(|other| other.device_ids == *device_ids)
                    .any(|other| match other.state {
                        State::Bound { .. } | State::AwaitingRetry { .. } => true,
                        State::Idle => has_successor(),
                        State::Queued { .. } => false,
                    })
            };
            let others = group.containers.iter();
            all.extend(
                others
                    .filter(|device_ids| **device_ids != claim.device_ids && !had_turn(device_ids))
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
    pub(super) fn add_other_containers(&self, claim: &Claim, request: &mut binder::Request) {
        let device_ids = self.placed_with(claim);
        if device_ids.len() == 1 {
            return;
        }
        let bound = self.other_bindings(claim);
        let all: Vec<&DeviceIdSet> = device_ids
            .iter()
            .chain(bound.iter().map(|(device_ids, _)| *device_ids))
            .collect();
        let Some(sets) = concurrent_sets(&all) else {
            return;
        };
        let index = |gpu: &GpuUuid| self.gpus.keys().position(|here| here == gpu);
        let parts = |shares: &[Share]| -> Vec<Part> {
            let shares = shares.iter();
            shares
                .filter_map(|share| Some((index(&share.gpu)?, share.quanta.0)))
                .collect()
        };
        request.quanta = device_ids
            .iter()
            .map(|device_ids| device_ids.quanta().0)
            .collect();
        request.bound = bound.iter().map(|(_, shares)| parts(shares)).collect();
        request.concurrent_sets = sets;
    }

    /// Records the places of the claim and of the containers that are placed with it.
    pub(super) fn record_places(
        &mut self,
        id: ClaimId,
        request: &binder::Request,
        places: &[Vec<Part>],
    ) {
        let claim = &self.claims[&id];
        if places.len() < 2 {
            return;
        }
        let pod = claim.pod.clone();
        let device_ids = self.placed_with(claim);
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
        let group = self.pod_groups.entry(pod).or_default();
        group.places = device_ids
            .into_iter()
            .zip(places.iter().map(shares))
            .collect();
        let peak = |(bin, gpu): (usize, &GpuUuid)| {
            let peak = request.peak(places, bin);
            (peak > 0).then(|| (gpu.clone(), Quanta(peak)))
        };
        group.peak = gpus.iter().enumerate().filter_map(peak).collect();
    }

    /// The most that each pod's containers, placed together, can have of a GPU at the same time.
    pub(super) fn peaks(&self) -> impl Iterator<Item = (&PodUid, &GpuUuid, Quanta)> {
        let pods = self.pod_groups.iter();
        pods.flat_map(|(pod, group)| group.peak.iter().map(move |(gpu, peak)| (pod, gpu, *peak)))
    }

    /// Drops the planned places of the pod's containers that have not started.
    pub(super) fn drop_places_of(&mut self, pod: &PodUid) {
        if let Some(group) = self.pod_groups.get_mut(pod) {
            group.drop_places();
        }
    }

    /// Drops planned places on unhealthy GPUs, which are of no use.
    pub(super) fn drop_unhealthy_places(&mut self) {
        let is_bound = |pod: &PodUid, device_ids: &DeviceIdSet| {
            let mut claims = self.claims.values().filter(|claim| claim.pod == *pod);
            claims.any(|claim| claim.device_ids == *device_ids && claim.placement().is_some())
        };
        let is_unhealthy = |share: &Share| !self.is_healthy(&share.gpu);
        let given_up: BTreeSet<PodUid> = self
            .pod_groups
            .iter()
            .filter(|(pod, group)| {
                let mut places = group.places.iter();
                places.any(|(device_ids, shares)| {
                    !is_bound(pod, device_ids) && shares.iter().any(is_unhealthy)
                })
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

#[cfg(test)]
mod tests {
    use super::*;

    fn sets(containers: &[&[u16]]) -> Option<Vec<u64>> {
        let device_ids: Vec<DeviceIdSet> = containers
            .iter()
            .map(|device_ids| DeviceIdSet::from_indexes(device_ids.iter().copied()).unwrap())
            .collect();
        let mut sets = concurrent_sets(&device_ids.iter().collect::<Vec<_>>())?;
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
        let device_ids: Vec<Vec<u16>> = pairs
            .iter()
            .enumerate()
            .map(|(n, device_id)| vec![device_id[0], 100 + n as u16])
            .collect();
        let device_ids: Vec<&[u16]> = device_ids.iter().map(Vec::as_slice).collect();
        assert_eq!(sets(&device_ids), None);
    }
}
