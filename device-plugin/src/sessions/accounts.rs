//! The books of one container: who was granted how much of which account.
//!
//! Pure. The sum of what is granted, retired and leased never exceeds the quota; the last unit of a quota
//! can be granted.

use std::collections::BTreeMap;

use bursar_protocol::units::{UNIT, Units};

/// The most credit that a process gets beyond what it asked for: 64 MiB.
const SLAB: Units = Units((64 << 20) / UNIT as u32);

/// Credit beyond the need comes in steps of the driver's own block size: 2 MiB.
const STEP: u32 = (2 << 20) / UNIT as u32;

/// The part of what is free that a process may get beyond its need: one in so many. So slabs get
/// finer near the limit, and many processes share what is left.
const SHARE: u32 = 8;

/// Amounts by pid and account.
pub(super) type Books = BTreeMap<u32, Vec<Units>>;

/// The books. Accounts are indexes; processes are pids of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Credit {
    quotas: Vec<Units>,
    granted: Books,
    retired: Books,
    /// By account, what processes without a session have, by pid: the driver's figures.
    outside: Vec<BTreeMap<u32, Units>>,
    /// What of the dead's grants was exported: others may hold it when the driver charges the dead no more.
    kept: Books,
    /// What kept leases have that the container owns, by lease: of which account, and how much.
    leases: BTreeMap<u64, (usize, Units)>,
    /// By account, what other containers have that share the quota.
    inherited: Vec<Units>,
    peaks: Vec<Units>,
}

/// Stands in for the process that exported what a kept lease has: no process has this pid.
pub(super) const NOBODY: u32 = 0;

impl Credit {
    /// Empty books over accounts with these quotas.
    pub fn new(quotas: Vec<Units>) -> Credit {
        let peaks = vec![Units::ZERO; quotas.len()];
        Credit {
            outside: vec![BTreeMap::new(); quotas.len()],
            quotas,
            peaks,
            ..Credit::default()
        }
    }

    /// What an account allows in all; nothing for an account that does not exist.
    pub fn quota(&self, account: usize) -> Units {
        self.quotas.get(account).copied().unwrap_or(Units::ZERO)
    }

    /// Changes what an account allows. What is granted stays granted.
    pub fn set_quota(&mut self, account: usize, quota: Units) {
        if let Some(slot) = self.quotas.get_mut(account) {
            *slot = quota;
        }
    }

    /// What a process was granted.
    pub fn granted_to(&self, pid: u32, account: usize) -> Units {
        amount(&self.granted, pid, account)
    }

    /// What all living processes were granted.
    pub fn granted(&self, account: usize) -> Units {
        total(&self.granted, account)
    }

    /// What dead processes had been granted, what they had exported of it among it.
    pub fn retired(&self, account: usize) -> Units {
        total(&self.retired, account).saturating_add(self.kept(account))
    }

    /// What dead processes had exported, and others may hold.
    pub fn kept(&self, account: usize) -> Units {
        total(&self.kept, account)
    }

    /// The most that an account ever had granted, retired and leased.
    pub fn peak(&self, account: usize) -> Units {
        self.peaks.get(account).copied().unwrap_or(Units::ZERO)
    }

    /// What can still be granted.
    pub fn free(&self, account: usize) -> Units {
        self.quota(account).saturating_sub(self.taken(account))
    }

    /// What is taken beyond the quota, as after it was made smaller.
    pub(super) fn excess(&self, account: usize) -> Units {
        self.taken(account).saturating_sub(self.quota(account))
    }

    fn taken(&self, account: usize) -> Units {
        self.own(account).saturating_add(self.inherited(account))
    }

    /// What the container has of an account, living or dead, with a session or without.
    pub(super) fn own(&self, account: usize) -> Units {
        self.charged(account).saturating_add(self.outside(account))
    }

    /// What other containers have that share the quota.
    pub(super) fn inherited(&self, account: usize) -> Units {
        let inherited = self.inherited.get(account);
        inherited.copied().unwrap_or(Units::ZERO)
    }

    /// Replaces what other containers have that share the quota.
    pub(super) fn set_inherited(&mut self, inherited: Vec<Units>) {
        self.inherited = inherited;
    }

