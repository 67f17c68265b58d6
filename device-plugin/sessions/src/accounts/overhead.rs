//! Charges what the driver takes of a container beyond what the shim charges.

use bursar_protocol::units::Units;

use super::CreditAccounts;

impl CreditAccounts {
    /// The units of an account that the driver takes and no process is charged for.
    pub(crate) fn overhead(&self, account: usize) -> Units {
        self.overheads.get(account).copied().unwrap_or(Units::ZERO)
    }

    /// Replaces the overhead of an account. The account grants these units to no process. More than
    /// the quota is not counted.
    pub(crate) fn set_overhead(&mut self, account: usize, units: Units) {
        let units = units.min(self.quota(account));
        if let Some(slot) = self.overheads.get_mut(account) {
            *slot = units;
        }
    }
}
