//! One container's processes, their credit pages, and the books that they are held to.
//!
//! Nothing here waits: every call is a few memory operations and at most one small write to tmpfs.

mod contexts;
mod oversight;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bursar_protocol::page::{CreditPage, PageError};
use bursar_protocol::units::Units;
use bursar_protocol::wire::{self, Holding, Listed, Quota, Reason, ToShim};
use bursar_protocol::word::Word;
use tokio_util::sync::CancellationToken;

use super::contexts::ContextSizes;
use super::record::{Content, Entry, Record};
use super::{Account, Credit, MAX_PROCESSES, Membership, Process, Served, Usage};
use crate::units::{Bytes, GpuUuid};

/// What a context may take of a process that charged nothing else: a little more than any model's.
/// It decides only when the memory of an image that exec replaced counts as gone.
const CONTEXT_ALLOWANCE: Bytes = Bytes::gib(1);

/// The state of one container.
pub(super) struct Container {
    served: Served,
    accounts: Vec<Account>,
    credit: Credit,
    record: Record,
    members: BTreeMap<u32, Member>,
    /// The cgroup of the container that its living processes are in.
    home: Option<String>,
    denied: Vec<u64>,
    /// None where contexts are not charged.
    contexts: Option<Arc<ContextSizes>>,
    denied_by: BTreeMap<String, u64>,
    requests: u64,
    /// What each account was given at birth.
    ceilings: Vec<Units>,
    /// What accounts were lowered to since.
    orders: Vec<Option<Units>>,
    make_page: MakePage,
}

const _: () = assert!(MAX_PROCESSES <= wire::MAX_LISTED);

/// Makes a credit page with so many accounts.
type MakePage = fn(usize) -> Result<(CreditPage, OwnedFd), PageError>;

/// A process that said hello, or that the record knows.
struct Member {
    process: Process,
    image: u64,
    /// What it is called in each pid namespace around it: fixed when it began.
    pids: Vec<u32>,
    /// None until it says hello again to a restarted agent.
    page: Option<CreditPage>,
    /// Ends the task that looks after it, when another takes over.
    ended: CancellationToken,
}

/// What a process is answered to its hello.
pub(super) struct Admitted {
    pub(super) welcome: ToShim,
    pub(super) page: OwnedFd,
    /// Cancelled when another connection takes this process over.
    pub(super) ended: CancellationToken,
}

/// A process that the record knows.
pub(super) struct Known {
    pub(super) process: Process,
    pub(super) image: u64,
    pub(super) ended: CancellationToken,
}

