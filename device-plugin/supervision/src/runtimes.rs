//! Records the state of each GPU's allocator runtime, the process of its provisioner: pure.
//!
//! ```text
//!            begin_start            succeed                 fail (it exits or misses a deadline)
//!   Stopped ------------> Starting ---------> Running ---------------------------> Stopped
//!      ^                     | fail, with a back-off                                  |
//!      +---------------------+<---- end (drained, lost, idle MIG instance) <----------+
//!   any --set_stuck--> Stuck: SIGKILL does not end it --set_exited--> Stopped
//! ```

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bursar_crds::gpu_node::RuntimeState;
use bursar_gpu::cuda_fitness::{CudaFitness, CudaVerdict};
use bursar_gpu::health::UnhealthyReason;
use bursar_ledger::units::GpuUuid;

/// The first and the longest delay after a failure.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(10));

/// A process that runs this long before it fails gets no longer delay than the first.
const STEADY_AFTER: Duration = Duration::from_secs(60);

/// The failed starts of a refused GPU, and the time from the first to the last, that make the GPU
/// unfit. The fabric manager of a booting node may be late.
const UNFIT_AFTER: (u32, Duration) = (3, Duration::from_secs(30));

/// The failed starts in a row, with any `CUresult`, after which the GPU counts as refused.
const REFUSED_AFTER: u32 = 3;

/// The `CUresult`s with which CUDA refuses a GPU or the whole
/// node, with their usual cause and remedy.
const REFUSALS: [(i32, &str); 5] = [
    (3, "the driver does not initialize; see the kernel's log"),
    (
        46,
        "the GPU is busy or not available; see its compute mode in nvidia-smi -q",
    ),
    (
        100,
        "CUDA sees no such GPU; check the device nodes and whether the driver's files are of one version",
    ),
    (
        802,
        "the system is not ready; start nvidia-fabricmanager of the driver's version",
    ),
    (
        803,
        "the driver's libraries and kernel modules are of different versions; restart the node",
    ),
];

/// The usual cause and remedy of a refusal; `None` for other codes.
pub(crate) fn refusal(code: i32) -> Option<&'static str> {
    let known = REFUSALS.iter().find(|(known, _)| *known == code);
    known.map(|(_, meaning)| *meaning)
}

/// The kinds of failures, for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FailureClass {
    /// CUDA refused the GPU at the start of the process.
    Refused,
    /// Another call of the driver failed at the start.
    Driver,
    /// The process missed a deadline.
    Timeout,
    /// The process could not be executed, or ended by itself.
    Exit,
}

impl FailureClass {
    /// The label of metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Driver => "driver",
            Self::Timeout => "timeout",
            Self::Exit => "exit",
        }
    }
}

/// A failed start, or the unplanned end of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) class: FailureClass,
    /// The cause and the remedy, for people.
    pub(crate) reason: String,
}

/// Whether the process of a GPU runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activity {
    /// There is no process.
    #[default]
    Stopped,
    /// The process initializes the driver.
    Starting,
    /// The process takes requests.
    Running {
        /// When its start succeeded.
        since: Instant,
    },
    /// The process got SIGKILL and does not end.
    Stuck,
}

/// How a GPU accesses managed memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ManagedAccess {
    /// The GPU's process has not started yet, and it alone can ask the driver.
    #[default]
    Unknown,
    /// At the same time as the host.
    Concurrent,
    /// Only while the host does not.
    Exclusive,
}

/// Starts that CUDA failed, without a successful one between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FailedStarts {
    count: u32,
    first: Instant,
    last: Instant,
    /// Whether one of them shows alone that CUDA does not work: a code of [`REFUSALS`], or a hang.
    is_proof: bool,
}

