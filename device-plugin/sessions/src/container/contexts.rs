//! Charges the container's CUDA contexts.

use bursar_protocol::messages::Response;

use super::Container;
use super::recorder::ChangeNumber;

impl Container {
    /// Handles a new context of a process: answers the current size, and writes it into the pages
    /// of all processes. Also returns the change that the checkpoint must hold before the answer.
    pub(in super::super) fn handle_context_made(
        &mut self,
        pid: u32,
        account: u8,
    ) -> (Response, Option<ChangeNumber>) {
        let change = self.memory.update_exports(pid).then(|| self.note_change());
        let index = usize::from(account);
        let units = self.memory.publish_context_charge(index);
        (Response::ContextSize { account, units }, change)
    }
}
