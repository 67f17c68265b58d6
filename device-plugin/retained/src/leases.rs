//! Decides what becomes of the node's leases: a state machine without I/O.
//!
//! ```text
//!           begin_create          finish_create           commit
//! (charged) -----------> Creating ------------> Writing -----------> Committed
//!                           |                      |                     |  discarded while other
//!                           |      its image ended |                     |  pods have it open
//!                           |    another took over |                     v
//!                    failed |                      |                 Discarded (no open finds it)
//!                           v                      v                     |
//!                     ReleasePending <-------------+---------------------+
//!                           |           discarded, its last opener's pod ended, its GPU lost it
//!                           |
//!                           |  the owner, or the node, is charged as for orphaned exports
//!                           v
//!                       Releasing --- the fd store closed the descriptor ---> (forgotten)
//! ```
//!
//! The fd store is the source of truth. A blob beside each descriptor describes the lease, and
//! [`LeaseTable::resync`] replaces the table by what the fd store lists. The agent therefore
//! answers a tenant only after the fd store has acknowledged the change. A new lease is an
//! exception: its descriptor was sent then. The next agent completes what this agent did not.
//!
//! From `ReleasePending` on the bytes of a lease are unreclaimed, like orphaned exports: the node
//! binds them again once the driver's figures prove them free. Functions return [`Effect`]s for the
//! service to carry out.

mod open;
mod reconcile;
mod record;
mod requests;
mod views;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bursar_ledger::BootTime;
use bursar_ledger::units::{AllocationId, Bytes, GpuUuid, LeaseId};
use bursar_protocol::messages::retained::Key;
use bursar_sessions::Process;
use bursar_sessions::lease_handle::NodeView;

pub(crate) use record::StoredRecord;
pub use record::{Content, LeaseKey, LeaseRecord, Writer};

/// How many leases one container may own.
pub(crate) const MAX_OWNED: usize = 64;

/// How many pods may have one lease open. The blob names each of them.
pub(crate) const MAX_OPENERS: usize = 64;

/// How long a write token is valid. The writer renews it when it opens the lease again.
pub(crate) const WRITE_TOKEN_LIFETIME: Duration = Duration::from_secs(15 * 60);

/// A request to open a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OpenRequest {
    /// The GPU.
    pub gpu: GpuUuid,
    /// The lease's name.
    pub name: String,
    /// A digest that identifies the content.
    pub key: Key,
    /// The size of a new lease; zero opens existing leases only.
    pub bytes: Bytes,
    /// The process image that requests it.
    pub image: u64,
    /// The write token for this open: a random number.
    pub token: u64,
}

/// The outcome of an open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opened {
    /// The lease is committed; the process may read it.
    Read(LeaseId),
    /// The process was writing the lease and may go on.
    Write(LeaseId),
    /// The caller creates the lease: charge its owner, then call
    /// [`begin_create`](LeaseTable::begin_create).
    Create(Box<LeaseRecord>),
}

/// A side effect for the service to carry out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Charge the owner for the bytes as orphaned exports, then call
    /// [`confirm_charged`](LeaseTable::confirm_charged). The table repeats the effect while the
    /// owner has no session.
    Charge(LeaseId, AllocationId),
    /// Replace the lease's blob in the fd store.
    Update(LeaseId, Box<LeaseRecord>),
    /// Close the lease's descriptor in the fd store, then call
    /// [`confirm_dropped`](LeaseTable::confirm_dropped).
    Drop(LeaseId),
}

/// How far a lease is on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The provisioner has not answered, or the descriptor was not sent to the fd store yet.
    Creating,
    /// The fd store has the descriptor, or a message with it.
    Live,
    /// The bytes are to be charged as orphaned exports.
    ReleasePending,
    /// The node's ledger has got the bytes to charge.
    ReleaseReported,
    /// The bytes are charged; the fd store is to close the descriptor.
    Releasing,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Lease {
    record: LeaseRecord,
    stage: Stage,
    /// Whether the owner or the node is charged. For leases of an earlier agent this is unknown
    /// until the first [`reconcile`](LeaseTable::reconcile).
    is_charged: bool,
}

