//! Audits the node once a second: collects, compares, reports and acts.
//!
//! ```text
//!   pids of exited processes --> NVML (deadline) --> attestation (deadline) --> accounts
//!     --> identities of NVML's processes --> compare --> charges, metrics, Events, kills
//! ```
//!
//! [`compare`](super::compare) and [`collect`](super::collect) give the reasons for this order. No
//! step waits longer than its deadline: the auditor leaves out a GPU or a pod that hangs, and
//! reports it after [`STALE_AFTER`].

mod readings;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bursar_apiserver::{Events, ParsedSpec};
use bursar_config::Config;
use bursar_crds::gpu_node::NamespaceUse;
use bursar_gpu::nvml::NvmlHandle;
use bursar_host::checkpoint::Checkpoint;
use bursar_host::checkpoint::write_behind::{LateWrite, WriteBehindFile};
use bursar_host::pod_namespaces::namespace_of;
use bursar_host::procfs::Stat;
use bursar_ledger::units::{AllocationId, Bytes, GpuUuid, PodUid};
use bursar_node::actor::Snapshot;
use bursar_node::allocator::BoundContainer;
use bursar_sessions::{Account, ContainerUsage, ProcessHistory, Sessions};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::collect::SampleRequests;
use super::compare::{AuditResult, Finding, GpuSample, compare_accounts};
use super::consecutive::ConsecutiveFindings;
use super::denials::DenialEvents;
use super::device_users::DeviceUsers;
use super::events::{self, EnforcementEvents};
use super::kill::kill;
use super::namespace_usage::{NamespaceUsage, PersistedUsage};
use super::pod_attestations::PodAttestations;
use super::policy::action;
use super::settle::Overheads;
use super::withheld::WithheldMemory;
use crate::attestation::{AttestedContainer, EnforcementGap, GapReason};
use crate::audit::metrics::{AuditFigures, AuditMetrics};
use crate::driver_limits::{self, Limits};
use crate::leftovers::Leftovers;
use readings::Readings;

/// The time from one audit to the next.
const AUDIT_INTERVAL: Duration = Duration::from_secs(1);
/// The deadline of NVML for all GPUs together.
const NVML_TIMEOUT: Duration = Duration::from_millis(500);
/// How long a GPU or a pod's probe may give no answer before that is reported.
const STALE_AFTER: Duration = Duration::from_secs(5);

/// How long the agent's start waits for the disk to read the counts of namespaces.
const USAGE_READ_TIMEOUT: Duration = Duration::from_secs(1);

/// The audit's part of the node's status.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AuditStatus {
    /// Whether an audit has ended.
    pub has_run: bool,
    /// The healthy GPUs that NVML has not answered about for a while.
    pub stale_gpus: BTreeSet<GpuUuid>,
    /// The pods whose probe has not ended for a while.
    pub hanging_pods: BTreeSet<PodUid>,
    /// The pods that have ended and whose processes run on.
    pub leftovers: BTreeSet<PodUid>,
    /// The containers that are not under enforcement.
    pub not_enforced: Vec<(BoundContainer, EnforcementGap)>,
    /// The usage and the counts of each namespace.
    pub namespaces: Vec<NamespaceUse>,
    /// The process generation and the faults of each container.
    pub histories: BTreeMap<AllocationId, ProcessHistory>,
    /// The state directory lacks the namespaces' counters for long.
    pub late_write: Option<LateWrite>,
    /// The GPUs on which managed memory may hide whether other memory is free.
    pub managed_gpus: BTreeSet<GpuUuid>,
}

/// The inputs of the audit, and the channels that it fills.
pub struct AuditInputs {
    /// The agent's configuration.
    pub config: Config,
    /// The processes that ask NVML.
    pub nvml: NvmlHandle,
    /// The accounts.
    pub sessions: Arc<Sessions>,
    /// The containers and GPUs of the node.
    pub snapshots: watch::Receiver<Snapshot>,
    /// The driver's own limits.
    pub limits: watch::Receiver<Limits>,
    /// The spec of the node's `GpuNode`; none before the API server has sent the object.
    pub spec: watch::Receiver<Option<ParsedSpec>>,
    /// The memory of each GPU that must not be bound.
    pub withhold: watch::Sender<BTreeMap<GpuUuid, Bytes>>,
    /// Where the agent publishes Events.
    pub events: Events,
    /// The audit's metrics.
    pub metrics: AuditMetrics,
}

