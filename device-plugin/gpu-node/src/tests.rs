//! Tests the agent against a simulated API server in virtual time.
//!
//! The spec arrives and the status is written through deletions, restores of etcd and objects of
//! other versions. Both also happen through every fault of a write or a watch.

use prometheus_client::registry::Registry;
use std::time::Duration;

use axum::http::StatusCode;
use bursar_apiserver::gpu_node::GpuNodeClient;
use bursar_apiserver::metrics::ApiMetrics;
use bursar_apiserver::spec_watch::{self, Observation, WatchOutput};
use bursar_apiserver::{ParsedSpec, namespaces};
use bursar_gpu::drain::DrainState;
use bursar_ledger::units::GpuUuid;
use bursar_sim_api::{Faults, FaultyWrites, SimApiServer, WatchFault, WriteFault};
use bursar_watch::History;
use kube::Client;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::fixtures::report;
use super::publish::{Publisher, Rate};
use super::report::NodeReport;

/// The final state is reached within this time after any one fault.
const PROMISED_TIME: Duration = Duration::from_secs(30);

/// The final state is reached within this time if the watch's connection dies in silence at each
/// event of a change. The agent notices each time after 205 s.
const STALLED_TIME: Duration = Duration::from_secs(900);

const KIND: &str = "gpunodes";
const NODE: &str = "n";

fn gpu(number: i32) -> GpuUuid {
    format!("GPU-{number}").parse().unwrap()
}

fn node(uid: &str) -> Value {
    json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": NODE, "uid": uid } })
}

/// The publisher and the spec watch of an agent, with their API server.
struct Fixture {
    api: SimApiServer,
    reports: watch::Sender<NodeReport>,
    spec: watch::Receiver<Option<ParsedSpec>>,
    unreachable_since: watch::Receiver<Option<Instant>>,
    generation: i64,
    stop: CancellationToken,
}

impl Fixture {
    fn start() -> Self {
        let api = SimApiServer::start();
        api.put("nodes", node("first"));
        let client = api.client();
        Self::start_with(api, client, DrainState::default())
    }

    fn start_with(api: SimApiServer, client: Client, drain: DrainState) -> Self {
        let (reports, report_receiver) = watch::channel(report());
        let (orders, ordered) = watch::channel(None);
        let (observation_sender, observation) = watch::channel(Observation::Pending);
        let (outage_sender, outage) = watch::channel(Some(Instant::now()));
        let (history, stop, metrics) = (
            History::default(),
            CancellationToken::new(),
            ApiMetrics::new(&mut Registry::default()),
        );
        let publisher = Publisher {
            api: GpuNodeClient::new(client.clone(), NODE, history.clone()),
            reports: report_receiver,
            observed: observation,
            spec: ordered.clone(),
            drain: watch::channel(drain).1,
            rate: Rate::default(),
            unreachable_since: outage_sender,
            metrics: metrics.clone(),
        };
        tokio::spawn(publisher.run(stop.clone()));
        let output = WatchOutput {
            spec: orders,
            observed: observation_sender,
            metrics,
        };
        tokio::spawn(spec_watch::run(
            client,
            NODE.to_owned(),
            history,
            output,
            stop.clone(),
        ));
        Self {
            api,
            reports,
            spec: ordered,
            unreachable_since: outage,
            generation: 1,
            stop,
        }
    }

    fn object(&self) -> Value {
        self.api.get(KIND, "", NODE)
    }

    fn report_free(&self, free: i32) {
        self.reports
            .send_modify(|report| report.status.device_memory.free = free);
    }

    fn has_free(&self, free: i32) -> bool {
        self.object()["status"]["deviceMemory"]["free"] == free
    }

    fn drained_gpus(&self) -> Vec<GpuUuid> {
        let orders = self.spec.borrow();
        let drain = orders.iter().flat_map(|orders| &orders.drain);
        drain.cloned().collect()
    }

    /// Writes the spec as the operator does.
    fn write_spec(&mut self, spec: Value) {
        let mut object = self.object();
        self.generation += 1;
        object["metadata"]["generation"] = json!(self.generation);
        object["spec"] = spec;
        self.api.put(KIND, object);
    }

    async fn wait_until(&self, context: &str, within: Duration, done: impl Fn(&Self) -> bool) {
        let reached = async {
            while !done(self) {
                sleep(Duration::from_millis(10)).await;
            }
        };
        let outcome = timeout(within, reached).await;
        assert!(
            outcome.is_ok(),
            "{context}: not within {within:?}; object {}, orders {:?}, writes {:?}",
            self.object(),
            self.spec.borrow(),
            self.api.writes()
        );
    }

