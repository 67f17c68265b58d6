//! One container's processes, their credit pages, and the books that they are held to.
//!
//! Nothing here waits: every call is a few memory operations and at most one small write to tmpfs.

mod contexts;
pub(super) mod denials;
pub(super) mod drain;
mod exports;
mod faults;
pub(super) mod leases;
mod pages;
pub(super) mod recording;
pub(super) mod siblings;
mod usage;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_protocol::credit::CreditWord;
use bursar_protocol::credit_page::CreditPage;
use bursar_protocol::messages::{self, HeldCredit, ProcessUsage, Quota, RejectReason, Response};
use bursar_protocol::units::Units;
use bursar_protocol::{POISON_SINCE, VERSION};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::accounts::Books;
use super::checkpoint::{Content, Entry, Record};
use super::closer::Closer;
use super::context_size::ContextSizes;
use super::orphan_bound::Own;
use super::recovery::{Fault, Poisonings};
use super::{Account, Charges, Credit, MAX_PROCESSES, Membership, Process, Served, Usage};
use crate::ledger::Moment;
use crate::units::{Bytes, GpuUuid};
use denials::{Told, ToldOfAll, Why};
use pages::Pages;
use recording::{Change, Changes};
use siblings::Siblings;

/// What a process may take besides what it charges: kernels' code, heaps of the device. It decides
/// only when the memory of an image that exec replaced counts as gone, or what an exporter left
/// with an importer.
const UNCHARGED: Bytes = Bytes::mib(256);

/// The same where contexts are not charged: a little more than any model's context.
const UNCHARGED_WITH_CONTEXT: Bytes = Bytes::gib(1);

/// The state of one container.
pub(super) struct Container {
    served: Served,
    accounts: Vec<Account>,
    credit: Credit,
    record: Record,
    members: BTreeMap<u32, Member>,
    /// The record was lost, and the driver has not said yet who has memory: until then nobody gets
    /// more.
    record_lost: bool,
    /// The cgroup of the container that its living processes are in.
    home: Option<String>,
    denied: Vec<u64>,
    /// None where contexts are not charged.
    contexts: Option<Arc<ContextSizes>>,
    denied_by: BTreeMap<String, u64>,
    /// What of it is on record.
    told: Told,
    /// The log lines that are written once for all containers.
    told_of_all: ToldOfAll,
    requests: u64,
    /// What each account was given at birth.
    ceilings: Vec<Units>,
    /// What accounts were lowered to since.
    orders: Vec<Option<Units>>,
    /// When an image ended last.
    retired_at: Option<Instant>,
    /// P of the image that said hello last.
    generation: u64,
    poisonings: Poisonings,
    /// Faults that nobody was told of yet.
    news: Vec<Fault>,
    /// Whether a GPU of it is drained.
    drained: bool,
    pages: Pages,
    /// What is to be on record.
    changes: Changes,
    /// Wakes the task that settles what ended images had.
    stirred: Arc<Notify>,
    /// Wakes the tasks that prove free what dead processes exported.
    exports: watch::Sender<()>,
    /// None in tests without sockets.
    closer: Option<Arc<Closer>>,
    /// The containers of its claim, which share its quota.
    siblings: Option<Siblings>,
}

/// How long the driver takes to have back what an image had: 112 ms for 100 GiB (F8 in
/// docs/facts.md), and some.
const SETTLING: Duration = Duration::from_secs(1);

const _: () = assert!(MAX_PROCESSES <= messages::MAX_LISTED);

/// A process that said hello, or that the record knows.
struct Member {
    process: Process,
    image: u64,
    /// P: which of the container's images it is.
    generation: u64,
    /// The version of the protocol that it speaks; 1 while that is not known.
    version: u16,
    /// What it is called in each pid namespace around it: fixed when it began.
    pids: Vec<u32>,
    /// None until it says hello again to a restarted agent.
    page: Option<CreditPage>,
    /// The descriptor of that page, for the next process when this one dies.
    page_fd: Option<Arc<OwnedFd>>,
    /// Whether it said anything after its hello: only then does it use the page that it was sent.
    /// One that was stopped, or gave up waiting, goes on with the page that it had.
    uses_page: bool,
    /// The most of its use that it had exported whenever it told, by account.
    exported: Vec<Units>,
    /// Whether a grant did not go into its page, which it never does to a process that charges: it
    /// gets nothing more.
    spoiled: bool,
    /// Ends the task that looks after it, when another takes over.
    ended: CancellationToken,
}

