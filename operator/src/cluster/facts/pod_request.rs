//! Adds up what a pod's containers request, and tells mirror pods and ended ones.

use bursar_crds::pod_total::pod_total;
use bursar_crds::quantity::parse_count;
use kube::core::ObjectMeta;

use crate::cluster::slim_pod::{Container, PodSpec, SlimPod};
use crate::quanta::Quanta;

/// The annotation of a static pod's mirror pod, which cannot be deleted through the API. Its value
/// is the static pod's own UID (`pkg/kubelet/pod/mirror_client.go`,
/// `pkg/kubelet/config/common.go`). No kubelet runs a pod of the API server that has it.
const MIRROR_ANNOTATION: &str = "kubernetes.io/config.mirror";

/// The UID that the node knows a mirror pod by. A kubelet makes its Node the pod's controller.
pub fn mirrored_uid(meta: &ObjectMeta) -> Option<&String> {
    let mut owners = meta.owner_references.iter().flatten();
    let is_of_node = owners.any(|owner| owner.controller == Some(true) && owner.kind == "Node");
    let annotations = meta.annotations.as_ref().filter(|_| is_of_node)?;
    annotations.get(MIRROR_ANNOTATION)
}

/// Whether the pod has reached its final phase.
pub fn has_ended(pod: &SlimPod) -> bool {
    matches!(pod.status.phase.as_deref(), Some("Succeeded" | "Failed"))
}

/// Adds up a quantity of a pod's containers.
pub fn aggregate_requests<T: Copy + Default + Ord>(
    spec: &PodSpec,
    of: impl Fn(&Container) -> T,
    plus: impl Fn(T, T) -> T,
) -> T {
    let init = spec.init_containers.iter();
    let init = init.map(|container| (container.is_sidecar(), of(container)));
    pod_total(init, spec.containers.iter().map(&of), plus)
}

/// One container's request for `resource`.
pub fn gpu_request(container: &Container, resource: &str) -> Quanta {
    let requested = container.resources.requests.get(resource);
    requested.map_or(Quanta::ZERO, |count| Quanta::new(parse_count(&count.0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::facts::pod::{PodFacts, PriorityKind};
    use bursar_crds::Quantum;
    use bursar_crds::resources::BORROWED_PRIORITY_CLASS;
    use proptest::prelude::*;
    use serde_json::json;

    const GIB: &str = "bursar.dev/gpu-memory-gib";

    fn container(quanta: u64, sidecar: bool) -> serde_json::Value {
        let policy = sidecar.then_some("Always");
        json!({ "name": "c", "restartPolicy": policy, "resources": { "requests": { GIB: quanta.to_string() } } })
    }

    fn pod(init: &[(u64, bool)], app: &[u64]) -> SlimPod {
        let init: Vec<_> = init
            .iter()
            .map(|(n, sidecar)| container(*n, *sidecar))
            .collect();
        let app: Vec<_> = app.iter().map(|n| container(*n, false)).collect();
        serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "p", "namespace": "n" },
            "spec": { "containers": app, "initContainers": init, "nodeName": "elsewhere" },
            "status": { "phase": "Pending", "qosClass": "BestEffort" },
        }))
        .unwrap()
    }

    fn device(pod: &SlimPod) -> i64 {
        PodFacts::of(pod, Quantum::Gib1).map_or(0, |facts| facts.device.count())
    }

    #[test]
    fn containers_add_up_and_the_largest_init_container_counts() {
        assert_eq!(device(&pod(&[], &[4, 8])), 12);
        assert_eq!(device(&pod(&[(20, false), (6, false)], &[4, 8])), 20);
        assert_eq!(device(&pod(&[(3, false)], &[4, 8])), 12);
    }

    #[test]
    fn sidecar_adds_to_containers_and_later_init_containers() {
        assert_eq!(device(&pod(&[(2, true)], &[4])), 6);
        assert_eq!(device(&pod(&[(2, true), (8, false)], &[4])), 10);
        assert_eq!(device(&pod(&[(8, false), (2, true)], &[4])), 8);
    }

    #[test]
    fn ended_pod_or_one_without_request_is_none() {
        let mut ended = pod(&[], &[4]);
        for phase in ["Succeeded", "Failed"] {
            ended.status.phase = Some(phase.to_owned());
            assert_eq!(PodFacts::of(&ended, Quantum::Gib1), None);
        }
        assert_eq!(PodFacts::of(&pod(&[], &[0]), Quantum::Gib1), None);
        assert_eq!(PodFacts::of(&pod(&[], &[4]), Quantum::Mib512), None);
    }

    #[test]
    fn borrowed_pod_is_known_by_its_priority_class() {
        let mut borrowed = pod(&[], &[4]);
        borrowed.spec.priority_class_name = Some(BORROWED_PRIORITY_CLASS.to_owned());
        let request = PodFacts::of(&borrowed, Quantum::Gib1).unwrap();
        assert_eq!(request.kind, PriorityKind::Borrowed);
    }

    /// A transcript of `AggregateContainerRequests` for one resource.
    fn upstream(init: &[(u64, bool)], app: &[u64]) -> u64 {
        let mut reqs: u64 = app.iter().sum();
        let (mut restartable, mut most) = (0, 0);
        for (asks, sidecar) in init {
            let during = if *sidecar {
                reqs += asks;
                restartable += asks;
                restartable
            } else {
                asks + restartable
            };
            most = most.max(during);
        }
        reqs.max(most)
    }

    proptest! {
        #[test]
        fn request_equals_the_schedulers_computation(
            init in prop::collection::vec((0u64..64, any::<bool>()), 0..6),
            app in prop::collection::vec(0u64..64, 1..6),
        ) {
            let counted = device(&pod(&init, &app));
            prop_assert_eq!(counted.unsigned_abs(), upstream(&init, &app));
        }
    }
}
