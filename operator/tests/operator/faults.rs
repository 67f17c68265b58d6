//! Tests an API server that fails writes, operators that crash, and late watches.

use std::time::Duration;

use axum::http::StatusCode;
use bursar_sim_api::{SimApiServer, WriteFault};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};

use crate::{BUDGETS, END, Running, budget, condition, is_long, pod, small};

const HARD: &str = "requests.bursar.dev/gpu-memory-gib";
/// A resource that no quota of the operator caps.
const OTHER: &str = "requests.bursar.dev/gpu-memory-512mib";
const OVERFLOW: &str = "bursar.dev/overflow";

fn quota(api: &SimApiServer, which: &str) -> Value {
    let name = format!("gpu-memory-budget-{which}");
    api.get("resourcequotas", "team", &name)
}

fn hard(api: &SimApiServer, which: &str) -> Value {
    quota(api, which)["spec"]["hard"][HARD].clone()
}

fn by_hand(api: &SimApiServer, which: &str, change: impl FnOnce(&mut Value)) {
    let mut quota = quota(api, which);
    change(&mut quota);
    api.put("resourcequotas", quota);
}

fn labelled(api: &SimApiServer) -> bool {
    api.get("namespaces", "", "team")["metadata"]["labels"]["bursar.dev/budget"] == "enforced"
}

fn spec(guaranteed: &str, limit: &str, generation: u64) -> Value {
    let mut budget = budget("team", guaranteed);
    budget["spec"]["deviceMemory"]["limit"] = json!(limit);
    budget["metadata"]["generation"] = json!(generation);
    budget
}

/// A change of the cluster, and how its final state is recognized.
struct Transition {
    name: &'static str,
    change: fn(&SimApiServer),
    done: fn(&SimApiServer) -> bool,
}

/// Stores the budget with its present status.
fn put_budget(api: &SimApiServer, mut wanted: Value) {
    wanted["status"] = api.status(BUDGETS, "team", "default");
    api.put(BUDGETS, wanted);
}

fn ready(api: &SimApiServer, generation: u64) -> bool {
    let status = api.status(BUDGETS, "team", "default");
    status["observedGeneration"] == generation && condition(&status, "Ready")["status"] == "True"
}

fn enforced(api: &SimApiServer, generation: u64) -> bool {
    let status = api.status(BUDGETS, "team", "default");
    status["observedGeneration"] == generation && condition(&status, "Enforced")["status"] == "True"
}

fn exceeded(api: &SimApiServer) -> bool {
    let status = api.status(BUDGETS, "team", "default");
    !status.is_null() && condition(&status, "Exceeded")["status"] == "True"
}

