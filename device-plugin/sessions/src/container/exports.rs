//! Tracks the exports of the container's processes, which other processes may hold.

use bursar_ledger::units::{Bytes, GpuUuid};

use bursar_protocol::units::Units;

use super::super::accounts::AmountsByPid;
use super::Container;

impl Container {
    /// Caps the orphaned exports of a GPU by a proven bound for those in `query`.
    /// Returns whether any bytes became free.
    pub(in super::super) fn cap_orphaned_exports(
        &mut self,
        gpu: &GpuUuid,
        bound: Bytes,
        query: &AmountsByPid,
    ) -> bool {
        let Some(index) = self.memory.account_index(gpu) else {
            return false;
        };
        let before = self.memory.credit().orphaned(index);
        let most = Units::holding(bound.0).unwrap_or(Units::MAX);
        self.memory.credit_mut().cap_orphaned(index, most, query);
        let changed = self.memory.credit().orphaned(index) != before;
        if changed {
            self.memory.refresh_pages();
            self.note_change();
        }
        changed
    }
}
