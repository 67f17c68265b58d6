//! Tests that a waiting pod gets a GPU from borrowers, with any write failing.

use std::time::Duration;

use axum::http::StatusCode;
use bursar_sim_api::{SimApiServer, WriteFault};
use futures::stream::{self, StreamExt as _};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::{END, Running, is_long};

fn pod(name: &str, gib: u32, borrows: bool, runs: bool) -> Value {
    let amount = json!({ "bursar.dev/gpu-memory-gib": gib.to_string() });
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name, "namespace": "team", "uid": name },
        "spec": {
            "nodeName": "n", "priority": if borrows { -10 } else { 0 },
            "priorityClassName": borrows.then_some("bursar-borrowed"),
            "containers": [{ "name": "c", "image": "i", "resources": { "limits": amount, "requests": amount } }],
        },
        "status": { "phase": if runs { "Running" } else { "Pending" } },
    })
}

/// Simulates the agent: bound pods, waiting containers and acknowledged reservations.
fn report(api: &SimApiServer) {
    let there = |name: &&str| !api.get("pods", "team", name).is_null();
    let [large, small] = [("large", 10), ("small", 4)].map(|(name, gib)| {
        let bound = there(&name);
        (
            bound,
            json!({ "uid": name, "quanta": gib }),
            if bound { gib } else { 0 },
        )
    });
    let mut node = api.get("gpunodes", "", "n");
    let held = node["spec"]["reservations"][0].clone();
    let free = 16 - large.2 - small.2;
    let bound = free >= 8;
    let mut pods = Vec::new();
    pods.extend(large.0.then_some(large.1));
    pods.extend(small.0.then_some(small.1));
    if bound {
        pods.push(json!({ "uid": "owner", "quanta": 8 }));
        api.put("pods", pod("owner", 8, false, true));
    }
    let waiting = json!([{ "podUid": "owner", "namespace": "team", "pod": "owner", "container": "c",
        "quanta": 8, "since": "2026-01-01T00:00:00Z" }]);
    let free = free - if bound { 8 } else { 0 };
    let status = json!({
        "quantum": "1Gi", "deviceMemory": { "allocatable": 16, "free": free, "largestFree": free },
        "waiting": if bound { json!([]) } else { waiting },
        "gpus": [{ "uuid": "GPU-0", "index": 0, "model": "m", "memory": "16Gi", "state": "Active", "generation": 1,
            "health": { "status": "Healthy", "reason": "Ok" }, "capacity": 16, "free": free,
            "largestFree": if held.is_null() { free } else { 0 },
            "reservedFor": held["podUid"], "pods": pods }],
    });
    if node["status"] != status {
        node["status"] = status;
        api.put("gpunodes", node);
    }
}

fn fill(api: &SimApiServer) {
    let ready = json!([{ "type": "Ready", "status": "True" }]);
    api.put(
        "nodes",
        json!({
            "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n", "uid": "n" }, "spec": {},
            "status": { "conditions": ready, "allocatable": { "bursar.dev/gpu-memory-gib": "24", "pods": "110" } },
        }),
    );
    api.put("gpunodes", json!({
        "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuNode", "metadata": { "name": "n", "uid": "g" }, "spec": {},
    }));
    api.put("pods", pod("large", 10, true, true));
    api.put("pods", pod("small", 4, true, true));
    api.put("pods", pod("owner", 8, false, false));
    report(api);
}

fn is_done(api: &SimApiServer) -> bool {
    let node = api.get("gpunodes", "", "n");
    let reserved = node["spec"]["reservations"].as_array().map_or(0, Vec::len);
    let labels = api.get("nodes", "", "n")["metadata"]["labels"].clone();
    let large = api.get("pods", "team", "large");
    large.is_null()
        && reserved == 0
        && api.get("pods", "team", "owner")["status"]["phase"] == "Running"
        && labels["bursar.dev/largest-free-gib"] == "4"
        && labels["bursar.dev/largest-reclaimable-gib"] == "8"
        && labels["bursar.dev/largest-gpu-gib"] == "16"
}

