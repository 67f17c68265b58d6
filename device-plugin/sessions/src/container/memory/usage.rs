//! Reports the usage of the container's accounts.

use bursar_ledger::units::Bytes;
use bursar_protocol::messages::{self, ProcessUsage, Quota, Response};
use bursar_protocol::units::Units;

use super::super::to_wire_account;
use super::ContainerMemory;
use super::process::ProcessState;
use crate::Account;
use crate::usage::{AccountBalance, ProcessCredit};

impl ContainerMemory {
    /// The index of the account that a message names.
    pub(crate) fn wire_account_index(&self, account: &messages::Account) -> Option<usize> {
        let mut accounts = self.accounts.iter();
        accounts.position(|other| to_wire_account(other) == *account)
    }

    /// Answers a query for the usage of an account. The answer lists each process by its pid at
    /// this level of nested pid namespaces, and omits processes without a pid there.
    pub(crate) fn answer_query(&self, index: usize, level: Option<usize>) -> Response {
        let mut used = self.used_beside_live(index);
        let mut processes = Vec::new();
        for (state, units) in self.uses(index) {
            used = used.saturating_add(units);
            let pid = level.and_then(|level| state.namespace_pids.get(level));
            if let Some(pid) = pid.filter(|_| units > Units::ZERO) {
                processes.push(ProcessUsage {
                    pid: *pid,
                    bytes: units.bytes(),
                });
            }
        }
        Response::Usage {
            quota: self.credit.quota(index).bytes(),
            used: used.bytes(),
            processes,
        }
    }

    /// The quotas of the accounts, for the answer to a hello.
    pub(crate) fn wire_quotas(&self) -> Vec<Quota> {
        let quota = |(index, account): (usize, &Account)| Quota {
            account: to_wire_account(account),
            bytes: self.credit.quota(index).bytes(),
        };
        self.accounts.iter().enumerate().map(quota).collect()
    }

    /// The balances of the accounts at this moment.
    pub(crate) fn balances(&self) -> Vec<AccountBalance> {
        let bytes = |units: Units| Bytes(units.bytes());
        let credit = &self.credit;
        // The accounts of the GPUs have the bytes of covered managed memory.
        let shown = |index: usize, units: Units| match credit.covered() == Some(index) {
            true => Bytes::ZERO,
            false => bytes(units),
        };
        let balance = |(index, account): (usize, &Account)| AccountBalance {
            account: account.clone(),
            quota: shown(index, credit.quota(index)),
            granted: shown(index, credit.granted(index)),
            used: shown(index, self.uses(index).map(|(_, used)| used).sum()),
            exited: shown(index, credit.exited(index)),
            exported: bytes(self.live_exports(index)),
            leased: bytes(credit.leased(index)),
            managed: bytes(self.covered_use(index)),
            untracked: bytes(credit.untracked(index)),
            overhead: bytes(credit.overhead(index)),
            peak: shown(index, credit.peak(index)),
        };
        self.accounts.iter().enumerate().map(balance).collect()
    }

    /// The credit of each live process.
    pub(crate) fn process_credits(&self) -> Vec<ProcessCredit> {
        let granted = |pid, index| Bytes(self.credit.granted_to(pid, index).bytes());
        let of_all = |pid| (0..self.accounts.len()).map(move |index| granted(pid, index));
        let member = |state: &ProcessState| ProcessCredit {
            process: state.process,
            granted: of_all(state.process.pid).collect(),
            tampered: self.is_page_tampered(state),
        };
        self.processes.values().map(member).collect()
    }

    /// Whether a process was ever granted managed memory.
    pub(crate) fn had_managed(&self) -> bool {
        let managed = self.index_of(&Account::Managed);
        managed.is_some_and(|index| self.credit.peak(index) > Units::ZERO)
    }

    /// Whether a process's page shows another grant than the accounts. Only the agent writes
    /// grants, and it writes both under one lock. A page that its process has left is frozen.
    fn is_page_tampered(&self, state: &ProcessState) -> bool {
        (0..self.accounts.len()).any(|index| {
            let granted = self.credit.granted_to(state.process.pid, index);
            let word = state.slot(index).map(|slot| slot.word());
            word.is_some_and(|word| !word.is_frozen() && word.granted != granted.0)
        })
    }
}
