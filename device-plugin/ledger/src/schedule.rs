//! Schedules the queue: assigns memory to queued claims as the binder places them.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::Ledger;
use super::binder::{self, Bin, Part, Plan};
use super::boot_time::BootTime;
use super::claim::{AGING_AFTER, Call, Claim, QueuedRequest, RETRY_GRACE, State};
use super::types::{Binding, ClaimId, Health, Placement, SetAside, Share, WaitReason};
use crate::units::{Bytes, GpuUuid, Quanta, Resource};

/// The queue of a resource, and the binder's plan for it.
pub(super) type Planned = (Vec<ClaimId>, Plan);

impl Ledger {
    /// Binds every queued claim that the binder places and whose call is open. The agent writes the
    /// CDI files and answers the kubelet.
    ///
    /// Where the call of a claim has just ended, the ledger sets the memory aside until the kubelet
    /// retries. Call this after every event and once a second.
    pub fn advance(&mut self, now: BootTime) -> Vec<Binding> {
        self.expire(now);
        let mut bound = Vec::new();
        // The places of a pod may take less than its reservation, which leaves room for other
        // claims.
        while self.advance_once(now, &mut bound) {}
        bound
    }

    /// Schedules the queue once. True where a claim was assigned memory.
    fn advance_once(&mut self, now: BootTime, bound: &mut Vec<Binding>) -> bool {
        let waiting = self.queued_count();
        for resource in [Resource::DeviceMemory, Resource::ManagedMemory] {
            let (queue, plan) = self.plan(resource, now);
            for (id, places) in queue.into_iter().zip(plan.places) {
                if let Some(places) = places {
                    bound.extend(self.assign(id, &places));
                }
            }
        }
        // The plan has one claim of each pod; the other claims of that pod have their places with
        // it.
        for id in self.queue(Resource::DeviceMemory, now) {
            if let Some(placement) = self.planned_placement(&self.claims[&id]) {
                bound.extend(self.grant(id, placement));
            }
        }
        self.queued_count() < waiting
    }

    fn queued_count(&self) -> usize {
        let claims = self.claims.values();
        claims
            .filter(|claim| matches!(claim.state, State::Queued { .. }))
            .count()
    }

    /// Binds the claim if the plan gives it memory.
    pub(super) fn bind_as_planned(&mut self, id: ClaimId, planned: &Planned) -> Option<Binding> {
        let (queue, plan) = planned;
        let position = queue.iter().position(|&in_queue| in_queue == id)?;
        self.assign(id, plan.places.get(position)?.as_ref()?)
    }

    /// The reason why the claim waits; none where it does not wait.
    pub fn reason(&self, claim: ClaimId, now: BootTime) -> Option<WaitReason> {
        let Claim {
            resource, state, ..
        } = self.claims.get(&claim)?;
        let waits = matches!(state, State::Queued { .. });
        waits.then(|| self.wait_reason(claim, &self.plan(*resource, now), now))
    }

