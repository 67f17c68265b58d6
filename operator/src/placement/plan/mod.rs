//! From the landscape and what was tried to what is to be done: pure.
//!
//! ```text
//!   a pod waits on its node ----+-- may go, another node has room ------------------> Move
//!   the scheduler refuses one --+
//!         |                  otherwise: pods of lower priority on one GPU would make room
//!         v                                    |
//!    nothing to be done                        v
//!                     Reserve --agent answers heldFor--> MakeRoom (nominate, evict) --bound or gone--> Reserve without it
//! ```
//!
//! A step is the whole of one write, or of one waiter's evictions, so a plan may end after any of them: the next one
//! is made from what is so then.

mod labels;
mod pending;
mod quota_overrides;
mod victims;

use std::time::Duration;

use bursar_crds::Quantum;
use bursar_crds::gpu_node::{QuotaOrder, Reservation};

use super::history::{History, NodeLabels, Uptime};
use super::snapshot::{PlacementIndex, Snapshot};
use crate::cluster::Key;
use crate::cluster::pod_request;
use crate::quanta::Quanta;

/// What the admin decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacementOptions {
    /// The size of one quantum: it names the labels.
    pub quantum: Quantum,
    /// Whether waiting pods may be evicted to be scheduled on another node.
    pub move_waiters: bool,
    /// How long a disruption budget keeps a pod that has to go for one of higher priority.
    pub disruption_grace: Duration,
}

/// One thing to do.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    /// Write a node's labels.
    Label {
        /// The node.
        node: NodeRef,
        /// What they should say; those without a value go.
        labels: NodeLabels,
    },
    /// Write all reservations of a node.
    Reserve {
        /// The `GpuNode`.
        node: NodeRef,
        /// Those that it is written over, and no others: two operators are not to choose one GPU each for one waiter.
        over: Vec<Reservation>,
        /// They.
        reservations: Vec<Reservation>,
    },
    /// Write all quotas that are ordered of a node.
    OverrideQuotas {
        /// The `GpuNode`.
        node: NodeRef,
        /// They.
        quotas: Vec<QuotaOrder>,
    },
    /// End pods on a GPU that is held, for the one that it is held for.
    Preempt {
        /// Whom for.
        waiter: PodRef,
        /// The node.
        node: String,
        /// The GPU.
        gpu: String,
        /// Tell the scheduler to keep the node's room for the waiter.
        nominate: bool,
        /// Who goes.
        victims: Vec<Victim>,
    },
    /// Evict a pod that waits, so that it is scheduled elsewhere.
    Relocate {
        /// The pod.
        pod: PodRef,
        /// What makes another one.
        owner: String,
        /// The `GpuNode` that it leaves.
        from: NodeRef,
        /// The node that has room.
        to: String,
        /// How much it needs there.
        room: Quanta,
    },
    /// Find out whether a Job lets its pods be disrupted.
    ReadJob {
        /// Its namespace.
        namespace: String,
        /// It.
        job: pod_request::JobRef,
    },
}

/// What steps are called in metrics and logs.
pub const STEPS: [&str; 6] = [
    "label",
    "reserve",
    "lower",
    "make-room",
    "move",
    "look-at-job",
];

impl Step {
    /// As metrics and logs call it.
    pub(super) fn name(&self) -> &'static str {
        let [label, reserve, lower, make_room, moved, look] = STEPS;
        match self {
            Self::Label { .. } => label,
            Self::Reserve { .. } => reserve,
            Self::OverrideQuotas { .. } => lower,
            Self::Preempt { .. } => make_room,
            Self::Relocate { .. } => moved,
            Self::ReadJob { .. } => look,
        }
    }
}

/// An object without a namespace, never another one of the same name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NodeRef {
    pub(super) name: String,
    pub(super) uid: String,
}

/// A pod, never another one of the same name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PodRef {
    pub(super) key: Key,
    pub(super) uid: String,
}

/// A pod that has to go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Victim {
    pub(super) pod: PodRef,
    /// Its disruption budget has had its time: it is deleted.
    pub(super) force: bool,
}

/// What is to be done now, by the operator's monotonic clock. Nothing where all is as it should be.
pub(super) fn plan(
    placement_index: &PlacementIndex,
    history: &mut History,
    options: &PlacementOptions,
    now: Uptime,
) -> Vec<Step> {
    let snapshot = placement_index.snapshot();
    history.observe(&snapshot, now);
    let mut steps = pending::plan(&snapshot, history, options, now);
    steps.extend(quota_overrides::plan(&snapshot, history));
    steps.extend(labels::plan(&snapshot, history, options, now));
    steps
}

/// The `GpuNode` of a node, to be written.
fn gpu_node_ref(snapshot: &Snapshot<'_>, node: &str) -> NodeRef {
    let gpus = snapshot.gpu_nodes.get(node);
    NodeRef {
        name: node.to_owned(),
        uid: gpus.map(|gpus| gpus.uid.clone()).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests;
