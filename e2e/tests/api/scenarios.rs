//! Defines the scenarios: sequences of changes, each with its expected state.

use std::time::Duration;

use kube::Client;
use libtest_mimic::Failed;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::isolated_scope::{GPU_GIB, IsolatedScope, QUOTA_RESOURCE, condition};
use crate::test_case::{GIVE_UP_AFTER, Outcome, TestCase};

/// A resource that Bursar's quotas do not cap.
const OTHER_RESOURCE: &str = "requests.bursar.dev/other";
const OVERFLOW_LABEL: &str = "bursar.dev/overflow";

pub(crate) async fn hard(scope: &IsolatedScope, which: &str) -> Result<Value, Failed> {
    let quota = scope.get(&scope.quota_path(which)).await?;
    Ok(quota["spec"]["hard"][QUOTA_RESOURCE].clone())
}

async fn is_labelled(scope: &IsolatedScope) -> Result<bool, Failed> {
    let namespace = scope.get(&scope.namespace_path()).await?;
    Ok(namespace["metadata"]["labels"]["bursar.dev/budget"] == "enforced")
}

/// Returns whether the status is of the present spec.
fn is_observed(budget: &Value) -> bool {
    budget["status"]["observedGeneration"] == budget["metadata"]["generation"]
}

fn is(budget: &Value, type_: &str) -> bool {
    is_observed(budget) && condition(budget, type_) == "True"
}

/// Returns whether both quotas have these amounts and are enforced, and the budget is Ready.
pub(crate) async fn in_force(
    scope: &IsolatedScope,
    guaranteed: &str,
    limit: &str,
) -> Result<bool, Failed> {
    Ok(is(&scope.budget().await?, "Ready")
        && hard(scope, "guaranteed").await? == guaranteed
        && hard(scope, "limit").await? == limit
        && is_labelled(scope).await?)
}

fn requested(budget: &Value) -> &Value {
    &budget["status"]["deviceMemory"]["requested"]["quanta"]
}

