//! Schedules the queue: assigns memory to queued claims as the binder places them.

mod wait_reason;

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::Ledger;
use super::binder::{self, Bin, Part, Plan};
use super::boot_time::BootTime;
use super::claim::{AGING_AFTER, Call, Claim, QueuedRequest, RETRY_GRACE, State};
use super::types::{Binding, ClaimId, Health, Placement, Share};
use crate::units::{GpuUuid, Quanta, Resource};

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
            Resource::ManagedMemory | Resource::Compute => vec![0; bins.len()],
        };
        let is_restricted = |id: &ClaimId| self.weights.has(&self.claims[id].pod);
        let plan = if resource == Resource::DeviceMemory
            && (!self.are_all_gpus_shareable() || queue.iter().any(is_restricted))
        {
            self.plan_one_by_one(bins, &reserved, &queue)
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
            Resource::Compute => Vec::new(),
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
                            free: match self.is_untried(uuid) {
                                true => 0,
                                false => self.free_on(uuid, gpu, bound).0,
                            },
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
            Resource::ManagedMemory | Resource::Compute => {
                Placement::Managed(claim.device_ids.quanta())
            }
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
