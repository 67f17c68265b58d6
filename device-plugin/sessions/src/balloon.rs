//! Decides when a balloon of device memory displaces a GPU's managed memory, and how large it is.
//!
//! The driver counts managed memory on a GPU as used and charges it to no process. Memory that only
//! a descriptor holds looks the same. Device memory displaces the former, and never the latter. So
//! while the agent holds device memory, less of a GPU's used memory is unexplained
//! ([`super::orphan_bound`]).
//!
//! The balloon costs tenants the residency of their managed memory, and takes no memory that a
//! process may allocate without a further request. So it is rare, and memory up to these amounts
//! stays unproven.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use bursar_gpu::memory_sample::GpuMemorySample;
use bursar_ledger::units::{Bytes, GpuUuid};

/// How long memory must be unproven before a balloon displaces managed memory.
const FIRST_DELAY: Duration = Duration::from_secs(5);

/// The shortest delay between two balloons of a GPU, whatever tenants do.
const MIN_INTERVAL: Duration = Duration::from_secs(30);

/// The longest delay between two balloons for the same memory.
const MAX_INTERVAL: Duration = Duration::from_secs(600);

/// A balloon that has so much more than the one before has displaced managed memory.
const MIN_PROGRESS: Bytes = Bytes::mib(256);

/// The memory that a balloon leaves for processes within `cuInit`, which take 4 MiB each (F3 in
/// docs/facts.md).
const STARTING_PROCESSES: Bytes = Bytes::mib(64);

/// The memory that a listed process without a session may take meanwhile.
const UNTRACKED_MARGIN: Bytes = Bytes::mib(256);

/// The granularity of device memory of every NVIDIA GPU.
const GRANULARITY: u64 = 2 << 20;

/// Why a balloon was not held.
#[derive(Debug, thiserror::Error)]
#[error("failed to hold memory of {gpu}: {cause}")]
pub struct BalloonError {
    /// The GPU.
    pub gpu: GpuUuid,
    /// The reason.
    pub cause: String,
}

/// Holds device memory for a moment; the agent implements this with a process of its own.
pub trait Balloon: Send + Sync + 'static {
    /// Allocates at most `bytes` of a GPU, as much as the driver gives until `look_time` is left.
    /// Then it calls `look` with the amount and the time at which `look` must return. The memory is
    /// free when this returns: at `until`, or as soon as a process that hangs in the driver has
    /// exited.
    ///
    /// # Errors
    /// The memory was perhaps not held until `look` returned.
    fn hold(
        &self,
        gpu: &GpuUuid,
        bytes: Bytes,
        look_time: Duration,
        until: Instant,
        look: &mut dyn FnMut(Bytes, Instant),
    ) -> Result<(), BalloonError>;
}

/// The memory of a GPU that the agent has granted to a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Granted {
    pub(super) bytes: Bytes,
    /// The bytes that the process may have without a grant.
    pub(super) margin: Bytes,
}

/// The size of a balloon that takes no memory from the processes with these grants, and `kept`
/// bytes less; `None` where it would displace nothing.
///
/// Memory of processes that the driver lists may be free again a moment later. So the larger of
/// both figures counts.
pub(super) fn balloon_size(
    sample: &GpuMemorySample,
    granted: &BTreeMap<u32, Granted>,
    kept: Bytes,
) -> Option<Bytes> {
    let listed = sample.charges.iter().map(|(pid, _)| pid);
    let pids: BTreeSet<u32> = listed.chain(granted.keys().copied()).collect();
    let mut kept = kept.0.saturating_add(STARTING_PROCESSES.0);
    for pid in pids {
        let untracked = Granted {
            margin: UNTRACKED_MARGIN,
            ..Granted::default()
        };
        let Granted { bytes, margin } = granted.get(&pid).copied().unwrap_or(untracked);
        let most = bytes.max(sample.charges.bytes_of(pid)?);
        kept = kept.saturating_add(most.0).saturating_add(margin.0);
    }
    // A balloon that has all it can have must not seem partial.
    let size = sample.capacity.0.saturating_sub(kept) / GRANULARITY * GRANULARITY;
    let free = sample.capacity.0.saturating_sub(sample.used.0);
    (size > free).then_some(Bytes(size))
}

/// The times of a GPU's balloons.
#[derive(Debug)]
pub(super) struct Schedule {
    /// Since when the samples alone have not proven all memory free.
    unproven_since: Option<Instant>,
    last: Option<Instant>,
    interval: Duration,
    /// When a balloon last could not begin, and the delay until the next attempt.
    postponed: Option<(Instant, Duration)>,
    /// The most that a balloon for this memory has held.
    held: Bytes,
}

