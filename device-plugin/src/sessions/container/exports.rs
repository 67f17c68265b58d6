//! What the container's processes had exported, and others may hold.

use std::collections::BTreeMap;

use bursar_protocol::units::Units;

use super::super::Account;
use super::super::accounts::AmountsByPid;
use super::super::orphan_bound::OwnMemory;
use super::{Container, ProcessState};
use crate::units::{Bytes, GpuUuid};

impl Container {
    pub(super) fn account_index(&self, gpu: &GpuUuid) -> Option<usize> {
        let is_it = |account: &Account| matches!(account, Account::Gpu(here) if here == gpu);
        self.accounts.iter().position(is_it)
    }

    /// What the dead had exported, where it is of this GPU and not proven free.
    pub(in super::super) fn orphaned_exports(&self, gpu: &GpuUuid) -> Option<AmountsByPid> {
        let any = self.credit.orphaned(self.account_index(gpu)?) > Units::ZERO;
        let [_, kept] = self.credit.exited_and_orphaned();
        any.then(|| kept.clone())
    }

    /// What each living process has of a GPU by its own doing.
    pub(in super::super) fn own_memory_on(&self, gpu: &GpuUuid) -> BTreeMap<u32, OwnMemory> {
        let Some(index) = self.account_index(gpu) else {
            return BTreeMap::new();
        };
        let members = self.processes.iter();
        members
            .map(|(pid, member)| (*pid, self.own_memory(*pid, member, index)))
            .collect()
    }

    /// At most this much of a GPU is held of what the dead had exported when that was `asked`: whether that frees
    /// anything.
    pub(in super::super) fn cap_orphaned_exports(
        &mut self,
        gpu: &GpuUuid,
        held: Bytes,
        asked: &AmountsByPid,
    ) -> bool {
        let Some(index) = self.account_index(gpu) else {
            return false;
        };
        let before = self.credit.orphaned(index);
        let most = Units::holding(held.0).unwrap_or(Units::MAX);
        self.credit.cap_orphaned(index, most, asked);
        let changed = self.credit.orphaned(index) != before;
        if changed {
            self.refresh_pages();
            self.note_change();
        }
        changed
    }

    /// What of each GPU its processes had exported, living or dead.
    pub(in super::super) fn exported_bytes(&self) -> Vec<(GpuUuid, Bytes)> {
        let exported = |index: usize| {
            let living = self.live_exports(index);
            Bytes(living.saturating_add(self.credit.orphaned(index)).bytes())
        };
        let gpus = self.gpus().into_iter().enumerate();
        gpus.map(|(index, gpu)| (gpu, exported(index))).collect()
    }

    /// What living processes say that they exported, never more than they were granted.
    pub(super) fn live_exports(&self, index: usize) -> Units {
        let members = self.processes.iter();
        let exported = members.map(|(pid, member)| self.exports_of(*pid, member, index));
        exported.sum()
    }

    /// The same of one of them.
    pub(super) fn exports_of(&self, pid: u32, member: &ProcessState, index: usize) -> Units {
        let exported = member.current_exports().get(index).copied();
        let granted = self.credit.granted_to(pid, index);
        exported.unwrap_or(Units::ZERO).min(granted)
    }
}
