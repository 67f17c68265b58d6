//! Removes what another scheduler or device plugin needs.

use serde_yaml_ng::{Mapping, Value};

use super::super::Document;
use super::{at, elements, mapping};

/// Schedulers that other ways to share GPUs bring along.
const SCHEDULERS: [&str; 3] = ["hami-scheduler", "kai-scheduler", "volcano"];

/// Names of NVIDIA's runtime.
const RUNTIME_CLASSES: [&str; 3] = ["nvidia", "nvidia-cdi", "nvidia-legacy"];

/// Takes out what other ways to share GPUs need and Bursar does not.
pub(super) fn strip(template: &mut Value, document: &mut Document) {
    for (field, names) in [
        ("schedulerName", &SCHEDULERS[..]),
        ("runtimeClassName", &RUNTIME_CLASSES[..]),
    ] {
        let value = template["spec"][field]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        if names.contains(&value.as_str())
            && let Some(spec) = mapping(template, &["spec"])
        {
            spec.remove(field);
            document.note(format!("{field}: {value} taken out"));
        }
    }
    for list in ["initContainers", "containers"] {
        for container in elements(template, &["spec", list]) {
            strip_environment(container, document);
        }
    }
    for field in ["annotations", "labels"] {
        let Some(all) = mapping(template, &["metadata", field]) else {
            continue;
        };
        for name in ["hami.io/webhook", "kai.scheduler/queue", "runai/queue"] {
            if all.remove(name).is_some() {
                document.note(format!("{field} {name} taken out"));
            }
        }
        if all.is_empty()
            && let Some(metadata) = mapping(template, &["metadata"])
        {
            metadata.remove(field);
        }
    }
    if template["metadata"]
        .as_mapping()
        .is_some_and(Mapping::is_empty)
        && let Some(template) = template.as_mapping_mut()
    {
        template.remove("metadata");
    }
}

/// Takes out variables that would give the container every GPU, or that only MPS reads.
fn strip_environment(container: &mut Value, document: &mut Document) {
    const VARIABLES: [&str; 5] = [
        "NVIDIA_VISIBLE_DEVICES",
        "CUDA_MPS_PIPE_DIRECTORY",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        "CUDA_DEVICE_MEMORY_LIMIT",
    ];
    let Some(variables) = at(container, &["env"]).and_then(Value::as_sequence_mut) else {
        return;
    };
    variables.retain(|variable| {
        let name = variable["name"].as_str().unwrap_or_default();
        let is_removed = VARIABLES.contains(&name);
        if is_removed {
            document.note(format!("variable {name} taken out"));
        }
        !is_removed
    });
    if variables.is_empty()
        && let Some(container) = container.as_mapping_mut()
    {
        container.remove("env");
    }
}
