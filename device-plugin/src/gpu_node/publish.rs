//! Writes the node's report to its `GpuNode` when it changed, at a bounded rate.
//!
//! ```text
//!   a new report, an object that is not as it was written --> gather (more may follow) --> render --> same: nothing
//!                         ^                           \--> write --> ok: quiet for `between`
//!                         |                                     \--> failed: back off, then the newest report
//!                         +------------------------------------------+
//! ```

use std::collections::BTreeSet;
use std::time::Duration;

use bursar_watch::is_below;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::api::{GpuNodeApi, GpuNodeError, ObservedObject};
use super::render::{render, truncate_to_seconds};
use super::report::NodeReport;
use super::spec_watch::Observation;
use crate::gpu::drain::DrainState;
use crate::gpu_node::quota_overrides::ParsedSpec;
use crate::metrics::Metrics;
use crate::units::GpuUuid;

/// How often the object may be written.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    /// How long a change waits for others to come with it.
    pub batch_delay: Duration,
    /// From one write to the next.
    pub min_interval: Duration,
    /// The first wait after a failure; doubled from then on.
    pub min_backoff: Duration,
    /// The longest wait after a failure.
    pub max_backoff: Duration,
    /// From one look at the API server to the next while a fault is open: whoever leaves it to somebody else has to notice
    /// that nobody can be reached.
    pub probe_interval: Duration,
    /// How long the requests of one attempt may take together.
    pub request_timeout: Duration,
}

impl Default for Rate {
    /// One write a second at most: 1,000 nodes in uproar cost the API server 10 s of work (10 ms each).
    fn default() -> Self {
        Self {
            batch_delay: Duration::from_millis(100),
            min_interval: Duration::from_secs(1),
            min_backoff: Duration::from_millis(500),
            max_backoff: Duration::from_secs(10),
            probe_interval: Duration::from_secs(10),
            request_timeout: Duration::from_secs(10),
        }
    }
}

/// Keeps the `GpuNode` of this node at what the agent reports.
pub struct Publisher<O> {
    /// The object.
    pub api: O,
    /// What the agent reports.
    pub reports: watch::Receiver<NodeReport>,
    /// What the watch of the object tells.
    pub observed: watch::Receiver<Observation>,
    /// What the object orders.
    pub spec: watch::Receiver<Option<ParsedSpec>>,
    /// The GPUs that are drained, also by the orders of an object that an earlier agent read.
    pub drain: watch::Receiver<DrainState>,
    /// How often the object may be written.
    pub rate: Rate,
    /// Since when the API server is away; none while it answers.
    pub unreachable_since: watch::Sender<Option<Instant>>,
    /// Where writes are counted.
    pub metrics: Metrics,
}

impl<O: GpuNodeApi> Publisher<O> {
    /// Works until `shutdown`, or until there are no more reports. The API server being away is waited out.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let rate = self.rate;
        let mut known = None;
        let mut failures = 0;
        let mut next_write = Instant::now();
        self.reports.mark_changed();
        loop {
            let open = !self.reports.borrow().faults.is_empty();
            tokio::select! {
                () = shutdown.cancelled() => return,
                changed = self.reports.changed() => if changed.is_err() { return },
                Ok(()) = self.observed.changed() => {
                    let seen = self.observed.borrow_and_update().clone();
                    if !apply_observation(&mut known, seen) {
                        continue;
                    }
                }
                () = sleep(rate.probe_interval), if open => known = None,
            }
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = async { sleep(rate.batch_delay).await; sleep_until(next_write).await } => {}
            }
            let report = self.reports.borrow_and_update().clone();
            let begun = Instant::now();
            let outcome = tokio::select! {
                () = shutdown.cancelled() => return,
                outcome = timeout(rate.request_timeout, self.sync(&mut known, &report)) => outcome,
            };
            let outcome = outcome.unwrap_or(Err(GpuNodeError::Timeout {
                within: rate.request_timeout,
            }));
            self.unreachable_since.send_if_modified(|since| {
                let before = *since;
                *since = match &outcome {
                    Ok(_) => None,
                    Err(_) => before.or(Some(begun)),
                };
                *since != before
            });
            match outcome {
                Ok(false) => {}
                Ok(true) => {
                    if failures > 0 {
                        info!(failures, "GpuNode is written again");
                    }
                    failures = 0;
                    self.metrics.count_gpu_node_write(true);
                    next_write = Instant::now() + rate.min_interval;
                }
                Err(error) => {
                    // What the API server has is unknown after a failure: a write may have arrived.
                    known = None;
                    self.metrics.count_gpu_node_write(false);
                    if failures == 0 {
                        warn!(
                            error = &error as &dyn std::error::Error,
                            "GpuNode is not written"
                        );
                    }
                    next_write = Instant::now() + backoff(rate, failures);
                    failures += 1;
                    self.reports.mark_changed();
                }
            }
        }
    }

    /// Writes `report` if the object says something else. True if it wrote.
    async fn sync(
        &self,
        known: &mut Option<ObservedObject>,
        report: &NodeReport,
    ) -> Result<bool, GpuNodeError> {
        let before = match known.take() {
            Some(known) => known,
            None => self.api.ensure(&self.drained_gpus()).await?,
        };
        let now: Time = truncate_to_seconds(jiff::Timestamp::now());
        let status = render(report, &before.status, before.generation, &now);
        let same = status == before.status;
        *known = Some(match same {
            true => before,
            false => self.api.write_status(&before, &status).await?,
        });
        Ok(!same)
    }

    /// The GPUs that an object is made with where it is missing.
    fn drained_gpus(&self) -> BTreeSet<GpuUuid> {
        match &*self.spec.borrow() {
            Some(orders) => orders.drain.clone(),
            None => self.drain.borrow().requested.clone(),
        }
    }
}

