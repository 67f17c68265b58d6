//! Plans the quota overrides of budgets as orders to the agents.

use std::collections::BTreeMap;

use bursar_crds::Amount;
use bursar_crds::budget::Override;
use bursar_crds::gpu_node::{DEVICE, MANAGED, MAX_QUOTAS, QuotaOverride};

use super::{Step, gpu_node_ref};
use crate::cluster::facts::pod::PodFacts;
use crate::cluster::facts::snapshot::Snapshot;
use crate::cluster::ssa_diff::needs_apply;
use crate::placement::history::History;

/// The nodes whose overrides differ from the budgets', or whose number of omitted ones changed.
pub(super) fn plan(snapshot: &Snapshot<'_>, history: &History) -> Vec<Step> {
    let mut desired = desired(snapshot);
    let mut steps = Vec::new();
    for (node, gpus) in &snapshot.gpu_nodes {
        let mut quotas = desired.remove(*node).unwrap_or_default();
        let omitted = quotas.len().saturating_sub(MAX_QUOTAS);
        quotas.truncate(MAX_QUOTAS);
        let before = history.omitted_quotas.get(*node).copied();
        if needs_apply(&gpus.quotas, &quotas, history.quotas.get(*node))
            || omitted != before.unwrap_or_default()
        {
            let node = gpu_node_ref(snapshot, node);
            steps.push(Step::OverrideQuotas {
                node,
                quotas,
                omitted,
            });
        }
    }
    steps
}

/// The sorted overrides of each node.
fn desired(snapshot: &Snapshot<'_>) -> BTreeMap<String, Vec<QuotaOverride>> {
    let mut desired: BTreeMap<String, Vec<QuotaOverride>> = BTreeMap::new();
    if snapshot.overrides.is_empty() {
        return desired;
    }
    let by_name: BTreeMap<(&str, &str), &PodFacts> = snapshot
        .pods
        .values()
        .map(|(key, pod)| ((key.namespace.as_str(), key.name.as_str()), *pod))
        .collect();
    for (budget, pods) in &snapshot.overrides {
        for (name, lowered) in *pods {
            let pod = by_name.get(&(budget.namespace.as_str(), name.as_str()));
            if let Some((pod, node)) = pod.and_then(|pod| Some((pod, pod.node()?))) {
                let orders = desired.entry(node.to_owned()).or_default();
                orders.extend(pod_overrides(snapshot, pod, node, lowered));
            }
        }
    }
    for orders in desired.values_mut() {
        orders.sort_by(|a, b| {
            (&a.pod_uid, &a.container, &a.account).cmp(&(&b.pod_uid, &b.container, &b.account))
        });
    }
    desired
}

/// The overrides of the pod's containers.
fn pod_overrides(
    snapshot: &Snapshot<'_>,
    pod: &PodFacts,
    node: &str,
    lowered: &Override,
) -> Vec<QuotaOverride> {
    let mut orders = Vec::new();
    let mut order = |container: &str, account: &str, quota: &Amount| {
        orders.push(QuotaOverride {
            pod_uid: pod.uid.clone(),
            container: container.to_owned(),
            account: account.to_owned(),
            quota: quota.clone(),
        });
    };
    if let Some(quota) = &lowered.device_memory {
        let accounts = device_accounts(snapshot, pod, node);
        for (container, _) in &pod.containers {
            for account in &accounts {
                order(container, account, quota);
            }
        }
    }
    if let Some(quota) = &lowered.managed_memory {
        for container in &pod.managed_containers {
            order(container, MANAGED, quota);
        }
    }
    orders
}

/// The accounts of the pod's device memory: one for each GPU, because the amount is per GPU.
fn device_accounts<'a>(snapshot: &'a Snapshot<'_>, pod: &PodFacts, node: &str) -> Vec<&'a str> {
    let gpus = snapshot
        .gpu_nodes
        .get(node)
        .map(|gpus| gpus.gpus.as_slice());
    let pod_gpus = gpus.unwrap_or_default().iter();
    // A full list may omit the pod. The agent ignores an order for a GPU on which the pod has no
    // memory.
    let pod_gpus = pod_gpus.filter(|gpu| gpu.pods.contains_key(&pod.uid) || gpu.omits_pods);
    let accounts: Vec<&str> = pod_gpus.map(|gpu| gpu.uuid.as_str()).collect();
    match accounts.len() {
        // With one GPU the account `device` suffices.
        0 | 1 => vec![DEVICE],
        _ => accounts,
    }
}
