//! Decides the quota of each account: the pod's request, or less by an order of the operator.

use bursar_protocol::units::Units;

/// The requested and the ordered quotas, by account.
#[derive(Debug)]
pub(super) struct Quotas {
    /// The quota that the pod requested.
    requested: Vec<Units>,
    /// The lower quota that the operator has ordered since.
    ordered: Vec<Option<Units>>,
}

/// The quota of an account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QuotaInForce {
    /// The account has a quota of its own.
    Own(Units),
    /// The quotas of the GPUs cover the account, up to this many units.
    Covered(Units),
}

impl Quotas {
    /// The requested quotas, without an order.
    pub(super) fn new(requested: Vec<Units>) -> Quotas {
        Quotas {
            ordered: vec![None; requested.len()],
            requested,
        }
    }

    /// The orders, for the checkpoint.
    pub(super) fn ordered(&self) -> &[Option<Units>] {
        &self.ordered
    }

    /// Restores the orders of a checkpoint.
    pub(super) fn restore(&mut self, ordered: &[Option<Units>]) {
        for (before, units) in self.ordered.iter_mut().zip(ordered) {
            *before = *units;
        }
    }

    /// Sets or removes an account's order. Returns whether it has changed.
    pub(super) fn order(&mut self, account: usize, units: Option<Units>) -> bool {
        match self.ordered.get_mut(account) {
            Some(before) if *before != units => *before = units,
            _ => return false,
        }
        true
    }

    /// Changes the request of an account.
    pub(super) fn request(&mut self, account: usize, units: Units) {
        if let Some(requested) = self.requested.get_mut(account) {
            *requested = units;
        }
    }

    /// The quota of an account. Managed memory that the pod did not request is covered.
    pub(super) fn in_force(&self, account: usize, is_managed: bool) -> QuotaInForce {
        let requested = self.requested.get(account).copied();
        let requested = requested.unwrap_or(Units::ZERO);
        let ordered = self.ordered.get(account).copied().flatten();
        match is_managed && requested == Units::ZERO {
            true => QuotaInForce::Covered(ordered.unwrap_or(Units::MAX)),
            false => QuotaInForce::Own(ordered.map_or(requested, |ordered| ordered.min(requested))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_lowers_a_quota_and_never_raises_it() {
        let mut quotas = Quotas::new(vec![Units(8), Units::ZERO]);
        assert_eq!(quotas.in_force(0, false), QuotaInForce::Own(Units(8)));
        assert!(quotas.order(0, Some(Units(4))));
        assert!(!quotas.order(0, Some(Units(4))), "it is in force");
        assert!(!quotas.order(2, Some(Units(4))), "there is no such account");
        assert_eq!(quotas.in_force(0, false), QuotaInForce::Own(Units(4)));
        quotas.order(0, Some(Units(9)));
        assert_eq!(quotas.in_force(0, false), QuotaInForce::Own(Units(8)));
        let mut restored = Quotas::new(vec![Units(8), Units::ZERO]);
        restored.restore(quotas.ordered());
        assert_eq!(restored.ordered(), quotas.ordered());
    }

    #[test]
    fn managed_memory_is_covered_unless_the_pod_requests_some() {
        let mut quotas = Quotas::new(vec![Units(8), Units::ZERO]);
        assert_eq!(quotas.in_force(1, true), QuotaInForce::Covered(Units::MAX));
        quotas.order(1, Some(Units(2)));
        assert_eq!(quotas.in_force(1, true), QuotaInForce::Covered(Units(2)));
        quotas.request(1, Units(6));
        assert_eq!(quotas.in_force(1, true), QuotaInForce::Own(Units(2)));
    }
}
