//! Describes one sample of a GPU's memory and processes, as the driver reports them.

use std::collections::BTreeMap;

use bursar_ledger::units::{Bytes, GpuUuid};
use serde::{Deserialize, Serialize};

/// The bytes of a process with a context that the driver does not list: 8.8 MiB on an H200 with
/// driver 580.
const UNLISTED_PER_PROCESS: Bytes = Bytes::mib(9);

/// Samples the memory of GPUs; the agent implements this with NVML.
pub trait MemorySampler: Send + Sync + 'static {
    /// Samples `gpu`, and may block. `None` when the driver cannot answer now.
    fn sample(&self, gpu: &GpuUuid) -> Option<GpuMemorySample>;
}

/// A sample of a GPU's memory and its processes: answers of the driver, one after another.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuMemorySample {
    /// The bytes in use, without the driver's own reserve, before the list of the processes.
    pub used: Bytes,
    /// The bytes that can be in use, without the driver's own reserve.
    pub capacity: Bytes,
    /// The bytes in use after the list; none where the driver was not asked again.
    pub used_after: Option<Bytes>,
    /// The most bytes in use in further answers right beside these two.
    pub used_beside: Bytes,
    /// The bytes that the driver charges to processes.
    pub charges: ProcessMemory,
    /// The bytes of processes without a context, which NVML does not list; empty where the driver
    /// cannot report them.
    pub contextless: BTreeMap<u32, Bytes>,
    /// The bytes that processes have imported from others, once for each import.
    #[serde(default)]
    pub imported: BTreeMap<u32, Bytes>,
    /// Whether the driver reported all holders of memory, listed by NVML or not.
    #[serde(default)]
    pub has_all_holders: bool,
    /// The SM utilization of processes in percent; a listed process without an entry has 0. None
    /// where it was not requested, and where the driver gives none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm_percents: Option<BTreeMap<u32, u8>>,
}

impl GpuMemorySample {
    /// The used bytes that the driver charges to no process, with those that only descriptors hold
    /// (F4, F13 in docs/internals/facts.md). Negative where a process allocated before the list.
    pub fn unattributed_signed(&self) -> i64 {
        let charged = self.charges.total();
        i64::try_from(i128::from(self.used.0) - i128::from(charged)).unwrap_or(i64::MAX)
    }

    /// The most bytes in use around the list. Calls of a busy process and answers take turns at a
    /// lock of the driver. So one answer could miss in each sample the memory that the list has.
    pub fn most_used(&self) -> Bytes {
        let after = self.used_after.unwrap_or(self.used);
        self.used.max(after).max(self.used_beside)
    }

    /// The unattributed bytes that may belong to a tenant: all but the unlisted overhead of each
    /// process. Memory that a process freed before the list was made is not in use after it.
    pub fn unattributed(&self) -> Bytes {
        let used = self.used_after.unwrap_or(self.used).min(self.used);
        let charged = self.charges.total();
        let charged = charged.saturating_add(unlisted_overhead(self.charges.0.len()));
        Bytes(used.0.saturating_sub(charged))
    }
}

/// The overhead of `processes` that the driver does not list.
pub fn unlisted_overhead(processes: usize) -> u64 {
    UNLISTED_PER_PROCESS.0.saturating_mul(processes as u64)
}

/// The processes that the driver lists on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessMemory(BTreeMap<u32, Option<Bytes>>);

impl ProcessMemory {
    /// The bytes that the driver charges to `pid`: zero when the process is not listed, `None` when
    /// the amount is unknown.
    pub fn bytes_of(&self, pid: u32) -> Option<Bytes> {
        self.0.get(&pid).copied().unwrap_or(Some(Bytes::ZERO))
    }

    /// The listed processes with their bytes; `None` where the amount is unknown.
    pub fn iter(&self) -> impl Iterator<Item = (u32, Option<Bytes>)> {
        self.0.iter().map(|(pid, bytes)| (*pid, *bytes))
    }

    /// Whether the driver lists no process.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the driver lists `pid`.
    pub fn contains(&self, pid: u32) -> bool {
        self.0.contains_key(&pid)
    }

    /// Whether the driver reports the amount of every process.
    pub fn has_all_amounts(&self) -> bool {
        self.0.values().all(Option::is_some)
    }

    fn total(&self) -> u64 {
        let known = self.0.values().flatten();
        known.fold(0, |sum, bytes| sum.saturating_add(bytes.0))
    }
}

impl FromIterator<(u32, Option<Bytes>)> for ProcessMemory {
    /// Collects pids with their bytes. A process that computes and draws is listed twice, each time
    /// with all its bytes.
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

    fn sample(used: u64, listed: &[(u32, Option<u64>)]) -> GpuMemorySample {
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
            sample(0, &[(1, Some(2)), (2, None), (1, Some(3)), (2, Some(1))]);
        assert_eq!(
            [1, 2, 3].map(|pid| charges.bytes_of(pid)),
            [Some(Bytes::mib(3)), None, Some(Bytes::ZERO)]
        );
        assert!(!charges.has_all_amounts());
    }

    #[test]
    fn unattributed_is_what_no_process_is_charged_for() {
        let parked = sample(1_551, &[(1, Some(518))]);
        assert_eq!(parked.unattributed_signed(), 1_033 << 20);
        assert_eq!(parked.unattributed(), Bytes::mib(1_033 - 9));
        // Measured on an H200: 526.8 MiB in use, 518 MiB of them listed.
        assert_eq!(sample(527, &[(1, Some(518))]).unattributed(), Bytes::ZERO);
        let torn = sample(518, &[(1, Some(1_542))]);
        assert_eq!(
            (torn.unattributed_signed(), torn.unattributed()),
            (-1_024 << 20, Bytes::ZERO)
        );
    }

    #[test]
    fn memory_freed_or_allocated_beside_the_list_is_attributed() {
        let sample_around = |before: u64, after: u64| GpuMemorySample {
            used_after: Some(Bytes::mib(after)),
            ..sample(before, &[(1, Some(518))])
        };
        assert_eq!(sample_around(527 + 4_096, 527).unattributed(), Bytes::ZERO);
        assert_eq!(sample_around(527, 527 + 4_096).unattributed(), Bytes::ZERO);
        assert_eq!(
            sample_around(1_551, 1_551).unattributed(),
            Bytes::mib(1_033 - 9)
        );
    }
}
