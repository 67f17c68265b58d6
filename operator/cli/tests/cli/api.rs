//! Runs commands against a fake API server: rights, patches, pages, and the number of requests.

use std::io::Read as _;
use std::time::{Duration, Instant};

use bursar_cli::args::{Cli, Output};
use bursar_cli::read;
use bursar_cli::run::{FAILED, PROBLEM, Session};
use bursar_cli::table::Terminal;
use clap::Parser as _;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::fake_api::FakeApi;
use crate::fixtures::{
    budget, event, gpu, gpu_node, node, own_pod, pod, victim_event, waiting_pod,
};

const METRICS: &str = "/api/v1/namespaces/bursar-system/pods/bursar-agent-n:9400/proxy/metrics";

/// Runs a command line and returns its exit code, or its error, with its output.
async fn run(api: &FakeApi, line: &str) -> (Result<u8, String>, String) {
    let words = std::iter::once("kubectl-bursar").chain(line.split(' '));
    let cli = Cli::try_parse_from(words).unwrap();
    let mut out = Vec::new();
    let terminal = Terminal {
        wide: cli.global.output == Output::Wide,
        ..Terminal::default()
    };
    let mut session = Session {
        client: api.client(),
        global: &cli.global,
        terminal,
        out: &mut out,
    };
    let code = session
        .run(&cli.command)
        .await
        .map_err(|error| read::message(&error));
    (code, String::from_utf8(out).unwrap())
}

fn small() -> FakeApi {
    let api = FakeApi::default();
    let pods = vec![pod("ml", "p", "n", 8)];
    for (path, objects) in [
        (
            "/api/v1/pods",
            [pods.clone(), vec![own_pod("agent", "n")]].concat(),
        ),
        ("/api/v1/namespaces/ml/pods", pods),
        (
            "/apis/bursar.dev/v1alpha1/gpunodes",
            vec![gpu_node("n", vec![gpu("GPU-1", 0, 79, &[("ml-p", 8)])])],
        ),
        (
            "/apis/bursar.dev/v1alpha1/gpumemorybudgets",
            vec![budget("ml", 64, 64, 8, 0)],
        ),
        (
            "/apis/bursar.dev/v1alpha1/namespaces/ml/gpumemorybudgets",
            vec![budget("ml", 64, 64, 8, 0)],
        ),
        ("/api/v1/nodes", vec![node("n")]),
        (
            "/api/v1/namespaces/ml/events",
            vec![event(
                "Pod",
                "p",
                "ml-p",
                "GpuMemoryBound",
                "bound to GPU-1",
                60,
            )],
        ),
        ("/api/v1/namespaces/ml/resourcequotas", Vec::new()),
    ] {
        api.put(path, objects);
    }
    api.text(METRICS, "bursar_container_memory_used_bytes{namespace=\"ml\",pod=\"p\",container=\"main\",account=\"GPU-1\"} 3221225472\n");
    api
}

fn as_tenant(api: &FakeApi) {
    for path in [
        "/api/v1/pods",
        "/apis/bursar.dev/v1alpha1/gpunodes",
        "/api/v1/nodes",
        "/apis/bursar.dev/v1alpha1/gpumemorybudgets",
    ] {
        api.forbid(path);
    }
}

#[tokio::test]
async fn top_reads_use_through_the_pod_proxy() {
    let api = small();
    let (code, text) = run(&api, "top").await;
    assert_eq!(code, Ok(0), "{text}");
    assert!(text.contains("n      0     8 GiB   3 GiB"), "{text}");
    assert_eq!(
        api.requests()
            .iter()
            .filter(|request| request.contains("/proxy/"))
            .count(),
        1
    );
    let (_, text) = run(&api, "top -o json").await;
    let top: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(top["items"][0]["usedBytes"], 3_u64 << 30);
    let (_, text) = run(&api, "top -o name").await;
    assert_eq!(text, "pod/p\n");
}

/// A pod whose containers without GPU memory stand beside these init containers.
fn pod_with_init(name: &str, node: &str, init: &Value) -> Value {
    let mut pod = pod("ml", name, node, 0);
    pod["spec"]["initContainers"] = init.clone();
    pod
}

#[tokio::test]
async fn init_containers_and_sidecars_count_as_gpu_memory() {
    let api = small();
    let limits = |gib: &str| json!({ "limits": { "bursar.dev/gpu-memory-gib": gib } });
    let sidecar = json!({ "name": "side", "restartPolicy": "Always", "resources": limits("2") });
    let init = json!({ "name": "load", "resources": limits("8") });
    let pods = vec![
        pod_with_init("both", "n", &json!([sidecar, init])),
        pod_with_init("side", "", &json!([sidecar])),
        pod_with_init("none", "n", &json!([])),
    ];
    api.put("/api/v1/pods", pods.clone());
    api.put("/api/v1/namespaces/ml/pods", pods);
    let (_, text) = run(&api, "top --no-usage").await;
    let rows: Vec<Vec<&str>> = text
        .lines()
        .skip(1)
        .map(|line| line.split_whitespace().skip(1).take(2).collect())
        .collect();
    assert_eq!(
        rows,
        [["both", "side"], ["both", "load"], ["side", "side"]],
        "{text}"
    );
    let (_, text) = run(&api, "top namespaces -o json").await;
    let top: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(top["items"][0]["requestedBytes"], 12_u64 << 30, "{text}");
    let (code, text) = run(&api, "explain pod side").await;
    assert_eq!(code, Ok(PROBLEM), "{text}");
    assert!(text.contains("ml/side waits for a node"), "{text}");
    let (code, text) = run(&api, "explain pod none").await;
    assert_eq!(
        (code, text.as_str()),
        (Ok(0), "ml/none requests no GPU memory.\n")
    );
}

