//! Tests faults that agents leave to the operator, with any write failing.

use std::time::Duration;

use axum::http::StatusCode;
use bursar_sim_api::{SimApiServer, WriteFault};
use futures::stream::{self, StreamExt as _};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::{BUDGETS, END, Running, budget, condition, gpu_node, pod, small};

/// The agent's report that pod `p` has poisoned its context.
fn fault(action: &str) -> Value {
    json!([{ "id": "aa-3", "kind": "Context", "gpu": "GPU-0", "gpuGeneration": 1, "cudaError": 700, "action": action,
        "time": "2026-01-01T00:00:00Z",
        "container": { "podUid": "p", "namespace": "team", "pod": "p", "container": "c", "processGeneration": 3 } }])
}

fn set_faults(api: &SimApiServer, faults: Value) {
    let mut node = api.get("gpunodes", "", "n");
    if node["status"]["faults"] != faults {
        node["status"]["faults"] = faults;
        api.put("gpunodes", node);
    }
}

fn status(api: &SimApiServer) -> Value {
    api.status(BUDGETS, "team", "default")
}

/// Simulates the agent: the fault is open while the pod exists.
fn live(api: &SimApiServer) {
    if api.get("pods", "team", "p").is_null() {
        set_faults(api, json!([]));
    }
}

fn is_done(api: &SimApiServer) -> bool {
    let status = status(api);
    let settings = &api.get("gpunodes", "", "n")["spec"]["pods"];
    api.get("pods", "team", "p").is_null()
        && settings.as_array().is_none_or(Vec::is_empty)
        && status["contexts"]["open"] == 0
        && status["evictions"][0]["reason"] == "TooManyRestarts"
        && condition(&status, "Ready")["status"] == "True"
}

/// Runs the operator until the pod is evicted, and kills it at the given write. Returns the number
/// of writes.
async fn run_until_evicted(write_failure: Option<(usize, WriteFault, bool)>) -> usize {
    let mut running = Running::start(small).await;
    running.until_ready().await;
    let before = running.api.writes().len();
    if let Some((number, write_fault, _)) = write_failure {
        running.api.fail_write(number, write_fault);
    }
    set_faults(&running.api, fault("BeyondMaximum"));
    let mut kill = write_failure.is_some_and(|(.., kill)| kill);
    let begin = Instant::now();
    while !is_done(&running.api) {
        live(&running.api);
        if kill && running.api.has_failed_write() {
            kill = false;
            running = Running::over(running.kill().await).await;
        }
        let writes = || running.api.writes();
        assert!(begin.elapsed() < END, "{write_failure:?}: {:?}", writes());
        sleep(Duration::from_millis(20)).await;
    }
    running.until_quiet().await;
    let status = status(&running.api);
    let [eviction] = status["evictions"].as_array().expect("a list").as_slice() else {
        panic!("{status}");
    };
    assert_eq!(eviction["podUid"], "p");
    let why = eviction["message"].as_str().expect("a text");
    assert!(
        why.contains("CUDA error 700") && why.contains("after 5 restarts"),
        "{why}"
    );
    // An answer with an error is believed: the API server says that it did not evict.
    let is_told =
        |(_, fault, kill): (usize, _, bool)| !kill && fault != WriteFault::ErrorAfterWrite;
    if write_failure.is_none_or(is_told) {
        let published = running.api.published_events();
        let about_pod = published
            .iter()
            .filter(|event| event["regarding"]["uid"] == "p");
        assert_eq!(about_pod.count(), 1, "{write_failure:?}: {published:?}");
    }
    let writes = running.api.writes().len();
    running.stop().await;
    writes - before
}

#[tokio::test]
async fn pod_over_restart_limit_is_evicted_after_any_failed_write() {
    let writes = run_until_evicted(None).await;
    assert!(writes >= 3, "recorded, evicted, closed: {writes}");
    let write_faults = [
        (
            WriteFault::Refused(StatusCode::INTERNAL_SERVER_ERROR),
            false,
        ),
        (WriteFault::ErrorAfterWrite, false),
        (WriteFault::ResponseDropped, false),
        (WriteFault::RequestDropped, true),
        (WriteFault::ResponseDropped, true),
    ];
    let write_failures = (1..=writes)
        .flat_map(|number| write_faults.map(|(write_fault, kill)| (number, write_fault, kill)));
    let ends =
        stream::iter(write_failures).map(|write_failure| run_until_evicted(Some(write_failure)));
    ends.buffer_unordered(6).collect::<Vec<_>>().await;
}

async fn until_evicted(api: &SimApiServer, namespace: &str) {
    let begin = Instant::now();
    while !api.get("pods", namespace, "p").is_null() {
        assert!(begin.elapsed() < END, "{:?}", api.writes());
        sleep(Duration::from_millis(20)).await;
    }
}

