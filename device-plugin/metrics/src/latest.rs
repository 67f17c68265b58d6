//! Encodes figures that are replaced as a whole, so that a scrape sees figures of one instant.
//!
//! The agent encodes the series at a scrape and not at each replacement.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

/// Figures that encode their metric families.
pub trait EncodeFamilies: fmt::Debug + Default + Send + Sync + 'static {
    /// Encodes every family.
    fn encode(&self, tables: &mut FamilyEncoder<'_>) -> fmt::Result;
}

/// The latest figures, shared with the registry.
#[derive(Debug)]
pub struct LatestFigures<T>(Arc<Mutex<Arc<T>>>);

impl<T> Clone for LatestFigures<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T: EncodeFamilies> LatestFigures<T> {
    /// Registers the families, which have no series before the first figures.
    pub fn register(registry: &mut Registry) -> Self {
        let replaced = Self(Arc::default());
        registry.register_collector(Box::new(replaced.clone()));
        replaced
    }

    /// Replaces the figures that the next scrape encodes.
    pub fn replace(&self, figures: T) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(figures);
    }
}

impl<T: EncodeFamilies> Collector for LatestFigures<T> {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        // The lock is released before encoding, so that a slow scrape does not delay new figures.
        let figures = Arc::clone(&self.0.lock().unwrap_or_else(PoisonError::into_inner));
        figures.encode(&mut FamilyEncoder(encoder))
    }
}

/// The encoder of a scrape.
pub struct FamilyEncoder<'a>(DescriptorEncoder<'a>);

impl FamilyEncoder<'_> {
    /// Encodes a family of gauges; a family without series is left out.
    pub fn gauges<L: EncodeLabelSet + Ord>(
        &mut self,
        name: &str,
        help: &str,
        rows: Vec<(L, i64)>,
    ) -> fmt::Result {
        self.family(name, help, MetricType::Gauge, rows, ConstGauge::new)
    }

    /// Encodes a family of gauges from 0 to 1; a family without series is left out.
    pub fn ratios<L: EncodeLabelSet + Ord>(
        &mut self,
        name: &str,
        help: &str,
        rows: Vec<(L, f64)>,
    ) -> fmt::Result {
        self.family(name, help, MetricType::Gauge, rows, ConstGauge::new)
    }

    /// Encodes a family of counters; a family without series is left out.
    pub fn counters<L: EncodeLabelSet + Ord>(
        &mut self,
        name: &str,
        help: &str,
        rows: Vec<(L, u64)>,
    ) -> fmt::Result {
        self.family(name, help, MetricType::Counter, rows, ConstCounter::new)
    }

    fn family<L: EncodeLabelSet + Ord, N, M: EncodeMetric>(
        &mut self,
        name: &str,
        help: &str,
        kind: MetricType,
        rows: Vec<(L, N)>,
        metric: impl Fn(N) -> M,
    ) -> fmt::Result {
        if rows.is_empty() {
            return Ok(());
        }
        let help = format!("{help}.");
        let mut family = self.0.encode_descriptor(name, &help, None, kind)?;
        // Prometheus refuses a page with duplicate series: a map drops duplicates.
        let rows: BTreeMap<L, N> = rows.into_iter().collect();
        for (labels, value) in rows {
            metric(value).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}
