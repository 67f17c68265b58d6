//! The chart's CRD templates are what the types say.

use bursar_crds::{GpuMemoryBudget, GpuNode};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt as _;

use super::{HOW, assert_current};

/// The template of one CRD: installed unless `crds.install` says no, kept unless `crds.keep` does.
fn template(crd: &CustomResourceDefinition) -> String {
    let name = crd.metadata.name.as_deref().expect("a CRD has a name");
    let spec = serde_json::to_value(&crd.spec).expect("a CRD is JSON");
    let spec =
        serde_yaml_ng::to_string(&serde_json::json!({ "spec": spec })).expect("JSON is YAML");
    assert!(
        !spec.contains("{{"),
        "helm would read {name}'s schema as a template"
    );
    format!(
        r#"{{{{- /* Generated from crds/src by `{HOW}`. Do not edit. */}}}}
{{{{- if .Values.crds.install }}}}
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
