//! Converts the ledger to and from the form of the checkpoint.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::boot_time::BootTime;
use super::claim::{Call, Claim, PendingAllocation, State};
use super::isolation::{NamespaceIsolation, PastTenants};
use super::pod_groups::PodGroup;
use super::reservations::Reservation;
use super::types::{ClaimId, Placement};
use super::unreclaimed::Unreclaimed;
use super::weights::Weights;
use super::{GpuState, Ledger};
use crate::units::{AllocationId, Bytes, GpuUuid, PodUid, Quanta, Quantum, Resource};

/// The checkpoint's form of a ledger. It contains the GPUs, so that a restarted agent accounts for
/// a GPU that has vanished meanwhile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Snapshot {
    quantum: Quantum,
    gpus: Vec<(GpuUuid, GpuState)>,
    managed: Quanta,
    pending: Vec<(AllocationId, PendingAllocation)>,
    claims: Vec<(ClaimId, Claim)>,
    #[serde(default)]
    unreclaimed: Vec<(GpuUuid, Unreclaimed)>,
    #[serde(default)]
    reservations: Vec<(GpuUuid, Reservation)>,
    #[serde(default)]
    orphaned_leases: super::orphaned_leases::OrphanedLeases,
    /// None in the checkpoint of an agent that shared all GPUs.
    #[serde(default)]
    past: Option<PastTenants>,
    #[serde(default)]
    withheld: BTreeMap<GpuUuid, Bytes>,
    #[serde(default)]
    pod_groups: BTreeMap<PodUid, PodGroup>,
    #[serde(default)]
    weights: Weights,
    next_id: u64,
}

/// The reason why a snapshot is refused; the agent then rebuilds from the node's state.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// The configured quantum has changed, so that device ids mean other amounts.
    #[error("snapshot counts in {found}, this node in {expected}")]
    QuantumChanged {
        /// The quantum of the snapshot.
        found: Quantum,
        /// The quantum of the node.
        expected: Quantum,
    },
    /// No numbers are left for later claims.
    #[error("its next number {0} leaves no others")]
    NoNumbers(u64),
    /// An allocation occurs twice.
    #[error("allocation {0} occurs twice")]
    DuplicateAllocation(AllocationId),
    /// A claim without an allocation, with a placement of the other resource or of nothing, or with
    /// a number that was not given yet.
    #[error("claim of pod {pod} on device ids {device_ids} is inconsistent")]
    InconsistentClaim {
        /// The claim's pod.
        pod: crate::units::PodUid,
        /// The claim's device ids.
        device_ids: crate::units::DeviceIdSet,
    },
}

impl Ledger {
    /// The checkpoint's form of this ledger.
    pub fn snapshot(&self) -> Snapshot {
        let Self {
            quantum,
            gpus,
            managed,
            pending,
            claims,
            unreclaimed,
            reservations,
            unclaimed: _,
            orphaned_leases,
            isolation,
            withheld,
            refused: _,
            tried: _,
            pod_groups,
            weights,
            next_id,
        } = self.clone();
        Snapshot {
            quantum,
            gpus: gpus.into_iter().collect(),
            managed,
            pending: pending.into_iter().collect(),
            claims: claims.into_iter().collect(),
            unreclaimed: unreclaimed.into_iter().collect(),
            reservations: reservations.into_iter().collect(),
            orphaned_leases,
            past: Some(isolation.past_tenants),
            withheld,
            pod_groups,
            weights,
            next_id,
        }
    }

    /// The ledger of a snapshot. Calls that were open have ended with the agent that served them.
    ///
    /// # Errors
    /// [`RestoreError`] where the snapshot contradicts this node or itself.
    pub fn restore(
        snapshot: Snapshot,
        quantum: Quantum,
        now: BootTime,
    ) -> Result<Self, RestoreError> {
        validate(&snapshot, quantum)?;
        let Snapshot {
            quantum,
            gpus,
            managed,
            pending,
            mut claims,
            unreclaimed,
            reservations,
            orphaned_leases,
            past,
            withheld,
            pod_groups,
            weights,
            next_id,
        } = snapshot;
        let past = past.unwrap_or_else(|| PastTenants::unknown(gpus.iter().map(|(gpu, _)| gpu)));
        for (_, claim) in &mut claims {
            if let State::Queued { call, .. } = &mut claim.state
                && matches!(call, Call::Open { .. })
            {
                *call = Call::Ended { since: now };
            }
        }
        Ok(Self {
            quantum,
            gpus: gpus.into_iter().collect(),
            managed,
            pending: pending.into_iter().collect(),
            claims: claims.into_iter().collect(),
            unreclaimed: unreclaimed.into_iter().collect(),
            reservations: reservations.into_iter().collect(),
            unclaimed: Default::default(),
            orphaned_leases,
            isolation: NamespaceIsolation {
                shareable: None,
                past_tenants: past,
            },
            withheld,
            refused: Default::default(),
            tried: None,
            pod_groups,
            weights,
            next_id,
        })
    }
}

fn validate(snapshot: &Snapshot, expected: Quantum) -> Result<(), RestoreError> {
    if snapshot.quantum != expected {
        return Err(RestoreError::QuantumChanged {
            found: snapshot.quantum,
            expected,
        });
    }
    if snapshot.next_id > u64::MAX / 2 {
        return Err(RestoreError::NoNumbers(snapshot.next_id));
    }
    let mut seen = BTreeSet::new();
    let booked = snapshot.pending.iter().map(|(id, _)| id);
    let claimed = snapshot
        .claims
        .iter()
        .flat_map(|(_, claim)| &claim.allocations);
    for &id in booked.chain(claimed) {
        if !seen.insert(id) {
            return Err(RestoreError::DuplicateAllocation(id));
        }
    }
    match snapshot
        .claims
        .iter()
        .find(|(number, claim)| number.0 >= snapshot.next_id || !is_consistent(claim))
    {
        None => Ok(()),
        Some((_, claim)) => Err(RestoreError::InconsistentClaim {
            pod: claim.pod.clone(),
            device_ids: claim.device_ids.clone(),
        }),
    }
}

/// A placement may differ from the size of its device ids: a placement from a CDI file may be of
/// another quantum.
fn is_consistent(claim: &Claim) -> bool {
    let placed = match (claim.placement(), claim.resource) {
        (None, _) | (Some(Placement::Managed(_)), Resource::ManagedMemory) => true,
        (Some(Placement::Device(shares)), Resource::DeviceMemory) => {
            shares.iter().all(|share| share.quanta > Quanta::ZERO)
        }
        (Some(_), _) => false,
    };
    placed && !claim.allocations.is_empty()
}
