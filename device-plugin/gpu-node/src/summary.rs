//! Describes the node in a few words for the columns of `kubectl get gpunodes`. Pure.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use bursar_crds::gpu_node::{GpuNodeStatus, GpuPod, GpuStatus, HealthStatus, NodeSummary};
use bursar_crds::numbers::to_i32;
use bursar_ledger::units::Quantum;

/// The most pods in the text of memory that is set aside.
const MAX_SET_ASIDE: usize = 2;
/// The most generations in the text; a node without MIG has at most 16 GPUs.
const MAX_GENERATIONS: usize = 16;
/// The most models in the text; a node has one, rarely two.
const MAX_MODELS: usize = 3;
/// The longest name of a model in the text.
const MAX_MODEL_LENGTH: usize = 48;

/// Returns the summary of a status with whole lists.
pub(crate) fn summarize(status: &GpuNodeStatus, quantum: Quantum) -> NodeSummary {
    let memory = &status.device_memory;
    let gib = |quanta: i32| gib(u64::try_from(quanta).unwrap_or(0) * quantum.bytes());
    let (free, largest_free) = match status.gpus.is_empty() {
        true => ("-".to_owned(), "-".to_owned()),
        false => (
            format!("{} of {} GiB", gib(memory.free), gib(memory.allocatable)),
            format!("{} GiB", gib(memory.largest_free)),
        ),
    };
    NodeSummary {
        gpus: gpus(&status.gpus),
        free,
        largest_free,
        set_aside: set_aside(&status.gpus, gib),
        generations: generations(&status.gpus),
        waiting: to_i32(status.waiting.len()),
        faults: to_i32(status.faults.len()),
        not_enforced: status.not_enforced_count,
    }
}

/// The number of GPUs of each model, and the number of unhealthy ones.
fn gpus(gpus: &[GpuStatus]) -> String {
    let mut models: BTreeMap<&str, usize> = BTreeMap::new();
    for gpu in gpus {
        let model = &gpu.model;
        let model = model.strip_prefix("NVIDIA ").unwrap_or(model);
        let model = &model[..model.floor_char_boundary(MAX_MODEL_LENGTH)];
        *models.entry(model).or_default() += 1;
    }
    if models.is_empty() {
        return "none".to_owned();
    }
    let further = models.len().saturating_sub(MAX_MODELS);
    let mut parts: Vec<String> = models
        .iter()
        .take(MAX_MODELS)
        .map(|(model, count)| format!("{count}x {model}"))
        .collect();
    if further > 0 {
        parts.push(format!("{further} more models"));
    }
    let is_unhealthy = |gpu: &&GpuStatus| gpu.health.status != HealthStatus::Healthy;
    match gpus.iter().filter(is_unhealthy).count() {
        0 => {}
        ill => parts.push(format!("{ill} unhealthy")),
    }
    parts.join(", ")
}

/// The generation of each GPU, or one number if all are equal.
fn generations(gpus: &[GpuStatus]) -> String {
    let numbers: Vec<String> = gpus
        .iter()
        .map(|gpu| gpu.generation.to_string())
        .take(MAX_GENERATIONS)
        .collect();
    match gpus.split_first() {
        Some((first, rest)) if rest.iter().all(|gpu| gpu.generation == first.generation) => {
            first.generation.to_string()
        }
        _ if gpus.len() > MAX_GENERATIONS => format!("{},...", numbers.join(",")),
        _ => numbers.join(","),
    }
}

/// The memory that is set aside on all GPUs together, for the pods with the most.
fn set_aside(gpus: &[GpuStatus], gib: impl Fn(i32) -> String) -> String {
    let mut pods: BTreeMap<&str, (i32, &GpuPod)> = BTreeMap::new();
    for pod in gpus.iter().flat_map(|gpu| &gpu.set_aside) {
        pods.entry(&pod.uid).or_insert((0, pod)).0 += pod.quanta;
    }
    let mut pods: Vec<_> = pods.into_values().collect();
    pods.sort_by_key(|(quanta, pod)| (Reverse(*quanta), &pod.uid));
    let further = pods.len().saturating_sub(MAX_SET_ASIDE);
    let part = |(quanta, pod): &(i32, &GpuPod)| {
        let name = match pod.name.as_str() {
            "" => pod.uid.clone(),
            name => format!("{}/{name}", pod.namespace),
        };
        format!("{} GiB for {name}", gib(*quanta))
    };
    let mut parts: Vec<String> = pods.iter().take(MAX_SET_ASIDE).map(part).collect();
    if further > 0 {
        parts.push(format!("and for {further} more pods"));
    }
    parts.join(", ")
}

