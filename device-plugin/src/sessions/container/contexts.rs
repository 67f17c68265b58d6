//! What the container's contexts are charged.

use std::sync::Arc;

use bursar_protocol::messages::Response;
use bursar_protocol::units::Units;

use super::super::Account;
use super::super::context_size::ContextSizes;
use super::Container;

impl Container {
    /// Charges contexts from now on what these sizes say.
    pub(in super::super) fn charge_contexts(&mut self, sizes: Arc<ContextSizes>) {
        self.contexts = Some(sizes);
    }

    /// What a context is charged; nothing where contexts are not.
    pub(super) fn context_of(&self, account: &Account) -> Units {
        match (account, &self.contexts) {
            (Account::Gpu(gpu), Some(sizes)) => {
                Units::holding(sizes.of_gpu(gpu).0).unwrap_or(Units::ZERO)
            }
            _ => Units::ZERO,
        }
    }

    /// A process made a context: what one is charged now, here and on the pages of all processes.
    pub(in super::super) fn context_made(&mut self, pid: u32, account: u8) -> Response {
        self.heard(pid);
        let index = usize::from(account);
        let here = self.accounts.get(index);
        let units = here.map_or(Units::ZERO, |account| self.context_of(account));
        for slot in self
            .members
            .values()
            .filter_map(|member| member.page.as_ref()?.slot(index))
        {
            slot.set_context(units);
        }
        Response::ContextSize { account, units }
    }
}
