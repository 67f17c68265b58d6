//! What a budget's status is computed from.

use std::collections::BTreeMap;
use std::time::Duration;

use bursar_crds::Quantum;
use bursar_crds::gpu_node::{Fault, NamespaceUse};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::budget::{ObservedQuota, QuotaKind};
use crate::cluster::ExclusionReason;
use crate::cluster::on_node::OnNode;
use crate::cluster::pod_request::{PodRequest, PriorityKind};
use crate::quanta::Quanta;

/// What the pods of one namespace ask for together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestedUsage {
    /// How many pods ask.
    pub pods: i64,
    /// How many of them borrow.
    pub borrowed_pods: i64,
    /// Device memory of the guaranteed ones.
    pub guaranteed: Quanta,
    /// Device memory of those that borrow.
    pub borrowed: Quanta,
    /// Managed memory of all.
    pub managed: Quanta,
}

impl<'a> FromIterator<&'a PodRequest> for RequestedUsage {
    fn from_iter<I: IntoIterator<Item = &'a PodRequest>>(requests: I) -> Self {
        let mut sum = Self::default();
        for request in requests {
            let PodRequest {
                kind: class,
                device,
                managed,
                uid: _,
                created: _,
                node: _,
                terminating: _,
                job: _,
                is_recreated: _,
            } = request;
            sum.pods += 1;
            sum.managed = sum.managed.plus(*managed);
            match class {
                PriorityKind::Guaranteed => sum.guaranteed = sum.guaranteed.plus(*device),
                PriorityKind::Borrowed => {
                    sum.borrowed_pods += 1;
                    sum.borrowed = sum.borrowed.plus(*device);
                }
            }
        }
        sum
    }
}

/// A pod of the namespace and a fault that it suffers from.
#[derive(Clone, Debug, PartialEq)]
pub struct AffectedPod {
    /// The pod's name.
    pub pod: String,
    /// What it asks for, and who it is. It is on the node that tells of the fault.
    pub request: OnNode<PodRequest>,
    /// The fault: of a context of its, or of a GPU that it has memory of.
    pub fault: Fault,
    /// For how long this operator has seen the fault. The node's clock, by which the fault is dated, decides nothing.
    pub observed_for: Duration,
}

/// What the agents say of the namespace's pods, on all nodes together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReportedUsage {
    /// Device memory that they have.
    pub observed: Quanta,
    /// Allocations that were denied.
    pub denials: i64,
    /// Process images that were poisoned.
    pub poisoned: i64,
    /// Restarts for that.
    pub restarts: i64,
}

impl<'a> FromIterator<(&'a NamespaceUse, bool)> for ReportedUsage {
    /// Of each node what it says, and whether a pod of the namespace is there: without one nothing
    /// is used.
    fn from_iter<I: IntoIterator<Item = (&'a NamespaceUse, bool)>>(uses: I) -> Self {
        let mut sum = Self::default();
        for (one, is_there) in uses {
            let NamespaceUse {
                namespace: _,
                observed,
                denials,
                poisoned,
                restarts,
            } = one;
            let observed = u64::try_from(*observed).ok().filter(|_| is_there);
            sum.observed = sum.observed.plus(Quanta::new(observed.unwrap_or(0)));
            sum.denials = sum.denials.saturating_add(*denials);
            sum.poisoned = sum.poisoned.saturating_add(*poisoned);
            sum.restarts = sum.restarts.saturating_add(*restarts);
        }
        sum
    }
}

/// The budgets and nodes that share.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cohort {
    /// What they guarantee together.
    pub guaranteed: Quanta,
    /// How many nodes offer memory.
    pub nodes: usize,
    /// What they offer together.
    pub allocatable: Quanta,
    /// The nodes whose memory is left out, and why.
    pub excluded: Vec<(String, ExclusionReason)>,
    /// A node with a value of another version, and its field. Its memory counts.
    pub unknown_field: Option<(String, &'static str)>,
}

/// What a budget's status is computed from.
#[derive(Clone, Debug, PartialEq)]
pub struct BudgetInputs {
    /// The size of one quantum, of the whole cluster.
    pub quantum: Quantum,
    /// What its namespace's pods ask for.
    pub requested: RequestedUsage,
    /// The pods that it is the sum of, by name.
    pub pods: Vec<(String, PodRequest)>,
    /// Those of them that suffer from a fault.
    pub affected_pods: Vec<AffectedPod>,
    /// The Jobs that were looked at, by UID: whether they let their pods be disrupted.
    pub jobs_ignoring_disruption: BTreeMap<String, bool>,
    /// What the agents say.
    pub reported: ReportedUsage,
    /// For how long disruption budgets have kept pods that were to end, by UID.
    pub refused_for: BTreeMap<String, Duration>,
    /// For how long this operator has seen the budget's status say that it is exceeded.
    pub exceeded_for: Duration,
    /// Its cohort.
    pub cohort: Cohort,
    /// Its quota of guaranteed pods, as the API server has it.
    pub guaranteed_quota: Option<ObservedQuota>,
    /// Its quota of all pods.
    pub limit_quota: Option<ObservedQuota>,
    /// Its namespace is labelled as one with a budget in force.
    pub is_labelled: bool,
}

impl BudgetInputs {
    /// One of the budget's quotas, as the API server has it.
    pub fn quota(&self, kind: QuotaKind) -> Option<&ObservedQuota> {
        match kind {
            QuotaKind::Guaranteed => self.guaranteed_quota.as_ref(),
            QuotaKind::Limit => self.limit_quota.as_ref(),
        }
    }

    /// When the later of the two quotas came into force, by the API server's clock, which dates pods too.
    pub fn quotas_synced_at(&self) -> Option<Time> {
        let [one, other] = QuotaKind::ALL.map(|kind| self.quota(kind)?.status_updated.clone());
        Some(one?.max(other?))
    }
}