#[tokio::test]
async fn node_without_gpus_has_its_sentence_in_tables_only() {
    let api = small();
    let nodes = vec![gpu_node("cpu", vec![])];
    api.put("/apis/bursar.dev/v1alpha1/gpunodes", nodes);
    let (_, text) = run(&api, "gpus cpu").await;
    assert!(text.starts_with("cpu has no GPUs"), "{text}");
    let (_, text) = run(&api, "gpus cpu -o json").await;
    let list: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(list["items"][0]["metadata"]["name"], "cpu");
    let (_, text) = run(&api, "gpus cpu -o name").await;
    assert_eq!(text, "gpunode.bursar.dev/cpu\n");
}

#[tokio::test]
async fn budgets_of_one_namespace_have_no_sum_of_a_cohort() {
    let api = small();
    let (_, text) = run(&api, "budgets").await;
    assert!(
        text.contains("cohort default: 64 of 79 GiB guaranteed"),
        "{text}"
    );
    let (code, text) = run(&api, "budgets -n ml").await;
    assert_eq!(code, Ok(0), "{text}");
    assert!(text.contains("8 of 64 GiB"), "{text}");
    assert!(!text.contains("cohort default:"), "{text}");
}

#[tokio::test]
async fn top_passes_its_selector_to_the_api_server() {
    let api = small();
    for line in ["top -l app!=x --no-usage", "top ns -l app!=x"] {
        let (code, text) = run(&api, line).await;
        assert_eq!(code, Ok(0), "{text}");
    }
    let selected: Vec<String> = api
        .queries()
        .into_iter()
        .filter(|query| query.contains("labelSelector=app%21%3Dx"))
        .collect();
    assert!(
        selected.len() == 2
            && selected[0].starts_with("/api/v1/namespaces/ml/pods?")
            && selected[1].starts_with("/api/v1/pods?"),
        "{selected:?}"
    );
}

#[tokio::test]
async fn pod_that_a_tenant_labels_as_an_agent_is_not_asked() {
    let bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";
    let mut impostor = own_pod("agent", "n");
    impostor["metadata"]["namespace"] = json!("a-tenant");
    let pods = vec![impostor, own_pod("agent", "n"), pod("ml", "p", "n", 8)];
    let account = json!({ "kind": "ServiceAccount", "namespace": "bursar-system" });
    let binding = json!({ "subjects": [account] });
    for may_read in [true, false] {
        let api = small();
        api.put("/api/v1/pods", pods.clone());
        api.put(bindings, vec![binding.clone()]);
        if !may_read {
            api.forbid(bindings);
        }
        let (code, text) = run(&api, "top").await;
        assert_eq!(code, Ok(0), "{text}");
        let requests = api.requests();
        let requests = requests
            .iter()
            .filter(|request| request.contains("/proxy/"));
        assert_eq!(requests.count(), usize::from(may_read));
        let note = "could not read clusterrolebindings: forbidden";
        assert_eq!(text.contains(note), !may_read, "{text}");
    }
}

#[test]
fn answer_of_a_proxied_pod_is_shown_without_escapes() {
    let answer = kube::core::Status::failure("gone\u{1b}[2J\nOK", "InternalError").with_code(500);
    let error = kube::Error::Api(Box::new(answer));
    assert_eq!(read::reason(&error), "gone [2J OK");
    assert_eq!(read::message(&error.into()), "gone [2J OK");
}

#[tokio::test]
async fn top_asks_an_agent_without_named_port_at_the_charts() {
    let api = small();
    let mut agent = own_pod("agent", "n");
    agent["spec"]["containers"][0]["ports"] = json!([]);
    api.put("/api/v1/pods", vec![pod("ml", "p", "n", 8), agent]);
    let (code, text) = run(&api, "top").await;
    assert_eq!(code, Ok(0), "{text}");
    let path = METRICS.replace(":9400/", ":9445/");
    assert!(api.requests().contains(&format!("GET {path}")), "{path}");
}

#[tokio::test]
async fn tenant_gets_its_pods_and_what_it_may_not_read() {
    let api = small();
    as_tenant(&api);
    let (code, text) = run(&api, "top").await;
    assert_eq!(code, Ok(0), "{text}");
    assert!(
        text.contains("ml          p     main        n      -     8 GiB   -"),
        "{text}"
    );
    assert!(
        text.contains("could not read gpunodes: forbidden\n"),
        "{text}"
    );
    assert!(
        text.contains("could not read metrics of the agents (pods/proxy): forbidden\n"),
        "{text}"
    );
    let (code, text) = run(&api, "budgets").await;
    assert_eq!(code, Ok(0), "{text}");
    assert!(text.contains("8 of 64 GiB"), "{text}");
    let (code, _) = run(&api, "gpus").await;
    assert_eq!(code, Err("failed to read gpunodes: forbidden".to_owned()));
    let (code, text) = run(&api, "explain pod p").await;
    assert_eq!(code, Ok(0), "{text}");
    assert!(text.contains("ml/p runs on n."), "{text}");
    let (code, _) = run(&api, "explain pod gone").await;
    let message = "failed to read pod ml/gone: NotFound by the test";
    assert_eq!(code, Err(message.to_owned()));
    for line in ["top -A", "top ns -A"] {
        let (code, text) = run(&api, line).await;
        assert_eq!(code, Ok(FAILED), "{text}");
        assert!(
            !text.contains("No pod") && !text.contains("No namespace"),
            "{text}"
        );
    }
}

