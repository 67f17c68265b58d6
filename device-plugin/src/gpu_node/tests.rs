//! The agent's own way to the API server, in virtual time: what is ordered is heard and the report
//! is written, through deletions, restores of etcd, objects of another version, and every fault of
//! a write or a watch.

use std::time::Duration;

use axum::http::StatusCode;
use bursar_sim_api::{Api, Doomed, Fate, Faults, Telling};
use bursar_watch::History;
use kube::Client;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::api::ApiObject;
use super::fixtures::report;
use super::publish::{Publisher, Rate};
use super::report::NodeReport;
use super::spec_watch::{self, Seen, Told};
use crate::gpu::drain::Drain;
use crate::gpu_node::quota_overrides::Orders;
use crate::metrics::Metrics;
use crate::units::GpuUuid;

/// The end state is reached within this time, whatever happens to one write or event.
const PROMISED: Duration = Duration::from_secs(30);

const KIND: &str = "gpunodes";
const NODE: &str = "n";

fn gpu(number: u32) -> GpuUuid {
    format!("GPU-{number}").parse().unwrap()
}

fn node(uid: &str) -> Value {
    json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": NODE, "uid": uid } })
}

/// An agent's status and orders over an API server.
struct Bed {
    api: Api,
    reports: watch::Sender<NodeReport>,
    orders: watch::Receiver<Option<Orders>>,
    unheard: watch::Receiver<Option<Instant>>,
    generation: i64,
    stop: CancellationToken,
}

impl Bed {
    fn start() -> Self {
        let api = Api::start();
        api.put("nodes", node("first"));
        let client = api.client();
        Self::over(api, client, Drain::default())
    }

    fn over(api: Api, client: Client, drain: Drain) -> Self {
        let (reports, reported) = watch::channel(report());
        let (orders, ordered) = watch::channel(None);
        let (seen, sees) = watch::channel(Seen::Nothing);
        let (unheard, since) = watch::channel(Some(Instant::now()));
        let (history, stop, metrics) =
            (History::default(), CancellationToken::new(), Metrics::new());
        let publisher = Publisher {
            object: ApiObject::new(client.clone(), NODE, history.clone()),
            reports: reported,
            seen: sees,
            orders: ordered.clone(),
            drain: watch::channel(drain).1,
            rate: Rate::default(),
            unheard,
            metrics: metrics.clone(),
        };
        tokio::spawn(publisher.run(stop.clone()));
        let told = Told {
            orders,
            seen,
            metrics,
        };
        tokio::spawn(spec_watch::run(
            client,
            NODE.to_owned(),
            history,
            told,
            stop.clone(),
        ));
        Self {
            api,
            reports,
            orders: ordered,
            unheard: since,
            generation: 1,
            stop,
        }
    }

    fn object(&self) -> Value {
        self.api.get(KIND, "", NODE)
    }

    fn report_free(&self, free: u32) {
        self.reports
            .send_modify(|report| report.device_memory.free.0 = free);
    }

    fn has_free(&self, free: u32) -> bool {
        self.object()["status"]["deviceMemory"]["free"] == free
    }

    fn drains(&self) -> Vec<GpuUuid> {
        let orders = self.orders.borrow();
        let drain = orders.iter().flat_map(|orders| &orders.drain);
        drain.cloned().collect()
    }

    /// Somebody else writes the spec.
    fn order(&mut self, spec: Value) {
        let mut object = self.object();
        self.generation += 1;
        object["metadata"]["generation"] = json!(self.generation);
        object["spec"] = spec;
        self.api.put(KIND, object);
    }

    async fn until(&self, what: &str, within: Duration, done: impl Fn(&Self) -> bool) {
        let reached = async {
            while !done(self) {
                sleep(Duration::from_millis(10)).await;
            }
        };
        let outcome = timeout(within, reached).await;
        assert!(
            outcome.is_ok(),
            "{what}: not within {within:?}; object {}, orders {:?}, writes {:?}",
            self.object(),
            self.orders.borrow(),
            self.api.writes()
        );
    }

    async fn until_written(&self) {
        self.until("the report is written", PROMISED, |bed| {
            bed.has_free(32) && bed.orders.borrow().is_some()
        })
        .await;
    }

