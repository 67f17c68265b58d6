//! Converts the ledger to and from the form of the checkpoint.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::claim::{Booking, Call, Claim, State};
use super::leaked::Leaked;
use super::reserved::Reserved;
use super::sharing::{Past, Sharing};
use super::time::Moment;
use super::together::Together;
use super::types::{ClaimId, Placement};
use super::{GpuState, Ledger};
use crate::units::{AllocationId, Bytes, GpuUuid, PodUid, Quanta, Quantum, Resource};

/// The checkpoint's form of a ledger. It contains the GPUs, so that a restarted agent accounts for
/// a GPU that has vanished meanwhile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Snapshot {
    quantum: Quantum,
    gpus: Vec<(GpuUuid, GpuState)>,
    managed: Quanta,
    bookings: Vec<(AllocationId, Booking)>,
    claims: Vec<(ClaimId, Claim)>,
    #[serde(default)]
    leaked: Vec<(GpuUuid, Leaked)>,
    #[serde(default)]
    reserved: Vec<(GpuUuid, Reserved)>,
    #[serde(default)]
    kept: super::kept::Kept,
    /// None of an agent that shared all GPUs.
    #[serde(default)]
    past: Option<Past>,
    #[serde(default)]
    withheld: BTreeMap<GpuUuid, Bytes>,
    #[serde(default)]
    together: BTreeMap<PodUid, Together>,
    next: u64,
}

/// The reason why a snapshot is refused; the agent then rebuilds from the node's state.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// The configured quantum has changed, so that device ids mean other amounts.
    #[error("snapshot counts in {found}, this node in {expected}")]
    Quantum {
        /// The quantum of the snapshot.
        found: Quantum,
        /// The quantum of the node.
        expected: Quantum,
    },
    /// An allocation occurs twice.
    #[error("allocation {0} occurs twice")]
    Twice(AllocationId),
    /// A claim without an allocation, with a placement of the other resource or of nothing, or with
    /// a number that is still to be given.
    #[error("claim of pod {pod} on tokens {tokens} contradicts itself")]
    Claim {
        /// The claim's pod.
        pod: crate::units::PodUid,
        /// The claim's tokens.
        tokens: crate::units::TokenSet,
    },
}

impl Ledger {
    /// The checkpoint's form of this ledger.
    pub fn snapshot(&self) -> Snapshot {
        let Self {
            quantum,
            gpus,
            managed,
            bookings,
            claims,
            leaked,
            reserved,
            unheard: _,
            kept,
            sharing,
            withheld,
            together,
            next,
        } = self.clone();
        Snapshot {
            quantum,
            gpus: gpus.into_iter().collect(),
            managed,
            bookings: bookings.into_iter().collect(),
            claims: claims.into_iter().collect(),
            leaked: leaked.into_iter().collect(),
            reserved: reserved.into_iter().collect(),
            kept,
            past: Some(sharing.past),
            withheld,
            together,
            next,
        }
    }

    /// The ledger of a snapshot. Calls that were open have ended with the agent that served them.
    ///
    /// # Errors
    /// [`RestoreError`] where the snapshot contradicts this node or itself.
    pub fn restore(
        snapshot: Snapshot,
        quantum: Quantum,
        now: Moment,
    ) -> Result<Self, RestoreError> {
        check(&snapshot, quantum)?;
        let Snapshot {
            quantum,
            gpus,
            managed,
            bookings,
            mut claims,
            leaked,
            reserved,
            kept,
            past,
            withheld,
            together,
            next,
        } = snapshot;
        let past = past.unwrap_or_else(|| Past::unknown(gpus.iter().map(|(gpu, _)| gpu)));
        for (_, claim) in &mut claims {
            if let State::Waiting { call, .. } = &mut claim.state
                && matches!(call, Call::Open { .. })
            {
                *call = Call::Away { since: now };
            }
        }
        Ok(Self {
            quantum,
            gpus: gpus.into_iter().collect(),
            managed,
            bookings: bookings.into_iter().collect(),
            claims: claims.into_iter().collect(),
            leaked: leaked.into_iter().collect(),
            reserved: reserved.into_iter().collect(),
            unheard: Default::default(),
            kept,
            sharing: Sharing {
                cleared: None,
                past,
            },
            withheld,
            together,
            next,
        })
    }
}

fn check(snapshot: &Snapshot, expected: Quantum) -> Result<(), RestoreError> {
    if snapshot.quantum != expected {
        return Err(RestoreError::Quantum {
            found: snapshot.quantum,
            expected,
        });
    }
    let mut seen = BTreeSet::new();
    let booked = snapshot.bookings.iter().map(|(id, _)| id);
    let claimed = snapshot
        .claims
        .iter()
        .flat_map(|(_, claim)| &claim.allocations);
    for &id in booked.chain(claimed) {
        if !seen.insert(id) {
            return Err(RestoreError::Twice(id));
        }
    }
    match snapshot
        .claims
        .iter()
        .find(|(number, claim)| number.0 >= snapshot.next || !is_sound(claim))
    {
        None => Ok(()),
        Some((_, claim)) => Err(RestoreError::Claim {
            pod: claim.pod.clone(),
            tokens: claim.tokens.clone(),
        }),
    }
}

/// A placement need not have the size of its device ids: one restored from a CDI file may be of
/// another quantum's time.
fn is_sound(claim: &Claim) -> bool {
    let placed = match (claim.placement(), claim.resource) {
        (None, _) | (Some(Placement::Managed(_)), Resource::ManagedMemory) => true,
        (Some(Placement::Device(shares)), Resource::DeviceMemory) => {
            shares.iter().all(|share| share.quanta > Quanta::ZERO)
        }
        (Some(_), _) => false,
    };
    placed && !claim.allocations.is_empty()
}