/// Makes fourteen changes of a budget, its quotas and the pods of its namespace.
pub(crate) async fn budget_scenario(
    mut case: TestCase,
    operator: Client,
) -> Result<Outcome, Failed> {
    case.scope.create_pod("p", 4, false, false).await?;
    let case_ = &mut case;
    case_
        .transition(
            "a budget is made",
            async |at| at.create_budget("16Gi", "24Gi").await,
            async |at| in_force(at, "16", "24").await,
        )
        .await?;
    case_
        .transition(
            "it is raised",
            async |at| {
                at.patch_budget(
                    json!({ "deviceMemory": { "guaranteed": "20Gi", "limit": "32Gi" } }),
                )
                .await
            },
            async |at| in_force(at, "20", "32").await,
        )
        .await?;
    case_
        .transition(
            "it is lowered below what runs",
            async |at| {
                at.patch_budget(json!({ "deviceMemory": { "guaranteed": "2Gi", "limit": "2Gi" } }))
                    .await
            },
            async |at| {
                let budget = at.budget().await?;
                Ok(is(&budget, "Enforced")
                    && is(&budget, "Exceeded")
                    && hard(at, "limit").await? == "2")
            },
        )
        .await?;
    case_
        .transition(
            "it lends",
            async |at| {
                at.patch_budget(json!({ "deviceMemory": { "guaranteed": "16Gi", "limit": "24Gi" }, "overflow": "Borrow" }))
                    .await
            },
            async |at| {
                let quota = at.get(&at.quota_path("guaranteed")).await?;
                Ok(quota["metadata"]["labels"][OVERFLOW_LABEL] == "Borrow"
                    && in_force(at, "16", "24").await?)
            },
        )
        .await?;
    case_
        .transition(
            "a quota is changed by hand",
            async |at| {
                let more = json!({ "spec": { "hard": { QUOTA_RESOURCE: "999" } } });
                at.merge(&at.quota_path("limit"), more).await
            },
            async |at| in_force(at, "16", "24").await,
        )
        .await?;
    case_
        .transition(
            "a scope is put on a quota by hand",
            async |at| {
                let terminating = json!({ "scopeName": "Terminating", "operator": "Exists" });
                let scoped =
                    json!({ "spec": { "scopeSelector": { "matchExpressions": [terminating] } } });
                at.merge(&at.quota_path("limit"), scoped).await
            },
            async |at| {
                let quota = at.get(&at.quota_path("limit")).await?;
                Ok(quota["spec"]["scopeSelector"].is_null() && in_force(at, "16", "24").await?)
            },
        )
        .await?;
    case_
        .transition(
            "a quota is added to by hand",
            async |at| {
                let more = json!({ "metadata": { "labels": { OVERFLOW_LABEL: "Borrow" } }, "spec": { "hard": { OTHER_RESOURCE: "1" } } });
                at.merge(&at.quota_path("limit"), more).await
            },
            async |at| {
                let quota = at.get(&at.quota_path("limit")).await?;
                Ok(quota["spec"]["hard"][OTHER_RESOURCE].is_null()
                    && quota["metadata"]["labels"][OVERFLOW_LABEL].is_null()
                    && in_force(at, "16", "24").await?)
            },
        )
        .await?;
    case_
        .transition(
            "a quota is deleted by hand",
            async |at| at.delete(&at.quota_path("guaranteed")).await,
            async |at| in_force(at, "16", "24").await,
        )
        .await?;
    case_
        .transition(
            "the namespace's label is taken off",
            async |at| {
                // Only the operator may make this change.
                let at = at.with_client(operator);
                let off = json!({ "metadata": { "labels": { "bursar.dev/budget": null } } });
                at.merge(&at.namespace_path(), off).await
            },
            async |at| in_force(at, "16", "24").await,
        )
        .await?;
    case_
        .transition(
            "a pod comes",
            async |at| Ok(at.create_pod("q", 3, false, false).await.map(drop)?),
            async |at| Ok(requested(&at.budget().await?) == 7),
        )
        .await?;
    case_
        .transition(
            "a pod ends",
            async |at| at.delete(&at.pod_path("q")).await,
            async |at| Ok(requested(&at.budget().await?) == 4),
        )
        .await?;
    case_
        .transition("a pod slips in", create_pod_beyond_the_quota, async |at| {
            Ok(at.get(&at.pod_path("late")).await?.is_null()
                && !at.get(&at.pod_path("p")).await?.is_null()
                && in_force(at, "16", "24").await?)
        })
        .await?;
    case_
        .transition(
            "the budget goes",
            async |at| at.delete(&at.budget_path()).await,
            async |at| {
                Ok(at.get(&at.quota_path("limit")).await?.is_null()
                    && at.get(&at.quota_path("guaranteed")).await?.is_null()
                    && !is_labelled(at).await?)
            },
        )
        .await?;
    let lets_in = async |at: &IsolatedScope| {
        if !in_force(at, "16", "24").await? {
            return Ok(false);
        }
        match at.create_pod("again", 1, false, false).await {
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(true),
            other => Ok(other.map(|_| true)?),
        }
    };
    case_
        .transition(
            "it is made again, and lets a pod in",
            async |at| at.create_budget("16Gi", "24Gi").await,
            lets_in,
        )
        .await?;
    case.finish(lets_in).await
}

/// Creates a pod beyond the quota, whose count is reset first, as if the quota counted late.
async fn create_pod_beyond_the_quota(at: &IsolatedScope) -> Result<(), Failed> {
    // A pod of the first seconds may be older than the budget.
    sleep(Duration::from_secs(6)).await;
    let begin = Instant::now();
    loop {
        let unused = json!({ "status": { "used": { QUOTA_RESOURCE: "0" } } });
        let quota = format!("{}/status", at.quota_path("limit"));
        at.merge(&quota, unused).await?;
        match at.create_pod("late", 22, true, false).await {
            Ok(_) => return Ok(()),
            Err(error) if begin.elapsed() > GIVE_UP_AFTER => return Err(error.into()),
            Err(_) => sleep(Duration::from_millis(100)).await,
        }
    }
}

