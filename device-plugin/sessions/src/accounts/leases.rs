//! Charges leases to the accounts.

use std::collections::BTreeMap;

use bursar_protocol::units::Units;

use super::CreditAccounts;

impl CreditAccounts {
    /// The units of leases that an account is charged for.
    pub(crate) fn leased(&self, account: usize) -> Units {
        let leases = self.leases.values();
        leases
            .filter(|(of, _)| *of == account)
            .map(|(_, units)| *units)
            .sum()
    }

    pub(in super::super) fn leases(&self) -> &BTreeMap<u64, (usize, Units)> {
        &self.leases
    }

    /// Charges a lease.
    ///
    /// # Errors
    /// The free units of the account, where they are fewer.
    pub(in super::super) fn charge_lease(
        &mut self,
        lease: u64,
        account: usize,
        units: Units,
    ) -> Result<(), Units> {
        let free = self.free(account);
        if units > free {
            return Err(free);
        }
        self.adopt_lease(lease, account, units);
        Ok(())
    }

    /// Charges an existing lease, whether or not the quota allows it.
    pub(in super::super) fn adopt_lease(&mut self, lease: u64, account: usize, units: Units) {
        self.leases.insert(lease, (account, units));
        self.update_peak(account);
    }

    /// Refunds a lease that has no memory.
    pub(in super::super) fn refund_lease(&mut self, lease: u64) {
        self.leases.remove(&lease);
    }

    /// Ends a lease. Other processes may hold its memory, so its units become orphaned exports.
    pub(in super::super) fn release_lease(&mut self, lease: u64) {
        if let Some((account, units)) = self.leases.remove(&lease) {
            self.charge_orphaned(account, units);
        }
    }
}
