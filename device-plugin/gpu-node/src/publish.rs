//! Writes the node's report to its `GpuNode` when it changed, at a bounded rate.
//!
//! ```text
//! new report or changed object --> wait `batch_delay` --> carry over --> equal: no write
//!           ^   ^                                           |
//!           |   +--- wait `quiet_interval` <--- not urgent -+
//!           |                                               +--> write --> wait `min_interval`
//!           |                                                      |
//!           +----------- with the newest report --- back off <-----+ failed
//! ```

use std::collections::BTreeSet;
use std::time::Duration;

use bursar_apiserver::ParsedSpec;
use bursar_apiserver::gpu_node::{GpuNodeApi, GpuNodeError, ObservedObject};
use bursar_apiserver::metrics::ApiMetrics;
use bursar_apiserver::spec_watch::Observation;
use bursar_crds::numbers::truncate_to_seconds;
use bursar_gpu::drain::DrainState;
use bursar_ledger::units::GpuUuid;
use bursar_watch::is_below;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::carry_over::carry_over;
use super::report::NodeReport;
use super::urgency::is_urgent;

/// The rate of writes.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    /// How long a change waits for further changes.
    pub(crate) batch_delay: Duration,
    /// The shortest interval between two writes.
    pub(crate) min_interval: Duration,
    /// The longest interval between two writes where the API server is slow.
    pub(crate) max_interval: Duration,
    /// The shortest interval from a write to a write for changes that tenants make as often as they
    /// like. These are process generations, leases and further faults that are only reported. It
    /// also applies to the counts of allocator runtimes.
    pub(crate) quiet_interval: Duration,
    /// The first delay after a failure; each further failure doubles it.
    pub(crate) min_backoff: Duration,
    /// The longest delay after a failure.
    pub(crate) max_backoff: Duration,
    /// How often the agent reads the object while a fault is open. A fault may wait for the
    /// operator, so the agent must notice that the API server is unreachable.
    pub(crate) probe_interval: Duration,
    /// The timeout of all requests of one attempt.
    pub(crate) request_timeout: Duration,
}

impl Default for Rate {
    /// At most one write a second: with 10 ms per write, 1,000 nodes cost the API server 10 s of
    /// work each second. More nodes make it slower, and then each writes less often.
    fn default() -> Self {
        Self {
            batch_delay: Duration::from_millis(100),
            min_interval: Duration::from_secs(1),
            max_interval: Duration::from_secs(10),
            quiet_interval: Duration::from_secs(60),
            min_backoff: Duration::from_millis(500),
            max_backoff: Duration::from_secs(10),
            probe_interval: Duration::from_secs(10),
            request_timeout: Duration::from_secs(10),
        }
    }
}

/// How many times as long as a write took the agent waits until the next one. So the API server
/// works on the writes of at most one in a hundred nodes at a time, however many nodes there are.
const PAUSE_PER_WRITE: u32 = 100;

/// The outcome of one attempt.
enum Synced {
    /// The status was the report's already.
    Unchanged,
    /// The status was written.
    Written,
    /// The status differs in nothing urgent, and the last write is too recent.
    Deferred,
}

/// The times of the next attempts.
struct Schedule {
    rate: Rate,
    /// The number of failures in a row.
    failures: u32,
    next_write: Instant,
    next_quiet_write: Instant,
    next_probe: Instant,
    /// Whether the status differs in something that waits for `next_quiet_write`.
    is_deferred: bool,
}

impl Schedule {
    fn new(rate: Rate) -> Self {
        let now = Instant::now();
        Self {
            rate,
            failures: 0,
            next_write: now,
            next_quiet_write: now,
            next_probe: now + rate.probe_interval,
            is_deferred: false,
        }
    }

