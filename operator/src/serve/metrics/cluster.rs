//! Encodes the figures of the cluster index.

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use tokio::sync::watch;

use super::{CohortLabels, KindLabels, StatusLabels};
use crate::cluster::ClusterIndex;
use crate::cluster::watch_liveness::WatchLiveness;

/// How many unreadable objects get a series.
const MAX_UNREADABLE: usize = 64;

/// Exports the index's figures and the age of each watch at each scrape.
#[derive(Debug)]
pub(super) struct ClusterCollector {
    pub(super) index: watch::Receiver<ClusterIndex>,
    pub(super) liveness: WatchLiveness,
}

impl Collector for ClusterCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let mut family = encoder.encode_descriptor(
            "bursar_operator_watch_age_seconds",
            "Time since a watch last made progress",
            None,
            MetricType::Gauge,
        )?;
        for (kind, age) in self.liveness.ages() {
            let gauge = ConstGauge::new(age.as_secs_f64());
            gauge.encode(family.encode_family(&KindLabels { kind })?)?;
        }
        let mut family = encoder.encode_descriptor(
            "bursar_operator_nodes",
            "GpuNodes by condition and its status",
            None,
            MetricType::Gauge,
        )?;
        for ((condition, status), nodes) in self.index.borrow().nodes_by_condition() {
            let labels = StatusLabels {
                condition: condition.to_owned(),
                status: status.to_owned(),
            };
            ConstGauge::new(nodes).encode(family.encode_family(&labels)?)?;
        }
        let mut family = encoder.encode_descriptor(
            "bursar_cohort_memory_bytes",
            "Device memory of a cohort: guaranteed by its budgets, allocatable on its nodes, and \
             the most that one GPU has free",
            None,
            MetricType::Gauge,
        )?;
        let index = self.index.borrow();
        // The sums are partial until all kinds are listed.
        let known = index.unlisted_kinds().is_empty();
        for (cohort, guaranteed, allocatable) in index.cohorts().filter(|_| known) {
            for (amount, bytes) in [("guaranteed", guaranteed), ("allocatable", allocatable)] {
                let labels = CohortLabels {
                    cohort: cohort.to_owned(),
                    amount,
                };
                let gauge = ConstGauge::new(i64::try_from(bytes).unwrap_or(i64::MAX));
                gauge.encode(family.encode_family(&labels)?)?;
            }
        }
        for (cohort, bytes) in index.largest_free() {
            let labels = CohortLabels {
                cohort: cohort.to_owned(),
                amount: "largest_free",
            };
            let gauge = ConstGauge::new(i64::try_from(bytes).unwrap_or(i64::MAX));
            gauge.encode(family.encode_family(&labels)?)?;
        }
        let mut family = encoder.encode_descriptor(
            "bursar_operator_nodes_left_out",
            "Nodes whose memory counts in no cohort",
            None,
            MetricType::Gauge,
        )?;
        for (reason, nodes) in index.excluded_nodes() {
            let labels = [("reason", reason)];
            ConstGauge::new(nodes).encode(family.encode_family(&labels)?)?;
        }
        let mut family = encoder.encode_descriptor(
            "bursar_operator_unreadable",
            "1 for each object that cannot be parsed or has an unknown value",
            None,
            MetricType::Gauge,
        )?;
        for (kind, key) in index.unreadable().take(MAX_UNREADABLE) {
            let labels = [
                ("kind", kind),
                ("namespace", key.namespace.as_str()),
                ("name", key.name.as_str()),
            ];
            ConstGauge::new(1_i64).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}