/// The state of the audit task.
pub struct Auditor {
    inputs: AuditInputs,
    audited: watch::Sender<AuditStatus>,
    sample_requests: SampleRequests,
    device_users: DeviceUsers,
    /// The agent's start, in clock ticks since boot.
    agent_start: u64,
    pods: PodAttestations,
    consecutive: ConsecutiveFindings,
    withheld: WithheldMemory,
    overheads: Overheads,
    /// The GPUs on which the driver may keep free memory for managed memory.
    managed_gpus: BTreeSet<GpuUuid>,
    /// The time of each GPU's last answer; before the first answer, of its first sight.
    last_answers: BTreeMap<GpuUuid, Instant>,
    enforcement_events: EnforcementEvents,
    denials: DenialEvents,
    leftovers: Leftovers,
    usage: NamespaceUsage,
    usage_file: WriteBehindFile<PersistedUsage>,
}

impl Auditor {
    /// An audit that has not started, with the channel of its status.
    ///
    /// # Errors
    /// When the system starts no thread.
    pub fn new(inputs: AuditInputs) -> std::io::Result<(Self, watch::Receiver<AuditStatus>)> {
        let config = &inputs.config;
        let (audited, status) = watch::channel(AuditStatus::default());
        let usage_file = Checkpoint::new(config.paths.state_dir.join("namespaces.json"));
        let usage_file: WriteBehindFile<PersistedUsage> =
            WriteBehindFile::open(usage_file, Checkpoint::save)?;
        let persisted = usage_file.read(USAGE_READ_TIMEOUT);
        if persisted.is_none() {
            warn!("failed to read the counts of namespaces from the disk; they start at zero");
        }
        let quantum = config.resources.quantum;
        let auditor = Self {
            leftovers: Leftovers::new(inputs.spec.clone()),
            inputs,
            audited,
            sample_requests: SampleRequests::default(),
            device_users: DeviceUsers::default(),
            agent_start: agent_start_ticks(),
            pods: PodAttestations::default(),
            consecutive: ConsecutiveFindings::default(),
            withheld: WithheldMemory::default(),
            overheads: Overheads::default(),
            managed_gpus: BTreeSet::new(),
            last_answers: BTreeMap::new(),
            enforcement_events: EnforcementEvents::default(),
            denials: DenialEvents::default(),
            usage: NamespaceUsage::new(quantum, persisted.unwrap_or_default()),
            usage_file,
        };
        Ok((auditor, status))
    }

