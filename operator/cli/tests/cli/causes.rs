//! Plants causes, and checks that each is explained, with an admin's rights and with a tenant's.

use bursar_cli::agent_metrics::AgentMetrics;
use bursar_cli::explain::workload::{self, Controlled};
use bursar_cli::explain::{Cause, Explanation, Verdict, explain_pod};
use bursar_cli::objects::{Pod, Workload};
use bursar_cli::snapshot::Snapshot;
use bursar_cli::table::Terminal;
use bursar_crds::gpu_node::MemoryResource;
use serde_json::{Value, json};

use crate::fixtures::{
    NOW, ago, budget, cluster, condition, event, golden, gpu, gpu_node, node, own_pod, parse, pod,
    tenant, victim_event, waiting_pod,
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
        budgets: vec![parse(budget("ml", 64, 96, 8, 0))],
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
    let claim = json!({ "podUid": "ml-p", "namespace": "ml", "pod": "p", "container": "main", "quanta": 50, "since": ago(42) });
    let status = snapshot.gpu_nodes[0].status.as_mut().unwrap();
    status.waiting = vec![parse(claim)];
    snapshot
}

fn pending(message: &str, gpu: Value) -> Snapshot {
    let mut pending = pod("ml", "p", "", 50);
    pending["status"]["conditions"] = json!([{ "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message }]);
    small(vec![pending], gpu)
}

/// A Deployment whose ReplicaSet was refused a pod with this message.
fn refused(message: &str, of: fn(Snapshot) -> Snapshot) -> Explanation {
    refused_in(of(running()), message)
}

fn refused_in(mut snapshot: Snapshot, message: &str) -> Explanation {
    snapshot.pods.clear();
    let message_of_event = format!("Error creating: pods \"web-1\" is forbidden: {message}");
    snapshot.events = vec![parse(event(
        "ReplicaSet",
        "web-1",
        "rs-1",
        "FailedCreate",
        &message_of_event,
        10,
    ))];
    explain_web(&snapshot)
}

fn ended(name: &str, phase: &str) -> Value {
    let mut pod = pod("ml", name, "n", 8);
    pod["status"]["phase"] = json!(phase);
    pod
}

#[test]
fn pods_of_a_workload_that_ended_are_not_missing() {
    let explained = |kind: &str, workload: Value, pods: Vec<Value>| {
        let workload: Workload = parse(workload);
        let pods: Vec<Pod> = pods.into_iter().map(parse).collect();
        let controlled = Controlled {
            kind,
            workload: &workload,
            creators: vec!["w".to_owned()],
            pods: pods.iter().collect(),
        };
        let explanation = workload::explain(&running(), &controlled);
        (explanation.verdict, explanation.headline)
    };
    let job = |parallelism: i64, completions: Option<i64>, active: i64, succeeded: i64| {
        json!({ "metadata": { "namespace": "ml", "name": "w", "uid": "w" },
            "spec": { "parallelism": parallelism, "completions": completions },
            "status": { "active": active, "succeeded": succeeded } })
    };
    let set = json!({ "metadata": { "namespace": "ml", "name": "w", "uid": "w" }, "spec": { "replicas": 1 } });
    let (done, failed) = (ended("done", "Succeeded"), ended("failed", "Failed"));
    let runs = || pod("ml", "p", "n", 8);
    let one_runs = (Verdict::Runs, "ml/w has 1 of 1 pod running.".to_owned());
    let all_done = (Verdict::Runs, "ml/w has 0 of 0 pods running.".to_owned());
    for (kind, workload, pods, expected) in [
        ("job", job(3, Some(3), 1, 2), vec![runs()], &one_runs),
        (
            "job",
            job(2, Some(2), 1, 0),
            vec![done.clone(), runs()],
            &one_runs,
        ),
        ("job", job(3, None, 1, 1), vec![runs()], &one_runs),
        (
            "job",
            job(1, Some(1), 0, 1),
            vec![failed.clone(), done],
            &all_done,
        ),
        (
            "replicaset",
            set.clone(),
            vec![failed.clone(), runs()],
            &one_runs,
        ),
    ] {
        assert_eq!(
            &explained(kind, workload.clone(), pods),
            expected,
            "{workload}"
        );
    }
    let (verdict, headline) = explained("replicaset", set, vec![failed]);
    assert_eq!(
        (verdict, headline.as_str()),
        (Verdict::Fails, "ml/w has 0 of 1 pod: 1 not created.")
    );
}

#[test]
fn failed_job_has_its_reason_instead_of_missing_pods() {
    let failed = condition("Failed", "True", "BackoffLimitExceeded", "too many retries");
    let job: Workload = parse(
        json!({ "metadata": { "namespace": "ml", "name": "w", "uid": "w" },
        "spec": { "completions": 1 }, "status": { "failed": 7, "conditions": [failed] } }),
    );
    let pods: Vec<Pod> = vec![parse(ended("w-1", "Failed"))];
    let controlled = Controlled {
        kind: "job",
        workload: &job,
        creators: vec!["w".to_owned()],
        pods: pods.iter().collect(),
    };
    let explanation = workload::explain(&running(), &controlled);
    assert_eq!(explanation.verdict, Verdict::Fails);
    let text = explanation.render(Terminal::default());
    assert!(
        text.starts_with("ml/w has failed: BackoffLimitExceeded: too many retries\n"),
        "{text}"
    );
    assert!(text.contains("ml/w-1 has failed"), "{text}");
    assert!(!text.contains("no event tells why"), "{text}");
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
          bursar.dev/gpu-memory-gib counts quanta of 1Gi: write 16, not 16Gi".to_owned(), Cause::WrongAmountForm),
        ("ValidatingAdmissionPolicy 'bursar-per-container' with binding 'bursar-per-container' denied request: container main asks for 99 \
          of bursar.dev/gpu-memory-gib: GpuMemoryBudget default of namespace ml allows 8 a container (spec.perContainer.max)".to_owned(), Cause::OverContainerMaximum),
        ("ValidatingAdmissionPolicy 'bursar-per-container' with binding 'bursar-per-container' denied request: container main asks for 99 \
          of bursar.dev/managed-memory-gib: GpuMemoryBudget default of namespace ml allows 8 a container (spec.perContainer.maxManaged)".to_owned(), Cause::OverContainerMaximum),
    ] {
        for of in [std::convert::identity, tenant] {
            let explanation = refused(&message, of);
            has(&explanation, cause);
            assert_eq!(explanation.causes, [cause]);
            assert!(explanation.lines.iter().any(|line| line.text.contains(message.as_str())), "{explanation:#?}");
        }
    }
    golden(
        "explain-refused",
        &refused(
            &quota("gpu-memory-budget-guaranteed"),
            std::convert::identity,
        )
        .render(Terminal::default()),
    );
}

#[test]
fn refusal_is_explained_in_one_way_when_limit_is_guarantee() {
    let explained = |quota: &str, limit: i64, resource: &str| {
        let mut snapshot = running();
        snapshot.budgets = vec![parse(budget("ml", 16, limit, 16, 0))];
        let resource = format!("requests.bursar.dev/{resource}");
        let message = format!(
            "exceeded quota: {quota}, requested: {resource}=8, used: {resource}=16, limited: {resource}=16"
        );
        let explanation = refused_in(snapshot, &message);
        let lines = explanation.lines.iter().filter(|line| line.text != message);
        let lines: Vec<String> = lines.map(|line| line.text.clone()).collect();
        (explanation.causes, lines)
    };
    let [guaranteed, limit] = ["gpu-memory-budget-guaranteed", "gpu-memory-budget-limit"];
    let either = explained(guaranteed, 16, "gpu-memory-gib");
    assert_eq!(either.0, [Cause::OverGuarantee]);
    assert!(either.1[0].contains("both 16 GiB"), "{either:?}");
    assert_eq!(explained(limit, 16, "gpu-memory-gib"), either);
    assert_eq!(explained(limit, 32, "gpu-memory-gib").0, [Cause::OverLimit]);
    assert_eq!(
        explained(limit, 16, "managed-memory-gib").0,
        [Cause::OverLimit]
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
        ("Draining", "Draining", Cause::GpuDrained),
        ("Draining", "Drained", Cause::GpuDrained),
        ("Draining", "Xid79", Cause::GpuLost),
        ("Active", "Xid95", Cause::GpuLost),
        ("Lost", "GpuLost", Cause::GpuLost),
    ] {
        let mut away = gpu("GPU-1", 0, 79, &[]);
        away["state"] = json!(state);
        away["health"] = json!({ "status": "Unhealthy", "reason": reason });
        (away["free"], away["largestFree"]) = (json!(0), json!(0));
        has(&explained(&pending(message, away), "ml", "p"), cause);
    }
}

#[test]
fn pod_is_larger_than_nodes_only_if_all_are_too_small() {
    let message = "0/2 nodes are available: 2 Insufficient bursar.dev/gpu-memory-gib.";
    let of = |gpu_b: Value| {
        let mut snapshot = pending(message, gpu("GPU-1", 0, 24, &[]));
        snapshot
            .gpu_nodes
            .push(parse(gpu_node("large", vec![gpu_b])));
        snapshot.own_pods.push(parse(own_pod("agent", "large")));
        explained(&snapshot, "ml", "p").causes
    };
    assert_eq!(of(gpu("GPU-2", 0, 24, &[])), [Cause::LargerThanNodes]);
    let full = gpu("GPU-2", 0, 79, &[("other", 70)]);
    assert_eq!(of(full), [Cause::NoNodeWithRoom]);
}

/// A pod of `gib` on the annotated number of GPUs, which the scheduler has found no node for.
fn spread(gib: i64, gpus: Option<&str>, message: &str, of_node: Vec<Value>) -> Explanation {
    let mut pod = pod("ml", "p", "", gib);
    if let Some(gpus) = gpus {
        pod["metadata"]["annotations"] = json!({ "bursar.dev/gpus": gpus });
    }
    pod["status"]["conditions"] = json!([{ "type": "PodScheduled", "status": "False",
        "reason": "Unschedulable", "message": message }]);
    let mut snapshot = small(vec![pod], gpu("GPU-1", 0, 79, &[]));
    snapshot.gpu_nodes = vec![parse(gpu_node("n", of_node))];
    explained(&snapshot, "ml", "p")
}

#[test]
fn pod_over_several_gpus_is_compared_with_all_of_them() {
    let cpu = "0/1 nodes are available: 1 Insufficient cpu.";
    let two = |bound: i32| {
        let gpus = [("GPU-1", 0), ("GPU-2", 1)];
        gpus.map(|(uuid, index)| gpu(uuid, index, 80, &[("other", bound)]))
            .to_vec()
    };
    // A container that is larger than each GPU is spread without an annotation.
    for gpus in [None, Some("2")] {
        let fits = spread(100, gpus, cpu, two(0));
        assert_eq!(fits.causes, [], "{fits:#?}");
        let text = fits.render(Terminal::default());
        assert!(text.contains("n: has room on 2 GPUs"), "{text}");
    }
    let mut lopsided = two(0);
    lopsided[1] = gpu("GPU-2", 1, 80, &[("other", 60)]);
    let waits = spread(60, Some("2"), cpu, lopsided.clone());
    has(&waits, Cause::Fragmentation);
    let text = waits.render(Terminal::default());
    assert!(!text.contains("spread the container"), "{text}");
    has(&spread(60, Some("3"), cpu, two(0)), Cause::TooFewGpus);
    // A program opens one MIG instance.
    let instances = ["MIG-1", "MIG-2"].map(|uuid| gpu(uuid, 0, 39, &[]));
    let larger = spread(48, None, cpu, instances.to_vec());
    assert_eq!(larger.causes, [Cause::LargerThanNodes]);
}

#[test]
fn waiting_pod_over_two_gpus_gets_no_advice_to_spread() {
    let text = "waiting for 60 GiB on 2 GPUs: largest free 79 GiB (GPU-1)";
    let mut snapshot = waiting(text, gpu("GPU-1", 0, 79, &[]));
    snapshot.pods[0].metadata.annotations.gpus = "2".to_owned();
    let gpus = vec![
        gpu("GPU-1", 0, 79, &[]),
        gpu("GPU-2", 1, 79, &[("other", 70)]),
    ];
    snapshot.gpu_nodes = vec![parse(gpu_node("n", gpus))];
    let explanation = explained(&snapshot, "ml", "p");
    has(&explanation, Cause::Fragmentation);
    let text = explanation.render(Terminal::default());
    assert!(
        text.contains("no 2 GPUs have their shares of 50 GiB for it: GPU 0 has 79 GiB"),
        "{text}"
    );
    assert!(!text.contains("spread the container"), "{text}");
}

#[test]
fn full_node_is_no_cause_while_another_has_room() {
    let of = |message: &str, full: Value| {
        let mut snapshot = pending(message, gpu("GPU-1", 0, 79, &[]));
        snapshot.gpu_nodes.push(parse(gpu_node("full", vec![full])));
        snapshot.own_pods.push(parse(own_pod("agent", "full")));
        explained(&snapshot, "ml", "p")
    };
    let mut drained = gpu("GPU-2", 0, 79, &[]);
    drained["state"] = json!("Draining");
    drained["health"] = json!({ "status": "Unhealthy", "reason": "Drained" });
    let taint = "0/2 nodes are available: 1 Insufficient bursar.dev/gpu-memory-gib, 1 node(s) had \
                 untolerated taint {a: b}. preemption: 0/2 nodes are available.";
    for full in [gpu("GPU-2", 0, 79, &[("other", 70)]), drained] {
        let explanation = of(taint, full.clone());
        assert_eq!(explanation.causes, [], "{explanation:#?}");
        let text = explanation.render(Terminal::default());
        assert!(text.contains("does not keep the pod from a node"), "{text}");
        // Pods that are on their way to a node count for the scheduler before they are bound.
        let all = "0/2 nodes are available: 2 Insufficient bursar.dev/gpu-memory-gib.";
        assert_eq!(of(all, full).causes, [Cause::NoNodeWithRoom]);
    }
}

#[test]
fn room_for_one_container_is_no_room_for_all_or_managed_memory() {
    let taint = "1 node(s) had untolerated taint {a: b}";
    let managed =
        format!("0/2 nodes are available: {taint}, 1 Insufficient bursar.dev/managed-memory-gib.");
    let snapshot = pending(&managed, gpu("GPU-1", 0, 79, &[]));
    has(&explained(&snapshot, "ml", "p"), Cause::NoNodeWithRoom);
    let device =
        format!("0/2 nodes are available: {taint}, 1 Insufficient bursar.dev/gpu-memory-gib.");
    let mut snapshot = pending(&device, gpu("GPU-1", 0, 79, &[]));
    let mut second = snapshot.pods[0].spec.containers[0].clone();
    second.name = "second".to_owned();
    snapshot.pods[0].spec.containers.push(second);
    has(&explained(&snapshot, "ml", "p"), Cause::NoNodeWithRoom);
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
fn wait_for_managed_memory_says_nothing_of_gpus() {
    let text = "waiting for 8 GiB of managed memory: largest free 5 GiB";
    let mut snapshot = waiting(text, gpu("GPU-1", 0, 79, &[("ml-p", 50), ("a", 29)]));
    let status = snapshot.gpu_nodes[0].status.as_mut().unwrap();
    status.waiting[0].resource = MemoryResource::ManagedMemory;
    (
        status.managed_memory.free,
        status.managed_memory.largest_free,
    ) = (5, 5);
    let explanation = explained(&snapshot, "ml", "p");
    assert_eq!(explanation.causes, []);
    let lines: Vec<_> = explanation.lines.iter().map(|line| &*line.text).collect();
    assert_eq!(lines[1..], [text, "5 GiB of managed memory is free"]);
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
    drained["health"] = json!({ "status": "Unhealthy", "reason": "Draining" });
    has(
        &explained(&waiting(text, drained), "ml", "p"),
        Cause::GpuDrained,
    );
    let mut lost = gpu("GPU-1", 0, 79, &[]);
    lost["state"] = json!("Lost");
    has(&explained(&waiting(text, lost), "ml", "p"), Cause::GpuLost);
    let queued = |uid: &str, quanta: i32| {
        let mut queued = gpu("GPU-1", 0, 79, &[("a", 20)]);
        queued["setAside"] =
            json!([{ "uid": uid, "namespace": "ml", "name": "first", "quanta": quanta }]);
        queued
    };
    let has_line = |explanation: &Explanation, text: &str| {
        let mut lines = explanation.lines.iter();
        assert!(
            lines.any(|line| line.text.contains(text)),
            "{explanation:#?}"
        );
    };
    let behind = explained(&waiting(text, queued("ml-first", 40)), "ml", "p");
    has(&behind, Cause::HeldForAnother);
    has_line(&behind, "GPU 0 has 59 GiB (40 GiB held for ml/first)");
    let first = explained(&waiting(text, queued("ml-p", 59)), "ml", "p");
    assert!(!first.causes.contains(&Cause::HeldForAnother));
    has_line(&first, "GPU 0 has 59 GiB (held for this pod)");
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
    // The README's picture shows this one.
    let terminal = Terminal {
        width: Some(128),
        ..Terminal::default()
    };
    golden(
        "explain-waiting-128",
        &explained(&snapshot, "ml", "big-0").render(terminal),
    );
    golden(
        "explain-waiting-tenant",
        &explained(&tenant(cluster()), "ml", "big-0").render(Terminal::default()),
    );
    has(&explained(&snapshot, "ml", "big-0"), Cause::VictimsLeave);
    // The operator publishes a protected victim before it evicts it.
    let words =
        "a PodDisruptionBudget protects search/crawl-2 on GPU-a1 of gpu-a-1, for at most 60 s";
    let protected = victim_event(
        "big-0",
        "GpuMemoryVictimProtected",
        words,
        "search/crawl-2",
        20,
    );
    snapshot
        .events
        .retain(|event| !event.reason.starts_with("GpuMemoryVictim"));
    snapshot.events.push(parse(protected));
    for snapshot in [snapshot.clone(), tenant(snapshot.clone())] {
        let explanation = explained(&snapshot, "ml", "big-0");
        has(&explanation, Cause::DisruptionBudget);
        let text = explanation.render(Terminal::default());
        assert!(text.contains(&format!("{words} (20s ago)")), "{text}");
    }
    // A victim that is gone is in nobody's way.
    let mut gone = snapshot.clone();
    gone.pods.retain(|pod| pod.metadata.name != "crawl-2");
    let text = explained(&gone, "ml", "big-0").render(Terminal::default());
    assert!(!text.contains("in the way"), "{text}");
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
    assert!(explained(&of_tenant, "ml", "notebook").causes.is_empty());
    of_tenant.events.push(parse(denied_event("notebook")));
    let explanation = explained(&of_tenant, "ml", "notebook");
    has(&explanation, Cause::Denied);
    golden(
        "explain-denied-tenant",
        &explanation.render(Terminal::default()),
    );
}

#[test]
fn container_denied_once_has_the_singular() {
    let mut snapshot = running();
    let denied = "bursar_container_denied_total{namespace=\"ml\",pod=\"p\",container=\"main\",function=\"cuMemAlloc_v2\"} 1\n";
    snapshot.metrics = [("n".to_owned(), AgentMetrics::parse(denied))].into();
    let text = explained(&snapshot, "ml", "p").render(Terminal::default());
    assert!(text.contains("1 time since its start"), "{text}");
}

fn denied_event(pod: &str) -> Value {
    let words = "container main: cuMemAlloc_v2 was denied 512 MiB of GPU-a0: 0 GiB of the quota of 8 GiB are free (212 denials so \
                 far); request more in the pod, or free memory in the program";
    event(
        "Pod",
        pod,
        &format!("ml-{pod}"),
        "GpuMemoryDenied",
        words,
        30,
    )
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
    for (state, reason, cause) in [
        ("Draining", "Drained", Cause::GpuDrained),
        ("Draining", "Xid79", Cause::GpuLost),
        ("Lost", "GpuLost", Cause::GpuLost),
    ] {
        let mut away = gpu("GPU-1", 0, 79, &[("ml-p", 8)]);
        away["state"] = json!(state);
        away["health"] = json!({ "status": "Unhealthy", "reason": reason });
        has(
            &explained(&small(vec![pod("ml", "p", "n", 8)], away), "ml", "p"),
            cause,
        );
    }
}

#[test]
fn image_without_glibc_is_shown_by_the_missing_session() {
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
    let mut pinned = pod("ml", "p", "n", 12);
    pinned["status"] = json!({ "phase": "Failed", "reason": "UnexpectedAdmissionError", "message":
        "Allocate failed due to requested number of devices unavailable for bursar.dev/gpu-memory-gib. Requested: 12, Available: 8, which is unexpected" });
    let pinned = explained(&small(vec![pinned], gpu("GPU-1", 0, 79, &[])), "ml", "p");
    has(&pinned, Cause::NoNodeWithRoom);
    let mut crashed = pod("ml", "p", "n", 8);
    crashed["status"] = json!({ "phase": "Failed", "containerStatuses": [{ "name": "main", "state":
        { "terminated": { "exitCode": 3, "reason": "Error" } } }] });
    let crashed = explained(&small(vec![crashed], gpu("GPU-1", 0, 79, &[])), "ml", "p");
    assert!(format!("{crashed:?}").contains("container main ended with 3 (Error)"));
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
fn weight_that_may_not_hold_is_named_with_its_reason() {
    let text = |compute: Value, weight: Option<&str>| {
        let (mut asking, mut of) = (pod("ml", "p", "n", 8), gpu("GPU-1", 0, 79, &[("ml-p", 8)]));
        asking["spec"]["containers"][0]["resources"]["limits"]["bursar.dev/gpu-compute"] =
            json!(weight);
        of["compute"] = compute;
        let mut limits = asking["spec"]["containers"][0]["resources"]["limits"].take();
        limits
            .as_object_mut()
            .unwrap()
            .retain(|_, of| !of.is_null());
        asking["spec"]["containers"][0]["resources"]["limits"] = limits;
        explained(&small(vec![asking], of), "ml", "p").render(Terminal::default())
    };
    let state = |state: &str, hidden: i32| json!({ "state": state, "reason": "two loads finished 1 : 1", "round": "4ms", "hiddenGroups": hidden });
    let inert = text(state("NotEnforced", 0), Some("25"));
    assert!(
        inert.contains("weights may not hold on GPU-1: two loads"),
        "{inert}"
    );
    let hidden = text(state("Enforced", 3), Some("25"));
    assert!(hidden.contains("3 channel groups"), "{hidden}");
    for (state, weight) in [
        (state("Enforced", 0), Some("25")),
        (state("NotEnforced", 0), None),
    ] {
        assert!(!text(state, weight).contains("weights may not hold"));
    }
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

#[test]
fn remedy_is_not_to_wait_when_no_wait_helps() {
    let room = "0/1 nodes are available: 1 Insufficient bursar.dev/gpu-memory-gib.";
    let larger = explained(&pending(room, gpu("GPU-1", 0, 40, &[])), "ml", "p");
    assert_eq!(larger.causes, [Cause::LargerThanNodes]);
    let text = larger.render(Terminal::default());
    assert!(text.contains("n: has 40 GiB in all"), "{text}");
    let words = "waiting for 50 GiB on 3 GPUs: 1 GPU is healthy on this node";
    let spread = explained(&waiting(words, gpu("GPU-1", 0, 79, &[])), "ml", "p");
    assert_eq!(spread.causes, [Cause::TooFewGpus]);
    let text = spread.render(Terminal::default());
    assert!(text.contains("node      GPU 0 has 79 GiB\n"), "{text}");
    assert!(!text.contains("starts when a GPU has room"), "{text}");
}

#[test]
fn pod_that_was_just_created_is_worth_another_look() {
    let mut created = pod("ml", "p", "n", 8);
    created["status"] = json!({ "phase": "Pending", "containerStatuses": [{ "name": "main", "state": { "waiting": { "reason": "ContainerCreating" } } }] });
    for (seconds, again) in [(1, true), (60, false)] {
        created["metadata"]["creationTimestamp"] = json!(ago(seconds));
        let snapshot = small(vec![created.clone()], gpu("GPU-1", 0, 79, &[]));
        let text = explained(&snapshot, "ml", "p").render(Terminal::default());
        assert!(
            text.contains("kubelet   main: ContainerCreating\n"),
            "{text}"
        );
        assert_eq!(text.contains("look again in some seconds"), again, "{text}");
    }
}

/// The waiting pod `ml/p`, and the older pod of its Deployment that has the memory.
fn rollout() -> Snapshot {
    let waits = "waiting for 50 GiB on one GPU: largest free 39 GiB (GPU-1)";
    let mut snapshot = waiting(waits, gpu("GPU-1", 0, 79, &[("ml-old", 40)]));
    snapshot.pods.push(parse(pod("ml", "old", "n", 40)));
    for (pod, (hash, age)) in snapshot.pods.iter_mut().zip([("b2", 60), ("a1", 3600)]) {
        pod.metadata = parse(
            json!({ "namespace": "ml", "name": pod.metadata.name, "uid": pod.metadata.uid,
            "creationTimestamp": ago(age), "labels": { "pod-template-hash": hash },
            "ownerReferences": [{ "kind": "ReplicaSet", "name": format!("web-{hash}"), "uid": hash, "controller": true }] }),
        );
    }
    snapshot
}

#[test]
fn pod_that_waits_for_its_predecessor_is_not_told_to_wait() {
    let explanation = explained(&rollout(), "ml", "p");
    assert_eq!(explanation.causes, [Cause::HeldByPredecessor]);
    let text = explanation.render(Terminal::default());
    let line =
        "ml/old (40 GiB) of an older ReplicaSet of the Deployment ends only when this pod is ready";
    assert!(text.contains(line), "{text}");
    assert!(text.contains("set maxSurge 0 or Recreate"), "{text}");
    assert!(!text.contains("wait until a pod ends"), "{text}");
    let mut terminating = rollout();
    terminating.pods[1].metadata.deletion_timestamp = Some(ago(-20).parse().unwrap());
    let mut of_another = rollout();
    of_another.pods[1].metadata.owner_references[0].name = "other-a1".to_owned();
    let mut elsewhere = rollout();
    elsewhere.pods[1].spec.node_name = "m".to_owned();
    for snapshot in [terminating, of_another, elsewhere] {
        let causes = explained(&snapshot, "ml", "p").causes;
        assert_eq!(causes, [Cause::NoNodeWithRoom]);
    }
}

/// How an explanation with a tenant's rights tells of a cause.
enum Tenant {
    /// By the cause itself.
    Sees,
    /// By the kind of the objects that would tell, which it could not read.
    CouldNotRead(&'static str),
}

/// Every cause, planted in the objects that tell of it.
fn planted() -> Vec<(Cause, Snapshot, Tenant)> {
    use Tenant::{CouldNotRead, Sees};
    let room = "0/1 nodes are available: 1 Insufficient bursar.dev/gpu-memory-gib.";
    let waits = "waiting for 50 GiB on one GPU: largest free 39 GiB (GPU-1)";
    let free = || gpu("GPU-1", 0, 79, &[]);
    let with = |field: &str, value: Value| {
        let mut gpu = free();
        gpu[field] = value;
        gpu
    };
    let event_on = |reason: &str, words: &str| {
        let mut snapshot = running();
        snapshot.events = vec![parse(event("Pod", "p", "ml-p", reason, words, 5))];
        snapshot
    };
    let victim = |reason: &str, words: &str| {
        let mut snapshot = waiting(waits, gpu("GPU-1", 0, 79, &[("search-v", 40)]));
        let reservation = json!({ "gpu": "GPU-1", "podUid": "ml-p", "quanta": 50 });
        snapshot.gpu_nodes[0].spec.reservations = vec![parse(reservation)];
        snapshot.pods.push(parse(pod("search", "v", "n", 40)));
        snapshot.events = vec![parse(victim_event("p", reason, words, "search/v", 5))];
        snapshot
    };
    let mut fragmented = waiting(waits, gpu("GPU-1", 0, 79, &[("a", 40)]));
    let status = fragmented.gpu_nodes[0].status.as_mut().unwrap();
    status.gpus.push(parse(gpu("GPU-2", 1, 79, &[("b", 40)])));
    status.device_memory.free = 78;
    let mut foreign = pending(room, free());
    let allocatable = &mut foreign.nodes[0].status.allocatable;
    allocatable.insert("nvidia.com/gpu".to_owned(), "8".to_owned());
    let mut driverless = pending(room, free());
    let mut bare = gpu_node("n", vec![]);
    bare["status"]["conditions"] = json!([condition(
        "GpusFound",
        "False",
        "DriverMissing",
        "no libcuda.so.1"
    )]);
    driverless.gpu_nodes[0] = parse(bare);
    let mut rejected = pod("ml", "p", "n", 8);
    rejected["status"] = json!({ "phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "Allocate failed" });
    let mut not_found = pod("ml", "p", "n", 8);
    not_found["status"]["containerStatuses"] = json!([{ "name": "main", "restartCount": 3, "state": { "waiting": {
        "reason": "CrashLoopBackOff" } }, "lastState": { "terminated": { "exitCode": 127, "reason": "Error" } } }]);
    let often = "container main: CUDA error 700 poisoned the context of a process: it has been restarted too often and is killed";
    vec![
        (
            Cause::NoNodeWithRoom,
            pending(room, gpu("GPU-1", 0, 79, &[("other", 70)])),
            Sees,
        ),
        (
            Cause::LargerThanNodes,
            pending(room, gpu("GPU-1", 0, 40, &[])),
            CouldNotRead("gpunodes"),
        ),
        (Cause::Fragmentation, fragmented, Sees),
        (
            Cause::TooFewGpus,
            waiting(
                "waiting for 50 GiB on 3 GPUs: 1 GPU is healthy on this node",
                free(),
            ),
            Sees,
        ),
        (
            Cause::HeldForAnother,
            waiting(waits, with("reservedFor", json!("ml-other"))),
            CouldNotRead("gpunodes"),
        ),
        (Cause::HeldByPredecessor, rollout(), Sees),
        (
            Cause::VictimsLeave,
            victim(
                "GpuMemoryVictimEvicted",
                "search/v is evicted from GPU-1 of n for this pod",
            ),
            Sees,
        ),
        (
            Cause::DisruptionBudget,
            victim(
                "GpuMemoryVictimProtected",
                "a PodDisruptionBudget protects search/v",
            ),
            Sees,
        ),
        (
            Cause::GpuDrained,
            {
                let mut drained = with("state", json!("Draining"));
                drained["health"] = json!({ "status": "Unhealthy", "reason": "Drained" });
                waiting(waits, drained)
            },
            CouldNotRead("gpunodes"),
        ),
        (
            Cause::GpuLost,
            waiting(waits, with("state", json!("Lost"))),
            CouldNotRead("gpunodes"),
        ),
        (Cause::NodeWithoutAgent, small(vec![rejected], free()), Sees),
        (Cause::OtherPlugin, foreign, CouldNotRead("nodes")),
        (
            Cause::Denied,
            {
                let mut all = running();
                all.events = vec![parse(denied_event("p"))];
                all
            },
            Sees,
        ),
        (
            Cause::Poisoned,
            event_on(
                "GpuContextPoisoned",
                "container main: CUDA error 700: its program is executed again",
            ),
            Sees,
        ),
        (
            Cause::BeyondMaximum,
            event_on("GpuContextPoisoned", often),
            Sees,
        ),
        (Cause::NoDriverInImage, small(vec![not_found], free()), Sees),
        (Cause::DriverMissing, driverless, CouldNotRead("gpunodes")),
        (
            Cause::NotEnforced,
            event_on(
                "GpuQuotaNotEnforced",
                "Privileged: the container has CAP_SYS_ADMIN",
            ),
            Sees,
        ),
    ]
}

#[test]
fn every_cause_is_explained_to_admin_and_tenant() {
    let planted = planted();
    for (cause, snapshot, of_tenant) in &planted {
        let mut of_cause = explained(snapshot, "ml", "p");
        has(&of_cause, *cause);
        of_cause = explained(&tenant(snapshot.clone()), "ml", "p");
        match of_tenant {
            Tenant::Sees => has(&of_cause, *cause),
            Tenant::CouldNotRead(kind) => {
                let note = format!("could not read {kind}: forbidden");
                assert!(
                    of_cause.not_read.contains(&note),
                    "{cause:?}: {of_cause:#?}"
                );
                assert!(
                    !of_cause.causes.contains(cause),
                    "{cause:?} is a guess: {of_cause:#?}"
                );
            }
        }
    }
    // The other causes are of refused pods, whose Events every user of the namespace may read.
    let mut all: Vec<Cause> = planted.iter().map(|(cause, ..)| *cause).collect();
    all.extend([
        Cause::NoBudget,
        Cause::OverGuarantee,
        Cause::OverLimit,
        Cause::OverContainerMaximum,
        Cause::QuotaPending,
        Cause::WrongAmountForm,
    ]);
    all.sort();
    assert_eq!(all, Cause::ALL);
}
