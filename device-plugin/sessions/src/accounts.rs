//! Accounts for the credit of one container: which process was granted how much of which account.
//!
//! Pure. The sum of granted, exited and leased bytes never exceeds the quota, and the last unit of
//! a quota can be granted.
//!
//! Managed memory is covered while the pod has no quota of it. Its units then count against the
//! quota of every GPU, because its pages may go to each of them. Its account stays apart, since the
//! driver charges managed memory to no process.

mod exited;
mod leases;
mod untracked;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use bursar_protocol::units::{UNIT, Units};

/// The most credit that a process gets beyond its need: 64 MiB.
const MAX_PREFETCH: Units = Units((64 << 20) / UNIT as u32);

/// The granularity of prefetched credit: the block size of the driver, 2 MiB.
const PREFETCH_STEP: u32 = (2 << 20) / UNIT as u32;

/// A process may prefetch one part in this many of the free bytes. So prefetches get smaller near
/// the quota, and many processes share the rest.
const PREFETCH_DIVISOR: u32 = 8;

pub(super) type AmountsByPid = BTreeMap<u32, Vec<Units>>;

/// The accounts of one container. An account is named by its index, a process by its pid on the
/// host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CreditAccounts {
    quotas: Vec<Units>,
    /// The account of managed memory, while the quotas of the other accounts cover it.
    covered: Option<usize>,
    granted: AmountsByPid,
    exited: AmountsByPid,
    /// The bytes of untracked processes by account and pid, as the driver reports them.
    untracked: Vec<BTreeMap<u32, Units>>,
    /// By account, what the driver takes beyond what processes are charged.
    overheads: Vec<Units>,
    /// Orphaned exports: other processes may hold them after the driver has stopped charging the
    /// exporter.
    orphaned: AmountsByPid,
    /// The leases that the container owns, each with its account and units.
    leases: BTreeMap<u64, (usize, Units)>,
    /// By account, the charges of the other containers that share the quota.
    sibling_charges: Vec<Units>,
    peaks: Vec<Units>,
}

/// Stands for the exporter of a released lease, and for exporters beyond [`MAX_EXPORTERS`]: no
/// process has this pid.
pub(super) const NO_PID: u32 = 0;

impl CreditAccounts {
    /// Creates empty accounts with these quotas.
    pub(crate) fn new(quotas: Vec<Units>) -> CreditAccounts {
        let peaks = vec![Units::ZERO; quotas.len()];
        CreditAccounts {
            untracked: vec![BTreeMap::new(); quotas.len()],
            overheads: vec![Units::ZERO; quotas.len()],
            quotas,
            peaks,
            ..CreditAccounts::default()
        }
    }

    /// The quota of an account; zero for an account that does not exist. Covered managed memory has
    /// at most the least quota of a GPU.
    pub(crate) fn quota(&self, account: usize) -> Units {
        let own = self.quotas.get(account).copied().unwrap_or(Units::ZERO);
        if self.covered != Some(account) {
            return own;
        }
        let least = self.covering().map(|gpu| self.quota(gpu)).min();
        least.map_or(Units::ZERO, |least| own.min(least))
    }

    /// Lets the quotas of all other accounts cover an account; `None` covers none.
    pub(crate) fn set_covered(&mut self, account: Option<usize>) {
        self.covered = account;
    }

    /// The account that the quotas of the others cover.
    pub(crate) fn covered(&self) -> Option<usize> {
        self.covered
    }

    /// The covered account, as seen from another one.
    pub(crate) fn covered_by(&self, account: usize) -> Option<usize> {
        self.covered.filter(|covered| *covered != account)
    }

    /// The accounts whose quotas cover another one; none while no account is covered.
    pub(crate) fn covering(&self) -> impl Iterator<Item = usize> {
        let count = self.covered.map_or(0, |_| self.quotas.len());
        (0..count).filter(|account| self.covered != Some(*account))
    }

    /// Changes the quota of an account. Granted units stay granted.
    pub(crate) fn set_quota(&mut self, account: usize, quota: Units) {
        if let Some(slot) = self.quotas.get_mut(account) {
            *slot = quota;
        }
    }