    /// Plans the attempts after one that began at `started_at`; `has_read` says whether it read the
    /// object.
    fn plan_after(
        &mut self,
        outcome: &Result<Synced, GpuNodeError>,
        started_at: Instant,
        has_read: bool,
    ) {
        let rate = self.rate;
        self.is_deferred = matches!(outcome, Ok(Synced::Deferred));
        if has_read || !matches!(outcome, Ok(Synced::Unchanged | Synced::Deferred)) {
            self.next_probe = started_at + rate.probe_interval;
        }
        match outcome {
            Ok(Synced::Unchanged | Synced::Deferred) => {}
            Ok(Synced::Written) => {
                if self.failures > 0 {
                    info!(failures = self.failures, "wrote GpuNode after failures");
                }
                self.failures = 0;
                let pause = started_at.elapsed() * PAUSE_PER_WRITE;
                let pause = pause.min(rate.max_interval).max(rate.min_interval);
                self.next_write = Instant::now() + pause;
                self.next_quiet_write = Instant::now() + rate.quiet_interval;
            }
            Err(error) => {
                if self.failures == 0 {
                    warn!(
                        error = error as &dyn std::error::Error,
                        "failed to write GpuNode; retrying"
                    );
                }
                self.next_write = Instant::now() + backoff(rate, self.failures);
                self.failures += 1;
            }
        }
    }
}

/// Keeps the status of this node's `GpuNode` equal to the agent's report.
pub struct Publisher<O> {
    /// The object's API.
    pub api: O,
    /// The node's reports.
    pub reports: watch::Receiver<NodeReport>,
    /// The object as the watch observes it.
    pub observed: watch::Receiver<Observation>,
    /// The parsed spec of the object.
    pub spec: watch::Receiver<Option<ParsedSpec>>,
    /// The GPUs to drain, including those that an earlier agent read from a spec.
    pub drain: watch::Receiver<DrainState>,
    /// The rate of writes.
    pub rate: Rate,
    /// Since when the API server is unreachable; none while it answers.
    pub unreachable_since: watch::Sender<Option<Instant>>,
    /// Counts writes.
    pub metrics: ApiMetrics,
}

impl<O: GpuNodeApi> Publisher<O> {
    /// Publishes until `shutdown`, or until the sender of reports is dropped. Waits while the API
    /// server is unreachable.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let rate = self.rate;
        let mut known = None;
        let mut schedule = Schedule::new(rate);
        self.reports.mark_changed();
        loop {
            let open = !self.reports.borrow().status.faults.is_empty();
            tokio::select! {
                () = shutdown.cancelled() => return,
                changed = self.reports.changed() => if changed.is_err() { return },
                Ok(()) = self.observed.changed() => {
                    let observation = self.observed.borrow_and_update().clone();
                    if !apply_observation(&mut known, observation) {
                        continue;
                    }
                }
                () = sleep_until(schedule.next_probe), if open => known = None,
                () = sleep_until(schedule.next_quiet_write), if schedule.is_deferred => {}
            }
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = async { sleep(rate.batch_delay).await; sleep_until(schedule.next_write).await } => {}
            }
            let report = self.reports.borrow_and_update().clone();
            let started_at = Instant::now();
            let reads_object = known.is_none();
            let outcome = tokio::select! {
                () = shutdown.cancelled() => return,
                outcome = timeout(
                    rate.request_timeout,
                    self.sync(&mut known, &report, started_at < schedule.next_quiet_write),
                ) => outcome,
            };
            let outcome = outcome.unwrap_or(Err(GpuNodeError::Timeout {
                within: rate.request_timeout,
            }));
            self.publish_reachability(outcome.is_ok(), started_at);
            schedule.plan_after(&outcome, started_at, reads_object);
            match outcome {
                Ok(Synced::Unchanged | Synced::Deferred) => {}
                Ok(Synced::Written) => self.metrics.count_gpu_node_write(true),
                Err(_) => {
                    // A failed write may have taken effect, so the object must be read again.
                    known = None;
                    self.metrics.count_gpu_node_write(false);
                    self.reports.mark_changed();
                }
            }
        }
    }

    /// Publishes since when the API server is unreachable, after an attempt that began at
    /// `started_at`.
    fn publish_reachability(&self, is_reachable: bool, started_at: Instant) {
        self.unreachable_since.send_if_modified(|since| {
            let before = *since;
            *since = match is_reachable {
                true => None,
                false => before.or(Some(started_at)),
            };
            *since != before
        });
    }

    /// Writes `report` if the status differs; with `defer`, only if the difference is urgent.
    async fn sync(
        &self,
        known: &mut Option<ObservedObject>,
        report: &NodeReport,
        defer: bool,
    ) -> Result<Synced, GpuNodeError> {
        let before = match known.take() {
            Some(known) => known,
            None => self.api.ensure(&self.drained_gpus()).await?,
        };
        let now: Time = truncate_to_seconds(jiff::Timestamp::now());
        let status = carry_over(&before.status, report, before.generation, &now);
        let (now_known, synced) = match status == before.status {
            true => (before, Synced::Unchanged),
            false if defer && !is_urgent(&before.status, &status) => (before, Synced::Deferred),
            false => (
                self.api.write_status(&before, &status).await?,
                Synced::Written,
            ),
        };
        *known = Some(now_known);
        Ok(synced)
    }

    /// The GPUs to drain in the spec of a new object.
    fn drained_gpus(&self) -> BTreeSet<GpuUuid> {
        match &*self.spec.borrow() {
            Some(spec) => spec.drain.clone(),
            None => self.drain.borrow().requested.clone(),
        }
    }
}

