//! Binds the claim of a container that starts, or puts it into the queue.

use super::Ledger;
use super::claim::{Call, Claim, State, Want};
use super::time::Moment;
use super::types::{Answer, ClaimId, Start, StartError, Started, Ticket};
use crate::units::{AllocationId, PodUid, Resource, TokenSet};

impl Ledger {
    /// Answers `PreStartContainer`: returns the claim's binding, binds it now, or puts it into the
    /// queue.
    ///
    /// The claim is bound where the queue's rules leave room for it and for all containers of its
    /// pod that are yet to start. Claims of the same pod that share a device id end. Claims of
    /// other pods that share one and have no memory are dropped: the kubelet has given their device
    /// ids away.
    ///
    /// # Errors
    /// [`StartError::NotBooked`]; nothing has changed then.
    pub fn start(&mut self, start: Start, now: Moment) -> Result<Started, StartError> {
        let Start {
            resource,
            tokens,
            containers,
            pod,
            shape,
            priority,
        } = start;
        let arrival = self.arrival_of(&pod);
        let (id, mut claim) = self.take_claim(resource, tokens, pod)?;
        let placement = claim.placement().cloned();
        if resource == Resource::DeviceMemory && placement.is_none() {
            self.gather(&claim.pod, &claim.tokens, containers);
        }
        let ended = self.end_overlapping(&claim);
        let call = self.number();
        if claim.state == State::Idle {
            claim.arrival = arrival.unwrap_or(call);
        }
        if let Some(placement) = placement.or_else(|| self.held_place(&claim)) {
            claim.state = State::Bound {
                placement: placement.clone(),
            };
            let answer = Answer::Bound(claim.binding(id, placement));
            self.claims.insert(id, claim);
            return Ok(Started { answer, ended });
        }
        let queued = match claim.state {
            State::Waiting { want, .. } => want.queued,
            State::Idle | State::Held { .. } | State::Bound { .. } => now,
        };
        let want = Want {
            shape,
            priority,
            queued,
        };
        claim.state = State::Waiting {
            want,
            call: Call::Open { number: call },
        };
        self.claims.insert(id, claim);
        let answer = match self.bind_if_due(id, now) {
            Some(binding) => Answer::Bound(binding),
            None => Answer::Wait(Ticket { claim: id, call }, self.wait_reason(id, now)),
        };
        Ok(Started { answer, ended })
    }

    /// Notes that this call ended without a binding. The claim keeps its place for
    /// [`SENIORITY`](super::SENIORITY). Nothing happens if the claim was bound or called again.
    pub fn stop_waiting(&mut self, ticket: Ticket, now: Moment) {
        if let Some(claim) = self.claims.get_mut(&ticket.claim)
            && let State::Waiting { call, .. } = &mut claim.state
            && *call
                == (Call::Open {
                    number: ticket.call,
                })
        {
            *call = Call::Away { since: now };
        }
    }

    /// The pod's arrival, if it has or awaits memory.
    fn arrival_of(&self, pod: &PodUid) -> Option<u64> {
        self.claims
            .values()
            .filter(|claim| claim.pod == *pod && claim.state != State::Idle)
            .map(|claim| claim.arrival)
            .min()
    }

    /// Removes the pod's claim on these device ids, with every pending allocation of them, and
    /// returns it.
    fn take_claim(
        &mut self,
        resource: Resource,
        tokens: TokenSet,
        pod: PodUid,
    ) -> Result<(ClaimId, Claim), StartError> {
        let booked = self.take_bookings(resource, &tokens);
        let known = self
            .claim_of(&pod, resource, &tokens)
            .and_then(|id| self.claims.remove_entry(&id));
        match known {
            Some((id, mut claim)) => {
                claim.allocations.extend(booked);
                Ok((id, claim))
            }
            None if booked.is_empty() => Err(StartError::NotBooked {
                resource,
                tokens,
                pod,
            }),
            None => {
                let claim = Claim {
                    pod,
                    resource,
                    tokens,
                    allocations: booked,
                    arrival: self.next,
                    state: State::Idle,
                };
                Ok((ClaimId(self.number()), claim))
            }
        }
    }

    /// Removes the pending allocations of exactly these device ids, oldest first.
    fn take_bookings(&mut self, resource: Resource, tokens: &TokenSet) -> Vec<AllocationId> {
        let taken = self
            .bookings
            .extract_if(.., |_, booking| {
                booking.resource == resource && booking.tokens == *tokens
            })
            .map(|(id, booking)| (booking.at, id));
        let mut taken: Vec<_> = taken.collect();
        taken.sort_unstable();
        taken.into_iter().map(|(_, id)| id).collect()
    }
}
