//! Follows this node's `GpuNode`: what is ordered in it, and whether it still is as the agent wrote it.

use std::time::Duration;

use bursar_watch::{History, Pauses, watch as follow};
use futures::TryStreamExt as _;
use kube::Client;
use kube::core::DynamicObject;
use kube::runtime::watcher;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::api::{ObservedObject, gpu_nodes};
use super::spec;
use crate::gpu_node::quota_overrides::ParsedSpec;
use crate::metrics::Metrics;

/// How many seconds one watch lives: what the server is asked to end it after.
const WATCH_TIMEOUT_SECONDS: u32 = 200;

/// The first pause before a watch that failed is taken up again.
const MIN_BACKOFF: Duration = Duration::from_secs(1);

/// The longest pause, to which chance adds as much at most. It is short, for orders wait that long for an agent once
/// an API server is back.
const MAX_BACKOFF: Duration = Duration::from_secs(10);

/// What the watch tells of the object.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Observation {
    /// Nothing so far.
    #[default]
    Pending,
    /// The object is not there.
    NotFound,
    /// The object as an event or a list has it.
    Object {
        /// What it says.
        known: Box<ObservedObject>,
        /// Whether a list has it, which is the newest state whatever its revision.
        is_listed: bool,
    },
}

/// Where the watch tells it.
pub struct WatchOutput {
    /// What is ordered; none before the object was seen.
    pub spec: watch::Sender<Option<ParsedSpec>>,
    /// The object itself.
    pub observed: watch::Sender<Observation>,
    /// Where failures are counted.
    pub metrics: Metrics,
}

/// Follows the `GpuNode` of `node` until `stop`.
pub async fn run(
    client: Client,
    node: String,
    history: History,
    told: WatchOutput,
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
                told.metrics.count_watch_failure();
                if failures == 0 {
                    warn!(%error, "failed to watch GpuNode; trying on");
                }
                failures = failures.saturating_add(1);
                continue;
            }
        };
        if failures > 0 {
            info!(failures, "GpuNode is watched again");
            failures = 0;
        }
        told.publish(object.as_ref(), is_listed);
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

/// What is ordered, after what was `before`. An object that is not there lifts no drain, for somebody may have a GPU in
/// hand by now; an object that is there has to say so.
fn next_spec(before: Option<&ParsedSpec>, object: Option<&DynamicObject>) -> Option<ParsedSpec> {
    match object {
        Some(object) => Some(spec::parse_spec(object)),
        None => before.map(|before| ParsedSpec {
            drain: before.drain.clone(),
            ..ParsedSpec::default()
        }),
    }
}
