//! Builds the patch that makes a ResourceQuota the desired one.

use std::collections::BTreeMap;

use bursar_crds::GpuMemoryBudget;
use bursar_crds::resources::{BORROWED_PRIORITY_CLASS, OVERFLOW_LABEL, QUOTA_LABEL};
use kube::api::Patch;
use kube::{Resource as _, ResourceExt as _};
use serde_json::{Value, json};

use super::quotas::{ObservedQuota, QuotaKind, QuotaSpec, Scope};

impl QuotaSpec {
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
                "labels": { QUOTA_LABEL: label(kind) },
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

/// The value of the quota's label.
const fn label(kind: QuotaKind) -> &'static str {
    match kind {
        QuotaKind::Guaranteed => "guaranteed",
        QuotaKind::Limit => "limit",
    }
}

#[cfg(test)]
mod tests {
    use bursar_crds::Quantum;

    use super::*;
    use crate::budget::ParsedSpec;

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
    fn foreign_edit_is_detected_and_foreign_resources_ignored() {
        let budget = budget("Refuse");
        let parsed = ParsedSpec::of(&budget.spec, Quantum::Gib1).unwrap();
        let desired = QuotaSpec::desired(QuotaKind::Guaranteed, &budget, &parsed, Quantum::Gib1);
        let object = desired.object(QuotaKind::Guaranteed, "team", &budget);
        let observed = |object: &Value| {
            ObservedQuota::of(&serde_json::from_value(object.clone()).unwrap()).spec
        };
        let mut beside = object.clone();
        beside["spec"]["hard"]["pods"] = json!("4");
        assert_eq!(observed(&beside), desired);
        let mut raised = object.clone();
        raised["spec"]["hard"]["requests.bursar.dev/gpu-memory-gib"] = json!("9k");
        let mut unscoped = object.clone();
        unscoped["spec"]["scopeSelector"] = json!(null);
        let mut wider = object.clone();
        wider["spec"]["scopeSelector"]["matchExpressions"][0]["values"] = json!(["other"]);
        let mut orphan = object;
        orphan["metadata"]["ownerReferences"] = json!([]);
        for changed in [raised, unscoped, wider, orphan] {
            assert_ne!(observed(&changed), desired, "{changed}");
        }
    }
}
