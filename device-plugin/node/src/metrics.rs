//! Counts allocations and bindings of the node, and times the kubelet's calls.

use std::time::Duration;

use bursar_ledger::units::Resource;
use bursar_metrics::{Label, RegisterMetric as _, gauge_value, resource_label, seconds_histogram};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// Buckets from a tenth of a second, the end of another pod, to six hours.
const WAIT_BUCKETS: [f64; 12] = [
    0.1, 0.5, 2.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3_600.0, 10_800.0, 21_600.0,
];

/// The result of a PreStartContainer call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BindResult {
    /// The container was bound, at once or after a wait.
    Bound,
    /// No GPU had room in time; the kubelet retries.
    NoRoom,
    /// Another error prevented the start.
    Failed,
}

impl BindResult {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Bound => "bound",
            Self::NoRoom => "no-room",
            Self::Failed => "failed",
        }
    }
}

/// The numbers of one resource in the ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Pending allocations.
    pub pending: usize,
    /// Bound allocations.
    pub bound: usize,
    /// Containers that wait for room.
    pub waiting: usize,
}

/// The metrics of the node's allocations. Clones share the same values.
#[derive(Clone, Debug)]
pub struct NodeMetrics {
    pending: Family<Label<&'static str>, Gauge>,
    bound: Family<Label<&'static str>, Gauge>,
    waiting: Family<Label<&'static str>, Gauge>,
    allocate_seconds: Histogram,
    bind_seconds: Family<Label<&'static str>, Histogram>,
    wait_seconds: Histogram,
    oldest_wait: Gauge,
    releases: Counter,
    dropped: Counter,
    skipped_entries: Gauge,
}

impl NodeMetrics {
    /// Registers the metrics, which are all zero.
    pub fn new(registry: &mut Registry) -> Self {
        Self {
            pending: registry.register_metric(
                "bursar_agent_pending_allocations",
                "Allocations without a binding yet",
                Family::default(),
            ),
            bound: registry.register_metric(
                "bursar_agent_bound",
                "Allocations bound",
                Family::default(),
            ),
            waiting: registry.register_metric(
                "bursar_agent_waiting",
                "Containers waiting on this node for room",
                Family::default(),
            ),
            allocate_seconds: registry.register_metric(
                "bursar_agent_allocate_seconds",
                "Time of Allocate",
                seconds_histogram(),
            ),
            bind_seconds: registry.register_metric(
                "bursar_agent_bind_seconds",
                "Time of PreStartContainer, with the wait for room",
                Family::new_with_constructor(seconds_histogram as fn() -> Histogram),
            ),
            wait_seconds: registry.register_metric(
                "bursar_container_wait_seconds",
                "Wait of a container for room, over all tries of the kubelet",
                Histogram::new(WAIT_BUCKETS),
            ),
            oldest_wait: registry.register_metric(
                "bursar_agent_oldest_wait_seconds",
                "How long the container that waits longest has waited; 0 while none waits",
                Gauge::default(),
            ),
            releases: registry.register_metric(
                "bursar_agent_releases",
                "Pods whose memory was released at their end",
                Counter::default(),
            ),
            dropped: registry.register_metric(
                "bursar_agent_pending_allocations_dropped",
                "Pending allocations dropped because no container followed",
                Counter::default(),
            ),
            skipped_entries: registry.register_metric(
                "bursar_agent_kubelet_checkpoint_skipped_entries",
                "Entries of the kubelet's record of devices that the agent cannot read",
                Gauge::default(),
            ),
        }
    }

    /// Observes the duration of an Allocate call.
    pub(crate) fn observe_allocate(&self, took: Duration) {
        self.allocate_seconds.observe(took.as_secs_f64());
    }

    /// Observes the result and the duration of a PreStartContainer call.
    pub fn observe_prepare(&self, result: BindResult, took: Duration) {
        let result = result.as_str();
        self.bind_seconds
            .get_or_create(&[("result", result)])
            .observe(took.as_secs_f64());
    }

    /// Observes the wait of a container that is bound now.
    pub(crate) fn observe_wait(&self, waited: Duration) {
        self.wait_seconds.observe(waited.as_secs_f64());
    }

    /// Sets the wait of the container that waits longest.
    pub(crate) fn set_oldest_wait(&self, waited: Duration) {
        self.oldest_wait.set(gauge_value(waited.as_secs()));
    }

    /// Sets how many entries of the kubelet's record of devices cannot be read.
    pub(crate) fn set_skipped_entries(&self, entries: usize) {
        self.skipped_entries.set(gauge_value(entries));
    }

    /// Counts a pod whose memory was released at its end.
    pub(crate) fn count_release(&self) {
        self.releases.inc();
    }

    /// Counts pending allocations that were dropped because no container followed.
    pub(crate) fn count_dropped(&self, allocations: usize) {
        self.dropped.inc_by(allocations as u64);
    }

    /// Sets the ledger's numbers of `resource`.
    pub fn set_counts(&self, resource: Resource, counts: Counts) {
        let Counts {
            pending,
            bound,
            waiting,
        } = counts;
        let label = resource_label(resource);
        self.pending.get_or_create(&label).set(gauge_value(pending));
        self.bound.get_or_create(&label).set(gauge_value(bound));
        self.waiting.get_or_create(&label).set(gauge_value(waiting));
    }
}
