//! Parses object metadata without `managedFields`, which are most of it in memory.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};
use kube::core::ObjectMeta;
use serde::{Deserialize, Deserializer};

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct SlimMetadata {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    creation_timestamp: Option<Time>,
    deletion_timestamp: Option<Time>,
    deletion_grace_period_seconds: Option<i64>,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
    owner_references: Option<Vec<OwnerReference>>,
}

/// For `deserialize_with`. The parser skips the other fields, because one list response holds
/// hundreds of objects.
pub(crate) fn metadata<'de, D: Deserializer<'de>>(from: D) -> Result<ObjectMeta, D::Error> {
    let slim = SlimMetadata::deserialize(from)?;
    Ok(ObjectMeta {
        name: slim.name,
        namespace: slim.namespace,
        uid: slim.uid,
        resource_version: slim.resource_version,
        creation_timestamp: slim.creation_timestamp,
        deletion_timestamp: slim.deletion_timestamp,
        deletion_grace_period_seconds: slim.deletion_grace_period_seconds,
        labels: slim.labels,
        annotations: slim.annotations,
        owner_references: slim.owner_references,
        ..ObjectMeta::default()
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::cluster::slim_pod::SlimPod;

    #[test]
    fn metadata_is_kept_without_managed_fields() {
        let mut metadata = json!({
            "name": "p", "namespace": "n", "uid": "u", "resourceVersion": "7", "labels": { "a": "b" },
            "creationTimestamp": "2026-01-01T00:00:00Z", "deletionTimestamp": "2026-01-02T00:00:00Z",
            "deletionGracePeriodSeconds": 30, "annotations": { "c": "d" },
            "ownerReferences": [{ "apiVersion": "v1", "kind": "k", "name": "o", "uid": "ou", "controller": true }],
        });
        let kept = metadata.clone();
        metadata["managedFields"] = json!([{ "manager": "m", "fieldsV1": { "f:spec": {} } }]);
        let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata });
        let pod: SlimPod = serde_json::from_value(pod).unwrap();
        assert_eq!(serde_json::to_value(pod.metadata).unwrap(), kept);
    }
}
