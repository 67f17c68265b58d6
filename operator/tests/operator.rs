//! Runs the whole operator against an API server in memory.

#[path = "operator/clocks.rs"]
mod clocks;
#[path = "operator/contexts.rs"]
mod contexts;
#[path = "operator/faults.rs"]
mod faults;
#[path = "operator/leader.rs"]
mod leader;
#[path = "operator/nodes.rs"]
mod nodes;
#[path = "operator/pod_settings.rs"]
mod pod_settings;
#[path = "operator/preemption.rs"]
mod preemption;
#[path = "operator/restored.rs"]
mod restored;
#[path = "operator/versions.rs"]
mod versions;

use std::mem::replace;
use std::net::SocketAddr;
use std::time::Duration;

use axum::http::StatusCode;
use bursar_crds::Quantum;
use bursar_crds::context_policy::ContextAction;
use bursar_http::Listeners;
use bursar_operator::clock::Clock;
use bursar_operator::leader::Election;
use bursar_operator::placement::PlacementOptions;
use bursar_operator::run::{self, OperatorError, Options};
use bursar_sim_api::SimApiServer;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

const BUDGETS: &str = "gpumemorybudgets";

/// The longest wait of a test for what the operator does at once.
const END: Duration = Duration::from_secs(30);

/// Returns whether the long tier of `cargo verify` runs.
fn is_long() -> bool {
    std::env::var_os("BURSAR_LONG").is_some()
}

/// A running operator.
struct Running {
    api: SimApiServer,
    metrics: SocketAddr,
    probes: SocketAddr,
    shutdown: CancellationToken,
    task: JoinHandle<Result<(), OperatorError>>,
}

impl Running {
    /// Starts an operator over the objects that `fill` creates.
    async fn start(fill: impl FnOnce(&SimApiServer)) -> Self {
        let api = SimApiServer::start();
        fill(&api);
        Self::over(api).await
    }

    /// Starts an operator over an existing API server.
    async fn over(api: SimApiServer) -> Self {
        Self::by_clock(api, Timestamp::now).await
    }

    /// Starts an operator on a machine with this clock.
    async fn by_clock(api: SimApiServer, clock: Clock) -> Self {
        let client = api.client();
        Self::with(api, client, clock, None).await
    }

    /// Starts an operator that reaches the API server by this client.
    async fn with(
        api: SimApiServer,
        client: Client,
        clock: Clock,
        election: Option<Election>,
    ) -> Self {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let listeners = Listeners::bind(any, any).await.expect("free ports");
        let metrics = listeners.metrics.local_addr().expect("an address");
        let probes = listeners.probes.local_addr().expect("an address");
        let shutdown = CancellationToken::new();
        let task = tokio::spawn(run::run(
            client,
            listeners,
            Options {
                placement: PlacementOptions {
                    quantum: Quantum::Gib1,
                    relocate_pending_pods: true,
                    disruption_grace: Duration::from_secs(60),
                    drain_for_nvidia: true,
                },
                default_action: ContextAction::default(),
                agents: None,
                election,
            },
            clock,
            shutdown.clone(),
        ));
        Self {
            api,
            metrics,
            probes,
            shutdown,
            task,
        }
    }

    /// Waits until the operator has listed everything.
    async fn until_listed(&self) {
        while !self.get("/readyz").await.starts_with("HTTP/1.1 200") {
            sleep(Duration::from_millis(20)).await;
        }
    }

    async fn get(&self, path: &str) -> String {
        let address = match path {
            "/metrics" => self.metrics,
            _ => self.probes,
        };
        let mut stream = TcpStream::connect(address).await.expect("it listens");
        let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
        stream
            .write_all(request.as_bytes())
            .await
            .expect("it reads");
        let mut answer = String::new();
        stream
            .read_to_string(&mut answer)
            .await
            .expect("it answers");
        answer
    }

    /// Waits until the status of the budget of `team` is right.
    async fn until(&self, goal: &str, right: impl Fn(&Value) -> bool) -> Value {
        let arrived = async {
            loop {
                let status = self.api.status(BUDGETS, "team", "default");
                if right(&status) {
                    return status;
                }
                sleep(Duration::from_millis(10)).await;
            }
        };
        let status = timeout(Duration::from_secs(20), arrived).await;
        status.unwrap_or_else(|_| {
            panic!(
                "{goal}; at last: {}",
                self.api.status(BUDGETS, "team", "default")
            )
        })
    }

