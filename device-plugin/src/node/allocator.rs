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
use super::checkpoint_state::{Holder, PodName, State};
use super::host::{Concern, Host, HostError};
use crate::config::ResourcesConfig;
use crate::gpu::GpuState;
use crate::gpu::health::{Health, Sickness};
use crate::kubelet::device_checkpoint::Held;
use crate::kubelet::plugin::NotBound;
use crate::ledger::{
    Answer, Binding, Bound, ClaimId, Ledger, Moment, Placement, Priority, Shape, Start, Ticket,
    View,
};
use crate::metrics::{Counts, Metrics};
use crate::node::cdi;
use crate::node::pod_cgroups::{PodCgroup, Pods};
use crate::retained::leases::{Node, Standing, Turn};
use crate::units::{AllocationId, Bytes, GpuUuid, LeaseId, PodUid, Quanta, Resource, TokenSet};

/// Where the answer to a PreStartContainer goes; closed where nobody waits any more.
pub type Reply = oneshot::Sender<Result<(), NotBound>>;

/// A PreStartContainer whose pod has been found out.
#[derive(Debug, Clone)]
pub struct Bind {
    /// What its tokens count.
    pub resource: Resource,
    /// Its tokens.
    pub tokens: TokenSet,
    /// Who it is for.
    pub identity: Identity,
    /// When to give up waiting for room.
    pub until: Moment,
}

/// Who a container is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The pod.
    pub pod: PodUid,
    /// The pod's name, where the kubelet told it.
    pub name: Option<PodName>,
    /// The container's name where `held` does not tell it.
    pub container: String,
    /// What the kubelet's checkpoint has for exactly these tokens; empty where it cannot be read.
    pub held: Vec<Held>,
    /// The tokens of all containers of the pod, as the checkpoint has them.
    pub containers: Vec<TokenSet>,
    /// Over how many GPUs to spread.
    pub shape: Shape,
    /// The pod's priority.
    pub priority: Priority,
}

/// What is wrong on this node, for conditions. None is well.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Troubles {
    /// The checkpoint cannot be written.
    pub checkpoint: Option<String>,
    /// The checkpoint could not be used at the start and was rebuilt from the host.
    pub rebuilt: Option<String>,
    /// A binding could not be carried out, or an ended one not withdrawn: what it is about, and what happened.
    pub host: Option<(Concern, String)>,
    /// The CDI folder cannot be written.
    pub cdi: Option<String>,
}

/// A PreStartContainer that waits for room.
#[derive(Debug)]
struct Waiter {
    start: Start,
    ticket: Ticket,
    until: Moment,
    reply: Reply,
}

/// A claim that waits for room, whether or not the kubelet is asking at the moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wait {
    /// The pod.
    pub pod: PodUid,
    /// What it waits for.
    pub resource: Resource,
    /// How much.
    pub quanta: Quanta,
    /// Since when.
    pub since: Timestamp,
    /// Who, where it is known.
    pub holder: Option<Holder>,
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
    pub holder: Option<Holder>,
    /// Its pod's cgroup, once that was found.
    pub cgroup: Option<std::path::PathBuf>,
}

#[cfg(test)]
impl BoundContainer {
    /// One that nothing but its numbers is known of.
    pub(crate) fn numbered(allocation: u64, claim: u64) -> Self {
        Self {
            claim: serde_json::from_value(claim.into()).unwrap(),
            allocation: AllocationId::from_bits(allocation),
            pod: "p".parse().unwrap(),
            holder: None,
            cgroup: None,
        }
    }
}