const TRANSITIONS: [Transition; 14] = [
    Transition {
        name: "a budget is made",
        change: |api| put_budget(api, spec("16Gi", "24Gi", 1)),
        done: |api| {
            hard(api, "guaranteed") == "16"
                && hard(api, "limit") == "24"
                && labelled(api)
                && ready(api, 1)
        },
    },
    Transition {
        name: "it is raised",
        change: |api| put_budget(api, spec("20Gi", "32Gi", 2)),
        done: |api| hard(api, "guaranteed") == "20" && hard(api, "limit") == "32" && ready(api, 2),
    },
    Transition {
        name: "it is lowered below what runs",
        change: |api| put_budget(api, spec("2Gi", "2Gi", 3)),
        done: |api| hard(api, "guaranteed") == "2" && enforced(api, 3) && exceeded(api),
    },
    Transition {
        name: "it makes no sense",
        change: |api| put_budget(api, spec("9Gi", "2Gi", 4)),
        done: |api| {
            let status = api.status(BUDGETS, "team", "default");
            hard(api, "guaranteed") == "2" && condition(&status, "Accepted")["status"] == "False"
        },
    },
    Transition {
        name: "it makes sense again",
        change: |api| put_budget(api, spec("16Gi", "24Gi", 5)),
        done: |api| hard(api, "guaranteed") == "16" && ready(api, 5) && !exceeded(api),
    },
    Transition {
        name: "it lends",
        change: |api| {
            let mut budget = spec("16Gi", "24Gi", 6);
            budget["spec"]["overflow"] = json!("Borrow");
            put_budget(api, budget);
        },
        done: |api| {
            quota(api, "guaranteed")["metadata"]["labels"][OVERFLOW] == "Borrow" && ready(api, 6)
        },
    },
    Transition {
        name: "a quota is changed by hand",
        change: |api| {
            by_hand(api, "limit", |quota| {
                quota["spec"]["hard"][HARD] = json!("999")
            })
        },
        done: |api| hard(api, "limit") == "24" && ready(api, 6),
    },
    Transition {
        name: "a scope is put on a quota by hand",
        change: |api| {
            let scope = json!({ "matchExpressions": [{ "scopeName": "Terminating", "operator": "Exists" }] });
            by_hand(api, "limit", |quota| quota["spec"]["scopeSelector"] = scope);
        },
        done: |api| quota(api, "limit")["spec"]["scopeSelector"].is_null() && ready(api, 6),
    },
    Transition {
        name: "a quota is added to by hand",
        change: |api| {
            by_hand(api, "limit", |quota| {
                quota["spec"]["hard"][OTHER] = json!("1");
                quota["metadata"]["labels"][OVERFLOW] = json!("Borrow");
            });
        },
        done: |api| {
            let quota = quota(api, "limit");
            let off = |of: &Value, field: &str| of[field].is_null();
            off(&quota["spec"]["hard"], OTHER)
                && off(&quota["metadata"]["labels"], OVERFLOW)
                && ready(api, 6)
        },
    },
    Transition {
        name: "a quota is deleted by hand",
        change: |api| api.delete("resourcequotas", "team", "gpu-memory-budget-guaranteed"),
        done: |api| hard(api, "guaranteed") == "16" && ready(api, 6),
    },
    Transition {
        name: "the label is taken off",
        change: |api| {
            api.put(
                "namespaces",
                json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "team" } }),
            );
        },
        done: |api| labelled(api) && ready(api, 6),
    },
    Transition {
        name: "pods go beyond the cohort",
        change: |api| api.put(BUDGETS, budget("other", "30Gi")),
        done: |api| {
            let status = api.status(BUDGETS, "team", "default");
            condition(&status, "Covered")["status"] == "False"
        },
    },
    Transition {
        name: "a pod comes",
        change: |api| api.put("pods", pod("q", 3)),
        done: |api| {
            api.status(BUDGETS, "team", "default")["deviceMemory"]["requested"]["quanta"] == 7
        },
    },
    Transition {
        name: "the budget goes",
        change: |api| {
            api.delete(BUDGETS, "team", "default");
            // The garbage collector deletes them by owner reference.
            api.delete("resourcequotas", "team", "gpu-memory-budget-guaranteed");
            api.delete("resourcequotas", "team", "gpu-memory-budget-limit");
        },
        done: |api| !labelled(api),
    },
];

async fn until(goal: &str, api: &SimApiServer, done: impl Fn(&SimApiServer) -> bool) {
    let reached = async {
        while !done(api) {
            sleep(Duration::from_millis(10)).await;
        }
    };
    assert!(
        timeout(END, reached).await.is_ok(),
        "{goal}: not reached within {END:?}; the last writes: {:?}; {}",
        api.writes().iter().rev().take(8).collect::<Vec<_>>(),
        api.status(BUDGETS, "team", "default"),
    );
}

