//! Tells how much of each GPU is in use and charged to nobody, as far as that lasts: pure.
//!
//! One look can be wrong: a process that ends is listed no more before its memory is back, and one that begins has
//! memory before it is listed. So what is withheld stood in nearly all of the last looks, and it falls with the last
//! few: soon after it is gone.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::compare::{Finding, Verdict};
use crate::units::{Bytes, GpuUuid};

/// The looks, one a second, that tell what lasts.
const LOOKS: usize = 10;
/// So many of them may show less: who lets go for one look in ten hides nothing.
const LESS: usize = 2;
/// So many looks in a row that show less are believed.
const GONE: usize = 3;
/// Less of a change is none: the ledger is written for each.
const STEP: u64 = 64 << 20;

/// The last looks at each GPU.
#[derive(Debug, Default)]
pub(super) struct Withheld {
    looks: BTreeMap<GpuUuid, VecDeque<u64>>,
    said: BTreeMap<GpuUuid, Bytes>,
}

impl Withheld {
    /// Takes one more audit in, of GPUs which all that is in use was told of; what of each GPU is withheld now, where
    /// that is known. One that does not answer stays as it was.
    pub(super) fn see(
        &mut self,
        told: &BTreeSet<GpuUuid>,
        verdict: &Verdict,
        gpus: &BTreeSet<GpuUuid>,
    ) -> BTreeMap<GpuUuid, Bytes> {
        self.looks.retain(|gpu, _| gpus.contains(gpu));
        self.said.retain(|gpu, _| gpus.contains(gpu));
        for gpu in told {
            let looks = self.looks.entry(gpu.clone()).or_default();
            looks.push_back(of_nobody(gpu, verdict));
            if looks.len() > LOOKS {
                looks.pop_front();
            }
            let Some(lasts) = lasting(looks) else {
                continue;
            };
            let said = self.said.entry(gpu.clone()).or_default();
            let is_same = lasts > 0 && said.0 > 0 && lasts.abs_diff(said.0) < STEP;
            if !is_same {
                *said = Bytes(lasts.div_ceil(STEP).saturating_mul(STEP));
            }
        }
        self.said.clone()
    }
}

/// What is charged to no pod: what nobody is listed for, and what processes of others are.
fn of_nobody(gpu: &GpuUuid, verdict: &Verdict) -> u64 {
    let unlisted = verdict.unaccounted.get(gpu).copied().unwrap_or_default();
    let outsiders = verdict.findings.iter().filter_map(|finding| match finding {
        Finding::Intruder {
            gpu: on,
            bytes,
            allocation: None,
            ..
        } if on == gpu => *bytes,
        _ => None,
    });
    outsiders.fold(unlisted.0, |sum, bytes| sum.saturating_add(bytes.0))
}

/// What lasts by these looks; nothing before there were enough.
fn lasting(looks: &VecDeque<u64>) -> Option<u64> {
    if looks.len() < LOOKS {
        return None;
    }
    let mut sorted: Vec<u64> = looks.iter().copied().collect();
    sorted.sort_unstable();
    let recent = looks.iter().rev().take(GONE).max()?;
    Some(sorted[LESS].min(*recent))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::procfs::Owner;
    use crate::sessions::Process;

    const GIB: u64 = 1 << 30;

    fn gpu() -> GpuUuid {
        "GPU-a".parse().unwrap()
    }

    fn verdict(bytes: u64) -> Verdict {
        Verdict {
            unaccounted: [(gpu(), Bytes(bytes))].into(),
            ..Verdict::default()
        }
    }

    /// What is withheld after each of these looks.
    fn after(looks: impl IntoIterator<Item = u64>) -> Vec<Option<u64>> {
        let (mut withheld, gpus) = (Withheld::default(), BTreeSet::from([gpu()]));
        let see = |bytes| {
            let all = withheld.see(&gpus, &verdict(bytes), &gpus);
            all.get(&gpu()).map(|bytes| bytes.0)
        };
        looks.into_iter().map(see).collect()
    }

    #[test]
    fn what_stands_is_withheld_after_ten_looks_and_not_before() {
        let said = after([20 * GIB; 12]);
        assert_eq!(said[..9], [None; 9]);
        assert_eq!(said[9..], [Some(20 * GIB); 3]);
    }

    #[test]
    fn it_falls_soon_after_it_is_gone() {
        let said = after([[20 * GIB; 10].as_slice(), &[0; 4]].concat());
        assert_eq!(said[9], Some(20 * GIB));
        assert_eq!(said[12], Some(0), "after three looks");
    }

    #[test]
    fn a_peak_withholds_nothing() {
        let looks = (0..40).map(|number| if number % 10 < 5 { 20 * GIB } else { 0 });
        assert!(after(looks).iter().flatten().all(|bytes| *bytes == 0));
    }

    #[test]
    fn who_lets_go_for_one_look_in_nine_hides_nothing() {
        let looks = (0..40).map(|number| if number % 9 == 8 { 0 } else { 20 * GIB });
        let said = after(looks);
        assert!(
            said[10..].iter().all(|bytes| *bytes == Some(20 * GIB)),
            "{said:?}"
        );
    }

    #[test]
    fn noise_is_no_news() {
        let looks = (0..60).map(|number| 20 * GIB + ((number * 7919 % 60) << 20));
        let mut said = after(looks);
        said.dedup();
        assert_eq!(said.len(), 2, "nothing, and one figure: {said:?}");
    }

    #[test]
    fn what_processes_of_others_have_is_charged_to_no_pod() {
        let mut verdict = verdict(GIB);
        let intruder = |allocation| Finding::Intruder {
            gpu: gpu(),
            process: Process { pid: 7, start: 1 },
            bytes: Some(Bytes::gib(2)),
            owner: Owner::Host,
            allocation,
        };
        let ours = crate::units::AllocationId::from_bits(1);
        verdict.findings = vec![intruder(None), intruder(Some(ours))];
        assert_eq!(of_nobody(&gpu(), &verdict), 3 * GIB);
    }

    #[test]
    fn a_gpu_that_does_not_answer_stays_as_it_was() {
        let (mut withheld, gpus) = (Withheld::default(), BTreeSet::from([gpu()]));
        for _ in 0..10 {
            withheld.see(&gpus, &verdict(GIB), &gpus);
        }
        let silent = withheld.see(&BTreeSet::new(), &Verdict::default(), &gpus);
        assert_eq!(silent, [(gpu(), Bytes(GIB))].into());
        let gone = withheld.see(&BTreeSet::new(), &Verdict::default(), &BTreeSet::new());
        assert_eq!(gone, BTreeMap::new());
    }
}