#[tokio::test]
async fn explain_fails_for_waiting_pods_and_missing_ones() {
    let api = small();
    api.put(
        "/api/v1/namespaces/ml/pods",
        vec![waiting_pod(
            "ml",
            "w",
            "n",
            80,
            "waiting for 80 GiB, more than the healthy GPUs hold",
        )],
    );
    let (code, text) = run(&api, "explain pod w").await;
    assert_eq!(code, Ok(PROBLEM), "{text}");
    let (code, _) = run(&api, "explain pod none").await;
    assert!(code.unwrap_err().contains("failed to read pod ml/none"));
    let replica_set = json!({ "metadata": { "namespace": "ml", "name": "web-1", "uid": "rs", "ownerReferences": [{ "kind": "Deployment",
        "name": "web", "uid": "d", "controller": true }] }, "spec": { "replicas": 1 } });
    api.put("/apis/apps/v1/namespaces/ml/replicasets", vec![replica_set]);
    api.put(
        "/apis/apps/v1/namespaces/ml/deployments",
        vec![json!({ "metadata": { "namespace": "ml", "name": "web", "uid": "d" } })],
    );
    api.put("/api/v1/namespaces/ml/events", vec![event("ReplicaSet", "web-1", "rs", "FailedCreate",
        "Error creating: pods \"web-1-x\" is forbidden: exceeded quota: gpu-memory-budget-limit, requested: 8", 5)]);
    let (code, text) = run(&api, "explain deploy web").await;
    assert_eq!(code, Ok(PROBLEM), "{text}");
    assert!(
        text.contains("1 not created") && text.contains("exceeded quota: gpu-memory-budget-limit"),
        "{text}"
    );
}

/// The lists of all pods so far.
fn lists_of_all_pods(api: &FakeApi) -> usize {
    let queries = api.queries();
    let of_pods = queries
        .iter()
        .filter(|query| query.starts_with("/api/v1/pods?") && !query.contains("labelSelector"));
    of_pods.count()
}

#[tokio::test]
async fn gpus_lists_pods_only_for_names_that_nodes_lack() {
    let api = small();
    let (code, text) = run(&api, "gpus").await;
    assert_eq!((code, lists_of_all_pods(&api)), (Ok(0), 0), "{text}");
    let mut held = gpu("GPU-1", 0, 79, &[]);
    held["reservedFor"] = json!("ml-p");
    let node = gpu_node("n", vec![held]);
    api.put("/apis/bursar.dev/v1alpha1/gpunodes", vec![node]);
    let (_, text) = run(&api, "gpus").await;
    assert!(text.contains("held for ml/p"), "{text}");
    assert_eq!(lists_of_all_pods(&api), 1);
}

#[tokio::test]
async fn explain_reads_the_victims_and_not_all_pods() {
    let api = small();
    let waits = "waiting for 80 GiB on one GPU: largest free 71 GiB (GPU-1)";
    let own = vec![waiting_pod("ml", "w", "n", 80, waits)];
    api.put("/api/v1/namespaces/ml/pods", own);
    let evicted = |victim: &str| {
        let note = format!("{victim} is evicted from GPU-1 of n for this pod");
        victim_event("w", "GpuMemoryVictimEvicted", &note, victim, 5)
    };
    let victims = ["search/v", "search/gone", "search/v/proxy"].map(evicted);
    // A tenant writes an Event without a UID, which most other Events have not either.
    let mut forged = evicted("search/forged");
    forged["related"]["uid"] = json!("");
    let events = [&victims[..], &[forged]].concat();
    api.put("/api/v1/namespaces/ml/events", events);
    let of_search = "/api/v1/namespaces/search/pods";
    api.put(of_search, vec![pod("search", "v", "n", 40)]);
    let mut node = gpu_node("n", vec![gpu("GPU-1", 0, 79, &[("search-v", 40)])]);
    node["spec"]["reservations"] = json!([{ "gpu": "GPU-1", "podUid": "ml-w", "quanta": 79 }]);
    api.put("/apis/bursar.dev/v1alpha1/gpunodes", vec![node]);
    let (code, text) = run(&api, "explain pod w").await;
    assert_eq!(code, Ok(PROBLEM), "{text}");
    assert!(text.contains("search/v (40 GiB, priority 0)"), "{text}");
    assert!(!text.contains("gone"), "{text}");
    assert_eq!(lists_of_all_pods(&api), 0);
    let requests = api.requests();
    assert!(
        !requests.iter().any(|path| path.ends_with("/v/proxy")),
        "{requests:?}"
    );
    api.forbid(&format!("{of_search}/v"));
    let (_, text) = run(&api, "explain pod w").await;
    assert!(text.contains("could not read pods: forbidden"), "{text}");
    assert!(
        text.contains("search/v is evicted") && !text.contains("gone"),
        "{text}"
    );
}