    /// Charges what a container that has ended had exported, as what the container's own dead did.
    pub(super) fn inherit(&mut self, account: usize, units: Units) {
        let mut amounts = vec![Units::ZERO; self.quotas.len()];
        if let Some(slot) = amounts.get_mut(account) {
            *slot = units;
        }
        put(&mut self.kept, NOBODY, amounts);
        self.note_peak(account);
    }

    /// What kept leases have of an account.
    pub fn leased(&self, account: usize) -> Units {
        let leases = self.leases.values();
        leases
            .filter(|(of, _)| *of == account)
            .map(|(_, units)| *units)
            .sum()
    }

    /// What counts against an account, whoever has it, but for processes without a session.
    fn charged(&self, account: usize) -> Units {
        let processes = self.granted(account).saturating_add(self.retired(account));
        processes.saturating_add(self.leased(account))
    }

    /// The kept leases, each with its account and what it has.
    pub(super) fn leases(&self) -> &BTreeMap<u64, (usize, Units)> {
        &self.leases
    }

    /// Charges a kept lease.
    ///
    /// # Errors
    /// What the account has free, where that is less.
    pub(super) fn lease(&mut self, lease: u64, account: usize, units: Units) -> Result<(), Units> {
        let free = self.free(account);
        if units > free {
            return Err(free);
        }
        self.adopt_lease(lease, account, units);
        Ok(())
    }

    /// Charges a kept lease that there is, whether or not the quota allows it.
    pub(super) fn adopt_lease(&mut self, lease: u64, account: usize, units: Units) {
        self.leases.insert(lease, (account, units));
        self.note_peak(account);
    }

    /// There is no memory of a kept lease.
    pub(super) fn forget_lease(&mut self, lease: u64) {
        self.leases.remove(&lease);
    }

    /// A kept lease is one no more. Others may hold what it has, as they may what dead processes exported.
    pub(super) fn release_lease(&mut self, lease: u64) {
        if let Some((account, units)) = self.leases.remove(&lease) {
            self.inherit(account, units);
        }
    }

    /// What processes without a session have of an account.
    pub fn outside(&self, account: usize) -> Units {
        let charged = self.outside.get(account);
        charged.map_or(Units::ZERO, |charged| charged.values().copied().sum())
    }

    /// What a process without a session has of an account.
    pub(super) fn outside_of(&self, pid: u32, account: usize) -> Units {
        let charged = self
            .outside
            .get(account)
            .and_then(|charged| charged.get(&pid));
        charged.copied().unwrap_or(Units::ZERO)
    }

    /// The processes without a session that have something.
    pub(super) fn outsiders(&self) -> impl Iterator<Item = u32> {
        self.outside.iter().flat_map(BTreeMap::keys).copied()
    }

    /// Replaces what processes without a session have of an account, by pid. It is not granted to anybody else.
    pub fn set_outside(&mut self, account: usize, charged: BTreeMap<u32, Units>) {
        if let Some(slot) = self.outside.get_mut(account) {
            *slot = charged;
        }
    }

    /// A process has a session from now on: what it has is what it says, within the quota.
    pub fn has_session(&mut self, pid: u32) {
        for charged in &mut self.outside {
            charged.remove(&pid);
        }
    }

    /// Grants `need` and, where there is plenty, somewhat more; how much it was.
    ///
    /// # Errors
    /// How much is missing.
    pub fn grant(&mut self, pid: u32, account: usize, need: Units) -> Result<Units, Units> {
        let free = self.free(account);
        if need > free {
            return Err(need.saturating_sub(free));
        }
        let amount = need.saturating_add(spare(free.saturating_sub(need)));
        self.add(pid, account, amount);
        Ok(amount)
    }

    /// Charges what a process that the books don't know says that it holds, as far as the quota
    /// allows; how much it was.
    pub fn admit(&mut self, pid: u32, account: usize, claimed: Units) -> Units {
        let amount = claimed.min(self.free(account));
        self.add(pid, account, amount);
        amount
    }

