//! Reads the state of a cluster and its node that an installation may change.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use bursar_e2e::cluster::LocalCluster;
use bursar_e2e::paths;
use libtest_mimic::Failed;
use serde_json::Value;
use tokio::process::Command;

/// The timeout of one command, on a loaded machine.
const TIMEOUT: Duration = Duration::from_secs(240);

/// Runs a program against a cluster, and returns its standard output.
pub(crate) async fn call(
    program: &Path,
    arguments: &[&str],
    kubeconfig: &Path,
) -> Result<String, Failed> {
    let output = Command::new(program)
        .args(arguments)
        .env("KUBECONFIG", kubeconfig)
        .current_dir(paths::repository())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(TIMEOUT, output).await??;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    Err(format!("{} {}: {stderr}", program.display(), arguments.join(" ")).into())
}

/// The state of a cluster and its node that an installation may change.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ClusterState(BTreeSet<String>);

/// Folders of the node that Bursar, the container runtime and the kubelet use for Bursar.
const NODE_FOLDERS: &[&str] = &[
    "/run/bursar",
    "/run/cdi",
    "/var/lib/bursar",
    "/var/lib/kubelet/device-plugins",
    "/var/lib/kubelet/plugins_registry",
];

impl ClusterState {
    pub(crate) async fn read(local: &LocalCluster, kubectl: &Path) -> Result<Self, Failed> {
        let kubeconfig = local.kubeconfig();
        let kinds = ["api-resources", "--verbs=list", "--output=name"];
        let kinds = call(kubectl, &kinds, &kubeconfig).await?;
        // Events end by themselves, and the statuses of components are no objects.
        let kinds: Vec<&str> = kinds
            .lines()
            .filter(|kind| !kind.starts_with("events") && *kind != "componentstatuses")
            .collect();
        let columns =
            "--output=custom-columns=KIND:.kind,IN:.metadata.namespace,NAME:.metadata.name";
        let list = [
            "get",
            &kinds.join(","),
            "--all-namespaces",
            columns,
            "--no-headers",
        ];
        let objects = call(kubectl, &list, &kubeconfig).await?;
        let squeeze = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let mut state: BTreeSet<String> = objects.lines().map(squeeze).collect();
        let about = ["get", "nodes,namespaces", "--output=json"];
        let about: Value = serde_json::from_str(&call(kubectl, &about, &kubeconfig).await?)?;
        for object in about["items"].as_array().into_iter().flatten() {
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            for place in ["/metadata/annotations", "/status/capacity"] {
                let keys = entries(object, place).map(|(key, _)| key);
                state.extend(keys.map(|key| format!("{name}{place} {key}")));
            }
            let labels = entries(object, "/metadata/labels");
            state
                .extend(labels.map(|(key, value)| format!("{name}/metadata/labels {key}={value}")));
            let offered = entries(object, "/status/allocatable");
            let ours = offered.filter(|(key, _)| key.starts_with("bursar.dev/"));
            state.extend(
                ours.map(|(key, value)| format!("{name}/status/allocatable {key}={value}")),
            );
        }
        for folder in NODE_FOLDERS {
            add_files(&local.host_path(folder), folder, &mut state);
        }
        Ok(Self(state))
    }

    /// Returns what is in one state only, with a `+` or a `-`.
    pub(crate) fn differences_since(&self, before: &Self) -> Vec<String> {
        let new = self.0.difference(&before.0).map(|line| format!("+ {line}"));
        let lost = before.0.difference(&self.0).map(|line| format!("- {line}"));
        new.chain(lost).collect()
    }
}

/// The entries of an object's map at a path.
fn entries<'a>(
    object: &'a Value,
    path: &str,
) -> impl Iterator<Item = (&'a String, &'a str)> + use<'a> {
    let map = object.pointer(path).and_then(Value::as_object);
    let text = |(key, value): (&'a String, &'a Value)| (key, value.as_str().unwrap_or_default());
    map.into_iter().flatten().map(text)
}

fn add_files(folder: &Path, name: &str, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = format!("{name}/{}", entry.file_name().to_string_lossy());
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            add_files(&entry.path(), &name, found);
        }
        found.insert(name);
    }
}
