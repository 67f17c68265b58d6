//! Keeps the outside told: status, events, metrics and readiness, from what the node shows.

use std::time::Duration;

use bursar_crds::conditions::gpu_node as names;
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::audit::Audited;
use crate::config::ResourcesConfig;
use crate::http::Verdict;
use crate::kept::status::KeptStatus;
use crate::kubelet::lifecycle::Registration;
use crate::limits::Limits;
use crate::metrics::Metrics;
use crate::node::actor::Snapshot;
use crate::node::report::{Around, events, report};
use crate::resize::Ordered;
use crate::runtime;
use crate::status::{Events, FaultReport, NodeReport};

/// How often the Node is asked for its container runtime, which changes when the node is updated.
const RUNTIME: Duration = Duration::from_secs(300);
/// How soon it is asked again after no answer.
const RUNTIME_RETRY: Duration = Duration::from_secs(10);

/// What it tells from.
pub(super) struct Reporter {
    pub(super) config: ResourcesConfig,
    pub(super) boot: String,
    pub(super) snapshots: watch::Receiver<Snapshot>,
    pub(super) registration: watch::Receiver<Registration>,
    pub(super) audited: watch::Receiver<Audited>,
    pub(super) limits: watch::Receiver<Limits>,
    pub(super) ordered: watch::Receiver<Ordered>,
    pub(super) faults: watch::Receiver<Vec<FaultReport>>,
    pub(super) kept: watch::Receiver<KeptStatus>,
    pub(super) node: String,
    pub(super) client: Option<Client>,
    pub(super) events: Events,
    pub(super) metrics: Metrics,
}

impl Reporter {
    /// The part to run, with the reports and the readiness that it keeps.
    pub(super) fn start(
        self,
        stop: CancellationToken,
    ) -> (
        impl Future<Output = ()> + Send,
        watch::Receiver<NodeReport>,
        watch::Receiver<Verdict>,
    ) {
        let first = report(&self.snapshots.borrow(), &self.around(None));
        let (readiness, ready) = watch::channel(verdict(&first));
        let (reports, reported) = watch::channel(first);
        (self.run(reports, readiness, stop), reported, ready)
    }

    async fn run(
        mut self,
        reports: watch::Sender<NodeReport>,
        readiness: watch::Sender<Verdict>,
        stop: CancellationToken,
    ) {
        let mut runtime = None;
        let mut told = false;
        let mut ask = Box::pin(self.runtime(Duration::ZERO));
        loop {
            let around = self.around(runtime.clone());
            let after = report(&self.snapshots.borrow_and_update(), &around);
            self.tell(&after, told.then(|| reports.borrow()).as_deref());
            told = true;
            readiness.send_replace(verdict(&after));
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
                Ok(()) = self.ordered.changed() => drop(self.ordered.borrow_and_update()),
                Ok(()) = self.faults.changed() => drop(self.faults.borrow_and_update()),
                Ok(()) = self.kept.changed() => drop(self.kept.borrow_and_update()),
                (answer, again) = &mut ask => {
                    runtime = answer;
                    ask = Box::pin(self.runtime(again));
                }
                () = stop.cancelled() => break,
            }
        }
        stop.cancelled().await;
    }

    fn around(&self, runtime: Option<String>) -> Around {
        Around {
            config: self.config,
            boot: self.boot.clone(),
            registration: self.registration.borrow().clone(),
            runtime,
            audited: self.audited.borrow().clone(),
            limits: self.limits.borrow().clone(),
            ordered: self.ordered.borrow().clone(),
            faults: self.faults.borrow().clone(),
            kept: self.kept.borrow().clone(),
        }
    }

    fn tell(&self, after: &NodeReport, before: Option<&NodeReport>) {
        self.metrics.set_report(after);
        self.metrics.set_kept(&self.kept.borrow().kept);
        for (resource, counts) in self.snapshots.borrow().counts {
            self.metrics.set_counts(resource, counts);
        }
        for (reason, message) in events(before, after) {
            self.events.on_node(reason, message);
        }
    }

    /// After `pause`: why the runtime ignores CDI devices, and when to ask again.
    fn runtime(
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
                    (runtime::without_cdi(&version), RUNTIME)
                }
                Err(error) => {
                    debug!(%error, "container runtime not known");
                    (None, RUNTIME_RETRY)
                }
            }
        }
    }
}

/// Ready to give pods memory: every condition holds. A node that has no GPU, or no driver yet, has
/// nothing to give and is ready for that: it must not hold up the DaemonSet's rollout.
fn verdict(report: &NodeReport) -> Verdict {
    let nothing_to_give = report
        .conditions
        .iter()
        .any(|condition| matches!(condition.reason, names::NO_GPUS | names::DRIVER_MISSING));
    let amiss = report.conditions.iter().find(|condition| {
        let idle = matches!(condition.type_, names::GPUS_FOUND | names::REGISTERED);
        condition.is_amiss() && !(nothing_to_give && idle)
    });
    match amiss {
        None => Verdict::Well,
        Some(amiss) => Verdict::Unwell(format!("{}: {}", amiss.type_, amiss.message)),
    }
}

#[cfg(test)]
mod tests {
    use bursar_crds::conditions::Statement;

    use super::*;
    use crate::status::testing::report;

    fn verdict_of(said: &[(&'static str, bool, &'static str)]) -> Verdict {
        let conditions = said
            .iter()
            .map(|&(type_, holds, reason)| Statement::new(type_, holds, reason, "why"))
            .collect();
        verdict(&NodeReport {
            conditions,
            ..report()
        })
    }

    #[test]
    fn a_node_is_ready_when_every_condition_holds() {
        let well = (names::GPUS_FOUND, true, names::OK);
        assert_eq!(verdict_of(&[well]), Verdict::Well);
        let amiss = (names::CDI_READY, false, names::CDI_FOLDER);
        let said = verdict_of(&[well, amiss]);
        assert_eq!(said, Verdict::Unwell("CdiReady: why".into()));
    }

    #[test]
    fn a_node_without_gpus_is_ready_unless_something_else_is_amiss() {
        let unregistered = (names::REGISTERED, false, names::KUBELET_UNREACHABLE);
        for reason in [names::NO_GPUS, names::DRIVER_MISSING] {
            let none = (names::GPUS_FOUND, false, reason);
            assert_eq!(verdict_of(&[none, unregistered]), Verdict::Well);
            let amiss = (names::CDI_READY, false, names::CDI_FOLDER);
            assert_ne!(verdict_of(&[none, amiss]), Verdict::Well);
        }
        let failed = (names::GPUS_FOUND, false, names::DRIVER_FAILED);
        assert_ne!(verdict_of(&[failed]), Verdict::Well);
        assert_ne!(verdict_of(&[unregistered]), Verdict::Well);
    }
}