/// Whom the driver is asked about: who was dead before it was, by pid and account.
pub(super) type Questions = Books;

/// What a process is answered to its hello.
pub(super) struct Admitted {
    pub(super) welcome: Response,
    pub(super) page: Arc<OwnedFd>,
    /// What has to be on record before the process is answered.
    pub(super) change: Change,
    /// Cancelled when another connection takes this process over.
    pub(super) ended: CancellationToken,
    /// Whether the process had another image before.
    pub(super) replaced: bool,
}

/// A process that the record knows.
pub(super) struct Known {
    pub(super) process: Process,
    pub(super) image: u64,
    pub(super) ended: CancellationToken,
}

impl Container {
    /// A container as the record left it, and the processes of it that still live. `served_before`:
    /// processes may live that a missing record does not tell of.
    pub(super) fn restore(
        served: Served,
        record: Record,
        served_before: bool,
        membership: &dyn Membership,
        now: Moment,
    ) -> (Container, Vec<Known>) {
        let accounts: Vec<_> = served
            .gpus
            .iter()
            .map(|(gpu, _)| Account::Gpu(gpu.clone()))
            .chain([Account::Managed])
            .collect();
        let quotas = served
            .gpus
            .iter()
            .map(|(_, quota)| quota)
            .chain([&served.managed]);
        let ceilings: Vec<_> = quotas.map(|quota| Units::within(quota.0)).collect();
        let credit = Credit::new(ceilings.clone());
        let denied = vec![0; accounts.len()];
        let content = record.read();
        let lost = content
            .as_ref()
            .map_or(served_before, |content| content.incomplete);
        let content = content.unwrap_or_default();
        let mut orders: Vec<_> = content
            .orders
            .iter()
            .map(|units| units.map(Units))
            .collect();
        orders.resize(accounts.len(), None);
        let mut container = Container {
            served,
            accounts,
            credit,
            record,
            members: BTreeMap::new(),
            record_lost: lost,
            home: None,
            denied,
            contexts: None,
            denied_by: BTreeMap::new(),
            told: Told::default(),
            told_of_all: ToldOfAll::default(),
            requests: 0,
            ceilings,
            orders,
            retired_at: None,
            generation: match content.generation {
                // Whatever was issued in this boot is less: images are no more than one in a
                // microsecond. The wall clock may have been set back meanwhile.
                0 if lost => now.0.saturating_mul(1_000),
                known => known,
            },
            poisonings: content.poisonings,
            news: Vec::new(),
            drained: false,
            pages: Pages::new(CreditPage::create),
            changes: Changes::default(),
            stirred: Arc::default(),
            exports: watch::Sender::default(),
            closer: None,
            siblings: None,
        };
        for index in 0..container.accounts.len() {
            container.apply_quota(index);
        }
        for (pid, units) in content.retired {
            container.credit.restore(pid, &to_units(&units));
            container.credit.retire(pid, &[]);
        }
        for (pid, units) in content.kept {
            container.credit.restore(pid, &to_units(&units));
            container.credit.retire(pid, &to_units(&units));
        }
        for (lease, account, units) in content.leases {
            let units = Units(units).min(Units::MAX);
            container.credit.adopt_lease(lease, account, units);
        }
        let mut known = Vec::new();
        for Entry {
            process,
            image,
            generation,
            granted,
            exported,
        } in content.processes
        {
            let exported = to_units(&exported);
            container.credit.restore(process.pid, &to_units(&granted));
            if membership.process(process.pid) != Some(process) {
                container.credit.retire(process.pid, &exported);
                container.poisonings.ended(process, generation);
                continue;
            }
            let ended = CancellationToken::new();
            known.push(Known {
                process,
                image,
                ended: ended.clone(),
            });
            container.members.insert(
                process.pid,
                Member {
                    process,
                    image,
                    generation,
                    version: 1,
                    pids: membership.pids(process.pid),
                    page: None,
                    page_fd: None,
                    uses_page: false,
                    exported,
                    spoiled: false,
                    ended,
                },
            );
        }
        let [retired, _] = container.credit.retirements();
        if !retired.is_empty() {
            // This agent has not asked the driver about the exited processes yet.
            container.retired_at = Some(Instant::now());
        }
        // So that a record that is missing next time was lost.
        container.write_record();
        (container, known)
    }

