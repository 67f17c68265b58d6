//! Watches the cluster, updates the index and queues affected budgets.
//!
//! ```text
//!   the watches, own writes --> ClusterIndex --> affected --DEBOUNCE--> one reconcile per budget
//! ```
//!
//! The debounce bounds the rate of writes: each budget is reconciled once per period at most.

mod instrument;
mod unreadable;
mod update;

use std::convert::identity;
use std::fmt::Debug;
use std::time::Duration;

use bursar_crds::resources::{BUDGET_LABEL, QUOTA_LABEL};
use bursar_crds::{GpuMemoryBudget, GpuNamespace, GpuNode, Quantum};
use bursar_watch::{History, Pauses};
use futures::stream::{self, BoxStream, Stream, StreamExt, select_all};
use k8s_openapi::api::core::v1::{Namespace, ResourceQuota};
use kube::core::{DeserializeGuard, PartialObjectMeta};
use kube::runtime::reflector::store::Writer;
use kube::runtime::watcher;
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;

use crate::budget::ObservedQuota;
use crate::cluster::facts::node::NodeFacts;
use crate::cluster::facts::pod::PodSummary;
use crate::cluster::own_writes::{Responses, WriteReceiver, merge_with_watch};
use crate::cluster::slim_node::SlimNode;
use crate::cluster::slim_pod::SlimPod;
use crate::cluster::unknown_values::{unknown_in_budget, unknown_in_node};
use crate::cluster::watch_liveness::WatchLiveness;
use crate::cluster::{
    BudgetSummary, GpuNamespaceSummary, GpuNodeSummary, WatchEvent, budget_label, kinds, project,
};
use instrument::instrumented;
use unreadable::{readable, store_event, unreadable_event};

pub use update::{DEBOUNCE, update_index};

/// The lifetime of a watch in seconds. The API server ends it then, and the client resumes it by
/// two small requests. A connection that a network lost in silence is found by then: kube's client
/// speaks HTTP/1.1, which has no pings.
const WATCH_SECONDS: u32 = 45;

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

/// Watches budgets, pods, GpuNodes, GpuNamespaces, Nodes, quotas and namespaces.
///
/// Also keeps the store `budgets`, and merges `written` responses ahead of their watch events. A
/// failed watch is resumed with back-off.
pub fn watch_all(
    client: &Client,
    quantum: Quantum,
    budgets: Writer<GpuMemoryBudget>,
    liveness: &WatchLiveness,
    written: WriteReceiver,
) -> BoxStream<'static, WatchEvent> {
    let watches = Watches {
        client: liveness.instrument_client(client.clone()),
        quantum,
        liveness,
    };
    let all = [
        watches.budgets(budgets),
        watches.pods(written.pods),
        watches.gpu_nodes(written.gpu_nodes),
        watches.gpu_namespaces(written.gpu_namespaces),
        watches.nodes(written.nodes),
        watches.quotas(written.quotas),
        watches.namespaces(written.namespaces),
    ];
    select_all(all).boxed()
}

/// Watches each kind, and projects its objects to what the index needs.
struct Watches<'a> {
    client: Client,
    quantum: Quantum,
    liveness: &'a WatchLiveness,
}

