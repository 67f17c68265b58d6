//! Writes context policies, and the restarts that a changed policy requires, for the agents.
//!
//! ```text
//!   budgets' contextPolicy --> index --> GpuNamespace of the namespace, which all agents watch
//!   open faults that the policy now restarts --> GpuNode.spec.restarts
//! ```
//!
//! A pod's first fault must find its policy on the node, because a request at that time would take
//! longer than the restart. So the agents of all nodes know all policies, and the operator writes a
//! changed one once, whatever the number of nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bursar_crds::gpu_node::RestartRequest;
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::api::error::ApiError;
use crate::api::write::{ApiWriter, SpecFields};
use crate::cluster::{ClusterIndex, NamespaceWrite};
use crate::error::error_chain;

/// The interval between two comparisons, and so the delay before a failed write is retried.
const INTERVAL: Duration = Duration::from_secs(1);

/// The pause between two writes: at most twenty per second reach the API server.
const WRITE_PACE: Duration = Duration::from_millis(50);

/// How many writes follow one comparison, which bounds the delay of an urgent write.
const MAX_WRITES: usize = 20;

/// Keeps context policies and restart requests up to date until `shutdown`.
pub async fn run(
    writer: ApiWriter,
    mut index: watch::Receiver<ClusterIndex>,
    shutdown: CancellationToken,
) {
    let mut writes = Writes::default();
    let mut has_more = true;
    let mut pause = INTERVAL;
    while shutdown.run_until_cancelled(sleep(pause)).await.is_some() {
        pause = INTERVAL;
        if !has_more && !index.has_changed().unwrap_or(false) {
            continue;
        }
        let Some(due) = writes.due(&index.borrow_and_update()) else {
            continue;
        };
        let mut failed = false;
        has_more = due.len() > MAX_WRITES;
        for (name, order) in due.into_iter().take(MAX_WRITES) {
            failed |= !writes.apply(&writer, name, order).await;
            // A shutdown ends the round after the current write.
            let pace = shutdown.run_until_cancelled(sleep(WRITE_PACE));
            if pace.await.is_none() {
                return;
            }
        }
        writes.failing = failed;
        if has_more && !failed {
            // The pace of the writes is pause enough.
            pause = Duration::ZERO;
        }
        has_more |= failed;
    }
}

/// An order for one object.
enum Order {
    /// The restart requests of the GpuNode with this UID.
    Restarts(String, Vec<RestartRequest>),
    /// The policy of a GpuNamespace.
    Policy(NamespaceWrite),
}

/// The writes so far.
#[derive(Default)]
struct Writes {
    /// The last restart requests that the operator applied to each GpuNode, by UID. Server-side
    /// apply leaves others.
    restarts: BTreeMap<String, Vec<RestartRequest>>,
    /// The UIDs of deleted GpuNamespaces that the watch still shows.
    deleted: BTreeSet<String>,
    /// The object of the last write. A round after a failure starts after it, so that failing
    /// writes block no others.
    last: String,
    /// Whether a write of the last round failed. Only the first failure of a row is logged.
    failing: bool,
}

impl Writes {
    /// The objects that need a write by name, those with restart requests first unless writes fail.
    /// `None` until all kinds are listed.
    fn due(&mut self, index: &ClusterIndex) -> Option<Vec<(String, Order)>> {
        if !index.unlisted_kinds().is_empty() {
            return None;
        }
        let restarts = index.outdated_restarts(&mut self.restarts).into_iter();
        let restarts = restarts.map(|(node, uid, due)| (node, Order::Restarts(uid, due)));
        let mut policies = index.outdated_namespaces();
        let gone = policies.iter().filter_map(|(_, write)| match write {
            NamespaceWrite::Delete(uid) => Some(uid),
            NamespaceWrite::Apply(_) => None,
        });
        let gone: BTreeSet<String> = gone.cloned().collect();
        self.deleted.retain(|uid| gone.contains(uid));
        policies.retain(|(_, write)| match write {
            NamespaceWrite::Delete(uid) => !self.deleted.contains(uid),
            NamespaceWrite::Apply(_) => true,
        });
        let policies = policies
            .into_iter()
            .map(|(namespace, write)| (namespace, Order::Policy(write)));
        let mut due: Vec<_> = restarts.chain(policies).collect();
        due.sort_by_key(|(name, order)| {
            let waits = !self.failing && matches!(order, Order::Policy(_));
            (waits, *name <= self.last)
        });
        Some(due)
    }

    /// Writes one object. Returns whether that succeeded.
    async fn apply(&mut self, writer: &ApiWriter, name: String, order: Order) -> bool {
        let written = match order {
            Order::Restarts(uid, due) => self.apply_restarts(writer, &name, uid, due).await,
            Order::Policy(NamespaceWrite::Apply(policy)) => {
                let written = writer.apply_context_policy(&name, &policy).await;
                written.map(|()| info!(namespace = name, ?policy, "applied a context policy"))
            }
            Order::Policy(NamespaceWrite::Delete(uid)) => {
                let written = writer.delete_context_policy(&name, &uid).await;
                written.map(|()| {
                    info!(namespace = name, "deleted a context policy");
                    self.deleted.insert(uid);
                })
            }
        };
        self.last = name;
        if let Err(error) = &written
            && !self.failing
        {
            warn!(error = %error_chain(error), "failed to apply context policies; retrying");
        }
        written.is_ok()
    }

    async fn apply_restarts(
        &mut self,
        writer: &ApiWriter,
        node: &str,
        uid: String,
        due: Vec<RestartRequest>,
    ) -> Result<(), ApiError> {
        let written = writer
            .apply_spec(node, &uid, SpecFields::Restarts(&due))
            .await;
        match written {
            Ok(()) => {
                info!(node, ?due, "applied restart requests");
                self.restarts.insert(uid, due);
            }
            // A failed write may still have been applied, so the owner of the current entries is
            // unknown.
            Err(_) => drop(self.restarts.remove(&uid)),
        }
        written
    }
}