/// The node's state, with the host that it is carried out on.
#[derive(Debug)]
pub struct Core<H> {
    pub(super) config: ResourcesConfig,
    pub(super) boot: String,
    pub(super) ledger: Ledger,
    pub(super) host: H,
    pub(super) pods: Pods,
    pub(super) holders: BTreeMap<AllocationId, Holder>,
    /// The inventory's GPUs, for their device nodes.
    pub(super) gpus: Vec<GpuState>,
    waiting: BTreeMap<ClaimId, Waiter>,
    /// Every claim that waits; outlives the kubelet's single calls.
    waits: BTreeMap<ClaimId, Wait>,
    metrics: Metrics,
    /// Allocations that could not be withdrawn yet.
    pub(super) leftovers: BTreeSet<AllocationId>,
    /// Bound allocations that lack their socket or CDI file.
    pub(super) unfinished: BTreeSet<AllocationId>,
    /// G of each GPU.
    generations: BTreeMap<GpuUuid, u64>,
    /// Kept leases that the ledger was told to account for, and whose record is not written yet.
    unrecorded: Vec<LeaseId>,
    /// Pods of the ledger that were not in the kubelet's cgroups at the last look.
    missing: BTreeSet<PodUid>,
    /// Whether a lost checkpoint may have known of memory that ended pods left: the GPUs are to be proven free.
    pub(super) unproven: bool,
    /// Whether the checkpoint lacks something.
    pub(super) unsaved: bool,
    /// Whether the state changed since the last call of [`is_stirred`](Self::is_stirred).
    stirred: bool,
    pub(super) troubles: Troubles,
}

impl<H: Host> Core<H> {
    /// A node without GPUs, bookings or bindings.
    pub fn new(
        config: ResourcesConfig,
        boot: String,
        host: H,
        pods: Pods,
        metrics: Metrics,
    ) -> Self {
        let mut ledger = Ledger::new(config.quantum);
        ledger.set_managed_capacity(capacity::managed_capacity(&config));
        Self {
            config,
            boot,
            ledger,
            host,
            pods,
            holders: BTreeMap::new(),
            gpus: Vec::new(),
            waiting: BTreeMap::new(),
            waits: BTreeMap::new(),
            metrics,
            leftovers: BTreeSet::new(),
            unfinished: BTreeSet::new(),
            generations: BTreeMap::new(),
            unrecorded: Vec::new(),
            missing: BTreeSet::new(),
            unproven: false,
            unsaved: false,
            stirred: true,
            troubles: Troubles::default(),
        }
    }

    /// Allocate: books under `id`.
    pub fn book(&mut self, id: AllocationId, resource: Resource, tokens: TokenSet, now: Moment) {
        self.ledger.book(id, resource, tokens, now);
        self.unsaved = true;
        // The answer is the record's copy at the kubelet: it goes out even if ours cannot be written.
        let _ = self.save();
    }

    /// PreStartContainer: answers at once, or when there is room, or when the time is over.
    pub async fn bind(&mut self, bind: Bind, reply: Reply, now: Moment) {
        let Bind {
            resource,
            tokens,
            identity,
            until,
        } = bind;
        let Identity {
            pod,
            name,
            container,
            held,
            containers,
            shape,
            priority,
        } = identity;
        for entry in &held {
            self.ledger
                .book(entry.allocation, resource, tokens.clone(), now);
        }
        if let Some(name) = &name {
            self.ledger.set_namespace(&pod, &name.namespace);
        }
        let start = Start {
            resource,
            tokens: tokens.clone(),
            containers,
            pod: pod.clone(),
            shape,
            priority,
        };
        let started = match self.ledger.start(start.clone(), now) {
            Ok(started) => started,
            Err(_) => {
                answer(reply, Err(NotBound::NotBooked { resource, tokens }));
                return;
            }
        };
        self.unsaved = true;
        self.follow(&pod);
        self.name(&pod, name, &container, &held);
        let known = self.keep(now).await;
        let exported = self.leave(&started.ended, known, now);
        self.leftovers.extend(started.ended.iter().copied());
        match started.answer {
            Answer::Bound(binding) => {
                let result = match self.drained(&binding) {
                    Some(gpu) => Err(NotBound::Drained(gpu)),
                    None => self.carry_out(&binding).await,
                };
                self.bequeath(&binding, exported);
                if !started.ended.is_empty() {
                    // What those kept is its own by now: it is charged before its program starts.
                    self.keep(now).await;
                }
                answer(reply, result);
            }
            Answer::Wait(ticket, reason) => {
                info!(%pod, %resource, %reason, "waiting");
                self.waits.entry(ticket.claim).or_insert_with(|| Wait {
                    holder: held
                        .iter()
                        .find_map(|entry| self.holders.get(&entry.allocation).cloned()),
                    pod,
                    resource,
                    quanta: tokens.quanta(),
                    since: Timestamp::now(),
                });
                let waiter = Waiter {
                    start,
                    ticket,
                    until,
                    reply,
                };
                if let Some(before) = self.waiting.insert(ticket.claim, waiter) {
                    answer(before.reply, Err(NotBound::NoRoom(reason.to_string())));
                }
            }
        }
        self.advance(now).await;
    }

