//! Who holds which memory of the node: a pure ledger, told what happened and when.
//!
//! The kubelet's `Allocate` *books* (it never fails, and does not say for whom); its
//! `PreStartContainer` names the tokens, the agent finds the pod, and the pod's *claim* on those
//! tokens is *bound* to GPUs, or waits for room. Design, "Placement".
//!
//! ```text
//!   book            start                       room, call open
//!  ------> booking -------> Idle --> Waiting -----------------------> Bound
//!             |              ^        |   ^  \                         |  ^
//!     collect |              |  5 min |   |   \ room, call ended       |  | start
//!             v              |<-------+   |    v                       |  |
//!            gone            |            +-- Held --------------------|--+
//!                            |     40 s, or the GPU died               |
//!                            +-----------------------------------------+
//!                                 the pod starts another container with one of these tokens
//!  pod_gone: from every state to gone.
//!  Waiting: a call is open (`start`), or ended (`stop_waiting`); its place in the queue outlives
//!  the call, for the kubelet comes back.
//! ```
//!
//! - Tokens only count. A claim's size is the number of its tokens; which ones does not matter.
//! - In a pod the kubelet gives the tokens of finished init containers to later containers, so
//!   containers that share a token never live together: starting one ends the claims of the
//!   others. Those with the identical token set share one claim, as nothing tells them apart.
//! - The queue: higher priority first; then those that have waited for a minute, in order of
//!   arrival; then the others, largest first.
//! - The containers of a pod are placed together at the first start ([`together`]): what those that come later will
//!   have is held for them until the pod is gone, so that no pod waits with memory in its hands.
//! - Memory counts until the pod is gone, even if the kubelet has given its tokens away; what others may hold
//!   of it then is leaked, and bound to nobody, until it is proven free.
//! - A GPU whose driver was not seen to clear freed memory is for the pods of one namespace, once there is any.
//! - A reservation keeps a GPU's free memory for one pod, and the queue gives it to nobody else.
//! - Nothing here does I/O or reads a clock. Every event may come twice.
//!
//! After each event, and at least once a second, call [`Ledger::advance`].

mod advance;
mod binder;
mod claim;
mod end;
mod kept;
mod leaked;
mod reserved;
mod sharing;
mod snapshot;
mod start;
mod time;
mod together;
mod types;
pub mod units;
mod view;
mod withheld;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::units::{AllocationId, Bytes, GpuUuid, PodUid, Quanta, Quantum, Resource, TokenSet};
use claim::{Booking, Claim, State};
use leaked::Leaked;
use reserved::{Reserved, Unheard};
use sharing::Sharing;
use together::Together;

pub use claim::{HOLD, LATE, SENIORITY};
pub use end::COLLECT_AGE;
pub use leaked::SETTLING;
pub use reserved::Reserved as Reservation;
pub use snapshot::{RestoreError, Snapshot};
pub use time::Moment;
pub use types::{
    Answer, Binding, Bound, ClaimId, Gpu, GpuView, Health, ManagedView, Placement, Priority, Shape,
    Share, Start, StartError, Started, Ticket, View, WaitReason, Waiter,
};

/// The node's ledger. See the module's documentation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ledger {
    /// What a token stands for; fixed for the ledger's life.
    quantum: Quantum,
    /// The GPUs of the inventory, and those that left it with memory still bound.
    gpus: BTreeMap<GpuUuid, GpuState>,
    /// The managed memory that may be bound in all.
    managed: Quanta,
    bookings: BTreeMap<AllocationId, Booking>,
    claims: BTreeMap<ClaimId, Claim>,
    /// What ended pods left on GPUs.
    leaked: BTreeMap<GpuUuid, Leaked>,
    /// What the operator has put aside for single pods.
    reserved: BTreeMap<GpuUuid, Reserved>,
    /// The GPUs among those whose pod has no claim here.
    unheard: BTreeMap<GpuUuid, Unheard>,
    /// What kept leases have of GPUs that no bound container owns.
    kept: kept::Kept,
    /// Which namespaces' pods may have memory of which GPUs.
    sharing: Sharing,
    /// What of each GPU is in use and charged to nobody.
    withheld: BTreeMap<GpuUuid, Bytes>,
    /// The pods whose containers are placed together.
    together: BTreeMap<PodUid, Together>,
    /// The next number for a claim, an arrival or a call.
    next: u64,
}