    /// Takes credit off a process, at most what it was granted; how much it was.
    pub fn give_back(&mut self, pid: u32, account: usize, units: Units) -> Units {
        let Some(slot) = self
            .granted
            .get_mut(&pid)
            .and_then(|accounts| accounts.get_mut(account))
        else {
            return Units::ZERO;
        };
        let taken = units.min(*slot);
        *slot = slot.saturating_sub(taken);
        taken
    }

    /// A process image ended: what it was granted stays charged, to nobody who could use it. Of each account
    /// it had exported so much, at most what it was granted: that part outlives it by itself.
    pub fn retire(&mut self, pid: u32, exported: &[Units]) {
        let Some(granted) = self.granted.remove(&pid) else {
            return;
        };
        let of = |account: usize| exported.get(account).copied().unwrap_or(Units::ZERO);
        let kept: Vec<_> = (0..)
            .map(of)
            .zip(&granted)
            .map(|(exported, granted)| exported.min(*granted))
            .collect();
        let rest: Vec<_> = granted
            .iter()
            .zip(&kept)
            .map(|(granted, kept)| granted.saturating_sub(*kept))
            .collect();
        put(&mut self.retired, pid, rest);
        put(&mut self.kept, pid, kept);
    }

    /// The driver no longer charges what a process image had: it is free again, but for what others may hold.
    pub fn release(&mut self, pid: u32) {
        self.retired.remove(&pid);
    }

    /// At most this much of an account can be held by others than the processes that it was granted to, of what
    /// the dead had exported when it was this: beyond that it is free again. Which of it is held cannot be told,
    /// so each may be.
    pub(super) fn keep_at_most(&mut self, account: usize, most: Units, of: &Books) {
        for (pid, accounts) in &mut self.kept {
            let asked = of.get(pid).and_then(|asked| asked.get(account));
            if let Some(kept) = accounts.get_mut(account)
                && asked == Some(&*kept)
            {
                *kept = most.min(*kept);
            }
        }
        self.kept.retain(|_, accounts| has_any(accounts));
    }

    /// The pids of process images that ended and are still charged.
    pub fn retired_pids(&self) -> Vec<u32> {
        self.retired.keys().copied().collect()
    }

    /// Living processes' grants, for the record.
    pub(super) fn grants(&self) -> &Books {
        &self.granted
    }

    /// Dead processes' grants, for the record; and what of them was exported.
    pub(super) fn retirements(&self) -> [&Books; 2] {
        [&self.retired, &self.kept]
    }

    /// Puts back what the record says. It was within the quota when it was granted.
    pub(super) fn restore(&mut self, pid: u32, granted: &[Units]) {
        for (account, units) in granted.iter().enumerate().take(self.quotas.len()) {
            self.add(pid, account, *units);
        }
    }

    fn add(&mut self, pid: u32, account: usize, units: Units) {
        let count = self.quotas.len();
        let accounts = self
            .granted
            .entry(pid)
            .or_insert_with(|| vec![Units::ZERO; count]);
        if let Some(slot) = accounts.get_mut(account) {
            *slot = slot.saturating_add(units);
        }
        self.note_peak(account);
    }

    fn note_peak(&mut self, account: usize) {
        let now = self.charged(account);
        if let Some(peak) = self.peaks.get_mut(account) {
            *peak = now.max(*peak);
        }
    }
}

/// Adds amounts to a book, where there are any.
fn put(books: &mut Books, pid: u32, amounts: Vec<Units>) {
    if !has_any(&amounts) {
        return;
    }
    let sums = books
        .entry(pid)
        .or_insert_with(|| vec![Units::ZERO; amounts.len()]);
    for (sum, units) in sums.iter_mut().zip(amounts) {
        *sum = sum.saturating_add(units);
    }
}

fn has_any(amounts: &[Units]) -> bool {
    amounts.iter().any(|units| *units != Units::ZERO)
}

/// What a process gets beyond its need when `left` would be free.
fn spare(left: Units) -> Units {
    let share = (left.0 / SHARE).min(SLAB.0);
    Units(share - share % STEP)
}

