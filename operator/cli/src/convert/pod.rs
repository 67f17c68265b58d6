//! Rewrites pods and the templates of workloads.

mod strip;

use serde_yaml_ng::{Mapping, Value};

use super::{Assumptions, ConvertError, Document, number};
use strip::strip;

const MIB: u64 = 1 << 20;
/// The annotation of a container that is spread over several GPUs.
const GPUS: &str = "bursar.dev/gpus";
/// The deepest path from an object to its pods: a CronJob's.
const TEMPLATES: [&[&str]; 3] = [
    &["spec", "jobTemplate", "spec", "template"],
    &["spec", "template"],
    &[],
];

/// Annotations that choose GPUs by a property.
const CHOOSING: [(&str, &str); 6] = [
    (
        "nvidia.com/use-gputype",
        "write a node selector, such as nvidia.com/gpu.product",
    ),
    (
        "nvidia.com/nouse-gputype",
        "write a node affinity, such as on nvidia.com/gpu.product",
    ),
    (
        "nvidia.com/use-gpuuuid",
        "Bursar chooses the GPU; take the annotation out",
    ),
    (
        "nvidia.com/nouse-gpuuuid",
        "drain the GPU with kubectl bursar drain, or take the annotation out",
    ),
    (
        "nvidia.com/vgpu-mode",
        "choose a node with or without MIG by its labels",
    ),
    (
        "hami.io/gpu-scheduler-policy",
        "Bursar places containers by free memory; take the annotation out",
    ),
];

/// A container's request for other resources than Bursar's, in terms of one GPU.
#[derive(Default)]
struct Request {
    gpus: Option<u64>,
    /// Bytes on each GPU.
    memory: Option<u64>,
}

/// Rewrites an object with pods. An object without pods is left as it is.
pub(super) fn convert(
    value: &mut Value,
    assumptions: Assumptions,
    document: &mut Document,
) -> Result<(), ConvertError> {
    for path in TEMPLATES {
        let template = path.iter().fold(&*value, |value, field| &value[*field]);
        if template["spec"]["containers"].is_sequence()
            && let Some(template) = at(value, path)
        {
            return convert_template(template, assumptions, document);
        }
    }
    document.note("has no pods: left as it is");
    Ok(())
}

fn convert_template(
    template: &mut Value,
    assumptions: Assumptions,
    document: &mut Document,
) -> Result<(), ConvertError> {
    let shared = pod_request(template, assumptions, document)?;
    let mut converted = Vec::new();
    for list in ["initContainers", "containers"] {
        for container in elements(template, &["spec", list]) {
            let gpus = convert_container(container, shared.as_ref(), assumptions, document)?;
            converted.extend(gpus.map(|gpus| (name(container), gpus)));
        }
    }
    // KAI has the request on the pod, whose first container gets it.
    if let Some(request) = shared.filter(|_| converted.is_empty())
        && let Some(container) = elements(template, &["spec", "containers"]).next()
    {
        let gpus = request.gpus.unwrap_or(1);
        set(
            container,
            request.memory.unwrap_or(0).saturating_mul(gpus),
            assumptions,
        );
        converted.push((name(container), gpus));
    }
    let Some(most_gpus) = converted.iter().map(|(_, gpus)| *gpus).max() else {
        document.note("requests no shared GPU: left as it is");
        return Ok(());
    };
    if most_gpus > 1 {
        insert(
            template,
            ["metadata", "annotations"],
            GPUS,
            most_gpus.to_string().into(),
        );
        for (container, _) in converted.iter().filter(|(_, gpus)| *gpus < most_gpus) {
            document.note(format!(
                "container {container}: spread over {most_gpus} GPUs as well: the annotation \
                 {GPUS} holds for all containers of a pod"
            ));
        }
    }
    strip(template, document);
    Ok(())
}

fn name(container: &Value) -> String {
    container["name"].as_str().unwrap_or_default().to_owned()
}

/// The value of a path of fields, if there is one.
pub(super) fn at<'a>(value: &'a mut Value, path: &[&str]) -> Option<&'a mut Value> {
    path.iter()
        .try_fold(value, |value, field| value.get_mut(*field))
}

