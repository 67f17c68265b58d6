//! The task that plans and acts, for as long as the operator lives.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::apply::Executor;
use super::history::History;
use super::plan::{PlacementOptions, plan};
use crate::api::write::ApiWriter;
use crate::cluster::ClusterIndex;
use crate::error::error_chain;
use crate::run::Clock;
use crate::serve::metrics::Metrics;

/// How often it is planned: what happens meanwhile is gathered, and what waits for time is seen.
const INTERVAL: Duration = Duration::from_millis(500);

/// Plans from `world` once all of it has been listed, and acts, until `shutdown` and what was begun is done.
pub async fn run(
    writer: ApiWriter,
    index: watch::Receiver<ClusterIndex>,
    options: PlacementOptions,
    clock: Clock,
    metrics: Metrics,
    shutdown: CancellationToken,
) {
    let start = Instant::now();
    let executor = Executor::new(writer, options, clock);
    let mut history = History::default();
    let mut every = interval(INTERVAL);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Of each kind of step the first failure of a row is logged.
    let mut failing = BTreeSet::new();
    // How often the landscape had changed when there was nothing to be done, and nothing that waits for time.
    let mut at_rest = None;
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return,
            _ = every.tick() => {}
        }
        let now = start.elapsed();
        let steps = {
            let index = index.borrow();
            if !index.unlisted_kinds().is_empty() {
                continue;
            }
            let placement_index = index.placement();
            let changes = Some(placement_index.changes());
            if at_rest == changes {
                continue;
            }
            let steps = plan(placement_index, &mut history, &options, now);
            let rests = steps.is_empty() && history.is_idle();
            at_rest = changes.filter(|_| rests);
            steps
        };
        let mut failed = BTreeSet::new();
        for step in steps {
            let name = step.name();
            let result = executor.apply(step, &mut history, now).await;
            metrics.record_placement_step(name, result.is_ok());
            if let Err(error) = result {
                if failing.insert(name) {
                    warn!(step = name, error = %error_chain(&error), "trying on");
                }
                failed.insert(name);
            }
            if shutdown.is_cancelled() {
                return;
            }
        }
        failing = failed;
    }
}
