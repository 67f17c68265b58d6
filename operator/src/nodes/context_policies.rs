//! Writes context policies, and the restarts that a changed policy requires, to the agents.
//!
//! ```text
//!   budgets' contextPolicy, pods by node --> index --> GpuNode.spec.contextPolicies
//!            open faults that the policy now restarts --> GpuNode.spec.restarts
//! ```
//!
//! Every node gets all policies, as long as these take at most 64 MiB on all nodes together. A
//! pod's first fault must find its policy on the node, because a request at that time would take
//! longer than the restart. When there are more, a node gets those of its pods' namespaces. A pod
//! is bound seconds before it can fault. If the policy arrives later than the fault, the agent acts
//! by the cluster's default.

use std::collections::BTreeMap;
use std::time::Duration;

use bursar_crds::gpu_node::MAX_CONTEXTS;
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::api::write::{ApiWriter, SpecFields};
use crate::cluster::{ClusterIndex, NodeOrders};
use crate::error::error_chain;

/// The interval between two comparisons, and so the delay before a failed write is retried.
const INTERVAL: Duration = Duration::from_secs(1);

/// The pause between two writes: at most twenty per second reach the API server.
const WRITE_PACE: Duration = Duration::from_millis(50);

/// How many writes follow one comparison, which bounds the delay of an urgent write.
const MAX_WRITES: usize = 20;

/// Keeps the nodes' context policies and restart requests up to date until `shutdown`.
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
        let Some(nodes) = writes.outdated_nodes(&index.borrow_and_update()) else {
            continue;
        };
        let mut failed = false;
        has_more = nodes.len() > MAX_WRITES;
        for (node, uid, orders) in nodes.into_iter().take(MAX_WRITES) {
            failed |= !writes.apply(&writer, node, &uid, orders).await;
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

/// The writes so far.
#[derive(Default)]
struct Writes {
    /// The last entries that the operator applied to each node. Server-side apply leaves others.
    applied: BTreeMap<String, NodeOrders>,
    /// The node of the last write. The next round starts after it, so that failing nodes block no
    /// others.
    last: String,
    /// Whether a write of the last round failed. Only the first failure of a row is logged.
    failing: bool,
}

impl Writes {
    /// The nodes that need a write, those with restart requests first. `None` until all kinds are
    /// listed.
    fn outdated_nodes(
        &mut self,
        index: &ClusterIndex,
    ) -> Option<Vec<(String, String, NodeOrders)>> {
        if !index.unlisted_kinds().is_empty() {
            return None;
        }
        index.forget_deleted_nodes(&mut self.applied);
        let mut nodes = index.outdated_node_orders(&self.applied);
        nodes.sort_by_key(|(node, _, (_, restarts))| (restarts.is_empty(), *node <= self.last));
        Some(nodes)
    }

    /// Writes the orders of one node. Returns whether that succeeded.
    async fn apply(
        &mut self,
        writer: &ApiWriter,
        node: String,
        uid: &str,
        (policies, restarts): NodeOrders,
    ) -> bool {
        self.last.clone_from(&node);
        let fields = SpecFields::ContextPolicies(&policies, &restarts);
        if let Err(error) = writer.apply_spec(&node, uid, fields).await {
            // A failed write may still have been applied, so the owner of the current entries is
            // unknown.
            self.applied.remove(&node);
            if !self.failing {
                warn!(error = %error_chain(&error), "failed to apply context policies; retrying");
            }
            return false;
        }
        let namespaces = policies.len();
        info!(node, namespaces, ?restarts, "applied context policies");
        if namespaces == MAX_CONTEXTS {
            warn!(
                node,
                namespaces, "context policies truncated; other namespaces have the default"
            );
        }
        self.applied.insert(node, (policies, restarts));
        true
    }
}
