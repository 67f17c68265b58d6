//! Exports the operator's metrics in the OpenMetrics text format.
//!
//! `docs/use/reference/metrics.md` documents names, labels and units; a test compares both.

mod budgets;
mod cluster;

use std::sync::Arc;
use std::time::Duration;

use bursar_crds::GpuMemoryBudget;
use kube::runtime::reflector::Store;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use crate::cluster::ClusterIndex;
use crate::cluster::watch_liveness::WatchLiveness;
use budgets::BudgetCollector;
use cluster::ClusterCollector;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ResultLabels {
    result: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct KindLabels {
    kind: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct WriteLabels {
    what: &'static str,
    result: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StepLabels {
    step: &'static str,
    result: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ConditionLabels {
    namespace: String,
    condition: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, PartialOrd, Ord, EncodeLabelSet)]
struct StatusLabels {
    condition: String,
    status: String,
}

/// How a successful reconcile of a budget ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReconcileOutcome {
    /// The budget needed no write.
    Unchanged,
    /// The operator wrote something.
    Written,
}

/// The object of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteKind {
    /// A budget's status.
    Status,
    /// A budget's quota.
    Quota,
    /// A namespace's label.
    Label,
    /// A pod's eviction.
    Eviction,
    /// A node's context policies.
    ContextPolicies,
    /// The GPUs that the operator drains.
    Drain,
    /// The settings of a node's pods that its agent must know.
    PodSettings,
    /// The readiness of a node whose agent is away.
    NodeStatus,
}

impl WriteKind {
    const ALL: [Self; 8] = [
        Self::Status,
        Self::Quota,
        Self::Label,
        Self::Eviction,
        Self::ContextPolicies,
        Self::Drain,
        Self::PodSettings,
        Self::NodeStatus,
    ];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Status => "status",
            Self::Quota => "quota",
            Self::Label => "label",
            Self::Eviction => "eviction",
            Self::ContextPolicies => "contexts",
            Self::Drain => "drain",
            Self::PodSettings => "pod-settings",
            Self::NodeStatus => "node-status",
        }
    }
}

/// The names of placement steps in metrics and logs, in the order of the variants of the planner's
/// `Step`. The reference of the metrics lists these names, so a renamed variant keeps its name.
pub(crate) const PLACEMENT_STEPS: [&str; 6] = [
    "label",
    "reserve",
    "lower",
    "make-room",
    "move",
    "look-at-job",
];

/// The operator's metrics. Cheap to clone; clones share the counters.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Arc<Registry>,
    reconciles: Family<ResultLabels, Counter>,
    reconcile_seconds: Histogram,
    plan_seconds: Histogram,
    writes: Family<WriteLabels, Counter>,
    steps: Family<StepLabels, Counter>,
}

/// From 50 us, a reconcile without a write, to 10 s, the longest write.
const BUCKETS: [f64; 9] = [0.000_05, 0.000_25, 0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0];

impl Metrics {
    /// Registers all metrics. Those on budgets, nodes and watches are computed at each scrape.
    pub fn new(
        budgets: Store<GpuMemoryBudget>,
        index: watch::Receiver<ClusterIndex>,
        liveness: WatchLiveness,
    ) -> Self {
        let looks = Family::<ResultLabels, Counter>::default();
        let look_seconds = Histogram::new(BUCKETS);
        let plan_seconds = Histogram::new(BUCKETS);
        let writes = Family::<WriteLabels, Counter>::default();
        let steps = Family::<StepLabels, Counter>::default();
        let mut registry = Registry::default();
        registry.register(
            "bursar_operator_build",
            "Version of the operator",
            Info::new([("version", env!("CARGO_PKG_VERSION"))]),
        );
        let leader = Gauge::<i64>::default();
        leader.set(1);
        registry.register(
            "bursar_operator_leader",
            "1 of the replica that works",
            leader,
        );
        registry.register(
            "bursar_operator_reconciles",
            "Reconciles of a budget",
            looks.clone(),
        );
        registry.register(
            "bursar_operator_reconcile_seconds",
            "Duration of a successful reconcile of a budget, with its writes",
            look_seconds.clone(),
        );
        registry.register(
            "bursar_operator_plan_seconds",
            "Duration of a plan of the placement",
            plan_seconds.clone(),
        );
        registry.register(
            "bursar_operator_writes",
            "Writes to the API server",
            writes.clone(),
        );
        registry.register(
            "bursar_operator_placement_steps",
            "Placement steps: labels, reservations, preemptions, relocations, quota overrides",
            steps.clone(),
        );
        registry.register_collector(Box::new(BudgetCollector(budgets)));
        registry.register_collector(Box::new(ClusterCollector { index, liveness }));
        let metrics = Self {
            registry: Arc::new(registry),
            reconciles: looks,
            reconcile_seconds: look_seconds,
            plan_seconds,
            writes,
            steps,
        };
        metrics.create_counters();
        metrics
    }

