//! Watches this node's `GpuNode` for changes of the spec, and of the status that the agent wrote.

use std::time::Duration;

use bursar_watch::{History, Pauses, watch as follow};
use futures::TryStreamExt as _;
use kube::Client;
use kube::core::DynamicObject;
use kube::runtime::watcher;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::gpu_node::{ObservedObject, gpu_nodes};
use super::spec;
use crate::ParsedSpec;
use crate::metrics::ApiMetrics;

/// The timeout that the watch asks the API server for.
const WATCH_TIMEOUT_SECONDS: u32 = 200;

/// The first delay before a failed watch is restarted.
const MIN_BACKOFF: Duration = Duration::from_secs(1);

/// The longest delay without its jitter, which may double it. The delay is short because the node's
/// spec waits for it after an outage.
const MAX_BACKOFF: Duration = Duration::from_secs(10);

/// The object as the watch observes it.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Observation {
    /// The watch has reported nothing.
    #[default]
    Pending,
    /// The object does not exist.
    NotFound,
    /// The object of an event or a list.
    Object {
        /// The object.
        known: Box<ObservedObject>,
        /// Whether a list returned the object; a list is current whatever its resource version.
        is_listed: bool,
    },
}

/// Where the watch publishes what it observes.
pub struct WatchOutput {
    /// The parsed spec; none before the first observation.
    pub spec: watch::Sender<Option<ParsedSpec>>,
    /// The object.
    pub observed: watch::Sender<Observation>,
    /// Counts failures.
    pub metrics: ApiMetrics,
}

/// Watches the `GpuNode` of `node` until `stop`.
pub async fn run(
    client: Client,
    node: String,
    history: History,
    output: WatchOutput,
    stop: CancellationToken,
) {
    let config = watcher::Config::default()
        .fields(&format!("metadata.name={node}"))
        .timeout(WATCH_TIMEOUT_SECONDS);
    let pauses = Pauses::new(MIN_BACKOFF, MAX_BACKOFF);
    let objects = follow(gpu_nodes(client), config, pauses, history);
    let mut objects = std::pin::pin!(objects);
    let (mut listed, mut failures) = (None, 0_u32);
    loop {
        let event = tokio::select! {
            () = stop.cancelled() => return,
            event = objects.try_next() => event,
        };
        let (object, is_listed) = match event {
            Ok(Some(watcher::Event::Apply(object))) => (Some(object), false),
            Ok(Some(watcher::Event::Delete(_))) => (None, false),
            Ok(Some(watcher::Event::Init)) => {
                listed = None;
                continue;
            }
            Ok(Some(watcher::Event::InitApply(object))) => {
                listed = Some(object);
                continue;
            }
            Ok(Some(watcher::Event::InitDone)) => (listed.take(), true),
            Ok(None) => return stop.cancelled().await,
            Err(error) => {
                output.metrics.count_watch_failure();
                if failures == 0 {
                    warn!(%error, "failed to watch GpuNode; retrying");
                }
                failures = failures.saturating_add(1);
                continue;
            }
        };
        if failures > 0 {
            info!(failures, "watching GpuNode after failures");
            failures = 0;
        }
        output.publish(object.as_ref(), is_listed);
    }
}

impl WatchOutput {
    fn publish(&self, object: Option<&DynamicObject>, is_listed: bool) {
        self.spec.send_if_modified(|before| {
            let after = next_spec(before.as_ref(), object);
            let changed = *before != after;
            *before = after;
            changed
        });
        self.observed.send_replace(match object {
            None => Observation::NotFound,
            Some(object) => Observation::Object {
                known: Box::new(ObservedObject::from_object(object)),
                is_listed,
            },
        });
    }
}

/// Returns the spec that is in force after `before`. A missing object lifts no drain, because an
/// administrator may be working on the GPU; only a spec without the drain lifts it.
fn next_spec(before: Option<&ParsedSpec>, object: Option<&DynamicObject>) -> Option<ParsedSpec> {
    match object {
        Some(object) => Some(spec::parse_spec(object)),
        None => before.map(|before| ParsedSpec {
            drain: before.drain.clone(),
            ..ParsedSpec::default()
        }),
    }
}
