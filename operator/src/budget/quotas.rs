//! The two ResourceQuotas by which a budget caps its namespace.
//!
//! One counts the pods that do not borrow, the other all; both hold what is asked for (`requests.`), for
//! that is what the scheduler gives. They change only with the budget's spec.

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

use super::Terms;
use crate::quanta::Quanta;

/// Which of the two. Their names are what a refused pod's creator reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Which {
    /// Of the pods that do not borrow.
    Guaranteed,
    /// Of all pods.
    Limit,
}

impl Which {
    /// Both, in the order in which they are written.
    pub const ALL: [Self; 2] = [Self::Limit, Self::Guaranteed];

    /// The quota's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Guaranteed => "gpu-memory-budget-guaranteed",
            Self::Limit => "gpu-memory-budget-limit",
        }
    }

    /// The value of its label.
    const fn label(self) -> &'static str {
        match self {
            Self::Guaranteed => "guaranteed",
            Self::Limit => "limit",
        }
    }
}

/// Which pods a quota counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Those that do not borrow.
    NotBorrowed,
    /// All.
    All,
    /// Others: somebody changed it.
    Strange,
}

/// What a quota says, as far as it is the operator's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cap {
    /// Which pods it counts.
    pub scope: Scope,
    /// The most that they may ask for together, by resource (`requests.bursar.dev/...`).
    pub hard: BTreeMap<String, Quanta>,
    /// The UID of the budget that it ends with.
    pub owner: String,
    /// A pod that does not fit becomes a borrower: what the mutating policy looks at.
    pub overflows: bool,
}

/// A quota as the API server has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Its UID.
    pub uid: String,
    /// What it says.
    pub cap: Cap,
    /// What admission goes by: the controller manager's copy of it.
    pub in_force: BTreeMap<String, Quanta>,
    /// When that copy was last written, by the API server's clock; absent where the API server does not say.
    pub taken_up: Option<Time>,
}

impl Cap {
    /// The quota that a budget with these terms should have.
    pub fn wanted(which: Which, budget: &GpuMemoryBudget, terms: &Terms, quantum: Quantum) -> Self {
        let device = |amount| (requests(quantum.device_memory()), amount);
        let (scope, hard) = match which {
            Which::Guaranteed => (Scope::NotBorrowed, vec![device(terms.guaranteed)]),
            Which::Limit => (
                Scope::All,
                vec![
                    device(terms.limit),
                    (requests(quantum.managed_memory()), terms.managed),
                ],
            ),
        };
        Self {
            scope,
            hard: hard.into_iter().collect(),
            owner: budget.uid().unwrap_or_default(),
            overflows: which == Which::Guaranteed && terms.overflows,
        }
    }

    /// What makes a quota this, whatever is `there`. An apply would leave in place what others added; a merge takes it
    /// off.
    pub fn patch(
        &self,
        which: Which,
        namespace: &str,
        budget: &GpuMemoryBudget,
        there: Option<&Quota>,
    ) -> Patch<Value> {
        let mut object = self.object(which, namespace, budget);
        let Some(there) = there.filter(|there| !self.has_to_replace(there)) else {
            return Patch::Apply(object);
        };
        if !self.overflows {
            object["metadata"]["labels"][OVERFLOW_LABEL] = Value::Null;
        }
        let others = there.cap.hard.keys();
        for added in others.filter(|resource| !self.hard.contains_key(*resource)) {
            object["spec"]["hard"][added] = Value::Null;
        }
        Patch::Merge(object)
    }

    /// Whether `there` has to be deleted and made anew: `scopes` cannot be changed, and after a change of `scopeSelector`
    /// the controller manager does not count anew for minutes.
    pub fn has_to_replace(&self, there: &Quota) -> bool {
        there.cap.scope != self.scope
    }

