//! Tests the lease table against a model: a million operations of tenants, agents, provisioners and
//! fd stores that may die at any step.
//!
//! In the model memory exists while a descriptor or a mapping does. Charges and the ledger are on
//! disk, and the fd store's answers are correct. The agent carries effects out in the order of
//! `service.rs`, and may crash between any two of them.

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::*;

/// The steps of one run. Some steps find nothing to do.
const STEPS: u32 = 1_000_000;
const MIB: u64 = 1 << 20;
/// The memory of the GPU.
const CAPACITY: u64 = 64 * MIB;
/// The quota of each container.
const QUOTA: u64 = 16 * MIB;
/// How many pods there are; their containers start and end.
const PODS: usize = 5;

fn pod(number: usize) -> PodUid {
    format!("p{number}").parse().unwrap()
}

/// A lease that a process has open.
#[derive(Clone, Debug)]
struct OpenLease {
    lease: LeaseId,
    title: LeaseKey,
    /// The write token and its expiry; none for a reader.
    token: Option<(u64, BootTime)>,
}

#[derive(Clone, Debug)]
struct Tenant {
    caller: Caller,
    image: u64,
    open_leases: Vec<OpenLease>,
    /// Leases that earlier images of the process had open, until the agent hears of their end.
    previous_images: Vec<OpenLease>,
    /// Leases whose memory the process got during the creation.
    handed: BTreeSet<LeaseId>,
}

/// The account of a container, on disk.
#[derive(Clone, Debug, Default)]
struct Account {
    leases: BTreeMap<LeaseId, u64>,
    /// Bytes charged as orphaned exports.
    dead: u64,
}

impl Account {
    fn charged(&self) -> u64 {
        self.leases.values().sum::<u64>() + self.dead
    }
}

/// The result that the next open of a key must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    /// Any content: the last commit or discard was not acknowledged.
    Anything,
    /// This committed content.
    Content(LeaseId, u64),
}

/// The steps of a lease's creation.
#[derive(Clone, Debug)]
struct Creation {
    lease: LeaseId,
    tenant: usize,
    title: LeaseKey,
    token: u64,
    until: BootTime,
    /// Whether the agent has the descriptor.
    created: bool,
    /// Whether the agent has sent the descriptor to the fd store.
    sent: bool,
    /// The connection on which the agent stores the descriptor.
    connection: u32,
}

struct Model {
    rng: StdRng,
    now: BootTime,
    table: LeaseTable,
    node: NodeView,
    tenants: Vec<Tenant>,
    /// The leases of the fd store, which serves connection number `connection` while
    /// `is_connected`.
    fd_store: BTreeMap<LeaseId, LeaseRecord>,
    /// The descriptors that the agent has sent and the fd store has not read.
    in_flight: Vec<(LeaseId, LeaseRecord)>,
    /// The leases whose descriptor the fd store refused.
    refused: BTreeSet<LeaseId>,
    connection: u32,
    is_connected: bool,
    creations: Vec<Creation>,
    /// The size of each lease that was ever created.
    sizes: BTreeMap<LeaseId, u64>,
    /// Leases whose descriptor the agent has open.
    agent_fds: BTreeSet<LeaseId>,
    /// On disk: the account of each bound container, and the ledger.
    accounts: BTreeMap<AllocationId, Account>,
    orphaned: BTreeMap<LeaseId, u64>,
    leaked: u64,
    expected: BTreeMap<LeaseKey, Expected>,
    /// The last write token for each key.
    newest_writers: BTreeMap<LeaseKey, (LeaseId, u64)>,
    /// Write tokens of images that have ended, and of GPUs that were reset.
    stale: Vec<(Caller, OpenLease)>,
    last_number: u64,
    /// How often each event occurred, to prove that the run covers them.
    counts: BTreeMap<&'static str, u64>,
}

impl Model {
    fn new(seed: u64) -> Model {
        let mut model = Model {
            rng: StdRng::seed_from_u64(seed),
            now: BootTime(0),
            table: LeaseTable::default(),
            node: NodeView {
                generations: BTreeMap::from([(gpu(), 1)]),
                ..NodeView::default()
            },
            tenants: Vec::new(),
            fd_store: BTreeMap::new(),
            in_flight: Vec::new(),
            refused: BTreeSet::new(),
            connection: 0,
            is_connected: false,
            creations: Vec::new(),
            sizes: BTreeMap::new(),
            agent_fds: BTreeSet::new(),
            accounts: BTreeMap::new(),
            orphaned: BTreeMap::new(),
            leaked: 0,
            expected: BTreeMap::new(),
            newest_writers: BTreeMap::new(),
            stale: Vec::new(),
            last_number: 1,
            counts: BTreeMap::new(),
        };
        model.reconnect();
        model
    }

