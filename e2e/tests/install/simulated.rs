//! Checks the files of values: for clusters without GPUs, and for NVIDIA's driver container.

use std::fs;

use serde_json::{Value, json};

use crate::render::{Objects, arguments, chart, pod_spec, render};

/// Renders the chart with a file of values and these values.
fn with_file(file: &str, more: &[&str]) -> Objects {
    let text = fs::read_to_string(chart().join(file)).unwrap();
    let values: Value = serde_yaml_ng::from_str(&text).unwrap();
    let values = values.as_object().unwrap().iter();
    let values: Vec<String> = values
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    let values: Vec<&str> = values.iter().map(String::as_str).collect();
    render(&[&values, more].concat())
}

fn simulated(more: &[&str]) -> Objects {
    with_file("values-simulated.yaml", more)
}

fn host_path<'a>(workload: &'a Value, volume: &str) -> &'a str {
    let volumes = pod_spec(workload)["volumes"].as_array().unwrap();
    let named = volumes.iter().find(|found| found["name"] == volume);
    named.unwrap()["hostPath"]["path"].as_str().unwrap()
}

#[test]
fn agents_read_the_folder_of_the_simulated_driver() {
    let objects = simulated(&[]);
    let driver = objects.get("DaemonSet", "bursar-simulated-driver");
    let folder = host_path(driver, "folder");
    assert!(arguments(driver).contains(&format!("--dir={folder}").as_str()));
    let agent = objects.agent();
    assert_eq!(host_path(agent, "simulated-driver"), folder);
    assert_eq!(host_path(agent, "driver-root"), format!("{folder}/driver"));
    assert_eq!(host_path(agent, "dev-root"), format!("{folder}/dev"));
    let modules = host_path(agent, "simulated-modules");
    assert_eq!(modules, format!("{folder}/sys/module"));
    let mount = format!("host-path = \"{folder}\"\n    container-path");
    let config = objects.agent_config().replace('\n', "\n    ");
    assert!(config.contains(&mount), "{config}");
    // Both run on every node, which has no label of a GPU, unless an admin keeps agents off it.
    for workload in [driver, agent] {
        let affinity = &pod_spec(workload)["affinity"]["nodeAffinity"];
        let required = &affinity["requiredDuringSchedulingIgnoredDuringExecution"];
        let terms = required["nodeSelectorTerms"].as_array().unwrap();
        let [term] = terms.as_slice() else {
            panic!("{terms:?}");
        };
        let kept_out =
            json!({ "key": "bursar.dev/agent", "operator": "NotIn", "values": ["false"] });
        assert_eq!(term["matchExpressions"], json!([kept_out]));
    }
}

#[test]
fn simulated_gpus_are_as_many_and_as_large_as_chosen() {
    let objects = simulated(&[r#"simulatedDriver={"enabled":true,"gpus":3,"memory":"8Gi"}"#]);
    let config = &objects.get("ConfigMap", "bursar-simulated-driver")["data"]["config.toml"];
    let config = config.as_str().unwrap();
    assert_eq!(config.matches("memory = \"8Gi\"").count(), 3, "{config}");
    assert!(config.contains("minor = 2"), "{config}");
}

#[test]
fn driver_is_simulated_only_on_request() {
    let objects = render(&[]);
    assert!(
        objects
            .find("DaemonSet", "bursar-simulated-driver")
            .is_none()
    );
}

#[test]
fn driver_containers_files_are_read_and_its_upgrades_followed() {
    let objects = with_file("values-gpu-operator.yaml", &[]);
    let agent = objects.agent();
    assert_eq!(host_path(agent, "driver-root"), "/run/nvidia/driver");
    assert_eq!(host_path(agent, "dev-root"), "/run/nvidia/driver/dev");
    let config = objects.agent_config();
    let line = "host-root = \"/run/nvidia/driver\"";
    assert!(config.contains(line), "{config}");
    let line = "refuse-beside-other-plugins = true";
    assert!(config.contains(line) && render(&[]).agent_config().contains(line));
    let affinity = pod_spec(agent)["affinity"].to_string();
    assert!(affinity.contains("nvidia.com/gpu.present"), "{affinity}");
    let follows = |objects: &Objects, value: &str| {
        let argument = format!("--drain-for-nvidia={value}");
        arguments(objects.operator()).contains(&argument.as_str())
    };
    assert!(follows(&objects, "true") && follows(&render(&[]), "true"));
    let off = render(&[r#"maintenance={"drainForNvidia":false}"#]);
    assert!(follows(&off, "false"));
}

#[test]
fn host_programs_are_allowed_by_name() {
    let objects = render(&[r#"audit={"hostPrograms":["Xorg","nvidia-persistenced"]}"#]);
    let config = objects.agent_config();
    let line = r#"host-programs = ["Xorg","nvidia-persistenced"]"#;
    assert!(config.contains(line), "{config}");
    let by_default = render(&[]);
    let config = by_default.agent_config();
    assert!(config.contains("host-programs = []"), "{config}");
}
