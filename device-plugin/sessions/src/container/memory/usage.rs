//! Reports who uses the container's accounts, and for what.

use std::collections::BTreeMap;

use bursar_gpu::memory_sample::ProcessMemory;
use bursar_ledger::units::{Bytes, GpuUuid, LeaseId};
use bursar_protocol::messages::{self, ProcessUsage, Quota, Response};
use bursar_protocol::units::Units;

use super::super::to_wire_account;
use super::ContainerMemory;
use super::process::ProcessState;
use crate::Account;
use crate::accounts::AmountsByPid;
use crate::orphan_bound::OwnMemory;
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

    /// The units that live processes report as exported, at most their grants.
    fn live_exports(&self, index: usize) -> Units {
        let members = self.processes.values();
        members.map(|state| self.exports_of(state, index)).sum()
    }

    /// The units that one live process reports as exported, at most its grant.
    fn exports_of(&self, state: &ProcessState, index: usize) -> Units {
        let exported = state.current_exports().get(index).copied();
        let granted = self.credit.granted_to(state.process.pid, index);
        exported.unwrap_or(Units::ZERO).min(granted)
    }

    /// The orphaned exports of this GPU that are not proven free.
    pub(crate) fn orphaned_exports(&self, gpu: &GpuUuid) -> Option<AmountsByPid> {
        let any = self.credit.orphaned(self.account_index(gpu)?) > Units::ZERO;
        let [_, orphaned] = self.credit.exited_and_orphaned();
        any.then(|| orphaned.clone())
    }

    /// The bytes of each GPU that processes have exported, live or exited.
    pub(crate) fn exported_bytes(&self) -> Vec<(GpuUuid, Bytes)> {
        let exported = |index: usize| {
            let live = self.live_exports(index);
            Bytes(live.saturating_add(self.credit.orphaned(index)).bytes())
        };
        let gpus = self.gpus().enumerate();
        gpus.map(|(index, gpu)| (gpu.clone(), exported(index)))
            .collect()
    }

    /// The charged leases, each with its GPU and bytes.
    pub(crate) fn charged_leases(&self) -> BTreeMap<LeaseId, (GpuUuid, Bytes)> {
        let gpus: Vec<_> = self.gpus().collect();
        let leases = self.credit.leases().iter();
        leases
            .filter_map(|(lease, (index, units))| {
                let gpu = (*gpus.get(*index)?).clone();
                Some((LeaseId(*lease), (gpu, Bytes(units.bytes()))))
            })
            .collect()
    }

    /// The bytes that a live process itself has allocated.
    fn own_memory(&self, state: &ProcessState, index: usize) -> OwnMemory {
        OwnMemory {
            allocation: self.allocation,
            charged: Bytes(self.used_by(state, index).bytes()),
            exported: Bytes(self.exports_of(state, index).bytes()),
            uncharged_margin: self.uncharged_margin(),
        }
    }

    /// The bytes of a GPU that each live process itself has allocated.
    pub(crate) fn own_memory_on(&self, gpu: &GpuUuid) -> BTreeMap<u32, OwnMemory> {
        let Some(index) = self.account_index(gpu) else {
            return BTreeMap::new();
        };
        let members = self.processes.iter();
        let own = members.map(|(pid, state)| (*pid, self.own_memory(state, index)));
        own.collect()
    }

    /// Whether the driver has freed all memory of an exited image.
    pub(crate) fn is_reclaimed(&self, pid: u32, samples: &[ProcessMemory]) -> bool {
        samples.iter().enumerate().all(|(index, sample)| {
            // After an exec the pid lives on with a new image.
            let state = self.processes.get(&pid);
            let own = state.map(|state| self.own_memory(state, index));
            let own = |charged| own.map_or(Bytes::ZERO, |own| own.own_part(charged));
            sample
                .bytes_of(pid)
                .is_some_and(|charged| charged == own(charged))
        })
    }
}
