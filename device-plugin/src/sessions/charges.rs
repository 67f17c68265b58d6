//! What the driver charges to the processes on one GPU, at a moment.

use std::collections::BTreeMap;

use crate::units::{Bytes, GpuUuid};

/// What the driver charges to processes: NVML, in the agent.
pub trait DriverCharges: Send + Sync + 'static {
    /// What the driver charges on `gpu`; `None` when it cannot be told now. It may block.
    fn charged(&self, gpu: &GpuUuid) -> Option<Charges>;
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
}