    /// Admits a process that says hello: as another image than before after an exec, as the same
    /// one when it connects again.
    pub(super) fn hello(
        &mut self,
        process: Process,
        image: u64,
        version: u16,
        holdings: &[HeldCredit],
        membership: &dyn Membership,
    ) -> Result<Admitted, RejectReason> {
        let pid = process.pid;
        let home = self.home_of(pid, membership)?;
        let known = self
            .members
            .get(&pid)
            .is_some_and(|member| (member.process, member.image) == (process, image));
        if !self.members.contains_key(&pid) && self.members.len() >= MAX_PROCESSES {
            return Err(RejectReason::Busy);
        }
        // Before anything changes: a process that gets no page stays what it was.
        let page = self.pages.take(self.accounts.len(), Instant::now());
        let (page, fd) = page.map_err(|error| {
            if let Some(untold) = self.told.due("no page", Instant::now()) {
                let allocation = self.served.allocation;
                tracing::warn!(%allocation, pid, %error, untold, "failed to make a credit page");
            }
            RejectReason::Busy
        })?;
        let (mut exported, mut generation, mut spoiled) = (Vec::new(), None, false);
        let before = self.members.remove(&pid);
        let replaced = before.is_some() && !known;
        if let Some(before) = before {
            before.ended.cancel();
            exported = before.exported();
            generation = Some(before.generation).filter(|_| known);
            spoiled = known && before.spoiled;
            if !known {
                self.credit.retire(pid, &std::mem::take(&mut exported));
                self.retired_at = Some(Instant::now());
                self.poisonings.ended(before.process, before.generation);
            }
        }
        let generation = generation.unwrap_or_else(|| {
            self.generation = self.generation.saturating_add(1);
            self.generation
        });
        let found = self.had_outside(pid);
        self.credit.has_session(pid);
        self.hear_siblings();
        self.fill(&page, pid, known, holdings, &found, &exported);
        self.home = Some(home);
        let ended = CancellationToken::new();
        self.members.insert(
            pid,
            Member {
                process,
                image,
                generation,
                version,
                pids: membership.pids(pid),
                page: Some(page),
                page_fd: Some(Arc::clone(&fd)),
                uses_page: false,
                exported,
                spoiled,
                ended: ended.clone(),
            },
        );
        self.refresh();
        self.tell_fences();
        Ok(Admitted {
            welcome: self.welcome(version, generation),
            page: fd,
            change: self.changed(),
            ended,
            replaced,
        })
    }

    /// The cgroup of a process, if that is this container's.
    fn home_of(&self, pid: u32, membership: &dyn Membership) -> Result<String, RejectReason> {
        let home = membership
            .container(pid, &self.served.pod)
            .ok_or(RejectReason::Identity)?;
        let others = self.members.keys().any(|member| *member != pid);
        match &self.home {
            Some(here) if others && *here != home => Err(RejectReason::Identity),
            _ => Ok(home),
        }
    }

