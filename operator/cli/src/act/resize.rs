//! Decides the override that a resize adds or takes out.

use bursar_crds::gpu_node::QuotaState;
use bursar_crds::quantity::{QuantityError, parse_bytes};
use bursar_crds::{GpuMemoryBudget, GpuNode};
use serde_json::{Value, json};

use crate::amounts::memory;
use crate::objects::Pod;
use crate::show::bytes;

/// Why a pod cannot be resized.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResizeError {
    /// The amount cannot be parsed.
    #[error(transparent)]
    Amount(#[from] QuantityError),
    /// The pod requests no GPU memory.
    #[error("pod {0} requests no GPU memory")]
    NoMemory(String),
    /// An override raises nothing.
    #[error(
        "pod {pod} requests {request}, and a quota cannot be more: write less, or create another pod"
    )]
    AboveRequest {
        /// The pod.
        pod: String,
        /// The largest request of its containers.
        request: String,
    },
}

/// The patch of the budget; `None` if the budget has the override already.
///
/// # Errors
/// When the pod cannot have that quota.
pub fn patch(
    budget: &GpuMemoryBudget,
    pod: &Pod,
    amount: Option<&str>,
) -> Result<Option<Value>, ResizeError> {
    let largest = pod
        .gpu_containers()
        .map(|(_, request)| request.bytes())
        .max();
    let largest = largest.ok_or_else(|| ResizeError::NoMemory(pod.key()))?;
    let name = &pod.metadata.name;
    let mut overrides = budget.spec.overrides.clone();
    overrides.retain(|other| other.pod != *name);
    let mut overrides: Vec<Value> = overrides.iter().map(|other| json!(other)).collect();
    let before = budget
        .spec
        .overrides
        .iter()
        .find(|other| other.pod == *name);
    match amount {
        None if before.is_none() => return Ok(None),
        None => {}
        Some(amount) => {
            let wanted = parse_bytes(amount)?;
            if wanted > largest {
                let (pod, request) = (pod.key(), memory(largest));
                return Err(ResizeError::AboveRequest { pod, request });
            }
            if before.is_some_and(|before| bytes(&before.device_memory) == wanted) {
                return Ok(None);
            }
            overrides.push(json!({ "pod": name, "deviceMemory": amount }));
        }
    }
    let version = &budget.metadata.resource_version;
    Ok(Some(
        json!({ "metadata": { "resourceVersion": version }, "spec": { "overrides": overrides } }),
    ))
}

/// The state of a pod's quotas on its node, as a sentence; `None` while it is not as wanted.
pub fn state(node: &GpuNode, pod: &Pod, amount: Option<u64>) -> Option<String> {
    let uid = &pod.metadata.uid;
    let orders = node.spec.quotas.iter();
    let mut orders = orders.filter(|order| order.pod_uid == *uid);
    let status = node.status.as_ref()?;
    if status.observed_generation < node.metadata.generation {
        return None;
    }
    let Some(amount) = amount else {
        let is_lifted = orders.next().is_none();
        return is_lifted.then(|| format!("{} has its request as its quota again.", pod.key()));
    };
    // Until the operator has written the new amount, the status is that of an earlier override.
    let is_ordered = orders.any(|order| bytes(&order.quota) == amount);
    let of_pod: Vec<_> = status
        .quotas
        .iter()
        .filter(|quota| quota.pod_uid == *uid)
        .collect();
    // A quota is less where the container's request is, or its part on one of several GPUs.
    let is_new = |quota: &bursar_crds::Amount| bytes(quota) <= amount;
    if !is_ordered
        || of_pod.is_empty()
        || !of_pod
            .iter()
            .all(|one| one.quota.as_ref().is_some_and(is_new))
    {
        return None;
    }
    let pending = of_pod.iter().find(|one| one.state == QuotaState::Pending);
    Some(match pending {
        Some(one) => format!(
            "{} has a quota of {}, and uses {}: it gets no more memory until it has freed enough.",
            pod.key(),
            memory(amount),
            memory(one.used.as_ref().map_or(0, bytes)),
        ),
        None => format!("{} has a quota of {}.", pod.key(), memory(amount)),
    })
}