    fn random_below(&mut self, sides: usize) -> usize {
        self.rng.random_range(0..sides.max(1))
    }

    fn one_in(&mut self, many: u32) -> bool {
        self.rng.random_range(0..many) == 0
    }

    fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    fn count(&mut self, event: &'static str) {
        *self.counts.entry(event).or_default() += 1;
    }

    /// Whether memory of a lease exists.
    fn exists(&self, lease: LeaseId) -> bool {
        let mapped = |tenant: &Tenant| {
            tenant.handed.contains(&lease)
                || tenant
                    .open_leases
                    .iter()
                    .any(|open_lease| open_lease.lease == lease)
        };
        self.fd_store.contains_key(&lease)
            || self.in_flight.iter().any(|(sent, _)| *sent == lease)
            || self.agent_fds.contains(&lease)
            || self.tenants.iter().any(mapped)
    }

    fn memory_in_use(&self) -> u64 {
        let sizes = self.sizes.iter();
        sizes
            .filter(|(lease, _)| self.exists(**lease))
            .map(|(_, bytes)| *bytes)
            .sum()
    }

    // The agent, in the order of `service.rs`.

    /// Carries the effects out; returns false if the agent crashes in between.
    fn apply_effects(&mut self, effects: Vec<Effect>) -> bool {
        for effect in effects {
            if self.one_in(400) {
                self.crash_agent();
                return false;
            }
            match effect {
                Effect::Charge(lease, owner) => {
                    let Some(account) = self.accounts.get_mut(&owner) else {
                        continue;
                    };
                    let Some((_, Bytes(bytes))) = self.table.extent(lease) else {
                        continue;
                    };
                    account.dead += account.leases.remove(&lease).unwrap_or(bytes);
                    if self.one_in(400) {
                        self.crash_agent();
                        return false;
                    }
                    if let Some(Effect::Drop(lease)) = self.table.confirm_charged(lease)
                        && !self.close(lease)
                    {
                        return false;
                    }
                }
                Effect::Drop(lease) => {
                    if !self.close(lease) {
                        return false;
                    }
                }
                Effect::Update(lease, record) => {
                    if !self.deliver_puts() {
                        return false;
                    }
                    if self.is_connected
                        && let Some(held) = self.fd_store.get_mut(&lease)
                    {
                        *held = *record;
                    }
                }
            }
        }
        true
    }

    /// Returns false if the agent crashes before it sends the message.
    fn close(&mut self, lease: LeaseId) -> bool {
        if !self.deliver_puts() {
            return false;
        }
        if self.is_connected {
            self.fd_store.remove(&lease);
            self.table.confirm_dropped(lease);
        }
        true
    }

    /// Lets the fd store read the descriptors that were sent before another message. Returns false
    /// if the agent crashes meanwhile.
    fn deliver_puts(&mut self) -> bool {
        while self.is_connected && !self.in_flight.is_empty() {
            let (lease, record) = self.in_flight.remove(0);
            if !self.one_in(50) {
                self.fd_store.insert(lease, record);
                continue;
            }
            self.count("refused descriptors");
            self.refused.insert(lease);
            // The agent learns of the refusal after the creation.
            if self
                .creations
                .iter()
                .any(|creation| creation.lease == lease)
            {
                continue;
            }
            let effects = self.table.release_uncertain(lease);
            if !self.apply_effects(effects) {
                return false;
            }
        }
        true
    }

    fn crash_agent(&mut self) {
        self.count("agent deaths");
        self.table = LeaseTable::default();
        self.creations.clear();
        self.agent_fds.clear();
        self.reconnect();
    }

    /// The agent connects to the fd store.
    fn reconnect(&mut self) {
        self.connection += 1;
        self.is_connected = true;
        // The fd store reads the messages of an earlier agent before it serves this one. It may
        // refuse a descriptor, and no agent learns of that.
        for (lease, record) in std::mem::take(&mut self.in_flight) {
            if self.one_in(50) {
                self.refused.insert(lease);
            } else {
                self.fd_store.insert(lease, record);
            }
        }
        let held = self.fd_store.iter();
        let held = held
            .map(|(lease, record)| (*lease, StoredRecord::Read(record.clone())))
            .collect();
        let alive: BTreeSet<Process> = self.tenants.iter().map(|t| t.caller.process).collect();
        let effects = self.table.resync(held, |process| alive.contains(&process));
        self.reconcile();
        self.apply_effects(effects);
    }

