//! Carries the ledger's decisions out on the host, in an order that a crash at any point survives.
//!
//! | event | steps, in this order | what a crash between them leaves |
//! |---|---|---|
//! | Allocate | book in the ledger; persist; answer | a booking that the kubelet never heard of: collected |
//! | PreStartContainer | start in the ledger; persist; withdraw what it ended; expose the socket; write the CDI file; answer | a binding in the checkpoint: the successor finishes the steps, and the kubelet asks again and gets the same binding |
//! | the pod's end | forget in the ledger, but for what others may hold; persist; withdraw; bind who waited | files that no allocation stands for: the successor withdraws them |
//!
//! So a binding is on record before anything of it can be seen, and a CDI file is the last thing
//! before the answer: without it the container cannot start. Every step may be repeated. A booking whose record
//! cannot be written is answered all the same: a failing Allocate fails the pod for ever, and the kubelet keeps the
//! answer for us. A binding whose record cannot be written is not answered: the kubelet tries again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bursar_crds::gpu_node::Reservation;
use jiff::Timestamp;
use tokio::sync::oneshot;
use tracing::{info, warn};

use super::capacity;
use super::checkpoint_state::{ContainerName, NodeCheckpoint, PodName};
use super::host::{HostError, HostOps, Subsystem};
use crate::config::ResourcesConfig;
use crate::gpu::GpuState;
use crate::gpu::health::{Health, UnhealthyReason};
use crate::kubelet::device_checkpoint::CheckpointEntry;
use crate::kubelet::plugin::PrepareError;
use crate::ledger::{
    BindOutcome, BindRequest, Binding, BindingRef, BootTime, ClaimId, GpuSpread, Ledger,
    LedgerView, Placement, Priority, WaitHandle,
};
use crate::metrics::{Counts, Metrics};
use crate::node::cdi;
use crate::node::pod_cgroups::{PodCgroup, PodCgroups};
use crate::retained::leases::{ContainerBinding, LedgerUpdate, NodeView};
use crate::units::{AllocationId, Bytes, DeviceIdSet, GpuUuid, LeaseId, PodUid, Quanta, Resource};

/// Where the answer to a PreStartContainer goes; closed where nobody waits any more.
pub type Reply = oneshot::Sender<Result<(), PrepareError>>;

/// A PreStartContainer whose pod has been found out.
#[derive(Debug, Clone)]
pub struct PrepareRequest {
    /// What its tokens count.
    pub resource: Resource,
    /// Its tokens.
    pub tokens: DeviceIdSet,
    /// Who it is for.
    pub identity: ContainerIdentity,
    /// When to give up waiting for room.
    pub deadline: BootTime,
}

/// Who a container is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerIdentity {
    /// The pod.
    pub pod: PodUid,
    /// The pod's name, where the kubelet told it.
    pub pod_name: Option<PodName>,
    /// The container's name where `held` does not tell it.
    pub container: String,
    /// What the kubelet's checkpoint has for exactly these tokens; empty where it cannot be read.
    pub checkpoint_entries: Vec<CheckpointEntry>,
    /// The tokens of all containers of the pod, as the checkpoint has them.
    pub pod_device_ids: Vec<DeviceIdSet>,
    /// Over how many GPUs to spread.
    pub gpu_spread: GpuSpread,
    /// The pod's priority.
    pub priority: Priority,
}

/// What is wrong on this node, for conditions. None is well.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeProblems {
    /// The checkpoint cannot be written.
    pub checkpoint: Option<String>,
    /// The checkpoint could not be used at the start and was rebuilt from the host.
    pub rebuilt: Option<String>,
    /// A binding could not be carried out, or an ended one not withdrawn: what it is about, and what happened.
    pub host: Option<(Subsystem, String)>,
    /// The CDI folder cannot be written.
    pub cdi: Option<String>,
}

/// A PreStartContainer that waits for room.
#[derive(Debug)]
struct WaitingCall {
    request: BindRequest,
    ticket: WaitHandle,
    deadline: BootTime,
    reply: Reply,
}

