//! Plans node labels, which say what one GPU of a node could give to a pod now.
//!
//! While much changes, labels are approximate: a value that enters another bucket is written at
//! once, a smaller change only after it has lasted. Without changes labels are exact.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use bursar_crds::Quantum;
use bursar_crds::resources::{largest_free_label, largest_gpu_label, largest_reclaimable_label};

use super::{NodeRef, PlacementOptions, Step};
use crate::cluster::facts::node::{Gpu, GpuFacts};
use crate::cluster::facts::pod::PriorityKind;
use crate::cluster::facts::snapshot::Snapshot;
use crate::placement::history::{History, NodeLabels, Uptime};
use crate::quanta::Quanta;

/// How long a small change has to last before it is written.
const STABLE_FOR: Duration = Duration::from_secs(10);

/// The nodes to label now, the most wrong first, within the rate.
pub(super) fn plan(
    snapshot: &Snapshot<'_>,
    history: &mut History,
    options: &PlacementOptions,
    now: Uptime,
) -> Option<Step> {
    let names = label_names(options.quantum);
    // An operator with another quantum wrote these.
    let others = Quantum::ALL.into_iter();
    let others = others.filter(|quantum| *quantum != options.quantum);
    let old_names: Vec<String> = others.flat_map(label_names).collect();
    let (mut wrong, mut since) = (Vec::new(), BTreeMap::new());
    for (name, node) in &snapshot.nodes {
        let gpus = snapshot.gpu_nodes.get(name);
        let values = gpus
            .filter(|gpus| !gpus.gpus.is_empty())
            .map_or([const { None }; 3], |gpus| {
                label_values(snapshot, gpus).map(Some)
            });
        let current_names = names.iter().cloned().zip(values);
        let old_names = old_names.iter().cloned().map(|name| (name, None));
        let desired: NodeLabels = old_names.chain(current_names).collect();
        let current = |label: &String| node.labels.get(label);
        if desired
            .iter()
            .all(|(label, value)| current(label) == value.as_ref())
        {
            continue;
        }
        let first = history.outdated_labels.get(*name).copied().unwrap_or(now);
        since.insert((*name).to_owned(), first);
        let changes_bucket = desired
            .iter()
            .any(|(label, value)| bucket(current(label)) != bucket(value.as_ref()));
        // The watch is late, or another writer keeps restoring its own value.
        let written = history.written_labels.get(*name);
        let written = written
            .is_some_and(|(labels, at)| *labels == desired && now.saturating_sub(*at) < STABLE_FOR);
        if !written && (changes_bucket || now.saturating_sub(first) >= STABLE_FOR) {
            let node = NodeRef {
                name: (*name).to_owned(),
                uid: node.uid.clone(),
            };
            wrong.push((Reverse(changes_bucket), first, node, desired));
        }
    }
    history
        .written_labels
        .retain(|node, _| since.contains_key(node));
    history.outdated_labels = since;
    wrong.sort_by(|a, b| (a.0, a.1, &a.2.name).cmp(&(b.0, b.1, &b.2.name)));
    wrong.truncate(history.available_label_writes(now));
    let nodes = wrong.into_iter().map(|(_, _, node, labels)| (node, labels));
    let nodes: Vec<_> = nodes.collect();
    (!nodes.is_empty()).then_some(Step::Label { nodes })
}

fn label_names(quantum: Quantum) -> [String; 3] {
    [
        largest_free_label(quantum),
        largest_reclaimable_label(quantum),
        largest_gpu_label(quantum),
    ]
}

fn label_values(snapshot: &Snapshot<'_>, gpus: &GpuFacts) -> [String; 3] {
    let most = |of: &dyn Fn(&Gpu) -> Quanta| gpus.gpus.iter().map(of).max().unwrap_or_default();
    let values = [
        most(&|gpu| gpu.largest_free),
        most(&|gpu| gpu.largest_free.plus(reclaimable(snapshot, gpu))),
        most(&|gpu| gpu.capacity),
    ];
    values.map(|value| value.count().to_string())
}

/// The memory that borrowers would return. None on a reserved GPU, because another pod gets it.
fn reclaimable(snapshot: &Snapshot<'_>, gpu: &Gpu) -> Quanta {
    if gpu.reserved_for.is_some() {
        return Quanta::ZERO;
    }
    let comes_back = |uid: &str| {
        let pod = snapshot.pod(uid);
        pod.is_none_or(|pod| pod.kind == PriorityKind::Borrowed || pod.terminating)
    };
    let pods = gpu.pods.iter().filter(|(uid, _)| comes_back(uid));
    pods.map(|(_, quanta)| *quanta).sum()
}

/// The bucket of a value. Values in one bucket differ by a quarter at most; small values and
/// non-numbers have buckets of their own.
fn bucket(value: Option<&String>) -> Option<u64> {
    let value: u64 = value?.parse().ok()?;
    if value < 8 {
        return Some(value);
    }
    let power = u64::from(value.ilog2());
    Some(power * 4 + (value >> (power - 2)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bucket_spans_a_quarter_at_most_and_zero_is_alone() {
        let bucket = |value: u64| bucket(Some(&value.to_string()));
        assert_ne!(bucket(0), bucket(1));
        assert_ne!(bucket(0), super::bucket(None));
        for value in 1..4096_u64 {
            let quarter = value + value / 4 + 1;
            assert!(bucket(value) <= bucket(value + 1), "{value}");
            assert!(bucket(value) < bucket(quarter), "{value} and {quarter}");
        }
    }
}
