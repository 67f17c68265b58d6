//! Counts writes, failures of the watch and dropped Events.

use bursar_metrics::{Label, RegisterMetric as _};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// The kinds that the agent watches.
pub(crate) const WATCHED: [&str; 2] = ["GpuNode", "GpuNamespace"];

/// The metrics of the agent's requests to the API server. Clones share the same values.
#[derive(Clone, Debug)]
pub struct ApiMetrics {
    watch_failures: Family<Label<&'static str>, Counter>,
    gpu_node_writes: Family<Label<&'static str>, Counter>,
    pub(crate) events_dropped: Counter,
}

impl ApiMetrics {
    /// Registers the metrics, which are all zero.
    pub fn new(registry: &mut Registry) -> Self {
        let gpu_node_writes = Family::<Label<_>, Counter>::default();
        // Prometheus' rate does not see the step from no series to the first error.
        for result in ["ok", "error"] {
            drop(gpu_node_writes.get_or_create(&[("result", result)]));
        }
        let watch_failures = Family::<Label<_>, Counter>::default();
        for kind in WATCHED {
            drop(watch_failures.get_or_create(&[("kind", kind)]));
        }
        Self {
            watch_failures: registry.register_metric(
                "bursar_agent_watch_failures",
                "Failures of the watches of this node's GpuNode and of GpuNamespaces",
                watch_failures,
            ),
            gpu_node_writes: registry.register_metric(
                "bursar_agent_gpu_node_writes",
                "Writes of this node's GpuNode",
                gpu_node_writes,
            ),
            events_dropped: registry.register_metric(
                "bursar_agent_events_dropped",
                "Events not sent: too many, repeated, or refused",
                Counter::default(),
            ),
        }
    }

    /// Counts a write of this node's `GpuNode`, failed ones apart.
    pub fn count_gpu_node_write(&self, ok: bool) {
        let result = if ok { "ok" } else { "error" };
        self.gpu_node_writes
            .get_or_create(&[("result", result)])
            .inc();
    }

    /// Counts a failure of a watch.
    pub(crate) fn count_watch_failure(&self, kind: &'static str) {
        self.watch_failures.get_or_create(&[("kind", kind)]).inc();
    }

    /// Counts an Event that was not sent.
    pub(crate) fn count_event_dropped(&self) {
        self.events_dropped.inc();
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;

    use super::*;

    #[test]
    fn writes_have_series_of_both_results_from_the_start() {
        let mut registry = Registry::default();
        let _metrics = ApiMetrics::new(&mut registry);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        for result in ["ok", "error"] {
            let series = format!("bursar_agent_gpu_node_writes_total{{result=\"{result}\"}} 0");
            assert!(text.contains(&series), "{text}");
        }
    }
}
