//! Carries out the ledger's decisions on the host in an order that a crash at any point survives.
//!
//! The order of the steps for each event, and the state that a crash between two steps leaves:
//!
//! - **Allocate**: the ledger records a pending allocation; the agent saves the checkpoint and
//!   answers. A crash may leave an allocation that the kubelet does not know. The agent collects it
//!   later.
//! - **PreStartContainer**: the ledger binds, and the agent saves the checkpoint. The agent tears
//!   down containers that the binding ended, serves the session socket, writes the CDI file and
//!   answers. A crash leaves a binding in the checkpoint. The next agent repeats the remaining
//!   steps, and the kubelet's retry gets the same binding.
//! - **End of a pod**: the ledger releases the bindings, except for memory that other processes may
//!   still map. The agent saves the checkpoint, tears down the pod's files and binds queued claims.
//!   A crash leaves files without a binding. The next agent removes them.
//!
//! A binding is therefore on record before any of its effects is visible. The CDI file is the last
//! step before the answer, for the container cannot start without that file. Every step may be
//! repeated.
//!
//! An Allocate call succeeds even if its record cannot be written. A failed Allocate fails the pod
//! for ever, and the kubelet's own checkpoint has a copy of the answer. A PreStartContainer call
//! whose record cannot be written fails, and the kubelet retries.

mod binding;
mod leases;
mod records;
mod views;

use std::collections::{BTreeMap, BTreeSet};

use bursar_config::ResourcesConfig;
use bursar_crds::gpu_node::Reservation;
use bursar_gpu::GpuState;
use bursar_host::pod_cgroups::{PodCgroup, PodCgroups};
use bursar_kubelet::device_checkpoint::CheckpointEntry;
use bursar_kubelet::plugin::PrepareError;
use bursar_ledger::units::{AllocationId, Bytes, DeviceIdSet, GpuUuid, LeaseId, PodUid, Resource};
use bursar_ledger::{BindOutcome, BindRequest, Binding, BootTime, ClaimId, Ledger, WaitHandle};
use jiff::Timestamp;
use tracing::{info, warn};

use super::capacity;
use super::checkpoint_state::{ContainerName, NodeCheckpoint, PodName};
use super::host::{HostError, HostOps};
use crate::metrics::NodeMetrics;

use records::ResultSender;
pub use records::{
    BoundContainer, BoundMemory, ContainerIdentity, NodeProblems, PrepareRequest, QueuedClaim,
    Reply,
};

/// A PreStartContainer call that waits for room.
#[derive(Debug)]
struct WaitingCall {
    request: BindRequest,
    ticket: WaitHandle,
    deadline: BootTime,
    result: ResultSender,
}

/// The node's ledger with the state of the host.
#[derive(Debug)]
pub struct NodeAllocator<H> {
    pub(super) config: ResourcesConfig,
    pub(super) boot_id: String,
    pub(super) ledger: Ledger,
    pub(super) host: H,
    pub(super) pod_cgroups: PodCgroups,
    pub(super) container_names: BTreeMap<AllocationId, ContainerName>,
    /// The GPUs of the inventory, for their device nodes.
    pub(super) gpus: Vec<GpuState>,
    waiting_calls: BTreeMap<ClaimId, WaitingCall>,
    /// Every claim that waits. A claim outlives the single calls of the kubelet.
    queued_claims: BTreeMap<ClaimId, QueuedClaim>,
    metrics: NodeMetrics,
    /// Ended allocations whose files and sockets are not removed yet.
    pub(super) pending_teardown: BTreeSet<AllocationId>,
    /// Bound allocations that lack their socket or CDI file.
    pub(super) pending_setup: BTreeSet<AllocationId>,
    gpu_generations: BTreeMap<GpuUuid, u64>,
    /// Ended leases that the ledger accounts for and whose record is not written yet.
    unrecorded_leases: Vec<LeaseId>,
    /// Pods of the ledger that had no cgroup at the last collection.
    pods_without_cgroup: BTreeSet<PodUid>,
    /// Whether a lost checkpoint may have listed unreclaimed memory: every GPU has to be proven
    /// free.
    pub(super) reclaim_all_pending: bool,
    /// Whether the state has changed since the last successful save.
    pub(super) checkpoint_dirty: bool,
    /// Whether the state has changed since the last call of [`needs_tick`](Self::needs_tick).
    changed_since_tick: bool,
    pub(super) problems: NodeProblems,
}

