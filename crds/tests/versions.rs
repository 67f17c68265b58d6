//! Objects that a later version wrote are read, and their schema stays closed for writers.

use bursar_crds::{GpuMemoryBudget, GpuNamespace, GpuNode};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt as _;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

/// A value that no version of the API defines yet.
const LATER: &str = "Later";

/// The schema of the only version that `crd` serves.
fn schema(crd: &CustomResourceDefinition) -> Value {
    let versions = serde_json::to_value(&crd.spec.versions).expect("a CRD is JSON");
    versions[0]["schema"]["openAPIV3Schema"].clone()
}

/// An object with every field of `schema` set. `later` is the path of the enum field that becomes
/// [`LATER`].
fn sample(schema: &Value, at: &str, later: Option<&str>) -> Value {
    if let Some(properties) = schema["properties"].as_object() {
        let fields = properties.iter().map(|(name, field)| {
            let value = sample(field, &format!("{at}.{name}"), later);
            (name.clone(), value)
        });
        return Value::Object(fields.collect::<Map<_, _>>());
    }
    if later == Some(at) {
        return json!(LATER);
    }
    if schema["x-kubernetes-int-or-string"] == true {
        return json!("1Gi");
    }
    match (schema["type"].as_str(), schema["format"].as_str()) {
        (Some("array"), _) => json!([sample(&schema["items"], at, later)]),
        (Some("integer"), _) => json!(1),
        (Some("boolean"), _) => json!(true),
        (Some("string"), Some("date-time")) => json!("2026-01-01T00:00:00Z"),
        (Some("string"), _) => schema["enum"].get(0).cloned().unwrap_or(json!("text")),
        _ => json!({}),
    }
}

/// The path of each enum field below `schema`, with its values.
fn enums(schema: &Value, at: &str, found: &mut Vec<(String, Vec<Value>)>) {
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        enums(field, &format!("{at}.{name}"), found);
    }
    if schema["items"].is_object() {
        enums(&schema["items"], at, found);
    }
    if let Some(values) = schema["enum"].as_array() {
        found.push((at.to_owned(), values.clone()));
    }
}

/// Reads an object of `crd` once as this version writes it, and once for each enum field with a
/// later value.
fn reads<K: DeserializeOwned>(crd: &CustomResourceDefinition, at_least: usize) {
    let schema = schema(crd);
    let mut found = Vec::new();
    enums(&schema, "", &mut found);
    assert!(found.len() >= at_least, "enum fields: {found:?}");
    let later = found.iter().map(|(path, _)| Some(path.as_str()));
    for later in later.chain([None]) {
        let mut object = sample(&schema, "", later);
        object["metadata"] = json!({ "name": "n" });
        assert_eq!(object.to_string().contains(LATER), later.is_some());
        if let Err(error) = serde_json::from_value::<K>(object) {
            panic!("{later:?}: {error}");
        }
    }
}

#[test]
fn budget_is_read_when_an_enum_has_a_later_value() {
    reads::<GpuMemoryBudget>(&GpuMemoryBudget::crd(), 3);
}

#[test]
fn gpu_node_is_read_when_an_enum_has_a_later_value() {
    reads::<GpuNode>(&GpuNode::crd(), 6);
}

#[test]
fn gpu_namespace_is_read_when_an_enum_has_a_later_value() {
    reads::<GpuNamespace>(&GpuNamespace::crd(), 1);
}

#[test]
fn schema_refuses_the_value_that_stands_for_unknown_ones() {
    for crd in [GpuMemoryBudget::crd(), GpuNode::crd(), GpuNamespace::crd()] {
        let mut found = Vec::new();
        enums(&schema(&crd), "", &mut found);
        // The status of a condition is a value of Kubernetes.
        found.retain(|(path, _)| !path.ends_with(".conditions.status"));
        for (path, values) in found {
            assert!(!values.contains(&json!("Unknown")), "{path}: {values:?}");
        }
    }
}