    /// What the container uses of an account, told to one of its processes: each process by the pid
    /// that it has in the pid namespace of who asks, and only those that it has one in.
    pub(super) fn query(
        &self,
        pid: u32,
        account: &messages::Account,
        membership: &dyn Membership,
    ) -> Result<Response, RejectReason> {
        self.home_of(pid, membership)?;
        let index = self
            .accounts
            .iter()
            .position(|here| on_wire(here) == *account)
            .ok_or(RejectReason::Account)?;
        let depth = membership.pids(pid).len();
        let mut used = self
            .credit
            .retired(index)
            .saturating_add(self.credit.outside(index))
            .saturating_add(self.credit.leased(index))
            .saturating_add(self.credit.inherited(index));
        let mut processes = Vec::new();
        for (pid, member) in &self.members {
            let units = self.used_by(*pid, member, index);
            used = used.saturating_add(units);
            let seen = depth.checked_sub(1).and_then(|own| member.pids.get(own));
            if let Some(pid) = seen.filter(|_| units > Units::ZERO) {
                processes.push(ProcessUsage {
                    pid: *pid,
                    bytes: units.bytes(),
                });
            }
        }
        Ok(Response::Usage {
            quota: self.credit.quota(index).bytes(),
            used: used.bytes(),
            processes,
        })
    }

    /// Fills a process's new page. What the books say that it was granted counts, not what it says;
    /// only a process that they don't know is taken at its word, within the quota, and for no less
    /// than the driver was `found` to charge it beyond what is never charged.
    fn fill(
        &mut self,
        page: &CreditPage,
        pid: u32,
        known: bool,
        holdings: &[HeldCredit],
        found: &[Units],
        exported: &[Units],
    ) {
        let of =
            |amounts: &[Units], index: usize| amounts.get(index).copied().unwrap_or(Units::ZERO);
        for (index, account) in self.accounts.iter().enumerate() {
            let Some(slot) = page.slot(index) else {
                continue;
            };
            let on_wire = on_wire(account);
            let held = holdings.iter().find(|holding| holding.account == on_wire);
            let (claimed, used) =
                held.map_or((Units::ZERO, Units::ZERO), |held| (held.granted, held.used));
            let least = of(found, index).saturating_sub(Units::within(self.uncharged().0));
            let granted = if known {
                self.credit.granted_to(pid, index)
            } else {
                self.credit.admit(pid, index, claimed.max(least))
            };
            slot.set_quota(self.credit.quota(index));
            slot.set_context(self.context_of(account));
            slot.set_exported(of(exported, index));
            slot.set(CreditWord {
                granted: granted.0,
                used: used.0,
            });
        }
    }

    /// What a process had without a session, by account.
    fn had_outside(&self, pid: u32) -> Vec<Units> {
        let accounts = 0..self.accounts.len();
        accounts
            .map(|index| self.credit.outside_of(pid, index))
            .collect()
    }

    fn has_outsiders(&self) -> bool {
        (0..self.accounts.len()).any(|index| self.credit.outside(index) > Units::ZERO)
    }

    /// In the lower of both versions.
    fn welcome(&self, version: u16, generation: u64) -> Response {
        let quota = |(index, account): (usize, &Account)| Quota {
            account: on_wire(account),
            bytes: self.credit.quota(index).bytes(),
        };
        Response::Welcome {
            version: version.min(VERSION),
            generation: (version >= POISON_SINCE).then_some(generation),
            quotas: self.accounts.iter().enumerate().map(quota).collect(),
        }
    }

    /// A process said something after its hello, so it has its page. What it exported by now is on
    /// record before it is answered.
    fn heard(&mut self, pid: u32) {
        if self.hear(pid) {
            self.write_record();
        }
    }

    /// The same; whether it exported something that is to be on record.
    fn hear(&mut self, pid: u32) -> bool {
        let Some(member) = self.members.get_mut(&pid) else {
            return false;
        };
        member.uses_page = true;
        let exported = member.exported();
        let news = member.exported != exported;
        member.exported = exported;
        news
    }

    /// Whether a request would be refused for what an image had that ended a moment ago: the driver
    /// is about to have it back. A program that is executed again asks for all of its quota at
    /// once. One that was `heard` so long ago waits no more, whoever else ended since.
    pub(super) fn is_settling(&self, pid: u32, account: u8, need: Units, heard: Instant) -> bool {
        let index = usize::from(account);
        let recently = |then: Instant| then.elapsed() < SETTLING;
        let free = self
            .credit
            .free(index)
            .saturating_add(self.idle_of_others(pid, index));
        let gone = self.credit.retired(index);
        let with_retired = free
            .saturating_add(gone)
            .saturating_add(self.credit.inherited(index));
        recently(heard)
            && self.last_retired_at().is_some_and(recently)
            && !self.is_fenced(pid)
            && (free.saturating_add(Units(1))..=with_retired).contains(&need)
    }