    fn reconcile(&mut self) {
        for (lease, (owner, _, bytes)) in self.table.lease_owners() {
            if let Some(account) = self.accounts.get_mut(&owner) {
                account.leases.entry(lease).or_insert(bytes.0);
            }
        }
        for (allocation, account) in &mut self.accounts {
            let gone: Vec<LeaseId> = account
                .leases
                .keys()
                .copied()
                .filter(|lease| self.table.owner(*lease) != Some(*allocation))
                .collect();
            for lease in gone {
                let bytes = account.leases.remove(&lease).unwrap_or(0);
                if self.table.owner(lease).is_none() {
                    account.dead += bytes;
                }
            }
        }
    }

    /// Replaces the orphaned leases as the node's ledger does.
    fn set_orphaned(&mut self, orphaned: &BTreeMap<GpuUuid, BTreeMap<LeaseId, Bytes>>) {
        let all_orphaned = orphaned.values().flatten();
        let leases: BTreeMap<_, _> = all_orphaned
            .map(|(lease, bytes)| (*lease, bytes.0))
            .collect();
        let left = self
            .orphaned
            .iter()
            .filter(|(lease, _)| !leases.contains_key(lease));
        self.leaked += left.map(|(_, bytes)| bytes).sum::<u64>();
        self.orphaned = leases;
    }

    /// Counts an ended lease as the node's ledger does.
    fn end_lease(&mut self, lease: LeaseId, bytes: Bytes) {
        if !self.orphaned.contains_key(&lease) {
            self.leaked += bytes.0;
        }
    }

    fn charged_leases(&self) -> ChargedLeases {
        let accounts = self.accounts.iter();
        accounts
            .map(|(allocation, account)| {
                let leases = account.leases.iter();
                let leases = leases.map(|(lease, bytes)| (*lease, (gpu(), Bytes(*bytes))));
                (*allocation, leases.collect())
            })
            .collect()
    }

    /// The node's tick.
    fn tick(&mut self) {
        let late = self.table.expire_writers(self.now);
        if !self.apply_effects(late) {
            return;
        }
        if self.table.is_store_connected() {
            self.reconcile();
        }
        let charged = self.charged_leases();
        let (update, effects) = self.table.reconcile(self.node.clone(), &charged);
        if self.table.is_store_connected() {
            self.reconcile();
        }
        if !self.apply_effects(effects) {
            return;
        }
        for (lease, _, bytes) in &update.ended {
            self.end_lease(*lease, *bytes);
        }
        if let Some(orphaned) = update.orphaned {
            self.set_orphaned(&orphaned);
        }
        for (lease, _, _) in update.ended {
            if self.one_in(100) {
                return self.crash_agent();
            }
            if let Some(effect) = self.table.confirm_charged(lease)
                && !self.apply_effects(vec![effect])
            {
                return;
            }
        }
    }

    // The events.

    fn step(&mut self) {
        self.now = self.now + Duration::from_millis(200);
        match self.random_below(1_000) {
            0..30 => self.start_container(),
            30..45 => self.end_container(),
            45..120 => self.start_process(),
            120..150 => self.end_process(),
            150..165 => self.exec_process(),
            165..500 => self.open(),
            500..600 => self.advance_creation(),
            600..640 => drop(self.deliver_puts()),
            640..740 => self.commit(),
            740..760 => self.commit_stale(),
            760..785 => self.discard(),
            785..850 => self.unmap(),
            850..930 => self.tick(),
            930..980 => self.prove_free(),
            980..984 => self.crash_agent(),
            984..988 => self.crash_fd_store(),
            988..993 => self.break_connection(),
            993..995 => self.reset_gpu(),
            995..998 => self.now = self.now + WRITE_TOKEN_LIFETIME,
            _ => self.kill_provisioner(),
        }
    }

    fn start_container(&mut self) {
        let bound = self.accounts.len() as u64 * QUOTA;
        // The ledger binds only what is free.
        let orphaned: u64 = self.orphaned.values().sum();
        if bound + orphaned + self.leaked + QUOTA > CAPACITY {
            return;
        }
        let allocation = AllocationId::from_bits(self.next_number());
        // The pod has no container now, and may have had one before.
        let pods: BTreeSet<PodUid> = (0..PODS).map(pod).collect();
        let containers = self.node.containers.values();
        let bound: BTreeSet<PodUid> = containers.map(|container| container.pod.clone()).collect();
        let unbound: Vec<&PodUid> = pods.difference(&bound).collect();
        let Some(pod) = unbound.get(self.random_below(unbound.len())) else {
            return;
        };
        let namespace = if **pod == self::pod(0) {
            "other"
        } else {
            "team"
        };
        let binding = ContainerBinding {
            pod: (*pod).clone(),
            namespace: Some(namespace.to_owned()),
            gpus: BTreeSet::from([gpu()]),
        };
        self.node.containers.insert(allocation, binding);
        self.accounts.insert(allocation, Account::default());
        self.set_quotas();
        self.tick();
    }

