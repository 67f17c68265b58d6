//! Reports a GpuNode as not Ready while its agent is away, because nobody else would.
//!
//! ```text
//!   Ready condition of the agents' pods --> index --a minute--> GpuNode.status: Ready=Unknown
//! ```
//!
//! The kubelet judges an agent, so this needs no heartbeat. An agent that is not Ready and writes
//! takes its condition back; the operator writes again after ten minutes.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::api::write::ApiWriter;
use crate::clock::Clock;
use crate::cluster::ClusterIndex;
use crate::error::error_chain;

/// The interval between two looks, and so the delay before a failed write is retried.
const INTERVAL: Duration = Duration::from_secs(5);

/// The pause between two writes, so that a lost zone costs the API server twenty writes a second.
const WRITE_PACE: Duration = Duration::from_millis(50);

/// Runs until `shutdown`.
pub async fn run(
    writer: ApiWriter,
    index: watch::Receiver<ClusterIndex>,
    clock: Clock,
    shutdown: CancellationToken,
) {
    let mut reported = BTreeMap::new();
    let mut failing = false;
    while shutdown
        .run_until_cancelled(sleep(INTERVAL))
        .await
        .is_some()
    {
        let due = {
            let index = index.borrow();
            match index.unlisted_kinds().is_empty() {
                true => index.unreported_absences(&mut reported, Instant::now()),
                false => continue,
            }
        };
        let mut failed = false;
        for (node, uid) in due {
            match writer.report_absent_agent(&node, &uid, clock()).await {
                Ok(()) => {
                    info!(node, "the agent of a node is away");
                    reported.insert(uid, Instant::now());
                }
                Err(error) => {
                    if !failing && !failed {
                        warn!(error = %error_chain(&error), "failed to report absent agents; retrying");
                    }
                    failed = true;
                }
            }
            if shutdown
                .run_until_cancelled(sleep(WRITE_PACE))
                .await
                .is_none()
            {
                return;
            }
        }
        failing = failed;
    }
}
