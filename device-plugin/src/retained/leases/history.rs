//! A million operations of tenants, agents, workers and vaults that die at any moment, held against what was promised.
//!
//! The world around the book is a model: memory lives while a descriptor or a mapping does; charges, and what the
//! node's ledger has, are on disk; the vault's answers are its truth. The agent does what the book says in the order of
//! `serve`, and may die between any two steps.

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::tests::gpu;
use super::*;

/// Of each history; not every step finds something to do.
const STEPS: u32 = 1_000_000;
const MIB: u64 = 1 << 20;
/// What the GPU has.
const CAPACITY: u64 = 64 * MIB;
/// What each container may use.
const QUOTA: u64 = 16 * MIB;
/// Pods, whose containers begin and end.
const PODS: usize = 5;

fn pod(number: usize) -> PodUid {
    format!("p{number}").parse().unwrap()
}

/// What a process remembers of a lease that it opened.
#[derive(Clone, Debug)]
struct Grip {
    lease: LeaseId,
    title: Title,
    /// None where it reads.
    token: Option<(u64, Moment)>,
}

#[derive(Clone, Debug)]
struct Tenant {
    asker: Asker,
    image: u64,
    grips: Vec<Grip>,
    /// What images of it before this one had, as long as the agent was not told of their end.
    before: Vec<Grip>,
    /// Leases whose memory it was handed while they were made, whatever became of them.
    handed: BTreeSet<LeaseId>,
}

/// What is on disk of a container's account.
#[derive(Clone, Debug, Default)]
struct Account {
    leases: BTreeMap<LeaseId, u64>,
    /// As what dead processes exported.
    dead: u64,
}

impl Account {
    fn charged(&self) -> u64 {
        self.leases.values().sum::<u64>() + self.dead
    }
}

/// What a lease of some title must hold when it is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    /// Anything: the last commit or discard was not answered.
    Anything,
    /// What was committed.
    Content(LeaseId, u64),
}

/// A lease that is being made: what the agent does step by step.
#[derive(Clone, Debug)]
struct Making {
    lease: LeaseId,
    tenant: usize,
    title: Title,
    token: u64,
    until: Moment,
    /// The worker has made it: the agent has its descriptor.
    created: bool,
    /// On which connection to the vault it is put.
    line: u32,
}

struct World {
    dice: StdRng,
    now: Moment,
    book: Leases,
    node: Node,
    tenants: Vec<Tenant>,
    /// What the vault has: it answers on this connection, if there is one.
    vault: BTreeMap<LeaseId, Meta>,
    line: u32,
    linked: bool,
    making: Vec<Making>,
    /// Leases that were ever made, with what they have.
    sizes: BTreeMap<LeaseId, u64>,
    /// Descriptors in the agent's hands.
    hands: BTreeSet<LeaseId>,
    /// On disk: each bound container's account, and what the node's ledger has.
    accounts: BTreeMap<AllocationId, Account>,
    kept: BTreeMap<LeaseId, u64>,
    leaked: u64,
    expected: BTreeMap<Title, Expected>,
    /// Who was given the right to commit last, of each title.
    newest: BTreeMap<Title, (LeaseId, u64)>,
    /// Rights of images that have ended, and on GPUs that were reset.
    stale: Vec<(Asker, Grip)>,
    next: u64,
    /// What happened, for a history that shows nothing to be found out.
    counts: BTreeMap<&'static str, u64>,
}

impl World {
    fn new(seed: u64) -> World {
        let mut world = World {
            dice: StdRng::seed_from_u64(seed),
            now: Moment(0),
            book: Leases::default(),
            node: Node {
                generations: BTreeMap::from([(gpu(), 1)]),
                ..Node::default()
            },
            tenants: Vec::new(),
            vault: BTreeMap::new(),
            line: 0,
            linked: false,
            making: Vec::new(),
            sizes: BTreeMap::new(),
            hands: BTreeSet::new(),
            accounts: BTreeMap::new(),
            kept: BTreeMap::new(),
            leaked: 0,
            expected: BTreeMap::new(),
            newest: BTreeMap::new(),
            stale: Vec::new(),
            next: 1,
            counts: BTreeMap::new(),
        };
        world.link();
        world
    }