    fn set_quotas(&mut self) {
        self.node.quotas.clear();
        for container in self.node.containers.values() {
            let namespace = container.namespace.clone().unwrap_or_default();
            let quotas = self.node.quotas.entry(namespace).or_default();
            quotas.entry(gpu()).or_default().0 += QUOTA;
        }
    }

    fn end_container(&mut self) {
        let at = self.random_below(self.accounts.len());
        let Some(allocation) = self.accounts.keys().nth(at).copied() else {
            return;
        };
        let ended: Vec<usize> = (0..self.tenants.len())
            .rev()
            .filter(|at| self.tenants[*at].caller.allocation == allocation)
            .collect();
        ended.into_iter().for_each(|at| self.kill_process(at));
        self.unbind(allocation);
        // The agent may have crashed meanwhile.
        self.forget_ended();
    }

    fn unbind(&mut self, allocation: AllocationId) {
        // In the allocator's order: the table learns of the end, then the ledger takes the account
        // over, at once on disk.
        self.node.containers.remove(&allocation);
        self.set_quotas();
        if self.table.is_store_connected() {
            self.reconcile();
        }
        let charged = self.charged_leases();
        let (update, effects) = self.table.reconcile(self.node.clone(), &charged);
        if self.table.is_store_connected() {
            self.reconcile();
        }
        for (lease, _, bytes) in &update.ended {
            self.end_lease(*lease, *bytes);
        }
        let known = update.orphaned.is_some();
        let account = self.accounts.remove(&allocation).unwrap_or_default();
        self.stale
            .retain(|(caller, _)| caller.allocation != allocation);
        self.leaked += account.dead;
        if known {
            let orphaned = update.orphaned.unwrap_or_default();
            self.set_orphaned(&orphaned);
        } else {
            self.leaked += account.leases.values().sum::<u64>();
        }
        for (lease, _, _) in update.ended {
            if let Some(effect) = self.table.confirm_charged(lease)
                && !self.apply_effects(vec![effect])
            {
                return;
            }
        }
        self.apply_effects(effects);
    }

    /// Drops the expectations for leases whose openers' pods have all ended.
    fn forget_ended(&mut self) {
        let bound: BTreeSet<&PodUid> = self.node.containers.values().map(|c| &c.pod).collect();
        let stored: BTreeMap<LeaseId, &LeaseKey> = self
            .fd_store
            .iter()
            .map(|(lease, record)| (*lease, &record.title))
            .collect();
        let is_open = |lease: &LeaseId| {
            let record = self.table.get(*lease);
            record.is_some_and(|record| record.openers.iter().any(|opener| bound.contains(opener)))
        };
        self.expected.retain(|title, expected| match expected {
            Expected::Content(lease, _) if stored.contains_key(lease) && is_open(lease) => true,
            _ => {
                *expected = Expected::Anything;
                stored.values().any(|other| *other == title)
            }
        });
    }

    fn start_process(&mut self) {
        let at = self.random_below(self.accounts.len());
        let Some(allocation) = self.accounts.keys().nth(at).copied() else {
            return;
        };
        if self.tenants.len() < 16 {
            let number = self.next_number();
            let process = Process {
                pid: number as u32,
                start: number,
            };
            self.tenants.push(Tenant {
                caller: Caller {
                    allocation,
                    process,
                },
                image: number,
                open_leases: Vec::new(),
                previous_images: Vec::new(),
                handed: BTreeSet::new(),
            });
        }
    }

    fn end_process(&mut self) {
        if !self.tenants.is_empty() {
            let at = self.random_below(self.tenants.len());
            self.kill_process(at);
        }
    }

    /// Kills a process with SIGKILL.
    fn kill_process(&mut self, at: usize) {
        self.count("process deaths");
        let tenant = self.tenants.remove(at);
        self.mark_stale(tenant.caller, tenant.open_leases);
        self.mark_stale(tenant.caller, tenant.previous_images);
        self.creations.retain_mut(|creation| {
            if creation.tenant > at {
                creation.tenant -= 1;
            } else if creation.tenant == at {
                creation.tenant = usize::MAX;
            }
            true
        });
        let effects = self.table.process_ended(tenant.caller.process);
        self.apply_effects(effects);
    }

