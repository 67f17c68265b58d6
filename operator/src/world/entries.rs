//! What is kept of each object.

use bursar_crds::budget::ContextPolicy;
use bursar_crds::gpu_node::ContextOrder;
use bursar_crds::resources::BUDGET_LABEL;
use bursar_crds::{Amount, COHORT_LABEL, GpuMemoryBudget, GpuNode, Quantum};
use kube::ResourceExt;

use crate::budget::Terms;
use crate::quanta::Quanta;

/// What other budgets need to know of a budget.
#[derive(Clone, Debug, PartialEq)]
pub struct Claim {
    /// Its cohort.
    pub cohort: String,
    /// What it guarantees; nothing while its spec cannot be read.
    pub guaranteed: Quanta,
    /// What is done about poisoned contexts of its pods.
    pub contexts: ContextPolicy,
    /// The version of the object, so that a status changed by another hand is noticed.
    pub version: Option<String>,
}

impl Claim {
    /// The claim of `budget`.
    pub fn of(budget: &GpuMemoryBudget, quantum: Quantum) -> Self {
        let terms = Terms::of(&budget.spec, quantum);
        Self {
            cohort: budget.spec.cohort.clone(),
            guaranteed: terms.map_or(Quanta::ZERO, |terms| terms.guaranteed),
            contexts: budget.spec.context_policy.clone(),
            version: budget.resource_version(),
        }
    }
}

/// What is known of a node's GPUs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gpus {
    /// What it offers; none while it has no memory to give.
    pub offer: Option<Offer>,
    /// The object's UID: one that was made anew under the same name has nothing ordered.
    pub uid: String,
    /// What is ordered about poisoned contexts there.
    pub contexts: Vec<ContextOrder>,
}

impl Gpus {
    /// The GPUs of `node`.
    pub fn of(node: &GpuNode, quantum: Quantum) -> Self {
        Self {
            offer: Offer::of(node, quantum),
            uid: node.uid().unwrap_or_default(),
            contexts: node.spec.context_policies.clone(),
        }
    }
}

/// What a node offers to pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Offer {
    /// Device memory that the kubelet is told of.
    Counted(Quanta),
    /// It counts in a quantum of another size, so that its resource has another name.
    OtherQuantum(String),
}

impl Offer {
    /// The offer of `node`; `None` while it has no memory to give.
    pub fn of(node: &GpuNode, quantum: Quantum) -> Option<Self> {
        let status = node.status.as_ref()?;
        let allocatable = u64::try_from(status.device_memory.allocatable).unwrap_or(0);
        if allocatable == 0 {
            return None;
        }
        let bytes = status.quantum.as_ref().map(Amount::bytes);
        Some(match (bytes, &status.quantum) {
            (Some(Ok(bytes)), _) if bytes == quantum.bytes() => {
                Self::Counted(Quanta::new(allocatable))
            }
            (_, other) => Self::OtherQuantum(
                other
                    .as_ref()
                    .map_or_else(|| "no quantum".to_owned(), |size| size.0.0.clone()),
            ),
        })
    }
}

/// The cohort that a node's label puts it into; `None` without the label.
pub fn cohort_label(node: &impl ResourceExt) -> Option<String> {
    node.labels().get(COHORT_LABEL).cloned()
}

/// What a namespace's label says of its budget; `None` without the label.
pub fn budget_label(namespace: &impl ResourceExt) -> Option<String> {
    namespace.labels().get(BUDGET_LABEL).cloned()
}