impl<H: HostOps> NodeAllocator<H> {
    /// A node without GPUs, pending allocations and bindings.
    pub fn new(
        config: ResourcesConfig,
        boot: String,
        host: H,
        pods: PodCgroups,
        metrics: NodeMetrics,
    ) -> Self {
        let mut ledger = Ledger::new(config.quantum);
        ledger.set_managed_capacity(capacity::managed_capacity(&config));
        Self {
            config,
            boot_id: boot,
            ledger,
            host,
            pod_cgroups: pods,
            container_names: BTreeMap::new(),
            gpus: Vec::new(),
            waiting_calls: BTreeMap::new(),
            queued_claims: BTreeMap::new(),
            metrics,
            pending_teardown: BTreeSet::new(),
            pending_setup: BTreeSet::new(),
            gpu_generations: BTreeMap::new(),
            unrecorded_leases: Vec::new(),
            pods_without_cgroup: BTreeSet::new(),
            reclaim_all_pending: false,
            checkpoint_dirty: false,
            changed_since_tick: true,
            problems: NodeProblems::default(),
        }
    }

    /// Allocate: records a pending allocation under `id`.
    pub fn allocate(
        &mut self,
        id: AllocationId,
        resource: Resource,
        tokens: DeviceIdSet,
        now: BootTime,
    ) {
        self.ledger.add_pending(id, resource, tokens, now);
        self.checkpoint_dirty = true;
        // The kubelet's checkpoint has a copy of the answer, which may be sent without our record.
        let _ = self.save_checkpoint();
    }

    /// PreStartContainer: sends the result at once, when a GPU has room, or at the deadline.
    pub async fn bind(&mut self, bind: PrepareRequest, reply: Reply, now: BootTime) {
        let PrepareRequest {
            resource,
            tokens,
            identity,
            deadline: until,
        } = bind;
        let ContainerIdentity {
            pod,
            pod_name: name,
            container,
            checkpoint_entries: held,
            pod_device_ids: containers,
            gpu_spread: shape,
            priority,
        } = identity;
        for entry in &held {
            self.ledger
                .add_pending(entry.allocation, resource, tokens.clone(), now);
        }
        if let Some(name) = &name {
            self.ledger.set_namespace(&pod, &name.namespace);
        }
        let mut ended = self.end_forgotten_claims(&pod, resource, &held, &containers);
        let start = BindRequest {
            resource,
            device_ids: tokens.clone(),
            containers,
            pod: pod.clone(),
            spread: shape,
            priority,
        };
        let started = match self.ledger.bind(start.clone(), now) {
            Ok(started) => started,
            Err(_) => {
                send_result(
                    reply.result,
                    Err(PrepareError::NotAllocated { resource, tokens }),
                );
                return;
            }
        };
        self.checkpoint_dirty = true;
        self.watch_cgroup(&pod);
        self.record_pod_name(&pod, name, &container, &held);
        let known = self.reconcile_leases(now).await;
        ended.extend(started.ended);
        let exported = self.record_unreclaimed(&ended, known, now);
        self.pending_teardown.extend(ended.iter().copied());
        match started.outcome {
            BindOutcome::Bound(binding) => {
                self.record_wait(binding.claim, now);
                let result = match self.find_drained_gpu(&binding) {
                    Some(gpu) => Err(PrepareError::Drained(gpu)),
                    None => self.commit_binding(&binding).await,
                };
                self.charge_successor(&binding, exported);
                if !ended.is_empty() {
                    // Leases of the ended containers now belong to this container: charge them
                    // before its program runs.
                    self.reconcile_leases(now).await;
                }
                send_result(reply.result, result);
            }
            BindOutcome::Queued(ticket, mut reason) => {
                self.name_pods(&mut reason);
                info!(%pod, %resource, %reason, "waiting");
                let Reply { result, waits } = reply;
                let message = reason.to_string();
                let fits_when_empty = reason.gpus.is_some();
                // The caller may have gone; its call ends with the next tick.
                let _ = waits.send(reason);
                let wait = self.queued_claims.entry(ticket.claim);
                wait.and_modify(|wait| wait.fits_when_empty = fits_when_empty)
                    .or_insert_with(|| QueuedClaim {
                        name: held
                            .iter()
                            .find_map(|entry| self.container_names.get(&entry.allocation).cloned()),
                        pod,
                        resource,
                        quanta: tokens.quanta(),
                        priority,
                        fits_when_empty,
                        since: Timestamp::now(),
                        queued_at: now,
                    });
                let waiter = WaitingCall {
                    request: start,
                    ticket,
                    deadline: until,
                    result,
                };
                if let Some(before) = self.waiting_calls.insert(ticket.claim, waiter) {
                    send_result(before.result, Err(PrepareError::NoRoom(message)));
                }
            }
        }
        self.bind_queued(now).await;
    }