    fn exec_process(&mut self) {
        if self.tenants.is_empty() {
            return;
        }
        let (at, image) = (self.random_below(self.tenants.len()), self.next_number());
        let tenant = &mut self.tenants[at];
        tenant.image = image;
        tenant.previous_images.append(&mut tenant.open_leases);
        tenant.handed.clear();
        for creation in &mut self.creations {
            // The exec dropped the connection that waits for the answer.
            if creation.tenant == at {
                creation.tenant = usize::MAX;
            }
        }
        if self.one_in(2) {
            // In half of the cases the shim says hello; otherwise the agent learns of the exec at
            // the next open.
            let caller = self.tenants[at].caller;
            let is_known = self.is_connected && self.table.is_bound(&caller.allocation);
            let effects = self.table.process_ended(caller.process);
            if self.apply_effects(effects) && is_known {
                let before = std::mem::take(&mut self.tenants[at].previous_images);
                self.mark_stale(caller, before);
            }
        }
    }

    /// Records tokens with which no commit may succeed from now on.
    fn mark_stale(&mut self, caller: Caller, open_leases: Vec<OpenLease>) {
        for open_lease in open_leases
            .into_iter()
            .filter(|open_lease| open_lease.token.is_some())
        {
            if self.stale.len() == 32 {
                let at = self.random_below(32);
                self.stale.swap_remove(at);
            }
            self.stale.push((caller, open_lease));
        }
    }

    fn random_key(&mut self, tenant: &Tenant) -> LeaseKey {
        let binding = &self.node.containers[&tenant.caller.allocation];
        let namespace = binding.namespace.clone().unwrap_or_default();
        LeaseKey {
            namespace,
            name: ["a", "b", "c"][self.random_below(3)].to_owned(),
            key: [0; 32],
            gpu: gpu(),
        }
    }

    fn open(&mut self) {
        if self.tenants.is_empty() {
            return;
        }
        let at = self.random_below(self.tenants.len());
        let tenant = self.tenants[at].clone();
        let title = self.random_key(&tenant);
        let bytes = match self.random_below(4) {
            0 => 0,
            blocks => blocks as u64 * 2 * MIB,
        };
        let token = self.next_number();
        let open = OpenRequest {
            gpu: gpu(),
            name: title.name.clone(),
            key: title.key,
            bytes: Bytes(bytes),
            image: tenant.image,
            token,
        };
        let expected = self.expected.get(&title).copied();
        let (opened, effects) = self.table.open(tenant.caller, open, self.now);
        if !self.apply_effects(effects) {
            return;
        }
        if opened != Err(RetainedRefusal::Unavailable) {
            self.count("opens");
            let before = std::mem::take(&mut self.tenants[at].previous_images);
            self.mark_stale(tenant.caller, before);
        }
        let assert_expected = |found: Option<(LeaseId, u64)>| match expected {
            Some(Expected::Content(lease, checksum)) => {
                assert_eq!(found, Some((lease, checksum)), "{title:?}");
            }
            Some(Expected::Anything) => {}
            None => assert_eq!(found, None, "{title:?} was never committed"),
        };
        match opened {
            Ok(Opened::Read(lease)) => {
                // The fd store's record counts.
                let Some(record) = self.fd_store.get(&lease).filter(|_| self.is_connected) else {
                    return;
                };
                let Content::Committed { checksum, .. } = record.content else {
                    panic!("{record:?} is read");
                };
                assert_expected(Some((lease, checksum)));
                self.count("reads");
                let token = None;
                self.tenants[at].open_leases.push(OpenLease {
                    lease,
                    title,
                    token,
                });
            }
            Ok(Opened::Write(lease)) => {
                assert_expected(None);
                if !self.deliver_puts() {
                    return;
                }
                if self.is_connected && self.fd_store.contains_key(&lease) {
                    self.newest_writers.insert(title.clone(), (lease, token));
                    let token = Some((token, self.now + WRITE_TOKEN_LIFETIME));
                    self.tenants[at].open_leases.push(OpenLease {
                        lease,
                        title,
                        token,
                    });
                }
            }
            Ok(Opened::Create(record)) => {
                assert_expected(None);
                self.begin_create(at, *record, title, token);
            }
            Err(RetainedRefusal::Missing | RetainedRefusal::Writing) => assert_expected(None),
            Err(_) => {}
        }
    }

