//! A pod's hold on memory, and the states it goes through.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::time::Moment;
use super::types::{Binding, ClaimId, Placement, Priority, Shape};
use crate::units::{AllocationId, PodUid, Resource, TokenSet};

/// How long a waiter keeps its place after its call ended. The kubelet comes back after 0.5 s, or
/// 10 to 15 s; one that stays away longer has lost its pod.
pub const SENIORITY: Duration = Duration::from_secs(300);

/// How long a waiter may be overtaken by larger ones.
pub const LATE: Duration = Duration::from_secs(60);

/// How long memory is held for a waiter whose call has ended: two of the kubelet's retries.
pub const HOLD: Duration = Duration::from_secs(40);

/// An answered `Allocate` of which no container has started yet, so that its pod is unknown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Booking {
    pub(super) resource: Resource,
    pub(super) tokens: TokenSet,
    pub(super) at: Moment,
    /// Whether the last look at the kubelet's checkpoint missed it.
    pub(super) missed: bool,
}

/// The bookings of one pod with one token set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Claim {
    pub(super) pod: PodUid,
    pub(super) resource: Resource,
    pub(super) tokens: TokenSet,
    /// Oldest first, never empty.
    pub(super) allocations: Vec<AllocationId>,
    /// The pod's place in the order of arrival. A pod's later containers inherit it: a pod that
    /// already holds memory must not wait behind pods that came after it.
    pub(super) arrival: u64,
    pub(super) state: State,
}

/// Drawn in the module's documentation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum State {
    /// No memory, not in the queue.
    Idle,
    /// In the queue.
    Waiting { want: Want, call: Call },
    /// Memory is put aside until the kubelet is back.
    Held {
        want: Want,
        since: Moment,
        placement: Placement,
    },
    /// It has its memory.
    Bound { placement: Placement },
}

/// What a waiter asked for besides its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Want {
    pub(super) shape: Shape,
    pub(super) priority: Priority,
    /// When it joined the queue.
    pub(super) queued: Moment,
}

/// Whether somebody is there to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Call {
    /// The call with this number waits.
    Open { number: u64 },
    /// The last call ended then.
    Away { since: Moment },
}

impl Claim {
    /// The memory that it takes: bound, or held.
    pub(super) fn placement(&self) -> Option<&Placement> {
        match &self.state {
            State::Held { placement, .. } | State::Bound { placement } => Some(placement),
            State::Idle | State::Waiting { .. } => None,
        }
    }

    /// Gives up what is held for it: it queues as before.
    pub(super) fn queue_again(&mut self) {
        if let State::Held { want, since, .. } = self.state {
            let call = Call::Away { since };
            self.state = State::Waiting { want, call };
        }
    }

    /// Whether it shares a token with `tokens` of `resource`.
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
