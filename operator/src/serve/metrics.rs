//! What the operator measures, in the OpenMetrics text format.
//!
//! Names, labels and units stand in `docs/metrics.md`; a test holds the two against each other.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bursar_crds::budget::Counted;
use bursar_crds::{GpuMemoryBudget, GpuMemoryBudgetStatus};
use kube::ResourceExt as _;
use kube::runtime::reflector::Store;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use crate::cluster::watch_liveness::Pulse;
use crate::cluster::{World, kinds};
use crate::placement;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfResult {
    result: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfKind {
    kind: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfWrite {
    what: &'static str,
    result: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfStep {
    step: &'static str,
    result: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfAmount {
    namespace: String,
    resource: &'static str,
    amount: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfCondition {
    namespace: String,
    condition: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, PartialOrd, Ord, EncodeLabelSet)]
struct OfStatus {
    condition: String,
    status: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, PartialOrd, Ord, EncodeLabelSet)]
struct OfCohort {
    cohort: String,
    amount: &'static str,
}

/// How a look at a budget ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Everything is as it should be.
    Unchanged,
    /// Something was written.
    Written,
}

/// What is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// A budget's status.
    Status,
    /// A budget's quota.
    Quota,
    /// A namespace's label.
    Label,
    /// A pod's eviction.
    Eviction,
    /// A node's context policies.
    Contexts,
}

impl Written {
    const ALL: [Self; 5] = [
        Self::Status,
        Self::Quota,
        Self::Label,
        Self::Eviction,
        Self::Contexts,
    ];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Status => "status",
            Self::Quota => "quota",
            Self::Label => "label",
            Self::Eviction => "eviction",
            Self::Contexts => "contexts",
        }
    }
}

/// So many objects that cannot be read are named.
const UNREADABLE_AT_MOST: usize = 64;

/// The operator's metrics. Cheap to clone; every clone counts into the same numbers.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Arc<Registry>,
    looks: Family<OfResult, Counter>,
    look_seconds: Histogram,
    writes: Family<OfWrite, Counter>,
    watch_failures: Family<OfKind, Counter>,
    steps: Family<OfStep, Counter>,
}

/// From 50 us, a look that changes nothing, to 10 s, the longest write.
const SECONDS: [f64; 9] = [0.000_05, 0.000_25, 0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0];

impl Metrics {
    /// All at zero; what is said of budgets, nodes and watches is read when it is asked for.
    pub fn new(
        budgets: Store<GpuMemoryBudget>,
        world: watch::Receiver<World>,
        pulse: Pulse,
    ) -> Self {
        let looks = Family::<OfResult, Counter>::default();
        let look_seconds = Histogram::new(SECONDS);
        let writes = Family::<OfWrite, Counter>::default();
        let watch_failures = Family::<OfKind, Counter>::default();
        // A counter that is there from the start can be told from one that is missing.
        for result in ["unchanged", "written", "error"] {
            drop(looks.get_or_create(&OfResult { result }));
        }
        for what in Written::ALL.map(Written::as_str) {
            for result in ["ok", "error"] {
                drop(writes.get_or_create(&OfWrite { what, result }));
            }
        }
        for kind in kinds::ALL {
            drop(watch_failures.get_or_create(&OfKind { kind }));
        }
        let mut registry = Registry::default();
        registry.register(
            "bursar_operator_build",
            "The operator's version",
            Info::new([("version", env!("CARGO_PKG_VERSION"))]),
        );
        registry.register(
            "bursar_operator_reconciles",
            "Looks at a budget",
            looks.clone(),
        );
        registry.register(
            "bursar_operator_reconcile_seconds",
            "Time of a look at a budget that did not fail, its writes included",
            look_seconds.clone(),
        );
        registry.register(
            "bursar_operator_writes",
            "Writes to the API server",
            writes.clone(),
        );
        registry.register(
            "bursar_operator_watch_failures",
            "Watches that broke off or could not be begun",
            watch_failures.clone(),
        );
        let steps = Family::<OfStep, Counter>::default();
        for step in placement::plan::STEPS {
            for result in ["done", "error"] {
                drop(steps.get_or_create(&OfStep { step, result }));
            }
        }
        registry.register(
            "bursar_operator_placement_steps",
            "Steps of placement: labels, reservations, evictions, moves, quotas",
            steps.clone(),
        );
        registry.register_collector(Box::new(Published(budgets)));
        registry.register_collector(Box::new(Watched { world, pulse }));
        Self {
            registry: Arc::new(registry),
            looks,
            look_seconds,
            writes,
            watch_failures,
            steps,
        }
    }

