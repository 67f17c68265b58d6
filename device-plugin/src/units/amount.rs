//! Amounts of memory: bytes, and quanta as Kubernetes counts them.

use std::fmt;
use std::iter::Sum;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{UnitError, serde_as_str};

/// An amount of memory in bytes. Shown in the largest binary unit that divides it.
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

/// A count of quanta, and so of tokens. What a quantum is in bytes says [`QuantumSize`].
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Quanta(pub u32);

impl Quanta {
    /// No quantum.
    pub const ZERO: Self = Self(0);

    /// `self - other`, or zero where `other` is more.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl std::ops::Add for Quanta {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl std::ops::AddAssign for Quanta {
    fn add_assign(&mut self, other: Self) {
        self.0 += other.0;
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

/// How much memory one token stands for. It is part of the resource's name, for a scheduler
/// compares counts and two sizes under one name would be a lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum QuantumSize {
    /// 256 MiB.
    Mib256,
    /// 512 MiB.
    Mib512,
    /// 1 GiB, the default.
    #[default]
    Gib1,
}

impl QuantumSize {
    /// One quantum in bytes.
    pub const fn bytes(self) -> Bytes {
        match self {
            Self::Mib256 => Bytes::mib(256),
            Self::Mib512 => Bytes::mib(512),
            Self::Gib1 => Bytes::gib(1),
        }
    }

    /// `quanta` in bytes.
    pub const fn times(self, quanta: Quanta) -> Bytes {
        Bytes(self.bytes().0 * quanta.0 as u64)
    }

    /// How many whole quanta `bytes` holds; what is left over is not offered to anybody.
    pub fn floor(self, bytes: Bytes) -> Quanta {
        Quanta(u32::try_from(bytes.0 / self.bytes().0).unwrap_or(u32::MAX))
    }

    /// The end of a resource's name: `gib`, `512mib` or `256mib`.
    pub const fn suffix(self) -> &'static str {
        match self {
            Self::Mib256 => "256mib",
            Self::Mib512 => "512mib",
            Self::Gib1 => "gib",
        }
    }
}

impl fmt::Display for QuantumSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mib256 => "256Mi",
            Self::Mib512 => "512Mi",
            Self::Gib1 => "1Gi",
        })
    }
}

impl FromStr for QuantumSize {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        match text {
            "256Mi" => Ok(Self::Mib256),
            "512Mi" => Ok(Self::Mib512),
            "1Gi" | "1024Mi" => Ok(Self::Gib1),
            other => Err(UnitError::Quantum(other.to_owned())),
        }
    }
}

serde_as_str!(QuantumSize);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_shown_in_the_unit_that_divides_them() {
        assert_eq!(Bytes::gib(12).to_string(), "12 GiB");
        assert_eq!(Bytes::mib(768).to_string(), "768 MiB");
        assert_eq!(Bytes(1000).to_string(), "1000 B");
    }

    #[test]
    fn a_gpu_offers_whole_quanta_only() {
        assert_eq!(QuantumSize::Gib1.floor(Bytes::mib(2047)), Quanta(1));
        assert_eq!(QuantumSize::Mib256.floor(Bytes::mib(2047)), Quanta(7));
    }

    #[test]
    fn a_quantum_is_one_of_three_sizes() {
        assert_eq!("1Gi".parse(), Ok(QuantumSize::Gib1));
        for bad in ["0", "2Gi", "1GiB", "", "1gi"] {
            assert_eq!(
                bad.parse::<QuantumSize>(),
                Err(UnitError::Quantum(bad.to_owned()))
            );
        }
    }
}