    /// Ends the claims of a container's earlier runs that the kubelet has forgotten. Returns their
    /// allocations.
    ///
    /// A kubelet that has lost its checkpoint gives a restarted container new device ids. `held`
    /// are its entries for the container that starts, `containers` the device ids of all of the
    /// pod's.
    fn end_forgotten_claims(
        &mut self,
        pod: &PodUid,
        resource: Resource,
        held: &[CheckpointEntry],
        containers: &[DeviceIdSet],
    ) -> Vec<AllocationId> {
        let Self {
            ledger,
            container_names,
            ..
        } = self;
        let is_started = |allocation: &AllocationId| {
            let name = container_names.get(allocation).map(|name| &name.container);
            name.is_some_and(|name| held.iter().any(|entry| entry.container == *name))
        };
        let ended = ledger.end_claims(pod, resource, |device_ids, allocations| {
            !containers.contains(device_ids) && allocations.iter().all(is_started)
        });
        for allocation in &ended {
            container_names.remove(allocation);
        }
        ended
    }

    /// Replaces the GPUs by those that NVML lists now.
    pub async fn set_gpus(&mut self, gpus: Vec<GpuState>, now: BootTime) {
        self.ledger
            .set_gpus(capacity::ledger_gpus(&gpus, &self.config));
        if !gpus.is_empty() && std::mem::take(&mut self.reclaim_all_pending) {
            // The lost record may have listed any amount of unreclaimed memory.
            for state in &gpus {
                self.ledger.mark_tenants_unknown(&state.gpu.uuid);
                self.ledger
                    .add_unreclaimed(state.gpu.uuid.clone(), state.gpu.memory, now);
            }
        }
        self.gpus = gpus;
        self.checkpoint_dirty = true;
        self.bind_queued(now).await;
    }

    /// Restricts GPUs of several namespaces to those whose driver was proven to clear freed memory.
    pub async fn set_scrubbed_gpus(&mut self, cleared: BTreeSet<GpuUuid>, now: BootTime) {
        if self.ledger.set_shareable_gpus(cleared) {
            self.bind_queued(now).await;
        }
    }

    /// Applies the operator's reservations.
    pub async fn set_reservations(&mut self, reservations: &[Reservation], now: BootTime) {
        if self
            .ledger
            .set_reservations(capacity::parse_reservations(reservations))
        {
            self.checkpoint_dirty = true;
            self.bind_queued(now).await;
        }
    }

    /// Binds no memory of GPUs that CUDA refused last, until a start succeeds there.
    pub async fn set_refused_gpus(&mut self, refused: BTreeSet<GpuUuid>, now: BootTime) {
        if self.ledger.set_refused_gpus(refused) {
            self.bind_queued(now).await;
        }
    }

    /// Excludes memory that is in use and charged to no container from binding.
    pub async fn set_withheld(&mut self, withheld: BTreeMap<GpuUuid, Bytes>, now: BootTime) {
        if self.ledger.set_withheld(withheld) {
            self.checkpoint_dirty = true;
            self.bind_queued(now).await;
        }
    }

    /// Releases the pods whose cgroup was removed.
    pub(crate) async fn release_ended_pods(&mut self, now: BootTime) {
        for pod in self.pod_cgroups.drain_ended() {
            self.release_pod(&pod, now).await;
        }
    }

    /// Whether a [`tick`](Self::tick) is due at once, because of a change or of pending work.
    ///
    /// A tick visits every container, so an idle node ticks less often.
    pub(crate) fn needs_tick(&mut self) -> bool {
        std::mem::take(&mut self.changed_since_tick)
            || self.checkpoint_dirty
            || !self.queued_claims.is_empty()
            || !self.waiting_calls.is_empty()
            || !self.pending_teardown.is_empty()
            || !self.pending_setup.is_empty()
            || !self.unrecorded_leases.is_empty()
            || !self.ledger.unreclaimed_versions().is_empty()
    }

    /// Performs the work of time: ended pods, expired waits and failed steps.
    pub async fn tick(&mut self, now: BootTime) {
        self.release_ended_pods(now).await;
        self.reclaim_proven();
        self.reconcile_leases(now).await;
        self.expire_waits(now);
        self.ledger.suspend_unclaimed_reservations(now);
        self.bind_queued(now).await;
        self.retry_pending().await;
        self.observe_oldest_wait(now);
        if !self.checkpoint_dirty && !self.unrecorded_leases.is_empty() {
            let leases = std::mem::take(&mut self.unrecorded_leases);
            self.host.confirm_recorded(leases).await;
        }
    }