/// The allocator runtime of one GPU. The counts begin with the agent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuntimeRecord {
    activity: Activity,
    starts: u64,
    failures: BTreeMap<FailureClass, u64>,
    last_failure: Option<Failure>,
    /// Failures without a steady run between them.
    failures_in_a_row: u32,
    retry_at: Option<Instant>,
    failed_starts: Option<FailedStarts>,
    /// Whether a start has succeeded or failed since the agent last ended the process.
    is_tried: bool,
    /// The driver's answer at the last start that succeeded.
    managed_access: ManagedAccess,
}

impl RuntimeRecord {
    pub(crate) fn begin_start(&mut self) {
        self.activity = Activity::Starting;
    }

    pub(crate) fn succeed(&mut self, managed_access: ManagedAccess, now: Instant) {
        self.activity = Activity::Running { since: now };
        self.managed_access = managed_access;
        self.starts += 1;
        self.is_tried = true;
        (self.last_failure, self.failed_starts, self.retry_at) = (None, None, None);
    }

    /// Records a failed start. Returns when the next one may be tried. A process that could not be
    /// executed, or ended by itself, shows nothing about CUDA.
    pub(crate) fn fail_start(&mut self, failure: Failure, now: Instant) -> Instant {
        self.is_tried = true;
        let is_proof = match failure.class {
            FailureClass::Refused | FailureClass::Timeout => Some(true),
            FailureClass::Driver => Some(false),
            FailureClass::Exit => None,
        };
        if let Some(is_proof) = is_proof {
            let failed = self.failed_starts.get_or_insert(FailedStarts {
                count: 0,
                first: now,
                last: now,
                is_proof,
            });
            failed.count = failed.count.saturating_add(1);
            failed.last = now;
            failed.is_proof |= is_proof;
        }
        self.fail(failure, now)
    }

    /// Records a failure. Returns when the next start may be tried.
    pub(crate) fn fail(&mut self, failure: Failure, now: Instant) -> Instant {
        let is_steady = matches!(self.activity, Activity::Running { since }
            if now.saturating_duration_since(since) >= STEADY_AFTER);
        if is_steady {
            self.failures_in_a_row = 0;
        }
        let doubled = 1_u32 << self.failures_in_a_row.min(16);
        let retry_at = now + BACKOFF.0.saturating_mul(doubled).min(BACKOFF.1);
        self.failures_in_a_row = self.failures_in_a_row.saturating_add(1);
        *self.failures.entry(failure.class).or_default() += 1;
        (self.activity, self.last_failure) = (Activity::Stopped, Some(failure));
        self.retry_at = Some(retry_at);
        retry_at
    }

    pub(crate) fn set_stuck(&mut self) {
        self.activity = Activity::Stuck;
    }

    /// A process that was stuck has ended.
    pub(crate) fn set_exited(&mut self) {
        self.activity = Activity::Stopped;
    }

    /// The agent has ended the process on purpose. The next start is the first of a new row.
    pub(crate) fn end(&mut self) {
        *self = Self {
            starts: self.starts,
            failures: std::mem::take(&mut self.failures),
            managed_access: self.managed_access,
            ..Self::default()
        };
    }

    /// Whether the process runs.
    pub fn activity(&self) -> Activity {
        self.activity
    }

    /// Whether there is a process.
    pub(crate) fn is_active(&self) -> bool {
        self.activity != Activity::Stopped
    }

    /// When the next start may be tried; `None` where it may be at once.
    pub(crate) fn retry_at(&self) -> Option<Instant> {
        self.retry_at
    }

    pub(crate) fn failures_in_a_row(&self) -> u32 {
        self.failures_in_a_row
    }

    /// Whether the last failure was this one.
    pub(crate) fn has_last_failure(&self, failure: &Failure) -> bool {
        self.last_failure.as_ref() == Some(failure)
    }

