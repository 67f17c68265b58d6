//! Sums the pods' requests by node, beside GPU memory, as the scheduler counts them.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use bursar_crds::Quantum;
use bursar_crds::quantity::{QuantityError, parse_thousandths};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use rpds::RedBlackTreeMapSync;

use crate::cluster::facts::pod_request::{aggregate_requests, has_ended};
use crate::cluster::slim_pod::{Container, SlimPod};

/// Names that nearly every pod uses. They are not copied.
const COMMON: [&str; 3] = ["cpu", "memory", PODS];
/// Each pod counts as one of the node's allocatable pods.
const PODS: &str = "pods";

/// The requests of a pod that has not ended.
#[derive(Clone, Debug, PartialEq)]
pub struct PodRequests {
    /// The pod's node, once it is bound.
    pub node: Option<String>,
    /// The request for each resource, in thousandths. A cluster may have 100,000 of these lists.
    pub milli: Box<[(Cow<'static, str>, u64)]>,
}

impl PodRequests {
    /// The requests of `pod`. `None` when it has ended. A pending in-place resize is ignored.
    pub fn parse(pod: &SlimPod, quantum: Quantum) -> Option<Self> {
        if has_ended(pod) {
            return None;
        }
        let spec = &pod.spec;
        let containers = spec.containers.iter().chain(&spec.init_containers);
        let requests = containers.map(|container| &container.resources);
        let requests = requests.chain([&spec.resources]).map(|of| &of.requests);
        let names: BTreeSet<&String> = requests
            .chain([&spec.overhead])
            .flat_map(|of| of.keys())
            .collect();
        let beside = names
            .into_iter()
            .filter(|name| *name != quantum.device_memory());
        let milli = beside.map(|name| {
            let of = |all: &BTreeMap<String, Quantity>| all.get(name).map(to_milli);
            let container = |one: &Container| of(&one.resources.requests).unwrap_or(0);
            // A pod-level request replaces the containers' requests.
            let whole = of(&spec.resources.requests);
            let amount =
                whole.unwrap_or_else(|| aggregate_requests(spec, container, u64::saturating_add));
            let overhead = of(&spec.overhead).unwrap_or(0);
            (interned(name), amount.saturating_add(overhead))
        });
        let milli = milli.filter(|(_, amount)| *amount > 0);
        Some(Self {
            node: spec.node_name.clone().filter(|node| !node.is_empty()),
            milli: milli.chain([(Cow::Borrowed(PODS), 1_000)]).collect(),
        })
    }

    /// The request for `resource`, in thousandths.
    pub fn milli_of(&self, resource: &str) -> u64 {
        let milli = self.milli.iter().find(|(name, _)| name == resource);
        milli.map_or(0, |(_, amount)| *amount)
    }
}

/// The requested resources of each node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeRequested(RedBlackTreeMapSync<String, BTreeMap<Cow<'static, str>, u128>>);

impl NodeRequested {
    /// Replaces one pod's requests.
    pub fn update(&mut self, was: Option<&PodRequests>, now: Option<&PodRequests>) {
        for (requested, added) in [(now, true), (was, false)] {
            let Some((node, requested)) =
                requested.and_then(|requested| Some((requested.node.as_ref()?, requested)))
            else {
                continue;
            };
            let mut sums = self.0.get(node).cloned().unwrap_or_default();
            for (resource, milli) in &requested.milli {
                let sum = sums.entry(resource.clone()).or_default();
                let milli = u128::from(*milli);
                *sum = if added { *sum + milli } else { *sum - milli };
            }
            sums.retain(|_, sum| *sum > 0);
            match sums.is_empty() {
                true => drop(self.0.remove_mut(node)),
                false => self.0.insert_mut(node.clone(), sums),
            }
        }
    }

    /// The requested amount of a node's `resource`, in thousandths.
    pub fn milli_of(&self, node: &str, resource: &str) -> u128 {
        let sums = self.0.get(node);
        sums.and_then(|sums| sums.get(resource).copied())
            .unwrap_or(0)
    }
}

fn interned(resource: &str) -> Cow<'static, str> {
    let common = COMMON.into_iter().find(|name| *name == resource);
    common.map_or_else(|| Cow::Owned(resource.to_owned()), Cow::Borrowed)
}

/// The quantity in thousandths, the unit of CPU requests. An amount too large for the arithmetic is
/// the maximum.
pub fn to_milli(quantity: &Quantity) -> u64 {
    match parse_thousandths(&quantity.0) {
        Ok(amount) => amount,
        Err(QuantityError::TooLarge(_)) => u64::MAX,
        Err(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn requested(spec: Value) -> Vec<(String, u64)> {
        let pod = json!({ "metadata": { "name": "p", "namespace": "n" }, "spec": spec });
        let requested =
            PodRequests::parse(&serde_json::from_value(pod).unwrap(), Quantum::Gib1).unwrap();
        let milli = requested
            .milli
            .iter()
            .map(|(name, amount)| (name.to_string(), *amount));
        milli.filter(|(name, _)| name != PODS).collect()
    }

    fn container(cpu: &str) -> Value {
        json!({ "name": "c", "resources": { "requests": { "cpu": cpu } } })
    }

    #[test]
    fn cpu_requests_add_up_as_the_scheduler_adds_them() {
        let mut sidecar = container("1");
        sidecar["restartPolicy"] = json!("Always");
        let init = json!([sidecar, container("4500m")]);
        let spec = |containers: Value| json!({ "containers": containers, "initContainers": init });
        let cpu = |amount| vec![("cpu".to_owned(), amount)];
        assert_eq!(
            requested(spec(json!([container("2"), container("500m")]))),
            cpu(5_500)
        );
        assert_eq!(
            requested(spec(json!([container("4"), container("1")]))),
            cpu(6_000)
        );
    }

    #[test]
    fn pod_level_request_replaces_containers_and_adds_overhead() {
        let spec = json!({
            "containers": [container("2")], "overhead": { "cpu": "250m", "memory": "1Ki" },
            "resources": { "requests": { "cpu": "3" } },
        });
        let milli = [("cpu", 3_250), ("memory", 1_024_000)];
        assert_eq!(
            requested(spec),
            milli.map(|(name, amount)| (name.to_owned(), amount))
        );
    }

    #[test]
    fn device_memory_and_zero_requests_are_left_out() {
        let requests =
            json!({ "bursar.dev/gpu-memory-gib": "4", "memory": "0", "example.com/nic": "2" });
        let spec =
            json!({ "containers": [{ "name": "c", "resources": { "requests": requests } }] });
        assert_eq!(requested(spec), [("example.com/nic".to_owned(), 2_000)]);
    }

    #[test]
    fn ended_pod_uses_nothing_and_any_other_uses_one_pod() {
        let pod = |phase: &str| {
            let pod = json!({ "metadata": { "name": "p" }, "spec": { "nodeName": "n" }, "status": { "phase": phase } });
            PodRequests::parse(&serde_json::from_value(pod).unwrap(), Quantum::Gib1)
        };
        assert_eq!(pod("Failed"), None);
        let requested = pod("Running").unwrap();
        assert_eq!(
            (requested.node.as_deref(), requested.milli_of(PODS)),
            (Some("n"), 1_000)
        );
    }

    proptest! {
        #[test]
        fn node_usage_is_the_sum_of_its_pods_after_any_changes(
            words in prop::collection::vec((0_usize..4, prop::option::of((0_u8..3, any::<u64>()))), 0..40),
        ) {
            let mut pods: [Option<PodRequests>; 4] = Default::default();
            let mut taken = NodeRequested::default();
            for (at, word) in words {
                let now = word.map(|(node, amount)| PodRequests {
                    node: (node > 0).then(|| node.to_string()),
                    milli: [("cpu".into(), amount), (PODS.into(), 1_000)].into(),
                });
                taken.update(pods[at].as_ref(), now.as_ref());
                pods[at] = now;
            }
            let mut nodes = BTreeSet::new();
            for pod in pods.iter().flatten() {
                let Some(node) = &pod.node else { continue };
                nodes.insert(node);
                let there = pods.iter().flatten().filter(|pod| pod.node.as_ref() == Some(node));
                let sum: u128 = there.map(|pod| u128::from(pod.milli_of("cpu"))).sum();
                prop_assert_eq!(taken.milli_of(node, "cpu"), sum);
            }
            prop_assert_eq!(taken.0.size(), nodes.len());
        }
    }

    #[test]
    fn oversized_quantity_is_the_maximum() {
        assert_eq!(to_milli(&Quantity("8Ei".to_owned())), u64::MAX);
        assert_eq!(to_milli(&Quantity("1".to_owned())), 1_000);
    }
}