    async fn wait_until_written(&self) {
        self.wait_until_written_within(PROMISED_TIME).await;
    }

    async fn wait_until_written_within(&self, within: Duration) {
        self.wait_until("the report is written", within, |fixture| {
            fixture.has_free(32) && fixture.spec.borrow().is_some()
        })
        .await;
    }

    /// Asserts that nothing is written for a minute.
    async fn assert_quiet(&self, context: &str) {
        sleep(Duration::from_secs(5)).await;
        let before = self.api.writes().len();
        sleep(Duration::from_secs(60)).await;
        let writes = self.api.writes().split_off(before);
        assert!(writes.is_empty(), "{context}: {writes:?}");
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

#[tokio::test(start_paused = true)]
async fn deleted_object_is_created_again_within_seconds() {
    let fixture = Fixture::start();
    fixture.wait_until_written().await;
    for _ in 0..3 {
        fixture.api.delete(KIND, "", NODE);
        let within = Duration::from_secs(3);
        fixture
            .wait_until("the object is created again", within, |fixture| {
                fixture.has_free(32)
            })
            .await;
    }
    fixture.assert_quiet("a deletion").await;
}

#[tokio::test(start_paused = true)]
async fn object_is_owned_by_the_current_node() {
    let fixture = Fixture::start();
    fixture.wait_until_written().await;
    let owner =
        |fixture: &Fixture| fixture.object()["metadata"]["ownerReferences"][0]["uid"].clone();
    assert_eq!(owner(&fixture), "first");
    fixture.api.put("nodes", node("second"));
    // The garbage collector deletes an object whose owner is gone.
    fixture.api.delete(KIND, "", NODE);
    fixture
        .wait_until(
            "the object has the current owner",
            Duration::from_secs(3),
            |fixture| owner(fixture) == "second",
        )
        .await;
    // A restarted agent finds an object that the garbage collector has not deleted yet.
    fixture.stop.cancel();
    fixture.api.put("nodes", node("third"));
    let fixture = Fixture::start_with(
        fixture.api.clone(),
        fixture.api.client(),
        DrainState::default(),
    );
    fixture
        .wait_until("the object has the third owner", PROMISED_TIME, |fixture| {
            owner(fixture) == "third"
        })
        .await;
    let owners = fixture.object()["metadata"]["ownerReferences"].clone();
    assert_eq!(owners.as_array().map(Vec::len), Some(1), "{owners}");
}

#[tokio::test(start_paused = true)]
async fn drain_outlives_the_object_whose_spec_named_it() {
    let mut fixture = Fixture::start();
    fixture.wait_until_written().await;
    fixture.write_spec(json!({ "drain": ["GPU-1"] }));
    fixture
        .wait_until("the drain arrives", PROMISED_TIME, |fixture| {
            fixture.drained_gpus() == [gpu(1)]
        })
        .await;
    let mut orders = fixture.spec.clone();
    let lifted = tokio::spawn(async move {
        let lifted = |orders: &Option<ParsedSpec>| {
            !orders
                .as_ref()
                .is_some_and(|orders| orders.drain.contains(&gpu(1)))
        };
        orders.wait_for(lifted).await.is_ok()
    });
    fixture.api.delete(KIND, "", NODE);
    fixture
        .wait_until("the object is created again", PROMISED_TIME, |fixture| {
            fixture.has_free(32)
        })
        .await;
    sleep(PROMISED_TIME).await;
    assert!(
        !lifted.is_finished(),
        "the drain was lifted by the deletion"
    );
    assert_eq!(fixture.object()["spec"]["drain"], json!(["GPU-1"]));
    fixture.generation = 1;
    fixture.write_spec(json!({}));
    fixture
        .wait_until("it is lifted", PROMISED_TIME, |fixture| {
            fixture.drained_gpus().is_empty()
        })
        .await;
    assert!(lifted.is_finished());
}

#[tokio::test(start_paused = true)]
async fn drain_on_record_outlives_object_and_agent() {
    let api = SimApiServer::start();
    api.put("nodes", node("first"));
    let drain = DrainState {
        requested: [gpu(1)].into(),
        ..DrainState::default()
    };
    let client = api.client();
    let fixture = Fixture::start_with(api, client, drain);
    fixture.wait_until_written().await;
    assert_eq!(fixture.drained_gpus(), [gpu(1)]);
    assert_eq!(fixture.object()["spec"]["drain"], json!(["GPU-1"]));
}

#[tokio::test(start_paused = true)]
async fn spec_and_status_follow_a_restored_etcd() {
    let mut fixture = Fixture::start();
    fixture.wait_until_written().await;
    fixture.write_spec(json!({ "drain": ["GPU-1"] }));
    fixture
        .wait_until("the drain arrives", PROMISED_TIME, |fixture| {
            fixture.drained_gpus() == [gpu(1)]
        })
        .await;
    let backup = fixture.api.backup();
    for free in 0..20 {
        fixture.report_free(free);
        fixture
            .wait_until("it is written", PROMISED_TIME, |fixture| {
                fixture.has_free(free)
            })
            .await;
    }
    fixture.write_spec(json!({ "drain": ["GPU-2"] }));
    fixture
        .wait_until("the drain arrives", PROMISED_TIME, |fixture| {
            fixture.drained_gpus() == [gpu(2)]
        })
        .await;
    fixture.api.restore(&backup);
    let within = Duration::from_secs(10);
    fixture
        .wait_until("the restored drain arrives", within, |fixture| {
            fixture.drained_gpus() == [gpu(1)]
        })
        .await;
    fixture
        .wait_until("the report is written", within, |fixture| {
            fixture.has_free(19)
        })
        .await;
    fixture.write_spec(json!({}));
    fixture
        .wait_until("a new spec arrives", within, |fixture| {
            fixture.drained_gpus().is_empty()
        })
        .await;
    fixture.assert_quiet("a restore").await;
}

#[tokio::test(start_paused = true)]
async fn context_policies_are_those_of_the_gpu_namespaces() {
    let api = SimApiServer::start();
    let policies = watch::Sender::default();
    let metrics = ApiMetrics::new(&mut Registry::default());
    let stop = CancellationToken::new();
    tokio::spawn(namespaces::run(
        api.client(),
        policies.clone(),
        metrics,
        stop.clone(),
    ));
    let put = |name: &str, most: i32| {
        api.put(
            "gpunamespaces",
            json!({ "metadata": { "name": name },
            "spec": { "contextPolicy": { "action": "Report", "maxRestarts": most } } }),
        );
    };
    let until = async |wanted: &[(&str, i32)]| {
        let known = || {
            let all = policies.borrow().clone().unwrap_or_default();
            let all = all.into_iter();
            all.map(|(name, policy)| (name, policy.max_restarts))
                .collect::<Vec<_>>()
        };
        let wanted: Vec<_> = wanted
            .iter()
            .map(|(name, most)| ((*name).to_owned(), *most))
            .collect();
        let same = async {
            while known() != wanted {
                sleep(Duration::from_millis(10)).await;
            }
        };
        assert!(timeout(PROMISED_TIME, same).await.is_ok(), "{:?}", known());
    };
    put("a", 1);
    until(&[("a", 1)]).await;
    put("b", 2);
    put("a", 3);
    until(&[("a", 3), ("b", 2)]).await;
    api.delete("gpunamespaces", "", "a");
    until(&[("b", 2)]).await;
    // After a restore of etcd the agent lists again, and drops what is not there.
    let backup = api.backup();
    put("c", 4);
    api.delete("gpunamespaces", "", "b");
    until(&[("c", 4)]).await;
    api.restore(&backup);
    until(&[("b", 2)]).await;
    stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn spec_of_another_version_stops_nothing_else() {
    let mut fixture = Fixture::start();
    fixture.wait_until_written().await;
    fixture.write_spec(json!({
        "reservations": [{ "gpu": "GPU-1", "share": 0.5 }],
        "restarts": [{ "fault": "f", "podUid": "u", "container": "c", "processGeneration": 3 }],
        "drain": ["GPU-1"],
    }));
    let mut object = fixture.object();
    object["status"]["gpus"][0]["state"] = json!("Hibernating");
    object["status"]["gpus"][1]["memory"] = json!({ "total": "1Gi" });
    fixture.api.put(KIND, object);
    fixture
        .wait_until("the drain arrives", PROMISED_TIME, |fixture| {
            fixture.drained_gpus() == [gpu(1)]
        })
        .await;
    let orders = fixture.spec.borrow().clone().unwrap();
    assert_eq!(orders.restarts.len(), 1);
    assert_eq!(orders.unrecognized, ["reservations[0]"]);
    fixture.report_free(7);
    fixture
        .wait_until("the status is written", PROMISED_TIME, |fixture| {
            fixture.has_free(7)
        })
        .await;
    assert_eq!(fixture.object()["status"]["gpus"][0]["state"], "Active");
    sleep(Duration::from_secs(60)).await;
    assert_eq!(
        *fixture.unreachable_since.borrow(),
        None,
        "the API server is there"
    );
}

#[tokio::test(start_paused = true)]
async fn status_and_spec_arrive_through_every_watch_fault() {
    let watch_faults = [
        WatchFault::Delayed,
        WatchFault::Lagging,
        WatchFault::Duplicated,
        WatchFault::Replayed,
        WatchFault::Disconnected,
        WatchFault::Expired,
        WatchFault::Stalled,
    ];
    for watch_fault in watch_faults {
        let context = format!("{watch_fault:?}");
        let promised = match watch_fault {
            WatchFault::Stalled => STALLED_TIME,
            _ => PROMISED_TIME,
        };
        let api = SimApiServer::start();
        api.put("nodes", node("first"));
        let faults = Faults::for_all_objects(WriteFault::RequestDropped, watch_fault);
        let client = api.client_with_faults(&faults);
        let mut fixture = Fixture::start_with(api, client, DrainState::default());
        fixture.wait_until_written_within(promised).await;
        if watch_fault == WatchFault::Lagging {
            // From now on the API server's watch cache lags behind.
            sleep(Duration::from_secs(15)).await;
        }
        for round in 0..8 {
            fixture.write_spec(json!({ "drain": [format!("GPU-{round}")] }));
            fixture.report_free(round);
            fixture
                .wait_until(&context, promised, |fixture| {
                    fixture.has_free(round) && fixture.drained_gpus() == [gpu(round)]
                })
                .await;
        }
        fixture.api.delete(KIND, "", NODE);
        fixture
            .wait_until(&context, promised, |fixture| fixture.has_free(7))
            .await;
        fixture.assert_quiet(&context).await;
        assert_eq!(fixture.drained_gpus(), [gpu(7)], "{context}");
        let faulted: usize = faults.faulted_events().values().sum();
        assert!(faulted >= 3, "{context}: {faulted} events were disturbed");
    }
}

#[tokio::test(start_paused = true)]
async fn status_arrives_through_every_write_fault() {
    let write_faults = [
        WriteFault::Refused(StatusCode::CONFLICT),
        WriteFault::Refused(StatusCode::TOO_MANY_REQUESTS),
        WriteFault::Refused(StatusCode::INTERNAL_SERVER_ERROR),
        WriteFault::RequestDropped,
        WriteFault::ResponseDropped,
        WriteFault::ErrorAfterWrite,
    ];
    for write_fault in write_faults {
        for faulty_write in 1..=3 {
            let context = format!("write {faulty_write}: {write_fault:?}");
            let api = SimApiServer::start();
            api.put("nodes", node("first"));
            let faults = Faults::for_all_objects(write_fault, WatchFault::NoFault);
            faults.set_faulty_writes(FaultyWrites::Nth(faulty_write));
            let client = api.client_with_faults(&faults);
            let fixture = Fixture::start_with(api, client, DrainState::default());
            fixture
                .wait_until(&context, PROMISED_TIME, |fixture| fixture.has_free(32))
                .await;
            fixture.report_free(7);
            fixture
                .wait_until(&context, PROMISED_TIME, |fixture| fixture.has_free(7))
                .await;
            fixture.assert_quiet(&context).await;
            assert_eq!(faults.fault_count(), 1, "{context}");
            assert_eq!(*fixture.unreachable_since.borrow(), None, "{context}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn lost_answer_counts_as_outage_from_its_request() {
    let api = SimApiServer::start();
    api.put("nodes", node("first"));
    let faults = Faults::for_all_objects(WriteFault::RequestDropped, WatchFault::NoFault);
    let client = api.client_with_faults(&faults);
    let fixture = Fixture::start_with(api, client, DrainState::default());
    fixture.wait_until_written().await;
    assert_eq!(*fixture.unreachable_since.borrow(), None);
    faults.set_faulty_writes(FaultyWrites::FirstAttempts);
    let started = Instant::now();
    fixture.report_free(7);
    fixture
        .wait_until("it is noticed", PROMISED_TIME, |fixture| {
            fixture.unreachable_since.borrow().is_some()
        })
        .await;
    let since = fixture.unreachable_since.borrow().unwrap();
    assert!(
        since - started < Duration::from_secs(2),
        "{:?}",
        since - started
    );
    fixture
        .wait_until("it is written", PROMISED_TIME, |fixture| {
            fixture.has_free(7)
        })
        .await;
    assert_eq!(*fixture.unreachable_since.borrow(), None);
}