    /// The units granted to a process.
    pub(crate) fn granted_to(&self, pid: u32, account: usize) -> Units {
        amount(&self.granted, pid, account)
    }

    /// The units granted to all live processes.
    pub(crate) fn granted(&self, account: usize) -> Units {
        total(&self.granted, account)
    }

    /// The largest sum of granted, exited and leased units of an account so far.
    pub(crate) fn peak(&self, account: usize) -> Units {
        self.peaks.get(account).copied().unwrap_or(Units::ZERO)
    }

    /// The units granted to a live process that count against an account's quota.
    pub(crate) fn granted_against(&self, pid: u32, account: usize) -> Units {
        self.against(account, |account| self.granted_to(pid, account))
    }

    /// Adds the units of the accounts that share an account's quota: covered managed memory counts
    /// against each GPU.
    fn against(&self, account: usize, units: impl Fn(usize) -> Units) -> Units {
        let own = units(account);
        let shared = match self.covered_by(account) {
            Some(covered) => Some(units(covered)),
            None => self.covering().map(&units).min(),
        };
        own.saturating_add(shared.unwrap_or(Units::ZERO))
    }

    /// The units that can still be granted.
    pub(crate) fn free(&self, account: usize) -> Units {
        let own = self
            .quota(account)
            .saturating_sub(self.total_charged(account));
        if self.covered != Some(account) {
            return own;
        }
        let least = self.covering().map(|gpu| self.free(gpu)).min();
        least.map_or(Units::ZERO, |least| own.min(least))
    }

    /// The charged units beyond the quota, as after the quota was lowered.
    pub(super) fn excess(&self, account: usize) -> Units {
        self.total_charged(account)
            .saturating_sub(self.quota(account))
    }

    fn total_charged(&self, account: usize) -> Units {
        self.own_charged(account)
            .saturating_add(self.sibling_charges(account))
    }

    /// The units of an account that this container has: live, exited, leased, untracked, overhead,
    /// and covered managed memory.
    pub(super) fn own_charged(&self, account: usize) -> Units {
        self.tracked_charged(account)
            .saturating_add(self.untracked(account))
            .saturating_add(self.overhead(account))
    }

    /// The units of an account that are charged to no live process of this container.
    pub(super) fn charged_beside_grants(&self, account: usize) -> Units {
        self.exited(account)
            .saturating_add(self.leased(account))
            .saturating_add(self.untracked(account))
            .saturating_add(self.overhead(account))
            .saturating_add(self.sibling_charges(account))
    }

    /// The charges of the other containers that share the quota.
    pub(super) fn sibling_charges(&self, account: usize) -> Units {
        let inherited = self.sibling_charges.get(account);
        inherited.copied().unwrap_or(Units::ZERO)
    }

    /// Replaces the charges of the other containers that share the quota.
    pub(super) fn set_sibling_charges(&mut self, inherited: Vec<Units>) {
        self.sibling_charges = inherited;
    }

    /// The charged units of an account, without untracked processes.
    fn tracked_charged(&self, account: usize) -> Units {
        let processes = self.granted(account).saturating_add(self.exited(account));
        let own = processes.saturating_add(self.leased(account));
        let covered = self.covered_by(account);
        covered.map_or(own, |covered| {
            own.saturating_add(self.tracked_charged(covered))
        })
    }

    /// Grants `need`, and a prefetch where enough is free. Returns the granted units. Covered
    /// managed memory gets no prefetch, which would take room from every GPU.
    ///
    /// # Errors
    /// The missing units.
    pub(crate) fn grant(&mut self, pid: u32, account: usize, need: Units) -> Result<Units, Units> {
        let free = self.free(account);
        if need > free {
            return Err(need.saturating_sub(free));
        }
        let prefetched = match self.covered == Some(account) {
            true => Units::ZERO,
            false => prefetch(free.saturating_sub(need)),
        };
        let amount = need.saturating_add(prefetched);
        self.add_grant(pid, account, amount);
        Ok(amount)
    }

