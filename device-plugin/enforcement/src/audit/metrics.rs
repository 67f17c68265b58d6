//! Exports each container's memory and the audit's results as metrics.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bursar_crds::context_policy::FaultAction;
use bursar_ledger::units::{AllocationId, Bytes, GpuUuid, PodUid};
use bursar_metrics::{
    EncodeFamilies, FamilyEncoder, Label, LatestFigures, RegisterMetric as _, gauge_value,
    gpu_label, seconds_histogram,
};
use bursar_node::allocator::BoundContainer;
use bursar_node::checkpoint_state::ContainerName;
use bursar_protocol::error_class::ErrorClass;
use bursar_sessions::{Account, AccountBalance, ContainerUsage, Fault, RecoveryAction};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::attestation::GapReason;
use crate::audit::compare::{AuditResult, Finding};

/// Namespace, pod and container.
type ContainerLabels = [(&'static str, String); 3];

/// Buckets in seconds. The lowest is for a program that the shim executes again in its process. The
/// highest is for a container that the kubelet restarts after a back-off.
const RECOVERY_BUCKETS: [f64; 10] = [0.1, 0.3, 0.6, 1.0, 3.0, 10.0, 30.0, 60.0, 180.0, 600.0];

fn recovery_histogram() -> Histogram {
    Histogram::new(RECOVERY_BUCKETS)
}

/// The results of one audit, from which a scrape encodes series.
#[derive(Clone, Debug, Default)]
pub struct AuditFigures {
    /// The node's containers.
    pub containers: Arc<[BoundContainer]>,
    /// The memory usage of each container.
    pub usage: BTreeMap<AllocationId, ContainerUsage>,
    /// The enforcement gap of each running container, if any.
    pub attested: BTreeMap<AllocationId, Option<GapReason>>,
    /// The containers that the driver's own limits hold to their quota.
    pub limited: BTreeSet<AllocationId>,
    /// The pods whose processes the agent has failed to read for a while.
    pub hanging: BTreeSet<PodUid>,
    /// The differences between the driver's figures and the agent's accounts.
    pub result: AuditResult,
    /// The node's GPUs.
    pub gpus: BTreeSet<GpuUuid>,
    /// The GPUs for which NVML has not answered for a while.
    pub stale: BTreeSet<GpuUuid>,
}

/// The metrics of the audit; counters outlive a single audit.
#[derive(Clone, Debug)]
pub struct AuditMetrics {
    figures: LatestFigures<AuditFigures>,
    findings: Family<Label<&'static str>, Counter>,
    kills: Counter,
    poisoned: Family<[(&'static str, String); 2], Counter>,
    recoveries: Family<Label<&'static str>, Histogram>,
    seconds: Histogram,
}

impl AuditMetrics {
    /// Registers the metrics, which are all zero.
    pub fn new(registry: &mut Registry) -> Self {
        let findings = Family::<Label<_>, Counter>::default();
        // A counter that begins at its first finding has no increase for an alert.
        for finding in Finding::KINDS {
            drop(findings.get_or_create(&[("finding", finding)]));
        }
        Self {
            figures: LatestFigures::register(registry),
            findings: registry.register_metric(
                "bursar_agent_findings",
                "Findings of the audit, each counted once",
                findings,
            ),
            kills: registry.register_metric(
                "bursar_agent_audit_kills",
                "Processes killed by the audit's policy",
                Counter::default(),
            ),
            poisoned: registry.register_metric(
                "bursar_agent_poisoned_contexts",
                "Process images whose context a fault poisoned",
                Family::default(),
            ),
            recoveries: registry.register_metric(
                "bursar_context_recovery_seconds",
                "Time from a fault of a context to the next process image of its program",
                Family::new_with_constructor(recovery_histogram as fn() -> Histogram),
            ),
            seconds: registry.register_metric(
                "bursar_agent_audit_seconds",
                "Time of one audit, with the wait for NVML",
                seconds_histogram(),
            ),
        }
    }
}

impl EncodeFamilies for AuditFigures {
    fn encode(&self, tables: &mut FamilyEncoder<'_>) -> fmt::Result {
        self.encode_accounts(tables)?;
        self.encode_processes(tables)?;
        self.encode_containers(tables)?;
        self.encode_enforcement(tables)?;
        self.encode_gpus(tables)
    }
}

impl AuditFigures {
    fn containers_with_usage(&self) -> impl Iterator<Item = (&BoundContainer, &ContainerUsage)> {
        let containers = self.containers.iter();
        containers.filter_map(|container| Some((container, self.usage.get(&container.allocation)?)))
    }

    /// Each account of a container with usage.
    fn accounts(
        &self,
    ) -> impl Iterator<Item = (&BoundContainer, &ContainerUsage, &AccountBalance)> {
        let containers = self.containers_with_usage();
        containers.flat_map(|(container, usage)| {
            let accounts = usage.accounts.iter();
            accounts.map(move |account| (container, usage, account))
        })
    }

    fn encode_accounts(&self, tables: &mut FamilyEncoder<'_>) -> fmt::Result {
        let gauges = |of: fn(&AccountBalance) -> Bytes| -> Vec<_> {
            let accounts = self.accounts();
            let gauge = |(container, _, account)| {
                let bytes = of(account);
                (account_labels(container, account), gauge_value(bytes.0))
            };
            accounts.map(gauge).collect()
        };
        tables.gauges(
            "bursar_container_memory_quota_bytes",
            "Quota of a container's account",
            gauges(|account| account.quota),
        )?;
        tables.gauges(
            "bursar_container_memory_used_bytes",
            "Memory that the processes of a container use, as their shims report it",
            // Managed memory that the quota covers is used memory too.
            gauges(|account| account.used + account.managed),
        )?;
        tables.gauges(
            "bursar_container_memory_peak_bytes",
            "Most memory that a container has had at a time",
            gauges(|account| account.peak),
        )?;
        let charged = self.accounts().flat_map(|(container, _, account)| {
            let labels = account_labels(container, account);
            charged_parts(account).map(|(part, bytes)| {
                let labels = (labels.clone(), [("part", part)]);
                (labels, gauge_value(bytes.0))
            })
        });
        tables.gauges(
            "bursar_container_memory_charged_bytes",
            "Memory charged to the quota of a container's account, by part",
            charged.collect(),
        )
    }

    /// Encodes what NVML reports of the processes of each container.
    fn encode_processes(&self, tables: &mut FamilyEncoder<'_>) -> fmt::Result {
        let on_gpus = || {
            self.accounts().filter_map(|(container, usage, account)| {
                let Account::Gpu(gpu) = &account.account else {
                    return None;
                };
                Some((container, account, (usage.allocation, gpu.clone())))
            })
        };
        let drift = on_gpus().filter_map(|(container, account, key)| {
            let difference = self.result.drift.get(&key)?;
            Some((account_labels(container, account), *difference))
        });
        tables.gauges(
            "bursar_container_drift_bytes",
            "Memory of a container's processes by NVML less that of the agent's accounts",
            drift.collect(),
        )?;
        let utilization = on_gpus().filter_map(|(container, _, key)| {
            let percent = self.result.sm_percents.get(&key)?;
            let labels = (container_labels(container), [("gpu", key.1.to_string())]);
            Some((labels, f64::from(*percent) / 100.0))
        });
        tables.ratios(
            "bursar_container_sm_utilization_ratio",
            "SM utilization of a GPU by a container's processes, by NVML",
            utilization.collect(),
        )
    }

    fn encode_containers(&self, tables: &mut FamilyEncoder<'_>) -> fmt::Result {
        let denied = self.containers_with_usage().flat_map(|(container, usage)| {
            let denied = usage.denied.iter();
            denied.map(|(function, count)| {
                let labels = container_labels(container);
                ((labels, [("function", function)]), *count)
            })
        });
        tables.counters(
            "bursar_container_denied",
            "Allocations denied for lack of quota, by driver function",
            denied.collect(),
        )?;
        let each = |figure: fn(&ContainerUsage) -> u64| -> Vec<(ContainerLabels, u64)> {
            let known = self.containers_with_usage();
            known
                .map(|(container, usage)| (container_labels(container), figure(usage)))
                .collect()
        };
        let gauge = |figure| {
            let rows = each(figure).into_iter();
            rows.map(|(labels, figure)| (labels, gauge_value(figure)))
                .collect()
        };
        tables.counters(
            "bursar_container_credit_requests",
            "Requests for credit that the agent answered",
            each(|usage| usage.requests),
        )?;
        tables.counters(
            "bursar_container_driver_refusals",
            "Allocations that the driver refused although the quota allowed them",
            each(|usage| usage.driver_refusals),
        )?;
        tables.gauges(
            "bursar_container_unclosed_sockets",
            "Sessions of a container's exited processes that wait to be closed",
            gauge(|usage| usage.unclosed_sockets as u64),
        )?;
        tables.gauges(
            "bursar_container_generation",
            "Process images of a container that opened a session, replaced ones too",
            gauge(|usage| usage.generation),
        )
    }

    fn encode_enforcement(&self, tables: &mut FamilyEncoder<'_>) -> fmt::Result {
        let (mut enforced, mut layers) = (Vec::new(), Vec::new());
        for (container, usage) in self.containers_with_usage() {
            let Some(gap) = self.attested.get(&container.allocation) else {
                continue;
            };
            let labels = container_labels(container);
            let hangs = self.hanging.contains(&container.pod);
            let audited = !hangs && usage.gpus().all(|gpu| !self.stale.contains(gpu));
            let holds = [
                ("shim", gap.is_none()),
                ("audit", audited),
                ("driver", self.limited.contains(&container.allocation)),
            ];
            layers.extend(holds.map(|(layer, holds)| {
                let labels = labels.clone();
                ((labels, [("layer", layer)]), holds.into())
            }));
            let reason = gap.map_or("", GapReason::as_str);
            enforced.push(((labels, [("reason", reason)]), gap.is_none().into()));
        }
        tables.gauges(
            "bursar_container_enforced",
            "1 while the agent sees no way past the quota of a running container",
            enforced,
        )?;
        tables.gauges(
            "bursar_container_layer",
            "1 while this layer enforces the quota of a running container: shim, audit, driver",
            layers,
        )
    }

    fn encode_gpus(&self, tables: &mut FamilyEncoder<'_>) -> fmt::Result {
        let unattributed = self.result.unattributed_signed.iter();
        tables.gauges(
            "bursar_gpu_unattributed_bytes",
            "Used memory of a GPU less that of its processes by NVML",
            unattributed
                .map(|(gpu, bytes)| (gpu_label(gpu), *bytes))
                .collect(),
        )?;
        let untracked = self.result.untracked_processes.iter();
        tables.gauges(
            "bursar_gpu_untracked_processes",
            "Processes that use a GPU without a session",
            untracked
                .map(|(gpu, count)| (gpu_label(gpu), gauge_value(*count as u64)))
                .collect(),
        )?;
        let gpus = self.gpus.iter();
        tables.gauges(
            "bursar_gpu_audit_stale",
            "1 while NVML has not listed the processes of a GPU for 5 s",
            gpus.map(|gpu| (gpu_label(gpu), self.stale.contains(gpu).into()))
                .collect(),
        )?;
        let gpus = self.result.unattributed_signed.keys();
        let is_unknown = |gpu: &GpuUuid| self.result.holders_unknown.contains(gpu);
        tables.gauges(
            "bursar_gpu_holders_unknown",
            "1 if the driver did not report all processes that hold memory of a GPU",
            gpus.map(|gpu| (gpu_label(gpu), is_unknown(gpu).into()))
                .collect(),
        )
    }
}

impl AuditMetrics {
    /// Replaces the figures of containers and GPUs by those of a new audit.
    ///
    /// A container that has ended has no series any more. A GPU that did not answer keeps its
    /// series of the accounts and `bursar_gpu_audit_stale`, and loses those of the driver's
    /// figures.
    pub fn set_audit(&self, figures: AuditFigures) {
        self.figures.replace(figures);
    }

    pub(crate) fn observe_audit(&self, took: Duration) {
        self.seconds.observe(took.as_secs_f64());
    }

    /// Counts a new finding.
    pub fn count_finding(&self, finding: &Finding) {
        let label = [("finding", finding.kind())];
        self.findings.get_or_create(&label).inc();
    }

    /// Counts a process image whose context is poisoned.
    pub fn count_poisoned(&self, fault: &Fault) {
        let cause = match (fault.cuda_error, fault.xid) {
            // Tenants can report any number: unknown codes share one label.
            (Some(code), _) if ErrorClass::of(code) == ErrorClass::Unknown => "cuda-unknown".into(),
            (Some(code), _) => format!("cuda-{code}"),
            (None, Some(xid)) => format!("xid-{xid}"),
            (None, None) => String::new(),
        };
        // Without a decision an XID named the process, and the agent awaits a further report.
        let action = fault.decision().map(RecoveryAction::to_api);
        let action = action.map_or("fence", FaultAction::label);
        let label = [("cause", cause), ("action", action.to_owned())];
        self.poisoned.get_or_create(&label).inc();
    }

    /// Observes the time until a program runs again after a fault.
    pub fn observe_recovery(&self, action: RecoveryAction, took: Duration) {
        let action = action.to_api().label();
        self.recoveries
            .get_or_create(&[("action", action)])
            .observe(took.as_secs_f64());
    }

    /// Counts a process that the audit's policy killed.
    pub(crate) fn count_kill(&self) {
        self.kills.inc();
    }
}

/// The labels of a container. Containers of one pod whose names are unknown have the same labels,
/// and the encoder keeps one series of them.
/// A container's labels, and the GPU of the account or `managed`.
fn account_labels(
    container: &BoundContainer,
    account: &AccountBalance,
) -> (ContainerLabels, [(&'static str, String); 1]) {
    let name = match &account.account {
        Account::Gpu(gpu) => gpu.to_string(),
        Account::Managed => "managed".to_owned(),
    };
    (container_labels(container), [("account", name)])
}

/// The parts that are charged to the quota of an account.
fn charged_parts(account: &AccountBalance) -> [(&'static str, Bytes); 6] {
    [
        ("granted", account.granted),
        ("exited", account.exited),
        ("leased", account.leased),
        ("managed", account.managed),
        ("untracked", account.untracked),
        ("overhead", account.overhead),
    ]
}

fn container_labels(container: &BoundContainer) -> ContainerLabels {
    let [namespace, mut pod, name] = ContainerName::parts(container.name.as_ref());
    if pod.is_empty() {
        // The UID replaces a pod name that the kubelet has not reported.
        pod = container.pod.to_string();
    }
    [("namespace", namespace), ("pod", pod), ("container", name)]
}
