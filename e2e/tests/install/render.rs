//! Renders the chart, and finds objects in the result.

use std::path::PathBuf;
use std::process::Command;

use bursar_e2e::chart::{ANY_REGISTRY, NAMESPACE, RELEASE};
use bursar_e2e::kube;
use bursar_e2e::paths;
use bursar_e2e::progress::Progress;
use serde::Deserialize as _;
use serde_json::Value;

/// The chart's folder.
pub(crate) fn chart() -> PathBuf {
    paths::repository().join("charts/bursar")
}

/// The rendered objects.
pub(crate) struct Objects(pub(crate) Vec<Value>);

/// Renders the chart with these values, `path=JSON` each. Panics if Helm refuses them.
pub(crate) fn render(values: &[&str]) -> Objects {
    try_render(RELEASE, NAMESPACE, values).unwrap_or_else(|message| panic!("{values:?}: {message}"))
}

/// Returns why Helm refuses these values.
pub(crate) fn refusal(values: &[&str]) -> String {
    match try_render(RELEASE, NAMESPACE, values) {
        Ok(_) => panic!("{values:?} must be refused"),
        Err(message) => message,
    }
}

/// Renders the chart, or returns what Helm says.
pub(crate) fn try_render(
    release: &str,
    namespace: &str,
    values: &[&str],
) -> Result<Objects, String> {
    let toolbox = kube::build(&Progress::start()).unwrap();
    let mut helm = Command::new(toolbox.program("helm"));
    helm.args(["template", release]).arg(chart());
    helm.args(["--namespace", namespace, "--kube-version=1.36.0"]);
    helm.arg(ANY_REGISTRY);
    for value in values {
        helm.arg(format!("--set-json={value}"));
    }
    let output = helm.output().unwrap();
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    let documents = serde_yaml_ng::Deserializer::from_slice(&output.stdout);
    let objects = documents.map(|document| Value::deserialize(document).unwrap());
    Ok(Objects(
        objects.filter(|object| !object.is_null()).collect(),
    ))
}

impl Objects {
    /// The objects of a kind.
    pub(crate) fn of_kind(&self, kind: &'static str) -> impl Iterator<Item = &Value> {
        self.0.iter().filter(move |object| object["kind"] == kind)
    }

    /// The object of this kind and name, if it is rendered.
    pub(crate) fn find(&self, kind: &'static str, name: &str) -> Option<&Value> {
        self.of_kind(kind)
            .find(|object| object["metadata"]["name"] == name)
    }

    /// The object of this kind and name.
    pub(crate) fn get(&self, kind: &'static str, name: &str) -> &Value {
        let found = self.find(kind, name);
        found.unwrap_or_else(|| panic!("the chart has no {kind} {name}"))
    }

    pub(crate) fn agent(&self) -> &Value {
        self.get("DaemonSet", "bursar-agent")
    }

    /// The agent's configuration file.
    pub(crate) fn agent_config(&self) -> &str {
        let env = &pod_spec(self.agent())["containers"][0]["env"];
        let mut env = env.as_array().unwrap().iter();
        let config = env.find(|variable| variable["name"] == "BURSAR_CONFIG");
        config.unwrap()["value"].as_str().unwrap()
    }

    pub(crate) fn fdstore(&self) -> &Value {
        self.get("DaemonSet", "bursar-fdstore")
    }

    pub(crate) fn relay(&self) -> &Value {
        self.get("DaemonSet", "bursar-relay")
    }

    pub(crate) fn operator(&self) -> &Value {
        self.get("Deployment", "bursar-operator")
    }

    /// The specs of all pods: of the workloads and of `helm test`.
    pub(crate) fn pod_specs(&self) -> Vec<&Value> {
        let workloads = self.of_kind("DaemonSet").chain(self.of_kind("Deployment"));
        let specs = workloads.map(pod_spec);
        specs
            .chain(self.of_kind("Pod").map(|pod| &pod["spec"]))
            .collect()
    }
}

/// The spec of a workload's pods.
pub(crate) fn pod_spec(workload: &Value) -> &Value {
    &workload["spec"]["template"]["spec"]
}

/// The arguments of a workload's container.
pub(crate) fn arguments(workload: &Value) -> Vec<&str> {
    let arguments = pod_spec(workload)["containers"][0]["args"]
        .as_array()
        .unwrap();
    arguments.iter().filter_map(Value::as_str).collect()
}
