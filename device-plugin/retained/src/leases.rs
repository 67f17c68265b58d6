//! Decides what becomes of the node's leases: a state machine without I/O.
//!
//! ```text
//!           begin_create          finish_create           commit
//! (charged) -----------> Creating ------------> Writing -----------> Committed
//!                           |                      |                     |  discarded while other
//!                           |      its image ended |                     |  pods have it open
//!                           |    another took over |                     v
//!                    failed |                      |                 Discarded (no open finds it)
//!                           v                      v                     |
//!                     ReleasePending <-------------+---------------------+
//!                           |           discarded, its last opener's pod ended, its GPU lost it
//!                           |
//!                           |  the owner, or the node, is charged as for orphaned exports
//!                           v
//!                       Releasing --- the fd store closed the descriptor ---> (forgotten)
//! ```
//!
//! The fd store is the source of truth: a blob beside each descriptor describes the lease, and
//! [`LeaseTable::resync`] replaces the table by what the fd store lists. The agent therefore
//! answers a tenant only after the fd store has acknowledged the change. The next agent completes
//! what this agent did not.
//!
//! From `ReleasePending` on the bytes of a lease are unreclaimed, like orphaned exports: the node
//! binds them again once the driver's figures prove them free. Functions return [`Effect`]s for the
//! service to carry out.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bursar_ledger::BootTime;
use bursar_ledger::units::{AllocationId, Bytes, GpuUuid, LeaseId, PodUid};
use bursar_protocol::messages::retained::{Key, RetainedRefusal};
use bursar_sessions::Process;
use bursar_sessions::lease_handle::{
    Caller, ChargedLeases, ContainerBinding, LedgerUpdate, NodeView,
};
use serde::{Deserialize, Serialize};

/// How many leases one container may own.
pub(crate) const MAX_OWNED: usize = 64;

/// How many pods may have one lease open. The blob names each of them.
pub(crate) const MAX_OPENERS: usize = 64;

/// How long a write token is valid. The writer renews it when it opens the lease again.
pub(crate) const WRITE_TOKEN_LIFETIME: Duration = Duration::from_secs(15 * 60);

/// Serializes a key as 64 hex digits, because blobs occupy the fd store's memory. Older agents
/// wrote a list of numbers.
mod hex {
    use std::fmt::Write as _;

    use bursar_protocol::messages::retained::Key;
    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(key: &Key, serializer: S) -> Result<S::Ok, S::Error> {
        let mut text = String::with_capacity(2 * key.len());
        for byte in key {
            // Writing to a `String` cannot fail.
            let _ = write!(text, "{byte:02x}");
        }
        serializer.serialize_str(&text)
    }

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        Text(String),
        Numbers(Key),
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Key, D::Error> {
        match Written::deserialize(from)? {
            Written::Numbers(key) => Ok(key),
            Written::Text(text) => parse(&text).ok_or_else(|| D::Error::custom("no key")),
        }
    }

    fn parse(text: &str) -> Option<Key> {
        let mut key = Key::default();
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        if pairs.len() != key.len() || !rest.is_empty() {
            return None;
        }
        for (byte, pair) in key.iter_mut().zip(pairs) {
            let pair = str::from_utf8(pair).ok()?;
            // `from_str_radix` accepts a sign as well.
            let digits = pair.bytes().all(|digit| digit.is_ascii_hexdigit());
            *byte = u8::from_str_radix(pair, 16).ok().filter(|_| digits)?;
        }
        Some(key)
    }
}

/// The key of a lease.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct LeaseKey {
    /// The namespace whose pods share the lease.
    pub namespace: String,
    /// The lease's name in its namespace.
    pub name: String,
    /// A digest that identifies the content.
    #[serde(with = "hex")]
    pub key: Key,
    /// The GPU that has the memory.
    pub gpu: GpuUuid,
}

