//! Filters nodes for a pod by the scheduler's rules that depend on the node alone. Pure.
//!
//! Sources: `k8s.io/component-helpers/scheduling/corev1/{helpers.go,nodeaffinity/nodeaffinity.go}`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, Taint, Toleration,
};

use crate::cluster::facts::node::NodeFacts;
use crate::cluster::facts::pod::Constraints;

/// Whether the node is schedulable and satisfies the pod's constraints. False when the pod has
/// constraints that the operator does not evaluate.
pub(super) fn passes_filters(constraints: &Constraints, name: &str, node: &NodeFacts) -> bool {
    let Constraints {
        selector,
        affinity,
        tolerations,
        unsupported: more,
    } = constraints;
    node.is_ready
        && !node.is_cordoned
        && !more
        && selector
            .iter()
            .all(|(key, value)| node.labels.get(key) == Some(value))
        && affinity
            .as_ref()
            .is_none_or(|affinity| matches_selector(affinity, name, &node.labels))
        && node
            .taints
            .iter()
            .filter(|taint| matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute"))
            .all(|taint| {
                tolerations
                    .iter()
                    .any(|toleration| tolerates(toleration, taint))
            })
}

/// Terms are alternatives. An empty term matches nothing.
fn matches_selector(
    selector: &NodeSelector,
    name: &str,
    labels: &BTreeMap<String, String>,
) -> bool {
    selector
        .node_selector_terms
        .iter()
        .any(|term| matches_term(term, name, labels))
}

fn matches_term(term: &NodeSelectorTerm, name: &str, labels: &BTreeMap<String, String>) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    let has_terms = !expressions.is_empty() || !fields.is_empty();
    has_terms
        && expressions.iter().all(|requirement| {
            matches_requirement(
                requirement,
                labels.get(&requirement.key).map(String::as_str),
            )
        })
        && fields.iter().all(|requirement| {
            requirement.key == "metadata.name" && matches_requirement(requirement, Some(name))
        })
}

fn matches_requirement(requirement: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let listed = || value.is_some_and(|value| values.iter().any(|one| one == value));
    let compared = || {
        let [bound] = values else { return None };
        Some((value?.parse::<i64>().ok()?, bound.parse::<i64>().ok()?))
    };
    match requirement.operator.as_str() {
        "In" => listed(),
        "NotIn" => !listed(),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => compared().is_some_and(|(value, bound)| value > bound),
        "Lt" => compared().is_some_and(|(value, bound)| value < bound),
        _ => false,
    }
}

fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let effect = toleration.effect.as_deref().unwrap_or_default();
    let key = toleration.key.as_deref().unwrap_or_default();
    if !effect.is_empty() && effect != taint.effect || !key.is_empty() && key != taint.key {
        return false;
    }
    match toleration.operator.as_deref().unwrap_or_default() {
        "" | "Equal" => {
            toleration.value.as_deref().unwrap_or_default()
                == taint.value.as_deref().unwrap_or_default()
        }
        // With an empty key the toleration matches every taint.
        "Exists" => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quanta::Quanta;
    use serde_json::{Value, json};

    fn node(labels: Value, taints: Value) -> NodeFacts {
        NodeFacts {
            uid: "u".into(),
            labels: serde_json::from_value(labels).unwrap(),
            taints: serde_json::from_value(taints).unwrap(),
            is_ready: true,
            is_cordoned: false,
            allocatable: Quanta::new(16),
            allocatable_milli: BTreeMap::new(),
        }
    }

    fn affinity(terms: Value) -> Constraints {
        Constraints {
            affinity: serde_json::from_value(json!({ "nodeSelectorTerms": terms })).unwrap(),
            ..Constraints::default()
        }
    }

    fn expression(key: &str, operator: &str, values: &[&str]) -> Constraints {
        affinity(
            json!([{ "matchExpressions": [{ "key": key, "operator": operator, "values": values }] }]),
        )
    }

    #[test]
    fn every_node_affinity_operator_is_evaluated() {
        let node = node(json!({ "zone": "a", "largest": "6" }), json!([]));
        let table = [
            ("zone", "In", &["a", "b"][..], true),
            ("zone", "In", &["b"], false),
            ("zone", "NotIn", &["b"], true),
            ("none", "NotIn", &["b"], true),
            ("zone", "Exists", &[], true),
            ("none", "Exists", &[], false),
            ("none", "DoesNotExist", &[], true),
            ("largest", "Gt", &["5"], true),
            ("largest", "Gt", &["6"], false),
            ("largest", "Lt", &["7"], true),
            ("none", "Gt", &["0"], false),
            ("zone", "Gt", &["0"], false),
            ("zone", "Like", &["a"], false),
        ];
        for (key, operator, values, may) in table {
            let constraints = expression(key, operator, values);
            assert_eq!(
                passes_filters(&constraints, "n", &node),
                may,
                "{key} {operator} {values:?}"
            );
        }
    }

    #[test]
    fn terms_are_alternatives_and_an_empty_one_matches_nothing() {
        let node = node(json!({ "zone": "a" }), json!([]));
        let a =
            json!({ "matchExpressions": [{ "key": "zone", "operator": "In", "values": ["a"] }] });
        assert!(passes_filters(&affinity(json!([{}, a])), "n", &node));
        assert!(!passes_filters(&affinity(json!([{}])), "n", &node));
        let pinned = json!({ "matchFields": [{ "key": "metadata.name", "operator": "In", "values": ["n"] }] });
        assert!(passes_filters(&affinity(json!([pinned])), "n", &node));
        assert!(!passes_filters(&affinity(json!([pinned])), "m", &node));
    }

    #[test]
    fn taint_excludes_pods_that_do_not_tolerate_it() {
        let taint = json!([{ "key": "gpu", "value": "yes", "effect": "NoSchedule" }]);
        let node = node(json!({}), taint);
        let with = |tolerations: Value| Constraints {
            tolerations: serde_json::from_value(tolerations).unwrap(),
            ..Constraints::default()
        };
        assert!(!passes_filters(&with(json!([])), "n", &node));
        assert!(passes_filters(
            &with(json!([{ "operator": "Exists" }])),
            "n",
            &node
        ));
        assert!(passes_filters(
            &with(json!([{ "key": "gpu", "value": "yes" }])),
            "n",
            &node
        ));
        assert!(!passes_filters(
            &with(json!([{ "key": "gpu", "value": "no" }])),
            "n",
            &node
        ));
        assert!(!passes_filters(
            &with(json!([{ "key": "gpu", "operator": "Exists", "effect": "NoExecute" }])),
            "n",
            &node
        ));
    }

    #[test]
    fn unschedulable_node_or_unsupported_constraint_fails() {
        let mut node = node(json!({}), json!([]));
        assert!(passes_filters(&Constraints::default(), "n", &node));
        let more = Constraints {
            unsupported: true,
            ..Constraints::default()
        };
        assert!(!passes_filters(&more, "n", &node));
        node.is_cordoned = true;
        assert!(!passes_filters(&Constraints::default(), "n", &node));
    }
}
