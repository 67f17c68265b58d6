//! Accounts for the memory of a container: its credit, and the processes that have it.

mod credit;
mod process;
mod sessions;
mod usage;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use bursar_gpu::memory_sample::ProcessMemory;
use bursar_ledger::units::{AllocationId, Bytes, GpuUuid};
use bursar_protocol::credit_page::{AccountSlot, CreditPage};
use bursar_protocol::units::Units;

use super::pages::PagePool;
use super::quotas::Quotas;
use super::siblings::{ClaimMember, ClaimSiblings};
use crate::context_size::ContextSizes;
use crate::{Account, CreditAccounts, SessionSpec};
use process::ProcessState;

pub(crate) use sessions::AdmittedProcess;

/// The bytes that a process may take without a charge: code of kernels, heaps of the device. The
/// margin only decides when memory of a replaced image counts as freed, and which part of an
/// importer's bytes an exporter left.
const UNCHARGED_MARGIN: Bytes = Bytes::mib(256);

/// The margin where the agent does not charge contexts: a little more than a context of any model.
pub(crate) const UNCHARGED_MARGIN_WITH_CONTEXT: Bytes = Bytes::gib(1);

/// The accounts of a container, and the processes that are granted credit of them.
pub(crate) struct ContainerMemory {
    allocation: AllocationId,
    accounts: Vec<Account>,
    credit: CreditAccounts,
    processes: BTreeMap<u32, ProcessState>,
    /// The process generation of the last image that said hello.
    generation: u64,
    pages: PagePool,
    quotas: Quotas,
    /// `None` where the agent does not charge contexts.
    context_sizes: Option<Arc<ContextSizes>>,
    /// The managed memory that the driver moves away for device memory, by account.
    evictable: Vec<Units>,
    /// The claim that the container shares the quotas of its GPUs with.
    claim: ClaimMember,
}

impl ContainerMemory {
    /// The accounts of a container to which nothing is charged.
    pub(crate) fn new(spec: &SessionSpec) -> ContainerMemory {
        let gpus = spec.gpus.iter().map(|(gpu, _)| Account::Gpu(gpu.clone()));
        let quotas = spec.gpus.iter().map(|(_, quota)| quota);
        let quotas = quotas.chain([&spec.managed]);
        let requested: Vec<_> = quotas.map(|quota| Units::within(quota.0)).collect();
        ContainerMemory {
            allocation: spec.allocation,
            accounts: gpus.chain([Account::Managed]).collect(),
            credit: CreditAccounts::new(requested.clone()),
            processes: BTreeMap::new(),
            generation: 0,
            pages: PagePool::new(CreditPage::create),
            quotas: Quotas::new(requested),
            context_sizes: None,
            evictable: vec![Units::ZERO; spec.gpus.len()],
            claim: ClaimMember::new(spec.allocation, spec.gpus.len()),
        }
    }

    pub(crate) fn allocation(&self) -> AllocationId {
        self.allocation
    }

    pub(crate) fn credit(&self) -> &CreditAccounts {
        &self.credit
    }

    pub(super) fn credit_mut(&mut self) -> &mut CreditAccounts {
        &mut self.credit
    }

    pub(super) fn claim_mut(&mut self) -> &mut ClaimMember {
        &mut self.claim
    }

    pub(crate) fn pages_mut(&mut self) -> &mut PagePool {
        &mut self.pages
    }