    /// Records the end of a claim's wait, over all calls of the kubelet. A claim that did not wait
    /// has no record.
    fn record_wait(&mut self, claim: ClaimId, now: BootTime) {
        if let Some(wait) = self.queued_claims.remove(&claim) {
            self.metrics.observe_wait(now.since(wait.queued_at));
        }
    }

    fn observe_oldest_wait(&mut self, now: BootTime) {
        self.queued_claims
            .retain(|claim, _| self.ledger.is_queued(*claim));
        let waits = self.queued_claims.values();
        let oldest = waits.map(|wait| now.since(wait.queued_at)).max();
        self.metrics.set_oldest_wait(oldest.unwrap_or_default());
    }

    pub(crate) fn set_generations(&mut self, generations: BTreeMap<GpuUuid, u64>) {
        self.gpu_generations = generations;
    }

    /// Drops pending allocations that the kubelet's checkpoint lacks, and releases pods without a
    /// cgroup.
    ///
    /// Both require two misses in a row.
    pub(crate) async fn collect_garbage(
        &mut self,
        known: Option<&BTreeSet<AllocationId>>,
        now: BootTime,
    ) {
        if let Some(known) = known {
            let collected = self.ledger.gc_pending(known, now);
            self.metrics.count_collected(collected.len());
            for allocation in collected {
                info!(%allocation, "pending allocation without a pod dropped");
                self.checkpoint_dirty = true;
                self.container_names.remove(&allocation);
                self.pending_teardown.insert(allocation);
            }
        }
        let pods: Vec<PodUid> = self.ledger.pods().into_iter().cloned().collect();
        let missing: BTreeSet<_> = pods
            .into_iter()
            .filter(|pod| self.pod_cgroups.watch(pod) == PodCgroup::Gone)
            .collect();
        for pod in missing.intersection(&std::mem::take(&mut self.pods_without_cgroup)) {
            self.release_pod(pod, now).await;
        }
        self.pods_without_cgroup = missing;
        self.bind_queued(now).await;
    }

    /// The host, for state that the node task observes first.
    pub(crate) fn host_mut(&mut self) -> &mut H {
        &mut self.host
    }

    /// Sets or clears the problem of the CDI directory.
    pub(crate) fn set_cdi_problem(&mut self, trouble: Option<String>) {
        self.problems.cdi = trouble;
    }

    /// Releases a pod whose cgroup was removed.
    pub(super) async fn release_pod(&mut self, pod: &PodUid, now: BootTime) {
        let ended = self.ledger.release_pod(pod);
        if ended.is_empty() {
            return;
        }
        self.metrics.count_release();
        info!(%pod, allocations = ended.len(), "pod released");
        for (_, waiter) in self
            .waiting_calls
            .extract_if(.., |_, waiter| waiter.request.pod == *pod)
        {
            send_result(
                waiter.result,
                Err(PrepareError::Failed("the pod has ended".to_owned())),
            );
        }
        self.checkpoint_dirty = true;
        // The order matters: from here on the ledger accounts for the pod's leases, and not its
        // exports.
        let known = self.reconcile_leases(now).await;
        self.record_unreclaimed(&ended, known, now);
        for allocation in ended {
            self.container_names.remove(&allocation);
            self.pending_setup.remove(&allocation);
            self.pending_teardown.insert(allocation);
        }
        if self.save_checkpoint().is_ok() {
            self.tear_down_ended().await;
        }
    }

    /// Records the memory of ended allocations that other processes may still map as unreclaimed.
    ///
    /// Where the leases are not `known`, their memory is unreclaimed too. Returns the exported
    /// memory.
    fn record_unreclaimed(
        &mut self,
        ended: &[AllocationId],
        known: bool,
        now: BootTime,
    ) -> Vec<(GpuUuid, Bytes)> {
        let mut exported = Vec::new();
        for allocation in ended {
            let mut left = self.host.exported_memory(*allocation);
            exported.extend(left.iter().cloned());
            if !known {
                left.extend(self.host.charged_leases(*allocation));
            }
            for (gpu, bytes) in left {
                self.ledger.add_unreclaimed(gpu, bytes, now);
            }
        }
        exported
    }

    /// Charges the exports of earlier containers of the pod to the next one instead of the node.
    ///
    /// A crash in between charges the memory twice, until the memory is proven free.
    fn charge_successor(&mut self, heir: &Binding, exported: Vec<(GpuUuid, Bytes)>) {
        for (gpu, bytes) in exported {
            let inherited = self.host.charge_inherited(heir.allocations[0], &gpu, bytes);
            if inherited > Bytes::ZERO {
                info!(pod = %heir.pod, %gpu, bytes = inherited.0, "exports charged to the next container");
                self.ledger.subtract_unreclaimed(&gpu, inherited);
                self.checkpoint_dirty = true;
            }
        }
    }

