//! How holds on memory end.

use std::collections::BTreeSet;
use std::time::Duration;

use super::Ledger;
use super::claim::{Call, Claim, HOLD, SENIORITY, State};
use super::time::Moment;
use super::types::{Health, Placement};
use crate::units::{AllocationId, PodUid};

/// A booking is not collected before it is this old: the kubelet writes its checkpoint after our
/// answer, and a pod's first start may be long in pulling images, but not in being recorded.
pub const COLLECT_AGE: Duration = Duration::from_secs(60);

impl Ledger {
    /// The pod's processes are gone (its cgroup is): whatever it had is free. Answers its
    /// allocations, whose CDI files and sockets go; none if the pod was not known.
    pub fn pod_gone(&mut self, pod: &PodUid) -> Vec<AllocationId> {
        // Its reservation is of no use, whatever becomes of who ordered it.
        self.reserved.retain(|_, reserved| reserved.waiter != *pod);
        self.together.remove(pod);
        self.claims
            .extract_if(.., |_, claim| claim.pod == *pod)
            .flat_map(|(_, claim)| claim.allocations)
            .collect()
    }

    /// One look at the kubelet's checkpoint, never from inside `Allocate`: `known` are the
    /// allocations in it. A booking without a pod that is [`COLLECT_AGE`] old and was missed by
    /// two looks in a row is forgotten, and answered. (A claim ends with its pod.)
    pub fn collect(&mut self, known: &BTreeSet<AllocationId>, now: Moment) -> Vec<AllocationId> {
        self.bookings
            .extract_if(.., |id, booking| {
                if now.since(booking.at) < COLLECT_AGE {
                    return false;
                }
                let missed_before = booking.missed;
                booking.missed = !known.contains(id);
                missed_before && booking.missed
            })
            .map(|(id, _)| id)
            .collect()
    }

    /// Ends what a start of `started` proves over: the memory of its pod's other claims that
    /// share a token, and other pods' claims that share one and have no memory.
    /// Answers the allocations that lost a binding or were forgotten.
    pub(super) fn end_overlapping(&mut self, started: &Claim) -> Vec<AllocationId> {
        let mut ended = Vec::new();
        self.claims.retain(|_, other| {
            if !other.overlaps(started.resource, &started.tokens) {
                return true;
            }
            let ours = other.pod == started.pod;
            let bound = matches!(other.state, State::Bound { .. });
            if bound != ours {
                // Ours without a binding has nothing to take down; another pod's memory counts
                // until that pod is gone.
                if ours {
                    other.state = State::Idle;
                }
                return true;
            }
            ended.extend(other.allocations.iter().copied());
            other.state = State::Idle;
            ours
        });
        self.scatter(Some(&started.pod));
        ended
    }

    /// Ends what has waited for the kubelet in vain.
    pub(super) fn expire(&mut self, now: Moment) {
        let mut given_up = Vec::new();
        for claim in self.claims.values_mut() {
            match claim.state {
                State::Held { want, since, .. } if now.since(since) >= HOLD => {
                    given_up.push(claim.pod.clone());
                    claim.state = State::Waiting {
                        want,
                        call: Call::Away { since },
                    };
                }
                State::Waiting {
                    call: Call::Away { since },
                    ..
                } if now.since(since) >= SENIORITY => claim.state = State::Idle,
                _ => {}
            }
        }
        for pod in given_up {
            self.give_up_places_of(&pod);
        }
    }

    /// Memory held on a GPU that takes no claims helps nobody: its waiter queues again.
    pub(super) fn give_up_unhealthy_holds(&mut self) {
        let gpus = &self.gpus;
        let healthy = |placement: &Placement| match placement {
            Placement::Managed(_) => true,
            Placement::Device(shares) => shares.iter().all(|share| {
                gpus.get(&share.gpu)
                    .is_some_and(|gpu| gpu.health == Health::Healthy)
            }),
        };
        let held = self.claims.values_mut().filter(
            |claim| matches!(&claim.state, State::Held { placement, .. } if !healthy(placement)),
        );
        held.for_each(Claim::queue_again);
        self.give_up_unhealthy_places();
    }
}
