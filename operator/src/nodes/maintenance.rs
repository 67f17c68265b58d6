//! Drains the GPUs of nodes on which NVIDIA's operators change the driver or MIG instances.
//!
//! ```text
//!   Node labels of the GPU operator and of MIG manager --> index --> GpuNode.spec.drain
//! ```
//!
//! Both need GPUs that no process uses. They end NVIDIA's own clients, and do not know Bursar's
//! pods and agent. The operator's entries have a field manager of their own. So GPUs that an admin
//! drains stay drained when the operator returns its own.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::api::events::publish_on_node;
use crate::api::write::{ApiWriter, SpecFields};
use crate::cluster::ClusterIndex;
use crate::error::error_chain;

/// The interval between two comparisons, and so the delay before a failed write is retried.
const INTERVAL: Duration = Duration::from_secs(1);

/// Keeps the drains up to date until `shutdown`.
pub async fn run(
    writer: ApiWriter,
    mut index: watch::Receiver<ClusterIndex>,
    shutdown: CancellationToken,
) {
    // The last spec that the operator applied to each GpuNode, by UID.
    let mut applied: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut failing = false;
    while shutdown
        .run_until_cancelled(sleep(INTERVAL))
        .await
        .is_some()
    {
        if !failing && !index.has_changed().unwrap_or(false) {
            continue;
        }
        let due = {
            let index = index.borrow_and_update();
            if !index.unlisted_kinds().is_empty() {
                continue;
            }
            index.due_drains(&mut applied)
        };
        let mut failed = false;
        for (node, uid, gpus) in due {
            if shutdown.is_cancelled() {
                return;
            }
            let fields = SpecFields::Drain(&gpus);
            match writer.apply_spec(&node, &uid, fields).await {
                Ok(()) => {
                    info!(node, ?gpus, "applied a drain for NVIDIA's operators");
                    let before = applied.insert(uid, gpus.clone());
                    if gpus.is_empty() != before.is_none_or(|before| before.is_empty()) {
                        publish_drain(&writer, &node, &gpus).await;
                    }
                }
                Err(error) => {
                    failed = true;
                    // A failed write may still have been applied.
                    applied.remove(&uid);
                    if !failing {
                        warn!(error = %error_chain(&error), "failed to apply a drain; retrying");
                    }
                }
            }
        }
        failing = failed;
    }
}

/// Publishes on the node that NVIDIA's operators begin or end a drain.
async fn publish_drain(writer: &ApiWriter, node: &str, gpus: &[String]) {
    let (reason, note) = match gpus.is_empty() {
        false => (
            "GpusDraining",
            "NVIDIA's operators change the driver or MIG instances: GPUs of this node are drained",
        ),
        true => (
            "GpusReturned",
            "NVIDIA's operators are done: GPUs of this node get pods again",
        ),
    };
    publish_on_node(writer.client(), node, reason, note).await;
}
