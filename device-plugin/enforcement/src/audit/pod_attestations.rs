//! Probes the containers of each pod, and leaves out a pod whose probe hangs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bursar_config::Config;
use bursar_ledger::units::PodUid;
use bursar_node::allocator::BoundContainer;
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, timeout_at};
use tracing::warn;

use super::probe_queue::ProbeQueue;
use crate::attestation::{AttestationTarget, AttestedContainer, HostView, PodAttestor};

/// The deadline of the attestation.
const ATTESTATION_TIMEOUT: Duration = Duration::from_millis(400);

/// The attestations of all pods with GPU memory.
#[derive(Default)]
pub(super) struct PodAttestations {
    pods: BTreeMap<PodUid, PodAttestation>,
    /// A read of the host's state that has not ended.
    host_view: Option<JoinHandle<HostView>>,
}

impl PodAttestations {
    /// Probes all pods. A pod whose probe takes too long keeps its last result until the probe
    /// ends.
    pub(super) async fn attest(&mut self, config: &Config, containers: &[BoundContainer]) {
        let deadline = Instant::now() + ATTESTATION_TIMEOUT;
        let mut reading = self.host_view.take().unwrap_or_else(|| {
            let (paths, driver) = (config.paths.clone(), config.driver.clone());
            spawn_blocking(move || HostView::read(&paths, &driver))
        });
        let host = match timeout_at(deadline, &mut reading).await {
            Ok(Ok(host)) => Arc::new(host),
            Ok(Err(error)) => return warn!(%error, "failed to attest containers"),
            Err(_) => {
                self.host_view = Some(reading);
                return;
            }
        };
        let mut before = std::mem::take(&mut self.pods);
        let mut probes = Vec::new();
        for target in targets(containers) {
            let uid = target.pod.clone();
            let mut pod = before.remove(&uid).unwrap_or_default();
            probes.extend(pod.prepare(config, target, &host));
            self.pods.insert(uid, pod);
        }
        // A pod that no thread came to in the last audit comes first in this one.
        probes.sort_by_key(|(answered_at, _)| *answered_at);
        let queue = ProbeQueue::new(probes.into_iter().map(|(_, probe)| probe));
        for probe in queue.run_until(deadline, Probe::run).await {
            if let Some(pod) = self.pods.get_mut(&probe.target.pod) {
                pod.state = AttestorState::Idle(probe.attestor);
            }
        }
        for pod in self.pods.values_mut() {
            pod.collect(deadline).await;
        }
    }

    /// The containers of all pods, as their last probes saw them.
    pub(super) fn attested(&self) -> Vec<AttestedContainer> {
        let attested = self.pods.values().flat_map(|pod| &pod.attested);
        attested.cloned().collect()
    }

    /// The pods whose last probe ended this long before `now`, or longer.
    pub(super) fn without_answer_for(&self, time: Duration, now: Instant) -> BTreeSet<PodUid> {
        let hangs = |pod: &PodAttestation| now.duration_since(pod.answered_at) >= time;
        let hanging = self.pods.iter().filter(|(_, pod)| hangs(pod));
        hanging.map(|(uid, _)| uid.clone()).collect()
    }
}

/// A probe of one pod, which returns the attestor with its result.
struct Probe {
    target: AttestationTarget,
    attestor: Box<PodAttestor>,
    host: Arc<HostView>,
    result: oneshot::Sender<ProbeResult>,
}

type ProbeResult = (Box<PodAttestor>, Vec<AttestedContainer>);

/// The attestor of a pod, which a probe owns from its queue to its end.
enum AttestorState {
    Idle(Box<PodAttestor>),
    Probing(oneshot::Receiver<ProbeResult>),
    /// A probe panicked and lost its cache.
    Lost,
}

/// A pod's attestation. A process may hang in the kernel, and a probe that reads it hangs too.
struct PodAttestation {
    state: AttestorState,
    /// The result of the last probe that ended.
    attested: Vec<AttestedContainer>,
    /// The time of that result; before the first result, of the pod's first sight.
    answered_at: Instant,
}

impl Probe {
    fn run(mut self) {
        let attested = self.attestor.probe(&self.target, &self.host);
        // The auditor has dropped the receiver if the pod has ended.
        let _ = self.result.send((self.attestor, attested));
    }
}

impl Default for PodAttestation {
    fn default() -> Self {
        Self {
            state: AttestorState::Lost,
            attested: Vec::new(),
            answered_at: Instant::now(),
        }
    }
}

impl PodAttestation {
    /// Returns the next probe with the time of the last answer; none while a probe hangs.
    fn prepare(
        &mut self,
        config: &Config,
        target: AttestationTarget,
        host: &Arc<HostView>,
    ) -> Option<(Instant, Probe)> {
        let (result, probing) = oneshot::channel();
        let attestor = match std::mem::replace(&mut self.state, AttestorState::Probing(probing)) {
            AttestorState::Idle(attestor) => attestor,
            AttestorState::Lost => Box::new(PodAttestor::new(config)),
            hanging @ AttestorState::Probing(_) => {
                self.state = hanging;
                return None;
            }
        };
        let probe = Probe {
            target,
            attestor,
            host: Arc::clone(host),
            result,
        };
        Some((self.answered_at, probe))
    }

    /// Takes the result of a probe that ends before `deadline`.
    async fn collect(&mut self, deadline: Instant) {
        let AttestorState::Probing(probing) = &mut self.state else {
            return;
        };
        match timeout_at(deadline, probing).await {
            Ok(Ok((attestor, attested))) => {
                self.state = AttestorState::Idle(attestor);
                self.attested = attested;
                self.answered_at = Instant::now();
            }
            Ok(Err(_)) => {
                warn!("failed to attest a pod's containers: its probe panicked");
                self.state = AttestorState::Lost;
            }
            Err(_) => {}
        }
    }
}

fn targets(containers: &[BoundContainer]) -> Vec<AttestationTarget> {
    let mut targets: BTreeMap<PodUid, AttestationTarget> = BTreeMap::new();
    for container in containers {
        let Some(cgroup) = container.cgroup.clone() else {
            continue;
        };
        let pod = container.pod.clone();
        let target = targets
            .entry(pod.clone())
            .or_insert_with(|| AttestationTarget {
                pod,
                cgroup,
                allocations: BTreeSet::new(),
            });
        target.allocations.insert(container.allocation);
    }
    targets.into_values().collect()
}