/// Runs the operator until the pod is bound. Returns the number of writes.
async fn run_until_bound(write_failure: Option<(usize, WriteFault)>) -> usize {
    let running = Running::start(|api| {
        fill(api);
        if let Some((number, write_fault)) = write_failure {
            api.fail_write(number, write_fault);
        }
    })
    .await;
    let begin = Instant::now();
    while !is_done(&running.api) {
        report(&running.api);
        assert!(
            begin.elapsed() < END,
            "{write_failure:?}: {:?}",
            running.api.writes()
        );
        sleep(Duration::from_millis(100)).await;
    }
    // Only the large borrower was evicted. The small one would not suffice, and both are too many.
    assert!(
        !running.api.get("pods", "team", "small").is_null(),
        "{write_failure:?}"
    );
    running.until_quiet().await;
    let writes = running.api.writes().len();
    running.stop().await;
    writes
}

#[tokio::test]
async fn pending_pod_gets_its_gpu_after_any_failed_write() {
    let writes = run_until_bound(None).await;
    assert!(writes >= 4, "label, reserve, evict, clear");
    let write_faults = [
        WriteFault::Refused(StatusCode::CONFLICT),
        WriteFault::Refused(StatusCode::INTERNAL_SERVER_ERROR),
        WriteFault::ResponseDropped,
        WriteFault::ErrorAfterWrite,
    ];
    let write_failures =
        (1..=writes).flat_map(|number| write_faults.map(|write_fault| (number, write_fault)));
    // Outside the long tier, each write meets every other fault.
    let chosen = write_failures.enumerate();
    let write_failures = chosen
        .filter(|(index, (number, _))| is_long() || (index + number) % 2 == 0)
        .map(|(_, write_failure)| write_failure);
    // Only a few at a time, because the other tests' operators have time bounds too.
    let ends =
        stream::iter(write_failures).map(|write_failure| run_until_bound(Some(write_failure)));
    ends.buffer_unordered(5).collect::<Vec<_>>().await;
}

/// The Events on the waiting pod: reason, note and the pod that each names.
fn events_on_owner(api: &SimApiServer) -> Vec<(String, String, String)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let events = api.published_events().into_iter();
    let on_owner = events.filter(|event| event["regarding"]["name"] == "owner");
    on_owner
        .map(|event| {
            let related = text(&event["related"]["uid"]);
            (text(&event["reason"]), text(&event["note"]), related)
        })
        .collect()
}

#[tokio::test]
async fn pending_pod_gets_events_of_victim_and_protection_once() {
    let running = Running::start(|api| {
        fill(api);
        api.protect_pod("large");
    })
    .await;
    let begin = Instant::now();
    // Refused evictions are requested again every 5 s.
    while begin.elapsed() < Duration::from_secs(8) {
        report(&running.api);
        sleep(Duration::from_millis(100)).await;
    }
    let protected = events_on_owner(&running.api);
    assert_eq!(protected.len(), 1, "{protected:?}");
    let (reason, note, related) = &protected[0];
    assert_eq!(
        (reason.as_str(), related.as_str()),
        ("GpuMemoryVictimProtected", "large")
    );
    assert!(
        note.starts_with("a PodDisruptionBudget protects team/large on GPU-0 of n, for at most "),
        "{note}"
    );
    running.api.unprotect_pod("large");
    while !is_done(&running.api) {
        report(&running.api);
        assert!(begin.elapsed() < END, "{:?}", running.api.writes());
        sleep(Duration::from_millis(100)).await;
    }
    let events = events_on_owner(&running.api);
    assert_eq!(events.len(), 2, "{events:?}");
    let evicted = (
        "GpuMemoryVictimEvicted".to_owned(),
        "team/large is evicted from GPU-0 of n for this pod".to_owned(),
        "large".to_owned(),
    );
    assert_eq!(events[1], evicted);
    running.stop().await;
}

