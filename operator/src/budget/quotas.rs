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
use bursar_crds::resources::{
    BORROWED_PRIORITY_CLASS, ENFORCED, OVERFLOW_LABEL, PREFIX, QUOTA_LABEL,
};
use bursar_crds::{GpuMemoryBudget, Quantum};
use k8s_openapi::api::core::v1::{ResourceQuota, ResourceQuotaSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::Patch;
use kube::{Resource as _, ResourceExt as _};
use serde_json::{Value, json};

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

    const fn label(self) -> &'static str {
        match self {
            Self::Guaranteed => "guaranteed",
            Self::Limit => "limit",
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

    /// The patch from `there` to this quota. A merge removes foreign entries, which an apply would
    /// keep.
    pub fn patch(
        &self,
        kind: QuotaKind,
        namespace: &str,
        budget: &GpuMemoryBudget,
        current: Option<&ObservedQuota>,
    ) -> Patch<Value> {
        let mut object = self.object(kind, namespace, budget);
        let Some(current) = current.filter(|current| !self.needs_replacement(current)) else {
            return Patch::Apply(object);
        };
        if !self.overflows {
            object["metadata"]["labels"][OVERFLOW_LABEL] = Value::Null;
        }
        let others = current.spec.hard.keys();
        for added in others.filter(|resource| !self.hard.contains_key(*resource)) {
            object["spec"]["hard"][added] = Value::Null;
        }
        Patch::Merge(object)
    }

    /// Whether `there` has to be deleted and created again. `scopes` is immutable, and after a
    /// change of `scopeSelector` the controller manager recounts only minutes later.
    pub fn needs_replacement(&self, current: &ObservedQuota) -> bool {
        current.spec.scope != self.scope
    }

    /// The whole quota object.
    fn object(&self, kind: QuotaKind, namespace: &str, budget: &GpuMemoryBudget) -> Value {
        let hard = self.hard.iter();
        let hard: BTreeMap<_, _> = hard
            .map(|(resource, most)| (resource, most.count().to_string()))
            .collect();
        let mut object = json!({
            "apiVersion": "v1", "kind": "ResourceQuota",
            "metadata": {
                "name": kind.name(), "namespace": namespace,
                "labels": { QUOTA_LABEL: kind.label() },
                "ownerReferences": [{
                    "apiVersion": GpuMemoryBudget::api_version(&()), "kind": GpuMemoryBudget::kind(&()),
                    "name": budget.name_any(), "uid": self.owner, "controller": true,
                }],
            },
            "spec": { "hard": hard },
        });
        if self.overflows {
            object["metadata"]["labels"][OVERFLOW_LABEL] = json!("Borrow");
        }
        if self.scope == Scope::NotBorrowed {
            object["spec"]["scopeSelector"] = json!({ "matchExpressions": [{
                "scopeName": "PriorityClass", "operator": "NotIn", "values": [BORROWED_PRIORITY_CLASS] }] });
        }
        object
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
        Some([one])
            if plain
                && one.scope_name == "PriorityClass"
                && one.operator == "NotIn"
                && one.values.iter().flatten().eq([BORROWED_PRIORITY_CLASS]) =>
        {
            Scope::NotBorrowed
        }
        _ => Scope::Foreign,
    }
}

/// Whether a namespace's label has the operator's value.
pub fn is_enforced(value: &str) -> bool {
    value == ENFORCED
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(overflow: &str) -> GpuMemoryBudget {
        serde_json::from_value(json!({
            "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget",
            "metadata": { "name": "default", "namespace": "team", "uid": "u" },
            "spec": { "deviceMemory": { "guaranteed": "1000Gi", "limit": "2000Gi" }, "overflow": overflow },
        }))
        .unwrap()
    }

    #[test]
    fn quota_read_back_equals_quota_applied() {
        for overflow in ["Refuse", "Borrow"] {
            let budget = budget(overflow);
            let parsed = ParsedSpec::of(&budget.spec, Quantum::Gib1).unwrap();
            for kind in QuotaKind::ALL {
                let desired = QuotaSpec::desired(kind, &budget, &parsed, Quantum::Gib1);
                let mut object = desired.object(kind, "team", &budget);
                object["status"] = json!({ "hard": object["spec"]["hard"] });
                let text = object.to_string().replace("\"1000\"", "\"1k\"");
                let quota = ObservedQuota::of(&serde_json::from_str(&text).unwrap());
                assert_eq!(quota.spec, desired);
                assert!(quota.enforces(&desired));
                object["status"] = json!(null);
                let fresh = ObservedQuota::of(&serde_json::from_value(object).unwrap());
                assert!(!fresh.enforces(&desired));
            }
        }
    }

    #[test]
    fn foreign_entries_are_removed_and_foreign_scopes_replaced() {
        let budget = budget("Refuse");
        let parsed = ParsedSpec::of(&budget.spec, Quantum::Gib1).unwrap();
        let desired = QuotaSpec::desired(QuotaKind::Limit, &budget, &parsed, Quantum::Gib1);
        let patch = |current: Option<&ObservedQuota>| match desired.patch(
            QuotaKind::Limit,
            "team",
            &budget,
            current,
        ) {
            Patch::Merge(object) => Some(object),
            _ => None,
        };
        let changed = |change: fn(&mut Value)| {
            let mut object = desired.object(QuotaKind::Limit, "team", &budget);
            change(&mut object);
            ObservedQuota::of(&serde_json::from_value(object).unwrap())
        };
        assert_eq!(patch(None), None, "applied");
        const OTHER: &str = "requests.bursar.dev/other";
        let merged = patch(Some(&changed(|object| {
            object["metadata"]["labels"][OVERFLOW_LABEL] = json!("Borrow");
            object["spec"]["hard"][OTHER] = json!("1");
        })));
        let mut nothing = desired.object(QuotaKind::Limit, "team", &budget);
        nothing["metadata"]["labels"][OVERFLOW_LABEL] = json!(null);
        nothing["spec"]["hard"][OTHER] = json!(null);
        assert_eq!(merged, Some(nothing));
        for scoped in [
            changed(|object| object["spec"]["scopes"] = json!(["Terminating"])),
            changed(|object| {
                let terminating = json!({ "scopeName": "Terminating", "operator": "Exists" });
                object["spec"]["scopeSelector"] = json!({ "matchExpressions": [terminating] });
            }),
        ] {
            assert!(desired.needs_replacement(&scoped));
            assert_eq!(patch(Some(&scoped)), None, "it is gone by then");
        }
    }

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

    #[test]
    fn foreign_edit_is_detected_and_foreign_resources_ignored() {
        let budget = budget("Refuse");
        let parsed = ParsedSpec::of(&budget.spec, Quantum::Gib1).unwrap();
        let desired = QuotaSpec::desired(QuotaKind::Guaranteed, &budget, &parsed, Quantum::Gib1);
        let object = desired.object(QuotaKind::Guaranteed, "team", &budget);
        let seen = |object: &Value| {
            ObservedQuota::of(&serde_json::from_value(object.clone()).unwrap()).spec
        };
        let mut beside = object.clone();
        beside["spec"]["hard"]["pods"] = json!("4");
        assert_eq!(seen(&beside), desired);
        let mut raised = object.clone();
        raised["spec"]["hard"]["requests.bursar.dev/gpu-memory-gib"] = json!("9k");
        let mut unscoped = object.clone();
        unscoped["spec"]["scopeSelector"] = json!(null);
        let mut wider = object.clone();
        wider["spec"]["scopeSelector"]["matchExpressions"][0]["values"] = json!(["other"]);
        let mut orphan = object;
        orphan["metadata"]["ownerReferences"] = json!([]);
        for changed in [raised, unscoped, wider, orphan] {
            assert_ne!(seen(&changed), desired, "{changed}");
        }
    }
}
