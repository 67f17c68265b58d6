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

use crate::api::write::ApiWriter;
use crate::cluster::ClusterIndex;
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
    let mut failing = false;
    // What the operator last applied to each node. Server-side apply leaves other entries alone.
    let mut applied = BTreeMap::new();
    // The node of the last write. The next round starts after it, so that failing nodes block no
    // others.
    let mut last = String::new();
    let mut has_more = true;
    let mut pause = INTERVAL;
    while shutdown.run_until_cancelled(sleep(pause)).await.is_some() {
        pause = INTERVAL;
        if !has_more && !index.has_changed().unwrap_or(false) {
            continue;
        }
        let mut nodes = {
            let index = index.borrow_and_update();
            if !index.unlisted_kinds().is_empty() {
                continue;
            }
            index.forget_deleted_nodes(&mut applied);
            index.outdated_node_orders(&applied)
        };
        nodes.sort_by_key(|(node, _, (_, restarts))| (restarts.is_empty(), *node <= last));
        let mut failed = false;
        has_more = nodes.len() > MAX_WRITES;
        for (node, uid, (orders, restarts)) in nodes.into_iter().take(MAX_WRITES) {
            last.clone_from(&node);
            match writer
                .apply_context_policies(&node, &uid, &orders, &restarts)
                .await
            {
                Ok(()) => {
                    let namespaces = orders.len();
                    info!(node, namespaces, ?restarts, "applied context policies");
                    if namespaces == MAX_CONTEXTS {
                        warn!(
                            node,
                            namespaces,
                            "context policies truncated; other namespaces have the default"
                        );
                    }
                    applied.insert(node, (orders, restarts));
                }
                Err(error) => {
                    failed = true;
                    // A failed write may still have been applied, so the owner of the current
                    // entries is unknown.
                    applied.remove(&node);
                    if !failing {
                        warn!(error = %error_chain(&error), "failed to apply context policies; retrying");
                    }
                }
            }
            // A shutdown ends the round after the current write.
            if shutdown
                .run_until_cancelled(sleep(WRITE_PACE))
                .await
                .is_none()
            {
                return;
            }
        }
        failing = failed;
        if has_more && !failed {
            // The pace of the writes is pause enough.
            pause = Duration::ZERO;
        }
        has_more |= failed;
    }
}