/// A node of one GPU of 16, on which `owner` waits if it is `n`.
fn gpu_node(name: &str, pods: &[(&str, u32)]) -> Value {
    let waiting = json!({ "podUid": "owner", "namespace": "team", "pod": "owner", "container": "c",
        "quanta": 8, "since": "2026-01-01T00:00:00Z" });
    let free = 16 - pods.iter().map(|(_, gib)| gib).sum::<u32>();
    let has = pods
        .iter()
        .map(|(name, gib)| json!({ "uid": name, "quanta": gib }));
    json!({
        "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuNode", "metadata": { "name": name, "uid": name }, "spec": {},
        "status": {
            "quantum": "1Gi", "deviceMemory": { "allocatable": 16, "free": free, "largestFree": free },
            "waiting": if name == "n" { vec![waiting] } else { Vec::new() },
            "gpus": [{ "uuid": format!("GPU-{name}"), "index": 0, "model": "m", "memory": "16Gi", "state": "Active",
                "generation": 1, "health": { "status": "Healthy", "reason": "Ok" }, "capacity": 16, "free": free,
                "largestFree": free, "pods": has.collect::<Vec<_>>() }],
        },
    })
}

/// Puts a pod on one node that waits for memory, while another node has room.
fn put_relocation(api: &SimApiServer) {
    for name in ["n", "m"] {
        api.put("nodes", json!({
            "apiVersion": "v1", "kind": "Node", "metadata": { "name": name, "uid": name }, "spec": {},
            "status": { "conditions": [{ "type": "Ready", "status": "True" }],
                "allocatable": { "bursar.dev/gpu-memory-gib": "24", "pods": "110" } },
        }));
    }
    api.put("gpunodes", gpu_node("n", &[("other", 12)]));
    api.put("gpunodes", gpu_node("m", &[]));
    api.put("pods", pod("other", 12, false, true));
    let mut owner = pod("owner", 8, false, false);
    let mut first = owner["spec"]["containers"][0].clone();
    first["name"] = json!("first");
    first["resources"]["requests"] = json!({ "bursar.dev/gpu-memory-gib": "4" });
    owner["spec"]["containers"] = json!([first, owner["spec"]["containers"][0]]);
    owner["metadata"]["ownerReferences"] = json!([{ "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "o",
        "uid": "o", "controller": true }]);
    api.put("pods", owner);
}

