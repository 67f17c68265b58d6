//! Tests a watch against a simulated API server in virtual time.

use std::pin::pin;
use std::time::Duration;

use bursar_sim_api::{Faults, SimApiServer, WatchFault, WriteFault};
use bursar_watch::{History, Pauses, watch};
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::runtime::watcher::{Config, Event};
use kube::{Client, ResourceExt as _};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

const KIND: &str = "configmaps";
const LONGEST: Duration = Duration::from_secs(10);

fn put(api: &SimApiServer, name: &str, value: usize) {
    let data = json!({ "value": value.to_string() });
    let object = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": name }, "data": data });
    api.put(KIND, object);
}

/// The lists of a watch, each with its names, and the names of later events.
#[derive(Debug, PartialEq)]
enum Delivery {
    List(Vec<String>),
    Change(String),
}

/// Watches all objects until the test ends.
fn follow(client: Client, history: &History) -> mpsc::UnboundedReceiver<Delivery> {
    let (sender, receiver) = mpsc::unbounded_channel();
    let config = Config::default().timeout(200);
    let pauses = Pauses::new(Duration::from_secs(1), LONGEST);
    let objects = watch(
        kube::Api::<ConfigMap>::all(client),
        config,
        pauses,
        history.clone(),
    );
    tokio::spawn(async move {
        let mut objects = pin!(objects);
        let mut list = Vec::new();
        while let Some(event) = objects.next().await {
            let delivery = match event {
                Ok(Event::Init) => {
                    list.clear();
                    continue;
                }
                Ok(Event::InitApply(object)) => {
                    list.push(object.name_any());
                    continue;
                }
                Ok(Event::InitDone) => Delivery::List(list.clone()),
                Ok(Event::Apply(object) | Event::Delete(object)) => {
                    Delivery::Change(object.name_any())
                }
                Err(_) => continue,
            };
            if sender.send(delivery).is_err() {
                return;
            }
        }
    });
    receiver
}

async fn next(deliveries: &mut mpsc::UnboundedReceiver<Delivery>, within: Duration) -> Delivery {
    let delivery = timeout(within, deliveries.recv()).await;
    delivery
        .expect("the watch delivers in time")
        .expect("the watch goes on")
}

fn list(names: &[&str]) -> Delivery {
    Delivery::List(names.iter().map(|&name| name.to_owned()).collect())
}

fn lists(api: &SimApiServer) -> Vec<Instant> {
    let requests = api.requests().into_iter();
    let lists = requests.filter(|(_, request)| request.starts_with("LIST "));
    lists.map(|(at, _)| at).collect()
}

#[tokio::test(start_paused = true)]
async fn watch_lists_anew_when_etcd_was_restored() {
    let api = SimApiServer::start();
    put(&api, "kept", 0);
    let backup = api.backup();
    let history = History::default();
    let mut deliveries = follow(api.client(), &history);
    assert_eq!(next(&mut deliveries, LONGEST).await, list(&["kept"]));
    for value in 0..10 {
        put(&api, "lost", value);
        assert_eq!(
            next(&mut deliveries, LONGEST).await,
            Delivery::Change("lost".into())
        );
    }
    api.restore(&backup);
    put(&api, "new", 0);
    assert_eq!(next(&mut deliveries, LONGEST).await, list(&["kept", "new"]));
    assert_eq!(history.restarts(), 1);
    put(&api, "new", 1);
    assert_eq!(
        next(&mut deliveries, LONGEST).await,
        Delivery::Change("new".into())
    );
}

#[tokio::test(start_paused = true)]
async fn watch_resumes_where_it_was_after_each_end() {
    let api = SimApiServer::start();
    put(&api, "a", 0);
    let history = History::default();
    let mut deliveries = follow(api.client(), &history);
    assert_eq!(next(&mut deliveries, LONGEST).await, list(&["a"]));
    // By then its lifetime has ended the watch twice.
    sleep(Duration::from_secs(500)).await;
    put(&api, "a", 1);
    assert_eq!(
        next(&mut deliveries, LONGEST).await,
        Delivery::Change("a".into())
    );
    assert_eq!(history.restarts(), 0);
}

