//! Describes the node in a few words for the columns of `kubectl get gpunodes`. Pure.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use bursar_crds::gpu_node::NodeSummary;
use bursar_crds::numbers::to_i32;
use bursar_ledger::units::{Bytes, PodUid, Quanta};

use super::report::{GpuHealth, GpuReport, NodeReport};

/// The most pods in the text of memory that is set aside.
const MAX_SET_ASIDE: usize = 2;
/// The most generations in the text; a node without MIG has at most 16 GPUs.
const MAX_GENERATIONS: usize = 16;
/// The most models in the text; a node has one, rarely two.
const MAX_MODELS: usize = 3;
/// The longest name of a model in the text.
const MAX_MODEL_LENGTH: usize = 48;

/// Returns the summary of `report`.
pub(crate) fn summarize(report: &NodeReport) -> NodeSummary {
    let memory = &report.device_memory;
    let bytes = |quanta: Quanta| quanta.bytes(report.quantum);
    let (free, largest_free) = match report.gpus.is_empty() {
        true => ("-".to_owned(), "-".to_owned()),
        false => (
            format!(
                "{} of {} GiB",
                gib(bytes(memory.free)),
                gib(bytes(memory.allocatable))
            ),
            format!("{} GiB", gib(bytes(memory.largest_free))),
        ),
    };
    NodeSummary {
        gpus: gpus(&report.gpus),
        free,
        largest_free,
        set_aside: set_aside(report),
        generations: generations(&report.gpus),
        waiting: to_i32(report.waiting.len()),
        faults: to_i32(report.faults.len()),
        not_enforced: to_i32(report.not_enforced.len()),
    }
}

