//! Computes with one credit word, `{granted, used}`, without memory or atomics.
#![forbid(unsafe_code)]

/// One half of a word. The product uses `u32`; the tests walk every value of `u8`.
pub trait CreditInt: Copy + Ord + std::fmt::Debug {
    /// Nothing.
    const ZERO: Self;
    /// The largest value: as `used` it marks a frozen word.
    const MAX: Self;
    /// The sum, or `None` on overflow.
    fn checked_add(self, other: Self) -> Option<Self>;
    /// The difference, or zero.
    fn saturating_sub(self, other: Self) -> Self;
}

macro_rules! credit_int {
    ($($int:ty),*) => {$(
        impl CreditInt for $int {
            const ZERO: Self = 0;
            const MAX: Self = <$int>::MAX;
            fn checked_add(self, other: Self) -> Option<Self> {
                <$int>::checked_add(self, other)
            }
            fn saturating_sub(self, other: Self) -> Self {
                <$int>::saturating_sub(self, other)
            }
        }
    )*};
}
credit_int!(u8, u32);

/// The credit of one process for one account and its usage, in units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreditWord<T = u32> {
    /// The credit that the process may use without a request.
    pub granted: T,
    /// The units that the process has charged.
    pub used: T,
}

/// Why a charge failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CreditError<T = u32> {
    /// This much more must be granted.
    Short(T),
    /// The sum is more than a word can count, so no grant can help.
    TooLarge,
    /// The word was frozen, because its process has migrated to another page.
    Frozen,
}

impl<T: CreditInt> CreditWord<T> {
    /// A word that can no longer be charged or discharged, because its process migrates to another
    /// page.
    pub const FROZEN: CreditWord<T> = CreditWord {
        granted: T::ZERO,
        used: T::MAX,
    };

    /// Returns whether the word is [`CreditWord::FROZEN`], or was overwritten so that it looks
    /// frozen.
    pub fn is_frozen(self) -> bool {
        self.used == T::MAX
    }

    /// Returns the word after `n` more units are used.
    ///
    /// # Errors
    /// [`CreditError`] when `n` does not fit in what is granted.
    pub fn charge(self, n: T) -> Result<CreditWord<T>, CreditError<T>> {
        if self.is_frozen() {
            return Err(CreditError::Frozen);
        }
        let used = self
            .used
            .checked_add(n)
            .filter(|used| *used < T::MAX)
            .ok_or(CreditError::TooLarge)?;
        if used <= self.granted {
            Ok(CreditWord { used, ..self })
        } else {
            Err(CreditError::Short(used.saturating_sub(self.granted)))
        }
    }

    /// Returns the word after `n` fewer units are used, at least zero. `None` for a frozen word.
    pub fn discharge(self, n: T) -> Option<CreditWord<T>> {
        (!self.is_frozen()).then(|| CreditWord {
            used: self.used.saturating_sub(n),
            ..self
        })
    }

    /// Returns the word after `n` more units are granted. `None` beyond what a word counts, or for
    /// a frozen word.
    pub fn grant(self, n: T) -> Option<CreditWord<T>> {
        if self.is_frozen() {
            return None;
        }
        let granted = self
            .granted
            .checked_add(n)
            .filter(|granted| *granted < T::MAX)?;
        Some(CreditWord { granted, ..self })
    }

    /// Returns the word after at most `at_most` of its idle credit was taken back, and that amount.
    pub fn reclaim(self, at_most: T) -> (CreditWord<T>, T) {
        if self.is_frozen() {
            return (self, T::ZERO);
        }
        let taken = self.idle().min(at_most);
        (
            CreditWord {
                granted: self.granted.saturating_sub(taken),
                ..self
            },
            taken,
        )
    }

    /// Returns what is granted and not used.
    pub fn idle(self) -> T {
        if self.is_frozen() {
            T::ZERO
        } else {
            self.granted.saturating_sub(self.used)
        }
    }
}

