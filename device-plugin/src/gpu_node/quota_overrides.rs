//! Lowers quotas of running containers as the node's `GpuNode` says.
//!
//! What is ordered there is applied to the sessions at once, and stays with them: an agent that starts without the
//! API server goes on with what was ordered last. An order that is gone is lifted. Nothing is ever given above what
//! a container asked for.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bursar_crds::gpu_node::{
    ContextOrder, DEVICE, MANAGED, QuotaOrder, QuotaState, Reservation, RestartOrder,
};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::node::actor::Snapshot;
use crate::node::allocator::BoundContainer;
use crate::sessions::{Account, AccountBalance, ContainerUsage, Sessions};
use crate::units::{AllocationId, Bytes, GpuUuid};

/// How often what is freed is taken from the idle, and a pending order looked at again.
const RECLAIM_INTERVAL: Duration = Duration::from_secs(1);

/// What a generation of the node's `GpuNode` orders.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ParsedSpec {
    /// `metadata.generation`.
    pub generation: Option<i64>,
    /// `spec.quotas`.
    pub quotas: Vec<QuotaOrder>,
    /// `spec.reservations`.
    pub reservations: Vec<Reservation>,
    /// `spec.contextPolicies`.
    pub context_policies: Vec<ContextOrder>,
    /// `spec.restarts`.
    pub restarts: Vec<RestartOrder>,
    /// `spec.drain`.
    pub drain: BTreeSet<GpuUuid>,
    /// The places in the spec of orders that this agent does not understand.
    pub unrecognized: Vec<String>,
}

/// What became of the orders.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AppliedSpec {
    /// The generation that they are of; none before one was read.
    pub generation: Option<i64>,
    /// Each order, in its place.
    pub quotas: Vec<(QuotaOrder, QuotaOutcome)>,
    /// The places in the spec of orders that this agent does not understand.
    pub unrecognized: Vec<String>,
}

/// What became of one order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuotaOutcome {
    /// No such container has such memory here.
    NotFound,
    /// This quota is in force, and no more than it is used.
    Applied(Bytes),
    /// This quota is in force, and more than it is used.
    Pending {
        /// The quota.
        quota: Bytes,
        /// What is used.
        used: Bytes,
    },
}

impl QuotaOutcome {
    /// As the API says it.
    pub fn state(self) -> QuotaState {
        match self {
            Self::NotFound => QuotaState::NotFound,
            Self::Applied(_) => QuotaState::Applied,
            Self::Pending { .. } => QuotaState::Pending,
        }
    }
}

/// The quota of every account of every bound container that orders name; a container that none names has none.
pub fn plan_quotas(
    orders: &[QuotaOrder],
    containers: &[BoundContainer],
    books: &[ContainerUsage],
) -> Vec<(AllocationId, Account, Option<Bytes>)> {
    let containers = by_allocation(containers);
    let mut plan = Vec::new();
    for books in books {
        let Some(container) = containers.get(&books.allocation) else {
            // Not known to the node: its orders cannot be told.
            continue;
        };
        let mut lowered: BTreeMap<&Account, Bytes> = BTreeMap::new();
        for order in orders
            .iter()
            .filter(|order| matches_container(order, container))
        {
            for (account, bytes) in matching_accounts(order, books) {
                let least = lowered.entry(account).or_insert(bytes);
                *least = bytes.min(*least);
            }
        }
        for AccountBalance { account, .. } in &books.accounts {
            plan.push((
                books.allocation,
                account.clone(),
                lowered.get(account).copied(),
            ));
        }
    }
    plan
}

/// What became of an order.
pub fn quota_outcome(
    order: &QuotaOrder,
    containers: &[BoundContainer],
    books: &[ContainerUsage],
) -> QuotaOutcome {
    let containers = by_allocation(containers);
    let named = books.iter().filter(|books| {
        let container = containers.get(&books.allocation);
        container.is_some_and(|container| matches_container(order, container))
    });
    let accounts = named.flat_map(|books| {
        let named = matching_accounts(order, books)
            .into_iter()
            .map(|(account, _)| account);
        let named: Vec<_> = named.collect();
        books
            .accounts
            .iter()
            .filter(move |of_it| named.contains(&&of_it.account))
    });
    let (mut quota, mut used, mut above, mut any) = (0_u64, 0_u64, false, false);
    for account in accounts {
        let in_use = account.in_use();
        any = true;
        above |= in_use > account.quota;
        quota = quota.saturating_add(account.quota.0);
        used = used.saturating_add(in_use.0);
    }
    let (quota, used) = (Bytes(quota), Bytes(used));
    match (any, above) {
        (false, _) => QuotaOutcome::NotFound,
        (true, false) => QuotaOutcome::Applied(quota),
        (true, true) => QuotaOutcome::Pending { quota, used },
    }
}

fn by_allocation(containers: &[BoundContainer]) -> BTreeMap<AllocationId, &BoundContainer> {
    let containers = containers.iter();
    containers
        .map(|container| (container.allocation, container))
        .collect()
}

fn matches_container(order: &QuotaOrder, container: &BoundContainer) -> bool {
    let holder = container.name.as_ref();
    order.pod_uid == container.pod.as_str()
        && holder.is_some_and(|holder| holder.container == order.container)
}

