//! Tells the agents what is done about poisoned contexts: ahead by namespace, and afterwards where that changed.
//!
//! ```text
//!   budgets' contextPolicy, pods by node --> world --> GpuNode.spec.contextPolicies, where it is another
//!             faults that were left as they are, with a policy now that restarts --> GpuNode.spec.restarts
//! ```
//!
//! While few namespaces have an order, every node gets all of them: a pod's first fault must find the order there, and
//! asking when it happens would take longer than the restart. Of many a node gets those of the namespaces that have pods
//! there. Such a pod is bound seconds before it can fault; where the order comes later all the same, for no operator
//! runs or much is written, its container is restarted.

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

/// How often it is looked, and so how soon a write that failed is made again.
const INTERVAL: Duration = Duration::from_secs(1);

/// From one write to the next: some twenty a second are all that the API server should have of it.
const WRITE_PACE: Duration = Duration::from_millis(50);

/// So many writes from one look to the next: what has become urgent waits for no more.
const MAX_WRITES: usize = 20;

/// Keeps the nodes' orders at what the budgets say, until `shutdown`.
pub async fn run(
    writer: ApiWriter,
    mut index: watch::Receiver<ClusterIndex>,
    shutdown: CancellationToken,
) {
    let mut failing = false;
    // What each node was given last. What else is there others wrote, and an apply leaves it.
    let mut written = BTreeMap::new();
    // The node that was written to last. It goes on from there: nodes that fail hold up no others.
    let mut last = String::new();
    let mut left = true;
    let mut pause = INTERVAL;
    while shutdown.run_until_cancelled(sleep(pause)).await.is_some() {
        pause = INTERVAL;
        if !left && !index.has_changed().unwrap_or(false) {
            continue;
        }
        let mut nodes = {
            let index = index.borrow_and_update();
            if !index.unlisted_kinds().is_empty() {
                continue;
            }
            index.forget_deleted_nodes(&mut written);
            index.outdated_node_orders(&written)
        };
        nodes.sort_by_key(|(node, _, (_, restarts))| (restarts.is_empty(), *node <= last));
        let mut failed = false;
        left = nodes.len() > MAX_WRITES;
        for (node, uid, (orders, restarts)) in nodes.into_iter().take(MAX_WRITES) {
            last.clone_from(&node);
            match writer
                .apply_context_policies(&node, &uid, &orders, &restarts)
                .await
            {
                Ok(()) => {
                    let namespaces = orders.len();
                    info!(node, namespaces, ?restarts, "context policies");
                    if namespaces == MAX_CONTEXTS {
                        warn!(
                            node,
                            namespaces,
                            "no room for more context policies: others are as by default"
                        );
                    }
                    written.insert(node, (orders, restarts));
                }
                Err(error) => {
                    failed = true;
                    // It may have arrived: whose what is there is, is open then.
                    written.remove(&node);
                    if !failing {
                        warn!(error = %error_chain(&error), "trying on");
                    }
                }
            }
            // What was begun is finished; nothing more is.
            if shutdown
                .run_until_cancelled(sleep(WRITE_PACE))
                .await
                .is_none()
            {
                return;
            }
        }
        failing = failed;
        if left && !failed {
            // The writes are slow enough by themselves.
            pause = Duration::ZERO;
        }
        left |= failed;
    }
}
