//! Decides what the holder of a GPU is told: pure.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};

use bursar_ledger::GpuView;
use bursar_ledger::units::PodUid;

use crate::holder::PodOrder;
use crate::turns::Weight;

/// The processes of each pod that may have groups on the GPU.
pub(crate) type Processes = BTreeMap<PodUid, BTreeSet<u32>>;

/// The pods of a GPU for its holder. Processes that the driver `listed` and that belong to none of
/// them are a pod of their own, without a name and a weight.
pub(crate) fn orders(
    view: &GpuView,
    processes: &Processes,
    listed: &BTreeSet<u32>,
) -> Vec<PodOrder> {
    let order = |pod: &PodUid| PodOrder {
        uid: pod.to_string(),
        weight: weight_of(view, pod),
        processes: processes.get(pod).cloned().unwrap_or_default(),
    };
    let known: BTreeSet<u32> = processes.values().flatten().copied().collect();
    let others = PodOrder {
        uid: String::new(),
        weight: None,
        processes: listed.difference(&known).copied().collect(),
    };
    let pods = view.pods.keys().map(order);
    pods.chain((!others.processes.is_empty()).then_some(others))
        .collect()
}

fn weight_of(view: &GpuView, pod: &PodUid) -> Option<Weight> {
    Weight::try_from(*view.weights.get(pod)?).ok()
}

#[cfg(test)]
mod tests {
    use bursar_ledger::units::Quanta;

    use super::*;

    fn uid(pod: &str) -> PodUid {
        pod.parse().unwrap()
    }

    fn view(weights: &[(&str, u16)]) -> GpuView {
        let mut view = GpuView::empty("GPU-a".parse().unwrap());
        for (pod, weight) in weights {
            view.pods.insert(uid(pod), Quanta(1));
            if *weight > 0 {
                view.weights.insert(uid(pod), *weight);
            }
        }
        view
    }

    fn processes(of: &[(&str, &[u32])]) -> Processes {
        let of = of.iter();
        of.map(|(pod, pids)| (uid(pod), pids.iter().copied().collect()))
            .collect()
    }

    #[test]
    fn processes_of_no_pod_are_held_without_a_weight() {
        let view = view(&[("a", 75), ("b", 0)]);
        let processes = processes(&[("a", &[1, 2])]);
        let orders = orders(&view, &processes, &[2, 3].into());
        let told: Vec<_> = orders
            .iter()
            .map(|pod| (pod.uid.as_str(), pod.weight.map(u16::from)))
            .collect();
        assert_eq!(told, [("a", Some(75)), ("b", None), ("", None)]);
        assert_eq!(orders[2].processes, [3].into());
    }
}