    /// Charges the claim of an unknown process, as far as the quota allows. Returns the charged
    /// units.
    pub(crate) fn admit_claimed(&mut self, pid: u32, account: usize, claimed: Units) -> Units {
        let amount = claimed.min(self.free(account));
        self.add_grant(pid, account, amount);
        amount
    }

    /// Revokes credit of a process, at most its grant. Returns the revoked units.
    pub(crate) fn revoke(&mut self, pid: u32, account: usize, units: Units) -> Units {
        let Entry::Occupied(mut entry) = self.granted.entry(pid) else {
            return Units::ZERO;
        };
        let Some(slot) = entry.get_mut().get_mut(account) else {
            return Units::ZERO;
        };
        let taken = units.min(*slot);
        *slot = slot.saturating_sub(taken);
        if entry.get().iter().all(|units| *units == Units::ZERO) {
            entry.remove();
        }
        taken
    }

    /// The grants of live processes, for the checkpoint.
    pub(super) fn grants(&self) -> &AmountsByPid {
        &self.granted
    }

    /// Restores the grant of a process from the checkpoint. The grant was within the quota.
    pub(super) fn restore_grant(&mut self, pid: u32, granted: &[Units]) {
        for (account, units) in granted.iter().enumerate().take(self.quotas.len()) {
            self.add_grant(pid, account, *units);
        }
    }

    fn add_grant(&mut self, pid: u32, account: usize, units: Units) {
        let count = self.quotas.len();
        let accounts = self
            .granted
            .entry(pid)
            .or_insert_with(|| vec![Units::ZERO; count]);
        if let Some(slot) = accounts.get_mut(account) {
            *slot = slot.saturating_add(units);
        }
        self.update_peak(account);
    }

    fn update_peak(&mut self, account: usize) {
        let covering: Vec<_> = match self.covered == Some(account) {
            true => self.covering().collect(),
            false => Vec::new(),
        };
        for account in covering.into_iter().chain([account]) {
            let now = self.tracked_charged(account);
            if let Some(peak) = self.peaks.get_mut(account) {
                *peak = now.max(*peak);
            }
        }
    }
}

/// The prefetch of a process when `left` units would remain free.
fn prefetch(left: Units) -> Units {
    let share = (left.0 / PREFETCH_DIVISOR).min(MAX_PREFETCH.0);
    Units(share - share % PREFETCH_STEP)
}

fn amount(amounts: &AmountsByPid, pid: u32, account: usize) -> Units {
    amounts
        .get(&pid)
        .and_then(|accounts| accounts.get(account))
        .copied()
        .unwrap_or(Units::ZERO)
}

fn total(amounts: &AmountsByPid, account: usize) -> Units {
    amounts
        .values()
        .filter_map(|accounts| accounts.get(account))
        .copied()
        .sum()
}

#[cfg(test)]
mod tests {
    use super::exited::MAX_EXPORTERS;
    use super::*;
    use proptest::prelude::*;

    const GIB: u32 = (1 << 30) / UNIT as u32;

    #[test]
    fn last_unit_is_granted_and_one_more_is_denied() {
        let mut credit = CreditAccounts::new(vec![Units(GIB)]);
        assert_eq!(credit.grant(1, 0, Units(GIB + 1)), Err(Units(1)));
        assert_eq!(credit.grant(1, 0, Units(GIB - 1)), Ok(Units(GIB - 1)));
        assert_eq!(credit.grant(2, 0, Units(1)), Ok(Units(1)));
        assert_eq!(credit.grant(2, 0, Units(1)), Err(Units(1)));
        assert_eq!(credit.peak(0), Units(GIB));
    }

    #[test]
    fn prefetch_shrinks_to_nothing_near_the_quota() {
        assert_eq!(prefetch(Units(16 * GIB)), MAX_PREFETCH);
        assert_eq!(prefetch(Units(MAX_PREFETCH.0)), Units(MAX_PREFETCH.0 / 8));
        assert_eq!(
            prefetch(Units(PREFETCH_STEP * PREFETCH_DIVISOR - 1)),
            Units(0)
        );
    }

