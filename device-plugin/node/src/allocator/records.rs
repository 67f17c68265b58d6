//! Defines the values that the allocator takes and returns.

use std::fmt;

use bursar_host::checkpoint::write_behind::LateWrite;
use bursar_kubelet::device_checkpoint::CheckpointEntry;
use bursar_kubelet::plugin::PrepareError;
use bursar_ledger::units::{AllocationId, Bytes, GpuUuid, PodUid, Quanta, Resource};
use bursar_ledger::{BindRequest, BootTime, ClaimId, Priority, WaitReason};
use jiff::Timestamp;
use tokio::sync::oneshot;

use super::super::checkpoint_state::{ContainerName, PodName};
use super::super::host::Subsystem;

/// The channel for the result of a PreStartContainer call; closed once the caller has given up.
pub(super) type ResultSender = oneshot::Sender<Result<BoundMemory, PrepareError>>;

/// The channels of a PreStartContainer call.
#[derive(Debug)]
pub struct Reply {
    /// The result.
    pub(crate) result: ResultSender,
    /// The reason, at the time when the call begins to wait for room.
    pub(crate) wait_reason: oneshot::Sender<WaitReason>,
}

/// The memory that a container was bound to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BoundMemory {
    /// Device memory, by GPU; never empty.
    Device(Vec<(GpuUuid, Bytes)>),
    /// Managed memory.
    Managed(Bytes),
}

impl fmt::Display for BoundMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shares = match self {
            Self::Managed(bytes) => return write!(f, "{bytes} of managed memory"),
            Self::Device(shares) => shares,
        };
        if shares.len() > 1 {
            let sum = shares.iter().map(|(_, bytes)| bytes.0).sum();
            write!(f, "{} over {} GPUs: ", Bytes(sum), shares.len())?;
        }
        for (index, (gpu, bytes)) in shares.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{bytes} of {gpu}")?;
        }
        Ok(())
    }
}

/// A PreStartContainer call with its container, as the kubelet and the operator describe it.
#[derive(Debug, Clone)]
pub struct PrepareRequest {
    /// The request to the ledger.
    pub bind: BindRequest,
    /// The pod's namespace and name, if the operator or the kubelet has reported them.
    pub pod_name: Option<PodName>,
    /// The container's name.
    pub container: String,
    /// The pod's weight in compute time, in hundredths of a GPU; zero is none.
    pub(crate) weight: u16,
    /// The kubelet's checkpoint entries with exactly these device ids.
    pub(crate) checkpoint_entries: Vec<CheckpointEntry>,
    /// Whether the spread and the priority are defaults, because the operator has not written the
    /// pod's.
    pub is_assumed: bool,
}

/// The node's problems by subsystem, for conditions; `None` is well.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeProblems {
    /// The agent cannot write the checkpoint.
    pub checkpoint: Option<String>,
    /// The agent could not use the checkpoint at its start and rebuilt the state from the host.
    pub rebuilt: Option<String>,
    /// A step of a binding or of a teardown failed: the subsystem and the error.
    pub host: Option<(Subsystem, String)>,
    /// The agent cannot write the CDI directory.
    pub cdi: Option<String>,
    /// The state directory lacks the generations of GPUs for long.
    pub late_write: Option<LateWrite>,
    /// The agent cannot read the kubelet's record of devices.
    pub kubelet_checkpoint: Option<KubeletCheckpointProblem>,
}

/// The agent cannot read the kubelet's record of devices, or not all of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubeletCheckpointProblem {
    /// The error.
    pub error: String,
    /// Whether the agent can read nothing, so that no container is found.
    pub is_whole: bool,
}

/// A claim that waits for room, whether or not a kubelet call is pending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueuedClaim {
    /// The pod's UID.
    pub pod: PodUid,
    /// The resource that the claim waits for: compute time, if its pod's weight fits on no GPU.
    pub resource: Resource,
    /// The quanta that the claim waits for.
    pub quanta: Quanta,
    /// The pod's priority.
    pub priority: Priority,
    /// Whether the GPUs that are open to the pod could hold it if they were empty, as of the last
    /// call. Always false for managed memory.
    pub fits_when_empty: bool,
    /// The time at which the wait began.
    pub since: Timestamp,
    /// That time on the clock that measures the wait.
    pub queued_at: BootTime,
    /// The names of the container and its pod, if known.
    pub name: Option<ContainerName>,
}

/// A container with device memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoundContainer {
    /// The container's claim. Containers that share a claim never run at the same time.
    pub claim: ClaimId,
    /// The allocation that the container was given.
    pub allocation: AllocationId,
    /// The pod's UID.
    pub pod: PodUid,
    /// The names of the container and its pod, if known.
    pub name: Option<ContainerName>,
    /// The pod's cgroup, once found.
    pub cgroup: Option<std::path::PathBuf>,
}

#[cfg(any(test, feature = "testing"))]
impl BoundContainer {
    /// A container with these ids and no further data.
    pub fn with_ids(allocation: u64, claim: u64) -> Self {
        Self {
            claim: serde_json::from_value(claim.into()).expect("a number is an id"),
            allocation: AllocationId::from_bits(allocation),
            pod: "p".parse().expect("a UID"),
            name: None,
            cgroup: None,
        }
    }
}
