//! Lowers the quotas of running containers as the spec of the node's `GpuNode` says.
//!
//! Overrides are applied to the sessions at once and recorded with them, so an agent that starts
//! without the API server keeps the last ones. An override that leaves the spec is lifted. No
//! override raises a quota above the container's request.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bursar_apiserver::ParsedSpec;
use bursar_crds::Amount;
use bursar_crds::gpu_node::{DEVICE, MANAGED, QuotaOverride, QuotaState, QuotaStatus};
use bursar_ledger::units::{AllocationId, Bytes};
use bursar_node::actor::Snapshot;
use bursar_node::allocator::BoundContainer;
use bursar_sessions::{Account, AccountBalance, ContainerUsage, Sessions};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::info;

/// How often idle credit is reclaimed and pending overrides are checked again.
const RECLAIM_INTERVAL: Duration = Duration::from_secs(1);

/// The outcome of the spec's quotas.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AppliedSpec {
    /// The generation of the spec; none before a spec was read.
    pub generation: Option<i64>,
    /// The outcome of each override, in the order of the spec.
    pub quotas: Vec<QuotaStatus>,
    /// The paths of entries that this agent cannot read.
    pub unrecognized: Vec<String>,
}

/// Returns the quota of each account of each bound container; none for accounts without an
/// override.
pub(crate) fn plan_quotas(
    orders: &[QuotaOverride],
    containers: &[BoundContainer],
    usage: &[ContainerUsage],
) -> Vec<(AllocationId, Account, Option<Bytes>)> {
    let containers = by_allocation(containers);
    let mut plan = Vec::new();
    for container_usage in usage {
        let Some(container) = containers.get(&container_usage.allocation) else {
            // The node does not know the container, so its overrides cannot be determined.
            continue;
        };
        let mut lowered: BTreeMap<&Account, Bytes> = BTreeMap::new();
        for order in orders
            .iter()
            .filter(|order| matches_container(order, container))
        {
            for (account, bytes) in matching_accounts(order, container_usage) {
                let least = lowered.entry(account).or_insert(bytes);
                *least = bytes.min(*least);
            }
        }
        for AccountBalance { account, .. } in &container_usage.accounts {
            plan.push((
                container_usage.allocation,
                account.clone(),
                lowered.get(account).copied(),
            ));
        }
    }
    plan
}

/// Returns the outcome of an override.
pub(crate) fn quota_outcome(
    order: &QuotaOverride,
    containers: &[BoundContainer],
    usage: &[ContainerUsage],
) -> QuotaStatus {
    let containers = by_allocation(containers);
    let named = usage.iter().filter(|container_usage| {
        let container = containers.get(&container_usage.allocation);
        container.is_some_and(|container| matches_container(order, container))
    });
    let accounts = named.flat_map(|container_usage| {
        let named = matching_accounts(order, container_usage)
            .into_iter()
            .map(|(account, _)| account);
        let named: Vec<_> = named.collect();
        container_usage
            .accounts
            .iter()
            .filter(move |balance| named.contains(&&balance.account))
    });
    let (mut quota, mut used, mut is_exceeded, mut is_found) = (0_u64, 0_u64, false, false);
    for account in accounts {
        let in_use = account.in_use();
        is_found = true;
        is_exceeded |= in_use > account.quota;
        quota = quota.saturating_add(account.quota.0);
        used = used.saturating_add(in_use.0);
    }
    let state = match (is_found, is_exceeded) {
        (false, _) => QuotaState::NotFound,
        (true, false) => QuotaState::Applied,
        (true, true) => QuotaState::Pending,
    };
    QuotaStatus {
        pod_uid: order.pod_uid.clone(),
        container: order.container.clone(),
        account: order.account.clone(),
        state,
        quota: is_found.then(|| Amount::from_bytes(quota)),
        used: is_exceeded.then(|| Amount::from_bytes(used)),
    }
}

fn by_allocation(containers: &[BoundContainer]) -> BTreeMap<AllocationId, &BoundContainer> {
    let containers = containers.iter();
    containers
        .map(|container| (container.allocation, container))
        .collect()
}