async fn labels_are(
    at: &IsolatedScope,
    free: i32,
    reclaimable: i32,
    gpu: i32,
) -> Result<bool, Failed> {
    let labels = at.node_labels().await?;
    let is = |name: &str, value: i32| {
        let label = labels[format!("bursar.dev/largest-{name}-gib")].as_str();
        label.and_then(|label| label.parse().ok()) == Some(value)
    };
    Ok(is("free", free) && is("reclaimable", reclaimable) && is("gpu", gpu))
}

/// Makes nine changes of a node's GPU and of the settings for its agent.
pub(crate) async fn node_scenario(mut case: TestCase) -> Result<Outcome, Failed> {
    let case_ = &mut case;
    let p = case_.scope.create_pod("p", 4, false, true).await?;
    let p = uid(&p);
    case_.scope.mark_running("p").await?;
    case_.scope.report_gpu(GPU_GIB, &[(p.clone(), 4)]).await?;
    case_
        .transition(
            "a node's budget is made",
            async |at| at.create_budget("20Gi", "60Gi").await,
            async |at| Ok(in_force(at, "20", "60").await? && labels_are(at, 28, 28, 32).await?),
        )
        .await?;
    case_
        .transition(
            "the cohort loses memory",
            async |at| at.report_gpu(12, &[(p.clone(), 4)]).await,
            async |at| {
                let budget = at.budget().await?;
                Ok(condition(&budget, "Covered") == "False" && labels_are(at, 8, 8, 12).await?)
            },
        )
        .await?;
    case_
        .transition(
            "it comes back",
            async |at| at.report_gpu(GPU_GIB, &[(p.clone(), 4)]).await,
            async |at| Ok(is(&at.budget().await?, "Covered") && labels_are(at, 28, 28, 32).await?),
        )
        .await?;
    case_
        .transition(
            "poisoned contexts are restarted in place",
            async |at| {
                at.patch_budget(json!({ "contextPolicy": { "action": "InPlace" } }))
                    .await
            },
            async |at| Ok(at.context_policy().await?["action"] == "InPlace"),
        )
        .await?;
    case_
        .transition(
            "a pod's quota is lowered, after somebody ordered one by hand",
            async |at| {
                let by_hand = json!({ "podUid": p, "container": "c", "quota": "3Gi" });
                at.write_quota_overrides(json!([by_hand])).await?;
                at.write_quota_overrides(json!([])).await?;
                at.patch_budget(json!({ "overrides": [{ "pod": "p", "deviceMemory": "2Gi" }] }))
                    .await
            },
            async |at| {
                let orders = &at.gpu_node().await?["spec"]["quotas"];
                Ok(orders[0]["podUid"] == p.as_str() && orders[0]["quota"] == "2Gi")
            },
        )
        .await?;
    case_
        .transition(
            "both are taken back",
            async |at| {
                at.patch_budget(json!({ "overrides": null, "contextPolicy": null }))
                    .await
            },
            async |at| {
                let spec = &at.gpu_node().await?["spec"];
                let none = |list: &Value| list.as_array().is_none_or(Vec::is_empty);
                Ok(none(&spec["quotas"]) && at.context_policy().await?.is_null())
            },
        )
        .await?;
    let plain = case_.is_undisturbed();
    let bound = owner_waits(case_, p).await?;
    // The operator first gives the scheduler 10 s, too long for a transition with a crash.
    if plain {
        owner_is_nominated(case_, bound).await?;
    }
    let (free, reclaimable) = if plain { (2, 2) } else { (4, 12) };
    case.finish(async |at| room_is_left(at, free, reclaimable).await)
        .await
}

