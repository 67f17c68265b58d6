//! Sets the driver's own memory limit of each pod, where the driver has such limits.
//!
//! Driver r615 limits what the processes of a cgroup allocate of a GPU. It does so with the
//! kernel's dmem controller, or by its own counting if the kernel has none. The driver supports
//! cgroup v2 and no MIG instance. Since the driver chooses between the two, the agent sets limits
//! through NVML and never in the kernel's files (NVIDIA's "MPS v3 Memory Partitioning").
//!
//! A limit is set for the pod and not for its containers. The pod's cgroup exists before any
//! container, and a driver that counts by itself does not count memory from before the limit. A
//! limit ends with its cgroup, so the agent removes none. A limit that cannot be set is logged and
//! tried again, and delays no pod.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bursar_gpu::nvml::{CallError, NvmlHandle, QueryError};
use bursar_ledger::units::{Bytes, GpuUuid};
use bursar_node::actor::Snapshot;
use bursar_node::allocator::BoundContainer;
use bursar_sessions::{Account, ContainerUsage, Sessions, by_allocation};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval, interval_at};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

/// How often the quotas are compared with the limits, and failed limits are tried again.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How often all limits are set again, since a reloaded driver has none.
const REAPPLY_INTERVAL: Duration = Duration::from_secs(60);

/// A pod's cgroup and a GPU.
pub(crate) type LimitKey = (PathBuf, GpuUuid);

/// The state of each limit.
pub type Limits = BTreeMap<LimitKey, LimitState>;

/// The state of one limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LimitState {
    /// The driver denies allocations above this amount.
    Set(Bytes),
    /// The driver has no limits for this GPU, or the host has no cgroup v2.
    Unsupported,
    /// The driver supports the limit and returned an error.
    Failed {
        /// The limit that should be set.
        bytes: Bytes,
        /// NVML's error.
        why: String,
    },
}

/// The limits to set: each pod's sum of its containers' quotas. Containers that share a claim count
/// once, since only one of them is alive.
pub(crate) fn desired_limits(
    containers: &[BoundContainer],
    usage: &[ContainerUsage],
) -> BTreeMap<LimitKey, Bytes> {
    let usage = by_allocation(usage);
    let mut claims = BTreeMap::new();
    for container in containers {
        let container_usage = usage.get(&container.allocation);
        let (Some(cgroup), Some(container_usage)) = (&container.cgroup, container_usage) else {
            continue;
        };
        for account in &container_usage.accounts {
            if let Account::Gpu(gpu) = &account.account {
                let key = (cgroup.clone(), gpu.clone());
                let most: &mut Bytes = claims.entry((key, container.claim)).or_default();
                *most = account.quota.max(*most);
            }
        }
    }
    let mut desired: BTreeMap<LimitKey, Bytes> = BTreeMap::new();
    for ((key, _), Bytes(bytes)) in claims {
        let sum = desired.entry(key).or_default();
        sum.0 = sum.0.saturating_add(bytes);
    }
    desired
}

/// Whether to set `desired` after `last`. A driver without limits is asked once for each limit.
fn needs_update(desired: Bytes, last: Option<&LimitState>) -> bool {
    match last {
        None | Some(LimitState::Failed { .. }) => true,
        Some(LimitState::Unsupported) => false,
        Some(LimitState::Set(bytes)) => *bytes != desired,
    }
}

/// Whether the cgroup is of version 2: folders of version 1 have no such file.
fn is_cgroup_v2(cgroup: &Path) -> bool {
    cgroup.join("cgroup.controllers").exists()
}

/// Whether the driver limits the container's pod on each of the container's GPUs.
pub(crate) fn is_limited(
    limits: &Limits,
    container: &BoundContainer,
    usage: &ContainerUsage,
) -> bool {
    usage.gpus().all(|gpu| {
        let cgroup = container.cgroup.clone();
        let limit = cgroup.and_then(|cgroup| limits.get(&(cgroup, gpu.clone())));
        matches!(limit, Some(LimitState::Set(_)))
    })
}

/// Sets the limits of the node's pods until `stop`, and publishes their states.
pub async fn run(
    nvml: NvmlHandle,
    sessions: Arc<Sessions>,
    mut snapshots: watch::Receiver<Snapshot>,
    published: watch::Sender<Limits>,
    stop: CancellationToken,
) {
    let mut ticker = interval(POLL_INTERVAL);
    let mut reapply = interval_at(Instant::now() + REAPPLY_INTERVAL, REAPPLY_INTERVAL);
    ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut limits = Limits::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = ticker.tick() => {}
            _ = reapply.tick() => limits.clear(),
            // The channel is closed only when the agent ends.
            Ok(()) = snapshots.changed() => {}
        }
        let containers = snapshots.borrow_and_update().containers.clone();
        let desired = desired_limits(&containers, &sessions.container_usage());
        limits.retain(|key, _| desired.contains_key(key));
        for (key, bytes) in desired {
            if needs_update(bytes, limits.get(&key)) {
                // NVML may take seconds to answer about a failing GPU.
                let Some(limit) = stop
                    .run_until_cancelled(set_limit(&nvml, &key, bytes))
                    .await
                else {
                    return;
                };
                log_change(&key, &limit, published.borrow().get(&key));
                limits.insert(key, limit);
            }
        }
        published.send_if_modified(|before| {
            let changed = *before != limits;
            before.clone_from(&limits);
            changed
        });
    }
}