/// The mapping of a path of fields, if there is one.
pub(super) fn mapping<'a>(value: &'a mut Value, path: &[&str]) -> Option<&'a mut Mapping> {
    at(value, path)?.as_mapping_mut()
}

/// The elements of a list of a path of fields.
fn elements<'a>(value: &'a mut Value, path: &[&str]) -> impl Iterator<Item = &'a mut Value> {
    at(value, path)
        .and_then(Value::as_sequence_mut)
        .into_iter()
        .flatten()
}

/// Sets a field two levels below a value, and makes the levels that are missing.
fn insert(value: &mut Value, path: [&str; 2], field: &str, new: Value) {
    let mut place = value;
    for level in path {
        if !place.is_mapping() {
            *place = Value::Mapping(Mapping::new());
        }
        // A mapping makes the entry of a field that it lacks.
        place = &mut place[level];
    }
    if !place.is_mapping() {
        *place = Value::Mapping(Mapping::new());
    }
    place[field] = new;
}

/// The request that KAI's annotations have, and refusals of annotations without a counterpart.
fn pod_request(
    template: &mut Value,
    assumptions: Assumptions,
    document: &mut Document,
) -> Result<Option<Request>, ConvertError> {
    let Some(annotations) = mapping(template, &["metadata", "annotations"]) else {
        return Ok(None);
    };
    for (name, remedy) in CHOOSING {
        if annotations.contains_key(name) {
            return Err(document.no_counterpart(format!("annotation {name}"), remedy));
        }
    }
    // A number of devices alone requests no memory.
    if !annotations.contains_key("gpu-fraction") && !annotations.contains_key("gpu-memory") {
        return Ok(None);
    }
    let fraction = take(annotations, "gpu-fraction");
    let memory = take(annotations, "gpu-memory");
    let count = take(annotations, "gpu-fraction-num-devices");
    let mut request = Request::default();
    if let Some(text) = &fraction {
        let expected = "a number between 0 and 1";
        let part: f64 = text
            .parse()
            .map_err(|_| document.wrong("annotation gpu-fraction", text, expected))?;
        if !(part > 0.0 && part <= 1.0) {
            return Err(document.wrong("annotation gpu-fraction", text, expected));
        }
        let all = assumptions
            .gpu_memory
            .ok_or_else(|| document.share_of_unknown("annotation gpu-fraction", false))?;
        request.memory = Some((all as f64 * part).ceil() as u64);
    }
    if let Some(text) = &memory {
        let mib: u64 = text
            .parse()
            .map_err(|_| document.wrong("annotation gpu-memory", text, "a number of MiB"))?;
        request.memory = Some(mib.saturating_mul(MIB));
    }
    if let Some(text) = &count {
        let count = text.parse().map_err(|_| {
            document.wrong(
                "annotation gpu-fraction-num-devices",
                text,
                "a number of GPUs",
            )
        })?;
        request.gpus = Some(count);
    }
    Ok(Some(request))
}

/// Takes an annotation out, as a text.
fn take(annotations: &mut Mapping, name: &str) -> Option<String> {
    let value = annotations.remove(name)?;
    let number = || value.as_f64().map(|number| number.to_string());
    let text = value.as_str().map(str::to_owned);
    Some(text.or_else(number).unwrap_or_default())
}