/// Takes an observation of the watch. Returns whether the object may need a write.
fn apply_observation(known: &mut Option<ObservedObject>, observation: Observation) -> bool {
    match (observation, known.as_ref()) {
        (Observation::NotFound, _) => {
            *known = None;
            true
        }
        // The next attempt reads the object.
        (Observation::Pending, _) | (Observation::Object { .. }, None) => false,
        (Observation::Object { known: now, .. }, Some(before)) if *now == *before => false,
        // An event may be older than the agent's last write. A list is always current.
        (
            Observation::Object {
                known: now,
                is_listed: false,
            },
            Some(before),
        ) if is_below(&now.resource_version, &before.resource_version) => false,
        (Observation::Object { known: now, .. }, Some(before)) => {
            let changed = now.status != before.status;
            *known = Some(*now);
            changed
        }
    }
}

/// Doubles from `min_backoff` to `max_backoff`, with jitter over half of it, so that nodes do not
/// retry together after an outage.
fn backoff(rate: Rate, failures: u32) -> Duration {
    let full = rate
        .min_backoff
        .saturating_mul(2_u32.saturating_pow(failures.min(16)))
        .min(rate.max_backoff);
    full.mul_f64(rand::random_range(0.5..1.0))
}

#[cfg(test)]
mod tests {
    use bursar_crds::GpuNodeStatus;
    use bursar_crds::gpu_node::{FaultKind, GpuContainer, GpuRuntime, RuntimeState};
    use prometheus_client::registry::Registry;