fn matches_container(order: &QuotaOverride, container: &BoundContainer) -> bool {
    let holder = container.name.as_ref();
    order.pod_uid == container.pod.as_str()
        && holder.is_some_and(|holder| holder.container == order.container)
}

/// The accounts that an override names, with the quota of each.
fn matching_accounts<'a>(
    order: &QuotaOverride,
    container_usage: &'a ContainerUsage,
) -> Vec<(&'a Account, Bytes)> {
    // The schema admits only readable amounts; an unreadable one lowers nothing.
    let Ok(bytes) = order.quota.bytes() else {
        return Vec::new();
    };
    let is_named = |account: &&Account| match account {
        Account::Managed => order.account == MANAGED,
        Account::Gpu(gpu) => order.account == DEVICE || order.account == gpu.as_str(),
    };
    let accounts = container_usage
        .accounts
        .iter()
        .map(|balance| &balance.account);
    let named: Vec<_> = accounts.filter(is_named).collect();
    // Device memory is divided evenly among a container's GPUs.
    let share = bytes / u64::try_from(named.len().max(1)).unwrap_or(u64::MAX);
    named
        .into_iter()
        .map(|account| (account, Bytes(share)))
        .collect()
}

/// Applies the overrides to `sessions` whenever they or the node's containers change, and publishes
/// the outcomes, until `stop`. Before the first spec is read the recorded overrides stay.
pub async fn run(
    sessions: Arc<Sessions>,
    snapshots: watch::Receiver<Snapshot>,
    mut orders: watch::Receiver<Option<ParsedSpec>>,
    applied: watch::Sender<AppliedSpec>,
    stop: CancellationToken,
) {
    let mut ticker = interval(RECLAIM_INTERVAL);
    ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = ticker.tick() => {}
            // Without the API server the spec never changes; the ticks go on.
            Ok(()) = orders.changed() => {}
        }
        sessions.reclaim_excess();
        let Some(ParsedSpec {
            generation,
            quotas,
            unrecognized: not_understood,
            ..
        }) = orders.borrow_and_update().clone()
        else {
            continue;
        };
        let containers = snapshots.borrow().containers.clone();
        for (allocation, account, bytes) in
            plan_quotas(&quotas, &containers, &sessions.container_usage())
        {
            // The container may have ended since the plan was made.
            let _ = sessions.override_quota(&allocation, &account, bytes);
        }
        let usage = sessions.container_usage();
        let outcome = |order| quota_outcome(order, &containers, &usage);
        let after = AppliedSpec {
            generation,
            quotas: quotas.iter().map(outcome).collect(),
            unrecognized: not_understood,
        };
        applied.send_if_modified(|before| {
            let changed = *before != after;
            // The generation changes with each pod of the node.
            if before.quotas != after.quotas {
                info!(quotas = ?after.quotas, "quota overrides applied");
            }
            *before = after;
            changed
        });
    }
}

#[cfg(test)]
mod tests {
    use bursar_node::checkpoint_state::ContainerName;

    use super::*;

    fn usage(number: u64, accounts: &[(&str, u64, u64)]) -> ContainerUsage {
        let account = |(name, quota, used): &(&str, u64, u64)| {
            let account = match *name {
                MANAGED => Account::Managed,
                gpu => Account::Gpu(gpu.parse().unwrap()),
            };
            let used = Bytes::gib(*used);
            AccountBalance {
                granted: used,
                used,
                peak: used,
                ..AccountBalance::empty(account, Bytes::gib(*quota))
            }
        };
        ContainerUsage::empty(number, accounts.iter().map(account).collect())
    }

    fn container(number: u64, name: &str) -> BoundContainer {
        BoundContainer {
            name: Some(ContainerName {
                container: name.into(),
                pod: None,
            }),
            ..BoundContainer::with_ids(number, number)
        }
    }

    fn order(container: &str, account: &str, quota: &str) -> QuotaOverride {
        QuotaOverride {
            pod_uid: "p".into(),
            container: container.into(),
            account: account.into(),
            quota: quota.into(),
        }
    }

