//! The chart's CRD templates are what the types say.

use bursar_crds::{GpuMemoryBudget, GpuNamespace, GpuNode};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt as _;
use serde_json::Value;

use super::{HOW, assert_current};

/// The template of one CRD: installed unless `crds.enabled` says no, kept unless `crds.keep` does.
fn template(crd: &CustomResourceDefinition) -> String {
    let name = crd.metadata.name.as_deref().expect("a CRD has a name");
    let spec = serde_json::to_value(&crd.spec).expect("a CRD is JSON");
    let spec =
        serde_yaml_ng::to_string(&serde_json::json!({ "spec": spec })).expect("JSON is YAML");
    assert!(
        !spec.contains("{{"),
        "helm would read {name}'s schema as a template"
    );
    // Helm reads YAML 1.1, in which these words are booleans and no strings.
    let is_boolean = |line: &&str| {
        let word = line.trim_start_matches([' ', '-']).to_lowercase();
        ["y", "n", "yes", "no", "on", "off"].contains(&word.as_str())
    };
    let boolean = spec.lines().find(is_boolean);
    assert_eq!(
        boolean, None,
        "helm would read a value of {name} as a boolean"
    );
    format!(
        r#"{{{{- /* Generated from crds/src by `{HOW}`. Do not edit. */}}}}
{{{{- if .Values.crds.enabled }}}}
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: {name}
  labels:
    {{{{- include "bursar.labels" . | nindent 4 }}}}
  {{{{- if .Values.crds.keep }}}}
  annotations:
    helm.sh/resource-policy: keep
  {{{{- end }}}}
{spec}{{{{- end }}}}
"#
    )
}

const TEMPLATES: &str = "charts/bursar/templates";

#[test]
fn chart_has_the_current_budget_crd() {
    let file = format!("{TEMPLATES}/crd-gpumemorybudgets.yaml");
    assert_current(&file, &template(&GpuMemoryBudget::crd()));
}

#[test]
fn chart_has_the_current_gpu_node_crd() {
    let file = format!("{TEMPLATES}/crd-gpunodes.yaml");
    assert_current(&file, &template(&GpuNode::crd()));
}

#[test]
fn chart_has_the_current_gpu_namespace_crd() {
    let file = format!("{TEMPLATES}/crd-gpunamespaces.yaml");
    assert_current(&file, &template(&GpuNamespace::crd()));
}

/// The schema of the field at `path`, or an error for a path that `kubectl get` cannot print.
///
/// The API server prints the first result only (`tableconvertor.go` of its apiextensions), so that
/// a path with several results misleads.
fn field<'a>(schema: &'a Value, path: &str) -> Result<&'a Value, String> {
    let mut schema = schema;
    let path = path.strip_prefix('.').ok_or("no leading dot")?;
    for step in path.split('.').filter(|step| !step.starts_with("type==")) {
        let (name, filter) = step.split_once('[').unwrap_or((step, ""));
        if filter.starts_with(['*', ':']) {
            return Err(format!("{step} has several results"));
        }
        schema = &schema["properties"][name];
        if filter.starts_with("?(@") {
            schema = &schema["items"];
        }
        if schema.is_null() {
            return Err(format!("the schema has no field {name}"));
        }
    }
    Ok(schema)
}

#[test]
fn columns_print_a_single_value_of_the_schema() {
    for crd in [GpuMemoryBudget::crd(), GpuNode::crd(), GpuNamespace::crd()] {
        let version = serde_json::to_value(&crd.spec.versions[0]).expect("a CRD is JSON");
        let columns = version["additionalPrinterColumns"].as_array().unwrap();
        assert!(columns.len() > 2);
        for column in columns {
            let (name, path) = (&column["name"], column["jsonPath"].as_str().unwrap());
            if path.starts_with(".metadata") {
                continue;
            }
            let field = field(&version["schema"]["openAPIV3Schema"], path)
                .unwrap_or_else(|error| panic!("{name} {path}: {error}"));
            let type_ = field["type"].as_str().unwrap_or("string");
            assert_eq!(column["type"], type_, "{name} {path}");
        }
    }
}
