//! Tells the agents what is done about poisoned contexts: ahead by namespace, and afterwards where that changed.
//!
//! ```text
//!   budgets' contextPolicy --> world --> the same list to every GpuNode.spec.contextPolicies that has another
//!            faults that were left as they are, with a policy now that restarts --> GpuNode.spec.restarts
//! ```
//!
//! Every node gets every namespace's order: a pod may be on a node before a watch says so, and its first fault must
//! find the order there. Asking when it happens would take longer than the restart.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::observe::chain;
use crate::world::World;
use crate::write::Writer;

/// How often it is looked, and so how soon a write that failed is made again.
const EVERY: Duration = Duration::from_secs(1);

/// From one write to the next: some twenty a second are all that the API server should have of it.
const PACE: Duration = Duration::from_millis(50);

/// Keeps the nodes' orders at what the budgets say, until `shutdown`.
pub async fn run(writer: Writer, world: watch::Receiver<World>, shutdown: CancellationToken) {
    let mut failing = false;
    // What each node was given last. What else is there others wrote, and an apply leaves it.
    let mut written = BTreeMap::new();
    while shutdown.run_until_cancelled(sleep(EVERY)).await.is_some() {
        let (orders, nodes) = {
            let world = world.borrow();
            if !world.missing().is_empty() {
                continue;
            }
            let orders = Arc::new(world.contexts());
            let nodes = world.nodes_without(&orders, &written);
            (orders, nodes)
        };
        let mut failed = false;
        for (node, uid, restarts) in nodes {
            match writer.contexts(&node, &uid, &orders, &restarts).await {
                Ok(()) => {
                    info!(
                        node,
                        namespaces = orders.len(),
                        ?restarts,
                        "context policies"
                    );
                    written.insert(node, (orders.clone(), restarts));
                }
                Err(error) => {
                    failed = true;
                    // It may have arrived: whose what is there is, is open then.
                    written.remove(&node);
                    if !failing {
                        warn!(error = %chain(&error), "trying on");
                    }
                }
            }
            // What was begun is finished; nothing more is.
            if shutdown.run_until_cancelled(sleep(PACE)).await.is_none() {
                return;
            }
        }
        failing = failed;
    }
}
