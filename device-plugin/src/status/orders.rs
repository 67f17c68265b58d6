//! Follows what is ordered in this node's `GpuNode`.
//!
//! A watch of one object. It is taken up again when it breaks, with a growing pause; the library lets none live
//! longer than some minutes, so one that died in silence is noticed.

use std::time::Duration;

use backon::ExponentialBuilder;
use bursar_crds::GpuNode;
use futures::TryStreamExt as _;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::resize::Orders;

/// How long one watch lives: what the server is asked to end it after.
const LIFETIME: u32 = 200;

/// The longest pause before a watch that failed is taken up again; chance adds as much at most, and so spreads the nodes
/// of a large cluster. The library's own would keep orders from an agent for up to a minute after an API server is back.
const MOST_PAUSE: Duration = Duration::from_secs(10);

/// The pauses of a watch that fails again and again.
fn pauses() -> watcher::ExponentialBackoff {
    let pauses = ExponentialBuilder::default().with_jitter();
    pauses.with_max_delay(MOST_PAUSE).without_max_times().into()
}

/// Keeps `orders` at what the `GpuNode` of `node` says, until `stop`. An object that is not there orders nothing.
pub async fn run(
    client: Client,
    node: String,
    orders: watch::Sender<Option<Orders>>,
    stop: CancellationToken,
) {
    let config = watcher::Config::default()
        .fields(&format!("metadata.name={node}"))
        .timeout(LIFETIME);
    let objects = watcher(Api::<GpuNode>::all(client), config).backoff(pauses());
    let mut objects = std::pin::pin!(objects);
    let mut listed = None;
    loop {
        let event = tokio::select! {
            () = stop.cancelled() => return,
            event = objects.try_next() => event,
        };
        let told = match event {
            Ok(Some(watcher::Event::Apply(object))) => Some(of(&object)),
            Ok(Some(watcher::Event::Delete(_))) => Some(Orders::default()),
            Ok(Some(watcher::Event::Init)) => {
                listed = None;
                None
            }
            Ok(Some(watcher::Event::InitApply(object))) => {
                listed = Some(of(&object));
                None
            }
            Ok(Some(watcher::Event::InitDone)) => Some(listed.take().unwrap_or_default()),
            Ok(None) => return stop.cancelled().await,
            Err(error) => {
                debug!(%error, "orders not followed");
                None
            }
        };
        if let Some(told) = told {
            orders.send_if_modified(|before| {
                let told = Some(told);
                let changed = *before != told;
                *before = told;
                changed
            });
        }
    }
}

fn of(object: &GpuNode) -> Orders {
    Orders {
        generation: object.metadata.generation,
        quotas: object.spec.quotas.clone(),
        reservations: object.spec.reservations.clone(),
        contexts: object.spec.context_policies.clone(),
        restarts: object.spec.restarts.clone(),
        // What is no UUID is no GPU's.
        drain: object
            .spec
            .drain
            .iter()
            .flat_map(|gpu| gpu.parse())
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_api_server_that_is_back_after_an_hour_is_found_within_twenty_seconds() {
        let mut away = Duration::ZERO;
        for pause in pauses().take(1000) {
            assert!(pause <= 2 * MOST_PAUSE, "{pause:?} after {away:?}");
            away += pause;
        }
        assert!(away > Duration::from_secs(3600), "it goes on: {away:?}");
    }
}