    async fn until_ready(&self) -> Value {
        self.until("it is ready", |status| {
            !status.is_null() && condition(status, "Ready")["status"] == "True"
        })
        .await
    }

    async fn until_requested(&self, quanta: i64) -> Value {
        let goal = format!("{quanta} are requested");
        self.until(&goal, |status| {
            status["deviceMemory"]["requested"]["quanta"] == quanta
        })
        .await
    }

    /// Waits until the operator writes nothing more. The last write may come late, as an unanswered
    /// one is tried again after 5 s.
    async fn until_quiet(&self) {
        let begin = Instant::now();
        let mut writes = self.api.writes().len();
        loop {
            sleep(Duration::from_secs(3)).await;
            let before = replace(&mut writes, self.api.writes().len());
            if writes == before {
                return;
            }
            let late = || self.api.writes()[before..].to_vec();
            assert!(
                begin.elapsed() < END,
                "the operator writes on: {:?}",
                late()
            );
        }
    }

    /// Kills the operator and returns the API server.
    async fn kill(self) -> SimApiServer {
        self.task.abort();
        drop(self.task.await);
        self.api
    }

    /// Stops the operator. Returns how long that took.
    async fn stop(self) -> Duration {
        let start = Instant::now();
        self.shutdown.cancel();
        let ended = timeout(Duration::from_secs(10), self.task).await;
        ended
            .expect("it ends")
            .expect("without a panic")
            .expect("without an error");
        start.elapsed()
    }
}

fn budget(namespace: &str, guaranteed: &str) -> Value {
    json!({
        "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget",
        "metadata": { "name": "default", "namespace": namespace, "uid": namespace, "generation": 1 },
        "spec": { "deviceMemory": { "guaranteed": guaranteed } },
    })
}

fn pod(name: &str, quanta: u64) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": name, "namespace": "team", "uid": name, "creationTimestamp": "2026-01-01T00:00:00Z" },
        "spec": { "nodeName": "n", "containers": [{ "name": "c", "image": "i", "resources": {
            "limits": { "bursar.dev/gpu-memory-gib": quanta.to_string() },
            "requests": { "bursar.dev/gpu-memory-gib": quanta.to_string() } } }] },
        "status": { "phase": "Running" },
    })
}

fn gpu_node(name: &str, quanta: i32) -> Value {
    json!({
        "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuNode",
        "metadata": { "name": name, "uid": name }, "spec": {},
        "status": { "quantum": "1Gi", "deviceMemory": { "allocatable": quanta, "free": quanta, "largestFree": quanta } },
    })
}

/// A node whose kubelet has an agent or has lost it.
fn node(name: &str, has_agent: bool) -> Value {
    let quanta = if has_agent { "32" } else { "0" };
    json!({
        "apiVersion": "v1", "kind": "Node", "metadata": { "name": name }, "spec": {},
        "status": { "conditions": [{ "type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z" }],
            "allocatable": { "bursar.dev/gpu-memory-gib": quanta } },
    })
}

/// A node of 32, a budget of 16, and a pod of 4 in it.
fn small(api: &SimApiServer) {
    api.put("nodes", node("n", true));
    api.put("gpunodes", gpu_node("n", 32));
    for namespace in ["team", "other"] {
        api.put(
            "namespaces",
            json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": namespace } }),
        );
    }
    api.put(BUDGETS, budget("team", "16Gi"));
    api.put("pods", pod("p", 4));
}

fn condition<'a>(status: &'a Value, type_: &str) -> &'a Value {
    let conditions = status["conditions"].as_array().expect("a list");
    conditions
        .iter()
        .find(|condition| condition["type"] == type_)
        .expect("the condition exists")
}

#[tokio::test]
async fn budget_gets_its_status_once() {
    let running = Running::start(small).await;
    let status = running.until_ready().await;
    assert_eq!(status["deviceMemory"]["requested"]["quanta"], 4);
    assert_eq!(status["observedGeneration"], 1);
    let written = running.api.writes();
    assert_eq!(running.api.status_write_count(), 2, "{written:?}");
    sleep(Duration::from_millis(1500)).await;
    assert_eq!(running.api.writes(), written);
    assert!(running.get("/readyz").await.starts_with("HTTP/1.1 200"));
    assert!(running.get("/healthz").await.starts_with("HTTP/1.1 200"));
    let metrics = running.get("/metrics").await;
    let requested = r#"bursar_budget_memory_requested_bytes{namespace="team",resource="gpu-memory"} 4294967296"#;
    assert!(metrics.contains(requested), "{metrics}");
    running.stop().await;
}

