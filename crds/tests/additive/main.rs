//! The CRDs of today accept every object that the CRDs of released versions accept.
//!
//! `BURSAR_UPDATE=1 cargo test -p bursar-crds --test additive` writes a missing file of
//! `e2e/compat`, and fails in that run too. A file that is there is never written again.

mod narrowing;

use std::collections::BTreeMap;
use std::path::Path;

use bursar_crds::{GpuMemoryBudget, GpuNamespace, GpuNode};
use kube::CustomResourceExt as _;
use serde_json::Value;

/// The versions with golden CRDs, the newest last.
const VERSIONS: &[&str] = &["0.1.0"];

/// The CRDs of today by the names of their files.
fn crds() -> BTreeMap<String, Value> {
    let crds = [GpuMemoryBudget::crd(), GpuNamespace::crd(), GpuNode::crd()];
    let named = crds.into_iter().map(|crd| {
        let file = format!("{}.yaml", crd.spec.names.plural);
        let spec = serde_json::to_value(&crd.spec).expect("a CRD is JSON");
        (file, spec)
    });
    named.collect()
}

#[test]
fn crds_accept_all_that_released_versions_accept() {
    let compat = Path::new(env!("CARGO_MANIFEST_DIR")).join("../e2e/compat");
    let today = crds();
    let mut problems = Vec::new();
    for version in VERSIONS {
        let folder = compat.join(version).join("crds");
        for entry in folder.read_dir().into_iter().flatten() {
            let path = entry.expect("an entry").path();
            let text = std::fs::read_to_string(&path).expect("a CRD");
            let golden: Value = serde_yaml_ng::from_str(&text).expect("YAML");
            let file = path.file_name().and_then(|name| name.to_str());
            let file = file.expect("a name in UTF-8");
            match today.get(file) {
                Some(spec) => {
                    let found = narrowing::of_crd(&golden, spec).into_iter();
                    problems.extend(found.map(|found| format!("{version} {file}: {found}")));
                }
                None => problems.push(format!("{version} {file}: the CRD is removed")),
            }
        }
    }
    let newest = VERSIONS.last().expect("there is a version");
    for (file, spec) in &today {
        let path = compat.join(newest).join("crds").join(file);
        if path.exists() {
            continue;
        }
        problems.push(format!("{newest} {file}: there was no golden CRD"));
        if std::env::var_os("BURSAR_UPDATE").is_some() {
            let text = serde_yaml_ng::to_string(spec).expect("JSON is YAML");
            let folder = compat.join(newest).join("crds");
            let made = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&path, text));
            made.expect("the file can be written");
        }
    }
    assert!(problems.is_empty(), "{problems:#?}");
}