/// Takes over what the watch told. Whether the object may have to be made or written.
fn apply_observation(known: &mut Option<ObservedObject>, seen: Observation) -> bool {
    match (seen, known.as_ref()) {
        (Observation::NotFound, _) => {
            *known = None;
            true
        }
        // The next attempt asks for the object as it is.
        (Observation::Pending, _) | (Observation::Object { .. }, None) => false,
        (Observation::Object { known: now, .. }, Some(before)) if *now == *before => false,
        // A late event tells what was so before the agent's last write. A list tells what is so.
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

/// Doubles from `min_backoff` to `max_backoff`, spread over half of it: nodes that lost the API server
/// together must not come back together.
fn backoff(rate: Rate, failures: u32) -> Duration {
    let full = rate
        .min_backoff
        .saturating_mul(2_u32.saturating_pow(failures.min(16)))
        .min(rate.max_backoff);
    full.mul_f64(rand::random_range(0.5..1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu_node::fixtures::report;
    use crate::gpu_node::report::FaultReport;
    use bursar_crds::GpuNodeStatus;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};

    /// An API server in memory that can be away. Clones are the same one.
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
            let mut kept = self.object.lock().unwrap();
            kept.status = status.clone();
            Ok(kept.clone())
        }
    }

    const FAST: Rate = Rate {
        batch_delay: Duration::from_millis(20),
        min_interval: Duration::from_millis(50),
        min_backoff: Duration::from_millis(5),
        max_backoff: Duration::from_millis(20),
        probe_interval: Duration::from_millis(50),
        request_timeout: Duration::from_secs(10),
    };

    fn publisher(
        fake: &FakeApi,
        reports: watch::Receiver<NodeReport>,
        unheard: watch::Sender<Option<Instant>>,
    ) -> Publisher<FakeApi> {
        Publisher {
            api: fake.clone(),
            reports,
            observed: watch::channel(Observation::Pending).1,
            spec: watch::channel(None).1,
            drain: watch::channel(DrainState::default()).1,
            rate: FAST,
            unreachable_since: unheard,
            metrics: Metrics::new(),
        }
    }

    /// Publishes while `act` goes on.
    async fn publish_during<F: Future<Output = ()>>(
        fake: &FakeApi,
        act: impl FnOnce(watch::Sender<NodeReport>) -> F,
    ) {
        let (sender, receiver) = watch::channel(report());
        let shutdown = CancellationToken::new();
        let unheard = watch::Sender::new(Some(Instant::now()));
        let publishing = publisher(fake, receiver, unheard).run(shutdown.clone());
        let acting = async {
            act(sender).await;
            shutdown.cancel();
        };
        tokio::join!(publishing, acting);
    }

    fn set_free(reports: &watch::Sender<NodeReport>, free: u32) {
        reports.send_modify(|report| report.device_memory.free.0 = free);
    }

    /// Waits until the API server has `free`.
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
        let (unheard, mut since) = watch::channel(None);
        let shutdown = CancellationToken::new();
        let publishing = publisher(&fake, receiver, unheard).run(shutdown.clone());
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

    #[tokio::test]
    async fn outage_is_noticed_while_a_fault_is_open() {
        let fake = FakeApi::default();
        let mut report = report();
        report.faults = vec![FaultReport {
            id: "f".to_owned(),
            gpu: "GPU-0".parse().unwrap(),
            gpu_generation: 1,
            cuda_error: Some(700),
            xid: None,
            action: None,
            image: None,
            time: None,
        }];
        let (_sender, receiver) = watch::channel(report);
        let (unheard, mut since) = watch::channel(Some(Instant::now()));
        let shutdown = CancellationToken::new();
        let publishing = publisher(&fake, receiver, unheard).run(shutdown.clone());
        let acting = async {
            since.wait_for(Option::is_none).await.unwrap();
            let written = fake.writes();
            fake.fail_next.store(usize::MAX, Ordering::SeqCst);
            let noticed = since.wait_for(Option::is_some);
            let noticed = tokio::time::timeout(Duration::from_secs(20), noticed).await;
            noticed.expect("a look fails").unwrap();
            assert_eq!(fake.writes(), written, "nothing is written for it");
            shutdown.cancel();
        };
        tokio::join!(publishing, acting);
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