/// The number of GPUs of each model, and the number of unhealthy ones.
fn gpus(gpus: &[GpuReport]) -> String {
    let mut models: BTreeMap<&str, usize> = BTreeMap::new();
    for gpu in gpus {
        let model = &gpu.gpu.model;
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
    let is_unhealthy = |gpu: &&GpuReport| gpu.health != GpuHealth::Healthy;
    match gpus.iter().filter(is_unhealthy).count() {
        0 => {}
        ill => parts.push(format!("{ill} unhealthy")),
    }
    parts.join(", ")
}

/// The generation of each GPU, or one number if all are equal.
fn generations(gpus: &[GpuReport]) -> String {
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
fn set_aside(report: &NodeReport) -> String {
    let mut pods: BTreeMap<&PodUid, Quanta> = BTreeMap::new();
    for (pod, quanta) in report.gpus.iter().flat_map(|gpu| &gpu.memory.set_aside) {
        *pods.entry(pod).or_default() += *quanta;
    }
    let mut pods: Vec<_> = pods.into_iter().collect();
    pods.sort_by_key(|(pod, quanta)| (Reverse(*quanta), *pod));
    let further = pods.len().saturating_sub(MAX_SET_ASIDE);
    let part = |(pod, quanta): &(&PodUid, Quanta)| {
        let known = report.pod_names.get(*pod);
        let name = known.map_or_else(|| pod.to_string(), ToString::to_string);
        format!("{} GiB for {name}", gib(quanta.bytes(report.quantum)))
    };
    let mut parts: Vec<String> = pods.iter().take(MAX_SET_ASIDE).map(part).collect();
    if further > 0 {
        parts.push(format!("and for {further} more pods"));
    }
    parts.join(", ")
}

/// GiB with as many digits as a quantum needs: `15`, `79.5`, `0.25`.
fn gib(Bytes(bytes): Bytes) -> String {
    let hundredths = u128::from(bytes) * 100 / (1 << 30);
    let text = format!("{}.{:02}", hundredths / 100, hundredths % 100);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use bursar_gpu::Gpu;
    use bursar_ledger::units::Quantum;
    use bursar_node::checkpoint_state::PodName;

    use super::*;
    use crate::fixtures::report;

    #[test]
    fn node_with_two_gpus_has_two_in_its_column() {
        let mut report = report();
        report.device_memory.free = Quanta(10);
        report.device_memory.largest_free = Quanta(6);
        let summary = summarize(&report);
        assert_eq!(summary.gpus, "2x Simulated");
        assert_eq!(summary.free, "10 of 32 GiB");
        assert_eq!(summary.largest_free, "6 GiB");
    }

    #[test]
    fn generations_are_one_number_unless_they_differ() {
        let mut report = report();
        assert_eq!(summarize(&report).generations, "1");
        report.gpus[0].generation = 3;
        assert_eq!(summarize(&report).generations, "3,1");
        report.gpus = vec![report.gpus[0].clone(); 112];
        report.gpus[111].generation = 1 << 53;
        for gpu in &mut report.gpus {
            gpu.generation += (1 << 53) - 3;
        }
        let text = summarize(&report).generations;
        assert!(text.ends_with(",...") && text.len() <= 512, "{text}");
        report.gpus.clear();
        assert_eq!(summarize(&report).generations, "");
    }

    #[test]
    fn amounts_are_gib_whatever_the_quantum() {
        let mut report = report();
        report.quantum = Quantum::Mib256;
        report.device_memory.free = Quanta(1);
        report.device_memory.largest_free = Quanta(62);
        let summary = summarize(&report);
        assert_eq!(summary.free, "0.25 of 8 GiB");
        assert_eq!(summary.largest_free, "15.5 GiB");
    }

    #[test]
    fn unhealthy_gpus_and_several_models_are_named() {
        let mut report = report();
        report.gpus[0].gpu.model = "NVIDIA H100 80GB HBM3".into();
        report.gpus[0].health = GpuHealth::Unhealthy {
            reason: "Xid79".into(),
        };
        assert_eq!(
            summarize(&report).gpus,
            "1x H100 80GB HBM3, 1x Simulated, 1 unhealthy"
        );
    }

    #[test]
    fn node_without_gpus_has_no_amounts() {
        let mut report = report();
        report.gpus.clear();
        let summary = summarize(&report);
        assert_eq!(
            (summary.gpus.as_str(), summary.free.as_str()),
            ("none", "-")
        );
    }

    #[test]
    fn memory_that_is_set_aside_has_the_pods_in_its_column() {
        let uid = |text: &str| text.parse::<PodUid>().unwrap();
        let mut report = report();
        assert_eq!(summarize(&report).set_aside, "");
        let name = PodName {
            namespace: "team-b".into(),
            name: "train".into(),
        };
        report.pod_names.insert(uid("b"), name);
        report.gpus[0].memory.set_aside = [(uid("a"), Quanta(2)), (uid("b"), Quanta(12))].into();
        report.gpus[1].memory.set_aside = [(uid("a"), Quanta(1))].into();
        assert_eq!(
            summarize(&report).set_aside,
            "12 GiB for team-b/train, 3 GiB for a"
        );
        let longest = PodName {
            namespace: "n".repeat(63),
            name: "p".repeat(253),
        };
        for number in 0..112 {
            report
                .pod_names
                .insert(uid(&format!("{number:04}")), longest.clone());
            let pod = (uid(&format!("{number:04}")), Quanta(16));
            report.gpus[1].memory.set_aside.extend([pod]);
        }
        let text = summarize(&report).set_aside;
        assert!(text.ends_with(", and for 112 more pods"), "{text}");
        assert!(text.len() <= 1024);
    }

    #[test]
    fn text_is_bounded_when_models_are_many_and_long() {
        let mut report = report();
        let gpu = report.gpus[0].clone();
        let models = (0..40).map(|number| format!("{number}{}", "ü".repeat(200)));
        let with_model = |model| GpuReport {
            gpu: Gpu {
                model,
                ..gpu.gpu.clone()
            },
            ..gpu.clone()
        };
        report.gpus = models.map(with_model).collect();
        assert!(summarize(&report).gpus.len() <= 256);
    }
}
