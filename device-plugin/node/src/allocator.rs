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
mod effects;
mod gpus;
mod leases;
mod names;
mod records;
mod release;
mod waiting;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bursar_config::ResourcesConfig;
use bursar_crds::gpu_node::Reservation;
use bursar_gpu::GpuState;
use bursar_gpu::cuda_fitness::{CudaFitnesses, CudaVerdict, gpus_where};
use bursar_gpu::uvm::UvmModule;
use bursar_host::pod_cgroups::{PodCgroup, PodCgroups};
use bursar_kubelet::device_checkpoint::CheckpointEntry;
use bursar_kubelet::plugin::PrepareError;
use bursar_kubelet::pod_resources::ListedContainer;
use bursar_ledger::units::{AllocationId, Bytes, DeviceIdSet, GpuUuid, LeaseId, PodUid, Resource};
use bursar_ledger::{BindOutcome, BindRequest, Binding, BindingRef, BootTime, Ledger, LedgerView};
use tracing::{info, warn};

use super::capacity;
use super::checkpoint_state::NodeCheckpoint;
use super::host::{HostError, HostOps};
use crate::metrics::{Counts, NodeMetrics};

use effects::PendingEffects;
use gpus::NodeGpus;
use leases::device_bindings;
pub(crate) use names::ContainerNames;
use records::ResultSender;
pub use records::{
    BoundContainer, BoundMemory, KubeletCheckpointProblem, NodeProblems, PrepareRequest,
    QueuedClaim, Reply,
};
use waiting::{WaitQueue, WaitingCall};