impl Watches<'_> {
    /// Watches all objects of a kind. Each watch detects a restored etcd by itself, because its
    /// connection ends with the restored API server.
    fn watch<K>(
        &self,
        kind: &'static str,
        config: watcher::Config,
    ) -> impl Stream<Item = watcher::Event<K>> + Send + use<K>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        let api = Api::all(self.client.clone());
        let pauses = Pauses::new(MIN_BACKOFF, MAX_BACKOFF);
        let watch = bursar_watch::watch(api, config, pauses, History::default());
        instrumented(kind, self.liveness.clone(), watch)
    }

    fn budgets(&self, mut budgets: Writer<GpuMemoryBudget>) -> BoxStream<'static, WatchEvent> {
        let quantum = self.quantum;
        let store = budgets.as_reader();
        self.watch(kinds::BUDGETS, config().page_size(PAGE_SIZE))
            .flat_map(move |event: watcher::Event<DeserializeGuard<_>>| {
                let event = event.modify(|budget| budget.managed_fields_mut().clear());
                if let Some(event) = store_event(event.clone(), &store) {
                    budgets.apply_watcher_event(&event);
                }
                let unreadable = unreadable_event(kinds::BUDGETS, &event, unknown_in_budget);
                let summaries = project(&event, |budget| {
                    Some(BudgetSummary::of(readable(budget)?, quantum))
                });
                stream::iter([unreadable, WatchEvent::Budget(summaries)])
            })
            .boxed()
    }

    fn pods(&self, written: Responses<SlimPod>) -> BoxStream<'static, WatchEvent> {
        let quantum = self.quantum;
        let watch = self.watch(kinds::PODS, config());
        merge_with_watch(watch, written, identity)
            .map(move |event| WatchEvent::Pod(project(&event, |pod| PodSummary::of(pod, quantum))))
            .boxed()
    }

    fn gpu_nodes(&self, written: Responses<GpuNode>) -> BoxStream<'static, WatchEvent> {
        let quantum = self.quantum;
        let watch = self.watch(kinds::GPU_NODES, config().page_size(PAGE_SIZE));
        merge_with_watch(watch, written, |node| DeserializeGuard(Ok(node)))
            .flat_map(move |event| {
                let unreadable = unreadable_event(kinds::GPU_NODES, &event, unknown_in_node);
                let gpus = project(&event, |node: &DeserializeGuard<GpuNode>| {
                    Some(
                        readable(node).map_or_else(GpuNodeSummary::unreadable, |node| {
                            GpuNodeSummary::of(node, quantum)
                        }),
                    )
                });
                stream::iter([unreadable, WatchEvent::GpuNode(gpus)])
            })
            .boxed()
    }

    /// An object that this version cannot parse has no policy, so the operator writes it again.
    fn gpu_namespaces(&self, written: Responses<GpuNamespace>) -> BoxStream<'static, WatchEvent> {
        let watch = self.watch(kinds::GPU_NAMESPACES, config());
        merge_with_watch(watch, written, |of| DeserializeGuard(Ok(of)))
            .map(|event| {
                let summary = |of: &DeserializeGuard<GpuNamespace>| {
                    Some(match &of.0 {
                        Ok(of) => GpuNamespaceSummary::of(of),
                        Err(unreadable) => GpuNamespaceSummary {
                            uid: unreadable.metadata.uid.clone().unwrap_or_default(),
                            context_policy: None,
                        },
                    })
                };
                WatchEvent::GpuNamespace(project(&event, summary))
            })
            .boxed()
    }

    fn nodes(&self, written: Responses<SlimNode>) -> BoxStream<'static, WatchEvent> {
        let quantum = self.quantum;
        let watch = self.watch(kinds::NODES, config());
        merge_with_watch(watch, written, identity)
            .map(move |event| {
                WatchEvent::Node(project(&event, |node| Some(NodeFacts::of(node, quantum))))
            })
            .boxed()
    }

    fn quotas(&self, written: Responses<ResourceQuota>) -> BoxStream<'static, WatchEvent> {
        let watch = self.watch(kinds::QUOTAS, config().labels(QUOTA_LABEL));
        merge_with_watch(watch, written, identity)
            .map(|event| WatchEvent::Quota(project(&event, |quota| Some(ObservedQuota::of(quota)))))
            .boxed()
    }

    fn namespaces(
        &self,
        written: Responses<PartialObjectMeta<Namespace>>,
    ) -> BoxStream<'static, WatchEvent> {
        let watch = self.watch(kinds::NAMESPACES, config().labels(BUDGET_LABEL));
        merge_with_watch(watch, written, identity)
            .map(|event| WatchEvent::Namespace(project(&event, budget_label)))
            .boxed()
    }
}

fn config() -> watcher::Config {
    watcher::Config::default().timeout(WATCH_SECONDS)
}