    /// Credit for a process in the books: from what is free, then from what other processes have
    /// idle.
    fn take_credit(&mut self, pid: u32, index: usize, need: Units) -> Result<Units, Why> {
        if self.is_fenced(pid) {
            return Err(Why::Fenced);
        }
        if self.record_lost {
            return Err(Why::RecordLost);
        }
        self.hear_siblings();
        if self.credit.free(index) < need {
            let missing = need.saturating_sub(self.credit.free(index));
            // Taking idle credit only helps if it is enough.
            if self.idle_of_others(pid, index) >= missing {
                self.take_idle(pid, index, missing);
            }
        }
        let granted = self.credit.grant(pid, index, need);
        granted.map_err(|_| Why::Quota)
    }

    /// Credit of the books into the process's page. A page that it has moved away from is frozen;
    /// any other that takes none is written to without pause, or was.
    fn hand_out(&mut self, pid: u32, index: usize, units: Units) -> Result<Units, Why> {
        let member = self.members.get_mut(&pid);
        let granted = member.is_some_and(|member| {
            let page = member.page.as_ref();
            let Some(slot) = page.and_then(|page| page.slot(index)) else {
                return false;
            };
            let granted = slot.grant(units);
            member.spoiled |= !granted && !slot.word().is_frozen();
            granted
        });
        if granted {
            return Ok(units);
        }
        self.credit.give_back(pid, index, units);
        Err(Why::NoPage)
    }

    /// A process image ended. What it had stays charged.
    pub(super) fn died(&mut self, process: Process, image: u64) {
        let member = self.members.get(&process.pid);
        if member.is_none_or(|member| (member.process, member.image) != (process, image)) {
            return;
        }
        let Some(member) = self.members.remove(&process.pid) else {
            return;
        };
        self.credit.retire(process.pid, &member.exported());
        if let Some(fd) = member.page_fd {
            self.pages.give_back(fd);
        }
        self.retired_at = Some(Instant::now());
        self.poisonings.ended(process, member.generation);
        self.refresh();
        self.changed();
    }

    /// Whom the driver has to be asked about; `None` where there is nothing to ask.
    pub(super) fn questions(&self) -> Option<Questions> {
        let [retired, _] = self.credit.retirements();
        (!retired.is_empty() || self.record_lost).then(|| retired.clone())
    }

    /// The GPUs, in the accounts' order.
    pub(super) fn gpus(&self) -> Vec<GpuUuid> {
        let gpus = self.served.gpus.iter();
        gpus.map(|(gpu, _)| gpu.clone()).collect()
    }

    /// The driver says what it charges on each GPU: what it charges the dead no more is free again,
    /// but for what others may hold, and who has memory without a session is known. Who died after
    /// the question is not in the answer.
    pub(super) fn settle(
        &mut self,
        asked: &Questions,
        found: &[Charges],
        membership: &dyn Membership,
    ) {
        let before = (self.credit.clone(), self.record_lost);
        self.find_outsiders(found, membership);
        for (pid, units) in asked {
            if self.credit.retirements()[0].get(pid) == Some(units) && self.is_gone(*pid, found) {
                self.credit.release(*pid);
            }
        }
        if before != (self.credit.clone(), self.record_lost) {
            self.refresh();
            self.changed();
        }
    }

    /// Whether the driver charges nothing any more of what an image had that ended.
    fn is_gone(&self, pid: u32, found: &[Charges]) -> bool {
        found.iter().enumerate().all(|(index, charges)| {
            // After an exec the pid lives on with a new image.
            let member = self.members.get(&pid);
            let own = member.map(|member| self.own(pid, member, index));
            let own = |charged| own.map_or(Bytes::ZERO, |own| own.of(charged));
            charges
                .of(pid)
                .is_some_and(|charged| charged == own(charged))
        })
    }