    /// The GPUs as NVML sees them now.
    pub async fn set_gpus(&mut self, gpus: Vec<GpuState>, now: Moment) {
        self.ledger
            .set_gpus(capacity::ledger_gpus(&gpus, &self.config));
        if !gpus.is_empty() && std::mem::take(&mut self.unproven) {
            // Anybody may hold anything of them, for all that is known.
            for state in &gpus {
                self.ledger.forget_tenants(&state.gpu.uuid);
                self.ledger
                    .leak(state.gpu.uuid.clone(), state.gpu.memory, now);
            }
        }
        self.gpus = gpus;
        self.unsaved = true;
        self.advance(now).await;
    }

    /// Only these GPUs are for pods of several namespaces: their driver was seen to clear freed memory.
    pub async fn set_cleared(&mut self, cleared: BTreeSet<GpuUuid>, now: Moment) {
        if self.ledger.set_cleared(cleared) {
            self.advance(now).await;
        }
    }

    /// Holds GPUs for the pods that the operator makes room for.
    pub async fn reserve(&mut self, reservations: &[Reservation], now: Moment) {
        if self.ledger.reserve(capacity::reserved(reservations)) {
            self.unsaved = true;
            self.advance(now).await;
        }
    }

    /// Gives nobody what is in use of GPUs and charged to nobody.
    pub async fn withhold(&mut self, withheld: BTreeMap<GpuUuid, Bytes>, now: Moment) {
        if self.ledger.withhold(withheld) {
            self.unsaved = true;
            self.advance(now).await;
        }
    }

    /// Ends the pods whose cgroup is gone.
    pub async fn release_ended(&mut self, now: Moment) {
        for pod in self.pods.take_ended() {
            self.release(&pod, now).await;
        }
    }

    /// Whether a [`tick`](Self::tick) is due at once: the state changed since the last call, or the
    /// agent waits for something. A tick looks at every container, so an idle node has fewer.
    pub fn is_stirred(&mut self) -> bool {
        std::mem::take(&mut self.stirred)
            || self.unsaved
            || !self.waits.is_empty()
            || !self.waiting.is_empty()
            || !self.leftovers.is_empty()
            || !self.unfinished.is_empty()
            || !self.unrecorded.is_empty()
            || !self.ledger.leaks().is_empty()
    }

    /// What time brings: pods that ended, waiters that gave up, steps that failed before.
    pub async fn tick(&mut self, now: Moment) {
        self.release_ended(now).await;
        self.prove();
        self.keep(now).await;
        self.give_up(now);
        self.ledger.lapse(now);
        self.advance(now).await;
        self.finish().await;
        if !self.unsaved && !self.unrecorded.is_empty() {
            let leases = std::mem::take(&mut self.unrecorded);
            self.host.recorded(leases).await;
        }
    }

    /// G of each GPU, as it is now.
    pub fn note_generations(&mut self, generations: BTreeMap<GpuUuid, u64>) {
        self.generations = generations;
    }

