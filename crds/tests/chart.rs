//! The chart's CRD templates are what the types say.

use bursar_crds::{GpuMemoryBudget, GpuNode};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt as _;
use std::path::{Path, PathBuf};

const HOW: &str = "BURSAR_UPDATE=1 cargo test -p bursar-crds";

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

fn check(file: &str, crd: &CustomResourceDefinition) {
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../charts/bursar/templates")
        .join(file);
    let wanted = template(crd);
    if std::env::var_os("BURSAR_UPDATE").is_some() {
        std::fs::create_dir_all(path.parent().expect("the file is in a folder"))
            .expect("the templates' folder can be made");
        std::fs::write(&path, &wanted).expect("the template can be written");
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(found == wanted, "{} is stale: run `{HOW}`", path.display());
}

#[test]
fn the_chart_holds_the_current_budget_crd() {
    check("crd-gpumemorybudgets.yaml", &GpuMemoryBudget::crd());
}

#[test]
fn the_chart_holds_the_current_gpu_node_crd() {
    check("crd-gpunodes.yaml", &GpuNode::crd());
}
