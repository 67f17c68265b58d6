//! Updates the index by watch events.

use std::time::Duration;

use bursar_crds::GpuMemoryBudget;
use futures::stream::{Stream, StreamExt};
use kube::runtime::reflector::ObjectRef;
use kube::runtime::watcher;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::cluster::unknown_values::REMEDY;
use crate::cluster::{Affected, ClusterIndex, Key, WatchEvent};

/// How often the index gets the time while it has deadlines.
const CLOCK_INTERVAL: Duration = Duration::from_secs(5);

/// How long affected budgets are collected before they are queued.
pub const DEBOUNCE: Duration = Duration::from_millis(500);

/// Applies `changes` to the index and queues affected budgets in `work` once all kinds are listed.
///
/// Ends with `shutdown`, with `changes`, or when the receiver of `work` is gone.
pub async fn update_index(
    mut changes: impl Stream<Item = WatchEvent> + Unpin,
    index: watch::Sender<ClusterIndex>,
    work: mpsc::Sender<ObjectRef<GpuMemoryBudget>>,
    gather: Duration,
    shutdown: CancellationToken,
) {
    let mut affected = Affected::default();
    let mut due = None;
    let mut clock = interval(CLOCK_INTERVAL);
    clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return,
            event = changes.next() => {
                let Some(event) = event else { return };
                warn_if_unreadable(&index.borrow(), &event);
                index.send_modify(|index| affected.add(index.apply(event)));
            }
            now = clock.tick(), if index.borrow().has_deadlines() => {
                index.send_if_modified(|index| {
                    let changed = index.apply(WatchEvent::Clock(now));
                    let is_news = !changed.is_empty();
                    affected.add(changed);
                    is_news
                });
            }
            () = sleep_until_due(due) => {
                due = None;
                let budgets = index.borrow().affected_budgets(&std::mem::take(&mut affected));
                for key in budgets {
                    let budget = ObjectRef::new(&key.name).within(&key.namespace);
                    if work.send(budget).await.is_err() {
                        return;
                    }
                }
            }
        }
        if due.is_none() && !affected.is_empty() && index.borrow().unlisted_kinds().is_empty() {
            due = Some(Instant::now() + gather);
        }
    }
}

/// Logs an unreadable object once.
fn warn_if_unreadable(index: &ClusterIndex, event: &WatchEvent) {
    use watcher::Event::{Apply, InitApply};
    if let WatchEvent::Unreadable(kind, Apply((key, Some(error))) | InitApply((key, Some(error)))) =
        event
        && !index.is_unreadable(kind, key)
    {
        let Key { namespace, name } = key;
        warn!(
            kind,
            namespace,
            name,
            error,
            remedy = REMEDY,
            "failed to read all of an object"
        );
    }
}

async fn sleep_until_due(due: Option<Instant>) {
    match due {
        Some(due) => sleep_until(due).await,
        None => std::future::pending().await,
    }
}