#[tokio::test]
async fn explain_counts_a_workloads_pods_without_gpu_memory() {
    let api = small();
    let pods = ["web-0", "web-1", "web-2"].map(|name| {
        let mut pod = pod("ml", name, "cpu", 0);
        pod["spec"]["containers"][0]["resources"] = json!({});
        pod["metadata"]["ownerReferences"] =
            json!([{ "kind": "StatefulSet", "name": "web", "uid": "s", "controller": true }]);
        pod
    });
    api.put("/api/v1/namespaces/ml/pods", pods.to_vec());
    api.put(
        "/apis/apps/v1/namespaces/ml/statefulsets",
        vec![
            json!({ "metadata": { "namespace": "ml", "name": "web", "uid": "s" }, "spec": { "replicas": 3 } }),
        ],
    );
    let (code, text) = run(&api, "explain sts web").await;
    assert_eq!(
        (code, text.as_str()),
        (Ok(0), "ml/web has 3 of 3 pods running.\n")
    );
}

#[tokio::test]
async fn dry_run_prints_the_patch_and_writes_nothing() {
    let api = small();
    for (line, expected) in [
        (
            "drain n --dry-run",
            r#"kubectl patch gpunode n --type merge -p '{"spec":{"drain":["GPU-1"]}}'"#,
        ),
        (
            "resize p 4Gi --dry-run",
            r#"kubectl patch gpumemorybudget -n ml default --type merge -p '{"spec":{"overrides":[{"deviceMemory":"4Gi","pod":"p"}]}}'"#,
        ),
    ] {
        let (code, text) = run(&api, line).await;
        assert_eq!((code, text.trim_end()), (Ok(0), expected));
    }
    assert_eq!(api.patches(), Vec::<Value>::new());
}

#[tokio::test]
async fn changes_are_patched_with_the_version() {
    let api = small();
    let (code, text) = run(&api, "drain n 0 --yes --no-wait --context c").await;
    assert_eq!(code, Ok(0), "{text}");
    assert!(
        text.contains("1 pod has memory there, whose processes will be killed: ml/p."),
        "{text}"
    );
    assert!(
        text.contains("Undo: kubectl bursar undrain n GPU-1 --context c\n"),
        "{text}"
    );
    let (code, text) = run(&api, "undrain n").await;
    assert_eq!(code, Ok(0), "{text}");
    let drains: Vec<Value> = api
        .patches()
        .iter()
        .map(|patch| patch["spec"]["drain"].clone())
        .collect();
    assert_eq!(drains, [json!(["GPU-1"]), json!([])]);
    assert!(
        api.patches()
            .iter()
            .all(|patch| patch["metadata"]["resourceVersion"] == "7")
    );
}

#[tokio::test]
async fn change_is_made_again_after_a_conflict() {
    let api = small();
    let mut resized = budget("ml", 64, 64, 8, 0);
    resized["spec"]["overrides"] =
        json!([{ "pod": "other", "deviceMemory": "1Gi" }, { "pod": "p", "deviceMemory": "4Gi" }]);
    api.put(
        "/apis/bursar.dev/v1alpha1/namespaces/ml/gpumemorybudgets",
        vec![resized],
    );
    for (line, field, expected) in [
        ("drain n 0 --yes --no-wait", "drain", json!(["GPU-1"])),
        ("undrain n GPU-1", "drain", json!([])),
        (
            "resize p --reset",
            "overrides",
            json!([{ "pod": "other", "deviceMemory": "1Gi" }]),
        ),
    ] {
        api.conflict(9);
        let (code, text) = run(&api, line).await;
        assert_eq!(code, Ok(0), "{line}: {text}");
        assert_eq!(api.patches().last().unwrap()["spec"][field], expected);
    }
    api.conflict(usize::MAX);
    let (code, _) = run(&api, "drain n 0 --yes --no-wait").await;
    let message = "failed to change GpuNode n: Conflict by the test";
    assert_eq!(code, Err(message.to_owned()));
    assert_eq!(api.patches().len(), 3);
}

#[tokio::test]
async fn drain_waits_until_the_agent_says_drained() {
    let api = small();
    api.put(
        "/apis/bursar.dev/v1alpha1/gpunodes",
        vec![gpu_node("n", vec![drained_gpu()])],
    );
    let (code, text) = run(&api, "drain n --yes").await;
    assert_eq!(code, Ok(0), "{text}");
    assert!(text.contains("n: drained after"), "{text}");
    api.put(
        "/apis/bursar.dev/v1alpha1/gpunodes",
        vec![gpu_node("n", vec![gpu("GPU-1", 0, 79, &[])])],
    );
    let (code, text) = run(&api, "drain n --yes --timeout 0s").await;
    assert_eq!(code, Ok(PROBLEM), "{text}");
    assert!(text.contains("GPU 0 is Active (Ok)"), "{text}");
}

fn drained_gpu() -> Value {
    let mut drained = gpu("GPU-1", 0, 79, &[]);
    drained["state"] = json!("Draining");
    drained["health"] = json!({ "status": "Unhealthy", "reason": "Drained" });
    drained
}

