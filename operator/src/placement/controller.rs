//! Plans and applies placement steps until shutdown.

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
use crate::clock::Clock;
use crate::cluster::ClusterIndex;
use crate::error::error_chain;
use crate::serve::metrics::Metrics;

/// The interval between two plans. It also drives steps that wait for time.
const INTERVAL: Duration = Duration::from_millis(500);

/// Plans once all kinds are listed, and applies the steps, until `shutdown`. Finishes the step that
/// has begun.
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
    // The kinds of steps whose last attempt failed. Only the first failure of a row is logged.
    let mut failing = BTreeSet::new();
    // The change count of the index at the last empty plan without deadlines.
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
            let changes = Some(index.placement_changes());
            if at_rest == changes {
                continue;
            }
            let begin = Instant::now();
            let steps = plan(&index, &mut history, &options, now);
            metrics.record_plan(begin.elapsed());
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
                    warn!(step = name, error = %error_chain(&error), "failed to apply a placement step; retrying");
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