    fn begin_create(&mut self, at: usize, record: LeaseRecord, title: LeaseKey, token: u64) {
        let lease = LeaseId(self.next_number());
        let bytes = record.bytes.0;
        let account = self.accounts.get_mut(&record.owner).unwrap();
        if account.charged() + bytes > QUOTA {
            return self.count("over quota");
        }
        account.leases.insert(lease, bytes);
        if self.one_in(200) {
            return self.crash_agent();
        }
        self.sizes.insert(lease, bytes);
        self.table.begin_create(lease, record);
        self.creations.push(Creation {
            lease,
            tenant: at,
            title,
            token,
            until: self.now + WRITE_TOKEN_LIFETIME,
            created: false,
            sent: false,
            connection: self.connection,
        });
    }

    fn advance_creation(&mut self) {
        if self.creations.is_empty() {
            return;
        }
        let at = self.random_below(self.creations.len());
        let creation = self.creations[at].clone();
        if !creation.created {
            self.creations[at].created = true;
            self.agent_fds.insert(creation.lease);
            if let Some(tenant) = self.tenants.get_mut(creation.tenant) {
                tenant.handed.insert(creation.lease);
            }
            return;
        }
        let is_current = self.is_connected && self.connection == creation.connection;
        if is_current && !creation.sent {
            self.creations[at].sent = true;
            // The record is as at the begin of the creation, except for a writer that ended.
            if let Some(record) = self.table.creating(creation.lease) {
                self.in_flight.push((creation.lease, record.clone()));
            }
            return;
        }
        self.creations.remove(at);
        self.agent_fds.remove(&creation.lease);
        if !is_current {
            let effects = self.table.release_uncertain(creation.lease);
            self.apply_effects(effects);
            return;
        }
        let (record, effects) = self.table.finish_create(creation.lease);
        let is_kept = record.is_some();
        // The process gets the answer if it still runs.
        if is_kept && let Some(tenant) = self.tenants.get_mut(creation.tenant) {
            let newest = (creation.lease, creation.token);
            self.newest_writers.insert(creation.title.clone(), newest);
            tenant.open_leases.push(OpenLease {
                lease: creation.lease,
                title: creation.title,
                token: Some((creation.token, creation.until)),
            });
        }
        self.count("creations");
        if self.apply_effects(effects) && self.refused.contains(&creation.lease) {
            let effects = self.table.release_uncertain(creation.lease);
            self.apply_effects(effects);
        }
    }

    fn commit(&mut self) {
        let Some((at, open_lease)) =
            self.random_open_lease(|open_lease| open_lease.token.is_some())
        else {
            return;
        };
        let Some((token, until)) = open_lease.token else {
            return;
        };
        let checksum = self.next_number();
        let caller = self.tenants[at].caller;
        let committed = self
            .table
            .commit(caller, open_lease.lease, token, checksum, self.now);
        self.count("commits asked for");
        let Ok(effects) = committed else {
            return;
        };
        assert!(self.now < until, "an expired token commits");
        let newest = self.newest_writers.get(&open_lease.title);
        assert_eq!(
            newest,
            Some(&(open_lease.lease, token)),
            "a superseded one does"
        );
        // Until the commit is acknowledged either content may be found.
        self.expected
            .insert(open_lease.title.clone(), Expected::Anything);
        if !self.apply_effects(effects) || self.one_in(100) || !self.is_connected {
            return;
        }
        if self.refused.contains(&open_lease.lease) {
            return;
        }
        let content = self
            .fd_store
            .get(&open_lease.lease)
            .map(|record| &record.content);
        assert_eq!(content, Some(&Content::Committed { token, checksum }));
        self.count("commits");
        self.expected.insert(
            open_lease.title.clone(),
            Expected::Content(open_lease.lease, checksum),
        );
        if let Some(held) = self.tenants[at]
            .open_leases
            .iter_mut()
            .find(|held| held.token == open_lease.token)
        {
            // The process may commit again with the same token.
            if self.rng.random_range(0..2) == 0 {
                held.token = None;
            }
        }
        // The fd store may have older leases of the key that were given up.
        let newest = self.fd_store.iter().rfind(|(_, record)| {
            record.title == open_lease.title && matches!(record.content, Content::Committed { .. })
        });
        assert_eq!(newest.map(|(lease, _)| *lease), Some(open_lease.lease));
    }

