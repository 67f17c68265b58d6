//! Represents an amount of memory as a field of the API.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

use crate::quantity::{QuantityError, format_bytes, parse_bytes};

/// An amount of memory, written as a Kubernetes quantity: `160Gi`, `512Mi`, `0`.
///
/// The schema takes whole bytes only (`isInteger`), zero or more, with an optional suffix of Ki to
/// Pi or k to P. A plain number is a number of bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Amount(pub Quantity);

impl Amount {
    /// The shortest way to write `bytes`.
    pub fn from_bytes(bytes: u64) -> Self {
        Self(format_bytes(bytes))
    }

    /// The amount in bytes. Fails only for a text that the schema refuses too.
    pub fn bytes(&self) -> Result<u64, QuantityError> {
        parse_bytes(&self.0.0)
    }
}

impl From<&str> for Amount {
    fn from(text: &str) -> Self {
        Self(Quantity(text.to_owned()))
    }
}

impl JsonSchema for Amount {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Amount".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "x-kubernetes-int-or-string": true,
            "pattern": "^[0-9]{1,19}(\\.[0-9]{1,9})?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$",
            // The longest text of the pattern: the API server estimates the cost of rules by it.
            "maxLength": 31,
            "minimum": 0,
        })
    }
}