    /// What the driver charges a living process by its own doing.
    fn own(&self, pid: u32, member: &Member, index: usize) -> Own {
        let exported = self.exported_by(pid, member, index);
        Own {
            of: self.served.allocation,
            uses: Bytes(self.used_by(pid, member, index).bytes()),
            exported: Bytes(exported.bytes()),
            besides: self.uncharged(),
        }
    }

    fn uncharged(&self) -> Bytes {
        match self.contexts {
            Some(_) => UNCHARGED,
            None => UNCHARGED_WITH_CONTEXT,
        }
    }

    /// After the record was lost: who has memory of these GPUs and did not say hello since is
    /// charged what the driver says. From then on the audit keeps the figures.
    fn find_outsiders(&mut self, found: &[Charges], membership: &dyn Membership) {
        if !self.record_lost {
            return;
        }
        self.record_lost = false;
        for (index, charges) in found.iter().enumerate() {
            let outside = charges.iter().filter(|(pid, _)| {
                let is_member = self.members.contains_key(pid);
                !is_member && membership.container(*pid, &self.served.pod).is_some()
            });
            // Where the driver cannot tell how much, it may be everything.
            let all = self.credit.quota(index);
            let units = |bytes: Option<Bytes>| Units::holding(bytes?.0);
            let outside = outside
                .map(|(pid, bytes)| (pid, units(bytes).unwrap_or(all)))
                .collect();
            self.credit.set_outside(index, outside);
        }
    }

    /// Changes what an account was given at birth.
    pub(super) fn resize(&mut self, account: &Account, quota: Bytes) {
        let Some(index) = self.accounts.iter().position(|here| here == account) else {
            return;
        };
        if let Some(ceiling) = self.ceilings.get_mut(index) {
            *ceiling = Units::within(quota.0);
        }
        self.apply_quota(index);
    }

    /// Writes into every page what the container's other processes use.
    pub(super) fn refresh(&self) {
        let dead = self
            .credit
            .retirements()
            .map(|book| book.len())
            .iter()
            .sum::<usize>();
        let siblings = self.members.len().saturating_sub(1) + dead;
        let siblings = u32::try_from(siblings).unwrap_or(u32::MAX);
        for index in 0..self.accounts.len() {
            let uses = self
                .members
                .iter()
                .map(|(pid, member)| (member, self.used_by(*pid, member, index)))
                .collect::<Vec<_>>();
            let all = uses.iter().map(|(_, used)| *used).sum::<Units>();
            let all = all.saturating_add(self.credit.retired(index));
            let all = all.saturating_add(self.credit.outside(index));
            let all = all.saturating_add(self.credit.leased(index));
            let all = all.saturating_add(self.credit.inherited(index));
            for (member, used) in uses {
                if let Some(slot) = member.page.as_ref().and_then(|page| page.slot(index)) {
                    slot.set_others(all.saturating_sub(used), siblings);
                }
            }
        }
    }

    /// Every account, for status and metrics.
    pub(super) fn usage(&self) -> Vec<Usage> {
        let usage = |(index, account): (usize, &Account)| Usage {
            allocation: self.served.allocation,
            account: account.clone(),
            quota: Bytes(self.credit.quota(index).bytes()),
            granted: Bytes(self.credit.granted(index).bytes()),
            used: Bytes(
                self.members
                    .iter()
                    .map(|(pid, member)| self.used_by(*pid, member, index))
                    .sum::<Units>()
                    .bytes(),
            ),
            retired: Bytes(self.credit.retired(index).bytes()),
            peak: Bytes(self.credit.peak(index).bytes()),
            denied: self.denied.get(index).copied().unwrap_or(0),
            processes: self.members.len(),
        };
        self.accounts.iter().enumerate().map(usage).collect()
    }

