//! What is kept of each object.

use bursar_crds::resources::BUDGET_LABEL;
use bursar_crds::{Amount, COHORT_LABEL, GpuMemoryBudget, GpuNode, Quantum};
use kube::ResourceExt;

use crate::budget::Terms;
use crate::quanta::Quanta;

/// What other budgets need to know of a budget.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Its cohort.
    pub cohort: String,
    /// What it guarantees; nothing while its spec cannot be read.
    pub guaranteed: Quanta,
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
            version: budget.resource_version(),
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
