//! Describes the allocator that decides the kubelet's calls.

use std::time::Duration;

use bursar_ledger::units::{AllocationId, DeviceIdSet, GpuUuid, Resource};
use tonic::Status;

/// Allocates device ids and prepares containers; the node task implements it.
pub trait Allocator: Send + Sync + 'static {
    /// Records `device_ids` as allocated to a container that is not known yet. `id` is the id that
    /// the plugin relay has given to the kubelet; `None` lets the allocator choose.
    ///
    /// Lack of room is no error: a failing Allocate makes the pod Failed for ever.
    fn allocate(
        &self,
        resource: Resource,
        device_ids: DeviceIdSet,
        id: Option<AllocationId>,
    ) -> impl Future<Output = Result<AllocationId, AllocateError>> + Send;

    /// Binds the pending allocation of `device_ids` and prepares the container's files.
    ///
    /// The call may wait for room, for `limit`: a later reason for the wait would be lost. The
    /// kubelet has given up where the future is dropped.
    fn prepare(
        &self,
        resource: Resource,
        device_ids: DeviceIdSet,
        limit: Duration,
    ) -> impl Future<Output = Result<(), PrepareError>> + Send;
}

/// The reason why device ids were not allocated.
#[derive(Debug, thiserror::Error)]
pub enum AllocateError {
    /// The agent is stopping; the next agent can allocate.
    #[error("the agent is stopping")]
    Stopping,
}

/// The reason why a container cannot start. The pod's status shows the text, and the kubelet
/// retries.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// No GPU has room now.
    #[error("{0}")]
    NoRoom(String),
    /// No pending allocation has these device ids.
    #[error(
        "failed to bind the device ids {device_ids} of {resource}: no pending allocation has them; \
         delete the pod: its controller makes another"
    )]
    NotAllocated {
        /// The resource of the call.
        resource: Resource,
        /// The device ids of the call.
        device_ids: DeviceIdSet,
    },
    /// The agent is stopping; the kubelet calls the next agent.
    #[error("the agent is stopping")]
    Stopping,
    /// The pod is being deleted, and none of its containers has to start.
    #[error("the pod is being deleted")]
    PodDeleted,
    /// The pod's memory is on a GPU that is being drained.
    #[error("{0} is drained: the container starts when that is over")]
    Drained(GpuUuid),
    /// A GPU had room, but a file or socket of the container could not be created.
    #[error("{0}")]
    Failed(String),
    /// The plugin relay has reached no agent for this time.
    #[error(
        "the node's agent has been away for {} s: the container starts when the agent is back",
        .0.as_secs()
    )]
    AgentAway(Duration),
    /// The agent's own answer to the plugin relay.
    #[error("{}", .0.message())]
    Agent(Box<Status>),
}
