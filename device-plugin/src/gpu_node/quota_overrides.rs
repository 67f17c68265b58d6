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
use crate::sessions::{Account, AccountBooks, Books, Sessions};
use crate::units::{AllocationId, Bytes, GpuUuid};

/// How often what is freed is taken from the idle, and a pending order looked at again.
const EVERY: Duration = Duration::from_secs(1);

/// What a generation of the node's `GpuNode` orders.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Orders {
    /// `metadata.generation`.
    pub generation: Option<i64>,
    /// `spec.quotas`.
    pub quotas: Vec<QuotaOrder>,
    /// `spec.reservations`.
    pub reservations: Vec<Reservation>,
    /// `spec.contextPolicies`.
    pub contexts: Vec<ContextOrder>,
    /// `spec.restarts`.
    pub restarts: Vec<RestartOrder>,
    /// `spec.drain`.
    pub drain: BTreeSet<GpuUuid>,
    /// The places in the spec of orders that this agent does not understand.
    pub not_understood: Vec<String>,
}

/// What became of the orders.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Ordered {
    /// The generation that they are of; none before one was read.
    pub generation: Option<i64>,
    /// Each order, in its place.
    pub quotas: Vec<(QuotaOrder, Outcome)>,
    /// The places in the spec of orders that this agent does not understand.
    pub not_understood: Vec<String>,
}

/// What became of one order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
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

