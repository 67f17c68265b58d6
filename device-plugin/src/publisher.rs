//! Publishes status, events, metrics and readiness from the node's snapshots.

use std::time::Duration;

use bursar_apiserver::Events;
use bursar_compute::task::ComputeStatus;
use bursar_config::ResourcesConfig;
use bursar_crds::conditions::{ConditionUpdate, gpu_node as names};
use bursar_crds::gpu_node::Fault;
use bursar_enforcement::audit::AuditStatus;
use bursar_enforcement::driver_limits::Limits;
use bursar_gpu_node::NodeReport;
use bursar_gpu_node::node_report::{ReportInputs, late_write, node_report, transition_events};
use bursar_gpu_node::quota_overrides::AppliedSpec;
use bursar_kubelet::lifecycle::Registration;
use bursar_node::actor::Snapshot;
use bursar_node::other_plugins::GpuOwners;
use bursar_retained::status::RetainedStatus;
use bursar_retained::tokens::NodePublicKey;
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::container_runtime;
use crate::http::Verdict;
use crate::metrics::Metrics;

/// The interval at which the agent reads the container runtime's version from the Node object.
const RUNTIME_INTERVAL: Duration = Duration::from_secs(300);
/// The interval after a failed read.
const RUNTIME_RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// The channels from which the agent computes its report.
pub(crate) struct StatusPublisher {
    pub(crate) config: ResourcesConfig,
    pub(crate) unknown_keys: Vec<String>,
    pub(crate) boot_id: String,
    pub(crate) snapshots: watch::Receiver<Snapshot>,
    pub(crate) registration: watch::Receiver<Registration>,
    pub(crate) audited: watch::Receiver<AuditStatus>,
    pub(crate) limits: watch::Receiver<Limits>,
    pub(crate) computed: watch::Receiver<ComputeStatus>,
    pub(crate) ordered: watch::Receiver<AppliedSpec>,
    pub(crate) faults: watch::Receiver<Vec<Fault>>,
    pub(crate) retained: watch::Receiver<RetainedStatus>,
    pub(crate) owners: watch::Receiver<GpuOwners>,
    pub(crate) token_key: NodePublicKey,
    pub(crate) node: String,
    pub(crate) client: Option<Client>,
    pub(crate) events: Events,
    pub(crate) metrics: Metrics,
}

impl StatusPublisher {
    /// The task to spawn, with the channels for reports and readiness that the task fills.
    pub(crate) fn start(
        self,
        stop: CancellationToken,
    ) -> (
        impl Future<Output = ()> + Send,
        watch::Receiver<NodeReport>,
        watch::Receiver<Verdict>,
    ) {
        let first = node_report(&self.snapshots.borrow(), &self.inputs(None));
        let (readiness, ready) = watch::channel(readiness(&first));
        let (reports, reported) = watch::channel(first);
        (self.run(reports, readiness, stop), reported, ready)
    }

    async fn run(
        mut self,
        reports: watch::Sender<NodeReport>,
        ready: watch::Sender<Verdict>,
        stop: CancellationToken,
    ) {
        let mut runtime = None;
        let mut is_published = false;
        let mut runtime_check = Box::pin(self.check_container_runtime(Duration::ZERO));
        loop {
            let inputs = self.inputs(runtime.clone());
            let after = node_report(&self.snapshots.borrow_and_update(), &inputs);
            self.publish(&after, is_published.then(|| reports.borrow()).as_deref());
            is_published = true;
            ready.send_replace(readiness(&after));
            reports.send_if_modified(|before| {
                let changed = *before != after;
                *before = after;
                changed
            });
            tokio::select! {
                changed = self.snapshots.changed() => if changed.is_err() {
                    break;
                },
                Ok(()) = self.registration.changed() => drop(self.registration.borrow_and_update()),
                Ok(()) = self.audited.changed() => drop(self.audited.borrow_and_update()),
                Ok(()) = self.limits.changed() => drop(self.limits.borrow_and_update()),
                Ok(()) = self.computed.changed() => drop(self.computed.borrow_and_update()),
                Ok(()) = self.ordered.changed() => drop(self.ordered.borrow_and_update()),
                Ok(()) = self.faults.changed() => drop(self.faults.borrow_and_update()),
                Ok(()) = self.retained.changed() => drop(self.retained.borrow_and_update()),
                Ok(()) = self.owners.changed() => drop(self.owners.borrow_and_update()),
                (problem, pause) = &mut runtime_check => {
                    runtime = problem;
                    runtime_check = Box::pin(self.check_container_runtime(pause));
                }
                () = stop.cancelled() => break,
            }
        }
        stop.cancelled().await;
    }

    fn inputs(&self, runtime: Option<String>) -> ReportInputs {
        ReportInputs {
            config: self.config,
            unknown_keys: self.unknown_keys.clone(),
            boot_id: self.boot_id.clone(),
            registration: self.registration.borrow().clone(),
            runtime_problem: runtime,
            audited: self.audited.borrow().clone(),
            limits: self.limits.borrow().clone(),
            computed: self.computed.borrow().clone(),
            overrides: self.ordered.borrow().clone(),
            faults: self.faults.borrow().clone(),
            retained: self.retained.borrow().clone(),
            owners: self.owners.borrow().clone(),
            token_key: self.token_key,
        }
    }