    #[test]
    fn exited_process_is_charged_until_it_is_released() {
        let mut credit = CreditAccounts::new(vec![Units(10)]);
        credit.grant(1, 0, Units(10)).unwrap();
        credit.mark_exited(1, &[]);
        assert_eq!(
            (credit.granted(0), credit.exited(0), credit.free(0)),
            (Units(0), Units(10), Units(0))
        );
        assert_eq!(credit.grant(2, 0, Units(1)), Err(Units(1)));
        credit.release_exited(1);
        assert_eq!(credit.grant(2, 0, Units(10)), Ok(Units(10)));
    }

    #[test]
    fn overhead_is_granted_to_no_process_and_grants_nothing() {
        let mut credit = CreditAccounts::new(vec![Units(100), Units(50)]);
        credit.grant(1, 0, Units(60)).unwrap();
        credit.set_overhead(0, Units(30));
        assert_eq!((credit.free(0), credit.free(1)), (Units(10), Units(50)));
        assert_eq!(credit.grant(1, 0, Units(11)), Err(Units(1)));
        credit.set_overhead(0, Units(1000));
        assert_eq!((credit.free(0), credit.granted(0)), (Units(0), Units(60)));
        assert_eq!(credit.excess(0), Units(60), "at most the quota");
        credit.set_overhead(0, Units::ZERO);
        assert_eq!(credit.free(0), Units(40));
    }

    #[test]
    fn untracked_bytes_are_reserved_until_the_process_says_hello() {
        let mut credit = CreditAccounts::new(vec![Units(10)]);
        credit.set_untracked(0, BTreeMap::from([(1, Units(7))]));
        assert_eq!(credit.grant(2, 0, Units(4)), Err(Units(1)));
        assert_eq!(credit.take_untracked(1), [Units(7)]);
        assert_eq!(credit.admit_claimed(1, 0, Units(7)), Units(7));
        assert_eq!(credit.free(0), Units(3));
        credit.set_untracked(0, BTreeMap::from([(3, Units(70))]));
        assert_eq!(credit.free(0), Units(0));
        credit.set_untracked(0, BTreeMap::new());
        assert_eq!(credit.free(0), Units(3));
    }

    #[test]
    fn orphaned_exports_stay_charged_until_proven_free() {
        let mut credit = CreditAccounts::new(vec![Units(10)]);
        credit.grant(1, 0, Units(6)).unwrap();
        credit.grant(2, 0, Units(4)).unwrap();
        credit.mark_exited(1, &[Units(5)]);
        credit.mark_exited(2, &[Units(u32::MAX)]);
        credit.release_exited(1);
        credit.release_exited(2);
        assert_eq!((credit.exited(0), credit.orphaned(0)), (Units(9), Units(9)));
        let all = credit.orphaned.clone();
        credit.cap_orphaned(0, Units(20), &all);
        assert_eq!(credit.grant(3, 0, Units(2)), Err(Units(1)));
        credit.cap_orphaned(0, Units::ZERO, &AmountsByPid::new());
        assert_eq!(credit.orphaned(0), Units(9), "the query precedes the exit");
        credit.cap_orphaned(0, Units(3), &all);
        assert_eq!(
            credit.orphaned(0),
            Units(3),
            "the bound concerns the sum of both exporters"
        );
        let rest = credit.orphaned.clone();
        credit.cap_orphaned(0, Units::ZERO, &rest);
        assert_eq!(credit.grant(3, 0, Units(10)), Ok(Units(10)));
    }

    #[test]
    fn exporters_kept_apart_are_few_and_all_are_charged() {
        let all = 4 * MAX_EXPORTERS as u32;
        let mut credit = CreditAccounts::new(vec![Units(all)]);
        for pid in 1..=all {
            credit.admit_claimed(pid, 0, Units(1));
            credit.mark_exited(pid, &[Units(1)]);
        }
        assert_eq!((credit.orphaned(0), credit.free(0)), (Units(all), Units(0)));
        assert_eq!(credit.orphaned.len(), MAX_EXPORTERS + 1);
        let queried = credit.orphaned.clone();
        credit.cap_orphaned(0, Units::ZERO, &queried);
        assert_eq!(credit.free(0), Units(all));
    }

