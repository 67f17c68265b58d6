//! Turns a watch that may fail into events. Logs and counts the failures.

use std::future::ready;

use futures::stream::{Stream, StreamExt as _};
use kube::runtime::watcher;
use tracing::{info, warn};

use crate::cluster::watch_liveness::WatchLiveness;
use crate::error::error_chain;

/// Counts the errors of a watch, and logs the first of a row.
pub(super) fn instrumented<T, S>(
    kind: &'static str,
    liveness: WatchLiveness,
    watch: S,
) -> impl Stream<Item = watcher::Event<T>> + Send + use<T, S>
where
    T: Send,
    S: Stream<Item = watcher::Result<watcher::Event<T>>> + Send,
{
    let mut failures = 0_u32;
    watch.filter_map(move |item| {
        liveness.record_progress(kind);
        let event = match item {
            Ok(event) => {
                if failures > 0 && !matches!(event, watcher::Event::Init) {
                    info!(kind, failures, "watch recovered");
                    failures = 0;
                }
                Some(event)
            }
            Err(error) => {
                liveness.record_failure(kind);
                failures = failures.saturating_add(1);
                if failures == 1 {
                    warn!(kind, error = %error_chain(&error), remedy = hint(&error), "watch failed; retrying");
                }
                None
            }
        };
        ready(event)
    })
}

fn hint(error: &watcher::Error) -> &'static str {
    let code = match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status))
        | watcher::Error::WatchError(status) => status.code,
        _ => 0,
    };
    match code {
        401 | 403 => "give the operator's service account the chart's ClusterRole",
        404 => "install the chart's CRDs (crds.enabled)",
        _ => "check that the API server is reachable",
    }
}