/// Returns whether no reservation is left and the labels show this room.
async fn room_is_left(at: &IsolatedScope, free: i32, reclaimable: i32) -> Result<bool, Failed> {
    let reserved = at.gpu_node().await?["spec"]["reservations"].take();
    let none = reserved.as_array().is_none_or(Vec::is_empty);
    Ok(none && labels_are(at, free, reclaimable, 32).await?)
}

fn uid(object: &Value) -> String {
    let uid = object["metadata"]["uid"].as_str();
    uid.unwrap_or_default().to_owned()
}

/// Queues a claim of 16 GiB on a GPU with 2 free and 26 of borrowers. The operator must evict the
/// larger borrower only. Returns the pods bound in the end.
async fn owner_waits(case: &mut TestCase, owner: String) -> Result<[(String, i32); 3], Failed> {
    let mut bound = vec![(owner, 4)];
    for (name, gib) in [("large", 18), ("small", 8)] {
        let pod = case.scope.create_pod(name, gib, true, true).await?;
        case.scope.mark_running(name).await?;
        bound.push((uid(&pod), gib));
    }
    let of_large = bound[1].0.clone();
    case.transition(
        "borrowers take what is idle",
        async |at| at.report_gpu(GPU_GIB, &bound).await,
        async |at| labels_are(at, 2, 28, 32).await,
    )
    .await?;
    let owner = case.scope.create_pod("owner", 16, false, true).await?;
    let owner = uid(&owner);
    let (after, waits) = (
        [bound[0].clone(), bound[2].clone(), (owner.clone(), 16)],
        Some((owner.as_str(), "owner", 16)),
    );
    case.transition(
        "an owner waits",
        async |at| {
            at.report_gpu_with_queued_claim(GPU_GIB, &bound, waits)
                .await
        },
        async |at| {
            // The test answers reservations and binds pods, in the agent's place.
            let large = at.get(&at.pod_path("large")).await?;
            if uid(&large) == of_large {
                at.report_gpu_with_queued_claim(GPU_GIB, &bound, waits)
                    .await?;
                return Ok(false);
            }
            at.mark_running("owner").await?;
            at.report_gpu(GPU_GIB, &after).await?;
            let small = at.get(&at.pod_path("small")).await?;
            if small.is_null() {
                return Err("who need not go went".into());
            }
            room_is_left(at, 4, 12).await
        },
    )
    .await?;
    Ok(after)
}

/// Marks a pod of 10 GiB Unschedulable; a GPU has 4 free and 8 of a borrower.
async fn owner_is_nominated(case: &mut TestCase, bound: [(String, i32); 3]) -> Result<(), Failed> {
    case.transition(
        "more is guaranteed",
        async |at| {
            at.patch_budget(json!({ "deviceMemory": { "guaranteed": "30Gi" } }))
                .await
        },
        async |at| in_force(at, "30", "60").await,
    )
    .await?;
    let nowhere = uid(&case.scope.create_pod("nowhere", 10, false, false).await?);
    let after = [bound[0].clone(), bound[2].clone(), (nowhere, 10)];
    case.transition(
        "the scheduler has no node for an owner",
        async |at| at.mark_unschedulable("nowhere").await,
        async |at| {
            if !at.get(&at.pod_path("small")).await?.is_null() {
                at.report_gpu(GPU_GIB, &bound).await?;
                return Ok(false);
            }
            let pod = at.get(&at.pod_path("nowhere")).await?;
            if pod["spec"]["nodeName"].is_null() {
                if pod["status"]["nominatedNodeName"] != at.name.as_str() {
                    return Err("somebody went, and nobody keeps the room".into());
                }
                at.bind("nowhere").await?;
                at.mark_running("nowhere").await?;
            }
            at.report_gpu(GPU_GIB, &after).await?;
            room_is_left(at, 2, 2).await
        },
    )
    .await
}