    /// What a process uses: what its page says, never more than it was granted; all of that
    /// while it has no page.
    fn used_by(&self, pid: u32, member: &Member, account: usize) -> Units {
        let granted = self.credit.granted_to(pid, account);
        let slot = member.page_in_use().and_then(|page| page.slot(account));
        slot.map_or(granted, |slot| Units(slot.word().used).min(granted))
    }

    fn idle_of_others(&self, pid: u32, account: usize) -> Units {
        let others = self.members.iter().filter(|(other, _)| **other != pid);
        others
            .filter_map(|(other, member)| {
                let slot = member.page_in_use()?.slot(account)?;
                Some(Units(slot.word().idle()).min(self.credit.granted_to(*other, account)))
            })
            .sum()
    }

    fn take_idle(&mut self, pid: u32, account: usize, mut missing: Units) {
        for (other, member) in self.members.iter().filter(|(other, _)| **other != pid) {
            let Some(slot) = member.page_in_use().and_then(|page| page.slot(account)) else {
                continue;
            };
            let at_most = missing.min(self.credit.granted_to(*other, account));
            let taken = slot.reclaim(at_most);
            missing = missing.saturating_sub(self.credit.give_back(*other, account, taken));
        }
    }

    /// Whether the record holds what the books say now. To be called where writes are paid for.
    fn write_now(&mut self) -> bool {
        if self.record.is_closed() {
            return false;
        }
        self.tell_siblings();
        let units =
            |accounts: &[Units]| -> Vec<u32> { accounts.iter().map(|units| units.0).collect() };
        let books = |books: &BTreeMap<u32, Vec<Units>>| {
            books
                .iter()
                .map(|(pid, accounts)| (*pid, units(accounts)))
                .collect()
        };
        let [retired, kept] = self.credit.retirements();
        let content = Content {
            processes: self
                .members
                .values()
                .map(|member| Entry {
                    process: member.process,
                    image: member.image,
                    generation: member.generation,
                    granted: units(
                        self.credit
                            .grants()
                            .get(&member.process.pid)
                            .map_or(&[], Vec::as_slice),
                    ),
                    exported: units(&member.exported),
                })
                .collect(),
            retired: books(retired),
            kept: books(kept),
            leases: self
                .credit
                .leases()
                .iter()
                .map(|(lease, (account, units))| (*lease, *account, units.0))
                .collect(),
            gpus: self.gpus(),
            incomplete: self.record_lost || self.has_outsiders(),
            orders: self
                .orders
                .iter()
                .map(|order| order.map(|units| units.0))
                .collect(),
            generation: self.generation,
            poisonings: self.poisonings.clone(),
        };
        let written = self.record.write(content);
        if let Err(error) = &written
            && let Some(untold) = self.told_of_all.due("record", Instant::now())
        {
            let allocation = self.served.allocation;
            tracing::warn!(%allocation, %error, untold, "failed to write a session record; free space in /run");
        }
        written.is_ok()
    }
}

impl Member {
    /// The page that the process charges to, as far as the agent can see it.
    fn page_in_use(&self) -> Option<&CreditPage> {
        self.page.as_ref().filter(|_| self.uses_page)
    }

    /// What of its use it has exported, by account; nothing where it never did. Never less than is
    /// on record: a tenant process may write less into its page while others hold what it exported.
    fn exported(&self) -> Vec<Units> {
        let Some(page) = self.page_in_use() else {
            return self.exported.clone();
        };
        let on_record = |index| self.exported.get(index).copied().unwrap_or(Units::ZERO);
        let exported: Vec<_> = (0..)
            .map_while(|index| Some(page.slot(index)?.exported().max(on_record(index))))
            .collect();
        if exported.iter().all(|units| *units == Units::ZERO) {
            return Vec::new();
        }
        exported
    }
}

fn to_units(units: &[u32]) -> Vec<Units> {
    units
        .iter()
        .map(|units| Units(*units).min(Units::MAX))
        .collect()
}

fn on_wire(account: &Account) -> messages::Account {
    match account {
        Account::Gpu(uuid) => messages::Account::Device(uuid.as_str().to_owned()),
        Account::Managed => messages::Account::Managed,
    }
}

#[cfg(test)]
mod tests;
