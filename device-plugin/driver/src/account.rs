//! Counts the bytes of a budget exactly, under any number of threads.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::ResourceError;
use crate::resource::BudgetSnapshot;

/// Adjustable limit with the bytes in use. An account above a lowered limit refuses charges until
/// enough bytes return.
#[derive(Debug)]
pub struct BudgetAccount {
    limit: AtomicU64,
    used: AtomicU64,
}

impl BudgetAccount {
    /// Creates an account without bytes in use.
    pub const fn new(limit: u64) -> BudgetAccount {
        BudgetAccount {
            limit: AtomicU64::new(limit),
            used: AtomicU64::new(0),
        }
    }

    /// Charges bytes.
    ///
    /// # Errors
    /// The limit and usage that leave no room; nothing is charged.
    #[inline]
    pub fn charge(&self, bytes: u64) -> Result<(), BudgetSnapshot> {
        self.charge_with_hook(bytes, || {})
    }

    /// Charges bytes of a device.
    ///
    /// # Errors
    /// [`ResourceError::OverBudget`]; nothing is charged.
    pub fn charge_for(&self, ordinal: u32, bytes: u64) -> Result<(), ResourceError> {
        self.charge(bytes)
            .map_err(|BudgetSnapshot { limit, used }| ResourceError::OverBudget {
                ordinal,
                requested: bytes,
                used,
                limit,
            })
    }

    /// Charges bytes; tests run `hook` between the check and the charge.
    #[inline]
    fn charge_with_hook(&self, bytes: u64, hook: impl Fn()) -> Result<(), BudgetSnapshot> {
        let mut used = self.used.load(Ordering::Relaxed);
        loop {
            let limit = self.limit.load(Ordering::SeqCst);
            let after = match used.checked_add(bytes) {
                Some(after) if after <= limit => after,
                _ => return Err(BudgetSnapshot { limit, used }),
            };
            hook();
            // Sequentially consistent with changes of the limit: a charge after a change sees that
            // change either above or below.
            match self
                .used
                .compare_exchange_weak(used, after, Ordering::SeqCst, Ordering::Relaxed)
            {
                Ok(_) if after <= self.limit.load(Ordering::SeqCst) => return Ok(()),
                Ok(_) => {
                    self.uncharge(bytes);
                    used = self.used.load(Ordering::Relaxed);
                }
                Err(found) => used = found,
            }
        }
    }

    /// Returns charged bytes.
    #[inline]
    pub fn uncharge(&self, bytes: u64) {
        let before = self.used.fetch_sub(bytes, Ordering::SeqCst);
        debug_assert!(before >= bytes, "{bytes} of {before} bytes given back");
    }

    /// Changes the limit, in bytes. Every charge after the return obeys it.
    pub fn set_limit(&self, limit: u64) {
        self.limit.store(limit, Ordering::SeqCst);
    }

    /// Returns the limit and the bytes in use.
    pub fn snapshot(&self) -> BudgetSnapshot {
        BudgetSnapshot {
            limit: self.limit.load(Ordering::SeqCst),
            used: self.used.load(Ordering::SeqCst),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Step {
        Take(u64),
        GiveBack(usize),
        Resize(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..100_u64).prop_map(Step::Take),
            3 => any::<usize>().prop_map(Step::GiveBack),
            1 => (0..500_u64).prop_map(Step::Resize),
            1 => Just(Step::Take(u64::MAX)),
        ]
    }

    proptest! {
        #[test]
        fn account_admits_exactly_what_fits(steps in prop::collection::vec(step(), 0..200)) {
            let account = BudgetAccount::new(300);
            let (mut limit, mut taken) = (300, Vec::new());
            for step in steps {
                let used: u64 = taken.iter().sum();
                match step {
                    Step::Take(bytes) => {
                        let fits = used.checked_add(bytes).is_some_and(|after| after <= limit);
                        let answer = account.charge(bytes);
                        prop_assert_eq!(answer, if fits { Ok(()) } else { Err(BudgetSnapshot { limit, used }) });
                        if fits {
                            taken.push(bytes);
                        }
                    }
                    Step::GiveBack(which) if !taken.is_empty() => {
                        account.uncharge(taken.swap_remove(which % taken.len()));
                    }
                    Step::GiveBack(_) => {}
                    Step::Resize(to) => {
                        account.set_limit(to);
                        limit = to;
                    }
                }
            }
            let used = taken.iter().sum();
            prop_assert_eq!(account.snapshot(), BudgetSnapshot { limit, used });
        }
    }

    #[test]
    fn eight_threads_fill_the_limit_and_never_pass_it() {
        const EACH: u64 = 7;
        let account = BudgetAccount::new(100 * EACH);
        let (held, most) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..5_000 {
                        if account.charge(EACH).is_ok() {
                            let now = held.fetch_add(EACH, Ordering::SeqCst) + EACH;
                            most.fetch_max(now, Ordering::SeqCst);
                            held.fetch_sub(EACH, Ordering::SeqCst);
                            account.uncharge(EACH);
                        }
                    }
                });
            }
        });
        assert!(most.into_inner() <= 100 * EACH);
        assert_eq!(account.snapshot().used, 0);
        let taken = (0..200).filter(|_| account.charge(EACH).is_ok()).count();
        assert_eq!(taken, 100);
    }

    #[test]
    fn limit_holds_when_lowered_during_a_charge() {
        let account = BudgetAccount::new(1000);
        let answer = account.charge_with_hook(600, || account.set_limit(100));
        assert_eq!(
            answer,
            Err(BudgetSnapshot {
                limit: 100,
                used: 0
            })
        );
        assert_eq!(account.snapshot().used, 0);
        account.set_limit(1000);
        let once = std::cell::Cell::new(true);
        let answer = account.charge_with_hook(600, || {
            if once.take() {
                assert_eq!(account.charge(600), Ok(()));
            }
        });
        assert_eq!(
            answer,
            Err(BudgetSnapshot {
                limit: 1000,
                used: 600
            }),
            "another was quicker"
        );
    }
}
