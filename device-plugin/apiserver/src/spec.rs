//! Parses a `GpuNode.spec`. Pure.
//!
//! The operator may be of another version. The agent parses each entry by itself, so an unreadable
//! entry affects no other.

use std::collections::{BTreeMap, BTreeSet};

use bursar_crds::gpu_node::{PodSettings, QuotaOverride, Reservation, RestartRequest};
use bursar_ledger::units::GpuUuid;
use kube::core::DynamicObject;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::pod_settings::PodsByUid;

/// The parsed spec of one generation of the node's `GpuNode`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ParsedSpec {
    /// `metadata.generation`.
    pub generation: Option<i64>,
    /// `spec.quotas`.
    pub quotas: Vec<QuotaOverride>,
    /// `spec.reservations`.
    pub reservations: Vec<Reservation>,
    /// `spec.restarts`.
    pub restarts: Vec<RestartRequest>,
    /// `spec.drain`.
    pub drain: BTreeSet<GpuUuid>,
    /// `spec.pods` by UID.
    pub pods: PodsByUid,
    /// The paths of entries that this agent cannot read.
    pub unrecognized: Vec<String>,
}

/// Parses the spec of `object`, with the paths of unreadable entries.
pub(crate) fn parse_spec(object: &DynamicObject) -> ParsedSpec {
    let mut list = SpecReader {
        spec: object.data.get("spec"),
        unrecognized: Vec::new(),
    };
    ParsedSpec {
        generation: object.metadata.generation,
        quotas: list.read_list("quotas", |_| true),
        reservations: list.read_list("reservations", |_| true),
        restarts: list.read_list("restarts", |_| true),
        drain: list.read_drain(),
        pods: list.read_pods(),
        unrecognized: list.unrecognized,
    }
}

/// Reads the lists of a spec.
struct SpecReader<'a> {
    spec: Option<&'a Value>,
    unrecognized: Vec<String>,
}

impl SpecReader<'_> {
    /// Reads the entries of one list that have the right shape and that `is_known` accepts.
    fn read_list<T: DeserializeOwned>(&mut self, name: &str, is_known: fn(&T) -> bool) -> Vec<T> {
        let list = match self.spec.and_then(|spec| spec.get(name)) {
            None | Some(Value::Null) => return Vec::new(),
            Some(Value::Array(list)) => list,
            Some(_) => {
                self.unrecognized.push(name.to_owned());
                return Vec::new();
            }
        };
        let mut orders = Vec::new();
        for (index, order) in list.iter().enumerate() {
            match T::deserialize(order) {
                Ok(order) if is_known(&order) => orders.push(order),
                _ => self.unrecognized.push(format!("{name}[{index}]")),
            }
        }
        orders
    }

    fn read_pods(&mut self) -> PodsByUid {
        let pods = self.read_list("pods", |_: &PodSettings| true).into_iter();
        pods.map(|pod| (pod.pod_uid.clone(), pod))
            .collect::<BTreeMap<_, _>>()
            .into()
    }

    fn read_drain<C: FromIterator<GpuUuid>>(&mut self) -> C {
        let names: Vec<String> =
            self.read_list("drain", |name: &String| name.parse::<GpuUuid>().is_ok());
        names.iter().flat_map(|name| name.parse()).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(spec: Value) -> ParsedSpec {
        let object = json!({
            "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuNode",
            "metadata": { "name": "n", "generation": 7 }, "spec": spec,
        });
        parse_spec(&serde_json::from_value(object).unwrap())
    }

    #[test]
    fn malformed_entry_is_named_and_the_rest_is_read() {
        let orders = read(json!({
            "quotas": [{ "podUid": "u", "container": "c", "quota": "1Gi" }, { "pod": "p" }],
            "reservations": { "GPU-1": 4 },
            "drain": [7, "GPU-1", "no GPU"],
            "pods": [{ "podUid": "u", "later": 1 }, { "priority": 5 }],
        }));
        let read = (orders.quotas.len(), orders.drain.len(), orders.pods.len());
        assert_eq!(read, (1, 1, 1));
        let places = [
            "quotas[1]",
            "reservations",
            "drain[0]",
            "drain[2]",
            "pods[1]",
        ];
        assert_eq!(orders.unrecognized, places);
    }

    #[test]
    fn missing_or_empty_spec_parses_to_nothing() {
        for spec in [Value::Null, json!({}), json!({ "drain": null })] {
            let nothing = ParsedSpec {
                generation: Some(7),
                ..ParsedSpec::default()
            };
            assert_eq!(read(spec), nothing);
        }
    }
}