/// Returns whether the operator has written this action into the namespace's GpuNamespace.
async fn action_is(at: &IsolatedScope, action: &str) -> Result<bool, Failed> {
    let is_told = at.context_policy().await?["action"] == action;
    Ok(is_told && is(&at.budget().await?, "Ready"))
}

/// Makes the fault of a poisoned context in a pod's only container, with the agent's action.
fn poisoned(at: &IsolatedScope, pod: &str, pod_uid: &str, action: &str) -> Value {
    let container = json!({ "podUid": pod_uid, "namespace": at.name, "pod": pod, "container": "c", "processGeneration": 3 });
    json!([{ "id": format!("{action}-3").to_lowercase(), "kind": "Context", "gpu": "GPU-0", "gpuGeneration": 1,
        "cudaError": 700, "action": action, "time": "2026-01-01T00:00:00Z", "container": container }])
}

/// Returns whether a pod is evicted, and is the newest of this number of evictions in the status.
/// Closes its fault, in the agent's place.
async fn is_evicted(
    at: &IsolatedScope,
    pod: &str,
    reason: &str,
    evictions: usize,
) -> Result<bool, Failed> {
    let there = at.get(&at.pod_path(pod)).await?;
    if !there.is_null() {
        // An operator that is killed within its request leaves a pod that terminates, and the
        // kubelet ends that.
        if !there["metadata"]["deletionTimestamp"].is_null() {
            at.delete(&at.pod_path(pod)).await?;
        }
        return Ok(false);
    }
    at.report_gpu(GPU_GIB, &[]).await?;
    at.report_faults(json!([])).await?;
    let status = &at.budget().await?["status"];
    let evicted_pods = status["evictions"].as_array();
    let evicted_pods = evicted_pods.filter(|evicted_pods| evicted_pods.len() == evictions);
    let newest = evicted_pods.and_then(|evicted_pods| evicted_pods.first());
    Ok(
        newest.is_some_and(|newest| newest["pod"] == pod && newest["reason"] == reason)
            && status["contexts"]["open"] == 0,
    )
}