    #[test]
    fn released_lease_stays_charged_until_proven_free() {
        let mut credit = CreditAccounts::new(vec![Units(10)]);
        credit.grant(1, 0, Units(4)).unwrap();
        assert_eq!(credit.charge_lease(7, 0, Units(7)), Err(Units(6)));
        credit.charge_lease(7, 0, Units(6)).unwrap();
        assert_eq!(
            (credit.leased(0), credit.free(0), credit.peak(0)),
            (Units(6), Units(0), Units(10))
        );
        credit.release_lease(7);
        credit.release_lease(7);
        assert_eq!((credit.leased(0), credit.orphaned(0)), (Units(0), Units(6)));
        let queried = credit.orphaned.clone();
        credit.adopt_lease(8, 0, Units(1));
        credit.release_lease(8);
        credit.cap_orphaned(0, Units::ZERO, &queried);
        assert_eq!(
            credit.orphaned(0),
            Units(7),
            "the query precedes the release"
        );
        let queried = credit.orphaned.clone();
        credit.cap_orphaned(0, Units::ZERO, &queried);
        assert_eq!(credit.free(0), Units(6));
        credit.charge_lease(9, 0, Units(6)).unwrap();
        credit.refund_lease(9);
        assert_eq!(credit.free(0), Units(6), "the lease had no memory");
    }

    #[test]
    fn covered_memory_needs_room_on_every_gpu() {
        let mut credit = CreditAccounts::new(vec![Units(8), Units(6), Units::MAX]);
        credit.set_covered(Some(2));
        assert_eq!(credit.quota(2), Units(6));
        assert_eq!(credit.grant(1, 2, Units(7)), Err(Units(1)));
        assert_eq!(credit.grant(1, 2, Units(4)), Ok(Units(4)));
        assert_eq!((credit.free(0), credit.free(1)), (Units(4), Units(2)));
        assert_eq!(credit.grant(1, 0, Units(4)), Ok(Units(4)));
        assert_eq!(credit.free(2), Units::ZERO, "GPU 0 is full");
        assert_eq!(credit.grant(1, 1, Units(3)), Err(Units(1)));
        assert_eq!((credit.peak(0), credit.peak(1)), (Units(8), Units(4)));
        credit.mark_exited(1, &[]);
        assert_eq!(credit.exited_against(2), Units(4));
        credit.release_exited(1);
        assert_eq!(credit.free(2), Units(6));
    }

    #[test]
    fn an_account_that_does_not_exist_grants_nothing() {
        let mut credit = CreditAccounts::new(vec![Units(10)]);
        assert_eq!(credit.grant(1, 1, Units(1)), Err(Units(1)));
        assert_eq!(credit.admit_claimed(1, 7, Units(1)), Units(0));
        assert_eq!(credit.revoke(1, 7, Units(1)), Units(0));
    }

    #[test]
    fn process_has_no_account_when_its_whole_grant_is_revoked() {
        let mut credit = CreditAccounts::new(vec![Units(10), Units(10)]);
        credit.grant(1, 0, Units(4)).unwrap();
        credit.grant(1, 1, Units(4)).unwrap();
        assert_eq!(credit.revoke(1, 0, Units(9)), Units(4));
        assert_eq!(credit.granted_to(1, 1), Units(4));
        assert_eq!(credit.revoke(1, 1, Units(4)), Units(4));
        assert!(credit.grants().is_empty());
    }

    #[derive(Clone, Debug)]
    enum Step {
        Grant(u32, u32),
        Admit(u32, u32),
        GiveBack(u32, u32),
        Exit(u32, u32),
        Release(u32),
        CapOrphaned(u32),
        Resize(u32),
    }

