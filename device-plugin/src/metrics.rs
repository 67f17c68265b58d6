//! Exports the agent's metrics in the OpenMetrics text format.
//!
//! `docs/metrics.md` documents names, labels and units; a test compares the two lists.

mod audited;
mod replaced;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

use crate::gpu_node::report::{GpuHealth, NodeReport};
use bursar_ledger::units::{Bytes, GpuUuid, Quanta, Quantum, Resource};

pub use audited::AuditFigures;
use replaced::{EncodeFamilies, FamilyEncoder, LatestFigures};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ResourceLabels {
    resource: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, EncodeLabelSet)]
struct GpuLabels {
    gpu: String,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, EncodeLabelSet)]
struct GpuStateLabels {
    gpu: String,
    state: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ResultLabels {
    result: &'static str,
}

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

/// The agent's metrics. Clones share the same values.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Arc<Registry>,
    tokens: Family<ResourceLabels, Gauge>,
    orders_not_understood: Gauge,
    state_write_lag: Gauge,
    watch_failures: Counter,
    booked: Family<ResourceLabels, Gauge>,
    bound: Family<ResourceLabels, Gauge>,
    waiting: Family<ResourceLabels, Gauge>,
    allocate_seconds: Histogram,
    bind_seconds: Family<ResultLabels, Histogram>,
    releases: Counter,
    collected: Counter,
    registrations: Family<ResourceLabels, Counter>,
    gpus: LatestFigures<GpuFigures>,
    kept: LatestFigures<RetainedFigures>,
    gpu_node_writes: Family<ResultLabels, Counter>,
    events_dropped: Counter,
    tasks: Gauge,
    audited: audited::AuditMetrics,
}

/// Buckets from 50 us, a call without a wait, to 50 s, twice the longest wait.
const SECONDS_BUCKETS: [f64; 13] = [
    0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 25.0, 50.0,
];

fn seconds_histogram() -> Histogram {
    Histogram::new(SECONDS_BUCKETS)
}

/// Registers a metric and returns it.
trait RegisterMetric {
    fn register_metric<M>(&mut self, name: &str, help: &str, metric: M) -> M
    where
        M: prometheus_client::registry::Metric + Clone;
}

impl RegisterMetric for Registry {
    fn register_metric<M>(&mut self, name: &str, help: &str, metric: M) -> M
    where
        M: prometheus_client::registry::Metric + Clone,
    {
        self.register(name, help, metric.clone());
        metric
    }
}

impl Metrics {
    /// Metrics that are all zero.
    pub fn new() -> Self {
        let mut registry = Registry::default();
        registry.register(
            "bursar_agent_build",
            "The agent's version",
            Info::new([("version", env!("CARGO_PKG_VERSION"))]),
        );
        let r = &mut registry;
        Self {
            orders_not_understood: r.register_metric(
                "bursar_agent_orders_not_understood",
                "Entries in the spec of this node's GpuNode that this version of the agent does not know",
                Gauge::default(),
            ),
            state_write_lag: r.register_metric(
                "bursar_agent_state_write_lag_seconds",
                "How long the state directory has lacked the newest records, from 5 s on",
                Gauge::default(),
            ),
            watch_failures: r.register_metric(
                "bursar_agent_watch_failures",
                "Failures of the watch of this node's GpuNode",
                Counter::default(),
            ),
            tokens: r.register_metric(
                "bursar_agent_tokens",
                "Healthy devices advertised to the kubelet",
                Family::default(),
            ),
            booked: r.register_metric(
                "bursar_agent_booked",
                "Allocations without a binding yet",
                Family::default(),
            ),
            bound: r.register_metric("bursar_agent_bound", "Allocations bound", Family::default()),
            waiting: r.register_metric(
                "bursar_agent_waiting",
                "Containers waiting on this node for room",
                Family::default(),
            ),
            allocate_seconds: r.register_metric(
                "bursar_agent_allocate_seconds",
                "Time of Allocate",
                seconds_histogram(),
            ),
            bind_seconds: r.register_metric(
                "bursar_agent_bind_seconds",
                "Time of PreStartContainer, waiting included",
                Family::new_with_constructor(seconds_histogram as fn() -> Histogram),
            ),
            releases: r.register_metric(
                "bursar_agent_releases",
                "Pods whose memory was released at their end",
                Counter::default(),
            ),
            collected: r.register_metric(
                "bursar_agent_bookings_collected",
                "Pending allocations dropped because no container followed",
                Counter::default(),
            ),
            registrations: r.register_metric(
                "bursar_agent_registrations",
                "Registrations with the kubelet",
                Family::default(),
            ),
            gpus: LatestFigures::register(r),
            kept: LatestFigures::register(r),
            gpu_node_writes: r.register_metric(
                "bursar_agent_gpu_node_writes",
                "Writes of this node's GpuNode",
                Family::default(),
            ),
            events_dropped: r.register_metric(
                "bursar_agent_events_dropped",
                "Events not sent: too many, repeated, or refused",
                Counter::default(),
            ),
            tasks: r.register_metric(
                "bursar_agent_tasks",
                "Tasks of the agent's runtime",
                Gauge::default(),
            ),
            audited: audited::AuditMetrics::new(r),
            registry: Arc::new(registry),
        }
    }

