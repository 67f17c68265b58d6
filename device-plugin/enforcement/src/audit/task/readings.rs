//! Reads what one audit compares, in the order that the comparison requires.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bursar_ledger::units::{GpuUuid, PodUid};
use bursar_node::allocator::BoundContainer;
use bursar_sessions::ContainerUsage;
use tokio::time::Instant;

use super::super::collect::{identify, is_running};
use super::super::compare::{AttestedState, GpuSample, update_managed_gpus};
use super::{Auditor, NVML_TIMEOUT, STALE_AFTER};
use crate::attestation::AttestedContainer;

/// The figures that an audit has read of the node.
pub(super) struct Readings {
    pub(super) started_at: Instant,
    pub(super) gpus: BTreeSet<GpuUuid>,
    pub(super) healthy: BTreeSet<GpuUuid>,
    pub(super) containers: Arc<[BoundContainer]>,
    pub(super) attested: Vec<AttestedContainer>,
    /// The pods whose probe has not ended for a while.
    pub(super) hanging: BTreeSet<PodUid>,
    pub(super) usage: Vec<ContainerUsage>,
    pub(super) samples: Vec<GpuSample>,
    pub(super) known: AttestedState,
}

impl Readings {
    /// The GPUs without a usable answer of NVML.
    pub(super) fn silent_gpus(&self) -> BTreeSet<GpuUuid> {
        let answered = |gpu: &GpuUuid| self.samples.iter().any(|sample| sample.gpu == *gpu);
        self.gpus
            .iter()
            .filter(|gpu| !answered(gpu))
            .cloned()
            .collect()
    }
}

impl Auditor {
    /// Reads the driver's figures, the containers' processes and the accounts, in the order that
    /// [`compare`](super::super::compare) requires.
    pub(super) async fn read(&mut self) -> Readings {
        let started_at = Instant::now();
        let (gpus, healthy, containers) = self.audited_parts();
        let exited = self.inputs.sessions.exited_pids();
        let nvml = self.inputs.nvml.clone();
        let answers = self
            .sample_requests
            .collect(
                &gpus,
                |gpu| nvml.request_sample(gpu),
                started_at + NVML_TIMEOUT,
            )
            .await;
        self.pods.attest(&self.inputs.config, &containers).await;
        let attested = self.pods.attested();
        let hanging = self.pods.without_answer_for(STALE_AFTER, started_at);
        let usage = self.inputs.sessions.container_usage();
        let config = &self.inputs.config;
        let proc = &config.paths.proc;
        let mut samples = Vec::new();
        for (gpu, answer) in answers {
            let listings = self.sample_requests.listings.entry(gpu.clone());
            let (allowed, listings) = (&config.audit.host_programs, listings.or_default());
            samples.push(identify(gpu, answer, proc, allowed, listings));
        }
        self.add_unreclaimed(&mut samples);
        let mut known = attested_state(&attested, exited, self.agent_start);
        // Checked after the accounts were read: attested processes may have ended with their
        // sessions.
        known
            .processes
            .retain(|pid, (_, process)| is_running(proc, *pid, process.start));
        let users = self.device_users.find(proc, &samples, &known.processes);
        known.device_users = users.await;
        update_managed_gpus(&mut self.managed_gpus, &samples, &usage, &known);
        known.managed_gpus = self.managed_gpus.clone();
        Readings {
            started_at,
            gpus,
            healthy,
            containers,
            attested,
            hanging,
            usage,
            samples,
            known,
        }
    }

    /// The node's GPUs, those of them that are healthy, and the containers with device memory.
    fn audited_parts(&self) -> (BTreeSet<GpuUuid>, BTreeSet<GpuUuid>, Arc<[BoundContainer]>) {
        let snapshot = self.inputs.snapshots.borrow();
        let states = || snapshot.inventory.gpus().iter();
        let gpus = states().map(|state| state.gpu.uuid.clone()).collect();
        let healthy = states().filter(|state| state.health.is_healthy());
        let healthy = healthy.map(|state| state.gpu.uuid.clone()).collect();
        (gpus, healthy, snapshot.containers.clone())
    }

    /// Adds the bytes of ended pods and of leases without an owner to the samples. The agent reads
    /// these after the accounts, so that memory of an ending pod is in one of both.
    fn add_unreclaimed(&self, samples: &mut [GpuSample]) {
        for gpu in &self.inputs.snapshots.borrow().view.gpus {
            let sampled = samples.iter_mut().find(|sample| sample.gpu == gpu.uuid);
            sampled.into_iter().for_each(|sample| {
                sample.unreclaimed_or_retained = gpu.unreclaimed + gpu.orphaned_leases;
            });
        }
    }
}

fn attested_state(
    attested: &[AttestedContainer],
    exited: BTreeSet<u32>,
    since: u64,
) -> AttestedState {
    let named = |attested: &AttestedContainer| {
        let name = (attested.pod.clone(), attested.cgroup.clone());
        (name, attested.allocation)
    };
    let processes = attested.iter().flat_map(|attested| {
        let processes = attested.processes.iter();
        processes.map(|(pid, running)| (attested.allocation, pid, running))
    });
    AttestedState {
        allocations: attested.iter().map(named).collect(),
        processes: processes
            .map(|(of, pid, running)| (*pid, (of, running.clone())))
            .collect(),
        exited_pids: exited,
        managed_gpus: BTreeSet::new(),
        device_users: BTreeMap::new(),
        agent_start: since,
    }
}