impl Container {
    /// A container as the record left it, and the processes of it that still live.
    pub(super) fn restore(
        served: Served,
        record: Record,
        membership: &dyn Membership,
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
            home: None,
            denied,
            contexts: None,
            denied_by: BTreeMap::new(),
            requests: 0,
            ceilings,
            orders,
            make_page: CreditPage::create,
        };
        for index in 0..container.accounts.len() {
            container.apply_quota(index);
        }
        for (pid, units) in content.retired {
            container.credit.restore(pid, &to_units(&units));
            container.credit.retire(pid);
        }
        let mut known = Vec::new();
        for Entry {
            process,
            image,
            granted,
        } in content.processes
        {
            container.credit.restore(process.pid, &to_units(&granted));
            if membership.process(process.pid) != Some(process) {
                container.credit.retire(process.pid);
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
                    pids: membership.pids(process.pid),
                    page: None,
                    ended,
                },
            );
        }
        (container, known)
    }

    /// Admits a process that says hello: as another image than before after an exec, as the same
    /// one when it connects again.
    pub(super) fn hello(
        &mut self,
        process: Process,
        image: u64,
        holdings: &[Holding],
        membership: &dyn Membership,
    ) -> Result<Admitted, Reason> {
        let pid = process.pid;
        let home = self.home_of(pid, membership)?;
        let known = self
            .members
            .get(&pid)
            .is_some_and(|member| (member.process, member.image) == (process, image));
        if !self.members.contains_key(&pid) && self.members.len() >= MAX_PROCESSES {
            return Err(Reason::Busy);
        }
        // Before anything changes: a process that gets no page stays what it was.
        let (page, fd) = (self.make_page)(self.accounts.len()).map_err(|error| {
            tracing::warn!(allocation = %self.served.allocation, pid, %error, "credit page failed");
            Reason::Busy
        })?;
        if let Some(before) = self.members.remove(&pid) {
            before.ended.cancel();
            if !known {
                self.credit.retire(pid);
            }
        }
        self.credit.has_session(pid);
        self.fill(&page, pid, known, holdings);
        self.home = Some(home);
        let ended = CancellationToken::new();
        self.members.insert(
            pid,
            Member {
                process,
                image,
                pids: membership.pids(pid),
                page: Some(page),
                ended: ended.clone(),
            },
        );
        self.refresh();
        self.write_record();
        Ok(Admitted {
            welcome: self.welcome(),
            page: fd,
            ended,
        })
    }

    /// The cgroup of a process, if that is this container's.
    fn home_of(&self, pid: u32, membership: &dyn Membership) -> Result<String, Reason> {
        let home = membership
            .container(pid, &self.served.pod)
            .ok_or(Reason::Identity)?;
        let others = self.members.keys().any(|member| *member != pid);
        match &self.home {
            Some(here) if others && *here != home => Err(Reason::Identity),
            _ => Ok(home),
        }
    }

    /// What the container uses of an account, told to one of its processes: each process by the pid
    /// that it has in the pid namespace of who asks, and only those that it has one in.
    pub(super) fn query(
        &self,
        pid: u32,
        account: &wire::Account,
        membership: &dyn Membership,
    ) -> Result<ToShim, Reason> {
        self.home_of(pid, membership)?;
        let index = self
            .accounts
            .iter()
            .position(|here| on_wire(here) == *account)
            .ok_or(Reason::Account)?;
        let depth = membership.pids(pid).len();
        let mut used = self.credit.retired(index);
        let mut processes = Vec::new();
        for (pid, member) in &self.members {
            let units = self.used_by(*pid, member, index);
            used = used.saturating_add(units);
            let seen = depth.checked_sub(1).and_then(|own| member.pids.get(own));
            if let Some(pid) = seen.filter(|_| units > Units::ZERO) {
                processes.push(Listed {
                    pid: *pid,
                    bytes: units.bytes(),
                });
            }
        }
        Ok(ToShim::Usage {
            quota: self.credit.quota(index).bytes(),
            used: used.bytes(),
            processes,
        })
    }

    /// Fills a process's new page. What the books say that it was granted counts, not what it says;
    /// only a process that they don't know is taken at its word, within the quota.
    fn fill(&mut self, page: &CreditPage, pid: u32, known: bool, holdings: &[Holding]) {
        for (index, account) in self.accounts.iter().enumerate() {
            let Some(slot) = page.slot(index) else {
                continue;
            };
            let on_wire = on_wire(account);
            let held = holdings.iter().find(|holding| holding.account == on_wire);
            let (claimed, used) =
                held.map_or((Units::ZERO, Units::ZERO), |held| (held.granted, held.used));
            let granted = if known {
                self.credit.granted_to(pid, index)
            } else {
                self.credit.admit(pid, index, claimed)
            };
            slot.set_quota(self.credit.quota(index));
            slot.set_context(self.context_of(account));
            slot.set(Word {
                granted: granted.0,
                used: used.0,
            });
        }
    }

    fn welcome(&self) -> ToShim {
        let quota = |(index, account): (usize, &Account)| Quota {
            account: on_wire(account),
            bytes: self.credit.quota(index).bytes(),
        };
        ToShim::Welcome {
            version: bursar_protocol::VERSION,
            quotas: self.accounts.iter().enumerate().map(quota).collect(),
        }
    }

    /// Answers a request for credit: from what is free, then from what other processes have idle.
    pub(super) fn request(&mut self, pid: u32, account: u8, need: Units) -> ToShim {
        let index = usize::from(account);
        self.requests = self.requests.saturating_add(1);
        if self.credit.free(index) < need {
            let missing = need.saturating_sub(self.credit.free(index));
            // Taking idle credit only helps if it is enough.
            if self.idle_of_others(pid, index) >= missing {
                self.take_idle(pid, index, missing);
            }
        }
        let refused = |free| ToShim::Refused { account, free };
        let Ok(units) = self.credit.grant(pid, index, need) else {
            return refused(self.credit.free(index));
        };
        if !self.write_record() {
            self.credit.give_back(pid, index, units);
            return refused(Units::ZERO);
        }
        let page = self
            .members
            .get(&pid)
            .and_then(|member| member.page.as_ref());
        if page
            .and_then(|page| page.slot(index))
            .is_some_and(|slot| slot.grant(units))
        {
            ToShim::Granted { account, units }
        } else {
            self.credit.give_back(pid, index, units);
            refused(self.credit.free(index))
        }
    }

    /// A process was denied memory.
    pub(super) fn denied(&mut self, pid: u32, account: u8, bytes: u64, function: &str) {
        if let Some(count) = self.denied.get_mut(usize::from(account)) {
            *count = count.saturating_add(1);
        }
        self.count_denial(function);
        tracing::debug!(allocation = %self.served.allocation, pid, bytes, function, "allocation denied");
    }

    /// A process image ended. What it had stays charged.
    pub(super) fn died(&mut self, process: Process, image: u64) {
        let member = self.members.get(&process.pid);
        if !member.is_some_and(|member| (member.process, member.image) == (process, image)) {
            return;
        }
        self.members.remove(&process.pid);
        self.credit.retire(process.pid);
        self.refresh();
        self.write_record();
    }

    /// The pids of images that ended and are still charged.
    pub(super) fn retired(&self) -> Vec<u32> {
        self.credit.retired_pids()
    }

    /// The GPUs, in the accounts' order.
    pub(super) fn gpus(&self) -> Vec<GpuUuid> {
        let gpus = self.served.gpus.iter();
        gpus.map(|(gpu, _)| gpu.clone()).collect()
    }

    /// The driver says what it charges `pid` on each GPU: where that leaves nothing of the image
    /// that ended, its memory is free again.
    pub(super) fn settle(&mut self, pid: u32, charged: &[Bytes]) {
        let gone = charged.iter().enumerate().all(|(index, charged)| {
            // After an exec the pid lives on with a new image, and a context of its own.
            let own = self.members.get(&pid).map_or(Bytes::ZERO, |_| {
                Bytes(
                    self.credit
                        .granted_to(pid, index)
                        .bytes()
                        .saturating_add(CONTEXT_ALLOWANCE.0),
                )
            });
            *charged <= own
        });
        if gone {
            self.credit.release(pid);
            self.refresh();
            self.write_record();
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
        let siblings = self.members.len().saturating_sub(1) + self.credit.retired_pids().len();
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
        let slot = member.page.as_ref().and_then(|page| page.slot(account));
        slot.map_or(granted, |slot| Units(slot.word().used).min(granted))
    }

    fn idle_of_others(&self, pid: u32, account: usize) -> Units {
        let others = self.members.iter().filter(|(other, _)| **other != pid);
        others
            .filter_map(|(other, member)| {
                let slot = member.page.as_ref()?.slot(account)?;
                Some(Units(slot.word().idle()).min(self.credit.granted_to(*other, account)))
            })
            .sum()
    }

    fn take_idle(&mut self, pid: u32, account: usize, mut missing: Units) {
        for (other, member) in self.members.iter().filter(|(other, _)| **other != pid) {
            let Some(slot) = member.page.as_ref().and_then(|page| page.slot(account)) else {
                continue;
            };
            let at_most = missing.min(self.credit.granted_to(*other, account));
            let taken = slot.take_back(at_most);
            missing = missing.saturating_sub(self.credit.give_back(*other, account, taken));
        }
    }

    /// Whether the record holds what the books say now.
    fn write_record(&mut self) -> bool {
        let units = |accounts: Option<&Vec<Units>>| -> Vec<u32> {
            accounts
                .map(|accounts| accounts.iter().map(|units| units.0).collect())
                .unwrap_or_default()
        };
        let content = Content {
            processes: self
                .members
                .values()
                .map(|member| Entry {
                    process: member.process,
                    image: member.image,
                    granted: units(self.credit.grants().get(&member.process.pid)),
                })
                .collect(),
            retired: self
                .credit
                .retirements()
                .iter()
                .map(|(pid, accounts)| (*pid, units(Some(accounts))))
                .collect(),
            orders: self
                .orders
                .iter()
                .map(|order| order.map(|units| units.0))
                .collect(),
        };
        let written = self.record.write(content);
        if let Err(error) = &written {
            tracing::warn!(allocation = %self.served.allocation, %error, "session record not written");
        }
        written.is_ok()
    }
}

fn to_units(units: &[u32]) -> Vec<Units> {
    units
        .iter()
        .map(|units| Units(*units).min(Units::MAX))
        .collect()
}

fn on_wire(account: &Account) -> wire::Account {
    match account {
        Account::Gpu(uuid) => wire::Account::Device(uuid.as_str().to_owned()),
        Account::Managed => wire::Account::Managed,
    }
}

#[cfg(test)]
mod tests;