    pub(crate) fn account(&self, index: usize) -> Option<&Account> {
        self.accounts.get(index)
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// Shares the claim's quota from now on.
    pub(crate) fn join_claim(&mut self, siblings: ClaimSiblings) {
        self.claim.join(siblings, &mut self.credit);
    }

    /// Publishes the container's charges to the others of its claim.
    pub(crate) fn publish_to_siblings(&self) {
        self.claim.publish(&self.credit);
    }

    /// Counts the current charges of the others of its claim against its quota.
    pub(crate) fn update_from_siblings(&mut self) {
        self.claim.update(&mut self.credit);
    }

    /// When the last image of this container, or of another one of its claim, exited.
    pub(crate) fn last_exit_in_claim(&self) -> Option<Instant> {
        self.claim.last_exit()
    }

    /// Writes the usage of the container's other processes into every page.
    pub(crate) fn refresh_pages(&self) {
        let [exited, orphaned] = self.credit.exited_and_orphaned();
        let siblings = self.processes.len().saturating_sub(1) + exited.len() + orphaned.len();
        let siblings = u32::try_from(siblings).unwrap_or(u32::MAX);
        for index in 0..self.accounts.len() {
            let uses: Vec<_> = self.uses(index).collect();
            let live: Units = uses.iter().map(|(_, used)| *used).sum();
            let all = live.saturating_add(self.used_beside_live(index));
            // A process whose covered managed memory changes must ask for the figure.
            let covered = self.credit.covered_by(index);
            let has_covered =
                covered.is_some_and(|covered| self.credit.granted(covered) > Units::ZERO);
            let siblings = siblings.saturating_add(u32::from(has_covered));
            for (state, used) in uses {
                if let Some(slot) = state.slot(index) {
                    slot.set_others(all.saturating_sub(used), siblings);
                }
            }
        }
    }

    /// The live processes, each with the units that it uses of an account.
    fn uses(&self, account: usize) -> impl Iterator<Item = (&ProcessState, Units)> {
        let members = self.processes.values();
        members.map(move |state| (state, self.used_by(state, account)))
    }

    /// The units of an account that are in use, without those that live processes use of it.
    fn used_beside_live(&self, account: usize) -> Units {
        self.credit
            .charged_beside_grants(account)
            .saturating_add(self.covered_use(account))
    }

    /// The bytes that a process uses: the figure of its page, at most its grant. Without a page the
    /// whole grant counts.
    fn used_by(&self, state: &ProcessState, account: usize) -> Units {
        let granted = self.credit.granted_to(state.process.pid, account);
        let slot = state.adopted_slot(account);
        slot.map_or(granted, |slot| Units(slot.word().used).min(granted))
    }

    /// Notes that a process has sent a message, and so has its page. Returns whether its exports
    /// have changed: the checkpoint must hold them before the agent answers.
    pub(crate) fn update_exports(&mut self, pid: u32) -> bool {
        let Some(state) = self.processes.get_mut(&pid) else {
            return false;
        };
        state.has_adopted_page = true;
        let exported = state.current_exports();
        let before = std::mem::replace(&mut state.exported, exported);
        before != state.exported
    }

    /// The covered managed memory that counts against an account.
    fn covered_use(&self, account: usize) -> Units {
        let Some(covered) = self.credit.covered_by(account) else {
            return Units::ZERO;
        };
        let live: Units = self.uses(covered).map(|(_, used)| used).sum();
        live.saturating_add(self.credit.exited(covered))
    }

    /// The GPUs, in the order of the accounts.
    pub(crate) fn gpus(&self) -> impl Iterator<Item = &GpuUuid> {
        self.accounts.iter().filter_map(|account| match account {
            Account::Gpu(gpu) => Some(gpu),
            Account::Managed => None,
        })
    }

    pub(crate) fn account_index(&self, gpu: &GpuUuid) -> Option<usize> {
        self.gpus().position(|other| other == gpu)
    }

    /// Tells all processes how much managed memory the driver moves away from a GPU for device
    /// memory.
    pub(crate) fn set_evictable(&mut self, gpu: &GpuUuid, bytes: Bytes) {
        let Some(index) = self.account_index(gpu) else {
            return;
        };
        let units = Units::within(bytes.0);
        match self.evictable.get_mut(index) {
            Some(before) if *before != units => *before = units,
            _ => return,
        }
        for slot in self.slots(index) {
            slot.set_evictable(units);
        }
    }

    /// Replaces the bytes of untracked processes of an account, by pid. Processes that have a
    /// session by now are charged already.
    pub(crate) fn set_untracked(&mut self, account: &Account, mut charged: BTreeMap<u32, Bytes>) {
        let Some(index) = self.index_of(account) else {
            return;
        };
        charged.retain(|pid, _| !self.processes.contains_key(pid));
        let before = self.credit.untracked(index);
        let charged = charged.into_iter();
        let charged = charged.map(|(pid, bytes)| (pid, Units::within(bytes.0)));
        self.credit.set_untracked(index, charged.collect());
        if self.credit.untracked(index) != before {
            self.refresh_pages();
        }
    }

    fn index_of(&self, account: &Account) -> Option<usize> {
        self.accounts.iter().position(|other| other == account)
    }

    /// The slots of an account in the pages of the processes.
    fn slots(&self, index: usize) -> impl Iterator<Item = &AccountSlot> {
        let members = self.processes.values();
        members.filter_map(move |state| state.slot(index))
    }

    /// Charges contexts by these sizes from now on.
    pub(crate) fn set_context_sizes(&mut self, sizes: Arc<ContextSizes>) {
        self.context_sizes = Some(sizes);
    }

    /// The charge for a context; zero where the agent does not charge contexts.
    fn context_charge(&self, account: &Account) -> Units {
        match (account, &self.context_sizes) {
            (Account::Gpu(gpu), Some(sizes)) => {
                Units::holding(sizes.size_on(gpu).0).unwrap_or(Units::ZERO)
            }
            _ => Units::ZERO,
        }
    }

    /// Writes the charge for a context of an account into all pages, and returns it.
    pub(crate) fn publish_context_charge(&self, index: usize) -> Units {
        let account = self.accounts.get(index);
        let units = account.map_or(Units::ZERO, |account| self.context_charge(account));
        for slot in self.slots(index) {
            slot.set_context(units);
        }
        units
    }

    fn uncharged_margin(&self) -> Bytes {
        match self.context_sizes {
            Some(_) => UNCHARGED_MARGIN,
            None => UNCHARGED_MARGIN_WITH_CONTEXT,
        }
    }

    /// Charges untracked processes what the driver reports in these samples of the GPUs. From then
    /// on the audit maintains the figures.
    pub(crate) fn charge_untracked(
        &mut self,
        samples: &[ProcessMemory],
        is_member: impl Fn(u32) -> bool,
    ) {
        for (index, sample) in samples.iter().enumerate() {
            let untracked = sample
                .iter()
                .filter(|(pid, _)| !self.processes.contains_key(pid) && is_member(*pid));
            // Where the driver does not report an amount, the process may have all of the quota.
            let all = self.credit.quota(index);
            let units = |bytes: Option<Bytes>| Units::holding(bytes?.0);
            let untracked = untracked
                .map(|(pid, bytes)| (pid, units(bytes).unwrap_or(all)))
                .collect();
            self.credit.set_untracked(index, untracked);
        }
    }
}

#[cfg(test)]
mod tests;