#[tokio::test(start_paused = true)]
async fn watch_lists_anew_when_asked() {
    let api = SimApiServer::start();
    let history = History::default();
    let mut deliveries = follow(api.client(), &history);
    assert_eq!(next(&mut deliveries, LONGEST).await, list(&[]));
    history.list_anew();
    assert_eq!(next(&mut deliveries, LONGEST).await, list(&[]));
}

#[tokio::test(start_paused = true)]
async fn watch_lists_anew_every_half_hour_at_least() {
    let api = SimApiServer::start();
    let mut deliveries = follow(api.client(), &History::default());
    assert_eq!(next(&mut deliveries, LONGEST).await, list(&[]));
    for _ in 0..20 {
        let before = Instant::now();
        assert_eq!(
            next(&mut deliveries, Duration::from_secs(1801)).await,
            list(&[])
        );
        assert!(before.elapsed() >= Duration::from_secs(600));
    }
}

#[tokio::test(start_paused = true)]
async fn clients_back_off_while_their_lists_fail() {
    const CLIENTS: usize = 5_000;
    let api = SimApiServer::start();
    api.set_unavailable(true);
    let history = History::default();
    let mut watches: Vec<_> = (0..CLIENTS)
        .map(|_| follow(api.client(), &history))
        .collect();
    sleep(Duration::from_secs(60)).await;
    let before = lists(&api).len();
    sleep(Duration::from_secs(60)).await;
    let lists_of_each = (lists(&api).len() - before) as f64 / CLIENTS as f64;
    // The lists are 10 to 20 s apart.
    assert!(
        (3.0..6.5).contains(&lists_of_each),
        "{lists_of_each} a minute"
    );
    api.set_unavailable(false);
    let back = Instant::now();
    for deliveries in &mut watches {
        assert_eq!(next(deliveries, 2 * LONGEST).await, list(&[]));
    }
    assert!(back.elapsed() <= 2 * LONGEST, "{:?}", back.elapsed());
    let mut seconds = [0; 20];
    for at in lists(&api).iter().filter(|at| **at >= back) {
        let second = (*at - back).as_secs() as usize;
        seconds[second.min(19)] += 1;
    }
    assert!(
        seconds.iter().all(|lists| *lists < CLIENTS / 5),
        "{seconds:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn clients_back_off_while_their_watches_end_at_once() {
    let api = SimApiServer::start();
    let ended = Faults::with_watch_timeout("case", 0);
    let mut deliveries = follow(api.client_with_faults(&ended), &History::default());
    assert_eq!(next(&mut deliveries, LONGEST).await, list(&[]));
    sleep(Duration::from_secs(60)).await;
    let before = api.requests().len();
    sleep(Duration::from_secs(60)).await;
    // Each attempt reads the newest revision and opens a watch.
    let requests = api.requests().len() - before;
    assert!(requests <= 2 * 7, "{requests} requests in a minute");
    put(&api, "a", 0);
    assert_eq!(
        next(&mut deliveries, 2 * LONGEST).await,
        Delivery::Change("a".into())
    );
}

#[tokio::test(start_paused = true)]
async fn watch_goes_on_after_its_connection_died_in_silence() {
    let api = SimApiServer::start();
    let silent = Faults::for_all_objects(WriteFault::RequestDropped, WatchFault::Stalled);
    let mut deliveries = follow(api.client_with_faults(&silent), &History::default());
    assert_eq!(next(&mut deliveries, LONGEST).await, list(&[]));
    for value in 0..3 {
        put(&api, "a", value);
        let within = Duration::from_secs(220);
        assert_eq!(
            next(&mut deliveries, within).await,
            Delivery::Change("a".into())
        );
    }
}
