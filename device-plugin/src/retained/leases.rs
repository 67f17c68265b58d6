//! The book of the node's kept leases: pure.
//!
//! ```text
//!            begin            made              commit
//!   (charged) ----> Making ---------> Writing -----------> Committed
//!                     |                  |  its image ended,    |  discarded while other pods have it open
//!                     | failed           |  another took over   v
//!                     |                  |                   Abandoned (no open finds it)
//!                     v                  v                      |
//!                 Releasing: Due <-------+---- discarded, its last opener's pod ended, its GPU lost it
//!                     |  its owner, or the node, is charged as for what a dead process exported
//!                     v
//!                 Releasing: Charged --- the vault closed its descriptor ---> (forgotten)
//! ```
//!
//! The vault is the truth: what a lease is stands in a blob beside its descriptor, and what the vault lists replaces
//! what stands here ([`Leases::heard`]). So every answer to a tenant follows the vault's to the change that it tells
//! of, and what an agent did not live to see done is done by its successor or was never told.
//! From `Due` on a lease is in the residual of its GPU like anything that the dead exported: it is bound again once that
//! proves it free. Nothing here waits, asks or tells: what is to be done comes out as [`Effect`]s.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bursar_protocol::messages::retained::{Key, RetainedRefusal};
use serde::{Deserialize, Serialize};

use crate::ledger::BootTime;
use crate::sessions::Process;
use crate::units::{AllocationId, Bytes, GpuUuid, LeaseId, PodUid};

/// The leases that one container may own.
pub const MAX_OWNED: usize = 64;

/// The pods that may have one lease open: their names are in the lease's blob.
pub const MAX_OPENERS: usize = 64;

/// For how long a writer may commit; opening its lease again begins it anew.
pub const WRITE_TOKEN_LIFETIME: Duration = Duration::from_secs(15 * 60);

/// A key as 64 hex digits: blobs are the vault's memory. Agents before wrote a list of numbers.
mod hex {
    use std::fmt::Write as _;

    use bursar_protocol::messages::retained::Key;
    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(key: &Key, serializer: S) -> Result<S::Ok, S::Error> {
        let mut text = String::with_capacity(2 * key.len());
        for byte in key {
            // A string takes whatever is written.
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
            // The parser takes a sign as well.
            let digits = pair.bytes().all(|digit| digit.is_ascii_hexdigit());
            *byte = u8::from_str_radix(pair, 16).ok().filter(|_| digits)?;
        }
        Some(key)
    }
}

/// What a lease is found by.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct LeaseKey {
    /// The namespace that shares it.
    pub namespace: String,
    /// What the namespace calls it.
    pub name: String,
    /// What its content is of.
    #[serde(with = "hex")]
    pub key: Key,
    /// Where it is.
    pub gpu: GpuUuid,
}

/// What a lease is: the blob beside its descriptor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct LeaseRecord {
    /// What it is found by.
    pub title: LeaseKey,
    /// How large it is.
    pub bytes: Bytes,
    /// G of its GPU when it was made: under any other its memory is lost. G may start again where its file is lost.
    pub gpu_generation: u64,
    /// The container that is charged for it: who made it; when that ends before its pod does, another of the pod
    /// that has the GPU.
    pub owner: AllocationId,
    /// Its pod.
    pub pod: PodUid,
    /// The pods that opened it and have not discarded it: it lives as long as one of them.
    pub openers: BTreeSet<PodUid>,
    /// What is in it.
    pub content: Content,
}

impl LeaseRecord {
    /// Whether a pod that does not own it has it open.
    fn is_shared(&self) -> bool {
        self.openers.iter().any(|opener| *opener != self.pod)
    }
}

/// What is in a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Content {
    /// Nothing yet.
    Writing(Writer),
    /// What was committed.
    Committed {
        /// What it was committed by: saying it again is no error.
        token: u64,
        /// Of all of its bytes.
        checksum: u64,
    },
    /// What somebody discarded and others may have mapped.
    Discarded,
}

/// Who writes a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Writer {
    /// The process.
    pub process: Process,
    /// Which of its images.
    pub image: u64,
    /// The right to commit.
    pub token: u64,
    /// How long that lasts.
    pub until: BootTime,
}

/// Who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Its container.
    pub allocation: AllocationId,
    /// The process.
    pub process: Process,
}

