//! Proves orphaned exports free, in one task for each GPU.
//!
//! ```text
//!   every SAMPLE_INTERVAL, while there are candidates, and until no container uses the GPU:
//!   candidates (containers, ended pods) --> own memory of live processes --> sample --> bound
//! ```
//!
//! The order matters: memory of a process that exits, exports or allocates after it was read is in
//! the sample, and counts as orphaned. So does managed memory, because the driver charges it to no
//! process: while it is on the GPU, so much stays unproven.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bursar_gpu::memory_sample::GpuMemorySample;
use bursar_ledger::units::{AllocationId, Bytes, GpuUuid, LeaseId};

use super::accounts::AmountsByPid;
use super::orphan_bound::{OrphanBound, OwnMemory, SampleWindow};
use super::{Shared, lock};

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

/// A sample, with the figures that were read before it.
struct Look {
    candidates: Candidates,
    own: BTreeMap<u32, OwnMemory>,
    sample: GpuMemorySample,
    /// The leases that existed before and after the sample.
    leases: BTreeMap<LeaseId, Bytes>,
}

impl Look {
    /// Looks at a GPU by `sample`; `None` where the driver cannot answer now.
    fn take(
        shared: &Shared,
        gpu: &GpuUuid,
        candidates: Candidates,
        sample: impl FnOnce() -> Option<GpuMemorySample>,
    ) -> Option<Look> {
        let own = own_memory(shared, gpu);
        let leases_before = live_leases(shared, gpu);
        let sample = sample()?;
        let mut leases = live_leases(shared, gpu);
        leases.retain(|lease, _| leases_before.contains_key(lease));
        Some(Look {
            candidates,
            own,
            sample,
            leases,
        })
    }

    fn add_to(self, window: &mut SampleWindow<Candidates>) {
        window.push(self.candidates, &self.sample, &self.own, &self.leases);
    }
}

/// Runs until no container uses the GPU and exited processes left nothing there. A GPU that hangs
/// blocks its own task only.
pub(super) async fn run(gpu: GpuUuid, shared: Arc<Shared>) {
    let mut every = tokio::time::interval(SAMPLE_INTERVAL);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut window = SampleWindow::default();
    let mut exports = shared.orphans_changed.subscribe();
    loop {
        every.tick().await;
        exports.mark_unchanged();
        let Some(candidates) = collect_candidates(&shared, &gpu) else {
            window.clear();
            if shared.release_unused_gpu(&gpu) || exports.changed().await.is_err() {
                return;
            }
            continue;
        };
        let (sampled, driver) = (gpu.clone(), Arc::clone(&shared));
        let look = move || {
            let sample = || driver.sampler.sample(&sampled);
            Look::take(&driver, &sampled, candidates, sample)
        };
        let Ok(Some(look)) = tokio::task::spawn_blocking(look).await else {
            continue;
        };
        look.add_to(&mut window);
        let Some((candidates, bound)) = window.bound() else {
            continue;
        };
        if apply_bound(&shared, &gpu, candidates, &bound) {
            // A process that exits with the same exports as an earlier one is a new candidate.
            window.clear();
        }
    }
}

fn collect_candidates(shared: &Shared, gpu: &GpuUuid) -> Option<Candidates> {
    let running = lock(&shared.containers);
    let orphaned = running.iter().filter_map(|(id, running)| {
        Some((
            *id,
            lock(&running.container).memory().orphaned_exports(gpu)?,
        ))
    });
    let candidates = Candidates {
        orphaned: orphaned.collect(),
        unreclaimed: lock(&shared.unreclaimed)
            .get(gpu)
            .map(|unreclaimed| unreclaimed.revision),
    };
    (!candidates.orphaned.is_empty() || candidates.unreclaimed.is_some()).then_some(candidates)
}

fn own_memory(shared: &Shared, gpu: &GpuUuid) -> BTreeMap<u32, OwnMemory> {
    let running = lock(&shared.containers);
    running
        .values()
        .flat_map(|running| lock(&running.container).memory().own_memory_on(gpu))
        .collect()
}

/// The leases of a GPU whose memory the fd store has.
fn live_leases(shared: &Shared, gpu: &GpuUuid) -> BTreeMap<LeaseId, Bytes> {
    let leases = shared.live_leases.as_ref().map(|leases| leases.borrow());
    let on_gpu = leases.as_ref().and_then(|leases| leases.get(gpu));
    on_gpu.cloned().unwrap_or_default()
}

/// Applies a bound to the candidates. Returns whether any bytes became free.
fn apply_bound(
    shared: &Shared,
    gpu: &GpuUuid,
    candidates: &Candidates,
    bound: &OrphanBound,
) -> bool {
    let of_ended_pods = bound.for_container(None);
    if let Some(unreclaimed) = lock(&shared.unreclaimed).get_mut(gpu)
        && candidates.unreclaimed == Some(unreclaimed.revision)
    {
        unreclaimed.upper_bound = Some(
            unreclaimed
                .upper_bound
                .map_or(of_ended_pods, |former| former.min(of_ended_pods)),
        );
    }
    let running = lock(&shared.containers);
    let mut freed = false;
    for (id, orphaned) in &candidates.orphaned {
        if let Some(running) = running.get(id) {
            freed |= lock(&running.container).cap_orphaned_exports(
                gpu,
                bound.for_container(Some(id)),
                orphaned,
            );
        }
    }
    freed
}
