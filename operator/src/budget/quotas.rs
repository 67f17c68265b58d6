//! Defines the two ResourceQuotas that cap a namespace.
//!
//! One quota counts the pods that do not borrow, the other all pods. Both bound requests
//! (`requests.`), which the scheduler counts. They change only with the budget's spec.
//!
//! Both exist even where they hold the same amount. The API server refuses every pod that a new
//! quota may count until the controller manager has counted once. So a budget whose limit is raised
//! would admit no pod meanwhile, or pods beyond its guarantee.

use std::collections::BTreeMap;

use bursar_crds::quantity::parse_bytes;
use bursar_crds::resources::{BORROWED_PRIORITY_CLASS, GPU_COMPUTE, OVERFLOW_LABEL, PREFIX};
use bursar_crds::{GpuMemoryBudget, Quantum};
use k8s_openapi::api::core::v1::{ResourceQuota, ResourceQuotaSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{Resource as _, ResourceExt as _};

use super::ParsedSpec;
use crate::quanta::Quanta;

/// The kind of a quota. A user whose pod is refused reads the quota's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum QuotaKind {
    /// The quota of pods that do not borrow.
    Guaranteed,
    /// The quota of all pods.
    Limit,
}

impl QuotaKind {
    /// Both kinds, in the order of their writes.
    pub const ALL: [Self; 2] = [Self::Limit, Self::Guaranteed];

    /// The quota's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Guaranteed => "gpu-memory-budget-guaranteed",
            Self::Limit => "gpu-memory-budget-limit",
        }
    }
}

/// The pods that a quota counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Pods that do not borrow.
    NotBorrowed,
    /// All pods.
    All,
    /// A scope that another writer set.
    Foreign,
}

/// The part of a quota that the operator owns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuotaSpec {
    /// The pods that the quota counts.
    pub scope: Scope,
    /// The bound on their requests, by resource (`requests.bursar.dev/...`).
    pub hard: BTreeMap<String, Quanta>,
    /// The UID of the budget that owns the quota.
    pub owner: String,
    /// A pod that does not fit becomes a borrowed pod. The mutating admission policy reads this
    /// label.
    pub overflows: bool,
}

/// A quota as the API server has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedQuota {
    /// The quota's UID.
    pub uid: String,
    /// The operator's part of the spec.
    pub spec: QuotaSpec,
    /// The bounds that admission uses: the controller manager's copy of the spec.
    pub status_hard: BTreeMap<String, Quanta>,
    /// When the controller manager last wrote the copy, by the API server's clock. Absent when the
    /// object does not say.
    pub status_updated: Option<Time>,
}

impl QuotaSpec {
    /// The quotas that the budget should have, in the order of their writes.
    pub fn all_desired(
        budget: &GpuMemoryBudget,
        parsed: &ParsedSpec,
        quantum: Quantum,
    ) -> Vec<(QuotaKind, Self)> {
        QuotaKind::ALL
            .map(|kind| (kind, Self::desired(kind, budget, parsed, quantum)))
            .to_vec()
    }

    /// The quota that the budget should have.
    pub fn desired(
        kind: QuotaKind,
        budget: &GpuMemoryBudget,
        parsed: &ParsedSpec,
        quantum: Quantum,
    ) -> Self {
        let device = |amount| (request_name(quantum.device_memory()), amount);
        let (scope, hard) = match kind {
            QuotaKind::Guaranteed => (Scope::NotBorrowed, vec![device(parsed.guaranteed)]),
            QuotaKind::Limit => (
                Scope::All,
                vec![
                    device(parsed.limit),
                    (request_name(quantum.managed_memory()), parsed.managed),
                    (request_name(GPU_COMPUTE), parsed.compute),
                ],
            ),
        };
        Self {
            scope,
            hard: hard.into_iter().collect(),
            owner: budget.uid().unwrap_or_default(),
            overflows: kind == QuotaKind::Guaranteed && parsed.overflows,
        }
    }
}

impl ObservedQuota {
    /// The fields that the operator uses of `quota`.
    pub fn of(quota: &ResourceQuota) -> Self {
        let spec = quota.spec.clone().unwrap_or_default();
        let status = quota.status.as_ref();
        Self {
            uid: quota.uid().unwrap_or_default(),
            spec: QuotaSpec {
                scope: scope(&spec),
                hard: own_resources(spec.hard.as_ref()),
                owner: quota
                    .owner_references()
                    .iter()
                    .find(|owner| owner.kind == GpuMemoryBudget::kind(&()))
                    .map(|owner| owner.uid.clone())
                    .unwrap_or_default(),
                overflows: quota.labels().contains_key(OVERFLOW_LABEL),
            },
            status_hard: own_resources(status.and_then(|status| status.hard.as_ref())),
            status_updated: quota
                .managed_fields()
                .iter()
                .filter(|entry| entry.subresource.as_deref() == Some("status"))
                .filter_map(|entry| entry.time.clone())
                .max(),
        }
    }

    /// Whether admission uses `desired`.
    pub fn enforces(&self, desired: &QuotaSpec) -> bool {
        self.spec == *desired && self.status_hard == desired.hard
    }
}

fn request_name(resource: &str) -> String {
    format!("requests.{resource}")
}

/// The bounds on Bursar's resources. Other bounds belong to other writers.
fn own_resources(hard: Option<&BTreeMap<String, Quantity>>) -> BTreeMap<String, Quanta> {
    let prefix = request_name(PREFIX);
    hard.into_iter()
        .flatten()
        .filter(|(resource, _)| resource.starts_with(&prefix))
        .filter_map(|(resource, most)| {
            Some((resource.clone(), Quanta::new(parse_bytes(&most.0).ok()?)))
        })
        .collect()
}

fn scope(spec: &ResourceQuotaSpec) -> Scope {
    let plain = spec.scopes.as_ref().is_none_or(Vec::is_empty);
    let selected = spec.scope_selector.as_ref();
    let selected = selected.and_then(|selector| selector.match_expressions.as_deref());
    match selected {
        None | Some([]) if plain => Scope::All,
        Some([requirement])
            if plain
                && requirement.scope_name == "PriorityClass"
                && requirement.operator == "NotIn"
                && requirement
                    .values
                    .iter()
                    .flatten()
                    .eq([BORROWED_PRIORITY_CLASS]) =>
        {
            Scope::NotBorrowed
        }
        _ => Scope::Foreign,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn quota_sync_time_is_its_last_status_write() {
        let entry = |subresource: Option<&str>, second: u32| {
            json!({ "manager": "m", "operation": "Update", "subresource": subresource,
                "time": format!("2026-01-01T00:00:{second:02}Z") })
        };
        let taken_up = |entries: Value| {
            let quota = json!({ "metadata": { "name": "q", "managedFields": entries } });
            ObservedQuota::of(&serde_json::from_value(quota).unwrap()).status_updated
        };
        let status = Some("status");
        let entries = json!([entry(status, 3), entry(status, 7), entry(None, 9)]);
        let second = taken_up(entries).map(|time| time.0.as_second() % 60);
        assert_eq!(second, Some(7));
        assert_eq!(taken_up(json!([entry(None, 9)])), None);
    }
}
