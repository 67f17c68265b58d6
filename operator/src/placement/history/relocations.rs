//! Remembers the relocations of each owner's pods.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bursar_crds::gpu_node::{MAX_RECORDED_RELOCATIONS, Relocation};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use super::{History, Uptime};
use crate::cluster::facts::pod::PodFacts;
use crate::cluster::facts::snapshot::Snapshot;
use crate::quanta::Quanta;

/// The recorded relocations of one owner from a node, with the uptime at which this operator first
/// saw them. The record's own timestamp decides nothing, because another operator's clock wrote it.
pub(in super::super) type RelocationRecord = (Relocation, Uptime);

/// How often pods of one owner are relocated, and when the count is forgotten.
const MAX_RELOCATIONS: u32 = 3;

pub(super) const RELOCATIONS_TTL: Duration = Duration::from_secs(3600);

/// The replacement of a relocated pod begins to wait within this time, if at all.
const REPLACEMENT_WINDOW: Duration = Duration::from_secs(120);

/// The first pause after a relocation; it doubles with each.
const RELOCATION_BACKOFF: Duration = Duration::from_secs(10);

/// How long the room for a relocated pod counts as taken.
const ASSUMED_FOR: Duration = Duration::from_secs(30);

#[derive(Clone, Debug, Default)]
pub(super) struct OwnerRelocations {
    pub(super) count: u32,
    pub(super) last: Uptime,
    /// The node with room at the last relocation.
    pub(super) target: Option<String>,
    /// Nodes with room that the scheduler did not choose for the replacement.
    pub(super) failed_targets: BTreeSet<String>,
}

impl History {
    /// A pod begins to wait. When a pod of its owner was relocated just before, the scheduler did
    /// not use the room.
    pub(super) fn observe_replacement(&mut self, pod: Option<&PodFacts>, now: Uptime) {
        let relocation = pod
            .and_then(|pod| Some((pod, self.relocations.get_mut(pod.owner.relocatable_uid()?)?)));
        if let Some((pod, relocations)) = relocation
            && now.saturating_sub(relocations.last) < REPLACEMENT_WINDOW
            && let Some(to) = relocations.target.take_if(|to| pod.node() != Some(to))
        {
            relocations.failed_targets.insert(to);
        }
    }

    /// Restores the relocations that an earlier operator recorded.
    pub(super) fn restore(&mut self, snapshot: &Snapshot<'_>, now: Uptime) {
        for (node, gpus) in &snapshot.gpu_nodes {
            // The entries that this operator wrote are newer than those of a late watch.
            let recorded = self.recorded_relocations.entry((*node).to_owned());
            recorded.or_insert_with(|| {
                gpus.relocations
                    .iter()
                    .map(|relocation| (relocation.clone(), now))
                    .collect()
            });
        }
        let known = |node: &String| snapshot.gpu_nodes.contains_key(node.as_str());
        self.recorded_relocations.retain(|node, _| known(node));
        let mut sums: BTreeMap<&str, (u32, Uptime)> = BTreeMap::new();
        for (relocation, observed) in self.recorded_relocations.values().flatten() {
            if is_fresh(*observed, now) {
                let (count, last) = sums.entry(&relocation.owner).or_default();
                // The node's root user chooses the number.
                *count = count.saturating_add(relocation.count.unsigned_abs());
                *last = (*last).max(*observed);
            }
        }
        for (owner, (count, last)) in sums {
            if !self.relocations.contains_key(owner) {
                let relocations = OwnerRelocations {
                    count,
                    last,
                    ..OwnerRelocations::default()
                };
                self.relocations.insert(owner.to_owned(), relocations);
            }
        }
    }

    /// The node's record with one more relocation of the owner's pods. Expired entries are left
    /// out.
    pub(in super::super) fn relocations_with(
        &self,
        node: &str,
        owner: &str,
        now: Uptime,
        timestamp: Timestamp,
    ) -> Vec<RelocationRecord> {
        let recorded = self.recorded_relocations.get(node).into_iter().flatten();
        let (mut of_owner, mut others) = (0, Vec::new());
        for (relocation, observed) in recorded.filter(|(_, observed)| is_fresh(*observed, now)) {
            if relocation.owner == owner {
                of_owner = relocation.count;
            } else {
                others.push((relocation.clone(), *observed));
            }
        }
        others.sort_by_key(|(_, observed)| *observed);
        let over = (others.len() + 1).saturating_sub(MAX_RECORDED_RELOCATIONS);
        others.drain(..over);
        let relocation = Relocation {
            owner: owner.to_owned(),
            count: of_owner.saturating_add(1),
            last: Time(timestamp),
        };
        others.push((relocation, now));
        others
    }

    /// Stores the record of a node's relocations.
    pub(in super::super) fn set_relocations(
        &mut self,
        node: String,
        relocations: Vec<RelocationRecord>,
    ) {
        self.recorded_relocations.insert(node, relocations);
    }

    /// When a pod of this owner may be relocated next. `None` after too many relocations.
    pub(in super::super) fn next_relocation(&self, owner: &str) -> Option<Uptime> {
        let Some(relocations) = self.relocations.get(owner) else {
            return Some(Uptime::ZERO);
        };
        let pause = RELOCATION_BACKOFF * 2_u32.pow(relocations.count.saturating_sub(1).min(8));
        (relocations.count < MAX_RELOCATIONS).then_some(relocations.last + pause)
    }

    /// Whether an earlier relocation of the owner's pods to `node` failed.
    pub(in super::super) fn relocation_failed(&self, owner: &str, node: &str) -> bool {
        let relocations = self.relocations.get(owner);
        relocations.is_some_and(|relocations| relocations.failed_targets.contains(node))
    }

    /// Records the relocation of a pod of this owner to `node`.
    pub(in super::super) fn record_relocation(
        &mut self,
        owner: &str,
        node: &str,
        room: Quanta,
        now: Uptime,
    ) {
        let relocations = self.relocations.entry(owner.to_owned()).or_default();
        relocations.count += 1;
        relocations.last = now;
        relocations.target = Some(node.to_owned());
        self.assumed
            .push((node.to_owned(), room, now + ASSUMED_FOR));
    }

    /// Room on a node that relocated pods are about to take.
    pub(in super::super) fn assumed_room(&self, node: &str) -> Quanta {
        let there = self.assumed.iter().filter(|(name, ..)| name == node);
        there.map(|(_, room, _)| *room).sum()
    }
}

/// Whether a recorded relocation first observed at this uptime still counts.
fn is_fresh(first_observed: Uptime, now: Uptime) -> bool {
    now.saturating_sub(first_observed) < RELOCATIONS_TTL
}
