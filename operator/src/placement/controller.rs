//! Plans and applies placement steps until shutdown.

use std::collections::BTreeSet;
use std::panic::resume_unwind;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::spawn_blocking;
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

/// The shortest pause between two plans. It also drives steps that wait for time.
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
        let (view, changes) = {
            let index = index.borrow();
            if !index.unlisted_kinds().is_empty() || at_rest == Some(index.placement_changes()) {
                continue;
            }
            (index.placement_view(), index.placement_changes())
        };
        // A plan for thousands of nodes takes long enough to hold up a worker of the runtime.
        let planned = spawn_blocking(move || {
            let begin = Instant::now();
            let steps = plan(&view, &mut history, &options, now);
            (steps, history, begin.elapsed())
        });
        let (steps, observed, took) = match planned.await {
            Ok(planned) => planned,
            Err(error) if error.is_panic() => resume_unwind(error.into_panic()),
            // The runtime ends.
            Err(_) => return,
        };
        history = observed;
        metrics.record_plan(took);
        // In a large cluster that changes all the time plans would take a whole processor.
        every.reset_after(INTERVAL.max(took));
        at_rest = (steps.is_empty() && history.is_idle()).then_some(changes);
        let mut failed = BTreeSet::new();
        for step in steps {
            if shutdown.is_cancelled() {
                return;
            }
            let (name, count) = (step.name(), step.count());
            let result = executor.apply(step, &mut history, now).await;
            metrics.record_placement_steps(name, result.is_ok(), count);
            if let Err(error) = result {
                if failing.insert(name) {
                    warn!(step = name, error = %error_chain(&error), "failed to apply a placement step; retrying");
                }
                failed.insert(name);
            }
        }
        failing = failed;
    }
}
