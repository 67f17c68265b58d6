//! Tests that a replica which has lost the Lease ends in time, whatever it was writing.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::http::{Method, Request};
use bursar_operator::leader::Election;
use bursar_sim_api::SimApiServer;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::Client;
use kube::client::Body;
use serde_json::json;
use tokio::time::{Instant, sleep, timeout};
use tower::service_fn;

use super::{BUDGETS, END, Running, budget, pod, small};

/// The most time until a replica looks at its Lease again.
const LOOK: Duration = Duration::from_secs(2);
/// How long a replica works without a renewal.
const RENEWAL_DEADLINE: Duration = Duration::from_secs(10);
/// The most time from the loss of the Lease to the end of the process.
const ENDS_WITHIN: Duration = Duration::from_secs(5);
/// A write takes nearly as long as the operator waits for an answer.
const SLOW: Duration = Duration::from_millis(4900);

/// The connection of one replica to the API server.
#[derive(Clone, Default)]
struct Link(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// How long each write takes to arrive, except those of the Lease.
    delay: Duration,
    /// No request arrives any more.
    is_cut: bool,
    /// The paths of the writes that began slowly.
    begun: Vec<String>,
}

impl Link {
    fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Starts a replica behind this link, which takes the Lease.
    async fn start(&self, api: SimApiServer) -> Running {
        let (link, direct) = (self.clone(), api.client());
        let service = service_fn(move |request: Request<Body>| {
            let (link, direct) = (link.clone(), direct.clone());
            async move {
                let path = request.uri().path().to_owned();
                let is_write = request.method() != Method::GET && !path.contains("/leases");
                let (delay, is_cut) = link.with(|state| (state.delay, state.is_cut));
                if is_cut {
                    std::future::pending::<()>().await;
                }
                if is_write && delay > Duration::ZERO {
                    link.with(|state| state.begun.push(path));
                    sleep(delay).await;
                }
                direct.send(request).await
            }
        });
        let election = Election {
            lease: "system/operator".parse().expect("a name"),
            identity: "a".to_owned(),
        };
        let client = Client::new(service, "default");
        Running::with(api, client, Timestamp::now, Some(election)).await
    }

    /// Waits until a write whose path ends in `suffix` is on its slow way.
    async fn until_begun(&self, suffix: &str) {
        let begun = async {
            let is_it = |path: &String| path.ends_with(suffix);
            while !self.with(|state| state.begun.iter().any(is_it)) {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(2 * END, begun).await.expect("the write begins");
    }
}

/// Waits for the end of a replica that loses the Lease now, and expects no write of it afterwards.
async fn assert_ends_without_a_write(running: Running, within: Duration) {
    let lost = Instant::now();
    let ended = timeout(END, running.task).await.expect("it ends");
    let took = lost.elapsed();
    assert!(ended.expect("no panic").is_err(), "the process fails");
    assert!(took <= within, "it ended after {took:?}");
    let (writes, lease) = (
        running.api.writes(),
        running.api.get("leases", "system", "operator"),
    );
    sleep(END).await;
    assert_eq!(running.api.writes(), writes);
    assert_eq!(running.api.get("leases", "system", "operator"), lease);
}

/// Gives the Lease to another replica.
fn take_lease(api: &SimApiServer) {
    let mut lease = api.get("leases", "system", "operator");
    lease["spec"]["holderIdentity"] = json!("b");
    api.put("leases", lease);
}

#[tokio::test(start_paused = true)]
async fn reconcile_is_cut_off_after_the_loss_of_the_lease() {
    let (api, link) = (SimApiServer::start(), Link::default());
    small(&api);
    link.with(|state| state.delay = SLOW);
    let running = link.start(api).await;
    link.until_begun("").await;
    take_lease(&running.api);
    assert_ends_without_a_write(running, LOOK + ENDS_WITHIN).await;
}

#[tokio::test(start_paused = true)]
async fn evictions_are_cut_off_after_the_loss_of_the_lease() {
    let (api, link) = (SimApiServer::start(), Link::default());
    small(&api);
    api.put(BUDGETS, budget("team", "4Gi"));
    let running = link.start(api).await;
    running.until_ready().await;
    link.with(|state| state.delay = SLOW);
    let created = Timestamp::now() + SignedDuration::from_secs(30);
    for number in 0..8 {
        let mut late = pod(&format!("late-{number}"), 3);
        late["metadata"]["creationTimestamp"] = json!(created.to_string());
        running.api.put("pods", late);
    }
    link.until_begun("/eviction").await;
    take_lease(&running.api);
    assert_ends_without_a_write(running, LOOK + ENDS_WITHIN).await;
}

#[tokio::test(start_paused = true)]
async fn replica_without_an_api_server_ends_before_another_leads() {
    let (api, link) = (SimApiServer::start(), Link::default());
    small(&api);
    let running = link.start(api).await;
    running.until_ready().await;
    link.with(|state| state.is_cut = true);
    running.api.put("pods", pod("q", 2));
    assert_ends_without_a_write(running, RENEWAL_DEADLINE + ENDS_WITHIN).await;
}
