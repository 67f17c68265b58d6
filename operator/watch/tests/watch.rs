//! Tests a watch against a simulated API server in virtual time.

use std::collections::BTreeMap;
use std::pin::pin;
use std::time::Duration;

use bursar_sim_api::{Faults, SimApiServer, WatchFault, WriteFault};
use bursar_watch::{History, Pauses, watch};
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::client::Body;
use kube::runtime::watcher::{Config, Event};
use kube::{Client, ResourceExt as _};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};
use tower::service_fn;

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
async fn watch_lists_anew_once_a_day() {
    let api = SimApiServer::start();
    let mut deliveries = follow(api.client(), &History::default());
    assert_eq!(next(&mut deliveries, LONGEST).await, list(&[]));
    for _ in 0..5 {
        let before = Instant::now();
        assert_eq!(
            next(&mut deliveries, Duration::from_secs(100_001)).await,
            list(&[])
        );
        assert!(before.elapsed() >= Duration::from_secs(72_000));
    }
}

/// After a restore of etcd without a gap in the revisions only a list shows the change.
#[tokio::test(start_paused = true)]
async fn watch_lists_anew_within_half_an_hour_after_one_broke_off() {
    let api = SimApiServer::start();
    let early = Faults::with_watch_timeout("case", 50);
    let mut deliveries = follow(api.client_with_faults(&early), &History::default());
    for _ in 0..5 {
        let within = Duration::from_secs(1_900);
        assert_eq!(next(&mut deliveries, within).await, list(&[]));
    }
}

/// An etcd restored from a backup of seconds ago, to which more was written than was lost.
#[tokio::test(start_paused = true)]
async fn restored_etcd_that_passed_the_watch_is_found_in_half_an_hour() {
    let api = SimApiServer::start();
    put(&api, "a", 1);
    let early = Faults::with_watch_timeout("case", 50);
    let mut deliveries = follow(api.client_with_faults(&early), &History::default());
    let soon = Duration::from_secs(5);
    assert_eq!(next(&mut deliveries, soon).await, list(&["a"]));
    let backup = api.backup();
    put(&api, "lost", 1);
    let change = |name: &str| Delivery::Change(name.to_owned());
    assert_eq!(next(&mut deliveries, soon).await, change("lost"));
    api.restore(&backup);
    for name in ["hidden", "seen"] {
        put(&api, name, 1);
    }
    // The revision of `hidden` is that of the lost object, so the watch goes on after it.
    let restored = Instant::now();
    assert_eq!(next(&mut deliveries, LONGEST).await, change("seen"));
    let within = Duration::from_mins(30) + LONGEST;
    let found = next(&mut deliveries, within).await;
    assert_eq!(found, list(&["a", "hidden", "seen"]));
    assert!(restored.elapsed() >= Duration::from_mins(10), "by the list");
}

/// A client whose lists take so long to arrive, after the server has made them.
fn with_slow_lists(client: Client, delay: Duration) -> Client {
    let service = service_fn(move |request: http::Request<Body>| {
        let client = client.clone();
        let query = request.uri().query().unwrap_or_default();
        let is_list = query.contains("sendInitialEvents=true") || query.contains("limit=500");
        async move {
            let answer = client.send(request).await;
            if is_list {
                sleep(delay).await;
            }
            answer
        }
    });
    Client::new(service, "default")
}

/// A client whose streamed lists end before their last object.
fn with_cut_streams(client: Client) -> Client {
    let service = service_fn(move |request: http::Request<Body>| {
        let client = client.clone();
        let query = request.uri().query().unwrap_or_default();
        let is_stream = query.contains("sendInitialEvents=true");
        async move {
            match is_stream {
                true => Ok(http::Response::new(Body::empty())),
                false => client.send(request).await,
            }
        }
    });
    Client::new(service, "default")
}

#[tokio::test(start_paused = true)]
async fn list_that_cannot_be_streamed_is_read_in_pages() {
    let api = SimApiServer::start();
    put(&api, "a", 0);
    let client = with_cut_streams(api.client());
    let mut deliveries = follow(client, &History::default());
    assert_eq!(next(&mut deliveries, LONGEST).await, list(&["a"]));
    let day = Duration::from_secs(100_100);
    assert_eq!(next(&mut deliveries, day).await, list(&["a"]));
}

/// The objects of a watch as its listener knows them, each with its value, as in the operator's
/// cache.
#[derive(Default)]
struct Objects {
    known: BTreeMap<String, String>,
    incoming: BTreeMap<String, String>,
    begun: usize,
    ended: usize,
}

impl Objects {
    fn apply(&mut self, event: Event<ConfigMap>) {
        let entry = |object: ConfigMap| {
            let value = object.data.clone().unwrap_or_default().remove("value");
            (object.name_any(), value.unwrap_or_default())
        };
        match event {
            Event::Init => {
                self.incoming.clear();
                self.begun += 1;
            }
            Event::InitApply(object) => self.incoming.extend([entry(object)]),
            Event::InitDone => {
                self.known = std::mem::take(&mut self.incoming);
                self.ended += 1;
            }
            Event::Apply(object) => self.known.extend([entry(object)]),
            Event::Delete(object) => drop(self.known.remove(&object.name_any())),
        }
    }
}

/// Changes objects while lists run beside the watch, and past its ends. Each change arrives at
/// once, and no list takes it back.
#[tokio::test(start_paused = true)]
async fn changes_arrive_while_a_list_runs_beside_the_watch() {
    for streams in [false, true] {
        let api = SimApiServer::start();
        if streams {
            api.stream_lists();
        }
        let slow = with_slow_lists(api.client(), Duration::from_secs(600));
        let config = Config::default().timeout(200);
        let pauses = Pauses::new(Duration::from_secs(1), LONGEST);
        let objects = kube::Api::<ConfigMap>::all(slow);
        let events = watch(objects, config, pauses, History::default());
        let (sender, mut objects) = tokio::sync::watch::channel(Objects::default());
        tokio::spawn(async move {
            let mut events = pin!(events);
            while let Some(event) = events.next().await {
                sender.send_modify(|objects| {
                    event.into_iter().for_each(|event| objects.apply(event))
                });
            }
        });
        drop(objects.wait_for(|objects| objects.ended == 1).await);
        let (mut stored, mut beside) = (BTreeMap::new(), 0);
        for step in 0.. {
            let is_beside = objects.borrow().begun > objects.borrow().ended;
            beside += usize::from(is_beside);
            // A list lasts 600 s, and most of it has to have changes.
            sleep(Duration::from_secs(if is_beside { 37 } else { 150 })).await;
            let name = ["a", "b", "c", "d"][step * 7 % 5 % 4];
            match step % 3 {
                0 if stored.remove(name).is_some() => api.delete(KIND, "", name),
                _ => {
                    put(&api, name, step);
                    stored.insert(name.to_owned(), step.to_string());
                }
            }
            let arrived = objects.wait_for(|objects| objects.known == stored);
            let arrived = timeout(Duration::from_secs(1), arrived).await.is_ok();
            assert!(arrived, "step {step}, streams {streams}");
            if objects.borrow().ended == 4 {
                break;
            }
        }
        assert!(beside > 20, "{beside} changes beside lists");
    }
}

#[tokio::test(start_paused = true)]
async fn clients_back_off_while_their_lists_fail() {
    const CLIENTS: usize = 5_000;
    let api = SimApiServer::start();
    api.stream_lists();
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
    } // Nothing else would show that etcd was restored meanwhile.
    let soon = Duration::from_secs(1_900);
    assert_eq!(next(&mut deliveries, soon).await, list(&["a"]));
}