    fn below(&mut self, sides: usize) -> usize {
        self.dice.random_range(0..sides.max(1))
    }

    fn one_in(&mut self, many: u32) -> bool {
        self.dice.random_range(0..many) == 0
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// Whether there is memory of a lease.
    fn exists(&self, lease: LeaseId) -> bool {
        let mapped = |tenant: &Tenant| {
            tenant.handed.contains(&lease) || tenant.grips.iter().any(|grip| grip.lease == lease)
        };
        self.vault.contains_key(&lease)
            || self.hands.contains(&lease)
            || self.tenants.iter().any(mapped)
    }

    fn memory(&self) -> u64 {
        let sizes = self.sizes.iter();
        sizes
            .filter(|(lease, _)| self.exists(**lease))
            .map(|(_, bytes)| *bytes)
            .sum()
    }

    // The agent's part, in the order of `serve`.

    /// Does what the book says, unless the agent dies in between: whether it lives.
    fn carry_out(&mut self, effects: Vec<Effect>) -> bool {
        for effect in effects {
            if self.one_in(400) {
                self.agent_dies();
                return false;
            }
            match effect {
                Effect::Charge(lease, owner) => {
                    let Some(account) = self.accounts.get_mut(&owner) else {
                        continue;
                    };
                    let Some((_, Bytes(bytes))) = self.book.extent(lease) else {
                        continue;
                    };
                    account.dead += account.leases.remove(&lease).unwrap_or(bytes);
                    if self.one_in(400) {
                        self.agent_dies();
                        return false;
                    }
                    if let Some(Effect::Drop(lease)) = self.book.charged(lease) {
                        self.close(lease);
                    }
                }
                Effect::Drop(lease) => self.close(lease),
                Effect::Update(lease, meta) => {
                    if self.linked
                        && let Some(held) = self.vault.get_mut(&lease)
                    {
                        *held = *meta;
                    }
                }
            }
        }
        true
    }

    fn close(&mut self, lease: LeaseId) {
        if self.linked {
            self.vault.remove(&lease);
            self.book.dropped(lease);
        }
    }

    fn agent_dies(&mut self) {
        self.count("agent deaths");
        self.book = Leases::default();
        self.making.clear();
        self.hands.clear();
        self.link();
    }

    /// The agent and the vault find each other.
    fn link(&mut self) {
        self.line += 1;
        self.linked = true;
        let held = self.vault.iter();
        let held = held
            .map(|(lease, meta)| (*lease, Heard::Read(meta.clone())))
            .collect();
        let alive: BTreeSet<Process> = self.tenants.iter().map(|t| t.asker.process).collect();
        let effects = self.book.heard(held, |process| alive.contains(&process));
        self.reconcile();
        self.carry_out(effects);
    }

    fn reconcile(&mut self) {
        for (lease, (owner, _, bytes)) in self.book.owned() {
            if let Some(account) = self.accounts.get_mut(&owner) {
                account.leases.entry(lease).or_insert(bytes.0);
            }
        }
        for (allocation, account) in &mut self.accounts {
            let gone: Vec<LeaseId> = account
                .leases
                .keys()
                .copied()
                .filter(|lease| self.book.owner(*lease) != Some(*allocation))
                .collect();
            for lease in gone {
                let bytes = account.leases.remove(&lease).unwrap_or(0);
                if self.book.owner(lease).is_none() {
                    account.dead += bytes;
                }
            }
        }
    }

    /// As the node's ledger does.
    fn set_kept(&mut self, orphaned: &BTreeMap<GpuUuid, BTreeMap<LeaseId, Bytes>>) {
        let of_gpus = orphaned.values().flatten();
        let kept: BTreeMap<_, _> = of_gpus.map(|(lease, bytes)| (*lease, bytes.0)).collect();
        let left = self
            .kept
            .iter()
            .filter(|(lease, _)| !kept.contains_key(lease));
        self.leaked += left.map(|(_, bytes)| bytes).sum::<u64>();
        self.kept = kept;
    }

    fn charged(&self) -> Charged {
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
    fn stand(&mut self) {
        let late = self.book.late(self.now);
        if !self.carry_out(late) {
            return;
        }
        if self.book.is_heard() {
            self.reconcile();
        }
        let charged = self.charged();
        let (turn, effects) = self.book.stand(self.node.clone(), &charged);
        if self.book.is_heard() {
            self.reconcile();
        }
        if !self.carry_out(effects) {
            return;
        }
        if let Some(orphaned) = turn.orphaned {
            self.set_kept(&orphaned);
        }
        let left: u64 = turn.left.iter().map(|(_, _, bytes)| bytes.0).sum();
        self.leaked += left;
        for (lease, _, _) in turn.left {
            if self.one_in(100) {
                return self.agent_dies();
            }
            if let Some(effect) = self.book.charged(lease)
                && !self.carry_out(vec![effect])
            {
                return;
            }
        }
    }

    // What happens.

    fn step(&mut self) {
        self.now = self.now + Duration::from_millis(200);
        match self.below(1_000) {
            0..30 => self.container_begins(),
            30..45 => self.container_ends(),
            45..120 => self.process_begins(),
            120..150 => self.process_ends(),
            150..165 => self.process_execs(),
            165..500 => self.open(),
            500..640 => self.making_goes_on(),
            640..740 => self.commit(),
            740..760 => self.commit_stale(),
            760..785 => self.discard(),
            785..850 => self.unmap(),
            850..930 => self.stand(),
            930..980 => self.prove(),
            980..984 => self.agent_dies(),
            984..988 => self.vault_dies(),
            988..993 => self.line_breaks(),
            993..995 => self.gpu_is_reset(),
            995..998 => self.now = self.now + WRITE_TIME,
            _ => self.worker_dies(),
        }
    }

    fn container_begins(&mut self) {
        let bound = self.accounts.len() as u64 * QUOTA;
        // What the node's ledger binds.
        let kept: u64 = self.kept.values().sum();
        if bound + kept + self.leaked + QUOTA > CAPACITY {
            return;
        }
        let allocation = AllocationId::from_bits(self.number());
        // Of a pod that has none now, and perhaps had one.
        let pods: BTreeSet<PodUid> = (0..PODS).map(pod).collect();
        let containers = self.node.containers.values();
        let bound: BTreeSet<PodUid> = containers.map(|container| container.pod.clone()).collect();
        let begins: Vec<&PodUid> = pods.difference(&bound).collect();
        let Some(pod) = begins.get(self.below(begins.len())) else {
            return;
        };
        let namespace = if **pod == self::pod(0) {
            "other"
        } else {
            "team"
        };
        let standing = Standing {
            pod: (*pod).clone(),
            namespace: Some(namespace.to_owned()),
            gpus: BTreeSet::from([gpu()]),
        };
        self.node.containers.insert(allocation, standing);
        self.accounts.insert(allocation, Account::default());
        self.set_quotas();
        self.stand();
    }

    fn set_quotas(&mut self) {
        self.node.quotas.clear();
        for container in self.node.containers.values() {
            let namespace = container.namespace.clone().unwrap_or_default();
            let quotas = self.node.quotas.entry(namespace).or_default();
            quotas.entry(gpu()).or_default().0 += QUOTA;
        }
    }

    fn container_ends(&mut self) {
        let at = self.below(self.accounts.len());
        let Some(allocation) = self.accounts.keys().nth(at).copied() else {
            return;
        };
        let dying: Vec<usize> = (0..self.tenants.len())
            .rev()
            .filter(|at| self.tenants[*at].asker.allocation == allocation)
            .collect();
        dying.into_iter().for_each(|at| self.kill(at));
        self.unbind(allocation);
        // Whether or not the agent lived to the end of it.
        self.forget_ended();
    }

    fn unbind(&mut self, allocation: AllocationId) {
        // In the order of the core: the book knows, then what the account has is the ledger's, at once on disk.
        self.node.containers.remove(&allocation);
        self.set_quotas();
        if self.book.is_heard() {
            self.reconcile();
        }
        let charged = self.charged();
        let (turn, effects) = self.book.stand(self.node.clone(), &charged);
        if self.book.is_heard() {
            self.reconcile();
        }
        let known = turn.orphaned.is_some();
        let account = self.accounts.remove(&allocation).unwrap_or_default();
        self.stale
            .retain(|(asker, _)| asker.allocation != allocation);
        self.leaked += account.dead;
        if known {
            let orphaned = turn.orphaned.unwrap_or_default();
            self.set_kept(&orphaned);
        } else {
            self.leaked += account.leases.values().sum::<u64>();
        }
        self.leaked += turn.left.iter().map(|(_, _, bytes)| bytes.0).sum::<u64>();
        for (lease, _, _) in turn.left {
            if let Some(effect) = self.book.charged(lease)
                && !self.carry_out(vec![effect])
            {
                return;
            }
        }
        self.carry_out(effects);
    }

    /// Nothing is promised of leases whose openers' pods have all ended.
    fn forget_ended(&mut self) {
        let bound: BTreeSet<&PodUid> = self.node.containers.values().map(|c| &c.pod).collect();
        let vault: BTreeMap<LeaseId, &Title> = self
            .vault
            .iter()
            .map(|(lease, meta)| (*lease, &meta.title))
            .collect();
        let is_open = |lease: &LeaseId| {
            let meta = self.book.get(*lease);
            meta.is_some_and(|meta| meta.openers.iter().any(|opener| bound.contains(opener)))
        };
        self.expected.retain(|title, expected| match expected {
            Expected::Content(lease, _) if vault.contains_key(lease) && is_open(lease) => true,
            _ => {
                *expected = Expected::Anything;
                vault.values().any(|held| *held == title)
            }
        });
    }

    fn process_begins(&mut self) {
        let at = self.below(self.accounts.len());
        let Some(allocation) = self.accounts.keys().nth(at).copied() else {
            return;
        };
        if self.tenants.len() < 16 {
            let number = self.number();
            let process = Process {
                pid: number as u32,
                start: number,
            };
            self.tenants.push(Tenant {
                asker: Asker {
                    allocation,
                    process,
                },
                image: number,
                grips: Vec::new(),
                before: Vec::new(),
                handed: BTreeSet::new(),
            });
        }
    }

    fn process_ends(&mut self) {
        if !self.tenants.is_empty() {
            let at = self.below(self.tenants.len());
            self.kill(at);
        }
    }

    /// SIGKILL.
    fn kill(&mut self, at: usize) {
        self.count("process deaths");
        let tenant = self.tenants.remove(at);
        self.are_stale(tenant.asker, tenant.grips);
        self.are_stale(tenant.asker, tenant.before);
        self.making.retain_mut(|making| {
            if making.tenant > at {
                making.tenant -= 1;
            } else if making.tenant == at {
                making.tenant = usize::MAX;
            }
            true
        });
        let effects = self.book.ended(tenant.asker.process);
        self.carry_out(effects);
    }

    fn process_execs(&mut self) {
        if self.tenants.is_empty() {
            return;
        }
        let (at, image) = (self.below(self.tenants.len()), self.number());
        let tenant = &mut self.tenants[at];
        tenant.image = image;
        tenant.before.append(&mut tenant.grips);
        tenant.handed.clear();
        for making in &mut self.making {
            // Nobody takes the answer.
            if making.tenant == at {
                making.tenant = usize::MAX;
            }
        }
        if self.one_in(2) {
            // The shim says hello; otherwise the next open tells.
            let asker = self.tenants[at].asker;
            let is_known = self.linked && self.book.is_bound(&asker.allocation);
            let effects = self.book.ended(asker.process);
            if self.carry_out(effects) && is_known {
                let before = std::mem::take(&mut self.tenants[at].before);
                self.are_stale(asker, before);
            }
        }
    }

    /// From now on nobody may commit with these.
    fn are_stale(&mut self, asker: Asker, grips: Vec<Grip>) {
        for grip in grips.into_iter().filter(|grip| grip.token.is_some()) {
            if self.stale.len() == 32 {
                let at = self.below(32);
                self.stale.swap_remove(at);
            }
            self.stale.push((asker, grip));
        }
    }

    fn title(&mut self, tenant: &Tenant) -> Title {
        let standing = &self.node.containers[&tenant.asker.allocation];
        let namespace = standing.namespace.clone().unwrap_or_default();
        Title {
            namespace,
            name: ["a", "b", "c"][self.below(3)].to_owned(),
            key: [0; 32],
            gpu: gpu(),
        }
    }

    fn open(&mut self) {
        if self.tenants.is_empty() {
            return;
        }
        let at = self.below(self.tenants.len());
        let tenant = self.tenants[at].clone();
        let title = self.title(&tenant);
        let bytes = match self.below(4) {
            0 => 0,
            blocks => blocks as u64 * 2 * MIB,
        };
        let token = self.number();
        let open = Open {
            gpu: gpu(),
            name: title.name.clone(),
            key: title.key,
            bytes: Bytes(bytes),
            image: tenant.image,
            token,
        };
        let expected = self.expected.get(&title).copied();
        let (opened, effects) = self.book.open(tenant.asker, open, self.now);
        if !self.carry_out(effects) {
            return;
        }
        if opened != Err(RetainedRefusal::Unavailable) {
            self.count("opens");
            let before = std::mem::take(&mut self.tenants[at].before);
            self.are_stale(tenant.asker, before);
        }
        let promised = |found: Option<(LeaseId, u64)>| match expected {
            Some(Expected::Content(lease, checksum)) => {
                assert_eq!(found, Some((lease, checksum)), "{title:?}");
            }
            Some(Expected::Anything) => {}
            None => assert_eq!(found, None, "{title:?} was never committed"),
        };
        match opened {
            Ok(Opened::Read(lease)) => {
                // The vault has it, and says what it is.
                let Some(meta) = self.vault.get(&lease).filter(|_| self.linked) else {
                    return;
                };
                let Content::Committed { checksum, .. } = meta.content else {
                    panic!("{meta:?} is read");
                };
                promised(Some((lease, checksum)));
                self.count("reads");
                let token = None;
                self.tenants[at].grips.push(Grip {
                    lease,
                    title,
                    token,
                });
            }
            Ok(Opened::Write(lease)) => {
                promised(None);
                if self.linked && self.vault.contains_key(&lease) {
                    self.newest.insert(title.clone(), (lease, token));
                    let token = Some((token, self.now + WRITE_TIME));
                    self.tenants[at].grips.push(Grip {
                        lease,
                        title,
                        token,
                    });
                }
            }
            Ok(Opened::Make(meta)) => {
                promised(None);
                self.make(at, *meta, title, token);
            }
            Err(RetainedRefusal::Missing | RetainedRefusal::Writing) => promised(None),
            Err(_) => {}
        }
    }

    fn make(&mut self, at: usize, meta: Meta, title: Title, token: u64) {
        let lease = LeaseId(self.number());
        let bytes = meta.bytes.0;
        let account = self.accounts.get_mut(&meta.owner).unwrap();
        if account.charged() + bytes > QUOTA {
            return self.count("over quota");
        }
        account.leases.insert(lease, bytes);
        if self.one_in(200) {
            return self.agent_dies();
        }
        self.sizes.insert(lease, bytes);
        self.book.begin(lease, meta);
        self.making.push(Making {
            lease,
            tenant: at,
            title,
            token,
            until: self.now + WRITE_TIME,
            created: false,
            line: self.line,
        });
    }

    fn making_goes_on(&mut self) {
        if self.making.is_empty() {
            return;
        }
        let at = self.below(self.making.len());
        let making = self.making[at].clone();
        if !making.created {
            self.making[at].created = true;
            self.hands.insert(making.lease);
            if let Some(tenant) = self.tenants.get_mut(making.tenant) {
                tenant.handed.insert(making.lease);
            }
            return;
        }
        self.making.remove(at);
        self.hands.remove(&making.lease);
        if !self.linked || self.line != making.line {
            let effects = self.book.lost(making.lease);
            self.carry_out(effects);
            return;
        }
        // What it is when the vault gets it: as it was when it began, but for who died.
        let Some(meta) = self.book.making(making.lease) else {
            return;
        };
        let meta = meta.clone();
        self.vault.insert(making.lease, meta);
        if self.one_in(200) {
            return self.agent_dies();
        }
        let (made, effects) = self.book.made(making.lease);
        let is_his = made.is_some();
        // The answer goes out, to whoever still takes it.
        if is_his && let Some(tenant) = self.tenants.get_mut(making.tenant) {
            let newest = (making.lease, making.token);
            self.newest.insert(making.title.clone(), newest);
            tenant.grips.push(Grip {
                lease: making.lease,
                title: making.title,
                token: Some((making.token, making.until)),
            });
        }
        self.count("made");
        self.carry_out(effects);
    }

    fn commit(&mut self) {
        let Some((at, grip)) = self.some_grip(|grip| grip.token.is_some()) else {
            return;
        };
        let Some((token, until)) = grip.token else {
            return;
        };
        let checksum = self.number();
        let asker = self.tenants[at].asker;
        let committed = self
            .book
            .commit(asker, grip.lease, token, checksum, self.now);
        self.count("commits asked for");
        let Ok(effects) = committed else {
            return;
        };
        assert!(self.now < until, "an expired token commits");
        let newest = self.newest.get(&grip.title);
        assert_eq!(newest, Some(&(grip.lease, token)), "a superseded one does");
        // From here on what is promised is either, until it is answered.
        self.expected.insert(grip.title.clone(), Expected::Anything);
        if !self.carry_out(effects) || self.one_in(100) || !self.linked {
            return;
        }
        let content = self.vault.get(&grip.lease).map(|meta| &meta.content);
        assert_eq!(content, Some(&Content::Committed { token, checksum }));
        self.count("commits");
        self.expected
            .insert(grip.title.clone(), Expected::Content(grip.lease, checksum));
        if let Some(held) = self.tenants[at]
            .grips
            .iter_mut()
            .find(|held| held.token == grip.token)
        {
            // It may say so again.
            if self.dice.random_range(0..2) == 0 {
                held.token = None;
            }
        }
        // Others of the title may be there, given up before.
        let newest = self.vault.iter().rfind(|(_, meta)| {
            meta.title == grip.title && matches!(meta.content, Content::Committed { .. })
        });
        assert_eq!(newest.map(|(lease, _)| *lease), Some(grip.lease));
    }

    /// A right that has ended is tried all the same.
    fn commit_stale(&mut self) {
        let at = self.below(self.stale.len());
        let Some((asker, grip)) = self.stale.get(at).cloned() else {
            return;
        };
        let Some((token, _)) = grip.token else {
            return;
        };
        let committed = self.book.commit(asker, grip.lease, token, 0, self.now);
        assert!(committed.is_err(), "{asker:?} of before commits {grip:?}");
        if self.linked && self.book.is_bound(&asker.allocation) {
            self.count("stale commits");
        }
    }

    fn some_grip(&mut self, is_one: impl Fn(&Grip) -> bool) -> Option<(usize, Grip)> {
        let tenants = self.tenants.iter().enumerate();
        let all = tenants.flat_map(|(at, tenant)| tenant.grips.iter().map(move |grip| (at, grip)));
        let grips: Vec<_> = all.filter(|(_, grip)| is_one(grip)).collect();
        let which = self.dice.random_range(0..grips.len().max(1));
        let (at, grip) = grips.get(which)?;
        Some((*at, (*grip).clone()))
    }

    fn discard(&mut self) {
        let Some((at, grip)) = self.some_grip(|_| true) else {
            return;
        };
        let asker = self.tenants[at].asker;
        self.count("discards asked for");
        if let Ok(effects) = self.book.discard(asker, grip.lease) {
            // Its title may be another lease's by now.
            if let Some(expected) = self.expected.get_mut(&grip.title)
                && matches!(expected, Expected::Content(lease, _) if *lease == grip.lease)
            {
                *expected = Expected::Anything;
            }
            if self.carry_out(effects) && self.linked && self.book.get(grip.lease).is_none() {
                self.count("discards");
                // It is answered once the vault has closed it.
                if self.vault.values().all(|held| held.title != grip.title) {
                    self.expected.remove(&grip.title);
                }
            }
        }
    }

    /// A process lets go of a lease.
    fn unmap(&mut self) {
        let at = self.below(self.tenants.len());
        if let Some(tenant) = self.tenants.get_mut(at) {
            tenant.handed.pop_first();
        }
        if let Some((at, grip)) = self.some_grip(|_| true) {
            self.tenants[at]
                .grips
                .retain(|held| held.lease != grip.lease);
        }
    }

    fn vault_dies(&mut self) {
        self.count("vault deaths");
        self.vault.clear();
        self.expected.clear();
        self.linked = false;
        self.line += 1;
        self.lost_after_some_steps();
    }

    fn line_breaks(&mut self) {
        self.linked = false;
        self.line += 1;
        self.lost_after_some_steps();
    }

    /// The agent notices, and later finds a vault again.
    fn lost_after_some_steps(&mut self) {
        // Commits that nobody was answered: either.
        self.book.vault_lost();
        for _ in 0..self.below(6) {
            match self.below(5) {
                0 => self.open(),
                1 => self.making_goes_on(),
                2 => self.commit(),
                3 => self.process_ends(),
                _ => self.stand(),
            }
            if self.linked {
                // The agent died meanwhile.
                return;
            }
        }
        self.link();
    }

    fn gpu_is_reset(&mut self) {
        *self.node.generations.get_mut(&gpu()).unwrap() += 1;
        // Whatever is committed on it is gone.
        self.expected.clear();
        for at in 0..self.tenants.len() {
            let tenant = &mut self.tenants[at];
            tenant.handed.clear();
            let (asker, mut grips) = (tenant.asker, std::mem::take(&mut tenant.grips));
            grips.append(&mut tenant.before);
            self.are_stale(asker, grips);
        }
        let making: Vec<Making> = self.making.drain(..).collect();
        for making in making {
            self.hands.remove(&making.lease);
            let effects = self.book.lost(making.lease);
            if !self.carry_out(effects) {
                return;
            }
        }
        self.stand();
    }

    fn worker_dies(&mut self) {
        let Some(at) = self.making.iter().position(|making| !making.created) else {
            return;
        };
        let making = self.making.remove(at);
        self.count("worker deaths");
        if let Some(owner) = self.book.never_made(making.lease)
            && let Some(account) = self.accounts.get_mut(&owner)
        {
            account.leases.remove(&making.lease);
        }
    }

    /// The residual: what is in use, less what the vault is known to keep.
    fn prove(&mut self) {
        let known: u64 = self
            .book
            .living()
            .values()
            .flat_map(BTreeMap::values)
            .map(|bytes| bytes.0)
            .sum();
        let held = self.memory().saturating_sub(known);
        self.leaked = self.leaked.min(held);
        for account in self.accounts.values_mut() {
            account.dead = account.dead.min(held);
        }
    }

    fn has_shown_enough(&self) {
        for what in [
            "made",
            "commits",
            "reads",
            "stale commits",
            "discards",
            "over quota",
            "agent deaths",
            "vault deaths",
            "worker deaths",
            "process deaths",
        ] {
            let times = self.counts.get(what).copied().unwrap_or(0);
            assert!(times > 100, "{what}: {times} of {:?}", self.counts);
        }
    }

    // What must hold in the end.

    /// All processes end, and every pod gives up what it has open: nobody is charged for anything any more.
    fn all_is_given_up(&mut self) {
        while !self.tenants.is_empty() {
            self.process_ends();
        }
        // The agent may die in any of these.
        for _ in 0..20 {
            self.comes_to_rest();
            for allocation in self.accounts.keys().copied().collect::<Vec<_>>() {
                let process = Process { pid: 0, start: 0 };
                let asker = Asker {
                    allocation,
                    process,
                };
                for lease in self.vault.keys().copied().collect::<Vec<_>>() {
                    if let Ok(effects) = self.book.discard(asker, lease) {
                        self.carry_out(effects);
                    }
                }
            }
        }
        self.comes_to_rest();
        self.expected.clear();
        self.is_empty();
    }

    /// Every container ends.
    fn all_ends(&mut self) {
        while !self.accounts.is_empty() {
            self.container_ends();
        }
        // The agent may die in any of these.
        for _ in 0..20 {
            self.comes_to_rest();
        }
        self.is_empty();
    }

    /// What was begun is done, and the node's tick comes.
    fn comes_to_rest(&mut self) {
        if !self.linked {
            self.link();
        }
        while !self.making.is_empty() {
            self.making_goes_on();
        }
        self.stand();
        self.prove();
        self.check();
    }

    fn is_empty(&self) {
        assert_eq!(self.vault, BTreeMap::new());
        assert_eq!(self.book.leases, BTreeMap::new());
        let accounts = self.accounts.values().map(Account::charged).sum::<u64>();
        assert_eq!((self.memory(), accounts, self.leaked), (0, 0, 0));
        assert_eq!(self.kept, BTreeMap::new());
    }

    /// Questions that the book was asked, and leases that were made.
    fn operations(&self) -> u64 {
        let of = ["opens", "made", "commits asked for", "discards asked for"];
        of.iter().filter_map(|what| self.counts.get(what)).sum()
    }

    // What must hold after every step.

    fn check(&mut self) {
        let gone: Vec<LeaseId> = self
            .sizes
            .keys()
            .copied()
            .filter(|lease| !self.exists(*lease))
            .filter(|lease| self.making.iter().all(|making| making.lease != *lease))
            .collect();
        for lease in gone {
            self.sizes.remove(&lease);
        }
        let memory = self.memory();
        let accounts: u64 = self.accounts.values().map(Account::charged).sum();
        let kept: u64 = self.kept.values().sum();
        let charged = accounts + kept + self.leaked;
        assert!(
            memory <= charged,
            "{memory} in use, {charged} charged: {:?}",
            self.book
        );
        assert!(
            memory <= CAPACITY,
            "{memory} in use: reused before it was free"
        );
    }
}

#[test]
fn nothing_is_lost_shared_reused_or_left_in_a_million_operations_of_which_any_may_be_somebodys_last()
 {
    let mut operations = 0;
    // The long tier of `cargo verify` runs four such histories.
    let histories = match std::env::var_os("BURSAR_LONG") {
        Some(_) => 4,
        None => 1,
    };
    for seed in 7..7 + histories {
        let mut world = World::new(seed);
        for step in 1..=STEPS {
            world.step();
            world.check();
            match step % (STEPS / 50) {
                0 => world.all_ends(),
                at if at == STEPS / 100 => world.all_is_given_up(),
                _ => {}
            }
        }
        world.has_shown_enough();
        operations += world.operations();
    }
    assert!(operations > 250_000 * histories, "{operations}");
}
