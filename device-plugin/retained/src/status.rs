//! Summarizes retained memory of the node for conditions and metrics. Pure.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use bursar_crds::Amount;
use bursar_crds::gpu_node::{LeaseState, MAX_RETAINED, RetainedLease};
use bursar_crds::numbers::{to_i32, to_i64};
use bursar_ledger::units::{Bytes, GpuUuid, LeaseId};

use super::leases::{LeaseRecord, LeaseTable};
use bursar_supervision::runtimes::RuntimeReport;
use bursar_supervision::scrub_check::{DriverEpoch, ScrubCache, Verdict};

/// The state of retained memory on this node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RetainedStatus {
    /// Whether the chart enables retained memory.
    pub enabled: bool,
    /// Whether the fd store is connected.
    pub is_store_connected: bool,
    /// How often the agent lost its connection to the fd store.
    pub store_losses: u64,
    /// The GPUs whose driver clears freed memory.
    pub scrubbed: BTreeSet<GpuUuid>,
    /// The GPUs that get no retained memory after their scrub check, with the reason.
    pub refused: BTreeMap<GpuUuid, String>,
    /// The allocator runtimes of the GPUs that have had one.
    pub runtimes: BTreeMap<GpuUuid, RuntimeReport>,
    /// The number of live leases of each GPU, and their bytes.
    pub live: BTreeMap<GpuUuid, (usize, Bytes)>,
    /// The number of leases that this agent can read.
    pub readable: usize,
    /// Leases by namespace and name: at most [`MAX_RETAINED`], the largest of each namespace.
    pub leases: Vec<RetainedLease>,
    /// How many leases are charged to no container, because the agent cannot read their GPU and
    /// size.
    pub uncharged: usize,
}

/// Describes a lease; the node's report adds the name of the owner.
fn describe((id, record, state): (LeaseId, &LeaseRecord, LeaseState)) -> RetainedLease {
    RetainedLease {
        namespace: record.title.namespace.clone(),
        name: record.title.name.clone(),
        gpu: record.title.gpu.to_string(),
        generation: to_i64(id.0),
        gpu_generation: to_i64(record.gpu_generation),
        size: Amount::from_bytes(record.bytes.0),
        state,
        owner_uid: record.pod.to_string(),
        owner: String::new(),
        openers: to_i32(record.openers.len()),
    }
}

/// Selects the leases to list. A namespace with many leases displaces only its own: all namespaces
/// have their largest lease listed before one has its second largest.
fn select_leases<'a>(
    leases: impl Iterator<Item = (LeaseId, &'a LeaseRecord, LeaseState)>,
) -> Vec<RetainedLease> {
    let mut all: Vec<_> = leases.collect();
    all.sort_by_key(|(id, record, _)| (&record.title.namespace, Reverse(record.bytes), *id));
    let mut ranks: BTreeMap<&str, usize> = BTreeMap::new();
    let mut ranked: Vec<_> = all
        .into_iter()
        .map(|lease| {
            let rank = ranks.entry(&lease.1.title.namespace).or_default();
            *rank += 1;
            (*rank, lease)
        })
        .collect();
    ranked.sort_by_key(|(rank, _)| *rank);
    ranked.truncate(MAX_RETAINED);
    let mut reports: Vec<_> = ranked
        .into_iter()
        .map(|(_, lease)| describe(lease))
        .collect();
    reports.sort_by(|left, right| {
        let key = |lease: &RetainedLease| (lease.namespace.clone(), lease.name.clone());
        (key(left), left.generation).cmp(&(key(right), right.generation))
    });
    reports
}

pub(super) fn build_status(
    enabled: bool,
    leases: &LeaseTable,
    verdicts: &ScrubCache,
    with: impl Fn(&GpuUuid) -> DriverEpoch,
    runtimes: BTreeMap<GpuUuid, RuntimeReport>,
) -> RetainedStatus {
    let why = |gpu: &GpuUuid| match verdicts.get(gpu, &with(gpu))? {
        Verdict::Scrubbed => None,
        Verdict::NotScrubbed => Some("freed memory does not come back cleared".to_owned()),
        Verdict::Unknown(error) => Some(format!("the scrub check failed: {error}")),
    };
    let is_cleared = |gpu: &&GpuUuid| verdicts.get(gpu, &with(gpu)) == Some(&Verdict::Scrubbed);
    let live = leases
        .live_leases()
        .into_iter()
        .map(|(gpu, leases)| (gpu, (leases.len(), leases.values().copied().sum())));
    RetainedStatus {
        enabled,
        is_store_connected: leases.is_store_connected(),
        store_losses: 0,
        scrubbed: leases.gpus().filter(is_cleared).cloned().collect(),
        refused: leases
            .gpus()
            .filter_map(|gpu| Some((gpu.clone(), why(gpu)?)))
            .collect(),
        runtimes,
        live: live.collect(),
        readable: leases.readable().count(),
        leases: select_leases(leases.readable()),
        uncharged: leases.uncharged(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use bursar_ledger::units::AllocationId;

    use super::*;
    use crate::leases::{Content, LeaseKey};

    fn record(namespace: &str, name: &str, gib: u64) -> LeaseRecord {
        LeaseRecord {
            title: LeaseKey {
                namespace: namespace.to_owned(),
                name: name.to_owned(),
                key: [7; 32],
                gpu: "GPU-a".parse().unwrap(),
            },
            bytes: Bytes::gib(gib),
            gpu_generation: 3,
            owner: AllocationId::from_bits(1),
            pod: "p".parse().unwrap(),
            openers: BTreeSet::from(["p".parse().unwrap(), "q".parse().unwrap()]),
            content: Content::Discarded,
        }
    }

    fn selected(records: &[LeaseRecord]) -> Vec<RetainedLease> {
        let numbered = records.iter().enumerate().map(|(index, record)| {
            let id = LeaseId(u64::try_from(index).unwrap() + 1);
            (id, record, LeaseState::Committed)
        });
        select_leases(numbered)
    }

    #[test]
    fn lease_is_listed_with_size_generations_state_and_owner() {
        let expected = RetainedLease {
            namespace: "team".into(),
            name: "weights".into(),
            gpu: "GPU-a".into(),
            generation: 1,
            gpu_generation: 3,
            size: "12Gi".into(),
            state: LeaseState::Committed,
            owner_uid: "p".into(),
            owner: String::new(),
            openers: 2,
        };
        assert_eq!(selected(&[record("team", "weights", 12)]), [expected]);
    }

    #[test]
    fn namespace_with_many_leases_displaces_only_its_own() {
        let mut records: Vec<_> = (0..5_000)
            .map(|number| record("many", &format!("n{number}"), 1 + number % 2))
            .collect();
        records.push(record("few", "b", 1));
        records.push(record("few", "a", 1));
        let listed = selected(&records);
        assert_eq!(listed.len(), MAX_RETAINED);
        let few: Vec<_> = listed
            .iter()
            .filter(|lease| lease.namespace == "few")
            .map(|lease| lease.name.as_str())
            .collect();
        assert_eq!(few, ["a", "b"]);
        let mut many_leases = listed.iter().filter(|lease| lease.namespace == "many");
        assert!(many_leases.all(|lease| lease.size == "2Gi".into()));
    }
}
