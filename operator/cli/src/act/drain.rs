//! Decides which GPUs a drain adds or takes out, and what it costs.

use std::collections::BTreeSet;

use bursar_crds::GpuNode;
use bursar_crds::gpu_node::{GpuState, GpuStatus};
use serde_json::{Value, json};

use crate::amounts::{count, memory};
use crate::show::retained::rows;
use crate::show::{gpus, name};
use crate::snapshot::Snapshot;

/// The field manager of the operator's drains for NVIDIA's operators.
const OPERATOR: &str = "bursar-operator-drain";

/// Why the GPUs of a command cannot be found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GpuArgumentError {
    /// No GPU has that index or UUID.
    #[error("node {node} has no GPU {argument}: see `kubectl bursar gpus {node} -o wide`")]
    NotFound {
        /// The node.
        node: String,
        /// The argument.
        argument: String,
    },
    /// Several GPUs have a UUID that begins so.
    #[error("{argument} is the beginning of several UUIDs on node {node}: write more of it")]
    Ambiguous {
        /// The node.
        node: String,
        /// The argument.
        argument: String,
    },
    /// The node has no GPU.
    #[error("node {0} has no GPUs")]
    NoGpus(String),
}

/// The GPUs of a node that the arguments name: an index, a UUID, or its beginning.
///
/// # Errors
/// When an argument names no GPU, or several.
pub fn selected<'a>(
    node: &'a GpuNode,
    arguments: &[String],
) -> Result<Vec<&'a GpuStatus>, GpuArgumentError> {
    let all = node.status.as_ref().map_or(&[][..], |status| &status.gpus);
    if all.is_empty() {
        return Err(GpuArgumentError::NoGpus(name(node).to_owned()));
    }
    if arguments.is_empty() {
        return Ok(all.iter().collect());
    }
    let mut found = Vec::new();
    for argument in arguments {
        let by_name =
            |gpu: &&GpuStatus| gpus::index(node, gpu) == *argument || gpu.uuid == *argument;
        let mut matching: Vec<&GpuStatus> = all.iter().filter(by_name).collect();
        if matching.is_empty() {
            // A number is an index and never the beginning of a UUID, which begins with a word.
            matching = all
                .iter()
                .filter(|gpu| gpu.uuid.starts_with(argument.as_str()))
                .collect();
        }
        let (node, argument) = (name(node).to_owned(), argument.clone());
        match matching.as_slice() {
            [] => return Err(GpuArgumentError::NotFound { node, argument }),
            [gpu] => found.push(*gpu),
            _ => return Err(GpuArgumentError::Ambiguous { node, argument }),
        }
    }
    Ok(found)
}

/// The patch that drains these GPUs too; `None` if all are drained already.
pub fn drain_patch(node: &GpuNode, gpus: &[&GpuStatus]) -> Option<Value> {
    let before: BTreeSet<&str> = node.spec.drain.iter().map(String::as_str).collect();
    let mut after = before.clone();
    after.extend(gpus.iter().map(|gpu| gpu.uuid.as_str()));
    (after != before).then(|| patch(node, &after))
}

/// The UUIDs of the drains that the arguments name. A drain outlives its GPU's place in the status,
/// and that of a GPU with MIG instances never had one.
///
/// # Errors
/// When an argument names neither a drain nor a GPU, or several.
pub fn drained(node: &GpuNode, arguments: &[String]) -> Result<Vec<String>, GpuArgumentError> {
    let mut found = Vec::new();
    for argument in arguments {
        let drains = node.spec.drain.iter();
        let matching: Vec<&String> = match node.spec.drain.contains(argument) {
            true => vec![argument],
            false => drains.filter(|uuid| uuid.starts_with(argument)).collect(),
        };
        match matching.as_slice() {
            [] => {
                let gpus = selected(node, std::slice::from_ref(argument))?;
                found.extend(gpus.iter().map(|gpu| gpu.uuid.clone()));
            }
            [uuid] => found.push((*uuid).clone()),
            _ => {
                let (node, argument) = (name(node).to_owned(), argument.clone());
                return Err(GpuArgumentError::Ambiguous { node, argument });
            }
        }
    }
    Ok(found)
}

