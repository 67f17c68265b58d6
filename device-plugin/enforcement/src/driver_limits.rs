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
//!
//! A limit counts as set once it reads back. The driver may have a limit and not enforce it, for
//! example where it does not see the cgroup's processes. So the agent compares what the driver
//! counts against the limit with the pod's accounts ([`compare_use`]).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bursar_config::AuditConfig;
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
/// The polls after which the driver must count memory that the accounts have.
const UNCOUNTED_AFTER: u32 = 10;
/// By how much a limit that the driver has rounded may differ.
const MAX_ROUNDING: u64 = 2 << 20;
/// How often all limits are set again, since a reloaded driver has none.
const REAPPLY_INTERVAL: Duration = Duration::from_secs(60);

/// A pod's cgroup and a GPU.
pub(crate) type LimitKey = (PathBuf, GpuUuid);

/// The state of each limit.
pub type Limits = BTreeMap<LimitKey, LimitState>;

/// The state of one limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LimitState {
    /// The driver has this limit.
    Set(Bytes, LimitUse),
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

/// How what the driver counts against a limit compares with the pod's accounts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitUse {
    /// The driver has counted no memory of the pod yet.
    Unused,
    /// The driver counts the pod's memory.
    Counted,
    /// The driver counts none of the bytes that the pod's accounts have for long.
    Uncounted(Bytes),
    /// The driver counts these bytes, which the limit should have denied.
    Exceeded(Bytes),
    /// The driver counts these bytes, of which the accounts lack more than the audit allows. A
    /// descriptor may hold them, or a program that bypassed the shim.
    Unexplained(Bytes),
}

/// A pod's memory on a GPU by its accounts: what its processes have, and how many they are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct PodUse {
    bytes: Bytes,
    processes: u64,
}

impl PodUse {
    /// Adds up the accounts of a pod's containers. Leases are memory of the agent's processes, and
    /// the driver does not count managed memory.
    fn of(
        (cgroup, gpu): &LimitKey,
        containers: &[BoundContainer],
        usage: &[ContainerUsage],
    ) -> Self {
        let usage = by_allocation(usage);
        let account = Account::Gpu(gpu.clone());
        let mut sum = PodUse::default();
        for container in containers {
            let usage = usage.get(&container.allocation);
            let is_of_pod = container.cgroup.as_ref() == Some(cgroup);
            if let Some(usage) = usage.filter(|_| is_of_pod) {
                let balances = usage.accounts.iter();
                let balances = balances.filter(|balance| balance.account == account);
                let bytes =
                    balances.map(|balance| balance.used + balance.exited + balance.untracked);
                sum.bytes = sum.bytes + bytes.sum();
                sum.processes += usage.processes.len() as u64;
            }
        }
        sum
    }
}

/// Compares what the driver counts against `limit` with a pod's accounts. The accounts charge
/// memory before it is allocated, so `uncounted_polls` tells for how long the driver has counted
/// none of it.
fn compare_use(
    limit: Bytes,
    counted: Bytes,
    accounts: PodUse,
    uncounted_polls: u32,
    audit: &AuditConfig,
) -> LimitUse {
    let processes = accounts.processes.max(1);
    let allowance = Bytes(audit.process_allowance.0.saturating_mul(processes));
    let may_have = |bytes: Bytes| counted <= bytes + audit.tolerance;
    match counted {
        Bytes::ZERO if accounts.bytes > Bytes::ZERO && uncounted_polls >= UNCOUNTED_AFTER => {
            LimitUse::Uncounted(accounts.bytes)
        }
        Bytes::ZERO => LimitUse::Unused,
        // The pod keeps what it had when its limit was lowered.
        counted if !may_have(limit.max(accounts.bytes)) => LimitUse::Exceeded(counted),
        counted if !may_have(accounts.bytes + allowance) => LimitUse::Unexplained(counted),
        _ => LimitUse::Counted,
    }
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
    for ((key, _), bytes) in claims {
        let sum = desired.entry(key).or_default();
        *sum = *sum + bytes;
    }
    desired
}