/// What the ledger knows of a GPU besides its claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct GpuState {
    capacity: Quanta,
    health: Health,
}

impl Ledger {
    /// An empty ledger of a node without GPUs.
    pub fn new(quantum: Quantum) -> Self {
        Self {
            quantum,
            gpus: BTreeMap::new(),
            managed: Quanta::ZERO,
            bookings: BTreeMap::new(),
            claims: BTreeMap::new(),
            leaked: BTreeMap::new(),
            reserved: BTreeMap::new(),
            unheard: BTreeMap::new(),
            kept: BTreeMap::new(),
            sharing: Sharing::default(),
            withheld: BTreeMap::new(),
            together: BTreeMap::new(),
            next: 0,
        }
    }

    /// What a token stands for.
    pub fn quantum(&self) -> Quantum {
        self.quantum
    }

    /// The inventory as it is now. A GPU that is missing from it counts as unhealthy while
    /// something is bound on it, and is forgotten by a later call. Held memory on an unhealthy GPU is given
    /// up; bound memory stays bound.
    pub fn set_gpus(&mut self, gpus: impl IntoIterator<Item = Gpu>) {
        let mut listed: BTreeMap<GpuUuid, GpuState> = gpus
            .into_iter()
            .map(|gpu| {
                let Gpu {
                    uuid,
                    capacity,
                    health,
                } = gpu;
                (uuid, GpuState { capacity, health })
            })
            .collect();
        let used = self.usage();
        for (uuid, gpu) in &self.gpus {
            if used.contains_key(uuid) && !listed.contains_key(uuid) {
                let health = Health::Unhealthy;
                listed.insert(uuid.clone(), GpuState { health, ..*gpu });
            }
        }
        self.gpus = listed;
        self.give_up_unhealthy_holds();
    }

    /// The managed memory that may be bound on this node; zero switches it off.
    pub fn set_managed_capacity(&mut self, capacity: Quanta) {
        self.managed = capacity;
    }

    /// `Allocate` answered with `id` for these tokens. Never fails; an id that is known already
    /// changes nothing. Also what a rebuild says for every entry of the kubelet's checkpoint.
    pub fn book(&mut self, id: AllocationId, resource: Resource, tokens: TokenSet, now: Moment) {
        if self.knows(id) {
            return;
        }
        self.bookings.insert(
            id,
            Booking {
                resource,
                tokens,
                at: now,
                missed: false,
            },
        );
    }

    /// The host says that this allocation is bound so (its CDI file, when the checkpoint was
    /// lost). Never fails, even where that over-books a GPU: what is, is. Says whether it was news.
    pub fn adopt(
        &mut self,
        id: AllocationId,
        resource: Resource,
        tokens: TokenSet,
        pod: PodUid,
        placement: Placement,
    ) -> bool {
        self.bookings.remove(&id);
        if self.knows(id) {
            return false;
        }
        self.note_tenant(&pod, &placement);
        let claim = self.claim_of(&pod, resource, &tokens);
        match claim.and_then(|claim| self.claims.get_mut(&claim)) {
            Some(claim) => {
                claim.allocations.push(id);
                if claim.placement().is_none() {
                    claim.state = State::Bound { placement };
                }
            }
            None => {
                let arrival = self.number();
                let claim = Claim {
                    pod,
                    resource,
                    tokens,
                    allocations: vec![id],
                    arrival,
                    state: State::Bound { placement },
                };
                let number = ClaimId(self.number());
                self.claims.insert(number, claim);
            }
        }
        true
    }

    /// The claim of `pod` on exactly these tokens.
    fn claim_of(&self, pod: &PodUid, resource: Resource, tokens: &TokenSet) -> Option<ClaimId> {
        self.claims
            .iter()
            .find(|(_, claim)| {
                claim.pod == *pod && claim.resource == resource && claim.tokens == *tokens
            })
            .map(|(&number, _)| number)
    }

    /// Whether the allocation is booked or part of a claim.
    fn knows(&self, id: AllocationId) -> bool {
        self.bookings.contains_key(&id)
            || self
                .claims
                .values()
                .any(|claim| claim.allocations.contains(&id))
    }

    /// A number that was never given before.
    fn number(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        number
    }
}