/// The description of a lease: the blob beside its descriptor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct LeaseRecord {
    /// The lease's key.
    pub title: LeaseKey,
    /// The size.
    pub bytes: Bytes,
    /// The GPU's generation when the memory was created; in any other generation the memory is
    /// lost. The count starts again when its file is lost.
    pub gpu_generation: u64,
    /// The container that is charged: the creator, and after it another container of its pod with
    /// the same GPU.
    pub owner: AllocationId,
    /// The owner's pod.
    pub pod: PodUid,
    /// The pods that opened the lease and did not discard it. The lease lives as long as one of
    /// them.
    pub(crate) openers: BTreeSet<PodUid>,
    /// What the memory holds.
    pub content: Content,
}

impl LeaseRecord {
    /// Whether a pod other than the owner's has the lease open.
    fn is_shared(&self) -> bool {
        self.openers.iter().any(|opener| *opener != self.pod)
    }
}

/// What the memory of a lease holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Content {
    /// A process is writing it.
    Writing(Writer),
    /// A writer has committed it.
    Committed {
        /// The write token of the commit; a repeated commit with this token succeeds.
        token: u64,
        /// The checksum of all bytes.
        checksum: u64,
    },
    /// A pod discarded the lease while other pods may have it mapped.
    Discarded,
}

/// The writer of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Writer {
    /// The process.
    pub process: Process,
    /// The process image.
    pub image: u64,
    /// The write token.
    pub token: u64,
    /// When the token expires.
    pub until: BootTime,
}

/// A request to open a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OpenRequest {
    /// The GPU.
    pub gpu: GpuUuid,
    /// The lease's name.
    pub name: String,
    /// A digest that identifies the content.
    pub key: Key,
    /// The size of a new lease; zero opens existing leases only.
    pub bytes: Bytes,
    /// The process image that asks.
    pub image: u64,
    /// The write token for this open: a random number.
    pub token: u64,
}

/// The outcome of an open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opened {
    /// The lease is committed; the process may read it.
    Read(LeaseId),
    /// The process was writing the lease and may go on.
    Write(LeaseId),
    /// The caller creates the lease: charge its owner, then call
    /// [`begin_create`](LeaseTable::begin_create).
    Create(Box<LeaseRecord>),
}

/// A side effect for the service to carry out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Charge the owner for the bytes as orphaned exports, then call
    /// [`confirm_charged`](LeaseTable::confirm_charged). The table repeats the effect while the
    /// owner has no session.
    Charge(LeaseId, AllocationId),
    /// Replace the lease's blob in the fd store.
    Update(LeaseId, Box<LeaseRecord>),
    /// Close the lease's descriptor in the fd store, then call
    /// [`confirm_dropped`](LeaseTable::confirm_dropped).
    Drop(LeaseId),
}

/// The container that takes over a lease whose owner has ended.
fn new_owner(node: &NodeView, record: &LeaseRecord) -> Option<AllocationId> {
    if node.containers.contains_key(&record.owner) {
        return None;
    }
    let mut containers = node.containers.iter();
    let new_owner = containers.find(|(_, container)| {
        container.pod == record.pod && container.gpus.contains(&record.title.gpu)
    });
    new_owner.map(|(allocation, _)| *allocation)
}

/// How far a lease is on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The provisioner and the fd store have not both answered.
    Creating,
    /// The fd store has the lease.
    Live,
    /// The bytes are to be charged as orphaned exports.
    ReleasePending,
    /// The node's ledger has got the bytes to charge.
    ReleaseReported,
    /// The bytes are charged; the fd store is to close the descriptor.
    Releasing,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Lease {
    record: LeaseRecord,
    stage: Stage,
    /// Whether the owner or the node is charged. For leases of an earlier agent this is unknown
    /// until the first [`reconcile`](LeaseTable::reconcile).
    is_charged: bool,
    /// Whether the node's ledger counts the lease as one without an owner.
    is_orphaned: bool,
}

/// The blob of a lease, as this agent reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StoredRecord {
    /// The lease's description.
    Read(LeaseRecord),
    /// Another version of the agent wrote a blob that this agent cannot read.
    Unreadable {
        /// The lease's GPU and size, where those can be read.
        extent: Option<(GpuUuid, Bytes)>,
        /// The parser's error.
        why: String,
    },
}