    /// Returns memory to the GPUs that is proven free.
    fn reclaim_proven(&mut self) {
        let leaks = self.ledger.unreclaimed_versions();
        for (gpu, held) in self.host.unreclaimed_at_most(leaks.clone()) {
            if let Some(number) = leaks.get(&gpu)
                && self.ledger.lower_unreclaimed(&gpu, *number, held)
            {
                info!(%gpu, unreclaimed = held.0, "unreclaimed memory of ended pods");
                self.checkpoint_dirty = true;
            }
        }
    }

    /// Binds queued claims until none fits.
    async fn bind_queued(&mut self, now: BootTime) {
        for binding in self.ledger.advance(now) {
            self.checkpoint_dirty = true;
            self.record_wait(binding.claim, now);
            let result = self.commit_binding(&binding).await;
            if let Some(waiter) = self.waiting_calls.remove(&binding.claim) {
                send_result(waiter.result, result);
            }
        }
        // All changes are on record before the next event.
        let _ = self.save_checkpoint();
    }

    /// Ends the calls whose deadline has passed or whose caller has gone.
    fn expire_waits(&mut self, now: BootTime) {
        let over = |_: &ClaimId, waiter: &mut WaitingCall| {
            waiter.deadline <= now || waiter.result.is_closed()
        };
        let ended: Vec<WaitingCall> = self
            .waiting_calls
            .extract_if(.., over)
            .map(|(_, waiter)| waiter)
            .collect();
        for WaitingCall {
            request: start,
            ticket,
            result,
            ..
        } in ended
        {
            let mut reason = self.ledger.reason(ticket.claim, now);
            reason.iter_mut().for_each(|reason| self.name_pods(reason));
            self.ledger.stop_waiting(ticket, now);
            self.checkpoint_dirty = true;
            let message = reason.map_or_else(|| "waiting".to_owned(), |reason| reason.to_string());
            info!(pod = %start.pod, reason = message, "no room before the deadline");
            send_result(result, Err(PrepareError::NoRoom(message)));
        }
    }

    /// Writes the checkpoint if the state has changed.
    pub(super) fn save_checkpoint(&mut self) -> Result<(), HostError> {
        if !self.checkpoint_dirty {
            return Ok(());
        }
        self.changed_since_tick = true;
        let state = NodeCheckpoint {
            boot: self.boot_id.clone(),
            ledger: self.ledger.snapshot(),
            container_names: self.container_names.clone(),
        };
        let result = self.host.save_checkpoint(&state);
        let trouble = result.as_ref().err().map(ToString::to_string);
        if trouble.is_some() && trouble != self.problems.checkpoint {
            warn!(
                error = trouble,
                "failed to write the checkpoint; the agent tries again"
            );
        }
        self.problems.checkpoint = trouble;
        self.checkpoint_dirty = result.is_err();
        result
    }

    pub(super) fn watch_cgroup(&mut self, pod: &PodUid) {
        if !matches!(self.pod_cgroups.watch(pod), PodCgroup::Found(_)) {
            warn!(%pod, "failed to find the pod's cgroup: the agent cannot see the pod's end yet");
        }
    }

    pub(super) fn record_pod_name(
        &mut self,
        pod: &PodUid,
        name: Option<PodName>,
        container: &str,
        held: &[CheckpointEntry],
    ) {
        let allocations: Vec<AllocationId> = self
            .ledger
            .allocations()
            .filter(|(_, holder)| *holder == Some(pod))
            .map(|(id, _)| id)
            .collect();
        for id in allocations {
            let told = held
                .iter()
                .find(|entry| entry.allocation == id)
                .map(|entry| entry.container.as_str());
            let holder = self
                .container_names
                .entry(id)
                .or_insert_with(|| ContainerName {
                    container: told.unwrap_or(container).to_owned(),
                    pod: None,
                });
            holder.pod = name.clone().or(holder.pod.take());
        }
    }
}

fn prepare_failed(error: HostError) -> PrepareError {
    PrepareError::Failed(error.to_string())
}

/// The caller may have stopped waiting, so a closed channel is no error.
fn send_result(sender: ResultSender, result: Result<BoundMemory, PrepareError>) {
    let _ = sender.send(result);
}

#[cfg(test)]
mod tests;
