//! Proves orphaned exports free, in one task for each GPU.
//!
//! ```text
//!   every SAMPLE_INTERVAL, while there are candidates, and until no container uses the GPU:
//!   candidates (containers, ended pods) --> own memory of live processes --> sample --> bound
//!
//!   now and then, while managed memory hides whether they are free:
//!   grants wait --> idle credit is taken back --> balloon --> WINDOW samples --> bound
//! ```
//!
//! The order matters: memory of a process that exits, exports or allocates after it was read is in
//! the sample, and counts as orphaned. Without idle credit a balloon can displace more.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_gpu::memory_sample::GpuMemorySample;
use bursar_ledger::units::{AllocationId, Bytes, GpuUuid, LeaseId};
use tokio::sync::OwnedMutexGuard;
use tokio::task::JoinHandle;

use super::accounts::AmountsByPid;
use super::balloon::{Balloon, Granted, Schedule, balloon_size};
use super::grants::GrantPause;
use super::managed::PublishedBalloon;
use super::orphan_bound::{OrphanBound, OwnMemory, SampleWindow};
use super::{Shared, lock};

/// The time from one sample to the next: [`WINDOW`](super::orphan_bound::WINDOW) of them take half
/// a second.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(50);

/// How long samples are taken while a balloon is held.
const BALLOON_SAMPLES_TIMEOUT: Duration = Duration::from_secs(1);

/// How long grants wait for a balloon. Then they go on, even if its process hangs in the driver.
const BALLOON_TIMEOUT: Duration = Duration::from_secs(4);

/// The time that a balloon needs to begin: one that begins later would outlast the pause of grants.
const HOLD_TIME: Duration = Duration::from_millis(3_500);

/// The memory that ended pods may still occupy on a GPU, until a proof that it is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unreclaimed {
    /// Changes each time that another pod leaves memory.
    pub(super) revision: u64,
    /// The largest amount that may still be held; `None` before a proof.
    pub(super) upper_bound: Option<Bytes>,
}

/// The orphaned memory that a sample can prove free.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Candidates {
    orphaned: BTreeMap<AllocationId, AmountsByPid>,
    unreclaimed: Option<u64>,
}

impl Candidates {
    /// Whether a bound leaves any of them unproven.
    fn are_unproven(&self, bound: &OrphanBound) -> bool {
        let is_held = |container| bound.for_container(container) > Bytes::ZERO;
        self.unreclaimed.is_some() && is_held(None)
            || self
                .orphaned
                .keys()
                .any(|container| is_held(Some(container)))
    }
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

    fn add_to(self, window: &mut SampleWindow<Candidates>, balloon: Bytes) {
        window.push(
            self.candidates,
            &self.sample,
            &self.own,
            &self.leases,
            balloon,
        );
    }
}

/// Runs until no container uses the GPU and exited processes left nothing there. A GPU that hangs
/// blocks its own task only.
pub(super) async fn run(gpu: GpuUuid, shared: Arc<Shared>) {
    let mut every = tokio::time::interval(SAMPLE_INTERVAL);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut window = SampleWindow::default();
    let (mut schedule, mut before) = (Schedule::default(), Candidates::default());
    let mut balloon: Option<JoinHandle<()>> = None;
    let mut exports = shared.orphans_changed.subscribe();
    loop {
        every.tick().await;
        exports.mark_unchanged();
        let Some(candidates) = collect_candidates(&shared, &gpu) else {
            window.clear();
            schedule.observe(false, Instant::now());
            before = Candidates::default();
            if shared.release_unused_gpu(&gpu) || exports.changed().await.is_err() {
                return;
            }
            continue;
        };
        if candidates != before {
            schedule.restart();
            before = candidates.clone();
        }
        let (sampled, driver) = (gpu.clone(), Arc::clone(&shared));
        let look = move || {
            let sample = || driver.sampler.sample(&sampled);
            Look::take(&driver, &sampled, candidates, sample)
        };
        let Ok(Some(look)) = tokio::task::spawn_blocking(look).await else {
            continue;
        };
        look.add_to(&mut window, Bytes::ZERO);
        let Some((candidates, bound)) = window.bound() else {
            continue;
        };
        schedule.observe(candidates.are_unproven(&bound), Instant::now());
        if apply_bound(&shared, &gpu, candidates, &bound) {
            // A process that exits with the same exports as an earlier one is a new candidate.
            window.clear();
        }
        let hangs = balloon.as_ref().is_some_and(|last| !last.is_finished());
        if hangs || !schedule.is_due(Instant::now()) {
            continue;
        }
        let Some(turn) = BalloonTurn::take(&shared, &gpu) else {
            continue;
        };
        let Some(pause) = shared.grants.pause(&gpu).await else {
            tracing::info!(%gpu, "grants did not end in time for a balloon");
            schedule.postpone(Instant::now());
            continue;
        };
        schedule.begin(Instant::now());
        balloon = prove_by_balloon(turn, pause).await;
        window.clear();
    }
}

/// The right to hold the only balloon of the node; ends when dropped.
pub(super) struct BalloonTurn {
    shared: Arc<Shared>,
    gpu: GpuUuid,
    balloon: Arc<dyn Balloon>,
    #[expect(dead_code, reason = "held until it is dropped")]
    turn: OwnedMutexGuard<()>,
}