    /// Tries a commit with a token that has ended.
    fn commit_stale(&mut self) {
        let at = self.random_below(self.stale.len());
        let Some((caller, open_lease)) = self.stale.get(at).cloned() else {
            return;
        };
        let Some((token, _)) = open_lease.token else {
            return;
        };
        let committed = self
            .table
            .commit(caller, open_lease.lease, token, 0, self.now);
        assert!(
            committed.is_err(),
            "{caller:?} of before commits {open_lease:?}"
        );
        if self.is_connected && self.table.is_bound(&caller.allocation) {
            self.count("stale commits");
        }
    }

    fn random_open_lease(
        &mut self,
        is_wanted: impl Fn(&OpenLease) -> bool,
    ) -> Option<(usize, OpenLease)> {
        let tenants = self.tenants.iter().enumerate();
        let all = tenants.flat_map(|(at, tenant)| {
            tenant
                .open_leases
                .iter()
                .map(move |open_lease| (at, open_lease))
        });
        let open_leases: Vec<_> = all
            .filter(|(_, open_lease)| is_wanted(open_lease))
            .collect();
        let which = self.rng.random_range(0..open_leases.len().max(1));
        let (at, open_lease) = open_leases.get(which)?;
        Some((*at, (*open_lease).clone()))
    }

    fn discard(&mut self) {
        let Some((at, open_lease)) = self.random_open_lease(|_| true) else {
            return;
        };
        let caller = self.tenants[at].caller;
        self.count("discards asked for");
        if let Ok(effects) = self.table.discard(caller, open_lease.lease) {
            // The key may be another lease's by now.
            if let Some(expected) = self.expected.get_mut(&open_lease.title)
                && matches!(expected, Expected::Content(lease, _) if *lease == open_lease.lease)
            {
                *expected = Expected::Anything;
            }
            if self.apply_effects(effects)
                && self.is_connected
                && self.table.get(open_lease.lease).is_none()
            {
                self.count("discards");
                // The tenant gets its answer once the fd store has closed the lease.
                if self
                    .fd_store
                    .values()
                    .all(|held| held.title != open_lease.title)
                {
                    self.expected.remove(&open_lease.title);
                }
            }
        }
    }

    /// A process unmaps a lease.
    fn unmap(&mut self) {
        let at = self.random_below(self.tenants.len());
        if let Some(tenant) = self.tenants.get_mut(at) {
            tenant.handed.pop_first();
        }
        if let Some((at, open_lease)) = self.random_open_lease(|_| true) {
            self.tenants[at]
                .open_leases
                .retain(|held| held.lease != open_lease.lease);
        }
    }

    fn crash_fd_store(&mut self) {
        self.count("fd store deaths");
        self.fd_store.clear();
        self.in_flight.clear();
        self.expected.clear();
        self.is_connected = false;
        self.connection += 1;
        self.reconnect_after_some_steps();
    }

    fn break_connection(&mut self) {
        self.is_connected = false;
        self.connection += 1;
        self.reconnect_after_some_steps();
    }

    /// The agent notices the lost connection, and later connects again.
    fn reconnect_after_some_steps(&mut self) {
        // Commits without an answer may have happened or not.
        self.table.store_disconnected();
        for _ in 0..self.random_below(6) {
            match self.random_below(5) {
                0 => self.open(),
                1 => self.advance_creation(),
                2 => self.commit(),
                3 => self.end_process(),
                _ => self.tick(),
            }
            if self.is_connected {
                // The agent crashed meanwhile and has connected again.
                return;
            }
        }
        self.reconnect();
    }

    fn reset_gpu(&mut self) {
        *self.node.generations.get_mut(&gpu()).unwrap() += 1;
        // The reset destroys all content.
        self.expected.clear();
        for at in 0..self.tenants.len() {
            let tenant = &mut self.tenants[at];
            tenant.handed.clear();
            let (caller, mut open_leases) =
                (tenant.caller, std::mem::take(&mut tenant.open_leases));
            open_leases.append(&mut tenant.previous_images);
            self.mark_stale(caller, open_leases);
        }
        let creations: Vec<Creation> = self.creations.drain(..).collect();
        for creation in creations {
            self.agent_fds.remove(&creation.lease);
            let effects = self.table.release_uncertain(creation.lease);
            if !self.apply_effects(effects) {
                return;
            }
        }
        self.tick();
    }

    fn kill_provisioner(&mut self) {
        let Some(at) = self.creations.iter().position(|creation| !creation.created) else {
            return;
        };
        let creation = self.creations.remove(at);
        self.count("provisioner deaths");
        if let Some(owner) = self.table.abort_create(creation.lease)
            && let Some(account) = self.accounts.get_mut(&owner)
        {
            account.leases.remove(&creation.lease);
        }
    }

