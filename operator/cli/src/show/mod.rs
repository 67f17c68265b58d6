//! Makes the tables of `gpus`, `budgets`, `top`, `events` and `retained`.

pub mod budgets;
pub mod events;
pub mod gpus;
pub mod retained;
pub mod top;

use bursar_crds::{Amount, GpuNode};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use serde_json::{Value, json};

/// The bytes of an amount; 0 for one that cannot be parsed.
pub(crate) fn bytes(amount: &Amount) -> u64 {
    amount.bytes().unwrap_or(0)
}

/// The size of a node's quantum.
pub(crate) fn quantum_bytes(node: &GpuNode) -> u64 {
    let quantum = node
        .status
        .as_ref()
        .and_then(|status| status.quantum.as_ref());
    quantum.map_or(1 << 30, bytes)
}

/// The bytes of a number of quanta.
pub(crate) fn quanta(count: i32, quantum: u64) -> u64 {
    u64::try_from(count).unwrap_or(0).saturating_mul(quantum)
}

/// The name of a GpuNode.
pub(crate) fn name(node: &GpuNode) -> &str {
    node.metadata.name.as_deref().unwrap_or_default()
}

/// A list of objects, as `kubectl get` writes it.
pub fn list(objects: &[Value]) -> Value {
    json!({ "apiVersion": "v1", "kind": "List", "items": objects })
}

/// A condition of this type.
pub(crate) fn condition<'a>(conditions: &'a [Condition], type_: &str) -> Option<&'a Condition> {
    conditions.iter().find(|condition| condition.type_ == type_)
}

/// A product's name without its vendor: `H100 80GB HBM3`.
pub(crate) fn model(name: &str) -> &str {
    name.strip_prefix("NVIDIA ").unwrap_or(name)
}
