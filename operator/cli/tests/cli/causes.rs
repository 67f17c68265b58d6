//! Plants causes, and checks that each is explained, with an admin's rights and with a tenant's.

use bursar_cli::agent_metrics::AgentMetrics;
use bursar_cli::explain::workload::{self, Controlled};
use bursar_cli::explain::{Cause, Explanation, Verdict, explain_pod};
use bursar_cli::objects::{Pod, Workload};
use bursar_cli::snapshot::Snapshot;
use bursar_cli::table::Terminal;
use serde_json::{Value, json};

use crate::fixtures::{
    NOW, ago, budget, cluster, condition, event, golden, gpu, gpu_node, node, own_pod, parse, pod,
    tenant, waiting_pod,
};

fn explained(snapshot: &Snapshot, namespace: &str, name: &str) -> Explanation {
    explain_pod(
        snapshot,
        snapshot.pod(namespace, name).expect("the fixture has it"),
    )
}

/// One node with one GPU, and a running pod `ml/p` of 8 on it.
fn small(pods: Vec<Value>, gpu: Value) -> Snapshot {
    Snapshot {
        now: NOW.parse().unwrap(),
        gpu_nodes: vec![parse(gpu_node("n", vec![gpu]))],
        pods: pods.into_iter().map(parse::<Pod>).collect(),
        nodes: vec![parse(node("n"))],
        own_pods: vec![parse(own_pod("agent", "n"))],
        budgets: vec![parse(budget("ml", 64, 64, 8, 0))],
        ..Snapshot::default()
    }
}

fn running() -> Snapshot {
    small(
        vec![pod("ml", "p", "n", 8)],
        gpu("GPU-1", 0, 79, &[("ml-p", 8)]),
    )
}

fn waiting(message: &str, gpu: Value) -> Snapshot {
    let mut snapshot = small(vec![waiting_pod("ml", "p", "n", 50, message)], gpu);
    let waiter = json!({ "podUid": "ml-p", "namespace": "ml", "pod": "p", "container": "main", "quanta": 50, "since": ago(42) });
    let status = snapshot.gpu_nodes[0].status.as_mut().unwrap();
    status.waiting = vec![parse(waiter)];
    snapshot
}

