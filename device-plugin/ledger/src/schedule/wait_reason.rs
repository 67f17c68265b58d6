//! Explains why a claim waits.

use std::cmp::Reverse;

use super::super::Ledger;
use super::super::binder;
use super::super::boot_time::BootTime;
use super::super::claim::{Claim, State};
use super::super::types::{ClaimId, SetAside, WaitReason};
use super::Planned;
use crate::units::{Bytes, Quanta, Resource};

impl Ledger {
    /// The reason why the claim waits; none where it does not wait.
    pub fn reason(&self, claim: ClaimId, now: BootTime) -> Option<WaitReason> {
        let Claim {
            resource, state, ..
        } = self.claims.get(&claim)?;
        let waits = matches!(state, State::Queued { .. });
        waits.then(|| self.wait_reason(claim, &self.plan(*resource, now), now))
    }

    /// The reason why the claim waits under the present plan of its resource.
    pub(in super::super) fn wait_reason(
        &self,
        id: ClaimId,
        planned: &Planned,
        now: BootTime,
    ) -> WaitReason {
        let claim = &self.claims[&id];
        let queue = self.queue(claim.resource, now);
        let bins = self.bins(claim.resource, now);
        let bins = match claim.resource {
            Resource::DeviceMemory => self.bins_open_to(&claim.pod, &bins),
            Resource::ManagedMemory => bins,
        };
        let largest = (0..bins.len())
            .filter(|&i| bins[i].capacity > 0)
            .max_by_key(|&i| (bins[i].free, Reverse(i)));
        let request = self.request_of(claim);
        let quanta = claim.device_ids.quanta().0;
        let shares = binder::split_quanta(&bins, quanta, request.min_bins);
        let healthy = bins.iter().filter(|bin| bin.capacity > 0).count();
        let wanted = request.min_bins;
        let too_few_gpus = (claim.resource == Resource::DeviceMemory
            && u32::from(wanted) <= quanta
            && usize::from(wanted) > healthy)
            .then_some((wanted, healthy));
        let beyond_instance = shares.is_none() && {
            let capacities = bins
                .iter()
                .filter(|bin| !bin.is_combinable)
                .map(|bin| bin.capacity);
            capacities.sum::<u32>() >= quanta
        };
        let shares = shares.filter(|_| binder::fits_when_empty(&bins, &request));
        let (gpus, largest_free_gpu) = match claim.resource {
            Resource::ManagedMemory => (None, None),
            Resource::DeviceMemory => (
                shares.and_then(|shares| u16::try_from(shares.len()).ok()?.try_into().ok()),
                largest.and_then(|i| self.gpus.keys().nth(i).cloned()),
            ),
        };
        let others = request.quanta.iter().skip(1);
        let set_aside = match (claim.resource, largest) {
            (Resource::DeviceMemory, Some(gpu)) => self.set_aside_by(planned).into_iter().nth(gpu),
            _ => None,
        };
        let set_aside = set_aside.into_iter().flat_map(|(_, pods)| pods);
        let for_other_pods = set_aside.filter(|(pod, _)| *pod != claim.pod);
        WaitReason {
            resource: claim.resource,
            needed: claim.device_ids.quanta().bytes(self.quantum),
            other_containers: others
                .map(|quanta| Quanta(*quanta).bytes(self.quantum))
                .collect(),
            gpus,
            too_few_gpus: too_few_gpus.filter(|_| wanted > 1),
            beyond_instance,
            largest_free: Quanta(largest.map_or(0, |i| bins[i].free)).bytes(self.quantum),
            largest_free_gpu,
            set_aside: for_other_pods
                .map(|(pod, quanta)| SetAside {
                    name: pod.to_string(),
                    pod,
                    amount: quanta.bytes(self.quantum),
                })
                .collect(),
            closed_gpu: match claim.resource {
                Resource::DeviceMemory => self.closed_gpu(id).cloned(),
                Resource::ManagedMemory => None,
            },
            refused_gpu: match claim.resource {
                Resource::DeviceMemory => self.refused_gpu().cloned(),
                Resource::ManagedMemory => None,
            },
            untried_gpu: match claim.resource {
                Resource::DeviceMemory => self.untried_gpu().cloned(),
                Resource::ManagedMemory => None,
            },
            claims_ahead: queue.iter().take_while(|&&other| other != id).count(),
            withheld: match claim.resource {
                Resource::DeviceMemory => self.withheld_total(),
                Resource::ManagedMemory => Bytes::ZERO,
            },
        }
    }
}
