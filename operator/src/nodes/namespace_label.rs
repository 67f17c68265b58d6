//! Takes the label off namespaces whose budget is gone. Their quotas go with it, by owner reference.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::api::write::Writer;
use crate::cluster::World;
use crate::error::chain;

/// How often it is looked, and so how soon a write that failed is made again.
const EVERY: Duration = Duration::from_secs(2);

/// Runs until `shutdown`.
pub async fn run(writer: Writer, world: watch::Receiver<World>, shutdown: CancellationToken) {
    let mut failing = false;
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = sleep(EVERY) => {}
        }
        let deserted = world.borrow().deserted();
        let mut failed = false;
        for namespace in deserted {
            if shutdown.is_cancelled() {
                return;
            }
            if let Err(error) = writer.label(&namespace, None).await {
                failed = true;
                if !failing {
                    warn!(error = %chain(&error), "trying on");
                }
            }
        }
        failing = failed;
    }
}