/// Adds pod `p` of namespace `other`, which has no budget.
fn with_pod_without_budget(api: &SimApiServer) {
    small(api);
    let mut pod = pod("p", 4);
    pod["metadata"]["namespace"] = json!("other");
    pod["metadata"]["uid"] = json!("other-p");
    api.put("pods", pod);
}

/// The agent's report that pod `p` of namespace `other` has poisoned its context too often.
fn fault_without_budget() -> Value {
    let mut faults = fault("BeyondMaximum");
    faults[0]["container"]["namespace"] = json!("other");
    faults[0]["container"]["podUid"] = json!("other-p");
    faults
}

#[tokio::test]
async fn pod_without_budget_is_evicted_after_its_event() {
    let running = Running::start(with_pod_without_budget).await;
    running.until_ready().await;
    let refused = StatusCode::INTERNAL_SERVER_ERROR;
    running
        .api
        .refuse_requests("/namespaces/other/events", refused, 2);
    set_faults(&running.api, fault_without_budget());
    until_evicted(&running.api, "other").await;
    let requests = running.api.requests();
    let sent = |end: &str| -> Vec<Instant> {
        let of_kind = requests
            .iter()
            .filter(|(_, request)| request.ends_with(end));
        of_kind.map(|(time, _)| *time).collect()
    };
    let (events, evictions) = (
        sent("/namespaces/other/events"),
        sent("/namespaces/other/pods/p/eviction"),
    );
    assert_eq!((events.len(), evictions.len()), (3, 1), "{requests:?}");
    assert!(events[2] < evictions[0], "the Event is stored before");
    let published = running.api.published_events();
    let [event] = published
        .iter()
        .filter(|event| event["regarding"]["uid"] == "other-p")
        .collect::<Vec<_>>()[..]
    else {
        panic!("{published:?}");
    };
    assert_eq!(event["reason"], "GpuContextPoisoned");
    let note = event["note"].as_str().expect("a text");
    assert!(note.contains("after 5 restarts within 600 s"), "{note}");
    running.stop().await;
}

#[tokio::test]
async fn pod_of_an_unreadable_budget_is_not_evicted() {
    let running = Running::start(|api| {
        with_pod_without_budget(api);
        let mut unreadable = budget("other", "16Gi");
        unreadable["spec"]["deviceMemory"]["guaranteed"] = json!(["16Gi"]);
        api.put(BUDGETS, unreadable);
    })
    .await;
    running.until_ready().await;
    set_faults(&running.api, fault_without_budget());
    sleep(Duration::from_secs(2)).await;
    assert!(!running.api.get("pods", "other", "p").is_null());
    running.api.put(BUDGETS, budget("other", "16Gi"));
    until_evicted(&running.api, "other").await;
    running.stop().await;
}

#[tokio::test]
async fn eviction_is_recorded_first_and_done_once_by_two_operators() {
    let first = Running::start(small).await;
    first.until_ready().await;
    let second = Running::over(first.api.clone()).await;
    first.api.protect_pod("p");
    set_faults(&first.api, fault("BeyondMaximum"));
    let tried = first.until("it is on record", |status| {
        status["evictions"][0]["pod"] == "p"
    });
    tried.await;
    assert!(!first.api.get("pods", "team", "p").is_null());
    assert_eq!(status(&first.api)["contexts"]["open"], 1);
    sleep(Duration::from_millis(1500)).await;
    let status = status(&first.api);
    assert_eq!(
        status["evictions"].as_array().expect("a list").len(),
        1,
        "{status}"
    );
    second.stop().await;
    first.stop().await;
}

#[tokio::test]
async fn reported_fault_is_restarted_once_when_the_policy_changes() {
    let with = |action: &str, generation: u64| {
        let mut budget = budget("team", "16Gi");
        budget["spec"]["contextPolicy"] = json!({ "action": action });
        budget["metadata"]["generation"] = json!(generation);
        budget
    };
    let running = Running::start(|api| {
        small(api);
        api.put(BUDGETS, with("Report", 1));
    })
    .await;
    running.until_ready().await;
    set_faults(&running.api, fault("Report"));
    let orders = || running.api.get("gpunodes", "", "n")["spec"]["restarts"].clone();
    let until = async |wanted: Value| {
        let begin = Instant::now();
        while orders() != wanted {
            assert!(begin.elapsed() < END, "{}", orders());
            sleep(Duration::from_millis(20)).await;
        }
    };
    running
        .until("the fault is open", |status| {
            status["contexts"]["open"] == 1
        })
        .await;
    sleep(Duration::from_millis(1500)).await;
    assert!(orders().as_array().is_none_or(Vec::is_empty));
    running.api.put(BUDGETS, with("InPlace", 2));
    let order = json!({ "fault": "aa-3", "podUid": "p", "container": "c", "processGeneration": 4 });
    until(json!([order])).await;
    let policy =
        json!({ "action": "InPlace", "maxRestarts": 5, "windowSeconds": 600, "graceSeconds": 10 });
    running.until_told("team", policy).await;
    let written = running.orders_written();
    sleep(Duration::from_millis(1500)).await;
    assert_eq!(running.orders_written(), written, "written once");
    set_faults(&running.api, json!([]));
    until(json!([])).await;
    assert!(!running.api.get("pods", "team", "p").is_null());
    running.stop().await;
}