    fn publish(&self, after: &NodeReport, before: Option<&NodeReport>) {
        self.metrics.set_report(after);
        self.metrics.set_retained(&self.retained.borrow());
        let lag = late_write(&self.snapshots.borrow(), &self.audited.borrow()).map(|late| late.lag);
        self.metrics.set_state_write_lag(lag.unwrap_or_default());
        for (resource, counts) in self.snapshots.borrow().counts {
            self.metrics.node.set_counts(resource, counts);
        }
        for (reason, message) in transition_events(before, after) {
            self.events.on_node(reason, message);
        }
    }

    /// Waits for `pause`, then reads the container runtime's version.
    ///
    /// Returns the reason why the runtime ignores CDI devices, and the pause before the next read.
    fn check_container_runtime(
        &self,
        pause: Duration,
    ) -> impl Future<Output = (Option<String>, Duration)> + Send + 'static {
        let (client, node) = (self.client.clone(), self.node.clone());
        async move {
            let Some(client) = client else {
                return std::future::pending().await;
            };
            tokio::time::sleep(pause).await;
            match Api::<Node>::all(client).get(&node).await {
                Ok(node) => {
                    let info = node.status.and_then(|status| status.node_info);
                    let version = info
                        .map(|info| info.container_runtime_version)
                        .unwrap_or_default();
                    (
                        container_runtime::missing_cdi_support(&version),
                        RUNTIME_INTERVAL,
                    )
                }
                Err(error) => {
                    debug!(%error, "failed to read the container runtime's version");
                    (None, RUNTIME_RETRY_INTERVAL)
                }
            }
        }
    }
}

/// Decides readiness from the agent's own work, not from the hardware.
///
/// Conditions report unhealthy GPUs, an old container runtime and failing pods. None of these may
/// hold up a rollout of the DaemonSet.
///
/// The agent is not ready before the first inventory and the first audit. Unregistered devices, an
/// unwritable checkpoint and an unwritable CDI directory make the agent unready too.
fn readiness(report: &NodeReport) -> Verdict {
    let is_work = |condition: &&ConditionUpdate| match condition.type_ {
        names::GPUS_FOUND | names::AUDITED => condition.holds.is_none(),
        // A node without a GPU has nothing to register.
        names::REGISTERED => condition.is_problem() && !report.status.gpus.is_empty(),
        names::CDI_READY => condition.reason == names::CDI_FOLDER,
        names::CHECKPOINT_INTACT => condition.reason == names::CHECKPOINT_UNWRITABLE,
        _ => false,
    };
    match report.conditions.iter().find(is_work) {
        None => Verdict::Well,
        Some(problem) => Verdict::Unwell(format!("{}: {}", problem.type_, problem.message)),
    }
}

#[cfg(test)]
mod tests {
    use bursar_gpu_node::fixtures::report;

    use bursar_crds::conditions::gpu_node::PENDING;

    use super::*;

    /// The readiness of a node with these conditions, with GPUs or without.
    fn verdict_of(
        gpus: bool,
        conditions: &[(&'static str, Option<bool>, &'static str)],
    ) -> Verdict {
        let conditions = conditions
            .iter()
            .map(|&(type_, holds, reason)| ConditionUpdate {
                type_,
                holds,
                reason,
                message: "why".into(),
            });
        let mut report = NodeReport {
            conditions: conditions.collect(),
            ..report()
        };
        assert!(!report.status.gpus.is_empty());
        if !gpus {
            report.status.gpus.clear();
        }
        readiness(&report)
    }

    #[test]
    fn agent_is_ready_whatever_the_state_of_the_hardware() {
        for (type_, reason) in [
            (names::GPUS_FOUND, names::NO_HEALTHY_GPU),
            (names::GPUS_FOUND, names::DRIVER_FAILED),
            (names::GPUS_FOUND, names::NO_GPUS),
            (names::AUDITED, names::AUDIT_STALE),
            (names::CDI_READY, names::CDI_UNSUPPORTED),
            (names::CHECKPOINT_INTACT, names::CHECKPOINT_REBUILT),
            (names::RETAINED_MEMORY, names::FD_STORE_UNAVAILABLE),
        ] {
            let condition = (type_, Some(false), reason);
            assert_eq!(verdict_of(true, &[condition]), Verdict::Well, "{reason}");
        }
    }

    #[test]
    fn agent_is_not_ready_while_it_cannot_serve() {
        for (type_, holds, reason) in [
            (names::GPUS_FOUND, None, PENDING),
            (names::AUDITED, None, PENDING),
            (names::REGISTERED, None, PENDING),
            (names::REGISTERED, Some(false), names::KUBELET_UNREACHABLE),
            (names::CDI_READY, Some(false), names::CDI_FOLDER),
            (
                names::CHECKPOINT_INTACT,
                Some(false),
                names::CHECKPOINT_UNWRITABLE,
            ),
        ] {
            let well = (names::WITHIN_DEVICE_ID_LIMIT, Some(true), names::OK);
            let verdict = verdict_of(true, &[well, (type_, holds, reason)]);
            assert_eq!(
                verdict,
                Verdict::Unwell(format!("{type_}: why")),
                "{reason}"
            );
        }
    }

    #[test]
    fn agent_is_ready_unregistered_on_a_node_without_gpu() {
        let unregistered = (names::REGISTERED, None, PENDING);
        let none = (names::GPUS_FOUND, Some(false), names::DRIVER_MISSING);
        assert_eq!(verdict_of(false, &[none, unregistered]), Verdict::Well);
        assert_ne!(verdict_of(true, &[none, unregistered]), Verdict::Well);
    }
}