/// What is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenRequest {
    /// The GPU.
    pub gpu: GpuUuid,
    /// The lease's name.
    pub name: String,
    /// What its content is of.
    pub key: Key,
    /// How large to make it; zero makes nothing.
    pub bytes: Bytes,
    /// The process's image.
    pub image: u64,
    /// A number that nobody can guess.
    pub token: u64,
}

/// What an open comes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opened {
    /// The lease has what was committed.
    Read(LeaseId),
    /// The lease is the asker's to write, and was before.
    Write(LeaseId),
    /// Such a lease is to be made: charge its owner, then [`begin`](Leases::begin).
    Create(Box<LeaseRecord>),
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Charge a lease's owner as for what a dead process exported; then [`charged`](Leases::charged). Where the owner
    /// is not served it is asked for again.
    Charge(LeaseId, AllocationId),
    /// Have the vault keep this with the lease.
    Update(LeaseId, Box<LeaseRecord>),
    /// Have the vault close the lease's descriptor; then [`confirm_dropped`](Leases::dropped).
    Drop(LeaseId),
}

/// A container that is bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerBinding {
    /// Its pod.
    pub pod: PodUid,
    /// The pod's namespace, once it is known.
    pub namespace: Option<String>,
    /// The GPUs that it has memory of.
    pub gpus: BTreeSet<GpuUuid>,
}

/// The leases that containers are charged for, each with its GPU and what it has.
pub type ChargedLeases = BTreeMap<AllocationId, BTreeMap<LeaseId, (GpuUuid, Bytes)>>;

/// The node as it stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeView {
    /// The containers that are bound.
    pub containers: BTreeMap<AllocationId, ContainerBinding>,
    /// What the pods of each namespace may use of each GPU.
    pub quotas: BTreeMap<String, BTreeMap<GpuUuid, Bytes>>,
    /// G of each GPU.
    pub generations: BTreeMap<GpuUuid, u64>,
    /// What of each GPU no pod was promised.
    pub free: BTreeMap<GpuUuid, Bytes>,
}

impl NodeView {
    /// Who owns a lease from now on, where that is another container.
    fn new_owner(&self, meta: &LeaseRecord) -> Option<AllocationId> {
        if self.containers.contains_key(&meta.owner) {
            return None;
        }
        let mut containers = self.containers.iter();
        let heir = containers.find(|(_, container)| {
            container.pod == meta.pod && container.gpus.contains(&meta.title.gpu)
        });
        heir.map(|(allocation, _)| *allocation)
    }
}

/// What the node's ledger is told.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LedgerUpdate {
    /// What living leases have whose owner is gone; none while the vault was not heard. What of before is not among
    /// them is left by pods that ended.
    pub orphaned: Option<BTreeMap<GpuUuid, BTreeMap<LeaseId, Bytes>>>,
    /// What is to be charged to the node as left by pods that ended, once each; then [`Leases::charged`].
    pub unreclaimed: Vec<(LeaseId, GpuUuid, Bytes)>,
}

/// Where a lease is on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The worker and the vault are at it.
    Creating,
    /// The vault has it.
    Live,
    /// To be charged to the dead.
    ReleasePending,
    /// The node's ledger was told to.
    ReleaseReported,
    /// Charged; the vault is to close it.
    Releasing,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Lease {
    record: LeaseRecord,
    stage: Stage,
    /// Its owner, or the node, is charged for it. Of what another agent left that is not known before the node stood.
    is_charged: bool,
    /// The node's ledger was told of it as one without an owner.
    is_orphaned: bool,
}

/// The blob that the vault keeps beside a lease, as this agent reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoredRecord {
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

/// The book.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeaseTable {
    leases: BTreeMap<LeaseId, Lease>,
    /// Leases that only another version of the agent can read: the vault holds them, and they stay charged.
    unreadable: BTreeMap<LeaseId, Option<(GpuUuid, Bytes)>>,
    node: NodeView,
    /// GPUs that nothing is kept on.
    drained: BTreeSet<GpuUuid>,
    /// Whether the vault is there and what it has is known.
    store_connected: bool,
    /// How many leases the vault can hold in all; none before it said.
    capacity: Option<usize>,
}

impl LeaseTable {
    /// Whether what the vault has is known.
    pub fn is_store_connected(&self) -> bool {
        self.store_connected
    }