    /// Everything that it says.
    fn object(&self, which: Which, namespace: &str, budget: &GpuMemoryBudget) -> Value {
        let hard = self.hard.iter();
        let hard: BTreeMap<_, _> = hard
            .map(|(resource, most)| (resource, most.count().to_string()))
            .collect();
        let mut object = json!({
            "apiVersion": "v1", "kind": "ResourceQuota",
            "metadata": {
                "name": which.name(), "namespace": namespace,
                "labels": { QUOTA_LABEL: which.label() },
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

impl Quota {
    /// What is kept of `quota`.
    pub fn of(quota: &ResourceQuota) -> Self {
        let spec = quota.spec.clone().unwrap_or_default();
        let status = quota.status.as_ref();
        Self {
            uid: quota.uid().unwrap_or_default(),
            cap: Cap {
                scope: scope(&spec),
                hard: ours(spec.hard.as_ref()),
                owner: quota
                    .owner_references()
                    .iter()
                    .find(|owner| owner.kind == GpuMemoryBudget::kind(&()))
                    .map(|owner| owner.uid.clone())
                    .unwrap_or_default(),
                overflows: quota.labels().contains_key(OVERFLOW_LABEL),
            },
            in_force: ours(status.and_then(|status| status.hard.as_ref())),
            taken_up: quota
                .managed_fields()
                .iter()
                .filter(|entry| entry.subresource.as_deref() == Some("status"))
                .filter_map(|entry| entry.time.clone())
                .max(),
        }
    }

    /// Whether admission goes by `cap`.
    pub fn enforces(&self, cap: &Cap) -> bool {
        self.cap == *cap && self.in_force == cap.hard
    }
}

fn requests(resource: &str) -> String {
    format!("requests.{resource}")
}

/// The caps on our resources; others that somebody added beside them are not the operator's.
fn ours(hard: Option<&BTreeMap<String, Quantity>>) -> BTreeMap<String, Quanta> {
    let prefix = requests(PREFIX);
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
        _ => Scope::Strange,
    }
}

/// The value of a namespace's label, where it is the operator's.
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
    fn what_is_applied_is_read_back_as_the_same_however_the_server_writes_its_numbers() {
        for overflow in ["Refuse", "Borrow"] {
            let budget = budget(overflow);
            let terms = Terms::of(&budget.spec, Quantum::Gib1).unwrap();
            for which in Which::ALL {
                let wanted = Cap::wanted(which, &budget, &terms, Quantum::Gib1);
                let mut object = wanted.object(which, "team", &budget);
                object["status"] = json!({ "hard": object["spec"]["hard"] });
                let text = object.to_string().replace("\"1000\"", "\"1k\"");
                let quota = Quota::of(&serde_json::from_str(&text).unwrap());
                assert_eq!(quota.cap, wanted);
                assert!(quota.enforces(&wanted));
                object["status"] = json!(null);
                let fresh = Quota::of(&serde_json::from_value(object).unwrap());
                assert!(!fresh.enforces(&wanted));
            }
        }
    }

    #[test]
    fn what_another_hand_added_is_taken_off_and_what_has_other_scopes_is_made_anew() {
        let budget = budget("Refuse");
        let terms = Terms::of(&budget.spec, Quantum::Gib1).unwrap();
        let wanted = Cap::wanted(Which::Limit, &budget, &terms, Quantum::Gib1);
        let patch = |there: Option<&Quota>| match wanted.patch(Which::Limit, "team", &budget, there)
        {
            Patch::Merge(object) => Some(object),
            _ => None,
        };
        let changed = |change: fn(&mut Value)| {
            let mut object = wanted.object(Which::Limit, "team", &budget);
            change(&mut object);
            Quota::of(&serde_json::from_value(object).unwrap())
        };
        assert_eq!(patch(None), None, "applied");
        const OTHER: &str = "requests.bursar.dev/other";
        let merged = patch(Some(&changed(|object| {
            object["metadata"]["labels"][OVERFLOW_LABEL] = json!("Borrow");
            object["spec"]["hard"][OTHER] = json!("1");
        })));
        let mut nothing = wanted.object(Which::Limit, "team", &budget);
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
            assert!(wanted.has_to_replace(&scoped));
            assert_eq!(patch(Some(&scoped)), None, "it is gone by then");
        }
    }

    #[test]
    fn quota_is_taken_up_when_its_status_was_last_written() {
        let entry = |subresource: Option<&str>, second: u32| {
            json!({ "manager": "m", "operation": "Update", "subresource": subresource,
                "time": format!("2026-01-01T00:00:{second:02}Z") })
        };
        let taken_up = |entries: Value| {
            let quota = json!({ "metadata": { "name": "q", "managedFields": entries } });
            Quota::of(&serde_json::from_value(quota).unwrap()).taken_up
        };
        let status = Some("status");
        let entries = json!([entry(status, 3), entry(status, 7), entry(None, 9)]);
        let second = taken_up(entries).map(|time| time.0.as_second() % 60);
        assert_eq!(second, Some(7));
        assert_eq!(taken_up(json!([entry(None, 9)])), None);
    }

    #[test]
    fn a_change_by_another_hand_is_seen_and_what_is_added_beside_is_not_ours() {
        let budget = budget("Refuse");
        let terms = Terms::of(&budget.spec, Quantum::Gib1).unwrap();
        let wanted = Cap::wanted(Which::Guaranteed, &budget, &terms, Quantum::Gib1);
        let object = wanted.object(Which::Guaranteed, "team", &budget);
        let seen = |object: &Value| Quota::of(&serde_json::from_value(object.clone()).unwrap()).cap;
        let mut beside = object.clone();
        beside["spec"]["hard"]["pods"] = json!("4");
        assert_eq!(seen(&beside), wanted);
        let mut raised = object.clone();
        raised["spec"]["hard"]["requests.bursar.dev/gpu-memory-gib"] = json!("9k");
        let mut unscoped = object.clone();
        unscoped["spec"]["scopeSelector"] = json!(null);
        let mut wider = object.clone();
        wider["spec"]["scopeSelector"]["matchExpressions"][0]["values"] = json!(["other"]);
        let mut orphan = object;
        orphan["metadata"]["ownerReferences"] = json!([]);
        for changed in [raised, unscoped, wider, orphan] {
            assert_ne!(seen(&changed), wanted, "{changed}");
        }
    }
}