#[tokio::test(start_paused = true)]
async fn drain_waits_on_when_a_read_fails_or_hangs() {
    let nodes = "/apis/bursar.dev/v1alpha1/gpunodes";
    let api = small();
    api.put(nodes, vec![gpu_node("n", vec![drained_gpu()])]);
    api.break_reads(1, 1);
    let (code, text) = run(&api, "drain n --yes --timeout 9223372036854775807s").await;
    assert_eq!(code, Ok(0), "{text}");
    assert!(text.contains("n: drained after"), "{text}");
    let api = small();
    api.break_reads(0, usize::MAX);
    let start = tokio::time::Instant::now();
    let (code, text) = run(&api, "drain n --yes --timeout 30s").await;
    assert_eq!(code, Ok(PROBLEM), "{text}");
    assert!(
        text.contains(
            "n is not drained after 30s: could not read its GpuNode: deadline has elapsed"
        ),
        "{text}"
    );
    assert!(start.elapsed() < Duration::from_secs(33), "{text}");
}

#[tokio::test(start_paused = true)]
async fn resize_waits_on_when_a_read_fails_or_hangs() {
    let nodes = "/apis/bursar.dev/v1alpha1/gpunodes";
    let api = small();
    let mut applied = gpu_node("n", vec![gpu("GPU-1", 0, 79, &[("ml-p", 8)])]);
    applied["spec"]["quotas"] = json!([{ "podUid": "ml-p", "container": "main", "quota": "4Gi" }]);
    applied["status"]["quotas"] = json!([{ "podUid": "ml-p", "container": "main",
        "account": "device", "state": "Applied", "quota": "4Gi" }]);
    api.put(nodes, vec![applied]);
    api.break_reads(1, 1);
    let (code, text) = run(&api, "resize p 4Gi").await;
    assert_eq!(
        (code, text.as_str()),
        (Ok(0), "ml/p has a quota of 4 GiB.\n")
    );
    api.forbid("/apis/bursar.dev/v1alpha1/gpunodes/n");
    let (code, text) = run(&api, "resize p 2Gi").await;
    assert_eq!(code, Ok(0), "{text}");
    assert!(text.contains("is not known: could not read"), "{text}");
}

#[tokio::test]
async fn doctor_and_uninstall_end_with_their_codes() {
    let api = small();
    let (code, text) = run(&api, "doctor --preflight").await;
    assert_eq!(code, Ok(0), "{text}");
    assert!(
        text.contains("OK    Kubernetes v1.36.3\nOK    n: containerd://2.1.4\n"),
        "{text}"
    );
    let (code, text) = run(&api, "uninstall --check").await;
    assert_eq!(code, Ok(PROBLEM), "{text}");
    assert!(text.contains("1 GpuNode"), "{text}");
}

/// The text of a file in an archive of `support`.
fn archived(archive: &std::path::Path, name: &str) -> Option<String> {
    let archive = std::fs::File::open(archive).unwrap();
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(archive));
    let mut entries = archive.entries().unwrap().map(Result::unwrap);
    let mut entry = entries.find(|entry| entry.path().unwrap().ends_with(name))?;
    let mut text = String::new();
    entry.read_to_string(&mut text).unwrap();
    Some(text)
}