#[tokio::test]
async fn pods_are_counted_as_they_come_end_and_go() {
    let running = Running::start(small).await;
    running.until_requested(4).await;
    running.api.put("pods", pod("q", 20));
    let status = running.until_requested(24).await;
    assert_eq!(condition(&status, "Exceeded")["status"], "True");
    let mut ended = pod("q", 20);
    ended["status"]["phase"] = json!("Succeeded");
    running.api.put("pods", ended);
    let status = running.until_requested(4).await;
    assert_eq!(condition(&status, "Exceeded")["status"], "False");
    running.api.delete("pods", "team", "p");
    running.until_requested(0).await;
    running.stop().await;
}

#[tokio::test]
async fn covered_follows_new_budgets_and_nodes() {
    let covered = |wanted: &'static str| {
        move |status: &Value| !status.is_null() && condition(status, "Covered")["reason"] == wanted
    };
    let running = Running::start(small).await;
    running
        .until("it is covered", covered("GuaranteesFit"))
        .await;
    running.api.put(BUDGETS, budget("other", "24Gi"));
    running
        .until("40 do not fit 32", covered("Overcommitted"))
        .await;
    running.api.put("gpunodes", gpu_node("m", 8));
    running.until("40 fit 40", covered("GuaranteesFit")).await;
    running.api.delete("gpunodes", "", "m");
    running
        .until("40 do not fit 32 again", covered("Overcommitted"))
        .await;
    running.api.delete(BUDGETS, "other", "default");
    running.until("16 fit", covered("GuaranteesFit")).await;
    running.stop().await;
}

#[tokio::test]
async fn burst_of_pods_is_debounced_into_few_writes() {
    let running = Running::start(small).await;
    running.until_ready().await;
    let start = Instant::now();
    for index in 0..200_u32 {
        running.api.put("pods", pod(&format!("burst-{index}"), 1));
        sleep(Duration::from_millis(5)).await;
    }
    running.until_requested(204).await;
    let most = start.elapsed().as_millis() / 500 + 4;
    let written = running.api.status_write_count() as u128;
    assert!(written <= most, "{written} writes");
    running.stop().await;
}

#[tokio::test]
async fn foreign_status_edit_is_reverted() {
    let running = Running::start(small).await;
    running.until_requested(4).await;
    let mut forged = budget("team", "16Gi");
    forged["status"] = json!({ "deviceMemory": { "requested": { "quanta": 0, "bytes": "0" } } });
    running.api.put(BUDGETS, forged);
    running.until_requested(4).await;
    running.stop().await;
}