impl Default for Schedule {
    fn default() -> Schedule {
        Schedule {
            unproven_since: None,
            last: None,
            interval: MIN_INTERVAL,
            postponed: None,
            held: Bytes::ZERO,
        }
    }
}

impl Schedule {
    /// Notes whether samples leave memory unproven.
    pub(super) fn observe(&mut self, is_unproven: bool, now: Instant) {
        self.unproven_since = match is_unproven {
            true => self.unproven_since.or(Some(now)),
            false => None,
        };
    }

    /// Notes that other memory has to be proven free. A tenant that exits again and again delays no
    /// balloon, and causes no more attempts than balloons.
    pub(super) fn restart(&mut self) {
        self.interval = MIN_INTERVAL;
        self.held = Bytes::ZERO;
        if let Some((_, delay)) = &mut self.postponed {
            *delay = MIN_INTERVAL.min(*delay);
        }
    }

    /// Notes an attempt whose balloon could not begin. Each attempt stops grants for a moment, so
    /// the delay to the next one doubles. The first delays are short, to find a moment with room.
    pub(super) fn postpone(&mut self, now: Instant) {
        let delay = match self.postponed {
            Some((_, delay)) => (2 * delay).min(MAX_INTERVAL),
            None => FIRST_DELAY,
        };
        self.postponed = Some((now, delay));
    }