fn amount(books: &Books, pid: u32, account: usize) -> Units {
    books
        .get(&pid)
        .and_then(|accounts| accounts.get(account))
        .copied()
        .unwrap_or(Units::ZERO)
}

fn total(books: &Books, account: usize) -> Units {
    books
        .values()
        .filter_map(|accounts| accounts.get(account))
        .copied()
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GIB: u32 = (1 << 30) / UNIT as u32;

    #[test]
    fn the_last_unit_can_be_granted_and_one_more_cannot() {
        let mut credit = Credit::new(vec![Units(GIB)]);
        assert_eq!(credit.grant(1, 0, Units(GIB + 1)), Err(Units(1)));
        assert_eq!(credit.grant(1, 0, Units(GIB - 1)), Ok(Units(GIB - 1)));
        assert_eq!(credit.grant(2, 0, Units(1)), Ok(Units(1)));
        assert_eq!(credit.grant(2, 0, Units(1)), Err(Units(1)));
        assert_eq!(credit.peak(0), Units(GIB));
    }

    #[test]
    fn slabs_are_large_in_an_empty_container_and_nothing_near_its_limit() {
        assert_eq!(spare(Units(16 * GIB)), SLAB);
        assert_eq!(spare(Units(SLAB.0)), Units(SLAB.0 / 8));
        assert_eq!(spare(Units(STEP * SHARE - 1)), Units(0));
    }

    #[test]
    fn a_dead_process_is_charged_until_it_is_released() {
        let mut credit = Credit::new(vec![Units(10)]);
        credit.grant(1, 0, Units(10)).unwrap();
        credit.retire(1, &[]);
        assert_eq!(
            (credit.granted(0), credit.retired(0), credit.free(0)),
            (Units(0), Units(10), Units(0))
        );
        assert_eq!(credit.grant(2, 0, Units(1)), Err(Units(1)));
        credit.release(1);
        assert_eq!(credit.grant(2, 0, Units(10)), Ok(Units(10)));
    }

    #[test]
    fn what_a_process_without_a_session_has_is_granted_to_nobody_until_it_has_one() {
        let mut credit = Credit::new(vec![Units(10)]);
        credit.set_outside(0, BTreeMap::from([(1, Units(7))]));
        assert_eq!(credit.grant(2, 0, Units(4)), Err(Units(1)));
        credit.has_session(1);
        assert_eq!(credit.admit(1, 0, Units(7)), Units(7));
        assert_eq!(credit.free(0), Units(3));
        credit.set_outside(0, BTreeMap::from([(3, Units(70))]));
        assert_eq!(credit.free(0), Units(0));
        credit.set_outside(0, BTreeMap::new());
        assert_eq!(credit.free(0), Units(3));
    }

    #[test]
    fn what_the_dead_exported_stays_charged_until_nobody_can_hold_it() {
        let mut credit = Credit::new(vec![Units(10)]);
        credit.grant(1, 0, Units(6)).unwrap();
        credit.grant(2, 0, Units(4)).unwrap();
        credit.retire(1, &[Units(5)]);
        credit.retire(2, &[Units(u32::MAX)]);
        credit.release(1);
        credit.release(2);
        assert_eq!((credit.retired(0), credit.kept(0)), (Units(9), Units(9)));
        let all = credit.kept.clone();
        credit.keep_at_most(0, Units(20), &all);
        assert_eq!(credit.grant(3, 0, Units(2)), Err(Units(1)));
        credit.keep_at_most(0, Units::ZERO, &Books::new());
        assert_eq!(
            credit.kept(0),
            Units(9),
            "who died later was not asked about"
        );
        credit.keep_at_most(0, Units(3), &all);
        assert_eq!(
            credit.kept(0),
            Units(6),
            "three of either may be what is held"
        );
        let rest = credit.kept.clone();
        credit.keep_at_most(0, Units::ZERO, &rest);
        assert_eq!(credit.grant(3, 0, Units(10)), Ok(Units(10)));
    }

    #[test]
    fn a_kept_lease_is_charged_until_nobody_can_hold_what_it_had() {
        let mut credit = Credit::new(vec![Units(10)]);
        credit.grant(1, 0, Units(4)).unwrap();
        assert_eq!(credit.lease(7, 0, Units(7)), Err(Units(6)));
        credit.lease(7, 0, Units(6)).unwrap();
        assert_eq!(
            (credit.leased(0), credit.free(0), credit.peak(0)),
            (Units(6), Units(0), Units(10))
        );
        credit.release_lease(7);
        credit.release_lease(7);
        assert_eq!((credit.leased(0), credit.kept(0)), (Units(0), Units(6)));
        let asked = credit.kept.clone();
        credit.adopt_lease(8, 0, Units(1));
        credit.release_lease(8);
        credit.keep_at_most(0, Units::ZERO, &asked);
        assert_eq!(
            credit.kept(0),
            Units(7),
            "what was released later was not asked about"
        );
        let asked = credit.kept.clone();
        credit.keep_at_most(0, Units::ZERO, &asked);
        assert_eq!(credit.free(0), Units(6));
        credit.lease(9, 0, Units(6)).unwrap();
        credit.forget_lease(9);
        assert_eq!(credit.free(0), Units(6), "there was no memory of it");
    }

    #[test]
    fn an_account_that_does_not_exist_grants_nothing() {
        let mut credit = Credit::new(vec![Units(10)]);
        assert_eq!(credit.grant(1, 1, Units(1)), Err(Units(1)));
        assert_eq!(credit.admit(1, 7, Units(1)), Units(0));
        assert_eq!(credit.give_back(1, 7, Units(1)), Units(0));
    }

    #[derive(Clone, Debug)]
    enum Step {
        Grant(u32, u32),
        Admit(u32, u32),
        GiveBack(u32, u32),
        Retire(u32, u32),
        Release(u32),
        KeepAtMost(u32),
        Resize(u32),
    }

    fn step() -> impl Strategy<Value = Step> {
        let units = 0..3 * GIB;
        prop_oneof![
            4 => (0..4u32, units.clone()).prop_map(|(pid, units)| Step::Grant(pid, units)),
            1 => (0..4u32, units.clone()).prop_map(|(pid, units)| Step::Admit(pid, units)),
            2 => (0..4u32, units.clone()).prop_map(|(pid, units)| Step::GiveBack(pid, units)),
            1 => (0..4u32, units.clone()).prop_map(|(pid, units)| Step::Retire(pid, units)),
            1 => (0..4u32).prop_map(Step::Release),
            1 => units.clone().prop_map(Step::KeepAtMost),
            1 => units.prop_map(Step::Resize),
        ]
    }

    proptest! {
        #[test]
        fn nothing_is_granted_beyond_the_quota_nor_refused_within_it(steps in prop::collection::vec(step(), 0..80)) {
            let mut credit = Credit::new(vec![Units(4 * GIB)]);
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
                        prop_assert_eq!(credit.admit(pid, 0, Units(units)), Units(units).min(free));
                    }
                    Step::GiveBack(pid, units) => {
                        let held = credit.granted_to(pid, 0);
                        prop_assert_eq!(credit.give_back(pid, 0, Units(units)), Units(units).min(held));
                    }
                    Step::Retire(pid, exported) => {
                        let sum = credit.granted(0).0 + credit.retired(0).0;
                        credit.retire(pid, &[Units(exported)]);
                        prop_assert_eq!(credit.granted(0).0 + credit.retired(0).0, sum);
                    }
                    Step::Release(pid) => {
                        let kept = credit.kept(0);
                        credit.release(pid);
                        prop_assert_eq!(credit.kept(0), kept);
                    }
                    Step::KeepAtMost(units) => {
                        let rest = credit.retired(0).0 - credit.kept(0).0;
                        let all = credit.kept.clone();
                        credit.keep_at_most(0, Units(units), &all);
                        prop_assert_eq!(credit.retired(0).0 - credit.kept(0).0, rest);
                    }
                    Step::Resize(quota) => credit.set_quota(0, Units(quota.max(before.0 + credit.retired(0).0))),
                }
                prop_assert!(credit.granted(0).0 + credit.retired(0).0 <= credit.quota(0).0);
            }
        }
    }
}
