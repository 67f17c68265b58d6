//! What a budget's status is computed from.

use std::collections::BTreeMap;
use std::time::Duration;

use bursar_crds::Quantum;
use bursar_crds::gpu_node::{Fault, NamespaceUse};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::budget::{Quota, Which};
use crate::cluster::LeftOut;
use crate::cluster::on_node::There;
use crate::cluster::pod_request::{Class, Demand};
use crate::quanta::Quanta;

/// What the pods of one namespace ask for together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
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

impl<'a> FromIterator<&'a Demand> for Usage {
    fn from_iter<I: IntoIterator<Item = &'a Demand>>(demands: I) -> Self {
        let mut sum = Self::default();
        for demand in demands {
            let Demand {
                class,
                device,
                managed,
                uid: _,
                created: _,
                node: _,
                ending: _,
                job: _,
                replaced: _,
            } = demand;
            sum.pods += 1;
            sum.managed = sum.managed.plus(*managed);
            match class {
                Class::Guaranteed => sum.guaranteed = sum.guaranteed.plus(*device),
                Class::Borrowed => {
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
pub struct Sufferer {
    /// The pod's name.
    pub pod: String,
    /// What it asks for, and who it is. It is on the node that tells of the fault.
    pub demand: There<Demand>,
    /// The fault: of a context of its, or of a GPU that it has memory of.
    pub fault: Fault,
    /// For how long this operator has seen the fault. The node's clock, by which the fault is dated, decides nothing.
    pub seen_for: Duration,
}

/// What the agents say of the namespace's pods, on all nodes together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AgentsSay {
    /// Device memory that they have.
    pub observed: Quanta,
    /// Allocations that were denied.
    pub denials: i64,
    /// Process images that were poisoned.
    pub poisoned: i64,
    /// Restarts for that.
    pub restarts: i64,
}

impl<'a> FromIterator<(&'a NamespaceUse, bool)> for AgentsSay {
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
    pub left_out: Vec<(String, LeftOut)>,
    /// A node with a value of another version, and its field. Its memory counts.
    pub unknown: Option<(String, &'static str)>,
}

/// What a budget's status is computed from.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// The size of one quantum, of the whole cluster.
    pub quantum: Quantum,
    /// What its namespace's pods ask for.
    pub usage: Usage,
    /// The pods that it is the sum of, by name.
    pub pods: Vec<(String, Demand)>,
    /// Those of them that suffer from a fault.
    pub sufferers: Vec<Sufferer>,
    /// The Jobs that were looked at, by UID: whether they let their pods be disrupted.
    pub jobs: BTreeMap<String, bool>,
    /// What the agents say.
    pub told: AgentsSay,
    /// For how long disruption budgets have kept pods that were to end, by UID.
    pub refused: BTreeMap<String, Duration>,
    /// For how long this operator has seen the budget's status say that it is exceeded.
    pub exceeded_for: Duration,
    /// Its cohort.
    pub cohort: Cohort,
    /// Its quota of guaranteed pods, as the API server has it.
    pub guaranteed_quota: Option<Quota>,
    /// Its quota of all pods.
    pub limit_quota: Option<Quota>,
    /// Its namespace is labelled as one with a budget in force.
    pub labelled: bool,
}

impl Facts {
    /// One of the budget's quotas, as the API server has it.
    pub fn quota(&self, which: Which) -> Option<&Quota> {
        match which {
            Which::Guaranteed => self.guaranteed_quota.as_ref(),
            Which::Limit => self.limit_quota.as_ref(),
        }
    }

    /// When the later of the two quotas came into force, by the API server's clock, which dates pods too.
    pub fn in_force_since(&self) -> Option<Time> {
        let [one, other] = Which::ALL.map(|which| self.quota(which)?.taken_up.clone());
        Some(one?.max(other?))
    }
}