#[tokio::test]
async fn support_examines_the_kinds_that_doctor_reads() {
    let api = small();
    let labelled = |component: &str| {
        json!({ "metadata": { "name": "bursar-agent", "namespace": "bursar-system",
            "labels": { "app.kubernetes.io/component": component } } })
    };
    for (path, objects) in [
        ("/apis/apps/v1/daemonsets", vec![labelled("agent")]),
        (
            "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies",
            vec![labelled("")],
        ),
        (
            "/apis/monitoring.coreos.com/v1/podmonitors",
            vec![
                json!({ "metadata": { "name": "bursar" }, "spec": { "selector": {
                "matchLabels": { "app.kubernetes.io/name": "bursar" } } } }),
            ],
        ),
    ] {
        api.put(path, objects);
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.tar.gz");
    let (code, text) = run(&api, &format!("support -f {}", file.display())).await;
    assert_eq!(code, Ok(0), "{text}");
    let doctor = archived(&file, "doctor.json").unwrap();
    for wrong in ["MutatingAdmissionPolicy is missing", "no PodMonitor"] {
        assert!(!doctor.contains(wrong), "{doctor}");
    }
}

#[tokio::test]
async fn support_bounds_logs_and_says_which_are_left_out() {
    let api = small();
    let mut pods: Vec<Value> = (0..101)
        .map(|number| own_pod("agent", &format!("{number:03}")))
        .collect();
    pods[100]["status"]["conditions"] = json!([]);
    api.put("/api/v1/pods", pods);
    let log = |node: &str| format!("/api/v1/namespaces/bursar-system/pods/bursar-agent-{node}/log");
    api.text(&log("100"), "not ready\n");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.tar.gz");
    let (code, text) = run(&api, &format!("support -f {}", file.display())).await;
    assert_eq!(code, Ok(0), "{text}");
    let query = format!("{}?tailLines=2000&limitBytes=1048576", log("100"));
    assert!(api.queries().contains(&query), "{query}");
    let requests = api.requests();
    let logs = requests.iter().filter(|path| path.ends_with("/log"));
    assert_eq!(logs.count(), 100);
    assert!(archived(&file, "logs/bursar-agent-100.log").is_some());
    let left_out = archived(&file, "logs/left-out.txt").unwrap();
    for line in [
        "left out the log of bursar-agent-099: it is beyond 100 pods\n",
        "could not read the log of bursar-agent-000: the API server does not have it\n",
    ] {
        assert!(left_out.contains(line) && text.contains(line), "{left_out}");
    }
}

#[tokio::test]
async fn running_pods_get_one_event_about_an_uninstall() {
    let api = FakeApi::default();
    let mut ended = pod("ml", "ended", "n", 8);
    ended["status"]["phase"] = json!("Succeeded");
    let pending = pod("ml", "pending", "", 8);
    let pods = ["a", "b"].map(|name| pod("ml", name, "n", 8));
    let in_shop = pod("shop", "c", "n", 8);
    let all = pods.into_iter().chain([ended, pending, in_shop]);
    api.put("/api/v1/pods", all.collect());
    let of_ml = "/apis/events.k8s.io/v1/namespaces/ml/events";
    for _ in 0..2 {
        let (code, text) = run(&api, "uninstall --notify").await;
        assert_eq!(code, Ok(0), "{text}");
        assert!(text.contains("3 pods with GPU memory told"), "{text}");
        let events = api.list(of_ml);
        let names: Vec<_> = events
            .iter()
            .map(|event| &event["regarding"]["name"])
            .collect();
        assert_eq!(names, ["a", "b"]);
        assert_eq!(events[0]["reason"], "GpuMemoryUninstall");
    }
    api.forbid("/apis/events.k8s.io/v1/namespaces/shop/events");
    let (code, text) = run(&api, "uninstall --notify").await;
    assert_eq!(code, Ok(PROBLEM), "{text}");
    assert!(
        text.contains("shop/c could not be told: forbidden"),
        "{text}"
    );
}

#[tokio::test]
async fn unreadable_node_hides_no_other() {
    let api = small();
    let mut bad = gpu_node("bad", vec![]);
    bad["status"]["gpus"] = json!("none");
    let good = gpu_node("n", vec![gpu("GPU-1", 0, 79, &[])]);
    api.put("/apis/bursar.dev/v1alpha1/gpunodes", vec![bad, good]);
    let (code, text) = run(&api, "gpus").await;
    assert_eq!(code, Ok(0), "{text}");
    assert!(text.contains("1 GPU on 1 node"), "{text}");
    assert!(text.contains("could not parse gpunodes bad: "), "{text}");
    let (code, _) = run(&api, "gpus bad").await;
    assert!(
        code.unwrap_err()
            .starts_with("failed to parse GpuNode bad: ")
    );
    let (_, text) = run(&api, "top --no-usage").await;
    assert!(text.contains("could not parse gpunodes bad: "), "{text}");
    api.put(
        "/apis/apps/v1/daemonsets",
        vec![
            json!({ "metadata": { "name": "bursar-agent", "namespace": "bursar-system",
        "labels": { "app.kubernetes.io/component": "agent" } } }),
        ],
    );
    let (code, text) = run(&api, "doctor").await;
    assert_eq!(code, Ok(PROBLEM), "{text}");
    assert!(text.contains("gpunodes bad cannot be parsed"), "{text}");
}

#[tokio::test]
async fn json_has_the_objects_as_the_api_server_has_them() {
    let api = small();
    let mut newer = gpu_node("newer", vec![gpu("GPU-1", 0, 79, &[])]);
    newer["status"]["gpus"][0]["state"] = json!("Hibernating");
    newer["status"]["ofLater"] = json!({ "field": 1 });
    let mut bad = gpu_node("bad", vec![]);
    bad["status"]["gpus"] = json!("none");
    let nodes = vec![newer, bad];
    api.put("/apis/bursar.dev/v1alpha1/gpunodes", nodes.clone());
    let list = |text: &str| serde_json::from_str::<Value>(text).unwrap()["items"].clone();
    let (code, text) = run(&api, "gpus -o json").await;
    assert_eq!((code, list(&text)), (Ok(0), json!(nodes)));
    let (_, text) = run(&api, "gpus newer -o json").await;
    assert_eq!(list(&text), json!([nodes[0]]));
    let mut budget = budget("ml", 64, 64, 8, 0);
    budget["spec"]["ofLater"] = json!(true);
    for path in ["", "/namespaces/ml"] {
        let path = format!("/apis/bursar.dev/v1alpha1{path}/gpumemorybudgets");
        api.put(&path, vec![budget.clone()]);
    }
    for line in ["budgets -o json", "budgets -n ml -o json"] {
        let (_, text) = run(&api, line).await;
        assert_eq!(list(&text), json!([budget]), "{line}");
    }
}

#[tokio::test(start_paused = true)]
async fn watch_goes_on_after_a_read_that_fails() {
    for (output, clears, separator) in [
        ("yaml", false, "---\n"),
        ("table", true, "\u{1b}[H\u{1b}[J"),
        ("table", false, "\nNODE "),
    ] {
        let api = small();
        let words = ["kubectl-bursar", "gpus", "-w", "-o", output];
        let cli = Cli::try_parse_from(words).unwrap();
        let mut out = Vec::new();
        let mut session = Session {
            client: api.client(),
            global: &cli.global,
            terminal: Terminal {
                width: Some(120),
                clears,
                ..Terminal::default()
            },
            out: &mut out,
        };
        {
            let mut watch = std::pin::pin!(session.run(&cli.command));
            let mut runs_on = async |seconds| {
                let ended = tokio::time::timeout(Duration::from_secs(seconds), &mut watch).await;
                assert!(ended.is_err(), "{output}: {ended:?}");
            };
            runs_on(3).await;
            api.forbid("/apis/bursar.dev/v1alpha1/gpunodes");
            runs_on(5).await;
        }
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains(separator), "{output}: {text}");
        assert_eq!(text.contains('\u{1b}'), clears, "{output}: {text}");
    }
}

