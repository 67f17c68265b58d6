//! Exports the agent's metrics in the OpenMetrics text format.
//!
//! `docs/use/reference/metrics.md` documents names, labels and units; a test compares the two
//! lists.

mod figures;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bursar_apiserver::metrics::ApiMetrics;
use bursar_crds::numbers::to_i64;
use bursar_enforcement::audit::metrics::AuditMetrics;
use bursar_gpu_node::report::NodeReport;
use bursar_host::checkpoint::unread_records;
use bursar_ledger::units::Resource;
use bursar_metrics::{Label, LatestFigures, RegisterMetric as _, gauge_value, resource_label};
use bursar_node::metrics::NodeMetrics;
use bursar_retained::status::RetainedStatus;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

use figures::{ReportFigures, RetainedFigures};

/// The agent's metrics. Clones share the same values.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    registry: Arc<Registry>,
    device_ids: Family<Label<&'static str>, Gauge>,
    unknown_spec_entries: Gauge,
    state_write_lag: Gauge,
    registrations: Family<Label<&'static str>, Counter>,
    relay_silences: Counter,
    fdstore_losses: Counter,
    unread_records: Counter,
    gpus: LatestFigures<ReportFigures>,
    kept: LatestFigures<RetainedFigures>,
    tasks: Gauge,
    /// The metrics of the node's allocations.
    pub node: NodeMetrics,
    /// The metrics of the audit and of faults.
    pub audit: AuditMetrics,
    /// The metrics of requests to the API server.
    pub api: ApiMetrics,
}

impl Metrics {
    /// Metrics that are all zero.
    pub(crate) fn new() -> Self {
        let mut registry = Registry::default();
        registry.register(
            "bursar_agent_build",
            "The agent's version",
            Info::new([("version", env!("CARGO_PKG_VERSION"))]),
        );
        let r = &mut registry;
        Self {
            unknown_spec_entries: r.register_metric(
                "bursar_agent_unknown_spec_entries",
                "Entries in the spec of this node's GpuNode that this version of the agent does not know",
                Gauge::default(),
            ),
            state_write_lag: r.register_metric(
                "bursar_agent_state_write_lag_seconds",
                "How long the state directory has lacked the newest records, from 5 s on",
                Gauge::default(),
            ),
            device_ids: r.register_metric(
                "bursar_agent_device_ids",
                "Healthy devices advertised to the kubelet",
                Family::default(),
            ),
            registrations: r.register_metric(
                "bursar_agent_registrations",
                "Registrations with the kubelet",
                Family::default(),
            ),
            relay_silences: r.register_metric(
                "bursar_agent_relay_silences",
                "Times that the plugin relay stopped answering the agent",
                Counter::default(),
            ),
            fdstore_losses: r.register_metric(
                "bursar_agent_fdstore_losses",
                "Times that the agent lost its connection to the fd store",
                Counter::default(),
            ),
            unread_records: r.register_metric(
                "bursar_agent_unread_records",
                "Records on disk that the agent could not parse",
                Counter::default(),
            ),
            gpus: LatestFigures::register(r),
            kept: LatestFigures::register(r),
            tasks: r.register_metric(
                "bursar_agent_tasks",
                "Tasks of the agent's runtime",
                Gauge::default(),
            ),
            node: NodeMetrics::new(r),
            audit: AuditMetrics::new(r),
            api: ApiMetrics::new(r),
            registry: Arc::new(registry),
        }
    }