    /// Nothing is written for a minute.
    async fn until_quiet(&self, what: &str) {
        sleep(Duration::from_secs(5)).await;
        let before = self.api.writes().len();
        sleep(Duration::from_secs(60)).await;
        let writes = self.api.writes().split_off(before);
        assert!(writes.is_empty(), "{what}: {writes:?}");
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

#[tokio::test(start_paused = true)]
async fn deleted_object_is_made_again_within_seconds() {
    let bed = Bed::start();
    bed.until_written().await;
    for _ in 0..3 {
        bed.api.delete(KIND, "", NODE);
        let within = Duration::from_secs(3);
        bed.until("it is made again", within, |bed| bed.has_free(32))
            .await;
    }
    bed.until_quiet("a deletion").await;
}

#[tokio::test(start_paused = true)]
async fn object_is_owned_by_the_node_as_registered_now() {
    let bed = Bed::start();
    bed.until_written().await;
    let owner = |bed: &Bed| bed.object()["metadata"]["ownerReferences"][0]["uid"].clone();
    assert_eq!(owner(&bed), "first");
    bed.api.put("nodes", node("second"));
    // As the garbage collector does.
    bed.api.delete(KIND, "", NODE);
    bed.until("it has the present owner", Duration::from_secs(3), |bed| {
        owner(bed) == "second"
    })
    .await;
    // A restarted agent finds an object that the garbage collector has not come to.
    bed.stop.cancel();
    bed.api.put("nodes", node("third"));
    let bed = Bed::over(bed.api.clone(), bed.api.client(), Drain::default());
    bed.until("it is handed over", PROMISED, |bed| owner(bed) == "third")
        .await;
    let owners = bed.object()["metadata"]["ownerReferences"].clone();
    assert_eq!(owners.as_array().map(Vec::len), Some(1), "{owners}");
}

#[tokio::test(start_paused = true)]
async fn drain_outlives_the_object_that_ordered_it() {
    let mut bed = Bed::start();
    bed.until_written().await;
    bed.order(json!({ "drain": ["GPU-1"] }));
    bed.until("it is heard", PROMISED, |bed| bed.drains() == [gpu(1)])
        .await;
    let mut orders = bed.orders.clone();
    let lifted = tokio::spawn(async move {
        let lifted = |orders: &Option<Orders>| {
            !orders
                .as_ref()
                .is_some_and(|orders| orders.drain.contains(&gpu(1)))
        };
        orders.wait_for(lifted).await.is_ok()
    });
    bed.api.delete(KIND, "", NODE);
    bed.until("it is made again", PROMISED, |bed| bed.has_free(32))
        .await;
    sleep(PROMISED).await;
    assert!(
        !lifted.is_finished(),
        "the drain was lifted by the deletion"
    );
    assert_eq!(bed.object()["spec"]["drain"], json!(["GPU-1"]));
    bed.generation = 1;
    bed.order(json!({}));
    bed.until("it is lifted", PROMISED, |bed| bed.drains().is_empty())
        .await;
    assert!(lifted.is_finished());
}

#[tokio::test(start_paused = true)]
async fn drain_on_record_outlives_object_and_agent() {
    let api = Api::start();
    api.put("nodes", node("first"));
    let drain = Drain {
        ordered: [gpu(1)].into(),
        ..Drain::default()
    };
    let client = api.client();
    let bed = Bed::over(api, client, drain);
    bed.until_written().await;
    assert_eq!(bed.drains(), [gpu(1)]);
    assert_eq!(bed.object()["spec"]["drain"], json!(["GPU-1"]));
}

#[tokio::test(start_paused = true)]
async fn orders_and_status_follow_a_restored_etcd() {
    let mut bed = Bed::start();
    bed.until_written().await;
    bed.order(json!({ "drain": ["GPU-1"] }));
    bed.until("it is heard", PROMISED, |bed| bed.drains() == [gpu(1)])
        .await;
    let backup = bed.api.backup();
    for free in 0..20 {
        bed.report_free(free);
        bed.until("it is written", PROMISED, |bed| bed.has_free(free))
            .await;
    }
    bed.order(json!({ "drain": ["GPU-2"] }));
    bed.until("it is heard", PROMISED, |bed| bed.drains() == [gpu(2)])
        .await;
    bed.api.restore(&backup);
    let within = Duration::from_secs(10);
    bed.until("the restored order is heard", within, |bed| {
        bed.drains() == [gpu(1)]
    })
    .await;
    bed.until("the report is written", within, |bed| bed.has_free(19))
        .await;
    bed.order(json!({}));
    bed.until("a new order is heard", within, |bed| {
        bed.drains().is_empty()
    })
    .await;
    bed.until_quiet("a restore").await;
}

#[tokio::test(start_paused = true)]
async fn order_of_another_version_stops_nothing_else() {
    let mut bed = Bed::start();
    bed.until_written().await;
    let policy = |namespace: &str, action: &str| json!({ "namespace": namespace, "action": action, "maxRestarts": 1, "windowSeconds": 60 });
    bed.order(json!({
        "contextPolicies": [policy("a", "Quarantine"), policy("b", "Evict")],
        "reservations": [{ "gpu": "GPU-1", "share": 0.5 }],
        "drain": ["GPU-1"],
    }));
    let mut object = bed.object();
    object["status"]["gpus"][0]["state"] = json!("Hibernating");
    object["status"]["gpus"][1]["memory"] = json!({ "total": "1Gi" });
    bed.api.put(KIND, object);
    bed.until("the drain is heard", PROMISED, |bed| {
        bed.drains() == [gpu(1)]
    })
    .await;
    let orders = bed.orders.borrow().clone().unwrap();
    assert_eq!(orders.contexts.len(), 1);
    assert_eq!(
        orders.not_understood,
        ["reservations[0]", "contextPolicies[0]"]
    );
    bed.report_free(7);
    bed.until("the status is written", PROMISED, |bed| bed.has_free(7))
        .await;
    assert_eq!(bed.object()["status"]["gpus"][0]["state"], "Active");
    sleep(Duration::from_secs(60)).await;
    assert_eq!(*bed.unheard.borrow(), None, "the API server is there");
}

#[tokio::test(start_paused = true)]
async fn status_and_orders_arrive_however_a_watch_tells() {
    let tellings = [
        Telling::Late,
        Telling::Lagging,
        Telling::Twice,
        Telling::Again,
        Telling::Cut,
        Telling::Expired,
    ];
    for telling in tellings {
        let what = format!("{telling:?}");
        let api = Api::start();
        api.put("nodes", node("first"));
        let faults = Faults::of_all(Fate::Lost, telling);
        let client = api.client_through(&faults);
        let mut bed = Bed::over(api, client, Drain::default());
        bed.until_written().await;
        if telling == Telling::Lagging {
            // GPU nodes are behind from then on.
            sleep(Duration::from_secs(15)).await;
        }
        for round in 0..8 {
            bed.order(json!({ "drain": [format!("GPU-{round}")] }));
            bed.report_free(round);
            bed.until(&what, PROMISED, |bed| {
                bed.has_free(round) && bed.drains() == [gpu(round)]
            })
            .await;
        }
        bed.api.delete(KIND, "", NODE);
        bed.until(&what, PROMISED, |bed| bed.has_free(7)).await;
        bed.until_quiet(&what).await;
        assert_eq!(bed.drains(), [gpu(7)], "{what}");
        let dealt: usize = faults.dealt().values().sum();
        assert!(dealt >= 3, "{what}: {dealt} events were not told plainly");
    }
}

#[tokio::test(start_paused = true)]
async fn status_arrives_whatever_becomes_of_a_write() {
    let fates = [
        Fate::Refused(StatusCode::CONFLICT),
        Fate::Refused(StatusCode::TOO_MANY_REQUESTS),
        Fate::Refused(StatusCode::INTERNAL_SERVER_ERROR),
        Fate::Lost,
        Fate::Unanswered,
        Fate::Garbled,
    ];
    for fate in fates {
        for doomed in 1..=3 {
            let what = format!("write {doomed}: {fate:?}");
            let api = Api::start();
            api.put("nodes", node("first"));
            let faults = Faults::of_all(fate, Telling::Plain);
            faults.doom(Doomed::Number(doomed));
            let client = api.client_through(&faults);
            let bed = Bed::over(api, client, Drain::default());
            bed.until(&what, PROMISED, |bed| bed.has_free(32)).await;
            bed.report_free(7);
            bed.until(&what, PROMISED, |bed| bed.has_free(7)).await;
            bed.until_quiet(&what).await;
            assert_eq!(faults.met(), 1, "{what}");
            assert_eq!(*bed.unheard.borrow(), None, "{what}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn lost_answer_counts_as_silence_from_the_request_on() {
    let api = Api::start();
    api.put("nodes", node("first"));
    let faults = Faults::of_all(Fate::Lost, Telling::Plain);
    let client = api.client_through(&faults);
    let bed = Bed::over(api, client, Drain::default());
    bed.until_written().await;
    assert_eq!(*bed.unheard.borrow(), None);
    faults.doom(Doomed::FirstTries);
    let begun = Instant::now();
    bed.report_free(7);
    bed.until("it is noticed", PROMISED, |bed| {
        bed.unheard.borrow().is_some()
    })
    .await;
    let since = bed.unheard.borrow().unwrap();
    assert!(
        since - begun < Duration::from_secs(2),
        "{:?}",
        since - begun
    );
    bed.until("it is written", PROMISED, |bed| bed.has_free(7))
        .await;
    assert_eq!(*bed.unheard.borrow(), None);
}