    fn step() -> impl Strategy<Value = Step> {
        let units = 0..3 * GIB;
        prop_oneof![
            4 => (0..4u32, units.clone()).prop_map(|(pid, units)| Step::Grant(pid, units)),
            1 => (0..4u32, units.clone()).prop_map(|(pid, units)| Step::Admit(pid, units)),
            2 => (0..4u32, units.clone()).prop_map(|(pid, units)| Step::GiveBack(pid, units)),
            1 => (0..4u32, units.clone()).prop_map(|(pid, units)| Step::Exit(pid, units)),
            1 => (0..4u32).prop_map(Step::Release),
            1 => units.clone().prop_map(Step::CapOrphaned),
            1 => units.prop_map(Step::Resize),
        ]
    }

    proptest! {
        #[test]
        fn grants_never_exceed_the_quota_nor_are_refused_within_it(steps in prop::collection::vec(step(), 0..80)) {
            let mut credit = CreditAccounts::new(vec![Units(4 * GIB)]);
            for step in steps {
                let (free, before) = (credit.free(0), credit.granted(0));
                match step {
                    Step::Grant(pid, units) => match credit.grant(pid, 0, Units(units)) {
                        Ok(got) => {
                            prop_assert!(got >= Units(units) && got <= free);
                            prop_assert_eq!(credit.granted(0).0, before.0 + got.0);
                        }
                        Err(missing) => prop_assert_eq!(free.0 + missing.0, units),
                    },
                    Step::Admit(pid, units) => {
                        prop_assert_eq!(credit.admit_claimed(pid, 0, Units(units)), Units(units).min(free));
                    }
                    Step::GiveBack(pid, units) => {
                        let held = credit.granted_to(pid, 0);
                        prop_assert_eq!(credit.revoke(pid, 0, Units(units)), Units(units).min(held));
                    }
                    Step::Exit(pid, exported) => {
                        let sum = credit.granted(0).0 + credit.exited(0).0;
                        credit.mark_exited(pid, &[Units(exported)]);
                        prop_assert_eq!(credit.granted(0).0 + credit.exited(0).0, sum);
                    }
                    Step::Release(pid) => {
                        let orphaned = credit.orphaned(0);
                        credit.release_exited(pid);
                        prop_assert_eq!(credit.orphaned(0), orphaned);
                    }
                    Step::CapOrphaned(units) => {
                        let rest = credit.exited(0).0 - credit.orphaned(0).0;
                        let all = credit.orphaned.clone();
                        let before = credit.orphaned(0);
                        credit.cap_orphaned(0, Units(units), &all);
                        prop_assert_eq!(credit.orphaned(0), before.min(Units(units)));
                        prop_assert_eq!(credit.exited(0).0 - credit.orphaned(0).0, rest);
                    }
                    Step::Resize(quota) => credit.set_quota(0, Units(quota.max(before.0 + credit.exited(0).0))),
                }
                prop_assert!(credit.granted(0).0 + credit.exited(0).0 <= credit.quota(0).0);
            }
        }

        /// Whatever the order of grants and frees, the quota of each GPU bounds its own memory and
        /// the covered managed memory together. A request within all of them is granted.
        #[test]
        fn covered_memory_never_exceeds_a_quota(
            quotas in prop::array::uniform2(1..64_u32),
            steps in prop::collection::vec((1..4_u32, 0..3_usize, 0..40_u32, any::<bool>()), 0..80),
        ) {
            let [first, second] = quotas;
            let mut credit = CreditAccounts::new(vec![Units(first), Units(second), Units::MAX]);
            credit.set_covered(Some(2));
            for (pid, account, units, is_grant) in steps {
                let room = |gpu: usize| quotas[gpu] - credit.granted(gpu).0 - credit.granted(2).0;
                let most = if account == 2 { room(0).min(room(1)) } else { room(account) };
                match is_grant {
                    true => {
                        let granted = credit.grant(pid, account, Units(units));
                        prop_assert_eq!(granted.is_ok(), units <= most);
                    }
                    false => drop(credit.revoke(pid, account, Units(units))),
                }
                for (gpu, quota) in quotas.into_iter().enumerate() {
                    prop_assert!(credit.granted(gpu).0 + credit.granted(2).0 <= quota);
                }
            }
        }
    }
}
