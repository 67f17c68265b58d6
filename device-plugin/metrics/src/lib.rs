//! Registers metrics in the OpenMetrics text format, with the labels that several crates share.
//!
//! `docs/use/reference/metrics.md` documents names, labels and units. Each crate of the agent has a
//! struct of its own metrics; the agent registers them together.

mod latest;

use bursar_ledger::units::Resource;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry};

pub use latest::{EncodeFamilies, FamilyEncoder, LatestFigures};

/// The one label of a series: its name and value.
pub type Label<V = String> = [(&'static str, V); 1];

/// The label of a resource that the agent offers.
pub fn resource_label(resource: Resource) -> Label<&'static str> {
    let resource = match resource {
        Resource::DeviceMemory => "gpu-memory",
        Resource::ManagedMemory => "managed-memory",
        Resource::Compute => "gpu-compute",
    };
    [("resource", resource)]
}

/// The label of a GPU or MIG instance.
pub fn gpu_label(uuid: impl ToString) -> Label {
    [("gpu", uuid.to_string())]
}

/// Buckets from 50 us, a call without a wait, to 50 s, twice the longest wait.
const SECONDS_BUCKETS: [f64; 13] = [
    0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 25.0, 50.0,
];

/// Creates a histogram of durations from 50 us to 50 s.
pub fn seconds_histogram() -> Histogram {
    Histogram::new(SECONDS_BUCKETS)
}

/// Registers a metric and returns it.
pub trait RegisterMetric {
    /// Registers `metric` and returns it.
    fn register_metric<M: Metric + Clone>(&mut self, name: &str, help: &str, metric: M) -> M;
}

impl RegisterMetric for Registry {
    fn register_metric<M: Metric + Clone>(&mut self, name: &str, help: &str, metric: M) -> M {
        self.register(name, help, metric.clone());
        metric
    }
}

/// Converts a figure to a gauge's value, at most the largest one.
pub fn gauge_value(figure: impl TryInto<i64>) -> i64 {
    figure.try_into().unwrap_or(i64::MAX)
}
