//! Tracks the exports of the container's processes, which other processes may hold.

use std::collections::BTreeMap;

use bursar_ledger::units::{Bytes, GpuUuid};

use bursar_protocol::units::Units;

use super::super::Account;
use super::super::accounts::AmountsByPid;
use super::super::orphan_bound::OwnMemory;
use super::{Container, ProcessState};

impl Container {
    pub(super) fn account_index(&self, gpu: &GpuUuid) -> Option<usize> {
        let is_it = |account: &Account| matches!(account, Account::Gpu(other) if other == gpu);
        self.memory.accounts.iter().position(is_it)
    }

    /// The orphaned exports of this GPU that are not proven free.
    pub(in super::super) fn orphaned_exports(&self, gpu: &GpuUuid) -> Option<AmountsByPid> {
        let any = self.memory.credit.orphaned(self.account_index(gpu)?) > Units::ZERO;
        let [_, orphaned] = self.memory.credit.exited_and_orphaned();
        any.then(|| orphaned.clone())
    }

    /// The bytes of a GPU that each live process itself has allocated.
    pub(in super::super) fn own_memory_on(&self, gpu: &GpuUuid) -> BTreeMap<u32, OwnMemory> {
        let Some(index) = self.account_index(gpu) else {
            return BTreeMap::new();
        };
        let members = self.memory.processes.iter();
        members
            .map(|(pid, state)| (*pid, self.own_memory(*pid, state, index)))
            .collect()
    }

    /// Caps the orphaned exports of a GPU by a proven bound for those in `query`.
    /// Returns whether any bytes became free.
    pub(in super::super) fn cap_orphaned_exports(
        &mut self,
        gpu: &GpuUuid,
        bound: Bytes,
        query: &AmountsByPid,
    ) -> bool {
        let Some(index) = self.account_index(gpu) else {
            return false;
        };
        let before = self.memory.credit.orphaned(index);
        let most = Units::holding(bound.0).unwrap_or(Units::MAX);
        self.memory.credit.cap_orphaned(index, most, query);
        let changed = self.memory.credit.orphaned(index) != before;
        if changed {
            self.refresh_pages();
            self.note_change();
        }
        changed
    }

    /// The bytes of each GPU that processes have exported, live or exited.
    pub(in super::super) fn exported_bytes(&self) -> Vec<(GpuUuid, Bytes)> {
        let exported = |index: usize| {
            let live = self.live_exports(index);
            Bytes(
                live.saturating_add(self.memory.credit.orphaned(index))
                    .bytes(),
            )
        };
        let gpus = self.gpus().into_iter().enumerate();
        gpus.map(|(index, gpu)| (gpu, exported(index))).collect()
    }

    /// The units that live processes report as exported, at most their grants.
    pub(super) fn live_exports(&self, index: usize) -> Units {
        let members = self.memory.processes.iter();
        let exported = members.map(|(pid, state)| self.exports_of(*pid, state, index));
        exported.sum()
    }

    /// The units that one live process reports as exported, at most its grant.
    pub(super) fn exports_of(&self, pid: u32, state: &ProcessState, index: usize) -> Units {
        let exported = state.current_exports().get(index).copied();
        let granted = self.memory.credit.granted_to(pid, index);
        exported.unwrap_or(Units::ZERO).min(granted)
    }
}