    /// Proves memory free: what is in use, less the live leases.
    fn prove_free(&mut self) {
        let known: u64 = self
            .table
            .live_leases()
            .values()
            .flat_map(BTreeMap::values)
            .map(|bytes| bytes.0)
            .sum();
        let held = self.memory_in_use().saturating_sub(known);
        self.leaked = self.leaked.min(held);
        for account in self.accounts.values_mut() {
            account.dead = account.dead.min(held);
        }
    }

    fn assert_coverage(&self) {
        for event in [
            "creations",
            "commits",
            "reads",
            "stale commits",
            "discards",
            "over quota",
            "agent deaths",
            "fd store deaths",
            "refused descriptors",
            "provisioner deaths",
            "process deaths",
        ] {
            let times = self.counts.get(event).copied().unwrap_or(0);
            assert!(times > 100, "{event}: {times} of {:?}", self.counts);
        }
    }

    // Final states.

    /// Ends all processes and discards every lease: afterwards nothing may be charged.
    fn discard_all(&mut self) {
        while !self.tenants.is_empty() {
            self.end_process();
        }
        // The agent may crash in any of these.
        for _ in 0..20 {
            self.settle();
            for allocation in self.accounts.keys().copied().collect::<Vec<_>>() {
                let process = Process { pid: 0, start: 0 };
                let caller = Caller {
                    allocation,
                    process,
                };
                for lease in self.fd_store.keys().copied().collect::<Vec<_>>() {
                    if let Ok(effects) = self.table.discard(caller, lease) {
                        self.apply_effects(effects);
                    }
                }
            }
        }
        self.settle();
        self.expected.clear();
        self.assert_empty();
    }

    fn end_all_containers(&mut self) {
        while !self.accounts.is_empty() {
            self.end_container();
        }
        // The agent may crash in any of these.
        for _ in 0..20 {
            self.settle();
        }
        self.assert_empty();
    }

    /// Completes all creations and ticks the node.
    fn settle(&mut self) {
        if !self.is_connected {
            self.reconnect();
        }
        while !self.creations.is_empty() {
            self.advance_creation();
        }
        self.deliver_puts();
        self.tick();
        self.prove_free();
        self.check_invariants();
    }

    fn assert_empty(&self) {
        assert_eq!(self.fd_store, BTreeMap::new());
        assert_eq!(self.table.leases, BTreeMap::new());
        let accounts = self.accounts.values().map(Account::charged).sum::<u64>();
        assert_eq!((self.memory_in_use(), accounts, self.leaked), (0, 0, 0));
        assert_eq!(self.orphaned, BTreeMap::new());
    }

    /// The number of requests and of created leases.
    fn operations(&self) -> u64 {
        let of = [
            "opens",
            "creations",
            "commits asked for",
            "discards asked for",
        ];
        of.iter().filter_map(|event| self.counts.get(event)).sum()
    }

    // Invariants after every step.

    fn check_invariants(&mut self) {
        let gone: Vec<LeaseId> = self
            .sizes
            .keys()
            .copied()
            .filter(|lease| !self.exists(*lease))
            .filter(|lease| {
                self.creations
                    .iter()
                    .all(|creation| creation.lease != *lease)
            })
            .collect();
        for lease in gone {
            self.sizes.remove(&lease);
        }
        let memory = self.memory_in_use();
        let accounts: u64 = self.accounts.values().map(Account::charged).sum();
        let orphaned: u64 = self.orphaned.values().sum();
        let charged = accounts + orphaned + self.leaked;
        assert!(
            memory <= charged,
            "{memory} in use, {charged} charged: {:?}",
            self.table
        );
        assert!(
            memory <= CAPACITY,
            "{memory} in use: reused before it was free"
        );
    }
}

#[test]
fn leases_keep_their_promises_through_a_million_crashing_steps() {
    let mut operations = 0;
    // The long tier of `cargo verify` runs four seeds.
    let histories = match std::env::var_os("BURSAR_LONG") {
        Some(_) => 4,
        None => 1,
    };
    for seed in 7..7 + histories {
        let mut model = Model::new(seed);
        for step in 1..=STEPS {
            model.step();
            model.check_invariants();
            match step % (STEPS / 50) {
                0 => model.end_all_containers(),
                at if at == STEPS / 100 => model.discard_all(),
                _ => {}
            }
        }
        model.assert_coverage();
        operations += model.operations();
    }
    assert!(operations > 250_000 * histories, "{operations}");
}