impl BalloonTurn {
    /// `None` while another GPU has a balloon, or the managed memory of this one must stay.
    pub(super) fn take(shared: &Arc<Shared>, gpu: &GpuUuid) -> Option<BalloonTurn> {
        let balloon = shared.balloon.clone()?;
        let turn = Arc::clone(&shared.balloon_turn).try_lock_owned().ok()?;
        // A balloon that has just ended has taken the permissions back.
        let may_evict = shared.may_evict(gpu, Instant::now());
        may_evict.then(|| BalloonTurn {
            shared: Arc::clone(shared),
            gpu: gpu.clone(),
            balloon,
            turn,
        })
    }
}

/// Proves memory free while a balloon displaces managed memory. Returns the balloon's thread where
/// it has not ended in time.
pub(super) async fn prove_by_balloon(
    turn: BalloonTurn,
    pause: GrantPause,
) -> Option<JoinHandle<()>> {
    let until = Instant::now() + BALLOON_TIMEOUT;
    let (shared, gpu) = (Arc::clone(&turn.shared), turn.gpu.clone());
    let balloon = Arc::clone(&turn.balloon);
    let prove = move || {
        let bound = bound_by_balloon(&shared, &gpu, balloon.as_ref(), until);
        if let Some((candidates, bound)) = bound {
            apply_bound(&shared, &gpu, &candidates, &bound);
        }
    };
    let mut thread = tokio::task::spawn_blocking(prove);
    let ended = tokio::time::timeout_at(until.into(), &mut thread).await;
    drop(pause);
    if ended.is_err() {
        tracing::warn!(gpu = %turn.gpu, "the process of a balloon hangs");
    }
    ended.is_err().then_some(thread)
}

/// Bounds the orphaned memory of a GPU while a balloon displaces managed memory, and may block. No
/// memory of the GPU is granted before `until`.
fn bound_by_balloon(
    shared: &Arc<Shared>,
    gpu: &GpuUuid,
    balloon: &dyn Balloon,
    until: Instant,
) -> Option<(Candidates, OrphanBound)> {
    for running in lock(&shared.containers).values() {
        lock(&running.container).reclaim_all_idle(gpu);
    }
    let begin_by = until - HOLD_TIME;
    let sample = sample_until(shared, gpu, begin_by)?;
    let kept = leased(shared, gpu).0.saturating_add(shared.reserved.0);
    let size = balloon_size(&sample, &granted(shared, gpu), Bytes(kept))?;
    if Instant::now() > begin_by {
        return None;
    }
    let _published = PublishedBalloon::new(shared, gpu, size);
    let (mut window, mut held) = (SampleWindow::default(), Bytes::ZERO);
    let sample_while_held = &mut |bytes, until: Instant| {
        held = bytes;
        let until = until.min(Instant::now() + BALLOON_SAMPLES_TIMEOUT);
        while window.bound().is_none() && Instant::now() + SAMPLE_INTERVAL < until {
            let sample = || sample_until(shared, gpu, until - SAMPLE_INTERVAL);
            let candidates = collect_candidates(shared, gpu);
            let look =
                candidates.and_then(|candidates| Look::take(shared, gpu, candidates, sample));
            if let Some(look) = look {
                look.add_to(&mut window, bytes);
            }
            std::thread::sleep(SAMPLE_INTERVAL);
        }
    };
    if let Err(error) = balloon.hold(gpu, size, until, sample_while_held) {
        tracing::warn!(%error, "nothing is proven free beside managed memory");
        return None;
    }
    let (candidates, bound) = window.bound()?;
    let unproven = bound.for_container(None);
    tracing::info!(%gpu, size = size.0, held = held.0, unproven = unproven.0, "balloon held");
    Some((candidates.clone(), bound))
}

/// Samples a GPU; `None` where the driver does not answer before `until`. A late answer is dropped.
fn sample_until(shared: &Shared, gpu: &GpuUuid, until: Instant) -> Option<GpuMemorySample> {
    let (sender, answer) = std::sync::mpsc::channel();
    let (sampler, gpu) = (Arc::clone(&shared.sampler), gpu.clone());
    let thread = std::thread::Builder::new().name("balloon-sample".to_owned());
    let sample = move || drop(sender.send(sampler.sample(&gpu)));
    thread.spawn(sample).ok()?;
    let left = until.saturating_duration_since(Instant::now());
    answer.recv_timeout(left).ok()?
}

/// The memory of a GPU that each live process may allocate without a further request.
fn granted(shared: &Shared, gpu: &GpuUuid) -> BTreeMap<u32, Granted> {
    let running = lock(&shared.containers);
    running
        .values()
        .flat_map(|running| lock(&running.container).granted_on(gpu))
        .collect()
}

/// The bytes of a GPU's leases, also of those that are being created.
fn leased(shared: &Shared, gpu: &GpuUuid) -> Bytes {
    let mut leases = live_leases(shared, gpu);
    for running in lock(&shared.containers).values() {
        let charged = lock(&running.container).charged_leases().into_iter();
        let on_gpu = charged.filter(|(_, (of, _))| of == gpu);
        leases.extend(on_gpu.map(|(lease, (_, bytes))| (lease, bytes)));
    }
    let sum = leases.values();
    Bytes(sum.fold(0, |sum: u64, bytes| sum.saturating_add(bytes.0)))
}

fn collect_candidates(shared: &Shared, gpu: &GpuUuid) -> Option<Candidates> {
    let running = lock(&shared.containers);
    let orphaned = running
        .iter()
        .filter_map(|(id, running)| Some((*id, lock(&running.container).orphaned_exports(gpu)?)));
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
        .flat_map(|running| lock(&running.container).own_memory_on(gpu))
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