/// Whether to set `desired` after `last`. A driver without limits is asked once for each limit.
fn needs_update(desired: Bytes, last: Option<&LimitState>) -> bool {
    match last {
        None | Some(LimitState::Failed { .. }) => true,
        Some(LimitState::Unsupported) => false,
        Some(LimitState::Set(bytes, _)) => *bytes != desired,
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
        let LimitState::Set(_, found) = limit.unwrap_or(&LimitState::Unsupported) else {
            return false;
        };
        !matches!(found, LimitUse::Uncounted(_) | LimitUse::Exceeded(_))
    })
}

/// Sets the limits of the node's pods until `stop`, and publishes their states.
pub async fn run(
    nvml: NvmlHandle,
    sessions: Arc<Sessions>,
    mut snapshots: watch::Receiver<Snapshot>,
    published: watch::Sender<Limits>,
    audit: AuditConfig,
    stop: CancellationToken,
) {
    let mut ticker = interval(POLL_INTERVAL);
    let mut reapply = interval_at(Instant::now() + REAPPLY_INTERVAL, REAPPLY_INTERVAL);
    ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut limits, mut uncounted) = (Limits::new(), BTreeMap::<LimitKey, u32>::new());
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = ticker.tick() => {}
            _ = reapply.tick() => limits.clear(),
            // The channel is closed only when the agent ends.
            Ok(()) = snapshots.changed() => {}
        }
        let containers = snapshots.borrow_and_update().containers.clone();
        let usage = sessions.container_usage();
        let desired = desired_limits(&containers, &usage);
        limits.retain(|key, _| desired.contains_key(key));
        uncounted.retain(|key, _| desired.contains_key(key));
        for (key, bytes) in desired {
            if limits.get(&key) == Some(&LimitState::Unsupported) {
                continue;
            }
            let hard = needs_update(bytes, limits.get(&key)).then_some(bytes);
            // NVML may take seconds to answer about a failing GPU.
            let request = request_limit(&nvml, &key, bytes, hard);
            let Some(answer) = stop.run_until_cancelled(request).await else {
                return;
            };
            let limit = answer.map_or_else(std::convert::identity, |used| {
                let accounts = PodUse::of(&key, &containers, &usage);
                let polls = uncounted.entry(key.clone()).or_default();
                let is_uncounted = used == Bytes::ZERO && accounts.bytes > Bytes::ZERO;
                *polls = if is_uncounted {
                    polls.saturating_add(1)
                } else {
                    0
                };
                LimitState::Set(bytes, compare_use(bytes, used, accounts, *polls, &audit))
            });
            log_change(&key, &limit, published.borrow().get(&key));
            limits.insert(key, limit);
        }
        published.send_if_modified(|before| {
            let changed = *before != limits;
            before.clone_from(&limits);
            changed
        });
    }
}

/// Sets a limit if `hard` is given, and reads it. Returns what the driver counts against it, or the
/// state of a limit that is not `bytes`.
async fn request_limit(
    nvml: &NvmlHandle,
    (cgroup, gpu): &LimitKey,
    bytes: Bytes,
    hard: Option<Bytes>,
) -> Result<Bytes, LimitState> {
    if gpu.is_mig() || !is_cgroup_v2(cgroup) {
        return Err(LimitState::Unsupported);
    }
    let answer = nvml.request_limit(gpu, cgroup, hard).await;
    // The channel closes where the GPU's process has ended, or there is none at present.
    let why = match answer.unwrap_or(Err(QueryError::NotAvailable)) {
        Ok(limit) if limit.hard.0.abs_diff(bytes.0) < MAX_ROUNDING => return Ok(limit.used),
        Ok(limit) => format!("it reads back as {}", limit.hard),
        Err(QueryError::Nvml { source, .. }) => match source {
            CallError::Unsupported => return Err(LimitState::Unsupported),
            CallError::Nvml(why) => why,
        },
        Err(error @ QueryError::NotAvailable) => error.to_string(),
    };
    Err(LimitState::Failed { bytes, why })
}