    /// Accounts for the kept leases as the node stands now; whether they are known.
    async fn keep(&mut self, now: Moment) -> bool {
        let Turn { orphaned, left } = self.host.keep(self.standing()).await;
        let known = orphaned.is_some();
        if let Some(orphaned) = orphaned {
            self.unsaved |= self.ledger.set_kept(orphaned, now);
        }
        for (lease, gpu, bytes) in left {
            info!(%lease, %gpu, bytes = bytes.0, "kept lease ended");
            self.ledger.leak(gpu, bytes, now);
            self.unrecorded.push(lease);
            self.unsaved = true;
        }
        known
    }

    fn standing(&self) -> Node {
        let mut containers = BTreeMap::new();
        for bound in self.of_device() {
            let gpus: BTreeSet<GpuUuid> = match bound.placement {
                Placement::Device(shares) => shares.iter().map(|share| share.gpu.clone()).collect(),
                Placement::Managed(_) => BTreeSet::new(),
            };
            for id in bound.allocations {
                let named = self.holders.get(id).and_then(|holder| holder.pod.as_ref());
                let standing = Standing {
                    pod: bound.pod.clone(),
                    namespace: named.map(|named| named.namespace.clone()),
                    gpus: gpus.clone(),
                };
                containers.insert(*id, standing);
            }
        }
        Node {
            quotas: self.quotas(),
            containers,
            generations: self.generations.clone(),
            free: self.ledger.free().collect(),
        }
    }

