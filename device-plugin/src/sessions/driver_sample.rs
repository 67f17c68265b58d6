//! What the driver shows of one GPU, at a moment.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::units::{Bytes, GpuUuid};

/// What a process with a context has of a GPU that the driver does not list: 8.8 MiB on an H200
/// with driver 580.
const UNLISTED_PER_PROCESS: Bytes = Bytes::mib(9);

/// Who looks at GPUs: NVML, in the agent.
pub trait MemorySampler: Send + Sync + 'static {
    /// What the driver shows of `gpu`; `None` when it cannot be told now. It may block.
    fn sample(&self, gpu: &GpuUuid) -> Option<GpuMemorySample>;
}

/// A GPU's memory and its processes: two answers, the memory first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuMemorySample {
    /// What is in use, whoever has it; not what the driver keeps for itself.
    pub used: Bytes,
    /// What is charged to processes.
    pub charges: ProcessMemory,
    /// What processes own that have no context, so that NVML does not list them; empty where the
    /// driver cannot tell.
    pub contextless: BTreeMap<u32, Bytes>,
}

impl GpuMemorySample {
    /// What is in use and charged to no process, in bytes: what only descriptors hold is among it
    /// (F4 in docs/facts.md, F13). Below zero where a process allocated between the two answers.
    pub fn unattributed_signed(&self) -> i64 {
        let charged = self.charges.total();
        i64::try_from(i128::from(self.used.0) - i128::from(charged)).unwrap_or(i64::MAX)
    }

    /// What of the residual may be somebody's: all but what every process has unlisted.
    pub fn unattributed(&self) -> Bytes {
        let residual = u64::try_from(self.unattributed_signed()).unwrap_or_default();
        Bytes(residual.saturating_sub(unlisted_overhead(self.charges.0.len())))
    }
}

/// What so many processes have that the driver does not list.
pub(super) fn unlisted_overhead(processes: usize) -> u64 {
    UNLISTED_PER_PROCESS.0.saturating_mul(processes as u64)
}

/// The processes that the driver lists on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessMemory(BTreeMap<u32, Option<Bytes>>);

impl ProcessMemory {
    /// What the driver charges to `pid`: zero when it does not list the process, `None` when it
    /// cannot tell how much the process has.
    pub fn bytes_of(&self, pid: u32) -> Option<Bytes> {
        self.0.get(&pid).copied().unwrap_or(Some(Bytes::ZERO))
    }

    /// The processes that are listed, with what they are charged; none where the driver cannot
    /// tell.
    pub fn iter(&self) -> impl Iterator<Item = (u32, Option<Bytes>)> {
        self.0.iter().map(|(pid, bytes)| (*pid, *bytes))
    }

    /// Whether the driver lists `pid`.
    pub fn contains(&self, pid: u32) -> bool {
        self.0.contains_key(&pid)
    }

    /// Whether the driver tells of every process how much it has.
    pub fn has_all_amounts(&self) -> bool {
        self.0.values().all(Option::is_some)
    }

    fn total(&self) -> u64 {
        let told = self.0.values().flatten();
        told.fold(0, |sum, bytes| sum.saturating_add(bytes.0))
    }
}

impl FromIterator<(u32, Option<Bytes>)> for ProcessMemory {
    /// Of pids with what they are charged. One that computes and draws is listed twice, each time
    /// with all that it has.
    fn from_iter<T: IntoIterator<Item = (u32, Option<Bytes>)>>(listed: T) -> ProcessMemory {
        let mut charges = BTreeMap::new();
        for (pid, bytes) in listed {
            let most = charges.entry(pid).or_insert(bytes);
            *most = most
                .zip(bytes)
                .map(|(here, there): (Bytes, Bytes)| here.max(there));
        }
        ProcessMemory(charges)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(used: u64, listed: &[(u32, Option<u64>)]) -> GpuMemorySample {
        let listed = listed.iter();
        GpuMemorySample {
            used: Bytes::mib(used),
            charges: listed
                .map(|(pid, mib)| (*pid, mib.map(Bytes::mib)))
                .collect(),
            ..GpuMemorySample::default()
        }
    }

    #[test]
    fn process_has_its_larger_figure_when_it_is_listed_twice() {
        let GpuMemorySample { charges, .. } =
            look(0, &[(1, Some(2)), (2, None), (1, Some(3)), (2, Some(1))]);
        assert_eq!(
            [1, 2, 3].map(|pid| charges.bytes_of(pid)),
            [Some(Bytes::mib(3)), None, Some(Bytes::ZERO)]
        );
        assert!(!charges.has_all_amounts());
    }

    #[test]
    fn unattributed_is_what_no_process_is_charged_for() {
        let parked = look(1_551, &[(1, Some(518))]);
        assert_eq!(parked.unattributed_signed(), 1_033 << 20);
        assert_eq!(parked.unattributed(), Bytes::mib(1_033 - 9));
        // As measured: 526.8 MiB in use, 518 of them listed.
        assert_eq!(look(527, &[(1, Some(518))]).unattributed(), Bytes::ZERO);
        let torn = look(518, &[(1, Some(1_542))]);
        assert_eq!(
            (torn.unattributed_signed(), torn.unattributed()),
            (-1_024 << 20, Bytes::ZERO)
        );
    }
}