/// The node's leases.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LeaseTable {
    leases: BTreeMap<LeaseId, Lease>,
    /// Leases that only another version of the agent can read. The fd store has them, and they stay
    /// charged.
    unreadable: BTreeMap<LeaseId, Option<(GpuUuid, Bytes)>>,
    node: NodeView,
    /// GPUs on which no lease may exist.
    drained: BTreeSet<GpuUuid>,
    /// Whether the fd store is connected and has listed its leases.
    store_connected: bool,
    /// How many leases the fd store can have; none before it said so.
    capacity: Option<usize>,
}

impl LeaseTable {
    /// Whether the fd store is connected and has listed its leases.
    pub(crate) fn is_store_connected(&self) -> bool {
        self.store_connected
    }

    /// Whether a container is bound.
    pub(crate) fn is_bound(&self, allocation: &AllocationId) -> bool {
        self.node.containers.contains_key(allocation)
    }

    /// The namespace of a bound container, if the agent knows it.
    pub(crate) fn namespace(&self, allocation: &AllocationId) -> Option<&str> {
        let binding = self.node.containers.get(allocation)?;
        binding.namespace.as_deref()
    }

    pub(crate) fn generation(&self, gpu: &GpuUuid) -> Option<u64> {
        self.node.generations.get(gpu).copied()
    }

    /// How much of a GPU is bound to no pod.
    pub(crate) fn free(&self, gpu: &GpuUuid) -> Bytes {
        self.node.free.get(gpu).copied().unwrap_or_default()
    }

    /// Whether a process may use a lease: its pod has the lease open, and before the commit the
    /// process is the writer.
    pub(crate) fn is_open(&self, caller: Caller, id: LeaseId, gpu: &GpuUuid) -> bool {
        let pod = self.node.containers.get(&caller.allocation);
        self.get(id).zip(pod).is_some_and(|(record, binding)| {
            let may_use = match &record.content {
                Content::Committed { .. } => true,
                Content::Writing(writer) => writer.process == caller.process,
                Content::Discarded => false,
            };
            may_use && record.title.gpu == *gpu && record.openers.contains(&binding.pod)
        })
    }

    /// Opens a lease for `caller`.
    ///
    /// # Errors
    /// The refusal for the tenant.
    pub(crate) fn open(
        &mut self,
        caller: Caller,
        open: OpenRequest,
        now: BootTime,
    ) -> (Result<Opened, RetainedRefusal>, Vec<Effect>) {
        let mut effects = Vec::new();
        let Some((pod, namespace)) = self
            .pod_and_namespace(caller)
            .filter(|_| self.store_connected)
        else {
            return (Err(RetainedRefusal::Unavailable), effects);
        };
        let title = LeaseKey {
            namespace,
            name: open.name,
            key: open.key,
            gpu: open.gpu,
        };
        let writer = Writer {
            process: caller.process,
            image: open.image,
            token: open.token,
            until: now + WRITE_TOKEN_LIFETIME,
        };
        self.release_writers(
            |other| other.process == writer.process && other.image != writer.image,
            &mut effects,
        );
        let shareable = self.shareable_bytes(&title);
        if let Some((id, found)) = self.find(&title) {
            match &mut found.record.content {
                Content::Committed { .. } => {
                    if !found.record.openers.contains(&pod) {
                        if found.record.openers.len() >= MAX_OPENERS {
                            return (Err(RetainedRefusal::TooMany), effects);
                        }
                        if !found.record.is_shared()
                            && found.record.pod != pod
                            && found.record.bytes > shareable
                        {
                            let Bytes(free) = shareable;
                            return (Err(RetainedRefusal::Quota { free }), effects);
                        }
                        found.record.openers.insert(pod);
                        effects.push(Effect::Update(id, Box::new(found.record.clone())));
                    }
                    return (Ok(Opened::Read(id)), effects);
                }
                Content::Writing(current) => {
                    // An open with size zero does not take the write token from another thread of
                    // the process.
                    let is_again = (current.process, current.image)
                        == (writer.process, writer.image)
                        && found.stage == Stage::Live
                        && found.record.owner == caller.allocation
                        && open.bytes != Bytes::ZERO;
                    if is_again && open.bytes <= found.record.bytes {
                        *current = writer;
                        effects.push(Effect::Update(id, Box::new(found.record.clone())));
                        return (Ok(Opened::Write(id)), effects);
                    }
                    if !is_again && (now < current.until || found.stage == Stage::Creating) {
                        return (Err(RetainedRefusal::Writing), effects);
                    }
                    self.release(id, &mut effects);
                }
                // `find` returns no discarded lease.
                Content::Discarded => {}
            }
        }
        if open.bytes == Bytes::ZERO {
            return (Err(RetainedRefusal::Missing), effects);
        }
        let owned = self.leases.values().filter(|lease| {
            lease.record.owner == caller.allocation
                && matches!(lease.stage, Stage::Creating | Stage::Live)
        });
        if owned.count() >= MAX_OWNED || !self.is_within_share(&title.namespace) {
            return (Err(RetainedRefusal::TooMany), effects);
        }
        // Without the GPU's generation the agent could not tell later whether the memory was lost.
        let generations = &self.node.generations;
        let generation = generations.get(&title.gpu);
        let Some(generation) = generation.filter(|_| !self.drained.contains(&title.gpu)) else {
            return (Err(RetainedRefusal::Unavailable), effects);
        };
        let record = LeaseRecord {
            gpu_generation: *generation,
            title,
            bytes: open.bytes,
            owner: caller.allocation,
            openers: BTreeSet::from([pod.clone()]),
            pod,
            content: Content::Writing(writer),
        };
        (Ok(Opened::Create(Box::new(record))), effects)
    }

