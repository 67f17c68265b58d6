//! What the container's contexts are charged.

use std::sync::Arc;

use bursar_protocol::units::Units;
use bursar_protocol::wire::ToShim;

use super::super::Account;
use super::super::contexts::ContextSizes;
use super::Container;
use crate::units::{Bytes, GpuUuid};

impl Container {
    /// Charges contexts from now on what these sizes say.
    pub(in super::super) fn charge_contexts(&mut self, sizes: Arc<ContextSizes>) {
        self.contexts = Some(sizes);
    }

    /// The GPU of an account, if its contexts should be measured, and where that is noted.
    pub(in super::super) fn unmeasured(&self, account: u8) -> Option<(GpuUuid, Arc<ContextSizes>)> {
        let gpu = self.gpu(account)?;
        let sizes = self.contexts.as_ref().filter(|sizes| sizes.want(gpu))?;
        Some((gpu.clone(), Arc::clone(sizes)))
    }

    /// The GPU of an account.
    fn gpu(&self, account: u8) -> Option<&GpuUuid> {
        match self.accounts.get(usize::from(account))? {
            Account::Gpu(gpu) => Some(gpu),
            Account::Managed => None,
        }
    }

    /// What a context is charged; nothing where contexts are not.
    pub(super) fn context_of(&self, account: &Account) -> Units {
        match (account, &self.contexts) {
            (Account::Gpu(gpu), Some(sizes)) => {
                Units::holding(sizes.of(gpu).0).unwrap_or(Units::ZERO)
            }
            _ => Units::ZERO,
        }
    }

    /// A process made a context, and the driver charges the process `charged`: what a context takes.
    /// It is learned from a process that uses nothing but this context.
    pub(in super::super) fn context_made(
        &mut self,
        pid: u32,
        account: u8,
        charged: Option<Bytes>,
    ) -> ToShim {
        self.heard(pid);
        let index = usize::from(account);
        let page = self
            .members
            .get(&pid)
            .and_then(|member| member.page.as_ref());
        let alone = page
            .and_then(|page| page.slot(index))
            .is_some_and(|slot| Units(slot.word().used) == slot.context());
        if let (true, Some(charged), Some(sizes), Some(gpu)) =
            (alone, charged, &self.contexts, self.gpu(account))
        {
            sizes.measured(gpu, charged);
        }
        let here = self.accounts.get(index);
        let units = here.map_or(Units::ZERO, |account| self.context_of(account));
        for slot in self
            .members
            .values()
            .filter_map(|member| member.page.as_ref()?.slot(index))
        {
            slot.set_context(units);
        }
        ToShim::ContextSize { account, units }
    }
}
