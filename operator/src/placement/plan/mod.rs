//! Plans the next placement steps from a snapshot and the history. The planner does no I/O; the
//! history is the only value that it changes.
//!
//! ```text
//!  a pod waits on its node                     the scheduler finds no node for a pod
//!    |                                                      |
//!    +-- relocatable, and another node has room: Relocate   |
//!    |                                                      |
//!    +-- else ----------------------------------------------+
//!                                                           |
//!         victims of lower priority on one GPU would make room, or no step
//!                                                           |
//!  Reserve --the agent sets reservedFor--> Preempt: nominate the node, evict the victims
//!          --the pod is bound or gone----> Reserve without it
//! ```
//!
//! Where the policy of a pod's Job is not known yet, a step `ReadJob` reads it for a later plan.
//! The steps `Label` and `OverrideQuotas` help no single pod, and are planned beside these.
//!
//! Each step is one write, the evictions for one pod, or the labels of nodes. A plan may stop after
//! any step, because the next plan starts from the observed state.

mod labels;
mod pending;
mod quota_overrides;
mod victims;

use std::time::Duration;

use bursar_crds::Quantum;
use bursar_crds::gpu_node::{QuotaOverride, Reservation};

use super::history::{History, NodeLabels, RESERVATION_TIMEOUT, Uptime};
use crate::cluster::Key;
use crate::cluster::facts::pod;
use crate::cluster::facts::snapshot::{PlacementView, Snapshot};
use crate::quanta::Quanta;
use crate::serve::metrics::PLACEMENT_STEPS;

/// The administrator's options for placement and drains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacementOptions {
    /// The quantum, which is part of the labels' names.
    pub quantum: Quantum,
    /// Whether pending pods may be evicted to be scheduled on another node.
    pub relocate_pending_pods: bool,
    /// How long a PodDisruptionBudget may refuse the eviction of a victim.
    pub disruption_grace: Duration,
    /// Whether GPUs are drained while NVIDIA's operators change the driver or MIG instances.
    pub drain_for_nvidia: bool,
}

impl PlacementOptions {
    /// How long after the first refusal a victim is deleted. The reservation must outlast it.
    pub(super) fn forced_after(&self) -> Duration {
        self.disruption_grace.min(RESERVATION_TIMEOUT / 2)
    }
}

/// One step of a plan.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    /// Write the labels of nodes, all at the same time.
    Label {
        /// The desired labels of each node. A label without a value is removed.
        nodes: Vec<(NodeRef, NodeLabels)>,
    },
    /// Apply all reservations of a node.
    Reserve {
        /// The `GpuNode`.
        node: NodeRef,
        /// The reservations that are replaced. If the object has others, another operator has
        /// written, and the step is dropped.
        over: Vec<Reservation>,
        /// The new reservations.
        reservations: Vec<Reservation>,
    },
    /// Apply all quota overrides of a node.
    OverrideQuotas {
        /// The `GpuNode`.
        node: NodeRef,
        /// The new quota overrides.
        quotas: Vec<QuotaOverride>,
        /// How many further overrides the object has no room for.
        omitted: usize,
    },
    /// Evict victims on the GPUs that are reserved for a pod.
    Preempt {
        /// The pod with the reservation.
        pending_pod: PodRef,
        /// The node's name.
        node: String,
        /// The pod's reservations on the node. The pod needs all of them.
        reservations: Vec<Reservation>,
        /// Whether to nominate the node first, so that the scheduler keeps the room.
        nominate: bool,
        victims: Vec<Victim>,
    },
    /// Evict a waiting pod so that it is scheduled on another node.
    Relocate {
        pod: PodRef,
        /// The UID of the controller that recreates the pod.
        owner: String,
        /// The `GpuNode` that the pod leaves.
        from: NodeRef,
        /// The node with room.
        to: String,
        /// The room that the pod needs.
        room: Quanta,
    },
    /// Read whether a Job ignores the disruption of its pods.
    ReadJob {
        /// The Job's namespace.
        namespace: String,
        job: pod::JobRef,
    },
}

impl Step {
    /// The step's name in metrics and logs.
    pub(super) fn name(&self) -> &'static str {
        let [label, reserve, lower, make_room, moved, read_job] = PLACEMENT_STEPS;
        match self {
            Self::Label { .. } => label,
            Self::Reserve { .. } => reserve,
            Self::OverrideQuotas { .. } => lower,
            Self::Preempt { .. } => make_room,
            Self::Relocate { .. } => moved,
            Self::ReadJob { .. } => read_job,
        }
    }

    /// How many steps this is in metrics.
    pub(super) fn count(&self) -> usize {
        match self {
            Self::Label { nodes } => nodes.len(),
            _ => 1,
        }
    }
}

/// A cluster-scoped object, identified by its UID too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NodeRef {
    pub(super) name: String,
    pub(super) uid: String,
}

/// A pod, identified by its UID too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PodRef {
    pub(super) key: Key,
    pub(super) uid: String,
}

/// A pod to evict for another pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Victim {
    pub(super) pod: PodRef,
    /// The UUID of the GPU on which it makes room.
    pub(super) gpu: String,
    /// Delete the victim, because the grace of its PodDisruptionBudget is over.
    pub(super) force: bool,
    /// Never delete the victim: only an eviction ends it.
    pub(super) protected: bool,
}

/// Returns the steps to take at `now` on the operator's monotonic clock, and records in the history
/// what the view shows. Empty when nothing is to do.
pub(super) fn plan(
    view: &PlacementView,
    history: &mut History,
    options: &PlacementOptions,
    now: Uptime,
) -> Vec<Step> {
    let snapshot = Snapshot::of(view);
    history.observe(&snapshot, now);
    let mut steps = pending::plan(&snapshot, history, options, now);
    steps.extend(quota_overrides::plan(&snapshot, history));
    steps.extend(labels::plan(&snapshot, history, options, now));
    steps
}

/// The reference to a node's `GpuNode`; without a UID where the snapshot has no such object.
fn gpu_node_ref(snapshot: &Snapshot<'_>, node: &str) -> NodeRef {
    let gpus = snapshot.gpu_nodes.get(node);
    NodeRef {
        name: node.to_owned(),
        uid: gpus.map(|gpus| gpus.uid.clone()).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests;