    /// Whether a container is bound.
    pub fn is_bound(&self, allocation: &AllocationId) -> bool {
        self.node.containers.contains_key(allocation)
    }

    /// The namespace of a container, if that is bound and known.
    pub fn namespace(&self, allocation: &AllocationId) -> Option<&str> {
        let standing = self.node.containers.get(allocation)?;
        standing.namespace.as_deref()
    }

    /// G of a GPU.
    pub fn generation(&self, gpu: &GpuUuid) -> Option<u64> {
        self.node.generations.get(gpu).copied()
    }

    /// What of a GPU no pod was promised.
    pub fn free(&self, gpu: &GpuUuid) -> Bytes {
        self.node.free.get(gpu).copied().unwrap_or_default()
    }

    /// Whether a process may use a lease of a GPU: its pod opened it and nobody discarded it; before the commit only its
    /// writer.
    pub fn is_open(&self, who: Caller, id: LeaseId, gpu: &GpuUuid) -> bool {
        let pod = self.node.containers.get(&who.allocation);
        self.get(id).zip(pod).is_some_and(|(meta, standing)| {
            let may_use = match &meta.content {
                Content::Committed { .. } => true,
                Content::Writing(writer) => writer.process == who.process,
                Content::Discarded => false,
            };
            may_use && meta.title.gpu == *gpu && meta.openers.contains(&standing.pod)
        })
    }

