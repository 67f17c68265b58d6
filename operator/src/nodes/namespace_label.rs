//! Removes the label of namespaces whose budget is gone.
//!
//! Kubernetes deletes their quotas by owner reference.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::api::write::ApiWriter;
use crate::cluster::ClusterIndex;
use crate::error::error_chain;

/// The interval between two checks, and so the delay before a failed write is retried.
const INTERVAL: Duration = Duration::from_secs(2);

/// Runs until `shutdown`.
pub async fn run(
    writer: ApiWriter,
    index: watch::Receiver<ClusterIndex>,
    shutdown: CancellationToken,
) {
    let mut failing = false;
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = sleep(INTERVAL) => {}
        }
        let deserted = index.borrow().namespaces_without_budget();
        let mut failed = false;
        for namespace in deserted {
            if shutdown.is_cancelled() {
                return;
            }
            if let Err(error) = writer.label_namespace(&namespace, None).await {
                failed = true;
                if !failing {
                    warn!(error = %error_chain(&error), "failed to remove a namespace label; retrying");
                }
            }
        }
        failing = failed;
    }
}
