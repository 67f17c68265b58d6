//! Decides the override that a resize adds or takes out.

use bursar_crds::budget::Override;
use bursar_crds::gpu_node::{MANAGED, QuotaState};
use bursar_crds::quantity::{QuantityError, parse_bytes};
use bursar_crds::{Amount, GpuMemoryBudget, GpuNode};
use serde_json::{Value, json};

use crate::amounts::memory;
use crate::objects::{Container, Pod, Request};
use crate::show::bytes;

/// The memory whose quota a resize lowers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resized {
    /// Device memory, of each container on each GPU.
    Device,
    /// Managed memory of each container that requests it.
    Managed,
}

impl Resized {
    /// The largest request of the containers that run with the pod: others get no quota override.
    fn largest_request(self, pod: &Pod) -> Option<u64> {
        let request = match self {
            Self::Device => Container::device_memory,
            Self::Managed => Container::managed_memory,
        };
        pod.running_containers()
            .filter_map(request)
            .map(Request::bytes)
            .max()
    }

    /// The words behind an amount in sentences.
    fn suffix(self) -> &'static str {
        match self {
            Self::Device => "",
            Self::Managed => " of managed memory",
        }
    }

    fn amount_of(self, lowered: &mut Override) -> &mut Option<Amount> {
        match self {
            Self::Device => &mut lowered.device_memory,
            Self::Managed => &mut lowered.managed_memory,
        }
    }

    fn is_of_account(self, account: &str) -> bool {
        (account == MANAGED) == (self == Self::Managed)
    }
}

/// Why a pod cannot be resized.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResizeError {
    /// The amount cannot be parsed.
    #[error(transparent)]
    Amount(#[from] QuantityError),
    /// The pod requests no GPU memory.
    #[error("pod {0} requests no GPU memory")]
    NoMemory(String),
    /// The pod's managed memory has no quota of its own.
    #[error(
        "pod {0} requests no managed memory, so what it has counts as GPU memory: leave out --managed"
    )]
    NoManaged(String),
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

/// The patch of the budget for one amount, or without an amount for none; `None` if the budget has
/// the override already.
///
/// # Errors
/// When the pod cannot have that quota.
pub fn patch(
    budget: &GpuMemoryBudget,
    pod: &Pod,
    quota: Option<(Resized, &str)>,
) -> Result<Option<Value>, ResizeError> {
    let resized = quota.map_or(Resized::Device, |(resized, _)| resized);
    let largest = resized.largest_request(pod).ok_or_else(|| match resized {
        Resized::Device => ResizeError::NoMemory(pod.key()),
        Resized::Managed => ResizeError::NoManaged(pod.key()),
    })?;
    let name = &pod.metadata.name;
    let mut overrides = budget.spec.overrides.clone();
    let before = overrides.extract_if(.., |other| other.pod == *name).last();
    match quota {
        None if before.is_none() => return Ok(None),
        None => {}
        Some((resized, amount)) => {
            let wanted = parse_bytes(amount)?;
            if wanted > largest {
                let (pod, request) = (pod.key(), memory(largest));
                return Err(ResizeError::AboveRequest { pod, request });
            }
            let mut lowered = before.unwrap_or_else(|| Override {
                pod: name.clone(),
                ..Override::default()
            });
            let amount_before = resized.amount_of(&mut lowered);
            if amount_before
                .as_ref()
                .is_some_and(|before| bytes(before) == wanted)
            {
                return Ok(None);
            }
            *amount_before = Some(amount.into());
            overrides.push(lowered);
        }
    }
    let version = &budget.metadata.resource_version;
    Ok(Some(
        json!({ "metadata": { "resourceVersion": version }, "spec": { "overrides": overrides } }),
    ))
}

/// The state of a pod's quotas on its node, as a sentence; `None` while it is not as wanted.
pub fn state(node: &GpuNode, pod: &Pod, quota: Option<(Resized, u64)>) -> Option<String> {
    let uid = &pod.metadata.uid;
    let orders = node.spec.quotas.iter();
    let mut orders = orders.filter(|order| order.pod_uid == *uid);
    let status = node.status.as_ref()?;
    if status.observed_generation < node.metadata.generation {
        return None;
    }
    let Some((resized, amount)) = quota else {
        let is_lifted = orders.next().is_none();
        return is_lifted.then(|| format!("{} has its request as its quota again.", pod.key()));
    };
    // Until the operator has written the new amount, the status is that of an earlier override.
    let is_ordered =
        orders.any(|order| resized.is_of_account(&order.account) && bytes(&order.quota) == amount);
    let of_pod: Vec<_> = status
        .quotas
        .iter()
        .filter(|quota| quota.pod_uid == *uid && resized.is_of_account(&quota.account))
        .collect();
    // A quota is less where the container's request is, or its part on one of several GPUs.
    let is_new = |quota: &Amount| bytes(quota) <= amount;
    if !is_ordered
        || of_pod.is_empty()
        || !of_pod
            .iter()
            .all(|container| container.quota.as_ref().is_some_and(is_new))
    {
        return None;
    }
    let pending = of_pod
        .iter()
        .find(|container| container.state == QuotaState::Pending);
    let quota = format!("{}{}", memory(amount), resized.suffix());
    Some(match pending {
        Some(container) => format!(
            "{} has a quota of {quota}, and uses {}: it gets no more memory until it has freed enough.",
            pod.key(),
            memory(container.used.as_ref().map_or(0, bytes)),
        ),
        None => format!("{} has a quota of {quota}.", pod.key()),
    })
}
