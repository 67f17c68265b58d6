//! Encodes the figures of the cluster index.

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use tokio::sync::watch;

use super::{KindLabels, StatusLabels, gauges};
use crate::cluster::ClusterIndex;
use crate::cluster::watch_liveness::WatchLiveness;

/// How many unreadable objects get a series.
const MAX_UNREADABLE: usize = 64;

/// Exports the index's figures and the progress of each watch at each scrape.
#[derive(Debug)]
pub(super) struct ClusterCollector {
    pub(super) index: watch::Receiver<ClusterIndex>,
    pub(super) liveness: WatchLiveness,
}

impl Collector for ClusterCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let encoder = &mut encoder;
        let index = self.index.borrow();
        encode_watches(encoder, &self.liveness)?;
        encode_conditions(encoder, &index)?;
        encode_cohorts(encoder, &index)?;
        encode_excluded_nodes(encoder, &index)?;
        encode_unreadable(encoder, &index)
    }
}

fn encode_watches(
    encoder: &mut DescriptorEncoder<'_>,
    liveness: &WatchLiveness,
) -> Result<(), std::fmt::Error> {
    let help = "Time since a watch last made progress";
    let mut family = gauges(encoder, "bursar_operator_watch_age_seconds", help)?;
    for (kind, age) in liveness.ages() {
        let gauge = ConstGauge::new(age.as_secs_f64());
        gauge.encode(family.encode_family(&KindLabels { kind })?)?;
    }
    let (name, help) = ("bursar_operator_watch_failures", "Failures of watches");
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (kind, failures) in liveness.failures() {
        let counter = ConstCounter::new(failures);
        counter.encode(family.encode_family(&KindLabels { kind })?)?;
    }
    Ok(())
}

fn encode_conditions(
    encoder: &mut DescriptorEncoder<'_>,
    index: &ClusterIndex,
) -> Result<(), std::fmt::Error> {
    let help = "GpuNodes by condition and its status";
    let mut family = gauges(encoder, "bursar_operator_nodes", help)?;
    for ((condition, status), nodes) in index.nodes_by_condition() {
        let labels = StatusLabels {
            condition: condition.to_owned(),
            status: status.to_owned(),
        };
        ConstGauge::new(nodes).encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}

fn encode_cohorts(
    encoder: &mut DescriptorEncoder<'_>,
    index: &ClusterIndex,
) -> Result<(), std::fmt::Error> {
    // The sums are partial until all kinds are listed.
    let known = index.unlisted_kinds().is_empty();
    let sums: Vec<_> = index.cohorts().filter(|_| known).collect();
    let guaranteed = sums
        .iter()
        .map(|(cohort, guaranteed, _)| (*cohort, *guaranteed));
    let allocatable = sums
        .iter()
        .map(|(cohort, _, allocatable)| (*cohort, *allocatable));
    let mut encode = |name, help, bytes: &mut dyn Iterator<Item = (&str, u64)>| {
        let mut family = gauges(encoder, name, help)?;
        for (cohort, bytes) in bytes {
            let gauge = ConstGauge::new(i64::try_from(bytes).unwrap_or(i64::MAX));
            gauge.encode(family.encode_family(&[("cohort", cohort)])?)?;
        }
        Ok(())
    };
    encode(
        "bursar_cohort_memory_guaranteed_bytes",
        "Device memory that the budgets of a cohort guarantee",
        &mut { guaranteed },
    )?;
    encode(
        "bursar_cohort_memory_allocatable_bytes",
        "Device memory that the nodes of a cohort offer",
        &mut { allocatable },
    )?;
    encode(
        "bursar_cohort_memory_largest_free_bytes",
        "Most device memory that one GPU of a cohort has free",
        &mut index.largest_free().into_iter(),
    )
}

fn encode_excluded_nodes(
    encoder: &mut DescriptorEncoder<'_>,
    index: &ClusterIndex,
) -> Result<(), std::fmt::Error> {
    let help = "Nodes whose memory counts in no cohort";
    let mut family = gauges(encoder, "bursar_operator_nodes_left_out", help)?;
    for (reason, nodes) in index.excluded_nodes() {
        let labels = [("reason", reason)];
        ConstGauge::new(nodes).encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}

fn encode_unreadable(
    encoder: &mut DescriptorEncoder<'_>,
    index: &ClusterIndex,
) -> Result<(), std::fmt::Error> {
    let help = "1 for each object that cannot be parsed or has an unknown value";
    let mut family = gauges(encoder, "bursar_operator_unreadable", help)?;
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