    /// Records that a lease is being created; its owner is charged for it.
    pub(crate) fn begin_create(&mut self, id: LeaseId, record: LeaseRecord) {
        let lease = Lease {
            record,
            stage: Stage::Creating,
            is_charged: true,
            is_orphaned: false,
        };
        self.leases.insert(id, lease);
    }

    /// Records that the fd store has a new lease; returns its description if the writer still gets
    /// it.
    pub(crate) fn finish_create(&mut self, id: LeaseId) -> (Option<&LeaseRecord>, Vec<Effect>) {
        let mut effects = Vec::new();
        match self.leases.get_mut(&id) {
            Some(lease) if lease.stage == Stage::Creating => lease.stage = Stage::Live,
            _ => {}
        }
        // The writer may have ended during the creation.
        let ended = self.get(id).is_some_and(|record| {
            !matches!(record.content, Content::Writing(_)) || record.openers.is_empty()
        });
        if ended {
            self.release(id, &mut effects);
        }
        (self.get(id), effects)
    }

    /// The description of a lease that is being created.
    #[cfg(test)]
    pub(crate) fn creating(&self, id: LeaseId) -> Option<&LeaseRecord> {
        let lease = self.leases.get(&id)?;
        (lease.stage == Stage::Creating).then_some(&lease.record)
    }

    /// Forgets a lease whose memory does not exist; returns the owner, whose charge ends.
    pub(crate) fn abort_create(&mut self, id: LeaseId) -> Option<AllocationId> {
        self.leases.remove(&id).map(|lease| lease.record.owner)
    }

