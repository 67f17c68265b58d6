//! Memory counted in the units that credit is granted and charged in.
#![forbid(unsafe_code)]

/// Bytes of one unit. Device memory is handed out in larger blocks by the driver; 4 KiB is fine
/// enough to be exact for every quota (quanta are at least 256 MiB) and lets 32 bits count 16 TiB.
pub const UNIT: u64 = 4096;

/// An amount of memory in units of 4 KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Units(pub u32);

impl Units {
    /// No memory.
    pub const ZERO: Units = Units(0);
    /// The largest amount that a credit word can count; one less than `u32::MAX`, which marks a
    /// frozen word (see [`crate::word::Word::FROZEN`]).
    pub const MAX: Units = Units(u32::MAX - 1);

    /// The units that hold `bytes`, rounded up; `None` if that is more than a word can count
    /// (16 TiB), which no device has.
    #[inline]
    pub fn holding(bytes: u64) -> Option<Units> {
        let units = bytes.div_ceil(UNIT);
        u32::try_from(units)
            .ok()
            .map(Units)
            .filter(|units| *units <= Units::MAX)
    }

    /// The whole units inside `bytes`, rounded down and capped at [`Units::MAX`]: what a quota of
    /// `bytes` allows.
    pub fn within(bytes: u64) -> Units {
        u32::try_from(bytes / UNIT).map_or(Units::MAX, |units| Units(units).min(Units::MAX))
    }

    /// The amount in bytes.
    pub fn bytes(self) -> u64 {
        u64::from(self.0) * UNIT
    }

    /// The sum, or `None` beyond [`Units::MAX`].
    pub fn checked_add(self, other: Units) -> Option<Units> {
        self.0
            .checked_add(other.0)
            .map(Units)
            .filter(|units| *units <= Units::MAX)
    }

    /// The sum, capped at [`Units::MAX`].
    pub fn saturating_add(self, other: Units) -> Units {
        self.checked_add(other).unwrap_or(Units::MAX)
    }

    /// The difference, or none.
    pub fn saturating_sub(self, other: Units) -> Units {
        Units(self.0.saturating_sub(other.0))
    }
}

impl std::iter::Sum for Units {
    fn sum<I: Iterator<Item = Units>>(iter: I) -> Units {
        iter.fold(Units::ZERO, Units::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_round_up_for_charges_and_down_for_quotas() {
        assert_eq!(Units::holding(0), Some(Units(0)));
        assert_eq!(Units::holding(1), Some(Units(1)));
        assert_eq!(Units::holding(UNIT), Some(Units(1)));
        assert_eq!(Units::holding(UNIT + 1), Some(Units(2)));
        assert_eq!(Units::within(UNIT - 1), Units(0));
        assert_eq!(Units::within(UNIT), Units(1));
    }

    #[test]
    fn units_saturate_at_sixteen_tebibytes() {
        assert_eq!(Units::holding(u64::MAX), None);
        assert_eq!(Units::holding(Units::MAX.bytes()), Some(Units::MAX));
        assert_eq!(Units::holding(Units::MAX.bytes() + 1), None);
        assert_eq!(Units::within(u64::MAX), Units::MAX);
        assert_eq!(Units::MAX.checked_add(Units(1)), None);
    }
}
