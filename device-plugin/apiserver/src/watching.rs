//! Follows the objects of one kind, counts failures and logs the first and the last of a row.

use std::time::Duration;

use bursar_watch::{History, Pauses, watch as follow};
use futures::TryStreamExt as _;
use kube::api::Api;
use kube::core::DynamicObject;
use kube::runtime::watcher::{Config, Event};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::metrics::ApiMetrics;

/// The timeout that a watch asks the API server for.
const WATCH_TIMEOUT_SECONDS: u32 = 200;

/// The first delay before a failed watch is restarted.
const MIN_BACKOFF: Duration = Duration::from_secs(1);

/// The longest delay without its jitter, which may double it. The delay is short because orders
/// wait for it after an outage.
const MAX_BACKOFF: Duration = Duration::from_secs(10);

/// Gives `apply` each event of the objects until `stop`. `kind` names them in the log.
pub(crate) async fn watch(
    objects: Api<DynamicObject>,
    config: Config,
    kind: &'static str,
    history: History,
    metrics: &ApiMetrics,
    stop: &CancellationToken,
    mut apply: impl FnMut(Event<DynamicObject>),
) {
    let config = config.timeout(WATCH_TIMEOUT_SECONDS);
    let pauses = Pauses::new(MIN_BACKOFF, MAX_BACKOFF);
    let mut events = std::pin::pin!(follow(objects, config, pauses, history));
    let mut failures = 0_u32;
    loop {
        let event = tokio::select! {
            () = stop.cancelled() => return,
            event = events.try_next() => event,
        };
        let event = match event {
            Ok(Some(event)) => event,
            Ok(None) => return stop.cancelled().await,
            Err(error) => {
                metrics.count_watch_failure(kind);
                if failures == 0 {
                    warn!(kind, %error, "failed to watch; retrying");
                }
                failures = failures.saturating_add(1);
                continue;
            }
        };
        if failures > 0 && !matches!(event, Event::Init) {
            info!(kind, failures, "watching after failures");
            failures = 0;
        }
        apply(event);
    }
}