/// 1,000 nodes, and 10,000 pods of which each requests GPU memory.
fn large() -> FakeApi {
    let api = FakeApi::default();
    let nodes = (0..1000).map(|number| {
        let gpus = (0..2).map(|index| {
            let owners: Vec<(String, i32)> = (0..5)
                .map(|pod| (format!("ml-pod-{}", number * 10 + index * 5 + pod), 8))
                .collect();
            let owners: Vec<(&str, i32)> = owners
                .iter()
                .map(|(uid, quanta)| (uid.as_str(), *quanta))
                .collect();
            gpu(&format!("GPU-{number}-{index}"), index, 79, &owners)
        });
        gpu_node(&format!("node-{number}"), gpus.collect())
    });
    api.put("/apis/bursar.dev/v1alpha1/gpunodes", nodes.collect());
    let pods = (0..10_000).map(|number| {
        let mut pod = pod(
            "ml",
            &format!("pod-{number}"),
            &format!("node-{}", number / 10),
            8,
        );
        // An ordinary pod has some KiB that the table does not need.
        pod["metadata"]["managedFields"] =
            json!([{ "manager": "kubelet", "fieldsV1": { "f:status": "x".repeat(2000) } }]);
        pod["spec"]["containers"][0]["env"] = json!([{ "name": "A", "value": "y".repeat(1000) }]);
        pod
    });
    api.put("/api/v1/pods", pods.collect());
    api
}