#[tokio::test]
async fn due_restart_is_written_before_context_policies() {
    let others: Vec<_> = (0..30).map(|number| format!("a{number:02}")).collect();
    let restarts = |namespace: &str, guaranteed: &str| {
        let mut budget = budget(namespace, guaranteed);
        budget["spec"]["contextPolicy"] = json!({ "action": "InPlace" });
        budget
    };
    let running = Running::start(|api| {
        small(api);
        api.put(BUDGETS, restarts("team", "16Gi"));
        for name in &others {
            api.put(BUDGETS, restarts(name, "0"));
        }
        set_faults(api, fault("Report"));
    })
    .await;
    let is_told = |namespace: &str| !running.api.get("gpunamespaces", "", namespace).is_null();
    let begin = Instant::now();
    while !others.iter().all(|namespace| is_told(namespace)) || !is_told("team") {
        assert!(begin.elapsed() < END, "{:?}", running.api.writes());
        sleep(Duration::from_millis(20)).await;
    }
    let writes = running.api.writes();
    let places = |what: &str| {
        let all = writes.iter().enumerate();
        let of = all.filter(|(_, write)| write.contains(what));
        of.map(|(place, _)| place).collect::<Vec<_>>()
    };
    // The settings of the pod, and its restart.
    let of_node = places("/gpunodes/n");
    assert_eq!(of_node.len(), 2, "{writes:?}");
    assert!(of_node[1] < places("/gpunamespaces/")[0], "{writes:?}");
    sleep(Duration::from_millis(1500)).await;
    assert_eq!(running.orders_written(), others.len() + 2, "each once");
    running.stop().await;
}

#[tokio::test]
async fn reported_usage_is_summed_over_nodes_and_peak_stays() {
    let running = Running::start(small).await;
    running.until_ready().await;
    let report = |node: &str, observed: u64, denials: u64| {
        let mut object = running.api.get("gpunodes", "", node);
        object["status"]["namespaces"] = json!([
            { "namespace": "team", "observed": observed, "observedManaged": 2 * observed,
              "denials": denials, "poisoned": 2, "restarts": 1 },
            { "namespace": "other", "observed": 9, "denials": 9, "poisoned": 9, "restarts": 9 }]);
        running.api.put("gpunodes", object);
    };
    running.api.put("gpunodes", gpu_node("m", 8));
    report("n", 3, 5);
    // A report on a namespace without a pod on the node does not count.
    report("m", 4, 6);
    let reports_only_n = |status: &Value| {
        status["denials"] == 11 && status["deviceMemory"]["observed"]["quanta"] == 3
    };
    running
        .until("its pods are on one node", reports_only_n)
        .await;
    let mut there = pod("q", 1);
    there["spec"]["nodeName"] = json!("m");
    running.api.put("pods", there);
    let observes = |observed: u64, peak: u64| {
        move |status: &Value| {
            let is_at = |memory: &Value, observed: u64, peak: u64| {
                memory["observed"]["quanta"] == observed && memory["peak"]["quanta"] == peak
            };
            is_at(&status["deviceMemory"], observed, peak)
                && is_at(&status["managedMemory"], 2 * observed, 2 * peak)
        }
    };
    let status = running.until("both nodes count", observes(7, 7)).await;
    assert_eq!(status["denials"], 11);
    assert_eq!(
        status["contexts"],
        json!({ "open": 0, "poisoned": 4, "restarts": 2 })
    );
    report("m", 1, 6);
    running.until("the peak stays", observes(4, 7)).await;
    let metrics = running.get("/metrics").await;
    let device = r#"resource="gpu-memory"} 7516192768"#;
    let managed = r#"resource="managed-memory"} 15032385536"#;
    for peak in [device, managed] {
        let line = format!(r#"bursar_budget_memory_peak_bytes{{namespace="team",{peak}"#);
        assert!(metrics.contains(&line), "{metrics}");
    }
    assert!(metrics.contains(r#"bursar_operator_budgets{condition="Ready",status="True"} 1"#));
    assert!(metrics.contains(r#"bursar_operator_watch_age_seconds{kind="Pods"} "#));
    running.stop().await;
}