    /// The numbers as they stand, in the OpenMetrics text format.
    pub fn encode(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("a String takes any text");
        text
    }

    /// A budget was looked at.
    pub fn looked(&self, outcome: Outcome, took: Duration) {
        let result = match outcome {
            Outcome::Unchanged => "unchanged",
            Outcome::Written => "written",
        };
        self.looks.get_or_create(&OfResult { result }).inc();
        self.look_seconds.observe(took.as_secs_f64());
    }

    /// A look at a budget ended with an error.
    pub fn look_failed(&self) {
        let result = "error";
        self.looks.get_or_create(&OfResult { result }).inc();
    }

    /// Something was written, or not.
    pub fn wrote(&self, what: Written, ok: bool) {
        let (what, result) = (what.as_str(), if ok { "ok" } else { "error" });
        self.writes.get_or_create(&OfWrite { what, result }).inc();
    }

    /// A step of placement was carried out, or failed.
    pub fn stepped(&self, step: &'static str, done: bool) {
        let result = if done { "done" } else { "error" };
        self.steps.get_or_create(&OfStep { step, result }).inc();
    }

    /// A watch of `kind` failed.
    pub fn watch_failed(&self, kind: &'static str) {
        self.watch_failures.get_or_create(&OfKind { kind }).inc();
    }
}

/// The budgets' own statuses as metrics: nothing to keep up, and nothing to forget.
#[derive(Debug)]
struct Published(Store<GpuMemoryBudget>);

