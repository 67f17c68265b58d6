//! Has the driver itself hold pods to their quota, where it can.
//!
//! Driver r615 limits what the processes of a cgroup allocate of a GPU: by the kernel's dmem controller, or by
//! counting itself where the kernel has none. It takes cgroup v2 and no MIG instance. Which of the two it is, is the
//! driver's to know: limits are set through NVML, never in the kernel's files (NVIDIA's "MPS v3 Memory Partitioning").
//!
//! The limit is the pod's, not the container's: the pod's cgroup is there before any container is, and memory from
//! before a limit is not counted by a driver that counts itself. A limit ends with its cgroup, so none is taken away
//! here; what cannot be set is told and tried again, and keeps no pod waiting.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval, interval_at};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::gpu::nvml::{NvmlHandle, QueryError, Refusal};
use crate::node::actor::Snapshot;
use crate::node::allocator::BoundContainer;
use crate::sessions::{Account, Books, Sessions, by_allocation};
use crate::units::{Bytes, GpuUuid};

/// How often quotas are looked at, and what was refused is tried again.
const EVERY: Duration = Duration::from_secs(1);
/// How often all are set again: a driver that is loaded anew has forgotten them.
const AGAIN: Duration = Duration::from_secs(60);

/// A pod's cgroup and a GPU.
pub type Place = (PathBuf, GpuUuid);

/// What became of each limit.
pub type Limits = BTreeMap<Place, Limit>;

/// What became of one limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Limit {
    /// The driver refuses what goes beyond.
    Set(Bytes),
    /// The driver has none for this GPU, or the host has no cgroup v2.
    NotOffered,
    /// The driver should have set it and did not.
    Refused {
        /// What was to be set.
        bytes: Bytes,
        /// What NVML said.
        why: String,
    },
}

/// What the driver is to hold pods to: the sum of their containers' quotas. Of containers that share a claim only
/// one is alive.
pub fn wanted(containers: &[BoundContainer], books: &[Books]) -> BTreeMap<Place, Bytes> {
    let books = by_allocation(books);
    let mut claims = BTreeMap::new();
    for container in containers {
        let of_it = books.get(&container.allocation);
        let (Some(cgroup), Some(books)) = (&container.cgroup, of_it) else {
            continue;
        };
        for account in &books.accounts {
            if let Account::Gpu(gpu) = &account.account {
                let place = (cgroup.clone(), gpu.clone());
                let most: &mut Bytes = claims.entry((place, container.claim)).or_default();
                *most = account.quota.max(*most);
            }
        }
    }
    let mut wanted: BTreeMap<Place, Bytes> = BTreeMap::new();
    for ((place, _), Bytes(bytes)) in claims {
        let sum = wanted.entry(place).or_default();
        sum.0 = sum.0.saturating_add(bytes);
    }
    wanted
}

/// Whether there is something to do about `wanted` after `last`: a driver that offers no limits is not asked for
/// the same one again.
fn is_due(wanted: Bytes, last: Option<&Limit>) -> bool {
    match last {
        None | Some(Limit::Refused { .. }) => true,
        Some(Limit::NotOffered) => false,
        Some(Limit::Set(bytes)) => *bytes != wanted,
    }
}

/// Whether the cgroup is of version 2: the folders of version 1 have no such file.
fn is_v2(cgroup: &Path) -> bool {
    cgroup.join("cgroup.controllers").exists()
}

/// Whether the driver holds the container's pod to its quota, on each of its GPUs.
pub fn holds(limits: &Limits, container: &BoundContainer, books: &Books) -> bool {
    books.gpus().all(|gpu| {
        let cgroup = container.cgroup.clone();
        let limit = cgroup.and_then(|cgroup| limits.get(&(cgroup, gpu.clone())));
        matches!(limit, Some(Limit::Set(_)))
    })
}

/// Keeps the limits as the node's containers and their quotas are, and says what became of them, until `stop`.
pub async fn run(
    nvml: NvmlHandle,
    sessions: Arc<Sessions>,
    mut snapshots: watch::Receiver<Snapshot>,
    told: watch::Sender<Limits>,
    stop: CancellationToken,
) {
    let mut every = interval(EVERY);
    let mut again = interval_at(Instant::now() + AGAIN, AGAIN);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut limits = Limits::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = every.tick() => {}
            _ = again.tick() => limits.clear(),
            // The node ends with the agent.
            Ok(()) = snapshots.changed() => {}
        }
        let containers = snapshots.borrow_and_update().containers.clone();
        let wanted = wanted(&containers, &sessions.books());
        limits.retain(|place, _| wanted.contains_key(place));
        for (place, bytes) in wanted {
            if is_due(bytes, limits.get(&place)) {
                // As long as NVML may take to answer about a sick GPU.
                let Some(limit) = stop.run_until_cancelled(set(&nvml, &place, bytes)).await else {
                    return;
                };
                tell(&place, &limit, told.borrow().get(&place));
                limits.insert(place, limit);
            }
        }
        told.send_if_modified(|before| {
            let changed = *before != limits;
            before.clone_from(&limits);
            changed
        });
    }
}

