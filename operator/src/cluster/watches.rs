//! Watches the cluster, updates the index and queues affected budgets.
//!
//! ```text
//!   six watches, own writes --> ClusterIndex --> affected --DEBOUNCE--> one reconcile per budget
//! ```
//!
//! The debounce bounds the rate of writes: each budget is reconciled once per period at most.

mod update;

use std::convert::identity;
use std::fmt::Debug;
use std::future::ready;
use std::time::Duration;

use bursar_crds::resources::{BUDGET_LABEL, QUOTA_LABEL};
use bursar_crds::{GpuMemoryBudget, GpuNode, Quantum};
use bursar_watch::{History, Pauses};
use futures::stream::{self, BoxStream, Stream, StreamExt, select_all};
use k8s_openapi::api::core::v1::{Namespace, ResourceQuota};
use kube::core::error_boundary::InvalidObject;
use kube::core::{DeserializeGuard, PartialObjectMeta};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::reflector::ObjectRef;
use kube::runtime::reflector::Store;
use kube::runtime::reflector::store::Writer;
use kube::runtime::watcher;
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use tracing::{info, warn};

use crate::budget::ObservedQuota;
use crate::cluster::own_writes::{WriteReceiver, merge_with_watch};
use crate::cluster::pod_request::{PodRequest, SlimPod};
use crate::cluster::unknown_values::{unknown_in_budget, unknown_in_node};
use crate::cluster::watch_liveness::WatchLiveness;
use crate::cluster::{
    BudgetSummary, GpuNodeSummary, NodeSummary, WatchEvent, budget_label, kinds, project,
};
use crate::error::error_chain;
use crate::placement::PlacementEvent;
use crate::placement::node::{GpuFacts, NodeFacts, SlimNode};
use crate::placement::node_usage::PodRequests;
use crate::placement::pod::PodFacts;
use crate::placement::snapshot::quota_overrides;
use crate::serve::metrics::Metrics;

pub use update::{DEBOUNCE, update_index};

/// The lifetime of a watch in seconds. The API server ends it then, and the client resumes it.
const WATCH_SECONDS: u32 = 200;

/// How long the API server may be silent within a response: a watch's lifetime and a margin. The
/// client restarts a watch after it.
pub const READ_TIMEOUT: Duration = Duration::from_secs(WATCH_SECONDS as u64 + 5);

/// The bounds of the back-off after a failed watch; jitter may double it. The operator finds an API
/// server that is back within 10 s.
const MIN_BACKOFF: Duration = Duration::from_millis(500);
const MAX_BACKOFF: Duration = Duration::from_secs(5);

/// How many budgets or GpuNodes one page of a list holds. They are parsed whole, and most of each
/// object is its `managedFields`.
const PAGE_SIZE: u32 = 50;

/// Watches all objects of a kind. Each watch detects a restored etcd by itself, because its
/// connection ends with the restored API server.
fn watch_kind<K>(
    api: Api<K>,
    config: watcher::Config,
) -> impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let pauses = Pauses::new(MIN_BACKOFF, MAX_BACKOFF);
    bursar_watch::watch(api, config, pauses, History::default())
}