/// The accounts that an order names, with what each is ordered to.
fn matching_accounts<'a>(
    order: &QuotaOrder,
    books: &'a ContainerUsage,
) -> Vec<(&'a Account, Bytes)> {
    // The schema takes amounts only that can be read; one that cannot lowers nothing.
    let Ok(bytes) = order.quota.bytes() else {
        return Vec::new();
    };
    let is_named = |account: &&Account| match account {
        Account::Managed => order.account == MANAGED,
        Account::Gpu(gpu) => order.account == DEVICE || order.account == gpu.as_str(),
    };
    let accounts = books.accounts.iter().map(|of_it| &of_it.account);
    let named: Vec<_> = accounts.filter(is_named).collect();
    // Device memory is spread evenly over a container's GPUs.
    let share = bytes / u64::try_from(named.len().max(1)).unwrap_or(u64::MAX);
    named
        .into_iter()
        .map(|account| (account, Bytes(share)))
        .collect()
}

/// Applies `orders` to `sessions` as they and the node's containers change, and says what became of them, until
/// `stop`. None before the API server told any: then what is on record stands.
pub async fn run(
    sessions: Arc<Sessions>,
    snapshots: watch::Receiver<Snapshot>,
    mut orders: watch::Receiver<Option<ParsedSpec>>,
    ordered: watch::Sender<AppliedSpec>,
    stop: CancellationToken,
) {
    let mut every = interval(RECLAIM_INTERVAL);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = every.tick() => {}
            // Without the API server nothing will be ordered: the ticks go on.
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
            // Ended since it was planned for: nothing is left to lower.
            let _ = sessions.override_quota(&allocation, &account, bytes);
        }
        let books = sessions.container_usage();
        let outcome = |order: QuotaOrder| {
            let outcome = quota_outcome(&order, &containers, &books);
            (order, outcome)
        };
        let after = AppliedSpec {
            generation,
            quotas: quotas.into_iter().map(outcome).collect(),
            unrecognized: not_understood,
        };
        ordered.send_if_modified(|before| {
            let changed = *before != after;
            if changed {
                info!(quotas = ?after.quotas, "quotas ordered");
                *before = after;
            }
            changed
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::checkpoint_state::ContainerName;

    fn books(number: u64, accounts: &[(&str, u64, u64)]) -> ContainerUsage {
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

    fn order(container: &str, account: &str, quota: &str) -> QuotaOrder {
        QuotaOrder {
            pod_uid: "p".into(),
            container: container.into(),
            account: account.into(),
            quota: quota.into(),
        }
    }

    /// The planned quotas in GiB by account, of two containers: one with a GPU and managed memory, one with two GPUs.
    fn planned(orders: &[QuotaOrder]) -> Vec<Option<u64>> {
        let containers = [container(1, "main"), container(2, "side")];
        let books = [
            books(1, &[("GPU-a", 8, 4), (MANAGED, 2, 0)]),
            books(2, &[("GPU-a", 8, 4), ("GPU-b", 8, 4)]),
        ];
        let plan = plan_quotas(orders, &containers, &books);
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
        let one = order("side", "GPU-a", "1Gi");
        assert_eq!(planned(&[one, both]), [None, None, Some(1), Some(3)]);
    }

    #[test]
    fn override_is_pending_while_one_gpu_exceeds_it() {
        let containers = [container(2, "side")];
        let order = order("side", DEVICE, "6Gi");
        let outcome = |used| {
            let books = [books(2, &[("GPU-a", 3, used), ("GPU-b", 3, 0)])];
            quota_outcome(&order, &containers, &books)
        };
        let pending = QuotaOutcome::Pending {
            quota: Bytes::gib(6),
            used: Bytes::gib(4),
        };
        assert_eq!(outcome(4), pending);
        assert_eq!(outcome(3), QuotaOutcome::Applied(Bytes::gib(6)));
    }

    #[test]
    fn override_is_pending_while_other_charges_exceed_it() {
        let containers = [container(1, "main")];
        let order = order("main", DEVICE, "3Gi");
        let outcome = |set: fn(&mut AccountBalance) -> &mut Bytes| {
            let mut books = [books(1, &[("GPU-a", 3, 1)])];
            *set(&mut books[0].accounts[0]) = Bytes::gib(3);
            quota_outcome(&order, &containers, &books)
        };
        let pending = QuotaOutcome::Pending {
            quota: Bytes::gib(3),
            used: Bytes::gib(4),
        };
        assert_eq!(outcome(|account| &mut account.exited), pending);
        assert_eq!(outcome(|account| &mut account.leased), pending);
        assert_eq!(outcome(|account| &mut account.untracked), pending);
    }

    #[test]
    fn override_for_an_unknown_container_is_not_found() {
        let (containers, books) = ([container(1, "main")], [books(1, &[("GPU-a", 8, 4)])]);
        for order in [
            order("main", "GPU-x", "1Gi"),
            order("main", MANAGED, "1Gi"),
            order("x", DEVICE, "1Gi"),
        ] {
            assert_eq!(
                quota_outcome(&order, &containers, &books),
                QuotaOutcome::NotFound,
                "{order:?}"
            );
        }
    }
}
