//! The task that plans and acts, for as long as the operator lives.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::apply::Hands;
use super::history::Memory;
use super::plan::{Rules, plan};
use crate::api::write::Writer;
use crate::cluster::World;
use crate::error::chain;
use crate::run::Clock;
use crate::serve::metrics::Metrics;

/// How often it is planned: what happens meanwhile is gathered, and what waits for time is seen.
const EVERY: Duration = Duration::from_millis(500);

/// Plans from `world` once all of it has been listed, and acts, until `shutdown` and what was begun is done.
pub async fn run(
    writer: Writer,
    world: watch::Receiver<World>,
    rules: Rules,
    clock: Clock,
    metrics: Metrics,
    shutdown: CancellationToken,
) {
    let start = Instant::now();
    let hands = Hands::new(writer, rules, clock);
    let mut memory = Memory::default();
    let mut every = interval(EVERY);
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
            let world = world.borrow();
            if !world.missing().is_empty() {
                continue;
            }
            let landscape = world.landscape();
            let changes = Some(landscape.changes());
            if at_rest == changes {
                continue;
            }
            let steps = plan(landscape, &mut memory, &rules, now);
            let rests = steps.is_empty() && memory.is_at_rest();
            at_rest = changes.filter(|_| rests);
            steps
        };
        let mut failed = BTreeSet::new();
        for step in steps {
            let name = step.name();
            let result = hands.act(step, &mut memory, now).await;
            metrics.stepped(name, result.is_ok());
            if let Err(error) = result {
                if failing.insert(name) {
                    warn!(step = name, error = %chain(&error), "trying on");
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