    /// The reason why the claim waits under the present plan of its resource.
    pub(super) fn wait_reason(&self, id: ClaimId, planned: &Planned, now: BootTime) -> WaitReason {
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
        let for_others = set_aside.filter(|(pod, _)| *pod != claim.pod);
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
            set_aside: for_others
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
            claims_ahead: queue.iter().take_while(|&&other| other != id).count(),
            withheld: match claim.resource {
                Resource::DeviceMemory => self.withheld_total(),
                Resource::ManagedMemory => Bytes::ZERO,
            },
        }
    }

    /// The binder's present plan: one claim of each pod whose containers are placed together.
    pub(super) fn plan(&self, resource: Resource, now: BootTime) -> Planned {
        let mut queue = self.queue(resource, now);
        let mut pods = BTreeSet::new();
        queue.retain(|id| {
            let claim = &self.claims[id];
            self.placed_with(claim).len() == 1 || pods.insert(&claim.pod)
        });
        let bins = self.bins(resource, now);
        let reserved = match resource {
            Resource::DeviceMemory => self
                .gpus
                .keys()
                .map(|gpu| self.reserved_on(gpu).0)
                .collect(),
            Resource::ManagedMemory => vec![0; bins.len()],
        };
        let plan = if resource == Resource::DeviceMemory && !self.are_all_gpus_shareable() {
            self.plan_isolated(bins, &reserved, &queue)
        } else {
            let requests = queue.iter().map(|id| self.request_of(&self.claims[id]));
            binder::plan(&bins, &reserved, &requests.collect::<Vec<_>>())
        };
        (queue, plan)
    }

    /// The claim in the binder's terms.
    pub(super) fn request_of(&self, claim: &Claim) -> binder::Request {
        let (bins, reserved) = match (&claim.state, claim.resource) {
            (
                State::Queued {
                    request: QueuedRequest { spread, .. },
                    ..
                },
                Resource::DeviceMemory,
            ) => (spread.gpus.get(), self.gpus_reserved_for(&claim.pod)),
            _ => (1, Vec::new()),
        };
        let mut request = binder::Request {
            quanta: vec![claim.device_ids.quanta().0],
            min_bins: bins,
            reserved_bins: reserved,
            bound: Vec::new(),
            concurrent_sets: vec![1],
        };
        self.add_other_containers(claim, &mut request);
        request
    }

    /// The claims whose call is open or ended a short time ago, most urgent first.
    pub(super) fn queue(&self, resource: Resource, now: BootTime) -> Vec<ClaimId> {
        let mut queue: Vec<_> = self
            .claims
            .iter()
            .filter(|(_, claim)| claim.resource == resource)
            .filter_map(|(&id, claim)| match claim.state {
                State::Queued { request, call } if is_call_recent(call, now) => Some((
                    Reverse(request.priority),
                    queue_rank(claim, request, now),
                    id,
                )),
                _ => None,
            })
            .collect();
        queue.sort_unstable();
        queue.into_iter().map(|(_, _, id)| id).collect()
    }

    /// The GPUs in order of UUID, or the managed memory, in the binder's terms.
    fn bins(&self, resource: Resource, now: BootTime) -> Vec<Bin> {
        match resource {
            Resource::ManagedMemory => vec![Bin {
                capacity: self.managed.0,
                attainable: self.managed.0,
                eventual: self.managed.0,
                free: self.managed.saturating_sub(self.managed_bound()).0,
                is_combinable: true,
            }],
            Resource::DeviceMemory => {
                let used = self.usage();
                self.gpus
                    .iter()
                    .map(|(uuid, gpu)| {
                        let bound = used.get(uuid).map_or(Quanta::ZERO, |used| used.quanta);
                        let capacity = match gpu.health {
                            Health::Healthy => gpu.capacity,
                            Health::Unhealthy => Quanta::ZERO,
                        };
                        let lasting = self.unavailable_for_long(uuid, now);
                        Bin {
                            capacity: capacity.0,
                            attainable: capacity.saturating_sub(lasting).0,
                            eventual: capacity.saturating_sub(self.withheld_quanta(uuid)).0,
                            free: self.free_on(uuid, gpu, bound).0,
                            is_combinable: !uuid.is_mig(),
                        }
                    })
                    .collect()
            }
        }
    }

    /// Assigns the first of these places to the claim, and sets the others aside for its pod.
    fn assign(&mut self, id: ClaimId, places: &[Vec<Part>]) -> Option<Binding> {
        let claim = self.claims.get(&id)?;
        let request = self.request_of(claim);
        let uuids: Vec<&GpuUuid> = self.gpus.keys().collect();
        let placement = match claim.resource {
            Resource::ManagedMemory => Placement::Managed(claim.device_ids.quanta()),
            Resource::DeviceMemory => Placement::Device(
                places
                    .first()?
                    .iter()
                    .map(|&(bin, share)| Share {
                        gpu: uuids[bin].clone(),
                        quanta: Quanta(share),
                    })
                    .collect(),
            ),
        };
        self.record_places(id, &request, places);
        self.grant(id, placement)
    }

    /// Grants the claim its memory: bound where its call is open, otherwise set aside until the
    /// kubelet's retry.
    fn grant(&mut self, id: ClaimId, placement: Placement) -> Option<Binding> {
        let pod = self.claims.get(&id)?.pod.clone();
        self.record_tenant(&pod, &placement);
        let claim = self.claims.get_mut(&id)?;
        match claim.state {
            State::Queued {
                call: Call::Open { .. },
                ..
            } => {
                claim.state = State::Bound {
                    placement: placement.clone(),
                };
                Some(claim.binding(id, placement))
            }
            State::Queued {
                call: Call::Ended { since },
                request,
            } => {
                claim.state = State::AwaitingRetry {
                    request,
                    since,
                    placement,
                };
                None
            }
            State::Idle | State::AwaitingRetry { .. } | State::Bound { .. } => None,
        }
    }
}

/// The rank of a queued claim among those of its priority.
///
/// A pending pod keeps the device ids of memory that it cannot get, so the memory of a large claim
/// is idle while that waits. So large claims come first, until one has waited for [`AGING_AFTER`].
/// Then the order of arrival prevents starvation. `benches/placement` compares this order with
/// others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum QueueRank {
    Aged {
        arrival: u64,
    },
    Fresh {
        quanta: Reverse<Quanta>,
        arrival: u64,
    },
}

fn queue_rank(claim: &Claim, request: QueuedRequest, now: BootTime) -> QueueRank {
    let arrival = claim.arrival;
    if now.since(request.queued_at) >= AGING_AFTER {
        QueueRank::Aged { arrival }
    } else {
        let quanta = Reverse(claim.device_ids.quanta());
        QueueRank::Fresh { quanta, arrival }
    }
}

/// Whether the call is open or ended so recently that memory may be set aside for the claim.
fn is_call_recent(call: Call, now: BootTime) -> bool {
    match call {
        Call::Open { .. } => true,
        Call::Ended { since } => now.since(since) < RETRY_GRACE,
    }
}
