//! Defines a pod's claim on memory and its states.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::time::Moment;
use super::types::{Binding, ClaimId, Placement, Priority, Shape};
use crate::units::{AllocationId, PodUid, Resource, TokenSet};

/// How long a queued claim keeps its place after its call ended. The kubelet retries after 0.5 s,
/// or after 10 to 15 s; a claim without a retry for longer has lost its pod.
pub const SENIORITY: Duration = Duration::from_secs(300);

/// How long larger claims may overtake a queued one.
pub const LATE: Duration = Duration::from_secs(60);

/// How long the ledger holds memory for a claim whose call has ended: two of the kubelet's retries.
pub const HOLD: Duration = Duration::from_secs(40);

/// An answered `Allocate` without a started container, so that its pod is not known yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Booking {
    pub(super) resource: Resource,
    pub(super) tokens: TokenSet,
    pub(super) at: Moment,
    /// Whether the last reading of the kubelet's checkpoint lacked it.
    pub(super) missed: bool,
}

/// The allocations of one pod with one set of device ids.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Claim {
    pub(super) pod: PodUid,
    pub(super) resource: Resource,
    pub(super) tokens: TokenSet,
    /// The allocations, oldest first; never empty.
    pub(super) allocations: Vec<AllocationId>,
    /// The pod's place in the order of arrival. A pod's later containers inherit it: a pod that
    /// already holds memory must not wait behind pods that came after it.
    pub(super) arrival: u64,
    pub(super) state: State,
}

/// The states, as the documentation of the crate draws them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum State {
    /// The claim has no memory and is not in the queue.
    Idle,
    /// The claim is in the queue.
    Waiting { want: Want, call: Call },
    /// The ledger holds memory until the kubelet retries.
    Held {
        want: Want,
        since: Moment,
        placement: Placement,
    },
    /// The claim has its memory.
    Bound { placement: Placement },
}

/// The request of a queued claim besides its device ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Want {
    pub(super) shape: Shape,
    pub(super) priority: Priority,
    /// The time at which the claim joined the queue.
    pub(super) queued: Moment,
}

/// Whether a call of the kubelet awaits the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Call {
    /// The call with this number awaits the answer.
    Open { number: u64 },
    /// The last call ended at this time.
    Away { since: Moment },
}

impl Claim {
    /// The memory that the claim occupies, bound or held.
    pub(super) fn placement(&self) -> Option<&Placement> {
        match &self.state {
            State::Held { placement, .. } | State::Bound { placement } => Some(placement),
            State::Idle | State::Waiting { .. } => None,
        }
    }

    /// Gives up the held memory: the claim queues as before.
    pub(super) fn queue_again(&mut self) {
        if let State::Held { want, since, .. } = self.state {
            let call = Call::Away { since };
            self.state = State::Waiting { want, call };
        }
    }

    /// Whether the claim shares a device id with `tokens` of `resource`.
    pub(super) fn overlaps(&self, resource: Resource, tokens: &TokenSet) -> bool {
        self.resource == resource && self.tokens.overlaps(tokens)
    }

    /// The claim as the rest of the agent sees it once it has `placement`.
    pub(super) fn binding(&self, claim: ClaimId, placement: Placement) -> Binding {
        Binding {
            claim,
            allocations: self.allocations.clone(),
            resource: self.resource,
            tokens: self.tokens.clone(),
            pod: self.pod.clone(),
            placement,
        }
    }
}