/// The command that ends the drain of a GPU. `None` where the operator drains it, which would do so
/// again at once.
pub fn undrain_command(node: &GpuNode, gpu: &GpuStatus) -> Option<String> {
    let entry = format!("v:{}", json!(gpu.uuid));
    let mut managers = node.metadata.managed_fields.iter().flatten();
    let is_of_operator = managers.any(|fields| {
        let spec = fields.fields_v1.as_ref().map(|fields| &fields.0["f:spec"]);
        fields.manager.as_deref() == Some(OPERATOR)
            && spec.is_some_and(|spec| spec["f:drain"].get(&entry).is_some())
    });
    // A GPU stands for its MIG instances, which the status lists in its place.
    let gpus = node.status.iter().flat_map(|status| &status.gpus);
    let gpus: BTreeSet<&str> = gpus.map(|gpu| gpu.uuid.as_str()).collect();
    let drains = node.spec.drain.iter().map(String::as_str);
    let of_parents: Vec<&str> = drains.filter(|uuid| !gpus.contains(uuid)).collect();
    let uuids = match node.spec.drain.contains(&gpu.uuid) || of_parents.is_empty() {
        true => gpu.uuid.clone(),
        false => of_parents.join(" "),
    };
    let command = || format!("kubectl bursar undrain {} {uuids}", name(node));
    (!is_of_operator).then(command)
}

/// The patch that ends the drain of these GPUs, or of all; `None` if none is drained.
pub fn undrain_patch(node: &GpuNode, gpus: Option<&[String]>) -> Option<Value> {
    let before: BTreeSet<&str> = node.spec.drain.iter().map(String::as_str).collect();
    let mut after = before.clone();
    match gpus {
        None => after.clear(),
        Some(gpus) => after.retain(|uuid| !gpus.iter().any(|gpu| gpu == uuid)),
    }
    (after != before).then(|| patch(node, &after))
}

fn patch(node: &GpuNode, drain: &BTreeSet<&str>) -> Value {
    json!({ "metadata": { "resourceVersion": node.metadata.resource_version }, "spec": { "drain": drain } })
}

/// The cost of a drain, as a sentence.
pub fn cost(snapshot: &Snapshot, node: &GpuNode, gpus: &[&GpuStatus]) -> String {
    let names = snapshot.pods_by_uid();
    let uids: BTreeSet<&str> = gpus
        .iter()
        .flat_map(|gpu| &gpu.pods)
        .map(|pod| pod.uid.as_str())
        .collect();
    let named: Vec<String> = uids
        .iter()
        .map(|uid| {
            names
                .get(uid)
                .map_or_else(|| format!("the pod with UID {uid}"), |pod| pod.key())
        })
        .collect();
    let mut text = match named.len() {
        0 => "No pod has memory there.".to_owned(),
        number => format!(
            "{} memory there, whose processes will be killed: {}.",
            if number == 1 {
                "1 pod has".to_owned()
            } else {
                format!("{} have", count(number, "pod"))
            },
            named.join(", ")
        ),
    };
    let retained = rows(snapshot);
    let of_gpus = retained
        .iter()
        .filter(|row| row.node == name(node) && gpus.iter().any(|gpu| gpu.uuid == row.uuid));
    let leases: Vec<(u64, u64)> = of_gpus.clone().filter_map(|row| row.leases).collect();
    if leases.len() < of_gpus.count() {
        text.push_str(" Retained memory there will be lost; its amount could not be read.");
    } else {
        let (number, bytes) = leases
            .iter()
            .fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
        if number > 0 {
            let leases = count(usize::try_from(number).unwrap_or(usize::MAX), "lease");
            text.push_str(&format!(
                " Retained memory there will be lost: {leases}, {}.",
                memory(bytes)
            ));
        }
    }
    text
}

/// Why these GPUs are not drained yet: the state of each, or that the agent has not seen the order.
pub fn not_drained(node: &GpuNode, uuids: &[String]) -> Vec<String> {
    let status = node.status.as_ref();
    // The status of an earlier drain says `Drained` too.
    let newest = status.filter(|status| status.observed_generation >= node.metadata.generation);
    let Some(status) = newest else {
        return vec!["the agent has not seen the order".to_owned()];
    };
    let reason = |uuid: &String| {
        let Some(gpu) = status.gpus.iter().find(|gpu| gpu.uuid == *uuid) else {
            return Some(format!("the agent does not report {uuid}"));
        };
        let is_drained = gpu.state == GpuState::Draining && gpu.health.reason == "Drained";
        (!is_drained).then(|| {
            format!(
                "GPU {} is {:?} ({})",
                gpus::index(node, gpu),
                gpu.state,
                gpu.health.reason
            )
        })
    };
    uuids.iter().filter_map(reason).collect()
}
