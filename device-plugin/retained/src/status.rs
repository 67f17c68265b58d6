//! Summarizes retained memory of the node for conditions and metrics. Pure.

use std::collections::{BTreeMap, BTreeSet};

use bursar_ledger::units::{Bytes, GpuUuid};

use super::leases::LeaseTable;
use super::scrub_check::{DriverEpoch, ScrubCache, Verdict};

/// The state of retained memory on this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RetainedStatus {
    /// Whether the chart enables retained memory.
    pub enabled: bool,
    /// Whether the fd store is connected.
    pub is_store_connected: bool,
    /// The GPUs whose driver clears freed memory.
    pub scrubbed: BTreeSet<GpuUuid>,
    /// The GPUs that get no retained memory after their scrub check, with the reason.
    pub refused: BTreeMap<GpuUuid, String>,
    /// The GPUs whose provisioner hangs in the driver.
    pub hung: BTreeSet<GpuUuid>,
    /// The number of live leases of each GPU, and their bytes.
    pub live: BTreeMap<GpuUuid, (usize, Bytes)>,
    /// How many leases are charged to nobody, because the agent cannot read their GPU and size.
    pub uncharged: usize,
}

pub(super) fn build_status(
    enabled: bool,
    leases: &LeaseTable,
    verdicts: &ScrubCache,
    with: impl Fn(&GpuUuid) -> DriverEpoch,
    stuck: &BTreeSet<GpuUuid>,
) -> RetainedStatus {
    let why = |gpu: &GpuUuid| match verdicts.get(gpu, &with(gpu))? {
        Verdict::Scrubbed => None,
        Verdict::NotScrubbed => Some("freed memory does not come back cleared".to_owned()),
        Verdict::Unknown(error) => Some(format!("the scrub check failed: {error}")),
    };
    let is_cleared = |gpu: &&GpuUuid| verdicts.get(gpu, &with(gpu)) == Some(&Verdict::Scrubbed);
    let live = leases.live_leases().into_iter().map(|(gpu, leases)| {
        let bytes = leases
            .values()
            .fold(0_u64, |sum, bytes| sum.saturating_add(bytes.0));
        (gpu, (leases.len(), Bytes(bytes)))
    });
    RetainedStatus {
        enabled,
        is_store_connected: leases.is_store_connected(),
        scrubbed: leases.gpus().filter(is_cleared).cloned().collect(),
        refused: leases
            .gpus()
            .filter_map(|gpu| Some((gpu.clone(), why(gpu)?)))
            .collect(),
        hung: stuck.clone(),
        live: live.collect(),
        uncharged: leases.uncharged(),
    }
}
