//! What the container's processes had exported, and others may hold.

use std::collections::BTreeMap;

use bursar_protocol::units::Units;

use super::super::Account;
use super::super::accounts::Books;
use super::super::orphan_bound::Own;
use super::{Container, Member};
use crate::units::{Bytes, GpuUuid};

impl Container {
    pub(super) fn index_of(&self, gpu: &GpuUuid) -> Option<usize> {
        let is_it = |account: &Account| matches!(account, Account::Gpu(here) if here == gpu);
        self.accounts.iter().position(is_it)
    }

    /// What the dead had exported, where it is of this GPU and not proven free.
    pub(in super::super) fn kept(&self, gpu: &GpuUuid) -> Option<Books> {
        let any = self.credit.kept(self.index_of(gpu)?) > Units::ZERO;
        let [_, kept] = self.credit.retirements();
        any.then(|| kept.clone())
    }

    /// What each living process has of a GPU by its own doing.
    pub(in super::super) fn own_of(&self, gpu: &GpuUuid) -> BTreeMap<u32, Own> {
        let Some(index) = self.index_of(gpu) else {
            return BTreeMap::new();
        };
        let members = self.members.iter();
        members
            .map(|(pid, member)| (*pid, self.own(*pid, member, index)))
            .collect()
    }

    /// At most this much of a GPU is held of what the dead had exported when that was `asked`: whether that frees
    /// anything.
    pub(in super::super) fn keep_at_most(
        &mut self,
        gpu: &GpuUuid,
        held: Bytes,
        asked: &Books,
    ) -> bool {
        let Some(index) = self.index_of(gpu) else {
            return false;
        };
        let before = self.credit.kept(index);
        let most = Units::holding(held.0).unwrap_or(Units::MAX);
        self.credit.keep_at_most(index, most, asked);
        let changed = self.credit.kept(index) != before;
        if changed {
            self.refresh();
            self.changed();
        }
        changed
    }

    /// What of each GPU its processes had exported, living or dead.
    pub(in super::super) fn exported(&self) -> Vec<(GpuUuid, Bytes)> {
        let exported = |index: usize| {
            let living = self.exported_by_living(index);
            Bytes(living.saturating_add(self.credit.kept(index)).bytes())
        };
        let gpus = self.gpus().into_iter().enumerate();
        gpus.map(|(index, gpu)| (gpu, exported(index))).collect()
    }

    /// What living processes say that they exported, never more than they were granted.
    pub(super) fn exported_by_living(&self, index: usize) -> Units {
        let members = self.members.iter();
        let exported = members.map(|(pid, member)| self.exported_by(*pid, member, index));
        exported.sum()
    }

    /// The same of one of them.
    pub(super) fn exported_by(&self, pid: u32, member: &Member, index: usize) -> Units {
        let exported = member.exported().get(index).copied();
        let granted = self.credit.granted_to(pid, index);
        exported.unwrap_or(Units::ZERO).min(granted)
    }
}