    /// Creates each counter, because a counter that exists from the start differs from a missing
    /// one.
    fn create_counters(&self) {
        for result in ["unchanged", "written", "error"] {
            drop(self.reconciles.get_or_create(&ResultLabels { result }));
        }
        for what in WriteKind::ALL.map(WriteKind::as_str) {
            for result in ["ok", "error"] {
                drop(self.writes.get_or_create(&WriteLabels { what, result }));
            }
        }
        for step in PLACEMENT_STEPS {
            for result in ["done", "error"] {
                drop(self.steps.get_or_create(&StepLabels { step, result }));
            }
        }
    }

    /// The metrics in the OpenMetrics text format.
    pub fn encode(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("a String takes any text");
        text
    }

    /// Records a successful reconcile.
    pub fn record_reconcile(&self, outcome: ReconcileOutcome, elapsed: Duration) {
        let result = match outcome {
            ReconcileOutcome::Unchanged => "unchanged",
            ReconcileOutcome::Written => "written",
        };
        self.reconciles
            .get_or_create(&ResultLabels { result })
            .inc();
        self.reconcile_seconds.observe(elapsed.as_secs_f64());
    }

    /// Records a plan of the placement.
    pub fn record_plan(&self, elapsed: Duration) {
        self.plan_seconds.observe(elapsed.as_secs_f64());
    }

    /// Records a failed reconcile.
    pub fn record_reconcile_failure(&self) {
        let result = "error";
        self.reconciles
            .get_or_create(&ResultLabels { result })
            .inc();
    }

    /// Records a write.
    pub fn record_write(&self, what: WriteKind, ok: bool) {
        let (what, result) = (what.as_str(), if ok { "ok" } else { "error" });
        self.writes
            .get_or_create(&WriteLabels { what, result })
            .inc();
    }

    /// Records placement steps of one kind.
    pub fn record_placement_steps(&self, step: &'static str, done: bool, count: usize) {
        let result = if done { "done" } else { "error" };
        let steps = self.steps.get_or_create(&StepLabels { step, result });
        steps.inc_by(count as u64);
    }
}

/// Begins a family of gauges.
fn gauges<'e>(
    encoder: &'e mut DescriptorEncoder<'_>,
    name: &'static str,
    help: &str,
) -> Result<MetricEncoder<'e>, std::fmt::Error> {
    encoder.encode_descriptor(name, help, None, MetricType::Gauge)
}

#[cfg(test)]
mod tests {
    use bursar_crds::Quantum;

    use super::*;
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
        let (_, index) = watch::channel(ClusterIndex::new(Quantum::Gib1));
        Metrics::new(store, index, WatchLiveness::default()).encode()
    }

    #[test]
    fn budget_status_is_exported_as_metrics() {
        let text = published(json!({
            "deviceMemory": { "requested": { "quanta": 4, "bytes": "4Gi" } },
            "conditions": [{
                "type": "Exceeded", "status": "True", "reason": "OverLimit", "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }],
        }));
        for line in [
            r#"bursar_budget_memory_requested_bytes{namespace="team",resource="gpu-memory"} 4294967296"#,
            r#"bursar_budget_condition{namespace="team",condition="Exceeded"} 1"#,
            r#"bursar_budget_info{namespace="team",cohort="default"} 1"#,
        ] {
            assert!(text.contains(line), "{text}");
        }
    }

    #[test]
    fn budget_without_status_exports_nothing() {
        assert!(!published(json!(null)).contains("team"));
    }

    /// Runs `promtool check metrics` over the page, as `cargo verify --only surface/metrics` does.
    #[test]
    #[ignore = "needs promtool in BURSAR_PROMTOOL"]
    fn names_and_types_pass_promtool() {
        let promtool = std::env::var_os("BURSAR_PROMTOOL").expect("the path of promtool");
        let page = bursar_http::prometheus_text(&published(json!({ "pods": 1 })));
        let mut child = std::process::Command::new(promtool)
            .args(["check", "metrics"])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), page.as_bytes()).unwrap();
        assert!(child.wait().unwrap().success(), "{page}");
    }

    #[test]
    fn metrics_and_their_documentation_agree() {
        let docs = include_str!("../../../docs/use/reference/metrics.md");
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
            .map(|name| name.trim_end_matches("_info"))
            .collect();
        assert_eq!(documented, registered);
    }
}
