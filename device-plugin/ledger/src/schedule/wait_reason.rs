//! Explains why a claim waits.

use std::cmp::Reverse;

use super::super::Ledger;
use super::super::binder;
use super::super::boot_time::BootTime;
use super::super::claim::{Claim, State};
use super::super::types::{ClaimId, SetAside, WaitReason};
use super::Planned;
use crate::units::{Bytes, GpuUuid, Quanta, Resource};

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
        let is_device = claim.resource == Resource::DeviceMemory;
        let queue = self.queue(claim.resource, now);
        let mut bins = self.bins(claim.resource, now);
        if is_device {
            bins = self.bins_open_to(&claim.pod, &bins);
        }
        let largest = (0..bins.len())
            .filter(|&i| bins[i].capacity > 0)
            .max_by_key(|&i| (bins[i].free, Reverse(i)));
        let request = self.request_of(claim);
        let quanta = claim.device_ids.quanta().0;
        let shares = binder::split_quanta(&bins, quanta, request.min_bins);
        let healthy = bins.iter().filter(|bin| bin.capacity > 0).count();
        let wanted = request.min_bins;
        let too_few_gpus =
            (is_device && u32::from(wanted) <= quanta && usize::from(wanted) > healthy)
                .then_some((wanted, healthy));
        let beyond_instance = shares.is_none() && {
            let capacities = bins
                .iter()
                .filter(|bin| !bin.is_combinable)
                .map(|bin| bin.capacity);
            capacities.sum::<u32>() >= quanta
        };
        let shares = shares.filter(|_| binder::fits_when_empty(&bins, &request));
        let gpu_count = shares.and_then(|shares| u16::try_from(shares.len()).ok()?.try_into().ok());
        let largest_gpu = largest.filter(|_| is_device);
        let others = request.quanta.iter().skip(1);
        let on_gpu = |gpu: Option<&GpuUuid>| gpu.filter(|_| is_device).cloned();
        WaitReason {
            resource: claim.resource,
            needed: claim.device_ids.quanta().bytes(self.quantum),
            other_containers: others
                .map(|quanta| Quanta(*quanta).bytes(self.quantum))
                .collect(),
            gpus: gpu_count.filter(|_| is_device),
            too_few_gpus: too_few_gpus.filter(|_| wanted > 1),
            beyond_instance,
            largest_free: Quanta(largest.map_or(0, |i| bins[i].free)).bytes(self.quantum),
            largest_free_gpu: largest_gpu.and_then(|i| self.gpus.keys().nth(i).cloned()),
            set_aside: largest_gpu.map_or(Vec::new(), |i| self.set_aside_on(i, claim, planned)),
            closed_gpu: on_gpu(self.closed_gpu(id)),
            refused_gpu: on_gpu(self.refused_gpu()),
            untried_gpu: on_gpu(self.untried_gpu()),
            weight: self.most_weight_left(&claim.pod).filter(|_| is_device),
            claims_ahead: queue.iter().take_while(|&&other| other != id).count(),
            withheld: match is_device {
                true => self.withheld_total(),
                false => Bytes::ZERO,
            },
        }
    }

    /// The memory that the plan sets aside on a GPU for other pods than the claim's.
    fn set_aside_on(&self, gpu: usize, claim: &Claim, planned: &Planned) -> Vec<SetAside> {
        let on_gpu = self.set_aside_by(planned).into_iter().nth(gpu);
        let pods = on_gpu.into_iter().flat_map(|(_, pods)| pods);
        pods.filter(|(pod, _)| *pod != claim.pod)
            .map(|(pod, quanta)| SetAside {
                name: pod.to_string(),
                pod,
                amount: quanta.bytes(self.quantum),
            })
            .collect()
    }
}