/// The node's ledger with the state of the host.
#[derive(Debug)]
pub struct NodeAllocator<H> {
    pub(super) config: ResourcesConfig,
    pub(super) boot_id: String,
    pub(super) ledger: Ledger,
    pub(super) host: H,
    pub(super) pod_cgroups: PodCgroups,
    pub(super) names: ContainerNames,
    gpus: NodeGpus,
    waits: WaitQueue,
    pub(super) effects: PendingEffects,
    metrics: NodeMetrics,
    /// Ended leases that the ledger accounts for and whose record is not written yet.
    unrecorded_leases: Vec<LeaseId>,
    /// Pods of the ledger that had no cgroup at the last collection.
    pods_without_cgroup: BTreeSet<PodUid>,
    last_collection: Option<BootTime>,
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
    /// A node without GPUs, pending allocations and bindings, which offers no managed memory before
    /// [`set_uvm_module`](Self::set_uvm_module).
    pub fn new(
        config: ResourcesConfig,
        boot: String,
        host: H,
        pods: PodCgroups,
        metrics: NodeMetrics,
    ) -> Self {
        Self {
            config,
            boot_id: boot,
            ledger: Ledger::new(config.quantum),
            host,
            pod_cgroups: pods,
            names: ContainerNames::default(),
            gpus: NodeGpus::default(),
            waits: WaitQueue::default(),
            effects: PendingEffects::default(),
            metrics,
            unrecorded_leases: Vec::new(),
            pods_without_cgroup: BTreeSet::new(),
            last_collection: None,
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
        device_ids: DeviceIdSet,
        now: BootTime,
    ) {
        self.ledger.add_pending(id, resource, device_ids, now);
        self.checkpoint_dirty = true;
        // The kubelet's checkpoint has a copy of the answer, which may be sent without our record.
        let _ = self.save_checkpoint();
    }

    /// Adds the allocation of an entry, unless the ledger has it. It has none of compute time.
    pub(super) fn add_pending(&mut self, entry: &CheckpointEntry, now: BootTime) {
        if entry.resource == Resource::Compute {
            return;
        }
        let device_ids = entry.device_ids.clone();
        self.ledger
            .add_pending(entry.allocation, entry.resource, device_ids, now);
    }

    /// PreStartContainer: sends the result at once, when a GPU has room, or at the deadline.
    pub async fn bind(
        &mut self,
        request: PrepareRequest,
        deadline: BootTime,
        reply: Reply,
        now: BootTime,
    ) {
        let PrepareRequest {
            bind: request,
            pod_name,
            container,
            weight,
            checkpoint_entries,
            is_assumed: _,
        } = request;
        let (pod, resource) = (request.pod.clone(), request.resource);
        for entry in &checkpoint_entries {
            self.add_pending(entry, now);
        }
        if let Some(name) = &pod_name {
            self.ledger.set_namespace(&pod, &name.namespace);
        }
        self.ledger.set_weight(&pod, weight);
        let mut ended = self.end_forgotten_claims(&request, &checkpoint_entries);
        let Ok(started) = self.ledger.bind(request.clone(), now) else {
            let refused = PrepareError::NotAllocated {
                resource,
                device_ids: request.device_ids,
            };
            return send_result(reply.result, Err(refused));
        };
        self.checkpoint_dirty = true;
        self.watch_cgroup(&pod);
        self.names.set_pod(
            &self.ledger,
            &pod,
            pod_name.as_ref(),
            &container,
            &checkpoint_entries,
        );
        ended.extend(started.ended);
        // The ledger drops claims of other pods, and keeps idle claims of this one.
        for allocation in &ended {
            if !self.ledger.has_allocation(*allocation) {
                self.names.remove(*allocation);
            }
        }
        let exported = self.account_for_ended(&ended, now).await;
        self.effects.begin_teardown(ended.iter().copied());
        match started.outcome {
            BindOutcome::Bound(binding) => {
                let result = self.finish_bound(&binding, exported, now).await;
                if !ended.is_empty() {
                    // Leases of the ended containers now belong to this container: charge them
                    // before its program runs.
                    self.reconcile_leases(now).await;
                }
                send_result(reply.result, result);
            }
            BindOutcome::Queued(ticket, reason) => {
                let call = WaitingCall {
                    request,
                    ticket,
                    deadline,
                    result: reply.result,
                };
                self.queue_call(call, &checkpoint_entries, reason, reply.wait_reason, now);
            }
        }
        self.bind_queued(now).await;
    }

    /// Performs the steps of a call whose claim the ledger has bound at once. The container is
    /// charged for what earlier ones of its pod `exported`.
    async fn finish_bound(
        &mut self,
        binding: &Binding,
        exported: Vec<(GpuUuid, Bytes)>,
        now: BootTime,
    ) -> Result<BoundMemory, PrepareError> {
        self.record_wait(binding.claim, now);
        let result = match self.gpus.find_drained(&binding.placement) {
            Some(gpu) => Err(PrepareError::Drained(gpu)),
            None => self.commit_binding(binding).await,
        };
        self.charge_successor(binding, exported);
        result
    }

    /// Ends the claims of a container's earlier runs that the kubelet has forgotten. Returns their
    /// allocations.
    ///
    /// A kubelet that has lost its checkpoint gives a restarted container new device ids. `held`
    /// are its entries for the container that starts.
    fn end_forgotten_claims(
        &mut self,
        request: &BindRequest,
        held: &[CheckpointEntry],
    ) -> Vec<AllocationId> {
        let Self { ledger, names, .. } = self;
        let is_started = |allocation: &AllocationId| {
            let name = names.container(*allocation);
            name.is_some_and(|name| held.iter().any(|entry| entry.container == *name))
        };
        let BindRequest {
            pod,
            resource,
            containers,
            ..
        } = request;
        let ended = ledger.end_claims(pod, *resource, |device_ids, allocations| {
            !containers.contains(device_ids) && allocations.iter().all(is_started)
        });
        for allocation in &ended {
            names.remove(*allocation);
        }
        ended
    }

    /// Whether a [`tick`](Self::tick) is due at once, because of a change or of pending work.
    ///
    /// A tick visits every container, so an idle node ticks less often.
    pub(crate) fn needs_tick(&mut self) -> bool {
        std::mem::take(&mut self.changed_since_tick)
            || self.checkpoint_dirty
            || !self.waits.is_empty()
            || !self.effects.is_empty()
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

    /// The host, for state that the node task observes first.
    pub(crate) fn host_mut(&mut self) -> &mut H {
        &mut self.host
    }

    /// Sets or clears the problem of the CDI directory.
    pub(crate) fn set_cdi_problem(&mut self, problem: Option<String>) {
        self.problems.cdi = problem;
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
            container_names: self.names.record(),
        };
        let result = self.host.save_checkpoint(&state);
        let problem = result.as_ref().err().map(ToString::to_string);
        if problem.is_some() && problem != self.problems.checkpoint {
            warn!(
                error = problem,
                "failed to write the checkpoint; the agent tries again"
            );
        }
        self.problems.checkpoint = problem;
        self.checkpoint_dirty = result.is_err();
        result
    }

    pub(super) fn watch_cgroup(&mut self, pod: &PodUid) {
        if !matches!(self.pod_cgroups.watch(pod), PodCgroup::Found(_)) {
            warn!(%pod, "failed to find the pod's cgroup: the agent cannot see the pod's end yet");
        }
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
        self.gpus.set_states(gpus);
        self.checkpoint_dirty = true;
        self.bind_queued(now).await;
    }

    pub(crate) fn set_generations(&mut self, generations: BTreeMap<GpuUuid, u64>) {
        self.gpus.set_generations(generations);
    }

    /// Binds managed memory only while the driver's module allows it. Bound memory stays bound.
    pub async fn set_uvm_module(&mut self, module: UvmModule, now: BootTime) {
        if *self.gpus.uvm() == module {
            return;
        }
        let before = self.gpus.set_uvm(module).check_eviction();
        let offered = capacity::managed_capacity(&self.offered());
        self.ledger.set_managed_capacity(offered);
        let after = self.gpus.uvm().check_eviction();
        if self.config.managed_capacity > Bytes::ZERO && after != before {
            match after {
                Ok(()) => info!("managed memory is offered"),
                Err(why) => warn!(%why, "managed memory is not offered"),
            }
        }
        self.bind_queued(now).await;
    }

    /// The driver's module for managed memory.
    pub(crate) fn uvm(&self) -> &UvmModule {
        self.gpus.uvm()
    }

    /// The resources that the node offers now.
    pub(crate) fn offered(&self) -> ResourcesConfig {
        self.gpus.offered(&self.config)
    }

    /// The resources that the node offers once the first starts have results.
    pub(crate) fn offered_after_first_starts(&self) -> ResourcesConfig {
        self.gpus.offered_after_first_starts(&self.config)
    }

    /// Restricts GPUs of several namespaces to those whose driver was proven to clear freed memory.
    pub async fn set_scrubbed_gpus(&mut self, cleared: BTreeSet<GpuUuid>, now: BootTime) {
        if self.ledger.set_shareable_gpus(cleared) {
            self.bind_queued(now).await;
        }
    }

    /// Excludes GPUs that CUDA refused last, until a start succeeds there, and GPUs on which CUDA
    /// was not tried yet. An unfit GPU is excluded here too: the inventory, which marks it
    /// unhealthy, may come before or after.
    pub async fn set_cuda_fitness(&mut self, fitnesses: &CudaFitnesses, now: BootTime) {
        let refused = gpus_where(fitnesses, |fitness| {
            matches!(
                fitness.verdict,
                CudaVerdict::Refused | CudaVerdict::Unfit(_)
            )
        });
        let tried = gpus_where(fitnesses, |fitness| fitness.verdict != CudaVerdict::Untried);
        let has_refused_changed = self.ledger.set_refused_gpus(refused);
        let has_tried_changed = self.ledger.set_tried_gpus(tried);
        if has_refused_changed || has_tried_changed {
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

    /// Whether a container with device memory has a pod without a name.
    pub(crate) fn has_unnamed_pods(&self) -> bool {
        self.names.lacks_pods(&self.ledger)
    }

    /// Names pods from the containers that the kubelet lists and from its checkpoint entries.
    pub(crate) fn resolve_missing_names(
        &mut self,
        listed: &[ListedContainer],
        held: &[CheckpointEntry],
    ) {
        self.checkpoint_dirty |= self.names.resolve(&self.ledger, listed, held);
    }

    /// The node's memory at `now`.
    pub fn view(&self, now: BootTime) -> LedgerView {
        self.ledger.view(now)
    }

    /// The queued claims, the most urgent first. Only a number of them is published, and the others
    /// get no help.
    pub fn queued_claims(&mut self) -> Vec<QueuedClaim> {
        self.waits.retain(|claim| self.ledger.is_queued(claim));
        self.waits.by_urgency()
    }

    /// The numbers of `resource` in the ledger.
    pub fn counts(&self, resource: Resource) -> Counts {
        let bound = self.ledger.binding_refs();
        let of_resource = bound.filter(|bound| bound.resource == resource);
        Counts {
            pending: self.ledger.unbound_allocations(resource),
            bound: of_resource.map(|bound| bound.allocations.len()).sum(),
            waiting: self.waits.count(resource),
        }
    }

    /// All bindings.
    pub fn bindings(&self) -> impl Iterator<Item = Binding> {
        self.ledger.bindings()
    }

    /// All containers with device memory.
    pub fn containers(&self) -> Arc<[BoundContainer]> {
        let container = |bound: BindingRef<'_>, allocation: AllocationId| BoundContainer {
            claim: bound.claim,
            allocation,
            name: self.names.get(allocation).cloned(),
            cgroup: self.pod_cgroups.path(bound.pod).map(Into::into),
            pod: bound.pod.clone(),
        };
        let containers = device_bindings(&self.ledger).flat_map(|bound| {
            let allocations = bound.allocations.iter();
            allocations.map(move |allocation| container(bound, *allocation))
        });
        containers.collect()
    }

    /// The node's problems.
    pub fn problems(&self) -> &NodeProblems {
        &self.problems
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