/// Watches budgets, pods, GpuNodes, Nodes, quotas and namespaces.
///
/// Also keeps the store `budgets`, and merges `written` responses ahead of their watch events. A
/// failed watch is resumed with back-off.
pub fn watch_all(
    client: &Client,
    quantum: Quantum,
    budgets: Writer<GpuMemoryBudget>,
    metrics: &Metrics,
    liveness: &WatchLiveness,
    written: WriteReceiver,
) -> BoxStream<'static, WatchEvent> {
    let client = &liveness.instrument_client(client.clone());
    let liveness = || liveness.clone();
    let config = || watcher::Config::default().timeout(WATCH_SECONDS);
    let ours = || config().page_size(PAGE_SIZE);
    let watches = [
        {
            let api = Api::<DeserializeGuard<GpuMemoryBudget>>::all(client.clone());
            let watch =
                watch_kind(api, ours()).modify(|budget| budget.managed_fields_mut().clear());
            let store = budgets.as_reader();
            let mut budgets = budgets;
            instrumented(kinds::BUDGETS, metrics, liveness(), watch)
                .flat_map(move |event| {
                    if let Some(event) = store_event(event.clone(), &store) {
                        budgets.apply_watcher_event(&event);
                    }
                    let unreadable = unreadable_event(kinds::BUDGETS, &event, unknown_in_budget);
                    let overrides =
                        project(event.clone(), |budget| quota_overrides(readable(budget)?));
                    let summaries = project(event, |budget| {
                        Some(BudgetSummary::of(readable(budget)?, quantum))
                    });
                    stream::iter([unreadable]).chain(fan_out(
                        PlacementEvent::Overrides(overrides),
                        WatchEvent::Budget(summaries),
                    ))
                })
                .boxed()
        },
        {
            let watch = watch_kind(Api::<SlimPod>::all(client.clone()), config());
            let watch = instrumented(kinds::PODS, metrics, liveness(), watch);
            merge_with_watch(watch, written.pods, identity)
                .flat_map(move |event| {
                    let requests = project(event.clone(), |pod| PodRequests::parse(pod, quantum));
                    let facts = project(event.clone(), |pod| PodFacts::of(pod, quantum));
                    // The pod event comes before the usage event, so that a newly bound pod never
                    // counts twice.
                    let facts = stream::iter([WatchEvent::Placement(PlacementEvent::Pod(facts))]);
                    facts.chain(fan_out(
                        PlacementEvent::Requests(requests),
                        WatchEvent::Pod(project(event, |pod| PodRequest::of(pod, quantum))),
                    ))
                })
                .boxed()
        },
        {
            let api = Api::<DeserializeGuard<GpuNode>>::all(client.clone());
            let watch = instrumented(
                kinds::GPU_NODES,
                metrics,
                liveness(),
                watch_kind(api, ours()),
            );
            merge_with_watch(watch, written.gpu_nodes, |node| DeserializeGuard(Ok(node)))
                .flat_map(move |event| {
                    let unreadable = unreadable_event(kinds::GPU_NODES, &event, unknown_in_node);
                    let facts = project(event.clone(), |node| {
                        Some(GpuFacts::of(readable(node)?, quantum))
                    });
                    let gpus = project(event, |node: &DeserializeGuard<GpuNode>| {
                        Some(
                            readable(node).map_or_else(GpuNodeSummary::unreadable, |node| {
                                GpuNodeSummary::of(node, quantum)
                            }),
                        )
                    });
                    stream::iter([unreadable]).chain(fan_out(
                        PlacementEvent::GpuNode(facts),
                        WatchEvent::GpuNode(gpus),
                    ))
                })
                .boxed()
        },
        {
            let watch = watch_kind(Api::<SlimNode>::all(client.clone()), config());
            let watch = instrumented(kinds::NODES, metrics, liveness(), watch);
            merge_with_watch(watch, written.nodes, identity)
                .flat_map(move |event| {
                    let facts = |node: &SlimNode| Some(NodeFacts::of(node, quantum));
                    fan_out(
                        PlacementEvent::Node(project(event.clone(), facts)),
                        WatchEvent::Node(project(event, |node| {
                            Some(NodeSummary::of(node, quantum))
                        })),
                    )
                })
                .boxed()
        },
        {
            let quotas = Api::<ResourceQuota>::all(client.clone());
            let watch = watch_kind(quotas, config().labels(QUOTA_LABEL));
            let watch = instrumented(kinds::QUOTAS, metrics, liveness(), watch);
            merge_with_watch(watch, written.quotas, identity)
                .map(|event| {
                    WatchEvent::Quota(project(event, |quota| Some(ObservedQuota::of(quota))))
                })
                .boxed()
        },
        {
            let namespaces = Api::<PartialObjectMeta<Namespace>>::all(client.clone());
            let watch = watch_kind(namespaces, config().labels(BUDGET_LABEL));
            let watch = instrumented(kinds::NAMESPACES, metrics, liveness(), watch);
            merge_with_watch(watch, written.namespaces, identity)
                .map(|event| WatchEvent::Namespace(project(event, budget_label)))
                .boxed()
        },
    ];
    select_all(watches).boxed()
}

/// The object, if this version can parse it. During a rollout the cluster holds objects of other
/// versions, and one of them must not fail the whole list.
fn readable<K>(object: &DeserializeGuard<K>) -> Option<&K> {
    object.0.as_ref().ok()
}

/// Why an object cannot be parsed, or which of its fields has an unknown value.
fn unreadable_reason<K>(
    object: &DeserializeGuard<K>,
    unknown: fn(&K) -> Option<&'static str>,
) -> Option<String> {
    match &object.0 {
        Ok(object) => unknown(object).map(|field| format!("unknown value of {field}")),
        Err(reason) => Some(reason.error.clone()),
    }
}

fn unreadable_event<K: Resource<DynamicType = ()> + Clone>(
    kind: &'static str,
    event: &watcher::Event<DeserializeGuard<K>>,
    unknown: fn(&K) -> Option<&'static str>,
) -> WatchEvent {
    let reason = |object: &DeserializeGuard<K>| unreadable_reason(object, unknown);
    WatchEvent::Unreadable(kind, project(event.clone(), reason))
}

/// The event for the store of budgets, which holds only those that can be parsed.
fn store_event(
    event: watcher::Event<DeserializeGuard<GpuMemoryBudget>>,
    store: &Store<GpuMemoryBudget>,
) -> Option<watcher::Event<GpuMemoryBudget>> {
    use watcher::Event;
    let before = |unreadable: InvalidObject| {
        let metadata = &unreadable.metadata;
        let name = ObjectRef::new(metadata.name.as_deref()?);
        let there = store.get(&name.within(metadata.namespace.as_deref()?))?;
        Some(Event::Delete(there.as_ref().clone()))
    };
    match event {
        Event::Init => Some(Event::Init),
        Event::InitDone => Some(Event::InitDone),
        Event::InitApply(object) => object.0.ok().map(Event::InitApply),
        Event::Apply(object) => object
            .0
            .map_or_else(before, |object| Some(Event::Apply(object))),
        Event::Delete(object) => object
            .0
            .map_or_else(before, |object| Some(Event::Delete(object))),
    }
}

/// Sends one event to placement first and to the budgets last, so that a reconcile sees both.
fn fan_out(
    placement_event: PlacementEvent,
    event: WatchEvent,
) -> impl Stream<Item = WatchEvent> + Send {
    stream::iter([WatchEvent::Placement(placement_event), event])
}

/// Counts the errors of a watch, and logs the first of a row.
fn instrumented<T, S>(
    kind: &'static str,
    metrics: &Metrics,
    liveness: WatchLiveness,
    watch: S,
) -> impl Stream<Item = watcher::Event<T>> + Send + use<T, S>
where
    T: Send,
    S: Stream<Item = watcher::Result<watcher::Event<T>>> + Send,
{
    let metrics = metrics.clone();
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
                metrics.record_watch_failure(kind);
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
        404 => "install the chart's CRDs (crds.install)",
        _ => "check that the API server is reachable",
    }
}
