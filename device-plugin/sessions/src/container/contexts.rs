//! Charges the container's CUDA contexts.

use std::sync::Arc;

use bursar_protocol::messages::Response;
use bursar_protocol::units::Units;

use super::super::Account;
use super::super::context_size::ContextSizes;
use super::Container;
use super::recording::ChangeNumber;

impl Container {
    /// Charges contexts by these sizes from now on.
    pub(in super::super) fn set_context_sizes(&mut self, sizes: Arc<ContextSizes>) {
        self.context_sizes = Some(sizes);
    }

    /// The charge for a context; zero where the agent does not charge contexts.
    pub(super) fn context_charge(&self, account: &Account) -> Units {
        match (account, &self.context_sizes) {
            (Account::Gpu(gpu), Some(sizes)) => {
                Units::holding(sizes.size_on(gpu).0).unwrap_or(Units::ZERO)
            }
            _ => Units::ZERO,
        }
    }

    /// Handles a new context of a process: answers the current size, and writes it into the pages
    /// of all processes. Also returns the change that the checkpoint must hold before the answer.
    pub(in super::super) fn handle_context_made(
        &mut self,
        pid: u32,
        account: u8,
    ) -> (Response, Option<ChangeNumber>) {
        let change = self.memory.update_exports(pid).then(|| self.note_change());
        let index = usize::from(account);
        let here = self.memory.accounts.get(index);
        let units = here.map_or(Units::ZERO, |account| self.context_charge(account));
        for slot in self
            .memory
            .processes
            .values()
            .filter_map(|member| member.page.as_ref()?.slot(index))
        {
            slot.set_context(units);
        }
        (Response::ContextSize { account, units }, change)
    }
}