fn log_change((cgroup, gpu): &LimitKey, limit: &LimitState, before: Option<&LimitState>) {
    if before == Some(limit) {
        return;
    }
    let cgroup = cgroup.display();
    match limit {
        LimitState::Set(limit, LimitUse::Unused) => {
            info!(%cgroup, %gpu, bytes = %limit, "driver limit set");
        }
        LimitState::Set(limit, LimitUse::Counted) => {
            info!(%cgroup, %gpu, bytes = %limit, "driver limit counts the pod's memory");
        }
        LimitState::Set(limit, LimitUse::Uncounted(unseen)) => {
            warn!(%cgroup, %gpu, bytes = %limit, %unseen, "driver limit counts no memory");
        }
        LimitState::Set(limit, LimitUse::Exceeded(counted)) => {
            warn!(%cgroup, %gpu, bytes = %limit, %counted, "driver limit is not enforced");
        }
        LimitState::Set(limit, LimitUse::Unexplained(counted)) => {
            warn!(%cgroup, %gpu, bytes = %limit, %counted, "driver counts memory of no account");
        }
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
        let set = |gib| LimitState::Set(Bytes::gib(gib), LimitUse::Unused);
        assert!(needs_update(bytes, Some(&set(2))));
        assert!(!needs_update(bytes, Some(&set(1))));
        assert!(!needs_update(bytes, Some(&LimitState::Unsupported)));
    }

    #[test]
    fn drivers_count_is_compared_with_the_accounts() {
        let audit = AuditConfig {
            kill_outsiders: false,
            ..AuditConfig::default()
        };
        let compare = |counted, accounts: u64, polls| {
            let accounts = PodUse {
                bytes: Bytes::mib(accounts),
                processes: 1,
            };
            compare_use(Bytes::gib(4), Bytes::mib(counted), accounts, polls, &audit)
        };
        assert_eq!(compare(0, 0, 99), LimitUse::Unused);
        assert_eq!(compare(0, 518, 9), LimitUse::Unused, "it allocates soon");
        assert_eq!(compare(0, 518, 10), LimitUse::Uncounted(Bytes::mib(518)));
        assert_eq!(compare(518, 600, 0), LimitUse::Counted);
        assert_eq!(compare(1_094, 518, 0), LimitUse::Counted, "code and heaps");
        assert_eq!(
            compare(1_095, 518, 0),
            LimitUse::Unexplained(Bytes::mib(1_095))
        );
        assert_eq!(
            compare(4_161, 518, 0),
            LimitUse::Exceeded(Bytes::mib(4_161))
        );
        assert_eq!(
            compare(6_000, 6_000, 0),
            LimitUse::Counted,
            "the limit was lowered"
        );
    }

    #[test]
    fn pod_use_is_what_its_processes_have() {
        let mut of_first = usage(1, &[("GPU-a", 4), ("GPU-b", 4), ("managed", 9)]);
        let balance = &mut of_first.accounts[0];
        (balance.used, balance.exited, balance.untracked) = (Bytes(1), Bytes(2), Bytes(4));
        (balance.leased, balance.managed) = (Bytes(8), Bytes(16));
        let mut of_second = usage(2, &[("GPU-a", 2)]);
        of_second.accounts[0].used = Bytes(32);
        let other = BoundContainer {
            cgroup: Some("/cg/kubepods/pod2".into()),
            ..container(3, 3)
        };
        let mut of_other = usage(3, &[("GPU-a", 2)]);
        of_other.accounts[0].used = Bytes(64);
        let containers = [container(1, 1), container(2, 2), other];
        let usage = [of_first, of_second, of_other];
        assert_eq!(
            PodUse::of(&limit_key("GPU-a"), &containers, &usage).bytes,
            Bytes(39)
        );
    }

    #[test]
    fn container_is_limited_when_each_of_its_gpus_is() {
        let (container, usage) = (container(1, 1), usage(1, &[("GPU-a", 4), ("GPU-b", 4)]));
        let first = (
            limit_key("GPU-a"),
            LimitState::Set(Bytes::gib(4), LimitUse::Counted),
        );
        let mut limits = Limits::from([first, (limit_key("GPU-b"), LimitState::Unsupported)]);
        assert!(!is_limited(&limits, &container, &usage));
        limits.insert(
            limit_key("GPU-b"),
            LimitState::Set(Bytes::gib(4), LimitUse::Counted),
        );
        assert!(is_limited(&limits, &container, &usage));
        let exceeded = LimitUse::Exceeded(Bytes::gib(9));
        limits.insert(limit_key("GPU-b"), LimitState::Set(Bytes::gib(4), exceeded));
        assert!(!is_limited(&limits, &container, &usage));
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
