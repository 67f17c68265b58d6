//! A container starts: its pod's claim is bound, or joins the queue.

use super::Ledger;
use super::claim::{Call, Claim, State, Want};
use super::time::Moment;
use super::types::{Answer, ClaimId, Start, StartError, Started, Ticket};
use crate::units::{AllocationId, PodUid, Resource, TokenSet};

impl Ledger {
    /// `PreStartContainer`: binds the pod's claim on these tokens if there is room under the
    /// queue's rules for all containers of the pod that are yet to come, answers the binding that it has already or
    /// that was held for it, or queues it. Claims of the same
    /// pod that share a token end; claims of other pods that share one and have no memory are
    /// dead for the kubelet and forgotten.
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

    /// The call of this ticket ended without a binding. The claim keeps its place for
    /// [`SENIORITY`](super::SENIORITY). Does nothing if the claim was bound or called again.
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

    /// When the pod came, if it has or awaits memory.
    fn arrival_of(&self, pod: &PodUid) -> Option<u64> {
        self.claims
            .values()
            .filter(|claim| claim.pod == *pod && claim.state != State::Idle)
            .map(|claim| claim.arrival)
            .min()
    }

    /// Takes out the pod's claim on these tokens, with every booking of them that has no pod yet.
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

    /// Takes out the bookings of exactly these tokens, oldest first.
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
