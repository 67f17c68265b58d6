//! Reads the orders out of a `GpuNode.spec`: pure.
//!
//! The operator may be of another version. Each order is read by itself, and an order that this
//! agent does not understand stops no other.

use bursar_crds::budget::ContextAction;
use bursar_crds::gpu_node::ContextOrder;
use kube::core::DynamicObject;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::gpu_node::quota_overrides::Orders;
use crate::units::GpuUuid;

/// What `object` orders, with the places of what cannot be understood.
pub fn orders(object: &DynamicObject) -> Orders {
    let mut list = Lists {
        spec: object.data.get("spec"),
        unknown: Vec::new(),
    };
    Orders {
        generation: object.metadata.generation,
        quotas: list.read("quotas", |_| true),
        reservations: list.read("reservations", |_| true),
        contexts: list.read("contextPolicies", |order: &ContextOrder| {
            order.action != ContextAction::Unknown
        }),
        restarts: list.read("restarts", |_| true),
        drain: list.drain(),
        not_understood: list.unknown,
    }
}

/// The lists of a spec.
struct Lists<'a> {
    spec: Option<&'a Value>,
    unknown: Vec<String>,
}

impl Lists<'_> {
    /// The orders of one list that are of the right shape and `is_known`.
    fn read<T: DeserializeOwned>(&mut self, name: &str, is_known: fn(&T) -> bool) -> Vec<T> {
        let list = match self.spec.and_then(|spec| spec.get(name)) {
            None | Some(Value::Null) => return Vec::new(),
            Some(Value::Array(list)) => list,
            Some(_) => {
                self.unknown.push(name.to_owned());
                return Vec::new();
            }
        };
        let mut orders = Vec::new();
        for (index, order) in list.iter().enumerate() {
            match T::deserialize(order) {
                Ok(order) if is_known(&order) => orders.push(order),
                _ => self.unknown.push(format!("{name}[{index}]")),
            }
        }
        orders
    }

    fn drain<C: FromIterator<GpuUuid>>(&mut self) -> C {
        let names: Vec<String> =
            self.read("drain", |name: &String| name.parse::<GpuUuid>().is_ok());
        names.iter().flat_map(|name| name.parse()).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(spec: Value) -> Orders {
        let object = json!({
            "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuNode",
            "metadata": { "name": "n", "generation": 7 }, "spec": spec,
        });
        orders(&serde_json::from_value(object).unwrap())
    }

    fn policy(namespace: &str, action: &str) -> Value {
        json!({ "namespace": namespace, "action": action, "maxRestarts": 1, "windowSeconds": 60 })
    }

    #[test]
    fn unknown_action_stops_no_other_order() {
        let orders = read(json!({
            "contextPolicies": [policy("a", "Quarantine"), policy("b", "Evict")],
            "drain": ["GPU-1"],
            "restarts": [{ "fault": "f", "podUid": "u", "container": "c", "processGeneration": 3 }],
        }));
        let namespaces: Vec<_> = orders.contexts.iter().map(|one| &one.namespace).collect();
        assert_eq!(namespaces, ["b"]);
        assert_eq!((orders.drain.len(), orders.restarts.len()), (1, 1));
        assert_eq!(orders.generation, Some(7));
        assert_eq!(orders.not_understood, ["contextPolicies[0]"]);
    }

    #[test]
    fn order_of_another_shape_is_named_and_the_rest_is_read() {
        let orders = read(json!({
            "quotas": [{ "podUid": "u", "container": "c", "quota": "1Gi" }, { "pod": "p" }],
            "reservations": { "GPU-1": 4 },
            "drain": [7, "GPU-1", "no GPU"],
        }));
        assert_eq!((orders.quotas.len(), orders.drain.len()), (1, 1));
        let places = ["quotas[1]", "reservations", "drain[0]", "drain[2]"];
        assert_eq!(orders.not_understood, places);
    }

    #[test]
    fn missing_or_empty_spec_orders_nothing() {
        for spec in [Value::Null, json!({}), json!({ "drain": null })] {
            let nothing = Orders {
                generation: Some(7),
                ..Orders::default()
            };
            assert_eq!(read(spec), nothing);
        }
    }
}