    /// Opens a lease for `asker`.
    ///
    /// # Errors
    /// What the tenant is answered.
    pub fn open(
        &mut self,
        asker: Caller,
        open: OpenRequest,
        now: BootTime,
    ) -> (Result<Opened, RetainedRefusal>, Vec<Effect>) {
        let mut effects = Vec::new();
        let Some((pod, namespace)) = self
            .pod_and_namespace(asker)
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
            process: asker.process,
            image: open.image,
            token: open.token,
            until: now + WRITE_TOKEN_LIFETIME,
        };
        self.release_writers(
            |other| other.process == writer.process && other.image != writer.image,
            &mut effects,
        );
        let to_share = self.shareable_bytes(&title);
        if let Some((id, found)) = self.find(&title) {
            match &mut found.record.content {
                Content::Committed { .. } => {
                    if !found.record.openers.contains(&pod) {
                        if found.record.openers.len() >= MAX_OPENERS {
                            return (Err(RetainedRefusal::TooMany), effects);
                        }
                        if !found.record.is_shared()
                            && found.record.pod != pod
                            && found.record.bytes > to_share
                        {
                            let Bytes(free) = to_share;
                            return (Err(RetainedRefusal::Quota { free }), effects);
                        }
                        found.record.openers.insert(pod);
                        effects.push(Effect::Update(id, Box::new(found.record.clone())));
                    }
                    return (Ok(Opened::Read(id)), effects);
                }
                Content::Writing(at_it) => {
                    // Who only looks takes nothing from another of its threads.
                    let is_again = (at_it.process, at_it.image) == (writer.process, writer.image)
                        && found.stage == Stage::Live
                        && found.record.owner == asker.allocation
                        && open.bytes != Bytes::ZERO;
                    if is_again && open.bytes <= found.record.bytes {
                        *at_it = writer;
                        effects.push(Effect::Update(id, Box::new(found.record.clone())));
                        return (Ok(Opened::Write(id)), effects);
                    }
                    if !is_again && (now < at_it.until || found.stage == Stage::Creating) {
                        return (Err(RetainedRefusal::Writing), effects);
                    }
                    self.release(id, &mut effects);
                }
                // None is found.
                Content::Discarded => {}
            }
        }
        if open.bytes == Bytes::ZERO {
            return (Err(RetainedRefusal::Missing), effects);
        }
        let owned = self.leases.values().filter(|lease| {
            lease.record.owner == asker.allocation
                && matches!(lease.stage, Stage::Creating | Stage::Live)
        });
        if owned.count() >= MAX_OWNED || !self.is_within_share(&title.namespace) {
            return (Err(RetainedRefusal::TooMany), effects);
        }
        // A lease of a generation that is not known could not be told from one of the next.
        let generations = &self.node.generations;
        let generation = generations.get(&title.gpu);
        let Some(generation) = generation.filter(|_| !self.drained.contains(&title.gpu)) else {
            return (Err(RetainedRefusal::Unavailable), effects);
        };
        let meta = LeaseRecord {
            gpu_generation: *generation,
            title,
            bytes: open.bytes,
            owner: asker.allocation,
            openers: BTreeSet::from([pod.clone()]),
            pod,
            content: Content::Writing(writer),
        };
        (Ok(Opened::Create(Box::new(meta))), effects)
    }

    /// A lease is being made; its owner is charged for it.
    pub fn begin_create(&mut self, id: LeaseId, meta: LeaseRecord) {
        let lease = Lease {
            record: meta,
            stage: Stage::Creating,
            is_charged: true,
            is_orphaned: false,
        };
        self.leases.insert(id, lease);
    }

    /// The vault has a lease that was being made: what it is, if it is its writer's to have.
    pub fn finish_create(&mut self, id: LeaseId) -> (Option<&LeaseRecord>, Vec<Effect>) {
        let mut effects = Vec::new();
        match self.leases.get_mut(&id) {
            Some(lease) if lease.stage == Stage::Creating => lease.stage = Stage::Live,
            _ => {}
        }
        // While it was made its writer may have ended.
        let ended = self.get(id).is_some_and(|meta| {
            !matches!(meta.content, Content::Writing(_)) || meta.openers.is_empty()
        });
        if ended {
            self.release(id, &mut effects);
        }
        (self.get(id), effects)
    }

    /// A lease that is being made, and what it will be.
    pub fn creating(&self, id: LeaseId) -> Option<&LeaseRecord> {
        let lease = self.leases.get(&id)?;
        (lease.stage == Stage::Creating).then_some(&lease.record)
    }

    /// A lease was not made, and there is certainly no memory of it: who is to be charged no more.
    pub fn abort_create(&mut self, id: LeaseId) -> Option<AllocationId> {
        self.leases.remove(&id).map(|lease| lease.record.owner)
    }

    /// A lease was perhaps made, and nobody will know of it.
    pub fn release_uncertain(&mut self, id: LeaseId) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.release(id, &mut effects);
        effects
    }

    /// A lease that the vault has, and what it is.
    pub fn get(&self, id: LeaseId) -> Option<&LeaseRecord> {
        let lease = self.leases.get(&id)?;
        (lease.stage == Stage::Live).then_some(&lease.record)
    }

    /// Commits what a writer wrote: tell it once the vault has taken that in.
    ///
    /// # Errors
    /// What the tenant is answered.
    pub fn commit(
        &mut self,
        asker: Caller,
        id: LeaseId,
        token: u64,
        checksum: u64,
        now: BootTime,
    ) -> Result<Vec<Effect>, RetainedRefusal> {
        let (_, namespace) = self
            .pod_and_namespace(asker)
            .ok_or(RetainedRefusal::Unavailable)?;
        if !self.store_connected {
            return Err(RetainedRefusal::Unavailable);
        }
        let lease = self.leases.get_mut(&id);
        let lease = lease.filter(|lease| lease.record.title.namespace == namespace);
        let meta = match lease {
            Some(lease) if lease.stage == Stage::Live => &mut lease.record,
            _ => return Err(RetainedRefusal::Missing),
        };
        let after = Content::Committed { token, checksum };
        match &meta.content {
            same if *same == after => {}
            Content::Writing(writer)
                if (writer.process, writer.token) == (asker.process, token)
                    && now < writer.until => {}
            _ => return Err(RetainedRefusal::Fenced),
        }
        meta.content = after;
        // The vault's answer to the same again is what the tenant waits for.
        Ok(vec![Effect::Update(id, Box::new(meta.clone()))])
    }

    /// Gives a lease up: who writes it may, and every pod that has it open.
    ///
    /// # Errors
    /// What the tenant is answered.
    pub fn discard(&mut self, asker: Caller, id: LeaseId) -> Result<Vec<Effect>, RetainedRefusal> {
        let (pod, _) = self
            .pod_and_namespace(asker)
            .ok_or(RetainedRefusal::Unavailable)?;
        if !self.store_connected {
            return Err(RetainedRefusal::Unavailable);
        }
        let lease = self.leases.get_mut(&id);
        let lease = lease
            .filter(|lease| lease.stage == Stage::Live && lease.record.openers.contains(&pod))
            .ok_or(RetainedRefusal::Missing)?;
        if let Content::Writing(writer) = &lease.record.content
            && writer.process != asker.process
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

    /// A process image ended, or the agent does nothing more for it: what it was writing is discarded.
    pub fn process_ended(&mut self, process: Process) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.release_writers(|writer| writer.process == process, &mut effects);
        effects
    }

    /// It is so late: what writers whose time is over were writing is discarded.
    pub fn expire_writers(&mut self, now: BootTime) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.release_writers(|writer| writer.until <= now, &mut effects);
        effects
    }

    /// Who is writing.
    pub fn writers(&self) -> BTreeSet<Process> {
        let leases = self.leases.values();
        leases
            .filter(|lease| matches!(lease.stage, Stage::Creating | Stage::Live))
            .filter_map(|lease| match &lease.record.content {
                Content::Writing(writer) => Some(writer.process),
                Content::Committed { .. } | Content::Discarded => None,
            })
            .collect()
    }

    /// What these GPUs have is lost: none is made there, and those that there are end as the node stands next.
    pub fn drain(&mut self, gpus: BTreeSet<GpuUuid>) {
        self.drained = gpus;
    }

    /// Whether the vault may have something of a GPU.
    pub fn has_leases_on(&self, gpu: &GpuUuid) -> bool {
        let mut leases = self.leases.values();
        leases.any(|lease| lease.record.title.gpu == *gpu)
            || self.unreadable.values().flatten().any(|(at, _)| at == gpu)
    }

    /// Whether the vault has a lease that this agent cannot read.
    pub fn is_unreadable(&self, id: LeaseId) -> bool {
        self.unreadable.contains_key(&id)
    }

    /// The node as it stands now: leases whose last opener is gone end, and what has no owner any more is the
    /// node's to account for. Containers are `charged` for these.
    pub fn reconcile(
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
                && let Some(heir) = self.node.new_owner(&lease.record)
            {
                lease.record.owner = heir;
                // It has it open: its pod's next container is there before this one's end, or was a moment later.
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
        let mut turn = LedgerUpdate::default();
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
                    // With what it had without an owner the ledger does the same by itself.
                    let left = if lease.is_orphaned {
                        Bytes::ZERO
                    } else {
                        *bytes
                    };
                    turn.unreclaimed.push((*id, title.gpu.clone(), left));
                    lease.stage = Stage::ReleaseReported;
                }
                (Stage::Creating | Stage::Live, false) => {
                    // Where the vault is away the ledger is not told.
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
        turn.orphaned = self.store_connected.then_some(orphaned);
        (turn, effects)
    }

    /// A lease's bytes are charged as what the dead exported, on record: its descriptor may go.
    pub fn confirm_charged(&mut self, id: LeaseId) -> Option<Effect> {
        let lease = self.leases.get_mut(&id)?;
        let is_due = matches!(lease.stage, Stage::ReleasePending | Stage::ReleaseReported);
        lease.stage = if is_due {
            Stage::Releasing
        } else {
            lease.stage
        };
        (is_due && self.store_connected).then_some(Effect::Drop(id))
    }

    /// The vault has closed a lease's descriptor.
    pub fn confirm_dropped(&mut self, id: LeaseId) {
        self.unreadable.remove(&id);
        if self.leases.get(&id).map(|lease| lease.stage) == Some(Stage::Releasing) {
            self.leases.remove(&id);
        }
    }

    /// The vault can hold so many leases in all.
    pub fn set_capacity(&mut self, most: usize) {
        self.capacity = Some(most);
    }

    /// The vault is away: nothing is known of its descriptors any more.
    pub fn store_disconnected(&mut self) {
        self.store_connected = false;
    }

    /// What the vault has, with what it keeps beside it: that counts, whatever stood here. Leases that are not in it are
    /// lost with their memory. Of who `lives` not what they were writing is discarded.
    pub fn resync(
        &mut self,
        held: BTreeMap<LeaseId, StoredRecord>,
        lives: impl Fn(Process) -> bool,
    ) -> Vec<Effect> {
        self.store_connected = true;
        self.unreadable.clear();
        let mut effects = Vec::new();
        let known: Vec<LeaseId> = self.leases.keys().copied().collect();
        for id in known {
            let stage = self.leases.get(&id).map(|lease| lease.stage);
            match stage {
                Some(Stage::Live) if !held.contains_key(&id) => self.release(id, &mut effects),
                Some(Stage::Releasing) if !held.contains_key(&id) => drop(self.leases.remove(&id)),
                _ => {}
            }
        }
        for (id, heard) in held {
            match (self.leases.get_mut(&id), heard) {
                (Some(lease), _) if lease.stage == Stage::Releasing => {
                    effects.push(Effect::Drop(id))
                }
                (Some(lease), StoredRecord::Read(meta)) if lease.stage == Stage::Live => {
                    lease.record = meta
                }
                (Some(_), _) => {}
                (None, StoredRecord::Read(meta)) => {
                    let lease = Lease {
                        record: meta,
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
        self.release_writers(|writer| !lives(writer.process), &mut effects);
        effects
    }

    /// What of a GPU the vault keeps, by lease: no process is charged for it, and somebody is. Nothing while the vault
    /// is away: its descriptors may be closed.
    pub fn live_leases(&self) -> BTreeMap<GpuUuid, BTreeMap<LeaseId, Bytes>> {
        let mut living: BTreeMap<GpuUuid, BTreeMap<LeaseId, Bytes>> = BTreeMap::new();
        if self.store_connected {
            for (id, lease) in &self.leases {
                if lease.stage == Stage::Live && lease.is_charged {
                    let of_gpu = living.entry(lease.record.title.gpu.clone()).or_default();
                    of_gpu.insert(*id, lease.record.bytes);
                }
            }
            for (id, extent) in &self.unreadable {
                if let Some((gpu, bytes)) = extent {
                    living.entry(gpu.clone()).or_default().insert(*id, *bytes);
                }
            }
        }
        living
    }

    /// Who is charged for a lease as one.
    pub fn owner(&self, id: LeaseId) -> Option<AllocationId> {
        let lease = self.leases.get(&id)?;
        let is_one = !matches!(lease.stage, Stage::ReleaseReported | Stage::Releasing);
        is_one.then_some(lease.record.owner)
    }

    /// Where a lease is, and what it has.
    pub fn extent(&self, id: LeaseId) -> Option<(GpuUuid, Bytes)> {
        if let Some(extent) = self.unreadable.get(&id) {
            return extent.clone();
        }
        let LeaseRecord { title, bytes, .. } = &self.leases.get(&id)?.record;
        Some((title.gpu.clone(), *bytes))
    }

    /// The node's GPUs.
    pub fn gpus(&self) -> impl Iterator<Item = &GpuUuid> {
        self.node.generations.keys()
    }

    /// Whom each lease that may be used is charged to.
    pub fn lease_owners(&self) -> BTreeMap<LeaseId, (AllocationId, GpuUuid, Bytes)> {
        let leases = self.leases.iter();
        leases
            .filter(|(_, lease)| matches!(lease.stage, Stage::Creating | Stage::Live))
            .map(|(id, lease)| {
                let LeaseRecord { owner, bytes, .. } = lease.record;
                (*id, (owner, lease.record.title.gpu.clone(), bytes))
            })
            .collect()
    }

    /// The pod and the namespace of who asks, if its container is bound and they are known.
    fn pod_and_namespace(&self, asker: Caller) -> Option<(PodUid, String)> {
        let ContainerBinding { pod, namespace, .. } =
            self.node.containers.get(&asker.allocation)?;
        Some((pod.clone(), namespace.clone()?))
    }

    /// How much more of a GPU may be open in pods that do not own it, of the leases of a namespace: when an owner's pod
    /// ends nobody's quota has its lease any more, so all of these together have no more than its pods may use.
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

    /// Whether a namespace may have one more lease: it leaves as much of the vault to others as it has itself. What is
    /// on its way out counts as well, for the vault has it still.
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

    /// A lease is begun where none of its title is found: others of the title were given up before, by an agent that
    /// did not live to see them closed.
    fn release_replaced(&mut self, effects: &mut Vec<Effect>) {
        let found = self.leases.iter().filter(|(_, lease)| {
            matches!(lease.stage, Stage::Creating | Stage::Live)
                && lease.record.content != Content::Discarded
        });
        let mut newest = BTreeMap::new();
        // In the order of their numbers.
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
                // Its end is waited for: who makes it asks what became of it.
                Some(lease) if lease.stage == Stage::Creating => {
                    lease.record.content = Content::Discarded;
                }
                _ => self.release(id, effects),
            }
        }
    }

    /// From now on nobody opens it, and what it has is in the residual.
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
mod history;
#[cfg(test)]
mod tests;
