//! Decides how much memory of each GPU is withheld, since it is in use and charged to no container.
//!
//! A single sample can be wrong. An ending process is unlisted before its memory is freed, and a
//! new one has memory before it is listed. So memory is withheld if it was present in nearly all of
//! the last samples, and no longer withheld soon after it is gone. Pure.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bursar_ledger::units::{Bytes, GpuUuid};

use super::compare::{AuditResult, Finding, GpuSample};

/// The number of samples, one a second, that decide.
const WINDOW: usize = 10;
/// This many samples of the window may show less, so that freeing for single samples hides nothing.
const OUTLIERS: usize = 2;
/// The withheld amount falls after this many lower samples in a row.
const FALL_AFTER: usize = 3;
/// Smaller changes are ignored, since the node's checkpoint is written for each.
const STEP: u64 = 64 << 20;

/// The last samples of each GPU.
#[derive(Debug, Default)]
pub(super) struct WithheldMemory {
    samples: BTreeMap<GpuUuid, VecDeque<u64>>,
    reported: BTreeMap<GpuUuid, Bytes>,
}

impl WithheldMemory {
    /// Adds one audit. Returns the withheld memory of each GPU for which it is known; a GPU without
    /// a complete sample keeps its value.
    pub(super) fn observe(
        &mut self,
        samples: &[GpuSample],
        result: &AuditResult,
        gpus: &BTreeSet<GpuUuid>,
    ) -> BTreeMap<GpuUuid, Bytes> {
        self.samples.retain(|gpu, _| gpus.contains(gpu));
        self.reported.retain(|gpu, _| gpus.contains(gpu));
        let complete = samples
            .iter()
            .filter(|sample| sample.unattributed.is_some());
        for gpu in complete.map(|sample| &sample.gpu) {
            let samples = self.samples.entry(gpu.clone()).or_default();
            samples.push_back(uncharged(gpu, result));
            if samples.len() > WINDOW {
                samples.pop_front();
            }
            let Some(amount) = sustained(samples) else {
                continue;
            };
            let reported = self.reported.entry(gpu.clone()).or_default();
            let is_same = amount > 0 && reported.0 > 0 && amount.abs_diff(reported.0) < STEP;
            if !is_same {
                *reported = Bytes(amount.div_ceil(STEP).saturating_mul(STEP));
            }
        }
        self.reported.clone()
    }
}

/// The bytes charged to no pod: unaccounted memory, and that of processes outside our containers.
fn uncharged(gpu: &GpuUuid, result: &AuditResult) -> u64 {
    let unlisted = result.unaccounted.get(gpu).copied().unwrap_or_default();
    let untracked = result.findings.iter().filter_map(|finding| match finding {
        Finding::UntrackedProcess {
            gpu: on,
            bytes,
            allocation: None,
            ..
        } if on == gpu => *bytes,
        _ => None,
    });
    (unlisted + untracked.sum()).0
}

/// The amount that nearly all samples show; none before there are enough samples.
fn sustained(samples: &VecDeque<u64>) -> Option<u64> {
    if samples.len() < WINDOW {
        return None;
    }
    let mut sorted: Vec<u64> = samples.iter().copied().collect();
    sorted.sort_unstable();
    let recent = samples.iter().rev().take(FALL_AFTER).max()?;
    Some(sorted[OUTLIERS].min(*recent))
}

#[cfg(test)]
mod tests {
    use bursar_host::procfs::ProcessOwner;
    use bursar_sessions::Process;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn gpu() -> GpuUuid {
        "GPU-a".parse().unwrap()
    }

    fn result(bytes: u64) -> AuditResult {
        AuditResult {
            unaccounted: [(gpu(), Bytes(bytes))].into(),
            ..AuditResult::default()
        }
    }

    fn sample() -> GpuSample {
        GpuSample {
            gpu: gpu(),
            unattributed_signed: 0,
            unattributed: Some(Bytes::ZERO),
            unreclaimed_or_retained: Bytes::ZERO,
            processes: Vec::new(),
            importers: Vec::new(),
            has_all_holders: true,
        }
    }

    /// The withheld memory after each of these samples.
    fn withheld_after(samples: impl IntoIterator<Item = u64>) -> Vec<Option<u64>> {
        let (mut withheld, gpus) = (WithheldMemory::default(), BTreeSet::from([gpu()]));
        let observe = |bytes| {
            let all = withheld.observe(&[sample()], &result(bytes), &gpus);
            all.get(&gpu()).map(|bytes| bytes.0)
        };
        samples.into_iter().map(observe).collect()
    }

    #[test]
    fn memory_is_withheld_after_ten_samples() {
        let reported = withheld_after([20 * GIB; 12]);
        assert_eq!(reported[..9], [None; 9]);
        assert_eq!(reported[9..], [Some(20 * GIB); 3]);
    }

    #[test]
    fn withheld_memory_falls_after_three_samples() {
        let reported = withheld_after([[20 * GIB; 10].as_slice(), &[0; 4]].concat());
        assert_eq!(reported[9], Some(20 * GIB));
        assert_eq!(reported[12], Some(0), "after three samples");
    }

    #[test]
    fn peak_withholds_nothing() {
        let samples = (0..40).map(|number| if number % 10 < 5 { 20 * GIB } else { 0 });
        assert!(
            withheld_after(samples)
                .iter()
                .flatten()
                .all(|bytes| *bytes == 0)
        );
    }

    #[test]
    fn memory_stays_withheld_when_freed_for_one_sample_in_nine() {
        let samples = (0..40).map(|number| if number % 9 == 8 { 0 } else { 20 * GIB });
        let reported = withheld_after(samples);
        assert!(
            reported[10..].iter().all(|bytes| *bytes == Some(20 * GIB)),
            "{reported:?}"
        );
    }

    #[test]
    fn withheld_memory_is_stable_under_noise() {
        let samples = (0..60).map(|number| 20 * GIB + ((number * 7919 % 60) << 20));
        let mut reported = withheld_after(samples);
        reported.dedup();
        assert_eq!(reported.len(), 2, "nothing, and one figure: {reported:?}");
    }

    #[test]
    fn memory_of_untracked_processes_is_uncharged() {
        let mut result = result(GIB);
        let untracked = |allocation| Finding::UntrackedProcess {
            gpu: gpu(),
            process: Process { pid: 7, start: 1 },
            bytes: Some(Bytes::gib(2)),
            owner: ProcessOwner::Host,
            allocation,
        };
        let allocation = bursar_ledger::units::AllocationId::from_bits(1);
        result.findings = vec![untracked(None), untracked(Some(allocation))];
        assert_eq!(uncharged(&gpu(), &result), 3 * GIB);
    }

    #[test]
    fn withheld_memory_stays_when_gpu_does_not_answer() {
        let (mut withheld, gpus) = (WithheldMemory::default(), BTreeSet::from([gpu()]));
        for _ in 0..10 {
            withheld.observe(&[sample()], &result(GIB), &gpus);
        }
        let silent = withheld.observe(&[], &AuditResult::default(), &gpus);
        assert_eq!(silent, [(gpu(), Bytes(GIB))].into());
        let after_removal = withheld.observe(&[], &AuditResult::default(), &BTreeSet::new());
        assert_eq!(after_removal, BTreeMap::new());
    }
}
