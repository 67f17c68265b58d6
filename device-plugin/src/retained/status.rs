//! How kept memory stands on this node, for conditions and metrics: pure.

use std::collections::{BTreeMap, BTreeSet};

use super::leases::Leases;
use super::scrub_check::{Verdict, Verdicts, With};
use crate::units::{Bytes, GpuUuid};

/// How it stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeptStatus {
    /// Whether it is switched on.
    pub enabled: bool,
    /// Whether the vault is there.
    pub heard: bool,
    /// The GPUs whose driver was seen to clear freed memory.
    pub cleared: BTreeSet<GpuUuid>,
    /// Those where it was not, so that no memory may be kept on them, and why.
    pub refused: BTreeMap<GpuUuid, String>,
    /// The GPUs whose worker hangs in the driver.
    pub stuck: BTreeSet<GpuUuid>,
    /// What is kept of each GPU: how many leases, and what they have.
    pub kept: BTreeMap<GpuUuid, (usize, Bytes)>,
}

/// How these stand.
pub(super) fn of(
    enabled: bool,
    leases: &Leases,
    verdicts: &Verdicts,
    with: impl Fn(&GpuUuid) -> With,
    stuck: &BTreeSet<GpuUuid>,
) -> KeptStatus {
    let why = |gpu: &GpuUuid| match verdicts.of_gpu(gpu, &with(gpu))? {
        Verdict::Scrubbed => None,
        Verdict::NotScrubbed => Some("freed memory does not come back cleared".to_owned()),
        Verdict::Unseen(error) => Some(format!("not seen to clear freed memory: {error}")),
    };
    let is_cleared = |gpu: &&GpuUuid| verdicts.of_gpu(gpu, &with(gpu)) == Some(&Verdict::Scrubbed);
    let living = leases.living().into_iter().map(|(gpu, leases)| {
        let bytes = leases
            .values()
            .fold(0_u64, |sum, bytes| sum.saturating_add(bytes.0));
        (gpu, (leases.len(), Bytes(bytes)))
    });
    KeptStatus {
        enabled,
        heard: leases.is_heard(),
        cleared: leases.gpus().filter(is_cleared).cloned().collect(),
        refused: leases
            .gpus()
            .filter_map(|gpu| Some((gpu.clone(), why(gpu)?)))
            .collect(),
        stuck: stuck.clone(),
        kept: living.collect(),
    }
}
