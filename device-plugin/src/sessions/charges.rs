//! What the driver charges to the processes on one GPU, at a moment.

use std::collections::BTreeMap;

use crate::units::{Bytes, GpuUuid};

/// What the driver charges to processes: NVML, in the agent.
pub trait DriverCharges: Send + Sync + 'static {
    /// What the driver charges on `gpu`; `None` when it cannot be told now. It may block.
    fn charged(&self, gpu: &GpuUuid) -> Option<Charges>;

    /// What of `gpu` is used and charged to no process, beyond what the driver keeps for itself: memory that
    /// only descriptors hold is among it (design F4, F13). `None` when it cannot be told. It may block.
    fn residual(&self, _gpu: &GpuUuid) -> Option<Bytes> {
        None
    }
}

/// The processes that the driver lists on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Charges(BTreeMap<u32, Option<Bytes>>);

impl Charges {
    /// What the driver charges to `pid`: zero when it does not list the process, `None` when it
    /// cannot tell how much the process has.
    pub fn of(&self, pid: u32) -> Option<Bytes> {
        self.0.get(&pid).copied().unwrap_or(Some(Bytes::ZERO))
    }

    /// The larger figure of both for each process; none where one of them has none.
    #[must_use]
    pub fn most(mut self, other: Charges) -> Charges {
        for (pid, bytes) in other.0 {
            let most = self.0.entry(pid).or_insert(Some(Bytes::ZERO));
            *most = most
                .zip(bytes)
                .map(|(here, there): (Bytes, Bytes)| here.max(there));
        }
        self
    }

    /// The processes that are listed.
    pub fn pids(&self) -> impl Iterator<Item = u32> {
        self.0.keys().copied()
    }
}

impl FromIterator<(u32, Option<Bytes>)> for Charges {
    /// Of pids with what they are charged; one that is listed twice (for compute and for graphics)
    /// has the sum.
    fn from_iter<T: IntoIterator<Item = (u32, Option<Bytes>)>>(listed: T) -> Charges {
        let mut charges = BTreeMap::new();
        for (pid, bytes) in listed {
            let sum = charges.entry(pid).or_insert(Some(Bytes::ZERO));
            *sum = sum
                .zip(bytes)
                .map(|(sum, bytes): (Bytes, Bytes)| Bytes(sum.0.saturating_add(bytes.0)));
        }
        Charges(charges)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_the_sum_of_its_entries_and_nothing_where_it_is_not_listed() {
        let listed = [
            (1, Some(Bytes(2))),
            (2, None),
            (1, Some(Bytes(3))),
            (2, Some(Bytes(1))),
        ];
        let charges: Charges = listed.into_iter().collect();
        assert_eq!(
            [1, 2, 3].map(|pid| charges.of(pid)),
            [Some(Bytes(5)), None, Some(Bytes::ZERO)]
        );
    }

    #[test]
    fn of_two_answers_the_larger_counts() {
        let first: Charges = [(1, Some(Bytes(2))), (2, Some(Bytes(7))), (4, None)]
            .into_iter()
            .collect();
        let second: Charges = [
            (1, Some(Bytes(5))),
            (3, Some(Bytes(1))),
            (4, Some(Bytes(1))),
        ]
        .into_iter()
        .collect();
        let most = first.most(second);
        let expected = [Some(Bytes(5)), Some(Bytes(7)), Some(Bytes(1)), None];
        assert_eq!([1, 2, 3, 4].map(|pid| most.of(pid)), expected);
    }
}