/// Serves a fake API over HTTP until the test ends, and returns a kubeconfig for it.
async fn kubeconfig(api: FakeApi) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let answer = move |request: axum::extract::Request| {
        let api = api.clone();
        async move {
            let (parts, body) = request.into_parts();
            let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
            let (parts, body) = api.respond(&parts, &body).into_parts();
            let body = body.collect_bytes().await.unwrap();
            axum::response::Response::from_parts(parts, axum::body::Body::from(body))
        }
    };
    let router = axum::Router::new().fallback(answer);
    tokio::spawn(async move { axum::serve(listener, router).await });
    json!({ "apiVersion": "v1", "kind": "Config", "current-context": "c", "users": [{ "name": "u", "user": {} }],
        "clusters": [{ "name": "c", "cluster": { "server": format!("http://{address}") } }],
        "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "u" } }] })
    .to_string()
}

/// The most resident memory of a process so far in KiB (`VmHWM`, which is `ru_maxrss`), and its
/// processor time (proc(5)).
fn usage(pid: u32) -> (u64, Duration) {
    let read = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap();
    let status = read("status");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let peak = peak
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap();
    let stat = read("stat");
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    let ticks: u64 = fields[11..13]
        .iter()
        .map(|field| field.parse::<u64>().unwrap())
        .sum();
    // Linux counts 100 ticks a second for user space on every architecture.
    (peak, Duration::from_millis(ticks * 10))
}

const MIB: u64 = 1 << 10;

#[tokio::test(flavor = "multi_thread")]
async fn top_of_a_large_cluster_is_bounded() {
    let api = large();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config");
    std::fs::write(&file, kubeconfig(api.clone()).await).unwrap();
    let start = Instant::now();
    let mut child = tokio::process::Command::new(env!("CARGO_BIN_EXE_kubectl-bursar"))
        .args(["top", "-A", "--no-usage", "--kubeconfig"])
        .arg(&file)
        .stdout(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    lines.next_line().await.unwrap().unwrap();
    // The table is larger than the pipe. So the program has all objects and the text, and waits.
    let ((peak, processor), took) = (usage(child.id().unwrap()), start.elapsed());
    let mut rows = 0;
    while lines.next_line().await.unwrap().is_some() {
        rows += 1;
    }
    assert_eq!(
        (rows, child.wait().await.unwrap().code()),
        (10_000, Some(0))
    );
    let requests = api.requests();
    assert_eq!(
        requests.len(),
        22,
        "20 pages of pods and 2 of GpuNodes: {requests:?}"
    );
    let figures = format!(
        "10,000 pods on 1,000 nodes: {} requests, {} MiB, {processor:?} of the processor, {took:?}",
        requests.len(),
        peak / MIB
    );
    println!("{figures}");
    assert!(peak < 200 * MIB, "{figures}");
    // The wall time includes the fake API server's own work, on processors with other tests.
    assert!(
        processor < Duration::from_secs(2) && took < Duration::from_secs(30),
        "{figures}"
    );
}

/// The agent of the node.
fn admitted_agent() -> Value {
    let mut agent = own_pod("agent", "n");
    agent["status"]["startTime"] = json!("2026-01-01T00:00:00Z");
    agent
}

/// A cluster whose node has an old relay, and this pod. Each relay of the node is Ready, or none.
fn with_old_relay(other: Value, is_ready: &str) -> FakeApi {
    let api = small();
    let mut relay = own_pod("relay", "n");
    relay["status"]["conditions"][0]["status"] = json!(is_ready);
    relay["status"]["startTime"] = json!("2026-01-01T00:00:00Z");
    relay["metadata"]["labels"]["controller-revision-hash"] = json!("a");
    let set = json!({ "metadata": { "name": "bursar-relay", "namespace": "bursar-system",
        "labels": { "app.kubernetes.io/name": "bursar", "app.kubernetes.io/component": "relay" } } });
    let revision = json!({ "revision": 2, "metadata": { "name": "r", "labels": { "controller-revision-hash": "b" } } });
    let mut gpu_node = gpu_node("n", vec![gpu("GPU-1", 0, 79, &[])]);
    gpu_node["status"]["conditions"] = json!([{ "type": "Registered", "status": "True", "reason": "Ok",
        "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z" }]);
    let mut machine = node("n");
    machine["metadata"]["resourceVersion"] = json!("7");
    let own = "/api/v1/namespaces/bursar-system/pods";
    for (path, objects) in [
        ("/api/v1/nodes", vec![machine]),
        ("/api/v1/pods", vec![other, relay.clone(), admitted_agent()]),
        (own, vec![relay]),
        ("/apis/apps/v1/daemonsets", vec![set]),
        (
            "/apis/apps/v1/namespaces/bursar-system/controllerrevisions",
            vec![revision],
        ),
        ("/apis/bursar.dev/v1alpha1/gpunodes", vec![gpu_node]),
    ] {
        api.put(path, objects);
    }
    api
}

/// The requests that change something, without their queries.
fn changes(api: &FakeApi) -> Vec<String> {
    let requests = api.requests().into_iter();
    requests
        .filter(|request| !request.starts_with("GET "))
        .collect()
}

#[tokio::test(start_paused = true)]
async fn roll_cordons_replaces_and_uncordons() {
    let mut admitted = pod("ml", "p", "n", 8);
    admitted["status"]["startTime"] = json!("2026-01-01T00:00:00Z");
    let api = with_old_relay(admitted, "True");
    let (code, text) = run(&api, "roll relay --dry-run").await;
    assert_eq!(
        (code, text.as_str()),
        (Ok(0), "n: bursar-system/bursar-relay-n\n")
    );
    assert_eq!(changes(&api), [] as [&str; 0]);

    let (code, text) = run(&api, "roll relay").await;
    assert_eq!(code, Ok(0), "{text}");
    assert!(text.contains("n: the relay is replaced"), "{text}");
    assert_eq!(
        changes(&api),
        [
            "PATCH /api/v1/nodes/n",
            "DELETE /api/v1/namespaces/bursar-system/pods/bursar-relay-n",
            "PATCH /api/v1/nodes/n",
        ]
    );
    assert_eq!(api.list("/api/v1/nodes")[0]["spec"]["unschedulable"], false);
}

#[tokio::test(start_paused = true)]
async fn roll_changes_nothing_while_the_kubelet_admits_a_pod() {
    let mut new = pod("ml", "new", "n", 8);
    new["status"] = json!({ "phase": "Pending" });
    let api = with_old_relay(new, "True");
    let (code, text) = run(&api, "roll relay n --timeout 10s").await;
    assert_eq!(code, Ok(1), "{text}");
    assert!(text.contains("has not admitted ml/new"), "{text}");
    assert_eq!(changes(&api), ["PATCH /api/v1/nodes/n"; 2]);
    assert_eq!(api.list("/api/v1/nodes")[0]["spec"]["unschedulable"], false);
}

/// The relay was deleted although the API server answered with an error.
#[tokio::test(start_paused = true)]
async fn roll_sends_a_deletion_without_an_answer_again() {
    let mut admitted = pod("ml", "p", "n", 8);
    admitted["status"]["startTime"] = json!("2026-01-01T00:00:00Z");
    let api = with_old_relay(admitted, "True");
    api.lose_deletions(1);
    let (code, text) = run(&api, "roll relay").await;
    assert_eq!(code, Ok(0), "{text}");
    assert!(text.contains("n: the relay is replaced"), "{text}");
    let relay = "DELETE /api/v1/namespaces/bursar-system/pods/bursar-relay-n";
    let node = "PATCH /api/v1/nodes/n";
    assert_eq!(changes(&api), [node, relay, relay, node]);
}

#[tokio::test(start_paused = true)]
async fn roll_changes_nothing_where_it_may_not_delete() {
    let mut admitted = pod("ml", "p", "n", 8);
    admitted["status"]["startTime"] = json!("2026-01-01T00:00:00Z");
    let api = with_old_relay(admitted, "True");
    api.forbid("/api/v1/namespaces/bursar-system/pods/bursar-relay-n");
    let (code, text) = run(&api, "roll relay").await;
    assert_eq!(code, Ok(1), "{text}");
    let lack = "n: nothing changed: its relay cannot be deleted: forbidden";
    assert!(text.contains(lack), "{text}");
    assert_eq!(api.list("/api/v1/nodes")[0]["spec"]["unschedulable"], false);
}

/// An admin's own cordon stays, and so does that of a node whose new relay does not come.
#[tokio::test(start_paused = true)]
async fn roll_leaves_a_node_cordoned_that_would_fail_pods() {
    let mut admitted = pod("ml", "p", "n", 8);
    admitted["status"]["startTime"] = json!("2026-01-01T00:00:00Z");
    let api = with_old_relay(admitted, "False");
    let (code, text) = run(&api, "roll relay --timeout 10s").await;
    assert_eq!(code, Ok(1), "{text}");
    assert!(
        text.contains("lacks a relay that is Ready; the node stays cordoned"),
        "{text}"
    );
    assert_eq!(api.list("/api/v1/nodes")[0]["spec"]["unschedulable"], true);
}