impl Outcome {
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
pub fn plan(
    orders: &[QuotaOrder],
    containers: &[BoundContainer],
    books: &[Books],
) -> Vec<(AllocationId, Account, Option<Bytes>)> {
    let containers = by_allocation(containers);
    let mut plan = Vec::new();
    for books in books {
        let Some(container) = containers.get(&books.allocation) else {
            // Not known to the node: its orders cannot be told.
            continue;
        };
        let mut lowered: BTreeMap<&Account, Bytes> = BTreeMap::new();
        for order in orders.iter().filter(|order| names(order, container)) {
            for (account, bytes) in accounts(order, books) {
                let least = lowered.entry(account).or_insert(bytes);
                *least = bytes.min(*least);
            }
        }
        for AccountBooks { account, .. } in &books.accounts {
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
pub fn outcome(order: &QuotaOrder, containers: &[BoundContainer], books: &[Books]) -> Outcome {
    let containers = by_allocation(containers);
    let named = books.iter().filter(|books| {
        let container = containers.get(&books.allocation);
        container.is_some_and(|container| names(order, container))
    });
    let accounts = named.flat_map(|books| {
        let named = accounts(order, books)
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
        (false, _) => Outcome::NotFound,
        (true, false) => Outcome::Applied(quota),
        (true, true) => Outcome::Pending { quota, used },
    }
}

fn by_allocation(containers: &[BoundContainer]) -> BTreeMap<AllocationId, &BoundContainer> {
    let containers = containers.iter();
    containers
        .map(|container| (container.allocation, container))
        .collect()
}

fn names(order: &QuotaOrder, container: &BoundContainer) -> bool {
    let holder = container.holder.as_ref();
    order.pod_uid == container.pod.as_str()
        && holder.is_some_and(|holder| holder.container == order.container)
}

/// The accounts that an order names, with what each is ordered to.
fn accounts<'a>(order: &QuotaOrder, books: &'a Books) -> Vec<(&'a Account, Bytes)> {
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
    mut orders: watch::Receiver<Option<Orders>>,
    ordered: watch::Sender<Ordered>,
    stop: CancellationToken,
) {
    let mut every = interval(EVERY);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = every.tick() => {}
            // Without the API server nothing will be ordered: the ticks go on.
            Ok(()) = orders.changed() => {}
        }
        sessions.reclaim();
        let Some(Orders {
            generation,
            quotas,
            not_understood,
            ..
        }) = orders.borrow_and_update().clone()
        else {
            continue;
        };
        let containers = snapshots.borrow().containers.clone();
        for (allocation, account, bytes) in plan(&quotas, &containers, &sessions.books()) {
            // Ended since it was planned for: nothing is left to lower.
            let _ = sessions.order(&allocation, &account, bytes);
        }
        let books = sessions.books();
        let outcome = |order: QuotaOrder| {
            let outcome = outcome(&order, &containers, &books);
            (order, outcome)
        };
        let after = Ordered {
            generation,
            quotas: quotas.into_iter().map(outcome).collect(),
            not_understood,
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
    use crate::node::checkpoint_state::Holder;

    fn books(number: u64, accounts: &[(&str, u64, u64)]) -> Books {
        let account = |(name, quota, used): &(&str, u64, u64)| {
            let account = match *name {
                MANAGED => Account::Managed,
                gpu => Account::Gpu(gpu.parse().unwrap()),
            };
            let used = Bytes::gib(*used);
            AccountBooks {
                granted: used,
                used,
                peak: used,
                ..AccountBooks::unused(account, Bytes::gib(*quota))
            }
        };
        Books::unused(number, accounts.iter().map(account).collect())
    }

    fn container(number: u64, name: &str) -> BoundContainer {
        BoundContainer {
            holder: Some(Holder {
                container: name.into(),
                pod: None,
            }),
            ..BoundContainer::numbered(number, number)
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
        let plan = plan(orders, &containers, &books);
        plan.into_iter()
            .map(|(.., bytes)| bytes.map(|bytes| bytes.0 >> 30))
            .collect()
    }

    #[test]
    fn an_order_lowers_the_account_that_it_names_and_no_other() {
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
    fn device_memory_is_spread_over_a_containers_gpus_and_the_least_of_two_orders_counts() {
        let both = order("side", DEVICE, "6Gi");
        assert_eq!(
            planned(std::slice::from_ref(&both)),
            [None, None, Some(3), Some(3)]
        );
        let one = order("side", "GPU-a", "1Gi");
        assert_eq!(planned(&[one, both]), [None, None, Some(1), Some(3)]);
    }

    #[test]
    fn an_order_is_pending_while_more_is_used_on_one_gpu_and_applied_after() {
        let containers = [container(2, "side")];
        let order = order("side", DEVICE, "6Gi");
        let outcome = |used| {
            let books = [books(2, &[("GPU-a", 3, used), ("GPU-b", 3, 0)])];
            outcome(&order, &containers, &books)
        };
        let pending = Outcome::Pending {
            quota: Bytes::gib(6),
            used: Bytes::gib(4),
        };
        assert_eq!(outcome(4), pending);
        assert_eq!(outcome(3), Outcome::Applied(Bytes::gib(6)));
    }

    #[test]
    fn an_order_is_pending_while_dead_leases_or_others_have_more_than_it_allows() {
        let containers = [container(1, "main")];
        let order = order("main", DEVICE, "3Gi");
        let outcome = |set: fn(&mut AccountBooks) -> &mut Bytes| {
            let mut books = [books(1, &[("GPU-a", 3, 1)])];
            *set(&mut books[0].accounts[0]) = Bytes::gib(3);
            outcome(&order, &containers, &books)
        };
        let pending = Outcome::Pending {
            quota: Bytes::gib(3),
            used: Bytes::gib(4),
        };
        assert_eq!(outcome(|account| &mut account.retired), pending);
        assert_eq!(outcome(|account| &mut account.leased), pending);
        assert_eq!(outcome(|account| &mut account.outside), pending);
    }

    #[test]
    fn an_order_for_nobody_here_is_not_found() {
        let (containers, books) = ([container(1, "main")], [books(1, &[("GPU-a", 8, 4)])]);
        for order in [
            order("main", "GPU-x", "1Gi"),
            order("main", MANAGED, "1Gi"),
            order("x", DEVICE, "1Gi"),
        ] {
            assert_eq!(
                outcome(&order, &containers, &books),
                Outcome::NotFound,
                "{order:?}"
            );
        }
    }
}