/// Runs every transition while write number `number` meets `fault`. With `killed` the operator
/// crashes then. Returns how many such writes occurred.
///
/// The operator waits 5 s for a lost response. So outside the long tier a run without a crash loses
/// responses in every third transition; the next number does so in the transitions after these.
async fn run_transitions(number: usize, fault: WriteFault, killed: bool) -> usize {
    let mut running = Running::start(small).await;
    let mut failed_writes = 0;
    let waits = fault == WriteFault::ResponseDropped && !killed;
    for (index, Transition { name, change, done }) in TRANSITIONS.into_iter().enumerate() {
        let meets_fault = !waits || is_long() || index % 3 == number % 3;
        if meets_fault {
            running.api.fail_write(number, fault);
        }
        change(&running.api);
        let goal = format!("{name}, write {number} {fault:?}, killed {killed}");
        if killed {
            let start = Instant::now();
            let settled =
                |api: &SimApiServer| done(api) && start.elapsed() > Duration::from_millis(900);
            while !(running.api.has_failed_write() || settled(&running.api)) {
                assert!(start.elapsed() < END, "{goal}");
                sleep(Duration::from_millis(5)).await;
            }
            if running.api.has_failed_write() {
                running = Running::over(running.kill().await).await;
            }
        }
        until(&goal, &running.api, done).await;
        failed_writes += usize::from(meets_fault && running.api.has_failed_write());
    }
    running.until_quiet().await;
    running.stop().await;
    failed_writes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_transition_converges_after_a_crash_at_any_write() {
    let mut runs = tokio::task::JoinSet::new();
    for number in 1..=4 {
        for fault in [WriteFault::RequestDropped, WriteFault::ResponseDropped] {
            runs.spawn(run_transitions(number, fault, true));
        }
    }
    let failed_writes: usize = runs.join_all().await.into_iter().sum();
    assert!(failed_writes >= 40, "only {failed_writes} writes failed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_garbled_or_unanswered_write_is_repaired() {
    let mut runs = tokio::task::JoinSet::new();
    for number in 1..=3 {
        for fault in [
            WriteFault::Refused(StatusCode::CONFLICT),
            WriteFault::Refused(StatusCode::INTERNAL_SERVER_ERROR),
            WriteFault::Refused(StatusCode::TOO_MANY_REQUESTS),
            WriteFault::ErrorAfterWrite,
            WriteFault::ResponseDropped,
        ] {
            runs.spawn(run_transitions(number, fault, false));
        }
    }
    let failed_writes: usize = runs.join_all().await.into_iter().sum();
    assert!(failed_writes >= 75, "only {failed_writes} writes failed");
}

#[tokio::test]
async fn budget_is_in_force_only_after_quota_status_is_synced() {
    let running = Running::start(|api| {
        small(api);
        api.set_controller_manager_running(false);
    })
    .await;
    let pending = |status: &Value| {
        !status.is_null() && condition(status, "Enforced")["reason"] == "QuotaPending"
    };
    running.until("it is pending", pending).await;
    sleep(Duration::from_millis(1500)).await;
    assert!(!labelled(&running.api));
    running.api.set_controller_manager_running(true);
    running.until_ready().await;
    assert!(labelled(&running.api));
    until("an Event is published", &running.api, |api| {
        !api.event_reasons().is_empty()
    })
    .await;
    assert_eq!(running.api.event_reasons(), ["QuotasInForce"]);
    running.stop().await;
}

/// A pod that a late quota admitted a minute after the budget came into force.
fn slipped_in(name: &str, quanta: u64) -> Value {
    let mut pod = pod(name, quanta);
    pod["metadata"]["creationTimestamp"] = json!("2099-01-01T00:00:00Z");
    pod["spec"]["priorityClassName"] = json!("bursar-borrowed");
    pod
}

#[tokio::test]
async fn excess_pod_is_evicted_once_with_an_event() {
    let running = Running::start(small).await;
    running.until_ready().await;
    running.api.put("pods", slipped_in("late", 14));
    until("the budget is exceeded", &running.api, exceeded).await;
    assert!(
        !running.api.get("pods", "team", "late").is_null(),
        "it has a moment"
    );
    until("it is gone", &running.api, |api| {
        api.get("pods", "team", "late").is_null()
    })
    .await;
    running.until_ready().await;
    let writes = running.api.writes();
    let evictions = writes.iter().filter(|write| write.ends_with("/eviction"));
    assert_eq!(evictions.count(), 1);
    assert!(!running.api.get("pods", "team", "p").is_null());
    // The Event follows the status.
    let reasons = [
        "QuotasInForce",
        "OverLimit",
        "GpuMemoryBudgetExceeded",
        "WithinBudget",
    ];
    until("its end is published", &running.api, |api| {
        api.event_reasons().len() >= reasons.len()
    })
    .await;
    assert_eq!(running.api.event_reasons(), reasons);
    running.stop().await;
}

#[tokio::test]
async fn late_watch_alone_evicts_nobody() {
    let running = Running::start(small).await;
    running.until_ready().await;
    running.api.put("pods", slipped_in("late", 14));
    running.api.put("pods", slipped_in("later", 1));
    until("the budget is exceeded", &running.api, exceeded).await;
    running.api.set_watch_paused("pods", true);
    running.api.delete("pods", "team", "late");
    sleep(Duration::from_secs(10)).await;
    let writes = running.api.writes();
    let evictions = writes.iter().filter(|write| write.contains("/pods/"));
    assert_eq!(evictions.count(), 0, "{writes:?}");
    running.api.set_watch_paused("pods", false);
    running.until_ready().await;
    running.stop().await;
}

#[tokio::test]
async fn failed_eviction_does_not_block_the_status() {
    let running = Running::start(small).await;
    running.until_ready().await;
    let refused = StatusCode::INTERNAL_SERVER_ERROR;
    running
        .api
        .refuse_requests("/late/eviction", refused, usize::MAX);
    running.api.put("pods", slipped_in("late", 14));
    until("the budget is exceeded", &running.api, exceeded).await;
    // One eviction has failed by then and is retried.
    sleep(Duration::from_millis(6500)).await;
    let before = running.api.status(BUDGETS, "team", "default");
    let before = before["deviceMemory"]["requested"]["quanta"].as_i64();
    running.api.put("pods", pod("more", 1));
    running.until_requested(before.expect("a count") + 1).await;
    running.stop().await;
}

#[tokio::test]
async fn failed_label_or_quota_is_named_and_blocks_no_status() {
    for (path, object) in [
        ("/namespaces/team", "the label of Namespace team"),
        (
            "/gpu-memory-budget-limit",
            "ResourceQuota team/gpu-memory-budget-limit",
        ),
    ] {
        let running = Running::start(|api| {
            small(api);
            api.refuse_requests(path, StatusCode::FORBIDDEN, 3);
        })
        .await;
        let failure = format!("; failed to write {object}: access denied");
        let names_it = |status: &Value| {
            !status.is_null()
                && condition(status, "Enforced")["message"]
                    .to_string()
                    .contains(&failure)
        };
        running.until("the failure is named", names_it).await;
        running.api.put("pods", pod("q", 1));
        let status = running.until_requested(5).await;
        assert!(names_it(&status), "{status}");
        let recovers = |status: &Value| !names_it(status);
        running.until("the failure ends", recovers).await;
        running.until_ready().await;
        assert!(labelled(&running.api));
        running.stop().await;
    }
}

#[tokio::test]
async fn disruption_budget_is_honoured_for_its_grace() {
    let running = Running::start(|api| {
        small(api);
        api.protect_pod("late");
    })
    .await;
    running.until_ready().await;
    running.api.put("pods", slipped_in("late", 14));
    let tried = |api: &SimApiServer| {
        let writes = api.writes();
        writes
            .iter()
            .filter(|write| write.ends_with("/eviction"))
            .count()
            >= 2
    };
    until("its eviction is tried again", &running.api, tried).await;
    assert!(!running.api.get("pods", "team", "late").is_null());
    running.stop().await;
}

#[tokio::test]
async fn late_watch_causes_no_second_write() {
    let running = Running::start(small).await;
    running.until_ready().await;
    let kinds = [
        "resourcequotas",
        "namespaces",
        "gpunodes",
        "gpunamespaces",
        "nodes",
    ];
    for kind in kinds {
        running.api.set_watch_paused(kind, true);
    }
    let before = running.api.writes().len();
    let mut raised = spec("20Gi", "32Gi", 2);
    raised["spec"]["contextPolicy"] = json!({ "action": "InPlace" });
    put_budget(&running.api, raised);
    // Each change triggers a reconcile.
    for name in ["q", "r", "s"] {
        running.api.put("pods", pod(name, 1));
        sleep(Duration::from_millis(1100)).await;
    }
    let writes = running.api.writes().split_off(before);
    let of = |end: &str| writes.iter().filter(|write| write.ends_with(end)).count();
    assert_eq!(of("/gpu-memory-budget-limit"), 1, "{writes:?}");
    assert_eq!(of("/gpu-memory-budget-guaranteed"), 1, "{writes:?}");
    assert_eq!(of("/gpunamespaces/team"), 1, "{writes:?}");
    assert_eq!(of("/gpunodes/n"), 3, "each pod: {writes:?}");
    for kind in kinds {
        running.api.set_watch_paused(kind, false);
    }
    until("it is in force", &running.api, |api| ready(api, 2)).await;
    running.until_quiet().await;
    running.stop().await;
}

#[tokio::test]
async fn two_operators_converge() {
    let first = Running::start(small).await;
    let second = Running::over(first.api.clone()).await;
    let transitions = async {
        for Transition { name, change, done } in TRANSITIONS {
            change(&first.api);
            until(name, &first.api, done).await;
        }
    };
    transitions.await;
    first.until_quiet().await;
    second.stop().await;
    first.stop().await;
}
