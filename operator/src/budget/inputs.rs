//! Defines the inputs for a budget's status.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bursar_crds::Quantum;
use bursar_crds::context_policy::ContextAction;
use bursar_crds::gpu_node::{Fault, NamespaceUse};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::budget::{ObservedQuota, QuotaKind};
use crate::cluster::ExclusionReason;
use crate::cluster::facts::pod::{PodFacts, PriorityKind};
use crate::cluster::on_node::OnNode;
use crate::quanta::Quanta;

/// The requests of all pods of one namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestedUsage {
    /// The number of requesting pods.
    pub pods: i64,
    /// The number of borrowed pods among them.
    pub borrowed_pods: i64,
    /// Device memory of the guaranteed pods.
    pub guaranteed: Quanta,
    /// Device memory of the borrowed pods.
    pub borrowed: Quanta,
    /// Managed memory of all pods.
    pub managed: Quanta,
}

impl<'a> FromIterator<&'a PodFacts> for RequestedUsage {
    fn from_iter<I: IntoIterator<Item = &'a PodFacts>>(requests: I) -> Self {
        let mut sum = Self::default();
        for request in requests {
            sum.pods += 1;
            sum.managed = sum.managed.plus(request.managed);
            match request.kind {
                PriorityKind::Guaranteed => sum.guaranteed = sum.guaranteed.plus(request.device),
                PriorityKind::Borrowed => {
                    sum.borrowed_pods += 1;
                    sum.borrowed = sum.borrowed.plus(request.device);
                }
            }
        }
        sum
    }
}

/// A pod of the namespace and a fault that affects it.
#[derive(Clone, Debug, PartialEq)]
pub struct AffectedPod {
    /// The pod's name.
    pub pod: String,
    /// The pod's request. The pod is on the node that reports the fault.
    pub request: OnNode<Arc<PodFacts>>,
    /// A fault of the pod's own context, or of a GPU on which the pod has memory.
    pub fault: Fault,
    /// How long this operator has observed the fault. The node's timestamp decides nothing.
    pub observed_for: Duration,
}

/// The reports of all nodes' agents about the namespace's pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReportedUsage {
    /// Device memory in use.
    pub observed: Quanta,
    /// Managed memory in use.
    pub observed_managed: Quanta,
    /// Denied allocations.
    pub denials: i64,
    /// Poisoned process images.
    pub poisoned: i64,
    /// Restarts of poisoned processes.
    pub restarts: i64,
}

impl<'a> FromIterator<(&'a NamespaceUse, bool)> for ReportedUsage {
    /// Sums the nodes' reports, each with whether a pod of the namespace is on that node. Usage on
    /// a node without such a pod does not count.
    fn from_iter<I: IntoIterator<Item = (&'a NamespaceUse, bool)>>(uses: I) -> Self {
        let mut sum = Self::default();
        for (one, is_there) in uses {
            let NamespaceUse {
                namespace: _,
                observed,
                observed_managed,
                denials,
                poisoned,
                restarts,
            } = one;
            let quanta = |observed: i32| {
                let observed = u64::try_from(observed).ok().filter(|_| is_there);
                Quanta::new(observed.unwrap_or(0))
            };
            sum.observed = sum.observed.plus(quanta(*observed));
            sum.observed_managed = sum.observed_managed.plus(quanta(*observed_managed));
            sum.denials = sum.denials.saturating_add(*denials);
            sum.poisoned = sum.poisoned.saturating_add(*poisoned);
            sum.restarts = sum.restarts.saturating_add(*restarts);
        }
        sum
    }
}

/// The totals of a cohort's budgets and nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cohort {
    /// The number of budgets.
    pub budgets: usize,
    /// The sum of the budgets' guarantees.
    pub guaranteed: Quanta,
    /// The number of nodes that offer memory.
    pub nodes: usize,
    /// The sum of the nodes' offers.
    pub allocatable: Quanta,
    /// The nodes whose memory does not count, and why.
    pub excluded: Vec<(String, ExclusionReason)>,
    /// A node with an unknown value, and the field. Its memory counts.
    pub unknown_field: Option<(String, &'static str)>,
}

/// The inputs for a budget's plan and status.
#[derive(Clone, Debug, PartialEq)]
pub struct BudgetInputs {
    /// The action for poisoned contexts in namespaces whose budget names none.
    pub default_action: ContextAction,
    /// The quantum of the cluster.
    pub quantum: Quantum,
    /// The sum of the pods' requests.
    pub requested: RequestedUsage,
    /// The requesting pods by name.
    pub pods: Vec<(String, Arc<PodFacts>)>,
    /// The pods that faults affect.
    pub affected_pods: Vec<AffectedPod>,
    /// Whether each Job read so far ignores the disruption of its pods, by UID.
    pub jobs_ignoring_disruption: BTreeMap<String, bool>,
    /// The agents' reports.
    pub reported: ReportedUsage,
    /// How long PodDisruptionBudgets have refused the eviction of pods, by UID.
    pub refused_for: BTreeMap<String, Duration>,
    /// How long evictions of pods have been refused or have failed, by UID.
    pub evictions_ineffective_for: BTreeMap<String, Duration>,
    /// How long this operator has observed the status say that the budget is exceeded; `None` while
    /// the status does not say so.
    pub exceeded_for: Option<Duration>,
    /// The budget's cohort.
    pub cohort: Cohort,
    /// The observed quota of guaranteed pods.
    pub guaranteed_quota: Option<ObservedQuota>,
    /// The observed quota of all pods.
    pub limit_quota: Option<ObservedQuota>,
    /// Why the last reconcile failed to write the label or a quota.
    pub failed_step: Option<String>,
    /// The namespace has the label of a budget in force.
    pub is_labelled: bool,
}

impl BudgetInputs {
    /// One of the observed quotas.
    pub fn quota(&self, kind: QuotaKind) -> Option<&ObservedQuota> {
        match kind {
            QuotaKind::Guaranteed => self.guaranteed_quota.as_ref(),
            QuotaKind::Limit => self.limit_quota.as_ref(),
        }
    }

    /// When the later quota came into force, by the API server's clock, which also dates pods.
    pub fn quotas_synced_at(&self) -> Option<Time> {
        let [one, other] = QuotaKind::ALL.map(|kind| self.quota(kind)?.status_updated.clone());
        Some(one?.max(other?))
    }
}
