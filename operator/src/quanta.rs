//! Counts memory in whole quanta.

use bursar_crds::budget::QuantaAmount;
use bursar_crds::quantity::QuantityError;
use bursar_crds::{Amount, Quantum};

/// A number of quanta, the unit of resource limits. Between 0 and [`Quanta::MAX`].
///
/// Sums saturate, because a pod may request any number and the status must still be written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Quanta(i64);

impl Quanta {
    /// Zero quanta.
    pub const ZERO: Self = Self(0);

    /// The maximum: with the largest quantum it is the last amount below 8Ei, the limit of
    /// Kubernetes' arithmetic.
    pub const MAX: Self = Self((1 << 33) - 1);

    /// `count` quanta, saturated at [`Quanta::MAX`].
    pub fn new(count: u64) -> Self {
        i64::try_from(count).map_or(Self::MAX, |count| Self(count).min(Self::MAX))
    }

    /// The whole quanta in `amount`.
    pub fn within(amount: &Amount, quantum: Quantum) -> Result<Self, QuantityError> {
        Ok(Self(quantum.floor(amount.bytes()?)).min(Self::MAX))
    }

    /// The number of quanta.
    pub fn count(self) -> i64 {
        self.0
    }

    /// The sum, saturated at [`Quanta::MAX`].
    pub fn plus(self, other: Self) -> Self {
        Self(self.0 + other.0).min(Self::MAX)
    }

    /// The difference, saturated at zero.
    pub fn minus(self, other: Self) -> Self {
        Self(self.0 - other.0).max(Self::ZERO)
    }

    /// The amount in bytes.
    pub fn bytes(self, quantum: Quantum) -> u64 {
        self.0.unsigned_abs() * quantum.bytes()
    }

    /// The amount as the API represents it.
    pub fn counted(self, quantum: Quantum) -> QuantaAmount {
        QuantaAmount {
            quanta: self.0,
            bytes: Amount::from_bytes(self.bytes(quantum)),
        }
    }

    /// The amount as people write it, such as `16Gi`.
    pub fn text(self, quantum: Quantum) -> String {
        Amount::from_bytes(self.bytes(quantum)).0.0
    }
}

impl std::iter::Sum for Quanta {
    fn sum<I: Iterator<Item = Self>>(amounts: I) -> Self {
        amounts.fold(Self::ZERO, Self::plus)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maximum_is_a_valid_kubernetes_quantity() {
        for quantum in Quantum::ALL {
            let most = Quanta::new(u64::MAX).plus(Quanta::MAX).counted(quantum);
            assert_eq!(
                most.bytes.bytes(),
                Ok(most.quanta.unsigned_abs() * quantum.bytes())
            );
        }
        assert_eq!(Quanta::MAX.counted(Quantum::Gib1).quanta, (1 << 33) - 1);
    }

    #[test]
    fn partial_quantum_does_not_count() {
        let amount = Amount::from("1.5Gi");
        assert_eq!(Quanta::within(&amount, Quantum::Gib1), Ok(Quanta::new(1)));
        assert_eq!(Quanta::within(&amount, Quantum::Mib512), Ok(Quanta::new(3)));
    }

    #[test]
    fn subtraction_saturates_at_zero() {
        assert_eq!(Quanta::new(3).minus(Quanta::new(5)), Quanta::ZERO);
    }
}