    fn status(
        order: &QuotaOverride,
        state: QuotaState,
        quota: Option<&str>,
        used: Option<&str>,
    ) -> QuotaStatus {
        QuotaStatus {
            pod_uid: order.pod_uid.clone(),
            container: order.container.clone(),
            account: order.account.clone(),
            state,
            quota: quota.map(Amount::from),
            used: used.map(Amount::from),
        }
    }

    /// Plans the quotas in GiB for two containers: one with a GPU and managed memory, one with two
    /// GPUs.
    fn planned(orders: &[QuotaOverride]) -> Vec<Option<u64>> {
        let containers = [container(1, "main"), container(2, "side")];
        let usage = [
            usage(1, &[("GPU-a", 8, 4), (MANAGED, 2, 0)]),
            usage(2, &[("GPU-a", 8, 4), ("GPU-b", 8, 4)]),
        ];
        let plan = plan_quotas(orders, &containers, &usage);
        plan.into_iter()
            .map(|(.., bytes)| bytes.map(|bytes| bytes.0 >> 30))
            .collect()
    }

    #[test]
    fn override_lowers_only_the_account_it_names() {
        assert_eq!(planned(&[]), [None; 4]);
        assert_eq!(
            planned(&[order("main", DEVICE, "3Gi")]),
            [Some(3), None, None, None]
        );
        assert_eq!(
            planned(&[order("main", MANAGED, "1Gi")]),
            [None, Some(1), None, None]
        );
        assert_eq!(
            planned(&[order("side", "GPU-b", "1Gi")]),
            [None, None, None, Some(1)]
        );
        assert_eq!(planned(&[order("other", DEVICE, "1Gi")]), [None; 4]);
    }

    #[test]
    fn override_is_spread_over_gpus_and_the_lowest_wins() {
        let both = order("side", DEVICE, "6Gi");
        assert_eq!(
            planned(std::slice::from_ref(&both)),
            [None, None, Some(3), Some(3)]
        );
        let single = order("side", "GPU-a", "1Gi");
        assert_eq!(planned(&[single, both]), [None, None, Some(1), Some(3)]);
    }

    #[test]
    fn override_is_pending_while_one_gpu_exceeds_it() {
        let containers = [container(2, "side")];
        let order = order("side", DEVICE, "6Gi");
        let outcome = |used| {
            let usage = [usage(2, &[("GPU-a", 3, used), ("GPU-b", 3, 0)])];
            quota_outcome(&order, &containers, &usage)
        };
        assert_eq!(
            outcome(4),
            status(&order, QuotaState::Pending, Some("6Gi"), Some("4Gi"))
        );
        assert_eq!(
            outcome(3),
            status(&order, QuotaState::Applied, Some("6Gi"), None)
        );
    }

    #[test]
    fn override_is_pending_while_other_charges_exceed_it() {
        let containers = [container(1, "main")];
        let order = order("main", DEVICE, "3Gi");
        let outcome = |set: fn(&mut AccountBalance) -> &mut Bytes| {
            let mut usage = [usage(1, &[("GPU-a", 3, 1)])];
            *set(&mut usage[0].accounts[0]) = Bytes::gib(3);
            quota_outcome(&order, &containers, &usage)
        };
        let pending = status(&order, QuotaState::Pending, Some("3Gi"), Some("4Gi"));
        assert_eq!(outcome(|account| &mut account.exited), pending);
        assert_eq!(outcome(|account| &mut account.leased), pending);
        assert_eq!(outcome(|account| &mut account.untracked), pending);
    }

    #[test]
    fn override_for_an_unknown_container_is_not_found() {
        let (containers, usage) = ([container(1, "main")], [usage(1, &[("GPU-a", 8, 4)])]);
        for order in [
            order("main", "GPU-x", "1Gi"),
            order("main", MANAGED, "1Gi"),
            order("x", DEVICE, "1Gi"),
        ] {
            assert_eq!(
                quota_outcome(&order, &containers, &usage),
                status(&order, QuotaState::NotFound, None, None),
                "{order:?}"
            );
        }
    }
}