    fn of_device(&self) -> impl Iterator<Item = Bound<'_>> {
        let bound = self.ledger.bound();
        bound.filter(|bound| bound.resource == Resource::DeviceMemory)
    }

    /// The quota of each namespace's pods on each GPU, by the bindings.
    fn quotas(&self) -> BTreeMap<String, BTreeMap<GpuUuid, Bytes>> {
        let mut quotas: BTreeMap<&str, BTreeMap<&GpuUuid, Bytes>> = BTreeMap::new();
        for bound in self.of_device() {
            let holders = bound.allocations.iter().map(|id| self.holders.get(id));
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
    pub async fn collect(&mut self, known: Option<&BTreeSet<AllocationId>>, now: Moment) {
        if let Some(known) = known {
            let collected = self.ledger.collect(known, now);
            self.metrics.collected(collected.len());
            for allocation in collected {
                info!(%allocation, "booking without a pod collected");
                self.unsaved = true;
                self.holders.remove(&allocation);
                self.leftovers.insert(allocation);
            }
        }
        let pods: Vec<PodUid> = self.ledger.pods().into_iter().cloned().collect();
        let missing: BTreeSet<_> = pods
            .into_iter()
            .filter(|pod| self.pods.follow(pod) == PodCgroup::Gone)
            .collect();
        for pod in missing.intersection(&std::mem::take(&mut self.missing)) {
            self.release(pod, now).await;
        }
        self.missing = missing;
        self.advance(now).await;
    }

    /// The node's memory now.
    pub fn view(&self, now: Moment) -> View {
        self.ledger.view(now)
    }

    /// The claims that wait, the longest waiting first.
    pub fn waits(&mut self) -> Vec<Wait> {
        self.waits.retain(|claim, _| self.ledger.waits(*claim));
        // The operator would make room that a pod of this namespace does not get.
        let waits = self.waits.iter();
        let waits = waits.filter(|(claim, _)| self.ledger.barred(**claim).is_none());
        let mut waits: Vec<Wait> = waits.map(|(_, wait)| wait.clone()).collect();
        waits.sort_by(|a, b| (a.since, &a.pod).cmp(&(b.since, &b.pod)));
        waits
    }

    /// What the ledger holds of `resource`, in numbers.
    pub fn counts(&self, resource: Resource) -> Counts {
        let of_it = |bound: &Bound<'_>| bound.resource == resource;
        Counts {
            booked: self.ledger.booked(resource),
            bound: self
                .ledger
                .bound()
                .filter(of_it)
                .map(|bound| bound.allocations.len())
                .sum(),
            waiting: self
                .waits
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
        let container = |bound: Bound<'_>, allocation: AllocationId| BoundContainer {
            claim: bound.claim,
            allocation,
            holder: self.holders.get(&allocation).cloned(),
            cgroup: self.pods.folder(bound.pod).map(Into::into),
            pod: bound.pod.clone(),
        };
        let containers = self.of_device().flat_map(|bound| {
            let allocations = bound.allocations.iter();
            allocations.map(move |allocation| container(bound, *allocation))
        });
        containers.collect()
    }

    /// What is wrong.
    pub fn troubles(&self) -> &Troubles {
        &self.troubles
    }

    /// The host, to tell it what it need not ask for.
    pub fn host_mut(&mut self) -> &mut H {
        &mut self.host
    }

    /// Notes whether CDI files can be written.
    pub fn note_cdi(&mut self, trouble: Option<String>) {
        self.troubles.cdi = trouble;
    }

    /// Ends a pod: its cgroup is gone.
    pub(super) async fn release(&mut self, pod: &PodUid, now: Moment) {
        let ended = self.ledger.pod_gone(pod);
        if ended.is_empty() {
            return;
        }
        self.metrics.released();
        info!(%pod, allocations = ended.len(), "released");
        for (_, waiter) in self
            .waiting
            .extract_if(.., |_, waiter| waiter.start.pod == *pod)
        {
            answer(
                waiter.reply,
                Err(NotBound::Failed("the pod has ended".to_owned())),
            );
        }
        self.unsaved = true;
        // Before what its processes had exported is read: from here on its leases are the ledger's.
        let known = self.keep(now).await;
        self.leave(&ended, known, now);
        for allocation in ended {
            self.holders.remove(&allocation);
            self.unfinished.remove(&allocation);
            self.leftovers.insert(allocation);
        }
        if self.save().is_ok() {
            self.withdraw().await;
        }
    }

    /// What others may hold of what these allocations had is not bound again. Kept leases are accounted for where
    /// they are `known`. Answers what was exported.
    fn leave(&mut self, ended: &[AllocationId], known: bool, now: Moment) -> Vec<(GpuUuid, Bytes)> {
        let mut exported = Vec::new();
        for allocation in ended {
            let mut left = self.host.exported(*allocation);
            exported.extend(left.iter().cloned());
            if !known {
                left.extend(self.host.leases(*allocation));
            }
            for (gpu, bytes) in left {
                self.ledger.leak(gpu, bytes, now);
            }
        }
        exported
    }

    /// Charges the container that follows others of its pod for what these had exported, instead of the node. A crash
    /// in between charges it twice, until it is proven free.
    fn bequeath(&mut self, heir: &Binding, exported: Vec<(GpuUuid, Bytes)>) {
        for (gpu, bytes) in exported {
            let inherited = self.host.inherit(heir.allocations[0], &gpu, bytes);
            if inherited > Bytes::ZERO {
                info!(pod = %heir.pod, %gpu, bytes = inherited.0, "inherited");
                self.ledger.charge_leak(&gpu, inherited);
                self.unsaved = true;
            }
        }
    }

    /// Binds again what is proven free.
    fn prove(&mut self) {
        let leaks = self.ledger.leaks();
        for (gpu, held) in self.host.held(leaks.clone()) {
            if let Some(number) = leaks.get(&gpu)
                && self.ledger.held_at_most(&gpu, *number, held)
            {
                info!(%gpu, held = held.0, "left by ended pods");
                self.unsaved = true;
            }
        }
    }

    /// Binds who can be bound, until nobody can.
    async fn advance(&mut self, now: Moment) {
        for binding in self.ledger.advance(now) {
            self.unsaved = true;
            let result = self.carry_out(&binding).await;
            if let Some(waiter) = self.waiting.remove(&binding.claim) {
                answer(waiter.reply, result);
            }
        }
        // Whatever else happened is on record before the next event.
        let _ = self.save();
    }

    /// Ends the waits that are over, or that nobody waits for.
    fn give_up(&mut self, now: Moment) {
        let over =
            |_: &ClaimId, waiter: &mut Waiter| waiter.until <= now || waiter.reply.is_closed();
        let ended: Vec<Waiter> = self
            .waiting
            .extract_if(.., over)
            .map(|(_, waiter)| waiter)
            .collect();
        for Waiter {
            start,
            ticket,
            reply,
            ..
        } in ended
        {
            let reason = self.ledger.reason(ticket.claim, now);
            self.ledger.stop_waiting(ticket, now);
            self.unsaved = true;
            let message = reason.map_or_else(|| "waiting".to_owned(), |reason| reason.to_string());
            info!(pod = %start.pod, reason = message, "no room yet");
            answer(reply, Err(NotBound::NoRoom(message)));
        }
    }

    /// The steps of a binding after the ledger's.
    async fn carry_out(&mut self, binding: &Binding) -> Result<(), NotBound> {
        self.save().map_err(failed)?;
        self.withdraw().await;
        let result = self.make(binding).await;
        match &result {
            Ok(()) => {
                info!(pod = %binding.pod, claim = ?binding.claim, placement = ?binding.placement, "bound");
                self.troubles.host = None;
            }
            Err(error) => {
                warn!(pod = %binding.pod, reason = error.reason(), %error, "bound, and not ready to start");
                self.troubles.host = Some((error.concern(), error.to_string()));
            }
        }
        result.map_err(failed)
    }

    /// What a binding is on the host: of device memory the socket and the CDI file of every
    /// allocation, of managed memory its containers' quotas.
    async fn make(&mut self, binding: &Binding) -> Result<(), HostError> {
        let shares = match &binding.placement {
            Placement::Device(shares) => shares,
            Placement::Managed(_) => return self.allow_managed(&binding.pod),
        };
        self.unfinished.extend(&binding.allocations);
        for &allocation in &binding.allocations {
            // An init container's allocation that had ended may start again.
            self.leftovers.remove(&allocation);
            let gpus = shares
                .iter()
                .map(|share| {
                    let nodes = self.nodes_of(&share.gpu)?;
                    let quota = share.quanta.bytes(self.config.quantum);
                    Ok(cdi::BoundGpu {
                        uuid: share.gpu.clone(),
                        quota,
                        nodes,
                    })
                })
                .collect::<Result<_, HostError>>()?;
            let device = cdi::Binding {
                allocation,
                pod: binding.pod.clone(),
                container: self
                    .holders
                    .get(&allocation)
                    .map(|holder| holder.container.clone())
                    .unwrap_or_default(),
                tokens: binding.tokens.clone(),
                gpus,
            };
            let managed = self.managed_of(&binding.pod, allocation);
            self.host.expose(&device, managed).await?;
            self.host.describe(&device).await?;
            self.unfinished.remove(&allocation);
        }
        Ok(())
    }

    /// Tells every container of a pod what managed memory it may use. One without device memory has no
    /// GPU to use managed memory from.
    fn allow_managed(&mut self, pod: &PodUid) -> Result<(), HostError> {
        let exposed: Vec<AllocationId> = self
            .of_device()
            .filter(|bound| bound.pod == pod)
            .flat_map(|bound| bound.allocations.iter().copied())
            .collect();
        for allocation in exposed {
            let managed = self.managed_of(pod, allocation);
            self.host.allow_managed(allocation, managed)?;
        }
        Ok(())
    }

    /// The managed memory that is bound for the container of `pod` that has `allocation`.
    pub(super) fn managed_of(&self, pod: &PodUid, allocation: AllocationId) -> Bytes {
        let container = |id: &AllocationId| self.holders.get(id).map(|holder| &holder.container);
        let quanta = self
            .ledger
            .bound()
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
    fn drained(&self, binding: &Binding) -> Option<GpuUuid> {
        let Placement::Device(shares) = &binding.placement else {
            return None;
        };
        let is_drained = |state: &&GpuState| {
            let why = state.health;
            matches!(
                why,
                Health::Unhealthy(Sickness::Draining | Sickness::Drained)
            )
        };
        let mut drained = self.gpus.iter().filter(is_drained);
        let bound = |state: &&GpuState| shares.iter().any(|share| share.gpu == state.gpu.uuid);
        drained.find(bound).map(|state| state.gpu.uuid.clone())
    }

    fn nodes_of(&self, uuid: &GpuUuid) -> Result<Vec<String>, HostError> {
        let state = self.gpus.iter().find(|state| state.gpu.uuid == *uuid);
        let gpu = &state.ok_or_else(|| HostError::NoGpu(uuid.clone()))?.gpu;
        let capability = |number: &u32| format!("nvidia-caps/nvidia-cap{number}");
        let nodes = [format!("nvidia{}", gpu.minor)].into_iter();
        Ok(nodes
            .chain(gpu.capabilities.iter().map(capability))
            .collect())
    }

    /// Tries again what failed before.
    async fn finish(&mut self) {
        if self.save().is_err() {
            return;
        }
        self.withdraw().await;
        if self.unfinished.is_empty() {
            if self.leftovers.is_empty() {
                self.troubles.host = None;
            }
            return;
        }
        let unfinished = |binding: &Binding| {
            binding
                .allocations
                .iter()
                .any(|id| self.unfinished.contains(id))
        };
        let bindings: Vec<Binding> = self.ledger.bindings().filter(unfinished).collect();
        for binding in bindings {
            match self.make(&binding).await {
                Ok(()) => self.troubles.host = None,
                // A GPU that is away takes nothing from the others.
                Err(HostError::NoGpu(_)) => {}
                Err(error) => self.troubles.host = Some((error.concern(), error.to_string())),
            }
        }
        if self.leftovers.is_empty() && self.unfinished.is_empty() {
            self.troubles.host = None;
        }
    }

    /// Takes down what has ended; what fails is tried again at the next tick.
    pub(super) async fn withdraw(&mut self) {
        for allocation in self.leftovers.clone() {
            match self.host.withdraw(allocation).await {
                Ok(()) => {
                    self.leftovers.remove(&allocation);
                    self.unfinished.remove(&allocation);
                }
                Err(error) => self.troubles.host = Some((error.concern(), error.to_string())),
            }
        }
    }

    /// Brings the checkpoint up to date.
    pub(super) fn save(&mut self) -> Result<(), HostError> {
        if !self.unsaved {
            return Ok(());
        }
        self.stirred = true;
        let state = State {
            boot: self.boot.clone(),
            ledger: self.ledger.snapshot(),
            holders: self.holders.clone(),
        };
        let result = self.host.persist(&state);
        let trouble = result.as_ref().err().map(ToString::to_string);
        if trouble.is_some() && trouble != self.troubles.checkpoint {
            warn!(error = trouble, "checkpoint not written");
        }
        self.troubles.checkpoint = trouble;
        self.unsaved = result.is_err();
        result
    }

    pub(super) fn follow(&mut self, pod: &PodUid) {
        if !matches!(self.pods.follow(pod), PodCgroup::At(_)) {
            warn!(%pod, "the pod's cgroup is not found: its end cannot be seen yet");
        }
    }

    pub(super) fn name(
        &mut self,
        pod: &PodUid,
        name: Option<PodName>,
        container: &str,
        held: &[Held],
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
            let holder = self.holders.entry(id).or_insert_with(|| Holder {
                container: told.unwrap_or(container).to_owned(),
                pod: None,
            });
            holder.pod = name.clone().or(holder.pod.take());
        }
    }
}

fn failed(error: HostError) -> NotBound {
    NotBound::Failed(error.to_string())
}

/// Who asked may have stopped waiting: then nobody needs the answer.
fn answer(reply: Reply, result: Result<(), NotBound>) {
    let _ = reply.send(result);
}

#[cfg(test)]
mod tests;