/// GiB with as many digits as a quantum needs: `15`, `79.5`, `0.25`.
fn gib(bytes: u64) -> String {
    let hundredths = u128::from(bytes) * 100 / (1 << 30);
    let text = format!("{}.{:02}", hundredths / 100, hundredths % 100);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::report;

    fn summarize(status: &GpuNodeStatus) -> NodeSummary {
        super::summarize(status, Quantum::Gib1)
    }

    fn set_aside(uid: &str, name: &str, quanta: i32) -> GpuPod {
        GpuPod {
            uid: uid.to_owned(),
            namespace: "team-b".into(),
            name: name.to_owned(),
            quanta,
        }
    }

    #[test]
    fn node_with_two_gpus_has_two_in_its_column() {
        let mut status = report().status;
        status.device_memory.free = 10;
        status.device_memory.largest_free = 6;
        let summary = summarize(&status);
        assert_eq!(summary.gpus, "2x Simulated");
        assert_eq!(summary.free, "10 of 32 GiB");
        assert_eq!(summary.largest_free, "6 GiB");
    }

    #[test]
    fn generations_are_one_number_unless_they_differ() {
        let mut status = report().status;
        assert_eq!(summarize(&status).generations, "1");
        status.gpus[0].generation = 3;
        assert_eq!(summarize(&status).generations, "3,1");
        status.gpus = vec![status.gpus[0].clone(); 112];
        status.gpus[111].generation = 1 << 53;
        for gpu in &mut status.gpus {
            gpu.generation += (1 << 53) - 3;
        }
        let text = summarize(&status).generations;
        assert!(text.ends_with(",...") && text.len() <= 512, "{text}");
        status.gpus.clear();
        assert_eq!(summarize(&status).generations, "");
    }

    #[test]
    fn amounts_are_gib_whatever_the_quantum() {
        let mut status = report().status;
        status.device_memory.free = 1;
        status.device_memory.largest_free = 62;
        let summary = super::summarize(&status, Quantum::Mib256);
        assert_eq!(summary.free, "0.25 of 8 GiB");
        assert_eq!(summary.largest_free, "15.5 GiB");
    }

    #[test]
    fn unhealthy_gpus_and_several_models_are_named() {
        let mut status = report().status;
        status.gpus[0].model = "NVIDIA H100 80GB HBM3".into();
        status.gpus[0].health.status = HealthStatus::Unhealthy;
        assert_eq!(
            summarize(&status).gpus,
            "1x H100 80GB HBM3, 1x Simulated, 1 unhealthy"
        );
    }

    #[test]
    fn node_without_gpus_has_no_amounts() {
        let mut status = report().status;
        status.gpus.clear();
        let summary = summarize(&status);
        assert_eq!(
            (summary.gpus.as_str(), summary.free.as_str()),
            ("none", "-")
        );
    }

    #[test]
    fn memory_that_is_set_aside_has_the_pods_in_its_column() {
        let mut status = report().status;
        assert_eq!(summarize(&status).set_aside, "");
        status.gpus[0].set_aside = vec![set_aside("a", "", 2), set_aside("b", "train", 12)];
        status.gpus[1].set_aside = vec![set_aside("a", "", 1)];
        assert_eq!(
            summarize(&status).set_aside,
            "12 GiB for team-b/train, 3 GiB for a"
        );
        let longest = "p".repeat(253);
        for number in 0..112 {
            let pod = GpuPod {
                namespace: "n".repeat(63),
                ..set_aside(&format!("{number:04}"), &longest, 16)
            };
            status.gpus[1].set_aside.push(pod);
        }
        let text = summarize(&status).set_aside;
        assert!(text.ends_with(", and for 112 more pods"), "{text}");
        assert!(text.len() <= 1024);
    }

    #[test]
    fn text_is_bounded_when_models_are_many_and_long() {
        let mut status = report().status;
        let gpu = status.gpus[0].clone();
        let models = (0..40).map(|number| format!("{number}{}", "ü".repeat(200)));
        let with_model = |model| GpuStatus {
            model,
            ..gpu.clone()
        };
        status.gpus = models.map(with_model).collect();
        assert!(summarize(&status).gpus.len() <= 256);
    }
}