async fn set(nvml: &NvmlHandle, (cgroup, gpu): &Place, bytes: Bytes) -> Limit {
    if gpu.is_mig() || !is_v2(cgroup) {
        return Limit::NotOffered;
    }
    let answer = nvml.limit(gpu, cgroup, bytes).await;
    let refused = |why| Limit::Refused { bytes, why };
    match answer {
        Ok(Ok(())) => Limit::Set(bytes),
        Ok(Err(QueryError::Nvml {
            source: Refusal::NotOffered,
            ..
        })) => Limit::NotOffered,
        Ok(Err(QueryError::Nvml {
            source: Refusal::Nvml(why),
            ..
        })) => refused(why),
        Ok(Err(error @ QueryError::NotAvailable)) => refused(error.to_string()),
        // Its process was ended, or the GPU has none now.
        Err(_) => refused(QueryError::NotAvailable.to_string()),
    }
}

fn tell((cgroup, gpu): &Place, limit: &Limit, before: Option<&Limit>) {
    if before == Some(limit) {
        return;
    }
    let cgroup = cgroup.display();
    match limit {
        Limit::Set(bytes) => info!(%cgroup, %gpu, %bytes, "driver limit set"),
        Limit::NotOffered => debug!(%cgroup, %gpu, "no driver limit"),
        Limit::Refused { bytes, why } => {
            warn!(%cgroup, %gpu, %bytes, %why, "driver limit refused");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sessions::AccountBooks;

    const POD: &str = "/cg/kubepods/pod1";

    fn container(allocation: u64, claim: u64) -> BoundContainer {
        BoundContainer {
            cgroup: Some(POD.into()),
            ..BoundContainer::numbered(allocation, claim)
        }
    }

    fn books(allocation: u64, accounts: &[(&str, u64)]) -> Books {
        let account = |(name, gib): &(&str, u64)| {
            let account = match *name {
                "managed" => Account::Managed,
                gpu => Account::Gpu(gpu.parse().unwrap()),
            };
            AccountBooks::unused(account, Bytes::gib(*gib))
        };
        Books::unused(allocation, accounts.iter().map(account).collect())
    }

    fn place(gpu: &str) -> Place {
        (POD.into(), gpu.parse().unwrap())
    }

    #[test]
    fn a_pod_is_held_to_the_sum_of_its_containers_on_each_gpu_and_managed_memory_counts_for_nothing()
     {
        let containers = [container(1, 1), container(2, 2)];
        let books = [
            books(1, &[("GPU-a", 4), ("managed", 9)]),
            books(2, &[("GPU-a", 2), ("GPU-b", 2)]),
        ];
        let expected = [
            (place("GPU-a"), Bytes::gib(6)),
            (place("GPU-b"), Bytes::gib(2)),
        ];
        assert_eq!(wanted(&containers, &books), expected.into());
    }

    #[test]
    fn containers_that_share_a_claim_count_once_by_the_larger_quota() {
        let containers = [container(1, 1), container(2, 1)];
        let books = [books(1, &[("GPU-a", 4)]), books(2, &[("GPU-a", 3)])];
        let expected = [(place("GPU-a"), Bytes::gib(4))];
        assert_eq!(wanted(&containers, &books), expected.into());
    }

    #[test]
    fn a_pod_without_a_cgroup_or_without_books_is_left_alone() {
        let homeless = BoundContainer {
            cgroup: None,
            ..container(1, 1)
        };
        assert_eq!(
            wanted(&[homeless, container(2, 2)], &[books(1, &[("GPU-a", 4)])]),
            BTreeMap::new()
        );
    }

    #[test]
    fn what_was_refused_is_tried_again_and_what_is_not_offered_is_not() {
        let bytes = Bytes::gib(1);
        let refused = Limit::Refused {
            bytes,
            why: "in use".into(),
        };
        assert!(is_due(bytes, None));
        assert!(is_due(bytes, Some(&refused)));
        assert!(is_due(bytes, Some(&Limit::Set(Bytes::gib(2)))));
        assert!(!is_due(bytes, Some(&Limit::Set(bytes))));
        assert!(!is_due(bytes, Some(&Limit::NotOffered)));
    }

    #[test]
    fn the_driver_holds_a_container_only_with_a_limit_on_each_of_its_gpus() {
        let (container, books) = (container(1, 1), books(1, &[("GPU-a", 4), ("GPU-b", 4)]));
        let one = (place("GPU-a"), Limit::Set(Bytes::gib(4)));
        let mut limits = Limits::from([one, (place("GPU-b"), Limit::NotOffered)]);
        assert!(!holds(&limits, &container, &books));
        limits.insert(place("GPU-b"), Limit::Set(Bytes::gib(4)));
        assert!(holds(&limits, &container, &books));
    }

    #[test]
    fn folders_of_version_1_are_no_place_for_a_limit() {
        let root = tempfile::tempdir().unwrap();
        let (old, new) = (root.path().join("memory/pod1"), root.path().join("pod1"));
        for folder in [&old, &new] {
            std::fs::create_dir_all(folder).unwrap();
        }
        std::fs::write(old.join("tasks"), "").unwrap();
        std::fs::write(new.join("cgroup.controllers"), "cpu memory dmem\n").unwrap();
        assert!(!is_v2(&old));
        assert!(is_v2(&new));
    }
}
