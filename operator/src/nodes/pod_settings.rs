//! Writes what agents must know of their pods, as soon as a pod is on a node.
//!
//! ```text
//!   pods by node --> index --> GpuNode.spec.pods --> PreStartContainer in the node's agent
//! ```
//!
//! The agent waits for the settings when a container starts, so the operator writes them soon after
//! each change. One write has all pods of a node, and the operator writes several nodes at a time.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::stream::{self, StreamExt as _};
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::api::write::{ApiWriter, SpecFields};
use crate::cluster::ClusterIndex;
use crate::error::error_chain;

/// For how long the operator gathers changes before it writes. The kubelet takes longer to create a
/// pod's sandbox.
const GATHER: Duration = Duration::from_millis(20);

/// The delay before the operator repeats a failed write.
const RETRY: Duration = Duration::from_millis(500);

/// How many nodes the operator writes at a time.
const CONCURRENT_WRITES: usize = 16;

/// Keeps the settings up to date until `shutdown`.
pub async fn run(
    writer: ApiWriter,
    mut index: watch::Receiver<ClusterIndex>,
    shutdown: CancellationToken,
) {
    let mut applied = BTreeMap::new();
    let mut failing = false;
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return,
            Ok(()) = index.changed() => {}
            () = sleep(RETRY), if failing => {}
        }
        sleep(if failing { RETRY } else { GATHER }).await;
        let due = index
            .borrow_and_update()
            .outdated_pod_settings(&mut applied);
        let writes = stream::iter(due).take_until(shutdown.cancelled());
        let writes = writes.map(async |(node, uid, pods)| {
            let fields = SpecFields::Pods(&pods);
            let written = writer.apply_spec(&node, &uid, fields).await;
            (uid, pods, written)
        });
        let writes = writes.buffer_unordered(CONCURRENT_WRITES);
        let mut failed = false;
        for (uid, pods, written) in writes.collect::<Vec<_>>().await {
            match written {
                Ok(()) => drop(applied.insert(uid, pods)),
                Err(error) => {
                    // A failed write may still have been applied.
                    applied.remove(&uid);
                    if !failing && !failed {
                        warn!(error = %error_chain(&error), "failed to apply settings of pods; retrying");
                    }
                    failed = true;
                }
            }
        }
        failing = failed;
    }
}