/// Makes nine changes around faults and context policies, and moves a waiting pod to another node.
pub(crate) async fn fault_scenario(mut case: TestCase) -> Result<Outcome, Failed> {
    let other = case.scope.second_node().await?;
    let plain = case.is_undisturbed();
    let case_ = &mut case;
    let p = uid(&case_.scope.create_pod("p", 4, false, true).await?);
    let q = uid(&case_.scope.create_pod("q", 4, false, true).await?);
    for pod in ["p", "q"] {
        case_.scope.mark_running(pod).await?;
    }
    let none = |list: &Value| list.as_array().is_none_or(Vec::is_empty);
    case_
        .transition(
            "a budget of two nodes is made",
            async |at| at.create_budget("40Gi", "60Gi").await,
            async |at| {
                Ok(in_force(at, "40", "60").await?
                    && labels_are(at, GPU_GIB, GPU_GIB, GPU_GIB).await?
                    && labels_are(&other, GPU_GIB, GPU_GIB, GPU_GIB).await?)
            },
        )
        .await?;
    case_
        .transition(
            "faults are only reported",
            async |at| {
                at.patch_budget(json!({ "contextPolicy": { "action": "Report" } }))
                    .await
            },
            async |at| action_is(at, "Report").await,
        )
        .await?;
    case_
        .transition(
            "a context is left poisoned",
            async |at| at.report_faults(poisoned(at, "p", &p, "Report")).await,
            async |at| {
                let restarts = &at.gpu_node().await?["spec"]["restarts"];
                Ok(at.budget().await?["status"]["contexts"]["open"] == 1 && none(restarts))
            },
        )
        .await?;
    case_
        .transition(
            "poisoned contexts are restarted",
            async |at| {
                at.patch_budget(json!({ "contextPolicy": { "action": "Restart" } }))
                    .await
            },
            async |at| {
                let order = json!([{ "fault": "report-3", "podUid": p, "container": "c", "processGeneration": 4 }]);
                Ok(at.gpu_node().await?["spec"]["restarts"] == order
                    && action_is(at, "Restart").await?)
            },
        )
        .await?;
    case_
        .transition(
            "the agent has restarted it",
            async |at| at.report_faults(json!([])).await,
            async |at| {
                let restarts = &at.gpu_node().await?["spec"]["restarts"];
                Ok(at.budget().await?["status"]["contexts"]["open"] == 0 && none(restarts))
            },
        )
        .await?;
    case_
        .transition(
            "it is poisoned beyond the maximum",
            async |at| {
                at.report_faults(poisoned(at, "p", &p, "BeyondMaximum"))
                    .await
            },
            async |at| {
                let has_event = !plain || at.has_event("GpuContextPoisoned", "p").await?;
                Ok(has_event && is_evicted(at, "p", "TooManyRestarts", 1).await?)
            },
        )
        .await?;
    case_
        .transition(
            "poisoned contexts are evicted",
            async |at| {
                at.patch_budget(json!({ "contextPolicy": { "action": "Evict" } }))
                    .await
            },
            async |at| action_is(at, "Evict").await,
        )
        .await?;
    case_
        .transition(
            "another one is poisoned",
            async |at| at.report_faults(poisoned(at, "q", &q, "Evict")).await,
            async |at| {
                let has_event = !plain || at.has_event("GpuContextPoisoned", "q").await?;
                Ok(has_event && is_evicted(at, "q", "ContextPolicy", 2).await?)
            },
        )
        .await?;
    queued_pod_is_relocated(case_, plain).await?;
    let evicted = async |at: &IsolatedScope| {
        let has_event = !plain || at.has_event("GpuFault", "holder").await?;
        Ok(has_event && is_evicted(at, "holder", "GpuFault", 3).await?)
    };
    case_
        .transition(
            "its GPU is lost",
            async |at| {
                let fault = json!({ "id": "lost", "kind": "Gpu", "gpu": "GPU-0", "gpuGeneration": 1, "xid": 79,
                    "action": "ResetGpu", "time": "2026-01-01T00:00:00Z" });
                at.report_faults(json!([fault])).await
            },
            evicted,
        )
        .await?;
    case.finish(evicted).await
}

/// Queues a claim of 10 GiB on a GPU with 6 free, while another node has 32.
async fn queued_pod_is_relocated(case: &mut TestCase, plain: bool) -> Result<(), Failed> {
    let holder = case.scope.create_pod("holder", 26, false, true).await?;
    case.scope.mark_running("holder").await?;
    let bound = [(uid(&holder), 26)];
    case.transition(
        "one pod has most of a GPU",
        async |at| at.report_gpu(GPU_GIB, &bound).await,
        async |at| labels_are(at, 6, 6, GPU_GIB).await,
    )
    .await?;
    let queued_pod = uid(&case.scope.create_pod("waiter", 10, false, true).await?);
    let owner = case.scope.create_owner("waiter").await?;
    case.transition(
        "another one waits",
        async |at| {
            at.report_gpu_with_queued_claim(GPU_GIB, &bound, Some((&queued_pod, "waiter", 10)))
                .await
        },
        async |at| {
            if !at.get(&at.pod_path("waiter")).await?.is_null() {
                return Ok(false);
            }
            at.report_gpu(GPU_GIB, &bound).await?;
            let spec = at.gpu_node().await?["spec"].take();
            let moved = &spec["relocations"][0];
            // A crash between the count and the eviction uses up one of three attempts.
            let most = if plain { 1 } else { 2 };
            if moved["owner"] != owner.as_str()
                || !(1..=most).contains(&moved["count"].as_i64().unwrap_or(0))
            {
                return Err(format!("the record of moves: {}", spec["relocations"]).into());
            }
            let has_event = !plain || at.has_event("RelocatedForGpuMemory", "waiter").await?;
            Ok(has_event && spec["reservations"].as_array().is_none_or(Vec::is_empty))
        },
    )
    .await
}
