//! What budgets lower, as orders to the agents.

use std::collections::BTreeMap;

use bursar_crds::Amount;
use bursar_crds::gpu_node::{DEVICE, MAX_PODS, MAX_QUOTAS, QuotaOrder};

use super::{Step, gpu_node};
use crate::nodes::ssa_diff::has_to_be_written;
use crate::placement::history::Memory;
use crate::placement::pod::PodFacts;
use crate::placement::snapshot::Scene;

/// The nodes whose orders differ from what budgets say.
pub(super) fn plan(scene: &Scene<'_>, memory: &Memory) -> Vec<Step> {
    let mut wanted = wanted(scene);
    let mut steps = Vec::new();
    for (node, gpus) in &scene.gpu_nodes {
        let quotas = wanted.remove(*node).unwrap_or_default();
        if has_to_be_written(&gpus.quotas, &quotas, memory.quotas.get(*node)) {
            let node = gpu_node(scene, node);
            steps.push(Step::Lower { node, quotas });
        }
    }
    steps
}

/// The orders for each node, in one order.
fn wanted(scene: &Scene<'_>) -> BTreeMap<String, Vec<QuotaOrder>> {
    let mut wanted: BTreeMap<String, Vec<QuotaOrder>> = BTreeMap::new();
    if scene.lowered.is_empty() {
        return wanted;
    }
    let by_name: BTreeMap<(&str, &str), &PodFacts> = scene
        .pods
        .values()
        .map(|(key, pod)| ((key.namespace.as_str(), key.name.as_str()), *pod))
        .collect();
    for (budget, pods) in &scene.lowered {
        for (name, amount) in *pods {
            let pod = by_name.get(&(budget.namespace.as_str(), name.as_str()));
            if let Some((pod, node)) = pod.and_then(|pod| Some((pod, pod.node()?))) {
                let orders = wanted.entry(node.to_owned()).or_default();
                orders.extend(of_pod(scene, pod, node, amount));
            }
        }
    }
    for orders in wanted.values_mut() {
        orders.sort_by(|a, b| {
            (&a.pod_uid, &a.container, &a.account).cmp(&(&b.pod_uid, &b.container, &b.account))
        });
        orders.truncate(MAX_QUOTAS);
    }
    wanted
}

/// One for each of its containers and GPUs, for the amount is of each GPU.
fn of_pod(scene: &Scene<'_>, pod: &PodFacts, node: &str, amount: &Amount) -> Vec<QuotaOrder> {
    let gpus = scene.gpu_nodes.get(node).map(|gpus| gpus.gpus.as_slice());
    let theirs = gpus.unwrap_or_default().iter();
    // A full list may leave the pod out. The agent passes over an order for a GPU that the pod lacks.
    let theirs = theirs.filter(|gpu| gpu.pods.contains_key(&pod.uid) || gpu.pods.len() >= MAX_PODS);
    let mut accounts: Vec<&str> = theirs.map(|gpu| gpu.uuid.as_str()).collect();
    if accounts.len() < 2 {
        // Which GPU it is makes no difference, and need not be known.
        accounts = vec![DEVICE];
    }
    let order = |container: &str, account: &str| QuotaOrder {
        pod_uid: pod.uid.clone(),
        container: container.to_owned(),
        account: account.to_owned(),
        quota: amount.clone(),
    };
    pod.containers
        .iter()
        .flat_map(|(container, _)| accounts.iter().map(|account| order(container, account)))
        .collect()
}
