//! Proves orphaned exports free, in one task for each GPU.
//!
//! ```text
//!   every SAMPLE_INTERVAL, while there are candidates, and until no container uses the GPU:
//!   candidates (containers, ended pods) --> own memory of live processes --> sample --> bound
//! ```
//!
//! The order matters: memory of a process that exits, exports or allocates after it was read is in
//! the sample, and counts as orphaned.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::accounts::AmountsByPid;
use super::orphan_bound::{OrphanBound, OwnMemory, SampleWindow};
use super::{Shared, lock};
use crate::units::{AllocationId, Bytes, GpuUuid, LeaseId};

/// The time from one sample to the next: [`WINDOW`](super::orphan_bound::WINDOW) of them take half
/// a second.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(50);

/// The memory that ended pods may still occupy on a GPU, until a proof that it is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unreclaimed {
    /// Changes each time that another pod leaves memory.
    pub(super) revision: u64,
    /// The largest amount that may still be held; `None` before a proof.
    pub(super) upper_bound: Option<Bytes>,
}

/// The orphaned memory that a sample can prove free.
#[derive(Debug)]
struct Candidates {
    orphaned: BTreeMap<AllocationId, AmountsByPid>,
    unreclaimed: Option<u64>,
}

/// Runs until no container uses the GPU and exited processes left nothing there. A GPU that hangs
/// blocks its own task only.
pub(super) async fn run(gpu: GpuUuid, shared: Arc<Shared>) {
    let mut every = tokio::time::interval(SAMPLE_INTERVAL);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut looks = SampleWindow::default();
    let mut exports = shared.orphans_changed.subscribe();
    loop {
        every.tick().await;
        exports.mark_unchanged();
        let Some(asked) = collect_candidates(&shared, &gpu) else {
            looks.clear();
            if shared.release_unused_gpu(&gpu) || exports.changed().await.is_err() {
                return;
            }
            continue;
        };
        let own = own_memory(&shared, &gpu);
        let before = live_leases(&shared, &gpu);
        let (driver, of) = (Arc::clone(&shared.sampler), gpu.clone());
        let answer = tokio::task::spawn_blocking(move || driver.sample(&of));
        let Ok(Some(look)) = answer.await else {
            continue;
        };
        let mut leases = live_leases(&shared, &gpu);
        leases.retain(|lease, _| before.contains_key(lease));
        looks.push(asked, &look, &own, &leases);
        let news = looks
            .bound()
            .is_some_and(|(asked, held)| apply_bound(&shared, &gpu, asked, &held));
        if news {
            // A process that exits with the same exports as an earlier one is a new candidate.
            looks.clear();
        }
    }
}

fn collect_candidates(shared: &Shared, gpu: &GpuUuid) -> Option<Candidates> {
    let running = lock(&shared.containers);
    let kept = running
        .iter()
        .filter_map(|(id, running)| Some((*id, lock(&running.container).orphaned_exports(gpu)?)));
    let asked = Candidates {
        orphaned: kept.collect(),
        unreclaimed: lock(&shared.unreclaimed).get(gpu).map(|left| left.revision),
    };
    (!asked.orphaned.is_empty() || asked.unreclaimed.is_some()).then_some(asked)
}

fn own_memory(shared: &Shared, gpu: &GpuUuid) -> BTreeMap<u32, OwnMemory> {
    let running = lock(&shared.containers);
    running
        .values()
        .flat_map(|running| lock(&running.container).own_memory_on(gpu))
        .collect()
}

/// The leases of a GPU whose memory the fd store has.
fn live_leases(shared: &Shared, gpu: &GpuUuid) -> BTreeMap<LeaseId, Bytes> {
    let living = shared.live_leases.as_ref().map(|living| living.borrow());
    let of_it = living.as_ref().and_then(|living| living.get(gpu));
    of_it.cloned().unwrap_or_default()
}

/// Applies a bound to the candidates. Returns whether any bytes became free.
fn apply_bound(shared: &Shared, gpu: &GpuUuid, asked: &Candidates, held: &OrphanBound) -> bool {
    let of_nobody = held.for_container(None);
    if let Some(left) = lock(&shared.unreclaimed).get_mut(gpu)
        && asked.unreclaimed == Some(left.revision)
    {
        left.upper_bound = Some(
            left.upper_bound
                .map_or(of_nobody, |before| before.min(of_nobody)),
        );
    }
    let running = lock(&shared.containers);
    let mut freed = false;
    for (id, kept) in &asked.orphaned {
        if let Some(running) = running.get(id) {
            freed |= lock(&running.container).cap_orphaned_exports(
                gpu,
                held.for_container(Some(id)),
                kept,
            );
        }
    }
    freed
}