fn pending(message: &str, gpu: Value) -> Snapshot {
    let mut pending = pod("ml", "p", "", 50);
    pending["status"]["conditions"] = json!([{ "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message }]);
    small(vec![pending], gpu)
}

/// A Deployment whose ReplicaSet was refused a pod with this message.
fn refused(message: &str) -> Explanation {
    let mut snapshot = running();
    snapshot.pods.clear();
    let said = format!("Error creating: pods \"web-1\" is forbidden: {message}");
    snapshot.events = vec![parse(event(
        "ReplicaSet",
        "web-1",
        "rs-1",
        "FailedCreate",
        &said,
        10,
    ))];
    explain_web(&snapshot)
}

fn explain_web(snapshot: &Snapshot) -> Explanation {
    let workload: Workload = parse(
        json!({ "metadata": { "namespace": "ml", "name": "web", "uid": "d-1" }, "spec": { "replicas": 1 } }),
    );
    let creators = vec!["d-1".to_owned(), "rs-1".to_owned()];
    workload::explain(
        snapshot,
        &Controlled {
            kind: "deployment",
            workload: &workload,
            creators,
            pods: Vec::new(),
        },
    )
}

fn has(explanation: &Explanation, cause: Cause) {
    assert!(
        explanation.causes.contains(&cause),
        "{cause:?} is not in {explanation:#?}"
    );
    assert!(explanation.verdict > Verdict::Runs, "{explanation:#?}");
    if let Some(remedy) = cause.remedy() {
        let text = explanation.render(Terminal::default());
        assert!(text.contains(remedy), "{text}");
    }
}

#[test]
fn refused_pods_are_explained_by_the_events() {
    let quota = |name: &str| {
        format!(
            "exceeded quota: {name}, requested: requests.bursar.dev/gpu-memory-gib=8, used: \
        requests.bursar.dev/gpu-memory-gib=16, limited: requests.bursar.dev/gpu-memory-gib=16"
        )
    };
    for (message, cause) in [
        (quota("gpu-memory-budget-guaranteed"), Cause::OverGuarantee),
        (quota("gpu-memory-budget-limit"), Cause::OverLimit),
        ("status unknown for quota: gpu-memory-budget-limit, resources: requests.bursar.dev/gpu-memory-gib".to_owned(), Cause::QuotaPending),
        ("ValidatingAdmissionPolicy 'bursar-pods' with binding 'bursar-pods' denied request: namespace ml has no GpuMemoryBudget \
          in force, and pods ask for GPU memory only where there is one".to_owned(), Cause::NoBudget),
        ("ValidatingAdmissionPolicy 'bursar-pods' with binding 'bursar-pods' denied request: container main: \
          bursar.dev/gpu-memory-gib counts tokens of 1Gi: write 16, not 16Gi".to_owned(), Cause::WrongAmountForm),
        ("ValidatingAdmissionPolicy 'bursar-per-container' with binding 'bursar-per-container' denied request: container main asks for 99 \
          of bursar.dev/gpu-memory-gib: GpuMemoryBudget default of namespace ml allows 8 a container (spec.perContainer.max)".to_owned(), Cause::OverContainerMaximum),
    ] {
        let explanation = refused(&message);
        has(&explanation, cause);
        assert_eq!(explanation.causes, [cause]);
        assert!(explanation.lines.iter().any(|line| line.text.contains(message.as_str())), "{explanation:#?}");
    }
    golden(
        "explain-refused",
        &refused(&quota("gpu-memory-budget-guaranteed")).render(Terminal::default()),
    );
}

#[test]
fn quota_that_is_pending_is_named_from_the_budget() {
    let mut snapshot = running();
    snapshot.pods.clear();
    let mut pending = budget("ml", 16, 16, 0, 0);
    pending["status"]["conditions"] = json!([condition(
        "Enforced",
        "False",
        "QuotaPending",
        "no status yet"
    )]);
    snapshot.budgets = vec![parse(pending)];
    has(&explain_web(&snapshot), Cause::QuotaPending);
}

#[test]
fn pending_pod_names_room_fragmentation_drains_and_losses() {
    let message = "0/1 nodes are available: 1 Insufficient bursar.dev/gpu-memory-gib.";
    let full = pending(message, gpu("GPU-1", 0, 79, &[("other", 70)]));
    has(&explained(&full, "ml", "p"), Cause::NoNodeWithRoom);
    let mut fragmented = pending(
        "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.",
        gpu("GPU-1", 0, 79, &[("a", 40)]),
    );
    fragmented.gpu_nodes[0] = parse(gpu_node(
        "n",
        vec![
            gpu("GPU-1", 0, 79, &[("a", 40)]),
            gpu("GPU-2", 1, 79, &[("b", 40)]),
        ],
    ));
    has(&explained(&fragmented, "ml", "p"), Cause::Fragmentation);
    for (state, reason, cause) in [
        ("Draining", "Drained", Cause::GpuDrained),
        ("Lost", "Xid79", Cause::GpuLost),
    ] {
        let mut away = gpu("GPU-1", 0, 79, &[]);
        away["state"] = json!(state);
        away["health"] = json!({ "status": "Unhealthy", "reason": reason });
        (away["free"], away["largestFree"]) = (json!(0), json!(0));
        has(&explained(&pending(message, away), "ml", "p"), cause);
    }
}

#[test]
fn pending_pod_names_agents_plugins_and_drivers() {
    let message = "0/1 nodes are available: 1 Insufficient bursar.dev/gpu-memory-gib.";
    let mut agentless = pending(message, gpu("GPU-1", 0, 79, &[]));
    agentless.own_pods = vec![parse(own_pod("agent", "another"))];
    has(&explained(&agentless, "ml", "p"), Cause::NodeWithoutAgent);
    let mut foreign = pending(message, gpu("GPU-1", 0, 79, &[]));
    foreign.nodes[0]
        .status
        .allocatable
        .insert("nvidia.com/gpu".to_owned(), "8".to_owned());
    has(&explained(&foreign, "ml", "p"), Cause::OtherPlugin);
    let mut driverless = pending(message, gpu("GPU-1", 0, 79, &[]));
    let mut bare = gpu_node("n", vec![]);
    bare["status"]["conditions"] = json!([condition(
        "GpusFound",
        "False",
        "DriverMissing",
        "no libcuda.so.1 under /driver-root"
    )]);
    driverless.gpu_nodes[0] = parse(bare);
    let explanation = explained(&driverless, "ml", "p");
    has(&explanation, Cause::DriverMissing);
    assert!(
        explanation
            .lines
            .iter()
            .any(|line| line.text.contains("no libcuda.so.1"))
    );
}

#[test]
fn waiting_pod_names_each_gpu_and_the_reason() {
    let text = "waiting for 50 GiB on one GPU: largest free 39 GiB (GPU-1)";
    let held = || {
        let mut held = gpu("GPU-1", 0, 79, &[("a", 20)]);
        held["reservedFor"] = json!("ml-other");
        held
    };
    let explanation = explained(&waiting(text, held()), "ml", "p");
    has(&explanation, Cause::HeldForAnother);
    let mut drained = gpu("GPU-1", 0, 79, &[]);
    drained["state"] = json!("Draining");
    has(
        &explained(&waiting(text, drained), "ml", "p"),
        Cause::GpuDrained,
    );
    let mut lost = gpu("GPU-1", 0, 79, &[]);
    lost["state"] = json!("Lost");
    has(&explained(&waiting(text, lost), "ml", "p"), Cause::GpuLost);
    // A tenant sees the agent's own words, and what is not known to it.
    let of_tenant = explained(&tenant(waiting(text, held())), "ml", "p");
    has(&of_tenant, Cause::Fragmentation);
    assert!(
        of_tenant.lines.iter().any(|line| line.text == text),
        "{of_tenant:#?}"
    );
    assert!(
        of_tenant
            .not_read
            .contains(&"could not read gpunodes: forbidden".to_owned())
    );
}

#[test]
fn pods_in_the_way_are_named_with_their_end() {
    let mut snapshot = cluster();
    golden(
        "explain-waiting",
        &explained(&snapshot, "ml", "big-0").render(Terminal::default()),
    );
    golden(
        "explain-waiting-tenant",
        &explained(&tenant(cluster()), "ml", "big-0").render(Terminal::default()),
    );
    let explanation = explained(&snapshot, "ml", "big-0");
    has(&explanation, Cause::VictimsLeave);
    let budget = json!({ "metadata": { "namespace": "search", "name": "crawl" },
        "spec": { "selector": { "matchLabels": { "app": "crawl-2" } } }, "status": { "disruptionsAllowed": 0 } });
    snapshot.disruption_budgets = vec![parse(budget)];
    let explanation = explained(&snapshot, "ml", "big-0");
    has(&explanation, Cause::DisruptionBudget);
    let leaving = snapshot
        .pods
        .iter_mut()
        .find(|pod| pod.metadata.name == "crawl-2")
        .unwrap();
    leaving.metadata.deletion_timestamp = Some("2026-11-25T12:00:18Z".parse().unwrap());
    let text = explained(&snapshot, "ml", "big-0").render(Terminal::default());
    assert!(text.contains("search/crawl-2 (40 GiB, priority -10, borrows): is being evicted, gone in 18s at the latest"), "{text}");
}

#[test]
fn denied_container_is_named_with_the_call_and_the_remedy() {
    let explanation = explained(&cluster(), "ml", "notebook");
    has(&explanation, Cause::Denied);
    golden("explain-denied", &explanation.render(Terminal::default()));
    let mut of_tenant = tenant(cluster());
    of_tenant.budgets[0].status.as_mut().unwrap().denials = 212;
    let explanation = explained(&of_tenant, "ml", "notebook");
    assert!(
        explanation
            .lines
            .iter()
            .any(|line| line.text.contains("denied memory 212 times")),
        "{explanation:#?}"
    );
}

#[test]
fn faults_are_named_from_the_node_and_from_events() {
    let mut snapshot = running();
    let fault = |action: &str| {
        json!({ "id": "f", "kind": "Context", "gpu": "GPU-1", "gpuGeneration": 1, "cudaError": 700, "action": action,
        "time": ago(5), "container": { "podUid": "ml-p", "namespace": "ml", "pod": "p", "container": "main", "processGeneration": 3 } })
    };
    for (action, cause) in [
        ("Restart", Cause::Poisoned),
        ("BeyondMaximum", Cause::BeyondMaximum),
    ] {
        snapshot.gpu_nodes[0].status.as_mut().unwrap().faults = vec![parse(fault(action))];
        has(&explained(&snapshot, "ml", "p"), cause);
    }
    has(
        &explained(&tenant(cluster()), "ml", "serve-1"),
        Cause::Poisoned,
    );
    let mut of_tenant = tenant(running());
    let often = "container main: CUDA error 700 poisoned the context of a process (generation 9): its container has been restarted too often and is killed";
    of_tenant.events = vec![parse(event(
        "Pod",
        "p",
        "ml-p",
        "GpuContextPoisoned",
        often,
        5,
    ))];
    has(&explained(&of_tenant, "ml", "p"), Cause::BeyondMaximum);
}

#[test]
fn gpu_of_a_running_pod_that_goes_away_is_named() {
    for (state, cause) in [("Draining", Cause::GpuDrained), ("Lost", Cause::GpuLost)] {
        let mut away = gpu("GPU-1", 0, 79, &[("ml-p", 8)]);
        away["state"] = json!(state);
        has(
            &explained(&small(vec![pod("ml", "p", "n", 8)], away), "ml", "p"),
            cause,
        );
    }
}

#[test]
fn image_without_glibc_is_told_by_the_missing_session() {
    let mut snapshot = running();
    let layer =
        "bursar_container_layer{namespace=\"ml\",pod=\"p\",container=\"main\",layer=\"audit\"} 1\n";
    snapshot
        .metrics
        .insert("n".to_owned(), AgentMetrics::parse(layer));
    has(&explained(&snapshot, "ml", "p"), Cause::NoDriverInImage);
    let mut of_tenant = tenant(running());
    let ended = json!({ "name": "main", "restartCount": 3, "state": { "waiting": { "reason": "CrashLoopBackOff" } },
        "lastState": { "terminated": { "exitCode": 127, "reason": "Error" } } });
    of_tenant.pods[0].status.container_statuses = vec![parse(ended)];
    has(&explained(&of_tenant, "ml", "p"), Cause::NoDriverInImage);
}

#[test]
fn failed_admission_and_gaps_are_named() {
    let mut failed = pod("ml", "p", "n", 8);
    failed["status"] = json!({ "phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "Allocate failed" });
    has(
        &explained(&small(vec![failed], gpu("GPU-1", 0, 79, &[])), "ml", "p"),
        Cause::NodeWithoutAgent,
    );
    has(&explained(&cluster(), "ml", "debug"), Cause::NotEnforced);
    let mut drained = pod("ml", "p", "n", 8);
    drained["status"] = json!({ "phase": "Pending", "containerStatuses": [{ "name": "main", "state": { "waiting": { "reason": "RunContainerError" } } }] });
    let mut of_tenant = tenant(small(vec![drained], gpu("GPU-1", 0, 79, &[])));
    of_tenant.events = vec![parse(event(
        "Pod",
        "p",
        "ml-p",
        "GpuMemoryNotBound",
        "GPU-1 is drained",
        5,
    ))];
    has(&explained(&of_tenant, "ml", "p"), Cause::GpuDrained);
}

#[test]
fn pod_that_runs_well_has_no_cause() {
    let explanation = explained(&running(), "ml", "p");
    assert_eq!(
        (explanation.verdict, explanation.causes.len()),
        (Verdict::Runs, 0),
        "{explanation:#?}"
    );
    assert_eq!(explanation.json()["verdict"], "Runs");
}
