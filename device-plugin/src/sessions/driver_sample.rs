//! What the driver shows of one GPU, at a moment.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::units::{Bytes, GpuUuid};

/// What a process with a context has of a GPU that the driver does not list: 8.8 MiB on an H200
/// with driver 580.
const UNLISTED: Bytes = Bytes::mib(9);

/// Who looks at GPUs: NVML, in the agent.
pub trait DriverCharges: Send + Sync + 'static {
    /// What the driver shows of `gpu`; `None` when it cannot be told now. It may block.
    fn look(&self, gpu: &GpuUuid) -> Option<Look>;
}

/// A GPU's memory and its processes: two answers, the memory first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Look {
    /// What is in use, whoever has it; not what the driver keeps for itself.
    pub used: Bytes,
    /// What is charged to processes.
    pub charges: Charges,
    /// What processes own that have no context, so that NVML does not list them; empty where the
    /// driver cannot tell.
    pub contextless: BTreeMap<u32, Bytes>,
}

impl Look {
    /// What is in use and charged to no process, in bytes: what only descriptors hold is among it
    /// (F4 in docs/facts.md, F13). Below zero where a process allocated between the two answers.
    pub fn residual(&self) -> i64 {
        let charged = self.charges.sum();
        i64::try_from(i128::from(self.used.0) - i128::from(charged)).unwrap_or(i64::MAX)
    }

    /// What of the residual may be somebody's: all but what every process has unlisted.
    pub fn unlisted(&self) -> Bytes {
        let residual = u64::try_from(self.residual()).unwrap_or_default();
        Bytes(residual.saturating_sub(unlisted_by(self.charges.0.len())))
    }
}

/// What so many processes have that the driver does not list.
pub(super) fn unlisted_by(processes: usize) -> u64 {
    UNLISTED.0.saturating_mul(processes as u64)
}

/// The processes that the driver lists on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Charges(BTreeMap<u32, Option<Bytes>>);

impl Charges {
    /// What the driver charges to `pid`: zero when it does not list the process, `None` when it
    /// cannot tell how much the process has.
    pub fn of(&self, pid: u32) -> Option<Bytes> {
        self.0.get(&pid).copied().unwrap_or(Some(Bytes::ZERO))
    }

    /// The processes that are listed, with what they are charged; none where the driver cannot
    /// tell.
    pub fn iter(&self) -> impl Iterator<Item = (u32, Option<Bytes>)> {
        self.0.iter().map(|(pid, bytes)| (*pid, *bytes))
    }

    /// Whether the driver lists `pid`.
    pub fn lists(&self, pid: u32) -> bool {
        self.0.contains_key(&pid)
    }

    /// Whether the driver tells of every process how much it has.
    pub fn are_told(&self) -> bool {
        self.0.values().all(Option::is_some)
    }

    fn sum(&self) -> u64 {
        let told = self.0.values().flatten();
        told.fold(0, |sum, bytes| sum.saturating_add(bytes.0))
    }
}

impl FromIterator<(u32, Option<Bytes>)> for Charges {
    /// Of pids with what they are charged. One that computes and draws is listed twice, each time
    /// with all that it has.
    fn from_iter<T: IntoIterator<Item = (u32, Option<Bytes>)>>(listed: T) -> Charges {
        let mut charges = BTreeMap::new();
        for (pid, bytes) in listed {
            let most = charges.entry(pid).or_insert(bytes);
            *most = most
                .zip(bytes)
                .map(|(here, there): (Bytes, Bytes)| here.max(there));
        }
        Charges(charges)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(used: u64, listed: &[(u32, Option<u64>)]) -> Look {
        let listed = listed.iter();
        Look {
            used: Bytes::mib(used),
            charges: listed
                .map(|(pid, mib)| (*pid, mib.map(Bytes::mib)))
                .collect(),
            ..Look::default()
        }
    }

    #[test]
    fn a_process_that_is_listed_twice_has_the_larger_figure_and_one_that_is_not_has_nothing() {
        let Look { charges, .. } = look(0, &[(1, Some(2)), (2, None), (1, Some(3)), (2, Some(1))]);
        assert_eq!(
            [1, 2, 3].map(|pid| charges.of(pid)),
            [Some(Bytes::mib(3)), None, Some(Bytes::ZERO)]
        );
        assert!(!charges.are_told());
    }

    #[test]
    fn what_is_charged_to_nobody_is_the_residual_whatever_each_process_has_unlisted() {
        let parked = look(1_551, &[(1, Some(518))]);
        assert_eq!(parked.residual(), 1_033 << 20);
        assert_eq!(parked.unlisted(), Bytes::mib(1_033 - 9));
        // As measured: 526.8 MiB in use, 518 of them listed.
        assert_eq!(look(527, &[(1, Some(518))]).unlisted(), Bytes::ZERO);
        let torn = look(518, &[(1, Some(1_542))]);
        assert_eq!(
            (torn.residual(), torn.unlisted()),
            (-1_024 << 20, Bytes::ZERO)
        );
    }
}
