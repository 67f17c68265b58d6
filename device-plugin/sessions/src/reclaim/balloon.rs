//! Proves memory free while a balloon displaces managed memory.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_gpu::memory_sample::GpuMemorySample;
use bursar_ledger::units::{Bytes, GpuUuid};
use tokio::sync::OwnedMutexGuard;
use tokio::task::JoinHandle;

use super::super::balloon::{Balloon, Granted, balloon_size};
use super::super::grants::GrantPause;
use super::super::managed::PublishedBalloon;
use super::super::orphan_bound::{OrphanBound, OwnMemory, SampleWindow, WINDOW};
use super::super::{Shared, lock};
use super::{
    Candidates, Look, SAMPLE_INTERVAL, apply_bound, collect_candidates, live_leases, own_memory,
};

/// The least and the most time for samples while a balloon is held. The driver takes 0.2 s for the
/// answers of one sample beside busy programs (docs/benchmarks.md).
const LOOK_TIME: (Duration, Duration) = (Duration::from_millis(650), Duration::from_millis(2_600));

/// The samples for which a balloon leaves time: a window, and two more, because the driver answers
/// later while it moves pages.
const SAMPLES: u32 = 2 + WINDOW as u32;

/// How long grants wait for a balloon. Then they go on, even if its process hangs in the driver.
const BALLOON_TIMEOUT: Duration = Duration::from_secs(5);

/// The time that a balloon needs to begin: one that begins later would outlast the pause of grants.
const HOLD_TIME: Duration = Duration::from_millis(4_500);

/// The outcome of an attempt to prove memory free by a balloon.
#[derive(Debug)]
pub(in super::super) enum Attempt {
    /// The balloon would have displaced nothing, or the driver answered too late. No managed memory
    /// was moved.
    NotBegun,
    /// The balloon had these bytes only: other memory is held, or the time was too short.
    Partial(Bytes),
    /// The balloon had its whole size, or failed.
    Ended,
    /// The balloon's thread has not ended in time.
    Hung(JoinHandle<Attempt>),
}

/// The right to hold the only balloon of the node; ends when dropped.
pub(in super::super) struct BalloonTurn {
    shared: Arc<Shared>,
    gpu: GpuUuid,
    balloon: Arc<dyn Balloon>,
    #[expect(dead_code, reason = "held until it is dropped")]
    turn: OwnedMutexGuard<()>,
}

impl BalloonTurn {
    /// `None` while another GPU has a balloon, or the managed memory of this one must stay.
    pub(in super::super) fn take(shared: &Arc<Shared>, gpu: &GpuUuid) -> Option<BalloonTurn> {
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

/// Proves memory free while a balloon displaces managed memory.
pub(in super::super) async fn prove_by_balloon(turn: BalloonTurn, pause: GrantPause) -> Attempt {
    let until = Instant::now() + BALLOON_TIMEOUT;
    let (shared, gpu) = (Arc::clone(&turn.shared), turn.gpu.clone());
    let balloon = Arc::clone(&turn.balloon);
    let prove = move || {
        let Some(attempt) = begin_balloon(&shared, &gpu, until - HOLD_TIME) else {
            return Attempt::NotBegun;
        };
        let Some(proof) = bound_by_balloon(&shared, &gpu, balloon.as_ref(), attempt, until) else {
            return Attempt::Ended;
        };
        apply_bound(&shared, &gpu, &proof.candidates, &proof.bound);
        match proof.held < attempt.size {
            true => Attempt::Partial(proof.held),
            false => Attempt::Ended,
        }
    };
    let mut thread = tokio::task::spawn_blocking(prove);
    let ended = tokio::time::timeout_at(until.into(), &mut thread).await;
    drop(pause);
    match ended {
        Ok(attempt) => attempt.unwrap_or(Attempt::Ended),
        Err(_) => {
            tracing::warn!(gpu = %turn.gpu, "the process of a balloon hangs");
            Attempt::Hung(thread)
        }
    }
}

/// A balloon that may begin.
#[derive(Clone, Copy)]
struct Begun {
    size: Bytes,
    /// The time that a window of samples needs beside the GPU's programs.
    look_time: Duration,
}

/// Returns the size of a balloon that displaces managed memory. Takes idle credit back, unless even
/// without it a balloon would displace nothing.
fn begin_balloon(shared: &Shared, gpu: &GpuUuid, begin_by: Instant) -> Option<Begun> {
    let queried_at = Instant::now();
    let sample = sample_until(shared, gpu, begin_by)?;
    let look_time = (queried_at.elapsed() + SAMPLE_INTERVAL) * SAMPLES;
    let kept = Bytes(leased(shared, gpu).0.saturating_add(shared.reserved.0));
    balloon_size(&sample, &used(shared, gpu), kept)?;
    for running in lock(&shared.containers).values() {
        lock(&running.container).reclaim_all_idle(gpu);
    }
    // A process may have used its idle credit since the sample. Then it is still granted.
    let size = balloon_size(&sample, &granted(shared, gpu), kept)?;
    (Instant::now() <= begin_by).then_some(Begun {
        size,
        look_time: look_time.clamp(LOOK_TIME.0, LOOK_TIME.1),
    })
}

/// The memory that a balloon held, and the bound that it proved.
struct Proof {
    held: Bytes,
    candidates: Candidates,
    bound: OrphanBound,
}

/// Bounds the orphaned memory of a GPU while a balloon displaces managed memory, and may block. No
/// memory of the GPU is granted before `until`.
fn bound_by_balloon(
    shared: &Arc<Shared>,
    gpu: &GpuUuid,
    balloon: &dyn Balloon,
    Begun { size, look_time }: Begun,
    until: Instant,
) -> Option<Proof> {
    let _published = PublishedBalloon::new(shared, gpu, size);
    let (mut window, mut held) = (SampleWindow::default(), Bytes::ZERO);
    let mut sampled = Duration::ZERO;
    let sample_while_held = &mut |bytes, until: Instant| {
        held = bytes;
        let begun = Instant::now();
        while window.bound().is_none() && Instant::now() + SAMPLE_INTERVAL < until {
            let sample = || sample_until(shared, gpu, until);
            let candidates = collect_candidates(shared, gpu);
            let look =
                candidates.and_then(|candidates| Look::take(shared, gpu, candidates, sample));
            if let Some(look) = look {
                look.add_to(&mut window, bytes);
            }
            std::thread::sleep(SAMPLE_INTERVAL);
        }
        sampled = begun.elapsed();
    };
    if let Err(error) = balloon.hold(gpu, size, look_time, until, sample_while_held) {
        tracing::warn!(%error, "nothing is proven free beside managed memory");
        return None;
    }
    let Some((candidates, bound)) = window.bound() else {
        let samples = window.len();
        let (size, held) = (size.0, held.0);
        tracing::info!(%gpu, size, held, samples, ?sampled, "too few samples beside a balloon");
        return None;
    };
    let (size, unproven) = (size.0, bound.for_container(None).0);
    tracing::info!(%gpu, size, held = held.0, unproven, ?sampled, "balloon held");
    Some(Proof {
        held,
        candidates: candidates.clone(),
        bound,
    })
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

/// Grants without idle credit: see [`granted`].
fn used(shared: &Shared, gpu: &GpuUuid) -> BTreeMap<u32, Granted> {
    let used = |own: OwnMemory| Granted {
        bytes: own.charged,
        margin: own.uncharged_margin,
    };
    let own = own_memory(shared, gpu).into_iter();
    own.map(|(pid, own)| (pid, used(own))).collect()
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
