//! What the audit and a resize see of a container, and what they change of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use bursar_protocol::units::Units;

use super::super::closer::Closer;
use super::super::usage::{AccountBooks, Books, MemberBooks};
use super::denials::ToldOfAll;
use super::{Account, Container, Member};
use crate::units::Bytes;

/// The names of functions that are kept for one container: they are what its processes say.
const MOST_FUNCTIONS: usize = 32;
/// What denials of further functions are counted under.
const OTHER: &str = "other";

impl Container {
    /// The pids of exited processes whose memory the account still charges.
    pub(in crate::sessions) fn exited_pids(&self) -> Vec<u32> {
        self.credit.retired_pids()
    }

    /// The books at this moment.
    pub(in super::super) fn books(&self) -> Books {
        let bytes = |units: Units| Bytes(units.bytes());
        let accounts = self
            .usage()
            .into_iter()
            .enumerate()
            .map(|(index, usage)| AccountBooks {
                account: usage.account,
                quota: usage.quota,
                granted: usage.granted,
                used: usage.used,
                retired: usage.retired,
                exported: bytes(self.exported_by_living(index)),
                leased: bytes(self.credit.leased(index)),
                outside: bytes(self.credit.outside(index)),
                peak: usage.peak,
            });
        let granted = |pid| {
            let accounts = 0..self.accounts.len();
            accounts.map(move |index| bytes(self.credit.granted_to(pid, index)))
        };
        let members = self.members.iter().map(|(pid, member)| MemberBooks {
            process: member.process,
            granted: granted(*pid).collect(),
            forged: self.is_forged(*pid, member),
        });
        Books {
            allocation: self.served.allocation,
            pod: self.served.pod.clone(),
            home: self.home.clone(),
            accounts: accounts.collect(),
            members: members.collect(),
            generation: self.generation,
            retired: self.credit.retired_pids(),
            requests: self.requests,
            denied: self.denied_by.clone().into_iter().collect(),
            unclosed: self.closer.as_ref().map_or(0, |closer| closer.waiting()),
            poisoned: self.poisonings.poisoned,
            restarted: self.poisonings.restarted,
        }
    }

    /// Who closes its sockets.
    pub(in super::super) fn close_by(&mut self, closer: Arc<Closer>) {
        self.closer = Some(closer);
    }

    /// Shares the log lines that are written once for all containers.
    pub(in super::super) fn tell_with(&mut self, told: ToldOfAll) {
        self.told_of_all = told;
    }

    /// Keeps no more than so many pages of dead processes for living ones.
    pub(in super::super) fn keep_pages(&mut self, count: usize) {
        self.pages.keep_at_most(count);
    }

    /// Whether a process's page says another grant than the books. Nobody but this agent writes grants, and it
    /// writes both under one lock. A page that its process has moved away from is frozen.
    fn is_forged(&self, pid: u32, member: &Member) -> bool {
        let Some(page) = &member.page else {
            return false;
        };
        (0..self.accounts.len()).any(|index| {
            let word = page.slot(index).map(|slot| slot.word());
            word.is_some_and(|word| {
                !word.is_frozen() && word.granted != self.credit.granted_to(pid, index).0
            })
        })
    }

    /// What processes without a session have of an account, by pid, replaces what was known before. Those that
    /// have one by now are in the books already.
    pub(in super::super) fn set_outside(
        &mut self,
        account: &Account,
        mut charged: BTreeMap<u32, Bytes>,
    ) {
        let Some(index) = self.accounts.iter().position(|here| here == account) else {
            return;
        };
        charged.retain(|pid, _| !self.members.contains_key(pid));
        let before = self.credit.outside(index);
        let charged = charged.into_iter();
        let charged = charged.map(|(pid, bytes)| (pid, Units::within(bytes.0)));
        self.credit.set_outside(index, charged.collect());
        if self.credit.outside(index) != before {
            self.refresh();
        }
    }

    /// Lowers an account below what was asked for at birth, or with none lifts that again. It is on record, and
    /// holds until it is lifted.
    pub(in super::super) fn order(&mut self, account: &Account, bytes: Option<Bytes>) {
        let Some(index) = self.accounts.iter().position(|here| here == account) else {
            return;
        };
        let Some(order) = self.orders.get_mut(index) else {
            return;
        };
        let ordered = bytes.map(|bytes| Units::within(bytes.0));
        if *order == ordered {
            return;
        }
        *order = ordered;
        self.apply_quota(index);
        self.write_record();
    }

    /// Takes credit that lies idle where more is taken than the quota: after a quota was made smaller, what is
    /// freed must not be used again.
    pub(in super::super) fn reclaim(&mut self) {
        let mut changed = false;
        for index in 0..self.accounts.len() {
            let excess = self.credit.excess(index);
            if excess > Units::ZERO {
                let before = self.credit.granted(index);
                // No process has the pid 0: none is spared.
                self.take_idle(0, index, excess);
                changed |= self.credit.granted(index) != before;
            }
        }
        if changed {
            self.write_record();
        }
    }

    /// Brings an account to what was asked for at birth, or less where that was ordered.
    pub(super) fn apply_quota(&mut self, index: usize) {
        let ceiling = self.ceilings.get(index).copied().unwrap_or(Units::ZERO);
        let ordered = self.orders.get(index).copied().flatten();
        let quota = ordered.map_or(ceiling, |ordered| ordered.min(ceiling));
        self.credit.set_quota(index, quota);
        for slot in self
            .members
            .values()
            .filter_map(|member| member.page.as_ref()?.slot(index))
        {
            slot.set_quota(quota);
        }
        self.reclaim();
    }

    /// Counts a denial by its function, as far as the names are few and look like names.
    pub(super) fn count_denial(&mut self, function: &str) -> String {
        let is_name = (1..=64).contains(&function.len())
            && function
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        // One place is for all others.
        let has_room = self.denied_by.len() + 1 < MOST_FUNCTIONS;
        let known = self.denied_by.contains_key(function) || has_room;
        let name = if is_name && known { function } else { OTHER };
        let count = self.denied_by.entry(name.to_owned()).or_default();
        *count = count.saturating_add(1);
        name.to_owned()
    }
}