#[tokio::test]
async fn failed_write_is_retried() {
    let running = Running::start(|api| {
        small(api);
        api.refuse_requests("/status", StatusCode::INTERNAL_SERVER_ERROR, 1);
        api.refuse_requests("/status", StatusCode::FORBIDDEN, 1);
    })
    .await;
    running.until_requested(4).await;
    let metrics = running.get("/metrics").await;
    assert!(
        metrics.contains(r#"bursar_operator_reconciles_total{result="error"} 2"#),
        "{metrics}"
    );
    running.stop().await;
}

#[tokio::test]
async fn late_watch_does_not_bring_back_an_old_status() {
    let running = Running::start(small).await;
    running.until_requested(4).await;
    running.api.set_watch_paused(BUDGETS, true);
    running.api.put("pods", pod("q", 2));
    running.until_requested(6).await;
    running.api.delete("pods", "team", "q");
    running.until_requested(4).await;
    running.api.set_watch_paused(BUDGETS, false);
    sleep(Duration::from_millis(1200)).await;
    running.until_requested(4).await;
    running.stop().await;
}

#[tokio::test]
async fn index_is_published_after_all_kinds_are_listed() {
    let running = Running::start(|api| {
        small(api);
        api.refuse_requests("/pods", StatusCode::FORBIDDEN, 1);
    })
    .await;
    let unready = running.get("/readyz").await;
    assert!(
        unready.starts_with("HTTP/1.1 503") && unready.contains("Pods"),
        "{unready}"
    );
    running.until_ready().await;
    let metrics = running.get("/metrics").await;
    assert!(
        metrics.contains(r#"bursar_operator_watch_failures_total{kind="Pods"} 1"#),
        "{metrics}"
    );
    running.stop().await;
}

impl Running {
    /// Waits until the operator has written this policy into the namespace's GpuNamespace. Null
    /// stands for no object.
    async fn until_told(&self, namespace: &str, wanted: Value) {
        let told = || self.api.get("gpunamespaces", "", namespace)["spec"]["contextPolicy"].clone();
        let arrived = async {
            while told() != wanted {
                sleep(Duration::from_millis(10)).await;
            }
        };
        let arrived = timeout(Duration::from_secs(20), arrived).await;
        assert!(arrived.is_ok(), "at last: {}", told());
    }

    fn orders_written(&self) -> usize {
        let writes = self.api.writes();
        let is_order =
            |write: &&String| write.contains("/gpunodes/") || write.contains("/gpunamespaces/");
        // One is of the settings of the pod of `small`.
        writes.iter().filter(is_order).count() - 1
    }
}

#[tokio::test]
async fn context_policy_is_written_once_for_all_nodes() {
    let running = Running::start(small).await;
    running.until_requested(4).await;
    for node in ["m", "o", "q"] {
        running.api.put("gpunodes", gpu_node(node, 8));
    }
    let with = |namespace: &str, policy: Value| {
        let mut budget = budget(namespace, "1Gi");
        budget["spec"]["contextPolicy"] = policy;
        budget
    };
    let default = json!({ "maxRestarts": 5, "windowSeconds": 600, "graceSeconds": 10 });
    running.api.put(BUDGETS, with("team", default));
    sleep(Duration::from_millis(1500)).await;
    assert_eq!(running.orders_written(), 0, "none but the pod's settings");
    let policy = |action: &str| json!({ "action": action, "maxRestarts": 5, "windowSeconds": 600, "graceSeconds": 10 });
    for (number, action) in ["InPlace", "Report"].into_iter().enumerate() {
        let budget = with("a", json!({ "action": action }));
        running.api.put(BUDGETS, budget);
        running.until_told("a", policy(action)).await;
        assert_eq!(running.orders_written(), number + 1);
    }
    running.api.delete(BUDGETS, "a", "default");
    running.until_told("a", Value::Null).await;
    sleep(Duration::from_millis(1500)).await;
    assert!(running.api.get("gpunamespaces", "", "a").is_null());
    assert_eq!(running.orders_written(), 3, "nothing more");
    running.stop().await;
}

#[tokio::test]
async fn gpu_namespace_of_another_version_or_another_hand_is_corrected() {
    let running = Running::start(|api| {
        small(api);
        let mut evicting = budget("team", "16Gi");
        evicting["spec"]["contextPolicy"] = json!({ "action": "Evict" });
        api.put(BUDGETS, evicting);
    })
    .await;
    let policy =
        json!({ "action": "Evict", "maxRestarts": 5, "windowSeconds": 600, "graceSeconds": 10 });
    running.until_told("team", policy.clone()).await;
    let write = |other: Value| {
        let mut object = running.api.get("gpunamespaces", "", "team");
        object["spec"]["contextPolicy"] = other;
        running.api.put("gpunamespaces", object);
    };
    for other in [json!({ "action": "Quarantine" }), json!(7), Value::Null] {
        write(other);
        running.until_told("team", policy.clone()).await;
    }
    // A policy without an action of its own takes another client's back too, and once.
    let mut counting = budget("team", "16Gi");
    counting["metadata"]["generation"] = json!(2);
    counting["spec"]["contextPolicy"] = json!({ "maxRestarts": 1 });
    running.api.put(BUDGETS, counting);
    let policy = json!({ "maxRestarts": 1, "windowSeconds": 600, "graceSeconds": 10 });
    running.until_told("team", policy.clone()).await;
    let written = running.orders_written();
    let mut edited = policy.clone();
    edited["action"] = json!("Report");
    write(edited);
    running.until_told("team", policy).await;
    sleep(Duration::from_millis(2500)).await;
    // An apply leaves the other client's field, and a patch removes it.
    assert_eq!(running.orders_written(), written + 2);
    running.stop().await;
}

#[tokio::test]
async fn operator_stops_at_once_with_pending_requeues() {
    let running = Running::start(small).await;
    running.until_requested(4).await;
    let took = running.stop().await;
    assert!(took < Duration::from_secs(3), "{took:?}");
}
