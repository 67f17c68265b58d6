//! Schemas of Kubernetes' own types, which `k8s-openapi` brings only with a feature that the agent
//! does not need.

use schemars::{Schema, SchemaGenerator, json_schema};

/// `metav1.Condition` as a list with one entry per type
/// (`k8s.io/apimachinery/pkg/apis/meta/v1/types.go`).
pub(crate) fn conditions(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": 32,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "required": ["type", "status", "reason", "message", "lastTransitionTime"],
            "properties": {
                "type": { "type": "string", "maxLength": 316, "description": "The kind of the condition." },
                "status": { "type": "string", "enum": ["True", "False", "Unknown"], "description": "Whether the condition holds." },
                "reason": { "type": "string", "minLength": 1, "maxLength": 1024, "description": "The reason as one word of a fixed set." },
                "message": { "type": "string", "maxLength": 32768, "description": "The reason as a sentence." },
                "lastTransitionTime": { "type": "string", "format": "date-time", "description": "When the status last changed." },
                "observedGeneration": { "type": "integer", "format": "int64", "minimum": 0, "description": "The metadata.generation that the condition describes." },
            },
        },
    })
}

/// A point in time, RFC 3339.
pub(crate) fn time(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "format": "date-time" })
}

/// Takes the defaults out of a status: what its writer does not say is absent, not zero.
pub(crate) fn without_defaults(schema: &mut Schema) {
    schema.remove("default");
    schemars::transform::transform_subschemas(&mut without_defaults, schema);
}