    /// Why the GPU is unfit for programs, if it is.
    pub(crate) fn unfit_reason(&self) -> Option<UnhealthyReason> {
        let (count, time) = UNFIT_AFTER;
        let is_lasting = self.failed_starts.is_some_and(|failed| {
            failed.count >= count && failed.last.saturating_duration_since(failed.first) >= time
        });
        match self.activity {
            Activity::Stuck => Some(UnhealthyReason::ProvisionerHung),
            _ if is_lasting && self.is_refused() => Some(UnhealthyReason::CudaRefused),
            _ => None,
        }
    }

    /// Whether CUDA has refused the GPU since the last start that succeeded.
    pub(crate) fn is_refused(&self) -> bool {
        let failed = self.failed_starts;
        failed.is_some_and(|failed| failed.is_proof || failed.count >= REFUSED_AFTER)
    }

    /// Whether a start has had a result since the agent last ended the process.
    pub(crate) fn is_tried(&self) -> bool {
        self.is_tried
    }

    /// The result of the starts; `is_tried` holds also for a GPU that has waited long for one. An
    /// ended runtime keeps its report on managed memory.
    pub(crate) fn fitness(&self, is_tried: bool) -> CudaFitness {
        CudaFitness {
            verdict: match self.unfit_reason() {
                Some(reason) => CudaVerdict::Unfit(reason),
                None if self.is_refused() => CudaVerdict::Refused,
                None if is_tried => CudaVerdict::Works,
                None => CudaVerdict::Untried,
            },
            lacks_concurrent_access: self.managed_access == ManagedAccess::Exclusive,
        }
    }

    fn state(&self) -> RuntimeState {
        match self.activity {
            Activity::Stuck => RuntimeState::Stuck,
            Activity::Running { .. } => RuntimeState::Ready,
            // A retry changes the state only if it succeeds: otherwise each would be a write.
            Activity::Stopped | Activity::Starting if self.is_refused() => RuntimeState::Refused,
            Activity::Stopped if self.last_failure.is_none() => RuntimeState::Stopped,
            Activity::Stopped | Activity::Starting => RuntimeState::Starting,
        }
    }
}

/// The state of a GPU's allocator runtime. Not the API's type, because metrics count failures by
/// kind, and the status counts them all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuntimeReport {
    /// The state.
    pub state: RuntimeState,
    /// How often it has started.
    pub starts: u64,
    /// How often it has failed, by kind.
    pub failures: BTreeMap<FailureClass, u64>,
    /// The last failure, until the next start succeeds.
    pub reason: String,
}