    /// Whether a balloon is due.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        let is_over = |then: Instant, delay| now.saturating_duration_since(then) >= delay;
        self.unproven_since
            .is_some_and(|since| is_over(since, FIRST_DELAY))
            && self.last.is_none_or(|last| is_over(last, self.interval))
            && self
                .postponed
                .is_none_or(|(then, delay)| is_over(then, delay))
    }

    /// Notes a balloon that had less than its size. Displaced memory mostly stays on the host, so
    /// the next balloon goes on after the shortest delay while each has more than the one before.
    pub(super) fn begin_partial(&mut self, held: Bytes, now: Instant) {
        if held.0 > self.held.0.saturating_add(MIN_PROGRESS.0) {
            self.interval = MIN_INTERVAL;
            self.last = Some(now);
            self.postponed = None;
            self.held = held;
        } else {
            self.begin(now);
        }
    }

    /// Notes a balloon. The next one is due after twice the delay.
    pub(super) fn begin(&mut self, now: Instant) {
        if self.last.is_some() {
            self.interval = (2 * self.interval).min(MAX_INTERVAL);
        }
        self.last = Some(now);
        self.postponed = None;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn sample(used: u64, charged: &[(u32, Option<u64>)]) -> GpuMemorySample {
        let charged = charged.iter();
        GpuMemorySample {
            used: Bytes(used),
            capacity: Bytes::gib(16),
            charges: charged
                .map(|(pid, bytes)| (*pid, bytes.map(Bytes)))
                .collect(),
            ..GpuMemorySample::default()
        }
    }

    fn granted(pid: u32, bytes: u64) -> BTreeMap<u32, Granted> {
        let granted = Granted {
            bytes: Bytes(bytes),
            margin: Bytes::mib(256),
        };
        BTreeMap::from([(pid, granted)])
    }

    #[test]
    fn balloon_leaves_grants_leases_and_listed_memory() {
        let full = |charged: &[(u32, Option<u64>)]| sample(16 * GIB, charged);
        let rest = |kept: u64| Some(Bytes(16 * GIB - kept - STARTING_PROCESSES.0));
        let margin = 256 << 20;
        let size = |sample, grants| balloon_size(&sample, &grants, Bytes::gib(1));
        let kept = GIB + margin;
        assert_eq!(size(full(&[]), granted(1, 3 * GIB)), rest(kept + 3 * GIB));
        let listed = [(1, Some(4 * GIB))];
        assert_eq!(
            size(full(&listed), granted(1, 3 * GIB)),
            rest(kept + 4 * GIB)
        );
        assert_eq!(
            size(full(&[(2, Some(GIB))]), granted(1, 3 * GIB)),
            rest(kept + 3 * GIB + GIB + margin),
            "an untracked process"
        );
        assert_eq!(size(full(&[(1, None)]), granted(1, GIB)), None);
        assert_eq!(size(full(&[]), granted(1, 16 * GIB)), None);
        assert_eq!(
            size(sample(4 * GIB, &[]), granted(1, 3 * GIB)),
            None,
            "it would take free memory alone"
        );
    }

    #[test]
    fn balloon_is_whole_chunks_of_device_memory() {
        let size = balloon_size(&sample(16 * GIB, &[]), &BTreeMap::new(), Bytes(1));
        let rest = 16 * GIB - STARTING_PROCESSES.0 - GRANULARITY;
        assert_eq!(size, Some(Bytes(rest)));
    }

    proptest! {
        /// Whatever each process has of its grant, and whatever of it the driver lists, all
        /// processes together can allocate the rest beside the balloon.
        #[test]
        fn balloon_never_takes_what_was_granted(
            processes in prop::collection::vec((0..4 * GIB, 0..4 * GIB), 0..8),
            used in 0..16 * GIB,
        ) {
            let pids = || (1..).zip(&processes);
            let listed: Vec<_> = pids().map(|(pid, (_, listed))| (pid, Some(*listed))).collect();
            let grants = pids().flat_map(|(pid, (bytes, _))| granted(pid, *bytes)).collect();
            let size = balloon_size(&sample(used, &listed), &grants, Bytes::ZERO).unwrap_or_default();
            let most: u64 = processes.iter().map(|(granted, listed)| granted.max(listed)).sum();
            prop_assert!(size == Bytes::ZERO || size.0 + most <= 16 * GIB);
        }
    }

    #[test]
    fn balloons_are_rarer_until_other_memory_is_unproven() {
        let (mut schedule, start) = (Schedule::default(), Instant::now());
        let second = |seconds| start + Duration::from_secs(seconds);
        let mut times = Vec::new();
        for now in 0..4_000 {
            if now == 2_000 {
                schedule.restart();
            }
            schedule.observe(true, second(now));
            if schedule.is_due(second(now)) {
                schedule.begin(second(now));
                times.push(now);
            }
        }
        let expected = [5, 35, 95, 215, 455, 935, 1_535, 2_000, 2_060, 2_180];
        assert_eq!(times[..10], expected);
        schedule.observe(false, second(4_000));
        assert!(!schedule.is_due(second(9_000)), "all is proven free");
        schedule.observe(true, second(9_000));
        assert!(!schedule.is_due(second(9_004)));
        assert!(schedule.is_due(second(9_005)));
    }

    #[test]
    fn balloon_that_could_not_begin_keeps_its_interval() {
        let (mut schedule, start) = (Schedule::default(), Instant::now());
        let second = |seconds| start + Duration::from_secs(seconds);
        schedule.observe(true, start);
        schedule.begin(second(5));
        assert!(schedule.is_due(second(35)));
        schedule.postpone(second(35));
        schedule.observe(true, second(36));
        assert!(!schedule.is_due(second(39)));
        assert!(schedule.is_due(second(40)));
    }

    #[test]
    fn attempts_are_rarer_while_no_balloon_can_begin() {
        let times = |restarts: bool| {
            let (mut schedule, start) = (Schedule::default(), Instant::now());
            let mut times = Vec::new();
            for second in 0..2_500 {
                let now = start + Duration::from_secs(second);
                schedule.observe(true, now);
                match second {
                    2_000 => schedule.begin(now),
                    _ if schedule.is_due(now) => {
                        schedule.postpone(now);
                        times.push(second);
                    }
                    _ => {}
                }
                if restarts {
                    schedule.restart();
                }
            }
            times
        };
        let mut expected = vec![5, 10, 20, 40, 80, 160, 320, 640, 1_240, 1_840];
        expected.extend([2_030, 2_035, 2_045, 2_065, 2_105, 2_185, 2_345]);
        assert_eq!(times(false), expected, "short again after a balloon");
        assert_eq!(
            times(true)[..7],
            [5, 10, 20, 40, 70, 100, 130],
            "whatever tenants do"
        );
    }

    #[test]
    fn balloons_go_on_soon_while_each_has_more() {
        let (mut schedule, start) = (Schedule::default(), Instant::now());
        let second = |seconds| start + Duration::from_secs(seconds);
        let mut held = [100, 107, 114, 114, 114].map(Bytes::gib).into_iter();
        let mut times = Vec::new();
        for now in 0..400 {
            schedule.observe(true, second(now));
            if schedule.is_due(second(now))
                && let Some(held) = held.next()
            {
                schedule.begin_partial(held, second(now));
                times.push(now);
            }
        }
        assert_eq!(times, [5, 35, 65, 95, 155], "rarer once memory is held");
    }

    #[test]
    fn tenants_cause_at_most_a_balloon_each_half_minute() {
        let (mut schedule, start) = (Schedule::default(), Instant::now());
        let mut count = 0;
        for now in 0..600 {
            let now = start + Duration::from_secs(now);
            schedule.observe(true, now);
            if schedule.is_due(now) {
                schedule.begin(now);
                count += 1;
            }
            schedule.restart();
        }
        assert_eq!(count, 20);
    }
}