/// A claim that waits for room, whether or not the kubelet is asking at the moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueuedClaim {
    /// The pod.
    pub pod: PodUid,
    /// What it waits for.
    pub resource: Resource,
    /// How much.
    pub quanta: Quanta,
    /// Since when.
    pub since: Timestamp,
    /// Who, where it is known.
    pub name: Option<ContainerName>,
}

/// A container that device memory is bound for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoundContainer {
    /// Its hold on memory; containers that share one are never alive together.
    pub claim: ClaimId,
    /// What it was given.
    pub allocation: AllocationId,
    /// Its pod.
    pub pod: PodUid,
    /// Its name and its pod's, as far as they are known.
    pub name: Option<ContainerName>,
    /// Its pod's cgroup, once that was found.
    pub cgroup: Option<std::path::PathBuf>,
}

#[cfg(test)]
impl BoundContainer {
    /// One that nothing but its numbers is known of.
    pub(crate) fn with_ids(allocation: u64, claim: u64) -> Self {
        Self {
            claim: serde_json::from_value(claim.into()).unwrap(),
            allocation: AllocationId::from_bits(allocation),
            pod: "p".parse().unwrap(),
            name: None,
            cgroup: None,
        }
    }
}

/// The node's state, with the host that it is carried out on.
#[derive(Debug)]
pub struct NodeAllocator<H> {
    pub(super) config: ResourcesConfig,
    pub(super) boot_id: String,
    pub(super) ledger: Ledger,
    pub(super) host: H,
    pub(super) pod_cgroups: PodCgroups,
    pub(super) container_names: BTreeMap<AllocationId, ContainerName>,
    /// The inventory's GPUs, for their device nodes.
    pub(super) gpus: Vec<GpuState>,
    waiting_calls: BTreeMap<ClaimId, WaitingCall>,
    /// Every claim that waits; outlives the kubelet's single calls.
    queued_claims: BTreeMap<ClaimId, QueuedClaim>,
    metrics: Metrics,
    /// Allocations that could not be withdrawn yet.
    pub(super) pending_teardown: BTreeSet<AllocationId>,
    /// Bound allocations that lack their socket or CDI file.
    pub(super) pending_setup: BTreeSet<AllocationId>,
    /// G of each GPU.
    gpu_generations: BTreeMap<GpuUuid, u64>,
    /// Kept leases that the ledger was told to account for, and whose record is not written yet.
    unrecorded_leases: Vec<LeaseId>,
    /// Pods of the ledger that were not in the kubelet's cgroups at the last look.
    pods_without_cgroup: BTreeSet<PodUid>,
    /// Whether a lost checkpoint may have known of memory that ended pods left: the GPUs are to be proven free.
    pub(super) reclaim_all_pending: bool,
    /// Whether the checkpoint lacks something.
    pub(super) checkpoint_dirty: bool,
    /// Whether the state changed since the last call of [`needs_tick`](Self::is_stirred).
    changed_since_tick: bool,
    pub(super) problems: NodeProblems,
}