/// The node's leases.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LeaseTable {
    leases: BTreeMap<LeaseId, Lease>,
    /// Leases that only another version of the agent can read. The fd store has them, and they stay
    /// charged.
    unreadable: BTreeMap<LeaseId, Option<(GpuUuid, Bytes)>>,
    node: NodeView,
    /// GPUs on which no lease may exist.
    drained: BTreeSet<GpuUuid>,
    /// Whether the fd store is connected and has listed its leases.
    store_connected: bool,
    /// How many leases the fd store can have; none before it has reported that.
    capacity: Option<usize>,
}

impl LeaseTable {
    /// Whether the fd store is connected and has listed its leases.
    pub(crate) fn is_store_connected(&self) -> bool {
        self.store_connected
    }

    /// Whether a container is bound.
    pub(crate) fn is_bound(&self, allocation: &AllocationId) -> bool {
        self.node.containers.contains_key(allocation)
    }

    /// The namespace of a bound container, if the agent knows it.
    pub(crate) fn namespace(&self, allocation: &AllocationId) -> Option<&str> {
        let binding = self.node.containers.get(allocation)?;
        binding.namespace.as_deref()
    }

    pub(crate) fn generation(&self, gpu: &GpuUuid) -> Option<u64> {
        self.node.generations.get(gpu).copied()
    }

    /// How much of a GPU is bound to no pod.
    pub(crate) fn free(&self, gpu: &GpuUuid) -> Bytes {
        self.node.free.get(gpu).copied().unwrap_or_default()
    }

    /// Releases a lease of which it is not known whether its memory exists.
    pub(crate) fn release_uncertain(&mut self, id: LeaseId) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.release(id, &mut effects);
        effects
    }

    /// Releases what a process image was writing: the image ended, or its session did.
    pub(crate) fn process_ended(&mut self, process: Process) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.release_writers(|writer| writer.process == process, &mut effects);
        effects
    }

    /// Releases what writers with an expired token were writing.
    pub(crate) fn expire_writers(&mut self, now: BootTime) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.release_writers(|writer| writer.until <= now, &mut effects);
        effects
    }

    /// Refuses new leases on these GPUs; the next [`reconcile`](Self::reconcile) releases the
    /// existing ones.
    pub(crate) fn drain(&mut self, gpus: BTreeSet<GpuUuid>) {
        self.drained = gpus;
    }

    /// Whether the fd store has a lease that this agent cannot read.
    pub(crate) fn is_unreadable(&self, id: LeaseId) -> bool {
        self.unreadable.contains_key(&id)
    }

    /// Sets how many leases the fd store can have in all.
    pub(crate) fn set_capacity(&mut self, most: usize) {
        self.capacity = Some(most);
    }

    /// The node's GPUs.
    pub(crate) fn gpus(&self) -> impl Iterator<Item = &GpuUuid> {
        self.node.generations.keys()
    }

    fn release_writers(&mut self, is_over: impl Fn(&Writer) -> bool, effects: &mut Vec<Effect>) {
        let over: Vec<LeaseId> = self
            .leases
            .iter()
            .filter(
                |(_, lease)| matches!(&lease.record.content, Content::Writing(writer) if is_over(writer)),
            )
            .map(|(id, _)| *id)
            .collect();
        for id in over {
            match self.leases.get_mut(&id) {
                // The task that creates the lease finds it discarded and releases it.
                Some(lease) if lease.stage == Stage::Creating => {
                    lease.record.content = Content::Discarded;
                }
                _ => self.release(id, effects),
            }
        }
    }

    /// Ends a lease: no open finds it, and its bytes become unreclaimed.
    fn release(&mut self, id: LeaseId, effects: &mut Vec<Effect>) {
        let Some(lease) = self.leases.get_mut(&id) else {
            return;
        };
        if matches!(lease.stage, Stage::Creating | Stage::Live) {
            lease.stage = Stage::ReleasePending;
            let owner = lease.record.owner;
            if self.node.containers.contains_key(&owner) {
                effects.push(Effect::Charge(id, owner));
            }
        }
    }
}

#[cfg(test)]
mod tests;
