//! Watches this node's `GpuNode` for changes of the spec, and of the status that the agent wrote.

use bursar_watch::History;
use kube::Client;
use kube::core::DynamicObject;
use kube::runtime::watcher::{Config, Event};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::gpu_node::{ObservedObject, gpu_nodes};
use super::{spec, watching};
use crate::ParsedSpec;
use crate::metrics::ApiMetrics;

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
    let config = Config::default().fields(&format!("metadata.name={node}"));
    let metrics = output.metrics.clone();
    let mut listed = None;
    let apply = |event| match event {
        Event::Init => listed = None,
        Event::InitApply(object) => listed = Some(object),
        Event::InitDone => output.publish(listed.take().as_ref(), true),
        Event::Apply(object) => output.publish(Some(&object), false),
        Event::Delete(_) => output.publish(None, false),
    };
    let (objects, kind) = (gpu_nodes(client), "GpuNode");
    watching::watch(objects, config, kind, history, &metrics, &stop, apply).await;
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