impl CreditWord<u32> {
    /// Encodes the word for the page: `granted` in the upper half.
    pub fn pack(self) -> u64 {
        u64::from(self.granted) << 32 | u64::from(self.used)
    }

    /// Decodes a word of [`CreditWord::pack`].
    pub fn unpack(bits: u64) -> CreditWord<u32> {
        // Both halves of a 64-bit value fit in 32 bits.
        CreditWord {
            granted: (bits >> 32) as u32,
            used: (bits & u64::from(u32::MAX)) as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn every_word() -> impl Iterator<Item = CreditWord<u8>> {
        (0..=u8::MAX)
            .flat_map(|granted| (0..=u8::MAX).map(move |used| CreditWord { granted, used }))
    }

    #[test]
    fn charge_succeeds_exactly_when_the_sum_is_granted() {
        for word in every_word().filter(|word| !word.is_frozen()) {
            for n in 0..=u8::MAX {
                let sum = u16::from(word.used) + u16::from(n);
                match word.charge(n) {
                    Ok(after) => {
                        assert!(sum <= u16::from(word.granted));
                        assert_eq!((after.granted, u16::from(after.used)), (word.granted, sum));
                    }
                    Err(CreditError::Short(more)) => {
                        assert_eq!(u16::from(word.granted) + u16::from(more), sum);
                        assert!(more > 0);
                    }
                    Err(CreditError::TooLarge) => assert!(sum >= u16::from(u8::MAX)),
                    Err(CreditError::Frozen) => panic!("{word:?} is not frozen"),
                }
            }
        }
    }

    #[test]
    fn short_charge_succeeds_after_exactly_that_grant() {
        for word in every_word() {
            for n in 0..=u8::MAX {
                if let Err(CreditError::Short(more)) = word.charge(n) {
                    let granted = word.grant(more).expect("a counted sum fits");
                    assert_eq!(granted.charge(n).map(CreditWord::idle), Ok(0));
                    assert!(
                        word.grant(more - 1)
                            .expect("less fits too")
                            .charge(n)
                            .is_err()
                    );
                }
            }
        }
    }

    #[test]
    fn only_a_charge_increases_use_and_never_beyond_the_grant() {
        for word in every_word().filter(|word| !word.is_frozen() && word.used <= word.granted) {
            for n in 0..=u8::MAX {
                let (rest, taken) = word.reclaim(n);
                assert!(taken <= n && rest.used == word.used && rest.used <= rest.granted);
                assert_eq!(rest.granted + taken, word.granted);
                let less = word.discharge(n).expect("not frozen");
                assert_eq!(less.used, word.used.saturating_sub(n));
                if let Ok(more) = word.charge(n) {
                    assert_eq!(more.discharge(n), Some(word));
                }
            }
        }
    }

    #[test]
    fn frozen_word_never_changes() {
        for granted in 0..=u8::MAX {
            let word = CreditWord {
                granted,
                used: u8::MAX,
            };
            for n in 0..=u8::MAX {
                assert_eq!(word.charge(n), Err(CreditError::Frozen));
                assert_eq!(word.discharge(n), None);
                assert_eq!(word.grant(n), None);
                assert_eq!(word.reclaim(n), (word, 0));
            }
        }
    }

    proptest! {
        #[test]
        fn pack_and_unpack_round_trip(bits: u64) {
            prop_assert_eq!(CreditWord::unpack(bits).pack(), bits);
        }

        #[test]
        fn charge_at_full_width_fits_or_reports_the_shortfall(bits: u64, n: u32) {
            let word = CreditWord::unpack(bits);
            let sum = u64::from(word.used) + u64::from(n);
            match word.charge(n) {
                Ok(after) => prop_assert!(sum <= u64::from(word.granted) && u64::from(after.used) == sum),
                Err(CreditError::Short(more)) => prop_assert_eq!(u64::from(word.granted) + u64::from(more), sum),
                Err(CreditError::TooLarge) => prop_assert!(sum >= u64::from(u32::MAX)),
                Err(CreditError::Frozen) => prop_assert!(word.is_frozen()),
            }
        }
    }
}