impl Collector for Published {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let budgets = self.0.state();
        let mut family = encoder.encode_descriptor(
            "bursar_budget_memory_bytes",
            "Memory of a budget: guaranteed, limit, requested, borrowed, observed, peak",
            None,
            MetricType::Gauge,
        )?;
        for (namespace, status) in statuses(&budgets) {
            for (resource, amount, counted) in amounts(status) {
                let bytes = counted.bytes.bytes().unwrap_or(0);
                let labels = OfAmount {
                    namespace: namespace.clone(),
                    resource,
                    amount,
                };
                let gauge = ConstGauge::new(i64::try_from(bytes).unwrap_or(i64::MAX));
                gauge.encode(family.encode_family(&labels)?)?;
            }
        }
        let mut counts: BTreeMap<OfStatus, i64> = BTreeMap::new();
        for condition in statuses(&budgets).flat_map(|(_, status)| &status.conditions) {
            let labels = OfStatus {
                condition: condition.type_.clone(),
                status: condition.status.clone(),
            };
            *counts.entry(labels).or_default() += 1;
        }
        let mut family = encoder.encode_descriptor(
            "bursar_operator_budgets",
            "Budgets by condition and its status",
            None,
            MetricType::Gauge,
        )?;
        for (labels, budgets) in counts {
            ConstGauge::new(budgets).encode(family.encode_family(&labels)?)?;
        }
        let mut family = encoder.encode_descriptor(
            "bursar_budget_condition",
            "1 while a condition of a budget is True, 0 while it is False, -1 while it is Unknown",
            None,
            MetricType::Gauge,
        )?;
        for (namespace, status) in statuses(&budgets) {
            for condition in &status.conditions {
                let labels = OfCondition {
                    namespace: namespace.clone(),
                    condition: condition.type_.clone(),
                };
                let value: i64 = match condition.status.as_str() {
                    "True" => 1,
                    "False" => 0,
                    _ => -1,
                };
                ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

/// What the watches tell of nodes, and how they are.
#[derive(Debug)]
struct Watched {
    world: watch::Receiver<World>,
    pulse: Pulse,
}

impl Collector for Watched {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let mut family = encoder.encode_descriptor(
            "bursar_operator_watch_age_seconds",
            "Time since a watch last made progress",
            None,
            MetricType::Gauge,
        )?;
        for (kind, age) in self.pulse.ages() {
            let gauge = ConstGauge::new(age.as_secs_f64());
            gauge.encode(family.encode_family(&OfKind { kind })?)?;
        }
        let mut family = encoder.encode_descriptor(
            "bursar_operator_nodes",
            "GpuNodes by condition and its status",
            None,
            MetricType::Gauge,
        )?;
        for ((condition, status), nodes) in self.world.borrow().nodes_by_condition() {
            let labels = OfStatus {
                condition: condition.to_owned(),
                status: status.to_owned(),
            };
            ConstGauge::new(nodes).encode(family.encode_family(&labels)?)?;
        }
        let mut family = encoder.encode_descriptor(
            "bursar_cohort_memory_bytes",
            "Device memory of a cohort: what its budgets guarantee, and what its nodes offer",
            None,
            MetricType::Gauge,
        )?;
        let world = self.world.borrow();
        // Before all are listed the sums are parts.
        let known = world.missing().is_empty();
        for (cohort, guaranteed, allocatable) in world.cohorts().filter(|_| known) {
            for (amount, bytes) in [("guaranteed", guaranteed), ("allocatable", allocatable)] {
                let labels = OfCohort {
                    cohort: cohort.to_owned(),
                    amount,
                };
                let gauge = ConstGauge::new(i64::try_from(bytes).unwrap_or(i64::MAX));
                gauge.encode(family.encode_family(&labels)?)?;
            }
        }
        let mut family = encoder.encode_descriptor(
            "bursar_operator_nodes_left_out",
            "Nodes whose memory counts in no cohort",
            None,
            MetricType::Gauge,
        )?;
        for (reason, nodes) in world.nodes_left_out() {
            let labels = [("reason", reason)];
            ConstGauge::new(nodes).encode(family.encode_family(&labels)?)?;
        }
        let mut family = encoder.encode_descriptor(
            "bursar_operator_unreadable",
            "1 for each object that cannot be read, or has a value of another version",
            None,
            MetricType::Gauge,
        )?;
        for (kind, key) in world.unreadable().take(UNREADABLE_AT_MOST) {
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

fn statuses(
    budgets: &[Arc<GpuMemoryBudget>],
) -> impl Iterator<Item = (String, &GpuMemoryBudgetStatus)> {
    budgets
        .iter()
        .filter_map(|budget| Some((budget.namespace()?, budget.status.as_ref()?)))
}

fn amounts(status: &GpuMemoryBudgetStatus) -> [(&'static str, &'static str, &Counted); 8] {
    let (device, managed) = (&status.device_memory, &status.managed_memory);
    [
        ("gpu-memory", "guaranteed", &device.guaranteed),
        ("gpu-memory", "limit", &device.limit),
        ("gpu-memory", "requested", &device.requested),
        ("gpu-memory", "borrowed", &device.borrowed),
        ("gpu-memory", "observed", &device.observed),
        ("gpu-memory", "peak", &device.peak),
        ("managed-memory", "limit", &managed.limit),
        ("managed-memory", "requested", &managed.requested),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use bursar_crds::Quantum;
    use kube::runtime::reflector;
    use kube::runtime::watcher::Event;
    use serde_json::json;

    fn published(status: serde_json::Value) -> String {
        let (store, mut writer) = reflector::store();
        let budget: GpuMemoryBudget = serde_json::from_value(json!({
            "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget",
            "metadata": { "name": "default", "namespace": "team" },
            "spec": { "deviceMemory": { "guaranteed": "16Gi" } }, "status": status,
        }))
        .unwrap();
        writer.apply_watcher_event(&Event::Apply(budget));
        let (_, world) = watch::channel(World::new(Quantum::Gib1));
        Metrics::new(store, world, Pulse::default()).encode()
    }

    #[test]
    fn what_is_published_of_a_budget_is_measured() {
        let text = published(json!({
            "deviceMemory": { "requested": { "quanta": 4, "bytes": "4Gi" } },
            "conditions": [{
                "type": "Exceeded", "status": "True", "reason": "OverLimit", "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }],
        }));
        for line in [
            r#"bursar_budget_memory_bytes{namespace="team",resource="gpu-memory",amount="requested"} 4294967296"#,
            r#"bursar_budget_condition{namespace="team",condition="Exceeded"} 1"#,
        ] {
            assert!(text.contains(line), "{text}");
        }
    }

    #[test]
    fn a_budget_without_status_is_not_measured() {
        assert!(!published(json!(null)).contains("team"));
    }

    #[test]
    fn every_metric_is_documented_and_every_documented_metric_exists() {
        let docs = include_str!("../../../docs/metrics.md");
        let (_, operator) = docs
            .split_once("## Operator")
            .expect("the operator has a table");
        let documented: std::collections::BTreeSet<&str> = operator
            .lines()
            .filter_map(|line| line.strip_prefix("| `")?.split('`').next())
            .map(|name| name.trim_end_matches("_total").trim_end_matches("_info"))
            .collect();
        let text = published(json!(null));
        let registered: std::collections::BTreeSet<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("# HELP ")?.split(' ').next())
            .collect();
        assert_eq!(documented, registered);
    }
}
