//! Defines a pod's claim on memory and its states.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::boot_time::BootTime;
use super::types::{Binding, ClaimId, GpuSpread, Placement, Priority};
use crate::units::{AllocationId, DeviceIdSet, PodUid, Resource};

/// How long a queued claim keeps its place after its call ended. The kubelet retries after 0.5 s,
/// or after 10 to 15 s. A claim without a retry for longer has lost its pod, and is idle again.
pub const RETRY_DEADLINE: Duration = Duration::from_secs(300);

/// How long larger claims of the same priority may overtake a queued claim. Larger claims come
/// first because their pods keep more memory idle while they wait.
pub const AGING_AFTER: Duration = Duration::from_secs(60);

/// How long memory stays set aside for a claim whose call has ended: two of the kubelet's retries.
/// It stays for longer where another container of the pod has device memory.
pub const RETRY_GRACE: Duration = Duration::from_secs(40);

/// An answered `Allocate` without a started container, so that its pod is not known yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PendingAllocation {
    pub(super) resource: Resource,
    pub(super) device_ids: DeviceIdSet,
    pub(super) allocated_at: BootTime,
    /// Whether the last read of the kubelet's checkpoint lacked it.
    pub(super) was_missing: bool,
}

/// The allocations of one pod with one set of device ids.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Claim {
    pub(super) pod: PodUid,
    pub(super) resource: Resource,
    pub(super) device_ids: DeviceIdSet,
    /// The allocations, oldest first; never empty.
    pub(super) allocations: Vec<AllocationId>,
    /// The pod's place in the order of arrival. A pod's later containers inherit it, because a pod
    /// with memory must not wait behind pods that came after it.
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
    Queued { request: QueuedRequest, call: Call },
    /// Memory is set aside until the kubelet retries.
    AwaitingRetry {
        request: QueuedRequest,
        /// The time at which the last call ended, which is before the memory was set aside.
        since: BootTime,
        placement: Placement,
    },
    /// The claim has its memory.
    Bound { placement: Placement },
}

/// The request of a queued claim besides its device ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct QueuedRequest {
    pub(super) spread: GpuSpread,
    pub(super) priority: Priority,
    /// The time at which the claim joined the queue.
    pub(super) queued_at: BootTime,
}

/// Whether a call of the kubelet awaits the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Call {
    /// The call with this number awaits the answer.
    Open { number: u64 },
    /// The last call ended at this time.
    Ended { since: BootTime },
}

impl Claim {
    /// The memory that the claim occupies, bound or set aside.
    pub(super) fn placement(&self) -> Option<&Placement> {
        match &self.state {
            State::AwaitingRetry { placement, .. } | State::Bound { placement } => Some(placement),
            State::Idle | State::Queued { .. } => None,
        }
    }

    /// Frees the memory that was set aside. The claim queues as before. A claim in another state
    /// does not change.
    pub(super) fn requeue(&mut self) {
        if let State::AwaitingRetry { request, since, .. } = self.state {
            let call = Call::Ended { since };
            self.state = State::Queued { request, call };
        }
    }

    /// Whether the claim shares a device id with `device_ids` of `resource`.
    pub(super) fn overlaps(&self, resource: Resource, device_ids: &DeviceIdSet) -> bool {
        self.resource == resource && self.device_ids.overlaps(device_ids)
    }

    /// The claim's binding once it has `placement`.
    pub(super) fn binding(&self, claim: ClaimId, placement: Placement) -> Binding {
        Binding {
            claim,
            allocations: self.allocations.clone(),
            resource: self.resource,
            device_ids: self.device_ids.clone(),
            pod: self.pod.clone(),
            placement,
        }
    }
}