    /// Encodes the current values in the OpenMetrics text format.
    pub(crate) fn encode(&self) -> String {
        let unread = unread_records();
        self.unread_records.inner().store(unread, Ordering::Relaxed);
        // Unit tests encode metrics outside of a runtime.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            self.tasks
                .set(gauge_value(runtime.metrics().num_alive_tasks()));
        }
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("a String takes any text");
        text
    }

    /// Counts a registration that the kubelet accepted.
    pub(crate) fn count_registration(&self, resource: Resource) {
        self.registrations
            .get_or_create(&resource_label(resource))
            .inc();
    }

    /// Counts a time that the plugin relay stopped answering.
    pub(crate) fn count_relay_silence(&self) {
        self.relay_silences.inc();
    }

    /// Sets the figures of a node report: devices, and each GPU's memory and health.
    ///
    /// A GPU that leaves the report leaves the metrics.
    pub(crate) fn set_report(&self, report: &NodeReport) {
        let device_ids = [
            (Resource::DeviceMemory, report.status.device_memory),
            (Resource::ManagedMemory, report.status.managed_memory),
        ];
        for (resource, memory) in device_ids {
            self.device_ids
                .get_or_create(&resource_label(resource))
                .set(memory.allocatable.into());
        }
        self.unknown_spec_entries
            .set(gauge_value(report.unknown_spec_entries));
        self.gpus.replace(ReportFigures(Some(report.clone())));
    }

    /// Sets the number of retained leases of each GPU, their bytes, and the state of the GPU's
    /// allocator runtime.
    pub(crate) fn set_retained(&self, kept: &RetainedStatus) {
        let losses = self.fdstore_losses.inner();
        losses.store(kept.store_losses, Ordering::Relaxed);
        self.kept.replace(RetainedFigures(kept.clone()));
    }

    /// Sets how long the state directory has lacked the newest records.
    pub(crate) fn set_state_write_lag(&self, lag: Duration) {
        self.state_write_lag.set(to_i64(lag.as_secs()));
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use bursar_crds::context_policy::FaultAction;
    use bursar_crds::gpu_node::{self, FaultKind, RuntimeState};
    use bursar_enforcement::attestation::GapReason;
    use bursar_enforcement::audit::compare::{AuditResult, Finding};
    use bursar_enforcement::audit::metrics::AuditFigures;
    use bursar_gpu_node::fixtures::{self, report};
    use bursar_ledger::units::Bytes;
    use bursar_node::allocator::BoundContainer;
    use bursar_node::checkpoint_state::{ContainerName, PodName};
    use bursar_node::metrics::{BindResult, Counts};
    use bursar_sessions::{
        Account, AccountBalance, ContainerUsage, Fault, Process, ProcessImage, RecoveryAction,
    };
    use bursar_supervision::runtimes::{FailureClass, RuntimeReport};

    use super::*;

    #[test]
    fn gpu_has_memory_by_state_until_it_leaves_the_report() {
        let metrics = Metrics::new();
        let mut report = report();
        report.status.gpus[0].free = 6;
        report.status.gpus[0].compute = Some(compute());
        metrics.set_report(&report);
        let text = metrics.encode();
        for figure in [
            r#"bursar_gpu_compute_enforced{gpu="GPU-00000000"} -1"#,
            r#"bursar_gpu_compute_hidden_groups{gpu="GPU-00000000"} 3"#,
        ] {
            assert!(text.contains(figure), "{text}");
        }
        assert!(
            text.contains(
                r#"bursar_gpu_memory_bytes{gpu="GPU-00000000",state="bound"} 10737418240"#
            ),
            "{text}"
        );
        assert!(text.contains(r#"bursar_agent_device_ids{resource="gpu-memory"} 32"#));
        report.status.gpus.clear();
        metrics.set_report(&report);
        assert!(!metrics.encode().contains("GPU-0"));
    }

    #[test]
    fn unrecognized_spec_entries_are_counted_while_they_last() {
        let (metrics, mut report) = (Metrics::new(), report());
        report.unknown_spec_entries = 2;
        for count in [2, 0] {
            metrics.set_report(&report);
            let line = format!("bursar_agent_unknown_spec_entries {count}\n");
            assert!(metrics.encode().contains(&line), "{line}");
            report.unknown_spec_entries = 0;
        }
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
            "account=\"GPU-a\"} 3221225472",
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
    fn findings_are_zero_before_the_first_one() {
        let text = Metrics::new().encode();
        for finding in Finding::KINDS {
            let line = format!(r#"bursar_agent_findings_total{{finding="{finding}"}} 0"#);
            assert!(text.lines().any(|shown| shown == line), "{line}: {text}");
        }
    }

    #[test]
    fn prepare_is_counted_by_its_result() {
        let metrics = Metrics::new();
        metrics
            .node
            .observe_prepare(BindResult::NoRoom, Duration::from_secs(25));
        let text = metrics.encode();
        assert!(
            text.contains(r#"bursar_agent_bind_seconds_count{result="no-room"} 1"#),
            "{text}"
        );
        assert!(text.contains(r#"bursar_agent_bind_seconds_bucket{le="25.0",result="no-room"} 1"#));
    }

    /// Metrics with a value each: a family without a value is not encoded.
    fn compute() -> gpu_node::GpuCompute {
        gpu_node::GpuCompute {
            state: gpu_node::ComputeState::NotTested,
            reason: String::new(),
            round: "4ms".to_owned(),
            hidden_groups: 3,
        }
    }

    fn used_metrics() -> Metrics {
        let metrics = Metrics::new();
        let mut faulty = report();
        faulty.status.faults = vec![gpu_fault()];
        faulty.status.gpus[0].compute = Some(compute());
        metrics.set_report(&faulty);
        metrics.set_retained(&retained());
        metrics
            .node
            .set_counts(Resource::DeviceMemory, Counts::default());
        metrics
            .node
            .observe_prepare(BindResult::Bound, Duration::ZERO);
        metrics.count_registration(Resource::DeviceMemory);
        metrics.api.count_gpu_node_write(true);
        set_audit(&metrics);
        metrics
    }

    /// A GPU with a lease, whose runtime was refused twice before it started.
    fn retained() -> RetainedStatus {
        let gpu: bursar_ledger::units::GpuUuid = "GPU-a".parse().unwrap();
        let runtime = RuntimeReport {
            state: RuntimeState::Ready,
            starts: 1,
            failures: [(FailureClass::Refused, 2)].into(),
            ..RuntimeReport::default()
        };
        RetainedStatus {
            store_losses: 2,
            live: [(gpu.clone(), (1, Bytes::gib(1)))].into(),
            runtimes: [(gpu, runtime)].into(),
            ..RetainedStatus::default()
        }
    }

    #[test]
    fn runtime_has_one_state_and_its_counts() {
        let metrics = Metrics::new();
        metrics.set_retained(&retained());
        let text = metrics.encode();
        for line in [
            r#"bursar_gpu_runtime_state{gpu="GPU-a",state="ready"} 1"#,
            r#"bursar_gpu_runtime_state{gpu="GPU-a",state="refused"} 0"#,
            r#"bursar_gpu_runtime_starts_total{gpu="GPU-a"} 1"#,
            r#"bursar_gpu_runtime_failures_total{gpu="GPU-a",class="refused"} 2"#,
            r#"bursar_gpu_retained_bytes{gpu="GPU-a"} 1073741824"#,
            "bursar_agent_fdstore_losses_total 2",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line}: {text}");
        }
    }

    fn gpu_fault() -> gpu_node::Fault {
        gpu_node::Fault {
            action: Some(FaultAction::RestartNode),
            ..fixtures::fault("GPU-00000000-3", FaultKind::Gpu, 0)
        }
    }

    #[test]
    fn node_has_conditions_and_each_gpu_a_name_and_its_faults() {
        let metrics = Metrics::new();
        let mut report = report();
        report.status.faults = vec![gpu_fault(), gpu_fault()];
        report.conditions[0].holds = Some(false);
        metrics.set_report(&report);
        let text = metrics.encode();
        for line in [
            r#"bursar_gpu_info{gpu="GPU-00000000",index="0",model="Simulated",driver="580.1"} 1"#,
            r#"bursar_gpu_faults_open{gpu="GPU-00000000",action="restart-node"} 2"#,
            r#"bursar_node_condition{condition="GpusFound"} 0"#,
            r#"bursar_node_condition{condition="Ready"} 0"#,
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line}: {text}");
        }
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
        let usage = ContainerUsage {
            requests: 5,
            driver_refusals: 3,
            denied: vec![("cuMemAlloc_v2".into(), 2)],
            ..ContainerUsage::empty(1, vec![account])
        };
        let allocation = usage.allocation;
        let result = AuditResult {
            drift: [((allocation, gpu.clone()), -7)].into(),
            sm_percents: [((allocation, gpu.clone()), 25)].into(),
            unattributed_signed: [(gpu.clone(), 8)].into(),
            untracked_processes: [(gpu.clone(), 1)].into(),
            ..AuditResult::default()
        };
        metrics.audit.set_audit(AuditFigures {
            containers: [container].into(),
            usage: [(allocation, usage)].into(),
            attested: [(allocation, Some(GapReason::MountedOver))].into(),
            limited: [allocation].into(),
            result,
            gpus: [gpu.clone()].into(),
            stale: [gpu.clone()].into(),
            ..AuditFigures::default()
        });
        let bytes = Bytes::gib(1);
        metrics.audit.count_finding(&Finding::Unaccounted {
            gpu: gpu.clone(),
            bytes,
            only_container: None,
        });
        metrics.audit.count_poisoned(&fault(700));
        metrics
            .audit
            .observe_recovery(RecoveryAction::ReexecInPlace, Duration::from_millis(300));
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
            root: None,
            held_since: None,
        }
    }

    #[test]
    fn faults_with_unknown_cuda_codes_are_counted_together() {
        let metrics = Metrics::new();
        for code in [700, 999, 12_345, -1, i32::MAX] {
            metrics.audit.count_poisoned(&fault(code));
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
            format!(r#"bursar_container_memory_peak_bytes{{{of},account="GPU-a"}} 3221225472"#),
            format!(r#"bursar_container_drift_bytes{{{of},account="GPU-a"}} -7"#),
            format!(r#"bursar_container_sm_utilization_ratio{{{of},gpu="GPU-a"}} 0.25"#),
            format!(r#"bursar_container_denied_total{{{of},function="cuMemAlloc_v2"}} 2"#),
            format!(r#"bursar_container_driver_refusals_total{{{of}}} 3"#),
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
        metrics.audit.set_audit(AuditFigures::default());
        assert!(!metrics.encode().contains("team"));
    }

    /// Runs `promtool check metrics` over the page, as `cargo verify --only surface/metrics` does.
    #[test]
    #[ignore = "needs promtool in BURSAR_PROMTOOL"]
    fn names_and_types_pass_promtool() {
        let promtool = std::env::var_os("BURSAR_PROMTOOL").expect("the path of promtool");
        let page = bursar_http::prometheus_text(&used_metrics().encode());
        let mut child = std::process::Command::new(promtool)
            .args(["check", "metrics"])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), page.as_bytes()).unwrap();
        assert!(child.wait().unwrap().success(), "{page}");
    }

    #[test]
    fn metrics_and_their_documentation_list_the_same_names() {
        let docs = include_str!("../../docs/use/reference/metrics.md");
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
            .map(|name| name.trim_end_matches("_info"))
            .collect();
        assert_eq!(documented, registered);
    }
}