impl<H: HostOps> NodeAllocator<H> {
    /// A node without GPUs, bookings or bindings.
    pub fn new(
        config: ResourcesConfig,
        boot: String,
        host: H,
        pods: PodCgroups,
        metrics: Metrics,
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

    /// Allocate: books under `id`.
    pub fn allocate(
        &mut self,
        id: AllocationId,
        resource: Resource,
        tokens: DeviceIdSet,
        now: BootTime,
    ) {
        self.ledger.add_pending(id, resource, tokens, now);
        self.checkpoint_dirty = true;
        // The answer is the record's copy at the kubelet: it goes out even if ours cannot be written.
        let _ = self.save_checkpoint();
    }

    /// PreStartContainer: answers at once, or when there is room, or when the time is over.
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
                send_reply(reply, Err(PrepareError::NotAllocated { resource, tokens }));
                return;
            }
        };
        self.checkpoint_dirty = true;
        self.watch_cgroup(&pod);
        self.record_pod_name(&pod, name, &container, &held);
        let known = self.reconcile_leases(now).await;
        let exported = self.record_unreclaimed(&started.ended, known, now);
        self.pending_teardown.extend(started.ended.iter().copied());
        match started.outcome {
            BindOutcome::Bound(binding) => {
                let result = match self.find_drained_gpu(&binding) {
                    Some(gpu) => Err(PrepareError::Drained(gpu)),
                    None => self.commit_binding(&binding).await,
                };
                self.charge_successor(&binding, exported);
                if !started.ended.is_empty() {
                    // What those kept is its own by now: it is charged before its program starts.
                    self.reconcile_leases(now).await;
                }
                send_reply(reply, result);
            }
            BindOutcome::Queued(ticket, reason) => {
                info!(%pod, %resource, %reason, "waiting");
                self.queued_claims
                    .entry(ticket.claim)
                    .or_insert_with(|| QueuedClaim {
                        name: held
                            .iter()
                            .find_map(|entry| self.container_names.get(&entry.allocation).cloned()),
                        pod,
                        resource,
                        quanta: tokens.quanta(),
                        since: Timestamp::now(),
                    });
                let waiter = WaitingCall {
                    request: start,
                    ticket,
                    deadline: until,
                    reply,
                };
                if let Some(before) = self.waiting_calls.insert(ticket.claim, waiter) {
                    send_reply(before.reply, Err(PrepareError::NoRoom(reason.to_string())));
                }
            }
        }
        self.bind_queued(now).await;
    }

    /// The GPUs as NVML sees them now.
    pub async fn set_gpus(&mut self, gpus: Vec<GpuState>, now: BootTime) {
        self.ledger
            .set_gpus(capacity::ledger_gpus(&gpus, &self.config));
        if !gpus.is_empty() && std::mem::take(&mut self.reclaim_all_pending) {
            // Anybody may hold anything of them, for all that is known.
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

    /// Only these GPUs are for pods of several namespaces: their driver was seen to clear freed memory.
    pub async fn set_scrubbed_gpus(&mut self, cleared: BTreeSet<GpuUuid>, now: BootTime) {
        if self.ledger.set_shareable_gpus(cleared) {
            self.bind_queued(now).await;
        }
    }

    /// Holds GPUs for the pods that the operator makes room for.
    pub async fn set_reservations(&mut self, reservations: &[Reservation], now: BootTime) {
        if self
            .ledger
            .set_reservations(capacity::parse_reservations(reservations))
        {
            self.checkpoint_dirty = true;
            self.bind_queued(now).await;
        }
    }

    /// Gives nobody what is in use of GPUs and charged to nobody.
    pub async fn set_withheld(&mut self, withheld: BTreeMap<GpuUuid, Bytes>, now: BootTime) {
        if self.ledger.set_withheld(withheld) {
            self.checkpoint_dirty = true;
            self.bind_queued(now).await;
        }
    }

    /// Ends the pods whose cgroup is gone.
    pub async fn release_ended_pods(&mut self, now: BootTime) {
        for pod in self.pod_cgroups.drain_ended() {
            self.release_pod(&pod, now).await;
        }
    }

    /// Whether a [`tick`](Self::tick) is due at once: the state changed since the last call, or the
    /// agent waits for something. A tick looks at every container, so an idle node has fewer.
    pub fn needs_tick(&mut self) -> bool {
        std::mem::take(&mut self.changed_since_tick)
            || self.checkpoint_dirty
            || !self.queued_claims.is_empty()
            || !self.waiting_calls.is_empty()
            || !self.pending_teardown.is_empty()
            || !self.pending_setup.is_empty()
            || !self.unrecorded_leases.is_empty()
            || !self.ledger.unreclaimed_versions().is_empty()
    }

    /// What time brings: pods that ended, waiters that gave up, steps that failed before.
    pub async fn tick(&mut self, now: BootTime) {
        self.release_ended_pods(now).await;
        self.reclaim_proven();
        self.reconcile_leases(now).await;
        self.expire_waits(now);
        self.ledger.suspend_unclaimed_reservations(now);
        self.bind_queued(now).await;
        self.retry_pending().await;
        if !self.checkpoint_dirty && !self.unrecorded_leases.is_empty() {
            let leases = std::mem::take(&mut self.unrecorded_leases);
            self.host.confirm_recorded(leases).await;
        }
    }

    /// G of each GPU, as it is now.
    pub fn set_generations(&mut self, generations: BTreeMap<GpuUuid, u64>) {
        self.gpu_generations = generations;
    }

    /// Accounts for the kept leases as the node stands now; whether they are known.
    async fn reconcile_leases(&mut self, now: BootTime) -> bool {
        let LedgerUpdate {
            orphaned,
            unreclaimed: left,
        } = self.host.reconcile_leases(self.lease_inputs()).await;
        let known = orphaned.is_some();
        if let Some(orphaned) = orphaned {
            self.checkpoint_dirty |= self.ledger.set_orphaned_leases(orphaned, now);
        }
        for (lease, gpu, bytes) in left {
            info!(%lease, %gpu, bytes = bytes.0, "kept lease ended");
            self.ledger.add_unreclaimed(gpu, bytes, now);
            self.unrecorded_leases.push(lease);
            self.checkpoint_dirty = true;
        }
        known
    }

    fn lease_inputs(&self) -> NodeView {
        let mut containers = BTreeMap::new();
        for bound in self.device_bindings() {
            let gpus: BTreeSet<GpuUuid> = match bound.placement {
                Placement::Device(shares) => shares.iter().map(|share| share.gpu.clone()).collect(),
                Placement::Managed(_) => BTreeSet::new(),
            };
            for id in bound.allocations {
                let named = self
                    .container_names
                    .get(id)
                    .and_then(|holder| holder.pod.as_ref());
                let standing = ContainerBinding {
                    pod: bound.pod.clone(),
                    namespace: named.map(|named| named.namespace.clone()),
                    gpus: gpus.clone(),
                };
                containers.insert(*id, standing);
            }
        }
        NodeView {
            quotas: self.namespace_quotas(),
            containers,
            generations: self.gpu_generations.clone(),
            free: self.ledger.free_by_gpu().collect(),
        }
    }

    fn device_bindings(&self) -> impl Iterator<Item = BindingRef<'_>> {
        let bound = self.ledger.binding_refs();
        bound.filter(|bound| bound.resource == Resource::DeviceMemory)
    }

    /// The quota of each namespace's pods on each GPU, by the bindings.
    fn namespace_quotas(&self) -> BTreeMap<String, BTreeMap<GpuUuid, Bytes>> {
        let mut quotas: BTreeMap<&str, BTreeMap<&GpuUuid, Bytes>> = BTreeMap::new();
        for bound in self.device_bindings() {
            let holders = bound
                .allocations
                .iter()
                .map(|id| self.container_names.get(id));
            let pod = holders.flatten().find_map(|holder| holder.pod.as_ref());
            let (Some(pod), Placement::Device(shares)) = (pod, bound.placement) else {
                continue;
            };
            let of_namespace = quotas.entry(&pod.namespace).or_default();
            for share in shares {
                let quota = of_namespace.entry(&share.gpu).or_default();
                quota.0 = quota
                    .0
                    .saturating_add(share.quanta.bytes(self.config.quantum).0);
            }
        }
        let of_namespace = |(namespace, gpus): (&str, BTreeMap<&GpuUuid, Bytes>)| {
            let gpus = gpus.into_iter();
            let gpus = gpus.map(|(gpu, quota)| (gpu.clone(), quota)).collect();
            (namespace.to_owned(), gpus)
        };
        quotas.into_iter().map(of_namespace).collect()
    }

    /// A look at the kubelet's checkpoint, and at the cgroups of pods that are not followed.
    pub async fn collect_garbage(&mut self, known: Option<&BTreeSet<AllocationId>>, now: BootTime) {
        if let Some(known) = known {
            let collected = self.ledger.gc_pending(known, now);
            self.metrics.count_collected(collected.len());
            for allocation in collected {
                info!(%allocation, "booking without a pod collected");
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

    /// The node's memory now.
    pub fn view(&self, now: BootTime) -> LedgerView {
        self.ledger.view(now)
    }

    /// The claims that wait, the longest waiting first.
    pub fn queued_claims(&mut self) -> Vec<QueuedClaim> {
        self.queued_claims
            .retain(|claim, _| self.ledger.is_queued(*claim));
        // The operator would make room that a pod of this namespace does not get.
        let waits = self.queued_claims.iter();
        let waits = waits.filter(|(claim, _)| self.ledger.closed_gpu(**claim).is_none());
        let mut waits: Vec<QueuedClaim> = waits.map(|(_, wait)| wait.clone()).collect();
        waits.sort_by(|a, b| (a.since, &a.pod).cmp(&(b.since, &b.pod)));
        waits
    }

    /// What the ledger holds of `resource`, in numbers.
    pub fn counts(&self, resource: Resource) -> Counts {
        let of_it = |bound: &BindingRef<'_>| bound.resource == resource;
        Counts {
            pending: self.ledger.unbound_allocations(resource),
            bound: self
                .ledger
                .binding_refs()
                .filter(of_it)
                .map(|bound| bound.allocations.len())
                .sum(),
            waiting: self
                .queued_claims
                .values()
                .filter(|wait| wait.resource == resource)
                .count(),
        }
    }

    /// Every binding.
    pub fn bindings(&self) -> impl Iterator<Item = Binding> {
        self.ledger.bindings()
    }

    /// Every container that device memory is bound for.
    pub fn containers(&self) -> Arc<[BoundContainer]> {
        let container = |bound: BindingRef<'_>, allocation: AllocationId| BoundContainer {
            claim: bound.claim,
            allocation,
            name: self.container_names.get(&allocation).cloned(),
            cgroup: self.pod_cgroups.path(bound.pod).map(Into::into),
            pod: bound.pod.clone(),
        };
        let containers = self.device_bindings().flat_map(|bound| {
            let allocations = bound.allocations.iter();
            allocations.map(move |allocation| container(bound, *allocation))
        });
        containers.collect()
    }

    /// What is wrong.
    pub fn problems(&self) -> &NodeProblems {
        &self.problems
    }

    /// The host, to tell it what it need not ask for.
    pub fn host_mut(&mut self) -> &mut H {
        &mut self.host
    }

    /// Notes whether CDI files can be written.
    pub fn set_cdi_problem(&mut self, trouble: Option<String>) {
        self.problems.cdi = trouble;
    }

    /// Ends a pod: its cgroup is gone.
    pub(super) async fn release_pod(&mut self, pod: &PodUid, now: BootTime) {
        let ended = self.ledger.release_pod(pod);
        if ended.is_empty() {
            return;
        }
        self.metrics.count_release();
        info!(%pod, allocations = ended.len(), "released");
        for (_, waiter) in self
            .waiting_calls
            .extract_if(.., |_, waiter| waiter.request.pod == *pod)
        {
            send_reply(
                waiter.reply,
                Err(PrepareError::Failed("the pod has ended".to_owned())),
            );
        }
        self.checkpoint_dirty = true;
        // Before what its processes had exported is read: from here on its leases are the ledger's.
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

    /// What others may hold of what these allocations had is not bound again. Kept leases are accounted for where
    /// they are `known`. Answers what was exported.
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

    /// Charges the container that follows others of its pod for what these had exported, instead of the node. A crash
    /// in between charges it twice, until it is proven free.
    fn charge_successor(&mut self, heir: &Binding, exported: Vec<(GpuUuid, Bytes)>) {
        for (gpu, bytes) in exported {
            let inherited = self.host.charge_inherited(heir.allocations[0], &gpu, bytes);
            if inherited > Bytes::ZERO {
                info!(pod = %heir.pod, %gpu, bytes = inherited.0, "inherited");
                self.ledger.subtract_unreclaimed(&gpu, inherited);
                self.checkpoint_dirty = true;
            }
        }
    }

    /// Binds again what is proven free.
    fn reclaim_proven(&mut self) {
        let leaks = self.ledger.unreclaimed_versions();
        for (gpu, held) in self.host.unreclaimed_at_most(leaks.clone()) {
            if let Some(number) = leaks.get(&gpu)
                && self.ledger.lower_unreclaimed(&gpu, *number, held)
            {
                info!(%gpu, held = held.0, "left by ended pods");
                self.checkpoint_dirty = true;
            }
        }
    }

    /// Binds who can be bound, until nobody can.
    async fn bind_queued(&mut self, now: BootTime) {
        for binding in self.ledger.advance(now) {
            self.checkpoint_dirty = true;
            let result = self.commit_binding(&binding).await;
            if let Some(waiter) = self.waiting_calls.remove(&binding.claim) {
                send_reply(waiter.reply, result);
            }
        }
        // Whatever else happened is on record before the next event.
        let _ = self.save_checkpoint();
    }

    /// Ends the waits that are over, or that nobody waits for.
    fn expire_waits(&mut self, now: BootTime) {
        let over = |_: &ClaimId, waiter: &mut WaitingCall| {
            waiter.deadline <= now || waiter.reply.is_closed()
        };
        let ended: Vec<WaitingCall> = self
            .waiting_calls
            .extract_if(.., over)
            .map(|(_, waiter)| waiter)
            .collect();
        for WaitingCall {
            request: start,
            ticket,
            reply,
            ..
        } in ended
        {
            let reason = self.ledger.reason(ticket.claim, now);
            self.ledger.stop_waiting(ticket, now);
            self.checkpoint_dirty = true;
            let message = reason.map_or_else(|| "waiting".to_owned(), |reason| reason.to_string());
            info!(pod = %start.pod, reason = message, "no room yet");
            send_reply(reply, Err(PrepareError::NoRoom(message)));
        }
    }

    /// The steps of a binding after the ledger's.
    async fn commit_binding(&mut self, binding: &Binding) -> Result<(), PrepareError> {
        self.save_checkpoint().map_err(prepare_failed)?;
        self.tear_down_ended().await;
        let result = self.set_up(binding).await;
        match &result {
            Ok(()) => {
                info!(pod = %binding.pod, claim = ?binding.claim, placement = ?binding.placement, "bound");
                self.problems.host = None;
            }
            Err(error) => {
                warn!(pod = %binding.pod, reason = error.reason(), %error, "bound, and not ready to start");
                self.problems.host = Some((error.subsystem(), error.to_string()));
            }
        }
        result.map_err(prepare_failed)
    }

    /// What a binding is on the host: of device memory the socket and the CDI file of every
    /// allocation, of managed memory its containers' quotas.
    async fn set_up(&mut self, binding: &Binding) -> Result<(), HostError> {
        let shares = match &binding.placement {
            Placement::Device(shares) => shares,
            Placement::Managed(_) => return self.set_managed_quotas(&binding.pod),
        };
        self.pending_setup.extend(&binding.allocations);
        for &allocation in &binding.allocations {
            // An init container's allocation that had ended may start again.
            self.pending_teardown.remove(&allocation);
            let gpus = shares
                .iter()
                .map(|share| {
                    let nodes = self.device_nodes(&share.gpu)?;
                    let quota = share.quanta.bytes(self.config.quantum);
                    Ok(cdi::BoundGpu {
                        uuid: share.gpu.clone(),
                        quota,
                        nodes,
                    })
                })
                .collect::<Result<_, HostError>>()?;
            let device = cdi::CdiBinding {
                allocation,
                pod: binding.pod.clone(),
                container: self
                    .container_names
                    .get(&allocation)
                    .map(|holder| holder.container.clone())
                    .unwrap_or_default(),
                tokens: binding.device_ids.clone(),
                gpus,
            };
            let managed = self.managed_quota(&binding.pod, allocation);
            self.host.serve_session(&device, managed).await?;
            self.host.write_cdi(&device).await?;
            self.pending_setup.remove(&allocation);
        }
        Ok(())
    }

    /// Tells every container of a pod what managed memory it may use. One without device memory has no
    /// GPU to use managed memory from.
    fn set_managed_quotas(&mut self, pod: &PodUid) -> Result<(), HostError> {
        let exposed: Vec<AllocationId> = self
            .device_bindings()
            .filter(|bound| bound.pod == pod)
            .flat_map(|bound| bound.allocations.iter().copied())
            .collect();
        for allocation in exposed {
            let managed = self.managed_quota(pod, allocation);
            self.host.set_managed_quota(allocation, managed)?;
        }
        Ok(())
    }

    /// The managed memory that is bound for the container of `pod` that has `allocation`.
    pub(super) fn managed_quota(&self, pod: &PodUid, allocation: AllocationId) -> Bytes {
        let container =
            |id: &AllocationId| self.container_names.get(id).map(|holder| &holder.container);
        let quanta = self
            .ledger
            .binding_refs()
            .filter(|bound| {
                let mut containers = bound.allocations.iter().map(container);
                bound.pod == pod && containers.any(|name| name == container(&allocation))
            })
            .map(|bound| match bound.placement {
                Placement::Managed(quanta) => quanta.0,
                Placement::Device(_) => 0,
            })
            .fold(0_u32, u32::saturating_add);
        Quanta(quanta).bytes(self.config.quantum)
    }

    /// A GPU of a binding that is drained.
    fn find_drained_gpu(&self, binding: &Binding) -> Option<GpuUuid> {
        let Placement::Device(shares) = &binding.placement else {
            return None;
        };
        let is_drained = |state: &&GpuState| {
            let why = state.health;
            matches!(
                why,
                Health::Unhealthy(UnhealthyReason::Draining | UnhealthyReason::Drained)
            )
        };
        let mut drained = self.gpus.iter().filter(is_drained);
        let bound = |state: &&GpuState| shares.iter().any(|share| share.gpu == state.gpu.uuid);
        drained.find(bound).map(|state| state.gpu.uuid.clone())
    }

    fn device_nodes(&self, uuid: &GpuUuid) -> Result<Vec<String>, HostError> {
        let state = self.gpus.iter().find(|state| state.gpu.uuid == *uuid);
        let gpu = &state
            .ok_or_else(|| HostError::GpuNotListed(uuid.clone()))?
            .gpu;
        let capability = |number: &u32| format!("nvidia-caps/nvidia-cap{number}");
        let nodes = [format!("nvidia{}", gpu.minor)].into_iter();
        Ok(nodes
            .chain(gpu.capabilities.iter().map(capability))
            .collect())
    }

    /// Tries again what failed before.
    async fn retry_pending(&mut self) {
        if self.save_checkpoint().is_err() {
            return;
        }
        self.tear_down_ended().await;
        if self.pending_setup.is_empty() {
            if self.pending_teardown.is_empty() {
                self.problems.host = None;
            }
            return;
        }
        let unfinished = |binding: &Binding| {
            binding
                .allocations
                .iter()
                .any(|id| self.pending_setup.contains(id))
        };
        let bindings: Vec<Binding> = self.ledger.bindings().filter(unfinished).collect();
        for binding in bindings {
            match self.set_up(&binding).await {
                Ok(()) => self.problems.host = None,
                // A GPU that is away takes nothing from the others.
                Err(HostError::GpuNotListed(_)) => {}
                Err(error) => self.problems.host = Some((error.subsystem(), error.to_string())),
            }
        }
        if self.pending_teardown.is_empty() && self.pending_setup.is_empty() {
            self.problems.host = None;
        }
    }

    /// Takes down what has ended; what fails is tried again at the next tick.
    pub(super) async fn tear_down_ended(&mut self) {
        for allocation in self.pending_teardown.clone() {
            match self.host.tear_down(allocation).await {
                Ok(()) => {
                    self.pending_teardown.remove(&allocation);
                    self.pending_setup.remove(&allocation);
                }
                Err(error) => self.problems.host = Some((error.subsystem(), error.to_string())),
            }
        }
    }

    /// Brings the checkpoint up to date.
    pub(super) fn save_checkpoint(&mut self) -> Result<(), HostError> {
        if !self.checkpoint_dirty {
            return Ok(());
        }
        self.changed_since_tick = true;
        let state = NodeCheckpoint {
            boot: self.boot_id.clone(),
            ledger: self.ledger.snapshot(),
            holders: self.container_names.clone(),
        };
        let result = self.host.save_checkpoint(&state);
        let trouble = result.as_ref().err().map(ToString::to_string);
        if trouble.is_some() && trouble != self.problems.checkpoint {
            warn!(error = trouble, "checkpoint not written");
        }
        self.problems.checkpoint = trouble;
        self.checkpoint_dirty = result.is_err();
        result
    }

    pub(super) fn watch_cgroup(&mut self, pod: &PodUid) {
        if !matches!(self.pod_cgroups.watch(pod), PodCgroup::Found(_)) {
            warn!(%pod, "the pod's cgroup is not found: its end cannot be seen yet");
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

/// Who asked may have stopped waiting: then nobody needs the answer.
fn send_reply(reply: Reply, result: Result<(), PrepareError>) {
    let _ = reply.send(result);
}

#[cfg(test)]
mod tests;