    use super::*;
    use crate::fixtures::{container, fault, report};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};

    /// An API server in memory that can be unreachable. Clones share its state.
    #[derive(Clone, Default)]
    struct FakeApi(Arc<FakeState>);

    impl std::ops::Deref for FakeApi {
        type Target = FakeState;

        fn deref(&self) -> &FakeState {
            &self.0
        }
    }

    #[derive(Default)]
    struct FakeState {
        object: Mutex<ObservedObject>,
        reads: AtomicUsize,
        writes: AtomicUsize,
        fail_next: AtomicUsize,
    }

    impl FakeApi {
        fn answer(&self) -> Result<(), GpuNodeError> {
            let left = self.fail_next.load(Ordering::SeqCst);
            if left > 0 {
                self.fail_next.store(left - 1, Ordering::SeqCst);
                return Err(GpuNodeError::NotFound { node: "n".into() });
            }
            Ok(())
        }

        fn writes(&self) -> usize {
            self.writes.load(Ordering::SeqCst)
        }
    }

    impl GpuNodeApi for FakeApi {
        async fn ensure(&self, _: &BTreeSet<GpuUuid>) -> Result<ObservedObject, GpuNodeError> {
            self.answer()?;
            self.reads.fetch_add(1, Ordering::SeqCst);
            Ok(self.object.lock().unwrap().clone())
        }

        async fn write_status(
            &self,
            _: &ObservedObject,
            status: &GpuNodeStatus,
        ) -> Result<ObservedObject, GpuNodeError> {
            self.answer()?;
            self.writes.fetch_add(1, Ordering::SeqCst);
            let mut object = self.object.lock().unwrap();
            object.status = status.clone();
            Ok(object.clone())
        }
    }

    const FAST: Rate = Rate {
        batch_delay: Duration::from_millis(20),
        min_interval: Duration::from_millis(50),
        max_interval: Duration::from_millis(50),
        quiet_interval: Duration::from_secs(3),
        min_backoff: Duration::from_millis(5),
        max_backoff: Duration::from_millis(20),
        probe_interval: Duration::from_millis(50),
        request_timeout: Duration::from_secs(10),
    };

    fn publisher(
        fake: &FakeApi,
        reports: watch::Receiver<NodeReport>,
        unreachable_since: watch::Sender<Option<Instant>>,
    ) -> Publisher<FakeApi> {
        Publisher {
            api: fake.clone(),
            reports,
            observed: watch::channel(Observation::Pending).1,
            spec: watch::channel(None).1,
            drain: watch::channel(DrainState::default()).1,
            rate: FAST,
            unreachable_since,
            metrics: ApiMetrics::new(&mut Registry::default()),
        }
    }

    /// Publishes while `act` runs.
    async fn publish_during<F: Future<Output = ()>>(
        fake: &FakeApi,
        act: impl FnOnce(watch::Sender<NodeReport>) -> F,
    ) {
        let (sender, receiver) = watch::channel(report());
        let shutdown = CancellationToken::new();
        let unreachable_since = watch::Sender::new(Some(Instant::now()));
        let publishing = publisher(fake, receiver, unreachable_since).run(shutdown.clone());
        let acting = async {
            act(sender).await;
            shutdown.cancel();
        };
        tokio::join!(publishing, acting);
    }

    fn set_free(reports: &watch::Sender<NodeReport>, free: i32) {
        reports.send_modify(|report| report.status.device_memory.free = free);
    }

    /// Waits until the status in the API server has this `free`.
    async fn wait_until_written(fake: &FakeApi, free: i32) {
        let arrived = async {
            while fake.object.lock().unwrap().status.device_memory.free != free {
                sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), arrived)
            .await
            .expect("the newest report arrives");
    }

    #[tokio::test]
    async fn burst_of_changes_is_one_write() {
        let fake = FakeApi::default();
        publish_during(&fake, async |reports| {
            for free in 0..100 {
                set_free(&reports, free);
            }
            wait_until_written(&fake, 99).await;
        })
        .await;
        assert_eq!(fake.writes(), 1);
    }

    #[tokio::test]
    async fn unchanged_report_is_not_written() {
        let fake = FakeApi::default();
        publish_during(&fake, async |reports| {
            wait_until_written(&fake, 32).await;
            for _ in 0..20 {
                reports.send_modify(|_| {});
                sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
        assert_eq!(fake.writes(), 1);
        assert_eq!(fake.reads.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn tenants_changes_alone_are_written_once_an_interval() {
        let container = |process_generation| GpuContainer {
            process_generation,
            ..container("0f")
        };
        let fake = FakeApi::default();
        let written = |generation: i64| {
            let fake = fake.clone();
            async move {
                let is_there = || {
                    let object = fake.object.lock().unwrap();
                    let mut containers = object.status.containers.iter();
                    containers.any(|container| container.process_generation == generation)
                };
                while !is_there() {
                    sleep(Duration::from_millis(1)).await;
                }
            }
        };
        publish_during(&fake, async |reports| {
            reports.send_modify(|report| report.status.containers = vec![container(1)]);
            written(1).await;
            let (writes, started_at) = (fake.writes(), Instant::now());
            for generation in 2..=10 {
                reports
                    .send_modify(|report| report.status.containers = vec![container(generation)]);
                sleep(Duration::from_millis(30)).await;
            }
            // An urgent change takes the newest number with it.
            let urgent = Instant::now();
            set_free(&reports, 7);
            wait_until_written(&fake, 7).await;
            written(10).await;
            reports.send_modify(|report| report.status.containers = vec![container(11)]);
            written(11).await;
            let took = urgent.elapsed();
            assert!(took >= FAST.quiet_interval, "written after {took:?}");
            let intervals = started_at.elapsed().as_secs() / FAST.quiet_interval.as_secs();
            let most = usize::try_from(intervals).unwrap() + 2;
            assert!(fake.writes() - writes <= most, "{} writes", fake.writes());
        })
        .await;
    }

    #[tokio::test]
    async fn constant_change_is_written_no_faster_than_the_rate() {
        let fake = FakeApi::default();
        let start = Instant::now();
        publish_during(&fake, async |reports| {
            for free in 0..200 {
                set_free(&reports, free);
                sleep(Duration::from_millis(2)).await;
            }
            wait_until_written(&fake, 199).await;
        })
        .await;
        let most = start.elapsed().as_millis() / FAST.min_interval.as_millis() + 1;
        assert!(
            (fake.writes() as u128) <= most,
            "{} > {most}",
            fake.writes()
        );
    }

    #[tokio::test]
    async fn newest_report_is_written_after_an_outage() {
        let fake = FakeApi::default();
        fake.fail_next.store(5, Ordering::SeqCst);
        publish_during(&fake, async |reports| {
            while fake.fail_next.load(Ordering::SeqCst) > 2 {
                sleep(Duration::from_millis(1)).await;
            }
            set_free(&reports, 7);
            wait_until_written(&fake, 7).await;
        })
        .await;
        assert_eq!(fake.fail_next.load(Ordering::SeqCst), 0);
    }

    #[tokio::test]
    async fn outage_has_its_start_until_a_request_succeeds() {
        let fake = FakeApi::default();
        fake.fail_next.store(usize::MAX, Ordering::SeqCst);
        let (_sender, receiver) = watch::channel(report());
        let (unreachable_since, mut since) = watch::channel(None);
        let shutdown = CancellationToken::new();
        let publishing = publisher(&fake, receiver, unreachable_since).run(shutdown.clone());
        let acting = async {
            let first = *since.wait_for(Option::is_some).await.unwrap();
            sleep(Duration::from_millis(50)).await;
            assert_eq!(*since.borrow(), first, "it is the first failure's time");
            fake.fail_next.store(0, Ordering::SeqCst);
            since.wait_for(Option::is_none).await.unwrap();
            shutdown.cancel();
        };
        tokio::join!(publishing, acting);
    }

    /// Lets the API server go away while a fault is open, and expects that the publisher notices it
    /// without a write. `change` changes the report all the while.
    async fn notice_outage(change: impl Fn(&mut NodeReport)) {
        let fake = FakeApi::default();
        let mut report = report();
        report.status.faults = vec![fault("f", FaultKind::Context, 1)];
        change(&mut report);
        let (sender, receiver) = watch::channel(report);
        let (unreachable_since, mut since) = watch::channel(Some(Instant::now()));
        let shutdown = CancellationToken::new();
        let mut publisher = publisher(&fake, receiver, unreachable_since);
        publisher.rate.quiet_interval = Duration::from_secs(60);
        let publishing = publisher.run(shutdown.clone());
        let acting = async {
            since.wait_for(Option::is_none).await.unwrap();
            let written = fake.writes();
            fake.fail_next.store(usize::MAX, Ordering::SeqCst);
            let changing = async {
                loop {
                    sender.send_modify(&change);
                    tokio::time::sleep(FAST.probe_interval / 5).await;
                }
            };
            let noticed = since.wait_for(Option::is_some);
            let noticed = tokio::time::timeout(Duration::from_secs(20), noticed);
            tokio::select! {
                noticed = noticed => drop(noticed.expect("a look fails").unwrap()),
                () = changing => {}
            }
            assert_eq!(fake.writes(), written, "nothing is written for it");
            shutdown.cancel();
        };
        tokio::join!(publishing, acting);
    }

    #[tokio::test]
    async fn outage_is_noticed_while_a_fault_is_open() {
        notice_outage(|_| {}).await;
    }

    #[tokio::test]
    async fn outage_is_noticed_while_counts_of_runtimes_change() {
        notice_outage(|report| {
            let gpu = report.status.gpus.first_mut().unwrap();
            let runtime = gpu.runtime.get_or_insert_with(|| GpuRuntime {
                state: RuntimeState::Starting,
                starts: 0,
                lent: "0".into(),
                failures: 0,
                reason: String::new(),
            });
            runtime.starts += 1;
        })
        .await;
    }

    #[tokio::test(start_paused = true)]
    async fn slow_api_server_gets_fewer_writes() {
        for (took_millis, pause_secs) in [(0, 1), (10, 1), (30, 3), (5_000, 10)] {
            let mut schedule = Schedule::new(Rate::default());
            let started_at = Instant::now();
            sleep(Duration::from_millis(took_millis)).await;
            schedule.plan_after(&Ok(Synced::Written), started_at, false);
            let pause = schedule.next_write - Instant::now();
            assert_eq!(pause.as_secs(), pause_secs, "after {took_millis} ms");
        }
    }

    #[test]
    fn backoff_grows_to_its_bound() {
        let rate = Rate::default();
        for failures in 0..100 {
            let wait = backoff(rate, failures);
            assert!(wait >= rate.min_backoff / 2 && wait <= rate.max_backoff);
        }
        assert!(backoff(rate, 20) >= rate.max_backoff / 2);
    }
}