    /// Audits until `stop`.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut ticker = interval(AUDIT_INTERVAL);
        ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while stop.run_until_cancelled(ticker.tick()).await.is_some() {
            if stop.run_until_cancelled(self.audit()).await.is_none() {
                return;
            }
        }
    }

    async fn audit(&mut self) {
        let readings = self.read().await;
        let Readings {
            started_at,
            gpus,
            containers,
            attested,
            usage,
            samples,
            known,
            ..
        } = &readings;
        let started_at = *started_at;
        let result = compare_accounts(samples, usage, known, &self.inputs.config.audit);
        self.charge_untracked(usage, samples, &result);
        for ((allocation, gpu), overhead) in self.overheads.observe(usage, &result) {
            self.inputs
                .sessions
                .set_overhead(&allocation, &gpu, overhead);
        }
        let managed_gpus = self.publish_evictable(&result);
        self.update_withheld(samples, &result, gpus);
        let stale = self.stale_gpus(gpus, samples, started_at);
        self.act_on_findings(&result.findings, &readings.silent_gpus(), containers);
        let not_enforced = self.publish_transitions(containers, attested);
        self.count_usage(containers, usage, started_at);
        let named = containers
            .iter()
            .filter(|container| events::has_pod_name(container));
        let named = named.map(|container| container.allocation).collect();
        for (allocation, message) in self.denials.due(usage, &named, started_at) {
            events::publish_denials(&self.inputs.events, message, allocation, containers);
        }
        let status = AuditStatus {
            has_run: true,
            stale_gpus: stale.intersection(&readings.healthy).cloned().collect(),
            hanging_pods: readings.hanging.clone(),
            leftovers: self.leftovers.end(
                &self.inputs.config.paths.proc,
                containers,
                &self.inputs.events,
            ),
            not_enforced,
            namespaces: self.usage.report(),
            histories: usage
                .iter()
                .map(|container| (container.allocation, container.history()))
                .collect(),
            late_write: self.usage_file.late_write(),
            managed_gpus,
        };
        let figures = AuditFigures {
            result,
            gpus: readings.gpus,
            stale,
            hanging: readings.hanging,
            ..self.container_figures(readings.containers, readings.usage, &readings.attested)
        };
        self.inputs.metrics.set_audit(figures);
        self.inputs.metrics.observe_audit(started_at.elapsed());
        self.publish(status);
    }

    /// Passes on how much managed memory of each GPU the driver moves away for device memory.
    /// Returns the GPUs that have some.
    fn publish_evictable(&self, result: &AuditResult) -> BTreeSet<GpuUuid> {
        for (gpu, bytes) in &result.evictable {
            self.inputs.sessions.set_evictable(gpu, *bytes);
        }
        let has_some = result
            .evictable
            .iter()
            .filter(|(_, bytes)| **bytes > Bytes::ZERO);
        has_some.map(|(gpu, _)| gpu.clone()).collect()
    }

    /// Charges the memory of processes without a session to their containers' accounts.
    fn charge_untracked(
        &self,
        usage: &[ContainerUsage],
        samples: &[GpuSample],
        result: &AuditResult,
    ) {
        for container in usage {
            for balance in &container.accounts {
                let Account::Gpu(gpu) = &balance.account else {
                    continue;
                };
                let is_sampled = samples.iter().any(|sample| sample.gpu == *gpu);
                let untracked = result
                    .untracked_memory
                    .get(&(container.allocation, gpu.clone()));
                if is_sampled && (balance.untracked > Bytes::ZERO || untracked.is_some()) {
                    let charged = untracked.cloned().unwrap_or_default();
                    self.inputs.sessions.set_untracked(
                        &container.allocation,
                        &balance.account,
                        charged,
                    );
                }
            }
        }
    }

    /// Publishes each GPU's memory that is in use and charged to no container.
    fn update_withheld(
        &mut self,
        samples: &[GpuSample],
        result: &AuditResult,
        gpus: &BTreeSet<GpuUuid>,
    ) {
        let after = self.withheld.observe(samples, result, gpus);
        self.inputs.withhold.send_if_modified(|before| {
            let changed = *before != after;
            if changed {
                info!(withheld = ?after, "withheld memory changed");
            }
            *before = after;
            changed
        });
    }

    fn stale_gpus(
        &mut self,
        gpus: &BTreeSet<GpuUuid>,
        samples: &[GpuSample],
        now: Instant,
    ) -> BTreeSet<GpuUuid> {
        self.last_answers.retain(|gpu, _| gpus.contains(gpu));
        for gpu in gpus {
            let answered = self.last_answers.entry(gpu.clone()).or_insert(now);
            if samples.iter().any(|sample| sample.gpu == *gpu) {
                *answered = now;
            }
        }
        let old = self
            .last_answers
            .iter()
            .filter(|(_, at)| now.duration_since(**at) >= STALE_AFTER);
        old.map(|(gpu, _)| gpu.clone()).collect()
    }

    /// The figures of containers for the metrics.
    fn container_figures(
        &self,
        containers: Arc<[BoundContainer]>,
        usage: Vec<ContainerUsage>,
        attested: &[AttestedContainer],
    ) -> AuditFigures {
        let mut gaps: BTreeMap<AllocationId, Option<GapReason>> = BTreeMap::new();
        for attested in attested {
            let gap = attested.gap.as_ref().map(|gap| gap.reason);
            // A container that is restarting has two cgroups for a moment.
            let most = gaps.entry(attested.allocation).or_insert(gap);
            *most = gap.max(*most);
        }
        let usage = usage.into_iter().map(|usage| (usage.allocation, usage));
        let usage: BTreeMap<_, _> = usage.collect();
        let limits = self.inputs.limits.borrow();
        let limited = containers.iter().filter(|container| {
            let usage = usage.get(&container.allocation);
            usage.is_some_and(|usage| driver_limits::is_limited(&limits, container, usage))
        });
        AuditFigures {
            limited: limited.map(|container| container.allocation).collect(),
            attested: gaps,
            containers: Arc::clone(&containers),
            usage,
            ..AuditFigures::default()
        }
    }

    fn act_on_findings(
        &mut self,
        findings: &[Finding],
        silent: &BTreeSet<GpuUuid>,
        containers: &[BoundContainer],
    ) {
        let strikes = self.consecutive.count(findings, silent);
        for (finding, strikes) in findings.iter().zip(strikes) {
            let action = action(finding, strikes, &self.inputs.config.audit, |pod| {
                self.may_end(pod)
            });
            if action.publish_event {
                warn!(?finding, "audit finding");
                self.inputs.metrics.count_finding(finding);
                events::publish_finding(&self.inputs.events, finding, containers);
            }
            for process in action.kill {
                match kill(&self.inputs.config.paths.proc, process) {
                    Ok(true) => {
                        warn!(
                            pid = process.pid,
                            kind = finding.kind(),
                            "killed a process for a finding"
                        );
                        self.inputs.metrics.count_kill();
                        events::publish_kill(&self.inputs.events, finding, containers);
                    }
                    Ok(false) => {}
                    Err(error) => warn!(pid = process.pid, %error, "failed to kill a process"),
                }
            }
        }
    }

    /// Whether the agent may end a process of a pod without GPU memory. It spares a pod whose
    /// namespace it does not know.
    fn may_end(&self, pod: &PodUid) -> bool {
        let namespace = namespace_of(&self.inputs.config.paths.proc.join("1/root"), pod);
        namespace.is_some_and(|namespace| {
            !self
                .inputs
                .config
                .audit
                .exempt_namespaces
                .contains(&namespace)
        })
    }

    fn count_usage(
        &mut self,
        containers: &[BoundContainer],
        usage: &[ContainerUsage],
        now: Instant,
    ) {
        let before = self.usage.persisted().clone();
        self.usage.observe(containers, usage, now);
        if *self.usage.persisted() != before {
            // Only counts are lost if the file cannot be written.
            self.usage_file.write(self.usage.persisted().clone());
        }
    }

    fn publish(&self, status: AuditStatus) {
        self.audited.send_if_modified(|before| {
            let changed = *before != status;
            *before = status;
            changed
        });
    }

    /// Publishes containers that left or entered the enforcement; returns those that are outside.
    fn publish_transitions(
        &mut self,
        containers: &[BoundContainer],
        attested: &[AttestedContainer],
    ) -> Vec<(BoundContainer, EnforcementGap)> {
        let mut gaps: BTreeMap<AllocationId, Option<&EnforcementGap>> = BTreeMap::new();
        for attested in attested {
            let gap = gaps.entry(attested.allocation).or_default();
            *gap = gap.or(attested.gap.as_ref());
        }
        self.enforcement_events.retain(&gaps);
        let mut not_enforced = Vec::new();
        for container in containers {
            let Some(gap) = gaps.get(&container.allocation) else {
                continue;
            };
            let reason = gap.map(|gap| gap.reason);
            if self.enforcement_events.is_due(container, reason) {
                info!(pod = %container.pod, gap = gap.map(ToString::to_string), "enforcement changed");
                events::publish_enforcement(&self.inputs.events, container, *gap);
            }
            if let Some(gap) = gap {
                not_enforced.push((container.clone(), (*gap).clone()));
            }
        }
        not_enforced
    }
}

/// Zero where the start time is unknown: then no process counts as older.
fn agent_start_ticks() -> u64 {
    Stat::read(Path::new("/proc"), std::process::id()).map_or(0, |stat| stat.start_ticks)
}