/// The reports of these runtimes.
pub fn reports(
    runtimes: &BTreeMap<GpuUuid, RuntimeRecord>,
    is_drained: impl Fn(&GpuUuid) -> bool,
) -> BTreeMap<GpuUuid, RuntimeReport> {
    let report = |(gpu, record): (&GpuUuid, &RuntimeRecord)| {
        let state = match record.state() {
            RuntimeState::Stuck => RuntimeState::Stuck,
            _ if is_drained(gpu) => RuntimeState::Drained,
            state => state,
        };
        let failure = record.last_failure.as_ref();
        let report = RuntimeReport {
            state,
            starts: record.starts,
            failures: record.failures.clone(),
            reason: failure.map(|last| last.reason.clone()).unwrap_or_default(),
        };
        (gpu.clone(), report)
    };
    runtimes.iter().map(report).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(class: FailureClass) -> Failure {
        Failure {
            class,
            reason: class.as_str().to_owned(),
        }
    }

    struct Fixture {
        record: RuntimeRecord,
        start: Instant,
    }

    impl Fixture {
        fn new() -> Self {
            Self {
                record: RuntimeRecord::default(),
                start: Instant::now(),
            }
        }

        /// Fails at that time. Returns the delay until the next try.
        fn fail(&mut self, at: Duration, class: FailureClass) -> Duration {
            let now = self.start + at;
            self.record.fail_start(failure(class), now) - now
        }

        fn succeed(&mut self) {
            self.record.succeed(ManagedAccess::Concurrent, self.start);
        }
    }

    #[test]
    fn gpu_is_unfit_after_three_refusals_over_thirty_seconds() {
        let mut fixture = Fixture::new();
        let (mut at, mut tries) = (Duration::ZERO, 0);
        while fixture.record.unfit_reason().is_none() {
            at += fixture.fail(at, FailureClass::Refused);
            tries += 1;
            assert_eq!(fixture.record.state(), RuntimeState::Refused);
            assert!(tries < 100, "it becomes unfit");
        }
        let last = fixture.record.failed_starts.unwrap().last - fixture.start;
        assert_eq!(
            fixture.record.unfit_reason(),
            Some(UnhealthyReason::CudaRefused)
        );
        assert!(last >= Duration::from_secs(30) && last < Duration::from_secs(45));
        // Two refusals are too few, however far apart.
        let mut rare = Fixture::new();
        rare.fail(Duration::ZERO, FailureClass::Refused);
        rare.fail(Duration::from_secs(3600), FailureClass::Refused);
        assert_eq!(rare.record.unfit_reason(), None);
    }

    #[test]
    fn successful_start_makes_a_refused_gpu_fit() {
        let mut fixture = Fixture::new();
        for second in [0, 20, 40] {
            fixture.fail(Duration::from_secs(second), FailureClass::Refused);
        }
        // A retry, and a process that ends by itself, prove nothing.
        fixture.record.begin_start();
        assert_eq!(fixture.record.state(), RuntimeState::Refused);
        fixture.fail(Duration::from_secs(50), FailureClass::Exit);
        assert!(fixture.record.unfit_reason().is_some() && fixture.record.is_refused());
        fixture.record.begin_start();
        fixture.record.succeed(
            ManagedAccess::Concurrent,
            fixture.start + Duration::from_secs(60),
        );
        assert_eq!(fixture.record.unfit_reason(), None);
        assert!(!fixture.record.is_refused());
        assert_eq!(
            (fixture.record.state(), fixture.record.starts),
            (RuntimeState::Ready, 1)
        );
        assert_eq!(fixture.record.failures[&FailureClass::Refused], 3);
    }

    #[test]
    fn start_that_hangs_counts_as_a_refusal() {
        let mut fixture = Fixture::new();
        fixture.fail(Duration::from_secs(20), FailureClass::Timeout);
        assert!(fixture.record.is_refused());
        assert_eq!(fixture.record.state(), RuntimeState::Refused);
        assert_eq!(fixture.record.unfit_reason(), None);
        for second in [41, 62] {
            fixture.fail(Duration::from_secs(second), FailureClass::Timeout);
        }
        let unfit = Some(UnhealthyReason::CudaRefused);
        assert_eq!(fixture.record.unfit_reason(), unfit);
        fixture.succeed();
        assert!(!fixture.record.is_refused());
        // A request that hangs later is no start.
        fixture
            .record
            .fail(failure(FailureClass::Timeout), fixture.start);
        assert!(!fixture.record.is_refused());
    }

    #[test]
    fn gpu_is_refused_after_three_failures_of_another_code() {
        let mut fixture = Fixture::new();
        for second in [0, 20] {
            fixture.fail(Duration::from_secs(second), FailureClass::Driver);
            assert!(!fixture.record.is_refused());
            assert_eq!(fixture.record.state(), RuntimeState::Starting);
        }
        fixture.succeed();
        for second in [50, 60, 70] {
            assert!(!fixture.record.is_refused());
            fixture.fail(Duration::from_secs(second), FailureClass::Driver);
        }
        assert!(fixture.record.is_refused(), "three in a row");
        assert_eq!(fixture.record.unfit_reason(), None);
        fixture.fail(Duration::from_secs(80), FailureClass::Driver);
        let unfit = Some(UnhealthyReason::CudaRefused);
        assert_eq!(fixture.record.unfit_reason(), unfit);
        fixture.succeed();
        assert!(!fixture.record.is_refused());
    }

    #[test]
    fn gpu_is_not_refused_for_a_process_that_exits() {
        let mut fixture = Fixture::new();
        for second in 0..100 {
            fixture.fail(Duration::from_secs(second), FailureClass::Exit);
        }
        assert_eq!(fixture.record.unfit_reason(), None);
        assert_eq!(fixture.record.state(), RuntimeState::Starting);
    }

    #[test]
    fn gpu_is_tried_from_the_first_result_until_the_end() {
        let mut fixture = Fixture::new();
        fixture.record.begin_start();
        assert!(!fixture.record.is_tried());
        fixture.fail(Duration::ZERO, FailureClass::Exit);
        assert!(fixture.record.is_tried());
        fixture.record.begin_start();
        assert!(fixture.record.is_tried(), "a retry does not begin again");
        fixture.record.end();
        assert!(!fixture.record.is_tried());
        fixture.succeed();
        assert!(fixture.record.is_tried());
    }

    #[test]
    fn backoff_doubles_and_is_reset_by_a_steady_run() {
        let mut fixture = Fixture::new();
        let delays: Vec<_> = (0..8)
            .map(|_| fixture.fail(Duration::ZERO, FailureClass::Exit).as_millis())
            .collect();
        assert_eq!(delays, [200, 400, 800, 1_600, 3_200, 6_400, 10_000, 10_000]);
        // A process that ends right after each start does not start in a tight loop.
        fixture.succeed();
        let delay = fixture.fail(Duration::from_secs(1), FailureClass::Exit);
        assert_eq!(delay, Duration::from_secs(10));
        fixture.succeed();
        let delay = fixture.fail(STEADY_AFTER, FailureClass::Exit);
        assert_eq!(delay, Duration::from_millis(200));
    }

    #[test]
    fn ended_runtime_keeps_its_counts_alone() {
        let mut fixture = Fixture::new();
        fixture.succeed();
        for second in [0, 20, 40] {
            fixture.fail(Duration::from_secs(second), FailureClass::Refused);
        }
        fixture.record.end();
        assert_eq!(fixture.record.unfit_reason(), None);
        assert_eq!(
            (fixture.record.state(), fixture.record.retry_at),
            (RuntimeState::Stopped, None)
        );
        assert_eq!(
            (
                fixture.record.starts,
                fixture.record.failures[&FailureClass::Refused]
            ),
            (1, 3)
        );
    }

    #[test]
    fn managed_access_is_known_from_the_first_start_on() {
        let mut fixture = Fixture::new();
        fixture.record.begin_start();
        assert!(!fixture.record.fitness(true).lacks_concurrent_access);
        fixture
            .record
            .succeed(ManagedAccess::Exclusive, fixture.start);
        assert!(fixture.record.fitness(true).lacks_concurrent_access);
        fixture.fail(Duration::from_secs(1), FailureClass::Exit);
        fixture.record.end();
        assert!(fixture.record.fitness(true).lacks_concurrent_access);
        fixture.succeed();
        assert!(!fixture.record.fitness(true).lacks_concurrent_access);
    }

    #[test]
    fn stuck_runtime_is_reported_before_a_drain() {
        let [a, b]: [GpuUuid; 2] = ["GPU-a", "GPU-b"].map(|gpu| gpu.parse().unwrap());
        let mut stuck = RuntimeRecord::default();
        stuck.set_stuck();
        let runtimes = [(a.clone(), stuck), (b.clone(), RuntimeRecord::default())].into();
        let reports = reports(&runtimes, |_| true);
        assert_eq!(reports[&a].state, RuntimeState::Stuck);
        assert_eq!(reports[&b].state, RuntimeState::Drained);
    }

    #[test]
    fn codes_of_refusals_have_a_remedy() {
        for code in [3, 46, 100, 802, 803] {
            assert!(refusal(code).is_some());
        }
        for code in [-1, 0, 2, 101, 999] {
            assert_eq!(refusal(code), None);
        }
    }
}