    /// Releases a lease of which it is not known whether its memory exists.
    pub(crate) fn release_uncertain(&mut self, id: LeaseId) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.release(id, &mut effects);
        effects
    }

    /// The description of a lease that the fd store has.
    pub(crate) fn get(&self, id: LeaseId) -> Option<&LeaseRecord> {
        let lease = self.leases.get(&id)?;
        (lease.stage == Stage::Live).then_some(&lease.record)
    }

    /// Commits a lease. The service answers the tenant after the fd store has acknowledged the
    /// effect.
    ///
    /// # Errors
    /// The refusal for the tenant.
    pub(crate) fn commit(
        &mut self,
        caller: Caller,
        id: LeaseId,
        token: u64,
        checksum: u64,
        now: BootTime,
    ) -> Result<Vec<Effect>, RetainedRefusal> {
        let (_, namespace) = self
            .pod_and_namespace(caller)
            .ok_or(RetainedRefusal::Unavailable)?;
        if !self.store_connected {
            return Err(RetainedRefusal::Unavailable);
        }
        let lease = self.leases.get_mut(&id);
        let lease = lease.filter(|lease| lease.record.title.namespace == namespace);
        let record = match lease {
            Some(lease) if lease.stage == Stage::Live => &mut lease.record,
            _ => return Err(RetainedRefusal::Missing),
        };
        let after = Content::Committed { token, checksum };
        match &record.content {
            same if *same == after => {}
            Content::Writing(writer)
                if (writer.process, writer.token) == (caller.process, token)
                    && now < writer.until => {}
            _ => return Err(RetainedRefusal::Fenced),
        }
        record.content = after;
        // A repeated commit also waits until the fd store has acknowledged the record.
        Ok(vec![Effect::Update(id, Box::new(record.clone()))])
    }

    /// Discards a lease for the pod of `caller`. Before the commit only the writer may do so.
    ///
    /// # Errors
    /// The refusal for the tenant.
    pub(crate) fn discard(
        &mut self,
        caller: Caller,
        id: LeaseId,
    ) -> Result<Vec<Effect>, RetainedRefusal> {
        let (pod, _) = self
            .pod_and_namespace(caller)
            .ok_or(RetainedRefusal::Unavailable)?;
        if !self.store_connected {
            return Err(RetainedRefusal::Unavailable);
        }
        let lease = self.leases.get_mut(&id);
        let lease = lease
            .filter(|lease| lease.stage == Stage::Live && lease.record.openers.contains(&pod))
            .ok_or(RetainedRefusal::Missing)?;
        if let Content::Writing(writer) = &lease.record.content
            && writer.process != caller.process
        {
            return Err(RetainedRefusal::Fenced);
        }
        let mut effects = Vec::new();
        if lease.record.openers.iter().any(|opener| *opener != pod) {
            lease.record.content = Content::Discarded;
            lease.record.openers.remove(&pod);
            effects.push(Effect::Update(id, Box::new(lease.record.clone())));
        } else {
            self.release(id, &mut effects);
        }
        Ok(effects)
    }

    /// Releases what a process image was writing: the image ended, or its session did.
    pub(crate) fn process_ended(&mut self, process: Process) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.release_writers(|writer| writer.process == process, &mut effects);
        effects
    }

    /// Releases what writers with an expired token were writing.
    pub(crate) fn expire_writers(&mut self, now: BootTime) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.release_writers(|writer| writer.until <= now, &mut effects);
        effects
    }

    /// The processes that are writing.
    pub(crate) fn writers(&self) -> BTreeSet<Process> {
        let leases = self.leases.values();
        leases
            .filter(|lease| matches!(lease.stage, Stage::Creating | Stage::Live))
            .filter_map(|lease| match &lease.record.content {
                Content::Writing(writer) => Some(writer.process),
                Content::Committed { .. } | Content::Discarded => None,
            })
            .collect()
    }

    /// Refuses new leases on these GPUs; the next [`reconcile`](Self::reconcile) releases the
    /// existing ones.
    pub(crate) fn drain(&mut self, gpus: BTreeSet<GpuUuid>) {
        self.drained = gpus;
    }

    /// Whether the fd store may have a lease of a GPU.
    pub(crate) fn has_leases_on(&self, gpu: &GpuUuid) -> bool {
        let mut leases = self.leases.values();
        leases.any(|lease| lease.record.title.gpu == *gpu)
            || self.unreadable.values().flatten().any(|(at, _)| at == gpu)
    }

    /// The number of leases that are charged to nobody, because their GPU and size are unreadable.
    pub(crate) fn uncharged(&self) -> usize {
        let unreadable = self.unreadable.values();
        unreadable.filter(|extent| extent.is_none()).count()
    }

    /// Whether the fd store has a lease that this agent cannot read.
    pub(crate) fn is_unreadable(&self, id: LeaseId) -> bool {
        self.unreadable.contains_key(&id)
    }

    /// Takes the node's new state: releases leases whose last opener has ended, and reports leases
    /// without an owner. `charged` are the charges of the containers.
    pub(crate) fn reconcile(
        &mut self,
        node: NodeView,
        charged: &ChargedLeases,
    ) -> (LedgerUpdate, Vec<Effect>) {
        self.node = node;
        let mut effects = Vec::new();
        let pods: BTreeSet<PodUid> = self
            .node
            .containers
            .values()
            .map(|container| container.pod.clone())
            .collect();
        for (id, lease) in &mut self.leases {
            lease.record.openers.retain(|opener| pods.contains(opener));
            if lease.stage == Stage::Live
                && let Some(new_owner) = new_owner(&self.node, &lease.record)
            {
                lease.record.owner = new_owner;
                // The next container of a pod starts before the previous one is removed, or a
                // moment after; the pod keeps the lease open.
                if lease.record.content != Content::Discarded {
                    lease.record.openers.insert(lease.record.pod.clone());
                }
                effects.push(Effect::Update(*id, Box::new(lease.record.clone())));
            }
            let gpu = &lease.record.title.gpu;
            let generation = self.node.generations.get(gpu);
            let is_lost = self.drained.contains(gpu)
                || generation.is_some_and(|generation| *generation != lease.record.gpu_generation);
            if lease.stage == Stage::Live && (lease.record.openers.is_empty() || is_lost) {
                lease.stage = Stage::ReleasePending;
            }
        }
        let mut update = LedgerUpdate::default();
        let mut orphaned = BTreeMap::<GpuUuid, BTreeMap<LeaseId, Bytes>>::new();
        for (id, lease) in &mut self.leases {
            let LeaseRecord {
                title,
                bytes,
                owner,
                ..
            } = &lease.record;
            match (lease.stage, self.node.containers.contains_key(owner)) {
                (Stage::ReleasePending, true) => effects.push(Effect::Charge(*id, *owner)),
                (Stage::ReleasePending, false) => {
                    // The ledger turns the bytes of a lease that it counted as orphaned into
                    // unreclaimed bytes itself.
                    let left = if lease.is_orphaned {
                        Bytes::ZERO
                    } else {
                        *bytes
                    };
                    update.unreclaimed.push((*id, title.gpu.clone(), left));
                    lease.stage = Stage::ReleaseReported;
                }
                (Stage::Creating | Stage::Live, false) => {
                    // While the fd store is away the ledger gets no list.
                    lease.is_charged = self.store_connected;
                    lease.is_orphaned = self.store_connected;
                    let of_gpu = orphaned.entry(title.gpu.clone()).or_default();
                    of_gpu.insert(*id, *bytes);
                }
                (Stage::Creating | Stage::Live, true) => {
                    let its = charged.get(owner);
                    lease.is_charged = its.is_some_and(|leases| leases.contains_key(id));
                    lease.is_orphaned = false;
                }
                (Stage::ReleaseReported | Stage::Releasing, _) => {}
            }
        }
        for (id, extent) in &self.unreadable {
            let Some((gpu, bytes)) = extent else { continue };
            if self.drained.contains(gpu) {
                effects.push(Effect::Drop(*id));
            }
            let is_charged = |leases: &BTreeMap<_, _>| leases.contains_key(id);
            if !charged.values().any(is_charged) {
                let of_gpu = orphaned.entry(gpu.clone()).or_default();
                of_gpu.insert(*id, *bytes);
            }
        }
        update.orphaned = self.store_connected.then_some(orphaned);
        (update, effects)
    }

    /// Confirms that a lease's bytes are charged as orphaned exports; its descriptor may be closed.
    pub(crate) fn confirm_charged(&mut self, id: LeaseId) -> Option<Effect> {
        let lease = self.leases.get_mut(&id)?;
        let is_due = matches!(lease.stage, Stage::ReleasePending | Stage::ReleaseReported);
        lease.stage = if is_due {
            Stage::Releasing
        } else {
            lease.stage
        };
        (is_due && self.store_connected).then_some(Effect::Drop(id))
    }

    /// Confirms that the fd store has closed a lease's descriptor.
    pub(crate) fn confirm_dropped(&mut self, id: LeaseId) {
        self.unreadable.remove(&id);
        if self.leases.get(&id).map(|lease| lease.stage) == Some(Stage::Releasing) {
            self.leases.remove(&id);
        }
    }

    /// Sets how many leases the fd store can have in all.
    pub(crate) fn set_capacity(&mut self, most: usize) {
        self.capacity = Some(most);
    }

    /// Records that the connection to the fd store is lost: which descriptors exist is unknown.
    pub(crate) fn store_disconnected(&mut self) {
        self.store_connected = false;
    }

    /// Replaces the table by what the fd store lists. Leases that it does not list are lost with
    /// their memory. Writers that are not alive by `is_alive` lose their leases.
    pub(crate) fn resync(
        &mut self,
        stored: BTreeMap<LeaseId, StoredRecord>,
        is_alive: impl Fn(Process) -> bool,
    ) -> Vec<Effect> {
        self.store_connected = true;
        self.unreadable.clear();
        let mut effects = Vec::new();
        let known: Vec<LeaseId> = self.leases.keys().copied().collect();
        for id in known {
            let stage = self.leases.get(&id).map(|lease| lease.stage);
            match stage {
                Some(Stage::Live) if !stored.contains_key(&id) => self.release(id, &mut effects),
                Some(Stage::Releasing) if !stored.contains_key(&id) => {
                    drop(self.leases.remove(&id))
                }
                _ => {}
            }
        }
        for (id, stored_record) in stored {
            match (self.leases.get_mut(&id), stored_record) {
                (Some(lease), _) if lease.stage == Stage::Releasing => {
                    effects.push(Effect::Drop(id))
                }
                (Some(lease), StoredRecord::Read(record)) if lease.stage == Stage::Live => {
                    lease.record = record
                }
                (Some(_), _) => {}
                (None, StoredRecord::Read(record)) => {
                    let lease = Lease {
                        record,
                        stage: Stage::Live,
                        is_charged: false,
                        is_orphaned: false,
                    };
                    self.leases.insert(id, lease);
                }
                (None, StoredRecord::Unreadable { extent, why: _ }) => {
                    self.unreadable.insert(id, extent);
                }
            }
        }
        self.release_replaced(&mut effects);
        self.release_writers(|writer| !is_alive(writer.process), &mut effects);
        effects
    }

    /// The leases that the fd store has and an account is charged for. Empty while the fd store is
    /// away, because it may have closed their descriptors.
    pub(crate) fn live_leases(&self) -> BTreeMap<GpuUuid, BTreeMap<LeaseId, Bytes>> {
        let mut live: BTreeMap<GpuUuid, BTreeMap<LeaseId, Bytes>> = BTreeMap::new();
        if self.store_connected {
            for (id, lease) in &self.leases {
                if lease.stage == Stage::Live && lease.is_charged {
                    let of_gpu = live.entry(lease.record.title.gpu.clone()).or_default();
                    of_gpu.insert(*id, lease.record.bytes);
                }
            }
            for (id, extent) in &self.unreadable {
                if let Some((gpu, bytes)) = extent {
                    live.entry(gpu.clone()).or_default().insert(*id, *bytes);
                }
            }
        }
        live
    }

    /// The container that is charged for a lease, until the lease is charged as orphaned exports.
    pub(crate) fn owner(&self, id: LeaseId) -> Option<AllocationId> {
        let lease = self.leases.get(&id)?;
        let is_one = !matches!(lease.stage, Stage::ReleaseReported | Stage::Releasing);
        is_one.then_some(lease.record.owner)
    }

    /// The GPU and the size of a lease.
    pub(crate) fn extent(&self, id: LeaseId) -> Option<(GpuUuid, Bytes)> {
        if let Some(extent) = self.unreadable.get(&id) {
            return extent.clone();
        }
        let LeaseRecord { title, bytes, .. } = &self.leases.get(&id)?.record;
        Some((title.gpu.clone(), *bytes))
    }

    /// The node's GPUs.
    pub(crate) fn gpus(&self) -> impl Iterator<Item = &GpuUuid> {
        self.node.generations.keys()
    }

    /// The owner, GPU and size of each usable lease.
    pub(crate) fn lease_owners(&self) -> BTreeMap<LeaseId, (AllocationId, GpuUuid, Bytes)> {
        let leases = self.leases.iter();
        leases
            .filter(|(_, lease)| matches!(lease.stage, Stage::Creating | Stage::Live))
            .map(|(id, lease)| {
                let LeaseRecord { owner, bytes, .. } = lease.record;
                (*id, (owner, lease.record.title.gpu.clone(), bytes))
            })
            .collect()
    }

    /// The pod and the namespace of a caller whose container is bound.
    fn pod_and_namespace(&self, caller: Caller) -> Option<(PodUid, String)> {
        let ContainerBinding { pod, namespace, .. } =
            self.node.containers.get(&caller.allocation)?;
        Some((pod.clone(), namespace.clone()?))
    }

    /// How many bytes of the namespace's leases further pods that do not own them may open. After
    /// its owner's end such a lease counts against no pod's quota; the namespace's quotas therefore
    /// bound the sum of these leases.
    fn shareable_bytes(&self, title: &LeaseKey) -> Bytes {
        let quotas = self.node.quotas.get(&title.namespace);
        let quota = quotas.and_then(|quotas| quotas.get(&title.gpu));
        let shared = self.leases.values().filter(|lease| {
            let its = &lease.record.title;
            lease.stage == Stage::Live
                && lease.record.is_shared()
                && (&its.namespace, &its.gpu) == (&title.namespace, &title.gpu)
        });
        let shared = shared.fold(0_u64, |sum, lease| sum.saturating_add(lease.record.bytes.0));
        Bytes(quota.map_or(0, |quota| quota.0.saturating_sub(shared)))
    }

    /// Whether a namespace may have one more lease: a namespace leaves as many free places as it
    /// occupies. Leases on their way out count, because the fd store still has them.
    fn is_within_share(&self, namespace: &str) -> bool {
        let Some(most) = self.capacity else {
            return true;
        };
        let leases = self.leases.values();
        let its = leases.filter(|lease| lease.record.title.namespace == namespace);
        its.count() < most.saturating_sub(self.leases.len())
    }

    fn find(&mut self, title: &LeaseKey) -> Option<(LeaseId, &mut Lease)> {
        let mut leases = self.leases.iter_mut();
        let found = leases.find(|(_, lease)| {
            lease.record.title == *title
                && matches!(lease.stage, Stage::Creating | Stage::Live)
                && lease.record.content != Content::Discarded
        });
        found.map(|(id, lease)| (*id, lease))
    }

    /// Releases all but the newest lease of each key: an earlier agent gave the older ones up and
    /// exited before the fd store closed them.
    fn release_replaced(&mut self, effects: &mut Vec<Effect>) {
        let found = self.leases.iter().filter(|(_, lease)| {
            matches!(lease.stage, Stage::Creating | Stage::Live)
                && lease.record.content != Content::Discarded
        });
        let mut newest = BTreeMap::new();
        // Ids ascend, so the last insert is the newest.
        let replaced: Vec<LeaseId> = found
            .filter_map(|(id, lease)| newest.insert(&lease.record.title, *id))
            .collect();
        for id in replaced {
            self.release(id, effects);
        }
    }

    fn release_writers(&mut self, is_over: impl Fn(&Writer) -> bool, effects: &mut Vec<Effect>) {
        let over: Vec<LeaseId> = self
            .leases
            .iter()
            .filter(
                |(_, lease)| matches!(&lease.record.content, Content::Writing(writer) if is_over(writer)),
            )
            .map(|(id, _)| *id)
            .collect();
        for id in over {
            match self.leases.get_mut(&id) {
                // The task that creates the lease finds it discarded and releases it.
                Some(lease) if lease.stage == Stage::Creating => {
                    lease.record.content = Content::Discarded;
                }
                _ => self.release(id, effects),
            }
        }
    }

    /// Ends a lease: no open finds it, and its bytes become unreclaimed.
    fn release(&mut self, id: LeaseId, effects: &mut Vec<Effect>) {
        let Some(lease) = self.leases.get_mut(&id) else {
            return;
        };
        if matches!(lease.stage, Stage::Creating | Stage::Live) {
            lease.stage = Stage::ReleasePending;
            let owner = lease.record.owner;
            if self.node.containers.contains_key(&owner) {
                effects.push(Effect::Charge(id, owner));
            }
        }
    }
}

#[cfg(test)]
mod generations;
#[cfg(test)]
mod history;
#[cfg(test)]
mod tests;