#[tokio::test]
async fn pod_that_has_started_is_not_relocated() {
    let running = Running::start(put_relocation).await;
    running.until_listed().await;
    let api = &running.api;
    // The operator waits for its own write of the pods, which must be in its watch before the
    // pause.
    while api.get("gpunodes", "", "n")["spec"]["pods"].is_null() {
        sleep(Duration::from_millis(20)).await;
    }
    sleep(Duration::from_secs(1)).await;
    api.set_watch_paused("gpunodes", true);
    api.put("gpunodes", gpu_node("n", &[("other", 12), ("owner", 4)]));
    sleep(Duration::from_secs(12)).await;
    let gone = || api.get("pods", "team", "owner").is_null();
    assert!(!gone(), "{:?}", api.writes());
    api.put("gpunodes", gpu_node("n", &[("other", 12)]));
    let begin = Instant::now();
    while !gone() {
        assert!(begin.elapsed() < END, "{:?}", api.writes());
        sleep(Duration::from_millis(100)).await;
    }
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn relocation_is_published_when_any_write_gets_no_answer() {
    let mut runs = tokio::task::JoinSet::new();
    for number in 1..=5 {
        runs.spawn(async move {
            let running = Running::start(|api| {
                put_relocation(api);
                api.fail_write(number, WriteFault::ResponseDropped);
            })
            .await;
            let api = &running.api;
            let has_event = || {
                api.event_reasons()
                    .iter()
                    .any(|it| it == "RelocatedForGpuMemory")
            };
            let begin = Instant::now();
            while !has_event() {
                assert!(begin.elapsed() < END, "write {number}: {:?}", api.writes());
                sleep(Duration::from_millis(100)).await;
            }
            let writes = api.writes();
            let evictions = writes.iter().filter(|write| write.ends_with("/eviction"));
            let was_repeated = evictions.count() > 1;
            running.stop().await;
            was_repeated
        });
    }
    let repeated = runs.join_all().await.into_iter().filter(|it| *it).count();
    assert_eq!(repeated, 1, "one of the writes is the eviction");
}

/// Simulates an agent with two GPUs of 16. With `binds` a pending pod is bound to its reserved GPU.
fn report_two(api: &SimApiServer, pods: &[(&str, usize, u32)], binds: bool) {
    let there = |name: &str| !api.get("pods", "team", name).is_null();
    let mut node = api.get("gpunodes", "", "n");
    let mut bound = false;
    let gpus = [0, 1].map(|index| {
        let uuid = format!("GPU-{index}");
        let mut reserved = node["spec"]["reservations"].as_array().into_iter().flatten();
        let held = reserved.find(|held| held["gpu"] == uuid.as_str()).cloned();
        let on = pods.iter().filter(|(name, on, _)| *on == index && there(name));
        let mut on: Vec<(&str, u32)> = on.map(|(name, _, gib)| (*name, *gib)).collect();
        let used = |on: &[(&str, u32)]| on.iter().map(|(_, gib)| gib).sum::<u32>();
        if binds && held.is_some() && used(&on) <= 8 {
            on.push(("owner", 8));
            bound = true;
        }
        let free = 16 - used(&on);
        let pods: Vec<Value> = on.iter().map(|(name, gib)| json!({ "uid": name, "quanta": gib })).collect();
        json!({ "uuid": uuid, "index": index, "model": "m", "memory": "16Gi", "state": "Active", "generation": 1,
            "health": { "status": "Healthy", "reason": "Ok" }, "capacity": 16, "free": free,
            "largestFree": if held.is_none() { free } else { 0 },
            "reservedFor": held.map(|held| held["podUid"].clone()), "pods": pods })
    });
    if bound {
        api.put("pods", pod("owner", 8, false, true));
    }
    let waits = there("owner") && api.get("pods", "team", "owner")["status"]["phase"] == "Pending";
    let waiting = json!({ "podUid": "owner", "namespace": "team", "pod": "owner", "container": "c",
        "quanta": 8, "since": "2026-01-01T00:00:00Z" });
    let free: i64 = gpus.iter().filter_map(|gpu| gpu["free"].as_i64()).sum();
    node["status"] = json!({
        "quantum": "1Gi", "deviceMemory": { "allocatable": 32, "free": free, "largestFree": free }, "gpus": gpus,
        "waiting": if waits { vec![waiting] } else { Vec::new() },
    });
    api.put("gpunodes", node);
}

#[tokio::test]
async fn two_operators_preempt_on_one_gpu_for_one_pod() {
    let before = [("guaranteed", 0, 6), ("a", 0, 10), ("b", 1, 12)];
    let after = [
        ("guaranteed", 0, 6),
        ("a1", 0, 5),
        ("a2", 0, 5),
        ("b", 1, 12),
    ];
    let first = Running::start(|api| {
        fill(api);
        for name in ["large", "small"] {
            api.delete("pods", "team", name);
        }
        for (name, _, gib) in before {
            api.put("pods", pod(name, gib, name != "guaranteed", true));
        }
        report_two(api, &before, false);
    })
    .await;
    let api = first.api.clone();
    sleep(Duration::from_secs(1)).await;
    let second = Running::over(api.with_separate_watch_pauses()).await;
    second.until_listed().await;
    // The second operator would evict one borrower from the first GPU, which by now has two. The
    // other GPU has one.
    for kind in ["gpunodes", "pods"] {
        second.api.set_watch_paused(kind, true);
    }
    for name in ["a1", "a2"] {
        api.put("pods", pod(name, 5, true, true));
    }
    api.delete("pods", "team", "a");
    let gone = |name: &str| api.get("pods", "team", name).is_null();
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(6) {
        report_two(&api, &after, false);
        sleep(Duration::from_millis(100)).await;
    }
    for kind in ["gpunodes", "pods"] {
        second.api.set_watch_paused(kind, false);
    }
    let reserved = || api.get("gpunodes", "", "n")["spec"]["reservations"].clone();
    while reserved().as_array().is_none_or(|held| !held.is_empty()) {
        report_two(&api, &after, true);
        assert!(begin.elapsed() < END, "{:?}", api.writes());
        sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(
        api.get("pods", "team", "owner")["status"]["phase"],
        "Running"
    );
    assert!(
        gone("b") != (gone("a1") || gone("a2")),
        "{:?}",
        api.writes()
    );
    second.stop().await;
    first.stop().await;
}
