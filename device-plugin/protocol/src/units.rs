//! Counts memory in the units of credit.
#![forbid(unsafe_code)]

use serde::{Deserialize, Deserializer, Serialize};

/// Bytes of one unit. The driver allocates larger blocks; 4 KiB is exact for every quota, because
/// quanta are at least 256 MiB. 32 bits count 16 TiB of such units.
pub const UNIT: u64 = 4096;

/// An amount of memory in units of 4 KiB.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Units(#[serde(deserialize_with = "capped")] pub u32);

fn capped<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    Ok(u32::deserialize(deserializer)?.min(Units::MAX.0))
}

impl Units {
    /// No memory.
    pub const ZERO: Units = Units(0);
    /// The largest amount that a credit word can count: one less than `u32::MAX`, which marks a
    /// frozen word (see [`crate::credit::CreditWord::FROZEN`]).
    pub const MAX: Units = Units(u32::MAX - 1);

    /// Returns the units that hold `bytes`, rounded up, or `None` beyond what a word can count (16
    /// TiB), which no device has.
    #[inline]
    pub fn holding(bytes: u64) -> Option<Units> {
        let units = bytes.div_ceil(UNIT);
        u32::try_from(units)
            .ok()
            .map(Units)
            .filter(|units| *units <= Units::MAX)
    }

    /// Returns the whole units inside `bytes`, rounded down and capped at [`Units::MAX`]: what a
    /// quota of `bytes` allows.
    pub fn within(bytes: u64) -> Units {
        u32::try_from(bytes / UNIT).map_or(Units::MAX, |units| Units(units).min(Units::MAX))
    }

    /// Returns the amount in bytes.
    pub fn bytes(self) -> u64 {
        u64::from(self.0) * UNIT
    }

    /// Returns the sum, or `None` beyond [`Units::MAX`].
    pub fn checked_add(self, other: Units) -> Option<Units> {
        self.0
            .checked_add(other.0)
            .map(Units)
            .filter(|units| *units <= Units::MAX)
    }

    /// Returns the sum, capped at [`Units::MAX`].
    pub fn saturating_add(self, other: Units) -> Units {
        self.checked_add(other).unwrap_or(Units::MAX)
    }

    /// Returns the difference, or zero.
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
        let read: Units = serde_json::from_str(&u32::MAX.to_string()).unwrap();
        assert_eq!(read, Units::MAX);
    }
}