/// Takes out what a container requests of shared GPUs. Also returns the name of the resource that
/// counts the GPUs.
fn take_request(
    container: &mut Value,
    container_name: &str,
    assumptions: Assumptions,
    document: &Document,
) -> Result<(Request, Option<String>), ConvertError> {
    let mut found = Request::default();
    let mut share = None;
    for part in ["limits", "requests"] {
        let Some(resources) = mapping(container, &["resources", part]) else {
            continue;
        };
        let names: Vec<String> = resources
            .keys()
            .filter_map(Value::as_str)
            .map(str::to_owned)
            .collect();
        for name in names.iter().filter(|name| is_shared_gpu(name)) {
            let value = resources.remove(name.as_str()).unwrap_or_default();
            let field = format!("container {container_name}: {name}");
            let count = number(&value)
                .ok_or_else(|| document.wrong(&field, format!("{value:?}"), "a whole number"))?;
            match name.as_str() {
                "nvidia.com/gpu" | "nvidia.com/gpu.shared" => {
                    found.gpus = Some(count);
                    share = Some(name.clone());
                }
                "nvidia.com/gpumem" => found.memory = Some(count.saturating_mul(MIB)),
                "nvidia.com/gpumem-percentage" => {
                    if count > 100 {
                        return Err(document.wrong(&field, count.to_string(), "at most 100"));
                    }
                    let all = assumptions
                        .gpu_memory
                        .ok_or_else(|| document.share_of_unknown(&field, false))?;
                    found.memory = Some(all / 100 * count);
                }
                "nvidia.com/gpucores" | "nvidia.com/priority" => {
                    return Err(document
                        .no_counterpart(field, "Bursar does not limit computing; take it out"));
                }
                _ => {
                    return Err(document.no_counterpart(
                        field,
                        "a MIG instance is chosen by its size: write bursar.dev/gpu-memory-gib",
                    ));
                }
            }
        }
        if resources.is_empty()
            && let Some(all) = mapping(container, &["resources"])
        {
            all.remove(part);
        }
    }
    Ok((found, share))
}

/// Rewrites a container; `None` if it requests no GPU, else the number of GPUs.
fn convert_container(
    container: &mut Value,
    shared: Option<&Request>,
    assumptions: Assumptions,
    document: &mut Document,
) -> Result<Option<u64>, ConvertError> {
    let container_name = name(container);
    let (mut found, share) = take_request(container, &container_name, assumptions, document)?;
    if found.gpus.is_none() && found.memory.is_none() {
        return Ok(None);
    }
    if found.gpus == Some(0) {
        document.note(format!(
            "container {container_name}: requests 0 GPUs: left out"
        ));
        return Ok(None);
    }
    if let Some(shared) = shared {
        found.memory = found.memory.or(shared.memory);
    }
    let gpus = found.gpus.unwrap_or(1);
    let memory = match (found.memory, share) {
        (Some(memory), _) => memory.saturating_mul(gpus),
        (None, Some(name)) => {
            return replicas(
                container,
                &container_name,
                &name,
                gpus,
                assumptions,
                document,
            );
        }
        (None, None) => 0,
    };
    set(container, memory, assumptions);
    Ok(Some(gpus))
}

/// Rewrites replicas of a GPU that is shared by time-slicing or MPS. With one replica the request
/// counts whole GPUs.
fn replicas(
    container: &mut Value,
    container_name: &str,
    resource: &str,
    count: u64,
    assumptions: Assumptions,
    document: &mut Document,
) -> Result<Option<u64>, ConvertError> {
    let field = format!("container {container_name}: {resource}");
    let missing = |replicas| document.share_of_unknown(&field, replicas);
    let all = assumptions
        .gpu_memory
        .ok_or_else(|| missing(assumptions.replicas.is_none()))?;
    let replicas = assumptions.replicas.ok_or_else(|| missing(true))?;
    set(
        container,
        (all / replicas).saturating_mul(count),
        assumptions,
    );
    if replicas == 1 {
        return Ok(Some(count));
    }
    document.note(format!(
        "container {container_name}: a replica is taken for 1/{replicas} of a GPU; the limit is the \
         container's, and not each process's"
    ));
    Ok(Some(1))
}

fn is_shared_gpu(name: &str) -> bool {
    matches!(
        name,
        "nvidia.com/gpu"
            | "nvidia.com/gpu.shared"
            | "nvidia.com/gpumem"
            | "nvidia.com/gpumem-percentage"
            | "nvidia.com/gpucores"
            | "nvidia.com/priority"
    ) || name.starts_with("nvidia.com/mig-")
}

/// Sets the limit of a container to an amount, in whole quanta, rounded up.
fn set(container: &mut Value, bytes: u64, assumptions: Assumptions) {
    let quantum = assumptions.quantum;
    let quanta = bytes.div_ceil(quantum.bytes()).max(1);
    let resource = quantum.device_memory();
    insert(container, ["resources", "limits"], resource, quanta.into());
}