async fn set_limit(nvml: &NvmlHandle, (cgroup, gpu): &LimitKey, bytes: Bytes) -> LimitState {
    if gpu.is_mig() || !is_cgroup_v2(cgroup) {
        return LimitState::Unsupported;
    }
    let answer = nvml.request_limit(gpu, cgroup, bytes).await;
    let refused = |why| LimitState::Failed { bytes, why };
    match answer {
        Ok(Ok(())) => LimitState::Set(bytes),
        Ok(Err(QueryError::Nvml {
            source: CallError::Unsupported,
            ..
        })) => LimitState::Unsupported,
        Ok(Err(QueryError::Nvml {
            source: CallError::Nvml(why),
            ..
        })) => refused(why),
        Ok(Err(error @ QueryError::NotAvailable)) => refused(error.to_string()),
        // The process of the GPU has ended, or the GPU has none at present.
        Err(_) => refused(QueryError::NotAvailable.to_string()),
    }
}

fn log_change((cgroup, gpu): &LimitKey, limit: &LimitState, before: Option<&LimitState>) {
    if before == Some(limit) {
        return;
    }
    let cgroup = cgroup.display();
    match limit {
        LimitState::Set(bytes) => info!(%cgroup, %gpu, %bytes, "driver limit set"),
        LimitState::Unsupported => debug!(%cgroup, %gpu, "driver limit not supported"),
        LimitState::Failed { bytes, why } => {
            warn!(%cgroup, %gpu, %bytes, %why, "failed to set a driver limit");
        }
    }
}

#[cfg(test)]
mod tests {
    use bursar_sessions::AccountBalance;

    use super::*;

    const POD: &str = "/cg/kubepods/pod1";

    fn container(allocation: u64, claim: u64) -> BoundContainer {
        BoundContainer {
            cgroup: Some(POD.into()),
            ..BoundContainer::with_ids(allocation, claim)
        }
    }

    fn usage(allocation: u64, accounts: &[(&str, u64)]) -> ContainerUsage {
        let account = |(name, gib): &(&str, u64)| {
            let account = match *name {
                "managed" => Account::Managed,
                gpu => Account::Gpu(gpu.parse().unwrap()),
            };
            AccountBalance::empty(account, Bytes::gib(*gib))
        };
        ContainerUsage::empty(allocation, accounts.iter().map(account).collect())
    }

    fn limit_key(gpu: &str) -> LimitKey {
        (POD.into(), gpu.parse().unwrap())
    }

    #[test]
    fn pod_limit_is_the_sum_of_its_containers_per_gpu() {
        let containers = [container(1, 1), container(2, 2)];
        let usage = [
            usage(1, &[("GPU-a", 4), ("managed", 9)]),
            usage(2, &[("GPU-a", 2), ("GPU-b", 2)]),
        ];
        let expected = [
            (limit_key("GPU-a"), Bytes::gib(6)),
            (limit_key("GPU-b"), Bytes::gib(2)),
        ];
        assert_eq!(desired_limits(&containers, &usage), expected.into());
    }

    #[test]
    fn containers_that_share_a_claim_count_once_by_the_larger_quota() {
        let containers = [container(1, 1), container(2, 1)];
        let usage = [usage(1, &[("GPU-a", 4)]), usage(2, &[("GPU-a", 3)])];
        let expected = [(limit_key("GPU-a"), Bytes::gib(4))];
        assert_eq!(desired_limits(&containers, &usage), expected.into());
    }

    #[test]
    fn pod_has_no_limit_without_cgroup_or_usage() {
        let without_cgroup = BoundContainer {
            cgroup: None,
            ..container(1, 1)
        };
        assert_eq!(
            desired_limits(
                &[without_cgroup, container(2, 2)],
                &[usage(1, &[("GPU-a", 4)])]
            ),
            BTreeMap::new()
        );
    }

    #[test]
    fn limit_is_retried_when_failed_and_not_when_unsupported() {
        let bytes = Bytes::gib(1);
        let refused = LimitState::Failed {
            bytes,
            why: "in use".into(),
        };
        assert!(needs_update(bytes, None));
        assert!(needs_update(bytes, Some(&refused)));
        assert!(needs_update(bytes, Some(&LimitState::Set(Bytes::gib(2)))));
        assert!(!needs_update(bytes, Some(&LimitState::Set(bytes))));
        assert!(!needs_update(bytes, Some(&LimitState::Unsupported)));
    }

    #[test]
    fn container_is_limited_when_each_of_its_gpus_is() {
        let (container, usage) = (container(1, 1), usage(1, &[("GPU-a", 4), ("GPU-b", 4)]));
        let first = (limit_key("GPU-a"), LimitState::Set(Bytes::gib(4)));
        let mut limits = Limits::from([first, (limit_key("GPU-b"), LimitState::Unsupported)]);
        assert!(!is_limited(&limits, &container, &usage));
        limits.insert(limit_key("GPU-b"), LimitState::Set(Bytes::gib(4)));
        assert!(is_limited(&limits, &container, &usage));
    }

    #[test]
    fn cgroup_v1_folder_is_not_cgroup_v2() {
        let root = tempfile::tempdir().unwrap();
        let (old, new) = (root.path().join("memory/pod1"), root.path().join("pod1"));
        for folder in [&old, &new] {
            std::fs::create_dir_all(folder).unwrap();
        }
        std::fs::write(old.join("tasks"), "").unwrap();
        std::fs::write(new.join("cgroup.controllers"), "cpu memory dmem\n").unwrap();
        assert!(!is_cgroup_v2(&old));
        assert!(is_cgroup_v2(&new));
    }
}