    /// Encodes the current values in the OpenMetrics text format.
    pub fn encode(&self) -> String {
        // Unit tests encode metrics outside of a runtime.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            self.tasks.set(number(runtime.metrics().num_alive_tasks()));
        }
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("a String takes any text");
        text
    }

    /// Observes the duration of an Allocate call.
    pub fn observe_allocate(&self, took: Duration) {
        self.allocate_seconds.observe(took.as_secs_f64());
    }

    /// Observes the result and the duration of a PreStartContainer call.
    pub fn observe_prepare(&self, result: BindResult, took: Duration) {
        let result = result.as_str();
        self.bind_seconds
            .get_or_create(&ResultLabels { result })
            .observe(took.as_secs_f64());
    }

    /// Counts a pod whose memory was released at its end.
    pub fn count_release(&self) {
        self.releases.inc();
    }

    /// Counts pending allocations that were dropped because no container followed.
    pub fn count_collected(&self, bookings: usize) {
        self.collected.inc_by(bookings as u64);
    }

    /// Counts a registration that the kubelet accepted.
    pub fn count_registration(&self, resource: Resource) {
        self.registrations
            .get_or_create(&resource_labels(resource))
            .inc();
    }

    /// Sets the ledger's numbers of `resource`.
    pub fn set_counts(&self, resource: Resource, counts: Counts) {
        let Counts {
            pending: booked,
            bound,
            waiting,
        } = counts;
        let label = resource_labels(resource);
        self.booked.get_or_create(&label).set(number(booked));
        self.bound.get_or_create(&label).set(number(bound));
        self.waiting.get_or_create(&label).set(number(waiting));
    }

    /// Sets the figures of a node report: devices, and each GPU's memory and health.
    ///
    /// A GPU that leaves the report leaves the metrics.
    pub fn set_report(&self, report: &NodeReport) {
        let tokens = [
            (Resource::DeviceMemory, report.device_memory),
            (Resource::ManagedMemory, report.managed_memory),
        ];
        for (resource, memory) in tokens {
            self.tokens
                .get_or_create(&resource_labels(resource))
                .set(memory.allocatable.0.into());
        }
        let not_understood = report.applied_spec.unrecognized.len();
        self.orders_not_understood
            .set(i64::try_from(not_understood).unwrap_or(i64::MAX));
        let mut figures = GpuFigures::default();
        for gpu in &report.gpus {
            let bytes = |quanta: Quanta| quantum_bytes(report.quantum, quanta);
            let states = [
                ("total", gpu.memory.0),
                ("capacity", bytes(gpu.capacity)),
                ("free", bytes(gpu.free)),
                ("bound", bytes(gpu.capacity.saturating_sub(gpu.free))),
                ("leaked", gpu.leaked.0),
                ("withheld", gpu.withheld.0),
            ];
            for (state, amount) in states {
                let label = GpuStateLabels {
                    gpu: gpu.uuid.to_string(),
                    state,
                };
                let amount = i64::try_from(amount).unwrap_or(i64::MAX);
                figures.memory.push((label, amount));
            }
            let is_healthy = gpu.health == GpuHealth::Healthy;
            figures
                .healthy
                .push((gpu_labels(&gpu.uuid), is_healthy.into()));
        }
        self.gpus.replace(figures);
    }

    /// Sets the number of retained leases of each GPU, and their bytes.
    pub fn set_retained(&self, kept: &BTreeMap<GpuUuid, (usize, Bytes)>) {
        let mut figures = RetainedFigures::default();
        for (gpu, (leases, bytes)) in kept {
            figures.leases.push((gpu_labels(gpu), number(*leases)));
            let bytes = i64::try_from(bytes.0).unwrap_or(i64::MAX);
            figures.bytes.push((gpu_labels(gpu), bytes));
        }
        self.kept.replace(figures);
    }

    /// Sets how long the state directory has lacked the newest records.
    pub fn set_state_write_lag(&self, lag: Duration) {
        self.state_write_lag
            .set(i64::try_from(lag.as_secs()).unwrap_or(i64::MAX));
    }

    /// Counts a write of this node's `GpuNode`, failed ones apart.
    pub fn count_gpu_node_write(&self, ok: bool) {
        let result = if ok { "ok" } else { "error" };
        self.gpu_node_writes
            .get_or_create(&ResultLabels { result })
            .inc();
    }

    /// Counts a failure of the watch of this node's `GpuNode`.
    pub fn count_watch_failure(&self) {
        self.watch_failures.inc();
    }

    /// Counts an Event that was not sent.
    pub fn count_event_dropped(&self) {
        self.events_dropped.inc();
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

/// The figures of the GPUs in one report.
#[derive(Clone, Debug, Default)]
struct GpuFigures {
    memory: Vec<(GpuStateLabels, i64)>,
    healthy: Vec<(GpuLabels, i64)>,
}

impl EncodeFamilies for GpuFigures {
    fn encode(&self, tables: &mut FamilyEncoder<'_>) -> std::fmt::Result {
        tables.gauges(
            "bursar_gpu_memory_bytes",
            "Memory of a GPU by state: total, capacity, bound, free, leaked, withheld",
            self.memory.clone(),
        )?;
        tables.gauges(
            "bursar_gpu_healthy",
            "1 while the GPU is given to new pods",
            self.healthy.clone(),
        )
    }
}

/// The retained leases of each GPU.
#[derive(Clone, Debug, Default)]
struct RetainedFigures {
    leases: Vec<(GpuLabels, i64)>,
    bytes: Vec<(GpuLabels, i64)>,
}

impl EncodeFamilies for RetainedFigures {
    fn encode(&self, tables: &mut FamilyEncoder<'_>) -> std::fmt::Result {
        tables.gauges(
            "bursar_gpu_retained_leases",
            "Leases of retained memory in the fd store",
            self.leases.clone(),
        )?;
        tables.gauges(
            "bursar_gpu_retained_bytes",
            "Retained memory in the fd store",
            self.bytes.clone(),
        )
    }
}

fn gpu_labels(gpu: &GpuUuid) -> GpuLabels {
    GpuLabels {
        gpu: gpu.to_string(),
    }
}

fn resource_labels(resource: Resource) -> ResourceLabels {
    ResourceLabels {
        resource: match resource {
            Resource::DeviceMemory => "gpu-memory",
            Resource::ManagedMemory => "managed-memory",
        },
    }
}

fn quantum_bytes(quantum: Quantum, quanta: Quanta) -> u64 {
    quanta.bytes(quantum).0
}

fn number(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::enforcement::attestation::GapReason;
    use crate::enforcement::audit::compare::{AuditResult, Finding};
    use crate::gpu_node::fixtures::report;
    use crate::node::allocator::BoundContainer;
    use crate::node::checkpoint_state::{ContainerName, PodName};
    use crate::sessions::{Account, AccountBalance, ContainerUsage, Fault, Process, ProcessImage};
    use bursar_ledger::units::Bytes;

    #[test]
    fn gpu_has_memory_by_state_until_it_leaves_the_report() {
        let metrics = Metrics::new();
        let mut report = report();
        report.gpus[0].free = Quanta(6);
        metrics.set_report(&report);
        let text = metrics.encode();
        assert!(
            text.contains(
                r#"bursar_gpu_memory_bytes{gpu="GPU-00000000",state="bound"} 10737418240"#
            ),
            "{text}"
        );
        assert!(text.contains(r#"bursar_agent_tokens{resource="gpu-memory"} 32"#));
        report.gpus.clear();
        metrics.set_report(&report);
        assert!(!metrics.encode().contains("GPU-0"));
    }

    #[test]
    fn page_is_complete_while_figures_are_replaced() {
        let (metrics, report, over) = (Metrics::new(), report(), AtomicBool::new(false));
        let replace = || {
            metrics.set_report(&report);
            set_audit(&metrics);
        };
        replace();
        let lines = [
            "bursar_gpu_healthy{gpu=\"GPU-00000000\"} 1",
            "account=\"GPU-a\",amount=\"peak\"} 3221225472",
        ];
        let is_whole = |page: String| lines.iter().all(|line| page.contains(line));
        let are_whole = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    replace();
                }
            });
            let are_whole = (0..2_000).all(|_| is_whole(metrics.encode()));
            over.store(true, Ordering::Relaxed);
            are_whole
        });
        assert!(are_whole);
    }

    #[test]
    fn prepare_is_counted_by_its_result() {
        let metrics = Metrics::new();
        metrics.observe_prepare(BindResult::NoRoom, Duration::from_secs(25));
        let text = metrics.encode();
        assert!(
            text.contains(r#"bursar_agent_bind_seconds_count{result="no-room"} 1"#),
            "{text}"
        );
        assert!(text.contains(r#"bursar_agent_bind_seconds_bucket{le="25.0",result="no-room"} 1"#));
    }

    /// Metrics with a value each: a family without a value is not encoded.
    fn used_metrics() -> Metrics {
        let metrics = Metrics::new();
        metrics.set_report(&report());
        let gpu = "GPU-a".parse().unwrap();
        metrics.set_retained(&BTreeMap::from([(gpu, (1, Bytes::gib(1)))]));
        metrics.set_counts(Resource::DeviceMemory, Counts::default());
        metrics.observe_prepare(BindResult::Bound, Duration::ZERO);
        metrics.count_registration(Resource::DeviceMemory);
        metrics.count_gpu_node_write(true);
        set_audit(&metrics);
        metrics
    }

    /// Sets an audit with one container that was denied memory, on a GPU with an untracked process.
    fn set_audit(metrics: &Metrics) {
        let gpu: bursar_ledger::units::GpuUuid = "GPU-a".parse().unwrap();
        let container = BoundContainer {
            name: Some(ContainerName {
                container: "main".into(),
                pod: Some(PodName {
                    namespace: "team".into(),
                    name: "train".into(),
                }),
            }),
            ..BoundContainer::with_ids(1, 1)
        };
        let account = AccountBalance {
            granted: Bytes::gib(2),
            used: Bytes::gib(1),
            peak: Bytes::gib(3),
            ..AccountBalance::empty(Account::Gpu(gpu.clone()), Bytes::gib(4))
        };
        let books = ContainerUsage {
            requests: 5,
            denied: vec![("cuMemAlloc_v2".into(), 2)],
            ..ContainerUsage::empty(1, vec![account])
        };
        let allocation = books.allocation;
        let verdict = AuditResult {
            drift: [((allocation, gpu.clone()), -7)].into(),
            unattributed_signed: [(gpu.clone(), 8)].into(),
            untracked_processes: [(gpu.clone(), 1)].into(),
            ..AuditResult::default()
        };
        metrics.set_audit(AuditFigures {
            containers: [container].into(),
            books: [(allocation, books)].into(),
            attested: [(allocation, Some(GapReason::MountedOver))].into(),
            limited: [allocation].into(),
            verdict,
            gpus: [gpu.clone()].into(),
            stale: [gpu.clone()].into(),
            ..AuditFigures::default()
        });
        let bytes = Bytes::gib(1);
        metrics.count_finding(&Finding::Unaccounted {
            gpu: gpu.clone(),
            bytes,
            only_container: None,
        });
        metrics.count_poisoned(&fault(700));
    }

    fn fault(cuda_error: i32) -> Fault {
        Fault {
            image: ProcessImage {
                process: Process { pid: 7, start: 70 },
                generation: 1,
            },
            gpu: "GPU-a".parse().unwrap(),
            cuda_error: Some(cuda_error),
            xid: None,
            time: jiff::Timestamp::UNIX_EPOCH,
            since: bursar_ledger::BootTime::default(),
            decided: None,
            executed: false,
            ended: false,
        }
    }

    #[test]
    fn faults_with_unknown_cuda_codes_are_counted_together() {
        let metrics = Metrics::new();
        for code in [700, 999, 12_345, -1, i32::MAX] {
            metrics.count_poisoned(&fault(code));
        }
        let text = metrics.encode();
        let name = "bursar_agent_poisoned_contexts_total";
        let lines: std::collections::BTreeSet<_> = text
            .lines()
            .filter_map(|line| line.strip_prefix(name))
            .collect();
        let expected = [
            r#"{cause="cuda-700",action="fence"} 1"#,
            r#"{cause="cuda-unknown",action="fence"} 4"#,
        ];
        assert_eq!(lines, expected.into());
    }

    #[test]
    fn container_has_amounts_until_it_leaves_the_audit() {
        let metrics = Metrics::new();
        set_audit(&metrics);
        set_audit(&metrics);
        let text = metrics.encode();
        let of = r#"namespace="team",pod="train",container="main""#;
        for line in [
            format!(
                r#"bursar_container_memory_bytes{{{of},account="GPU-a",amount="peak"}} 3221225472"#
            ),
            format!(r#"bursar_container_drift_bytes{{{of},account="GPU-a"}} -7"#),
            format!(r#"bursar_container_denied_total{{{of},function="cuMemAlloc_v2"}} 2"#),
            format!(r#"bursar_container_credit_requests_total{{{of}}} 5"#),
            format!(r#"bursar_container_enforced{{{of},reason="MountedOver"}} 0"#),
            format!(r#"bursar_container_layer{{{of},layer="shim"}} 0"#),
            format!(r#"bursar_container_layer{{{of},layer="audit"}} 0"#),
            format!(r#"bursar_container_layer{{{of},layer="driver"}} 1"#),
            r#"bursar_gpu_audit_stale{gpu="GPU-a"} 1"#.to_owned(),
            r#"bursar_agent_findings_total{finding="unaccounted"} 2"#.to_owned(),
        ] {
            assert!(
                text.lines().any(|shown| shown == line),
                "{line} is missing in {text}"
            );
        }
        metrics.set_audit(AuditFigures::default());
        assert!(!metrics.encode().contains("team"));
    }

    #[test]
    fn metrics_and_their_documentation_list_the_same_names() {
        let docs = include_str!("../../docs/metrics.md");
        let agent = docs
            .split("## Operator")
            .next()
            .expect("the agent's table comes first");
        let documented: std::collections::BTreeSet<&str> = agent
            .lines()
            .filter_map(|line| line.strip_prefix("| `")?.split('`').next())
            .map(|name| name.trim_end_matches("_total").trim_end_matches("_info"))
            .collect();
        let text = used_metrics().encode();
        let registered: std::collections::BTreeSet<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("# HELP ")?.split(' ').next())
            .collect();
        assert_eq!(documented, registered);
    }
}
