//! Defines amounts of memory: bytes, and quanta as Kubernetes counts them.

use std::fmt;
use std::iter::Sum;

use bursar_crds::Quantum;
use serde::{Deserialize, Serialize};

/// An amount of memory in bytes, shown in the largest binary unit that divides it.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// No memory.
    pub const ZERO: Self = Self(0);

    /// `n` MiB.
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    /// `n` GiB.
    pub const fn gib(n: u64) -> Self {
        Self(n << 30)
    }

    /// `self - other`, or zero where `other` is more.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// The whole quanta of the amount. No pod gets the rest.
    pub fn whole_quanta(self, quantum: Quantum) -> Quanta {
        Quanta(u32::try_from(quantum.floor(self.0)).unwrap_or(u32::MAX))
    }
}

/// A sum that overflows becomes `u64::MAX`. Tenants shape some amounts, and a sum that wrapped to a
/// small number would hide memory.
impl std::ops::Add for Bytes {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(amounts: I) -> Self {
        amounts.fold(Self::ZERO, |sum, amount| sum + amount)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => write!(f, "0 GiB"),
            b if b.is_multiple_of(1 << 30) => write!(f, "{} GiB", b >> 30),
            b if b.is_multiple_of(1 << 20) => write!(f, "{} MiB", b >> 20),
            b => write!(f, "{b} B"),
        }
    }
}

/// A count of quanta, and so of device ids. [`Quantum`] is the size in bytes of each.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Quanta(pub u32);

impl Quanta {
    /// Zero quanta.
    pub const ZERO: Self = Self(0);

    /// `self - other`, or zero where `other` is more.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// The amount in bytes.
    pub const fn bytes(self, quantum: Quantum) -> Bytes {
        Bytes(quantum.bytes() * self.0 as u64)
    }
}

/// A sum that overflows becomes `u32::MAX`. Amounts may come from a damaged file, and the agent
/// would bind memory twice if the sum wrapped to a small number.
impl std::ops::Add for Quanta {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl std::ops::AddAssign for Quanta {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sum for Quanta {
    fn sum<I: Iterator<Item = Self>>(amounts: I) -> Self {
        amounts.fold(Self::ZERO, |sum, amount| sum + amount)
    }
}

impl fmt::Display for Quanta {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_display_uses_the_largest_dividing_unit() {
        assert_eq!(Bytes::gib(12).to_string(), "12 GiB");
        assert_eq!(Bytes::mib(768).to_string(), "768 MiB");
        assert_eq!(Bytes(1000).to_string(), "1000 B");
    }

    #[test]
    fn partial_quanta_are_not_counted() {
        assert_eq!(Bytes::mib(2047).whole_quanta(Quantum::Gib1), Quanta(1));
        assert_eq!(Bytes::mib(2047).whole_quanta(Quantum::Mib256), Quanta(7));
    }
}
