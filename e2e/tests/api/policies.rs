//! Checks the refusals of the policies on pods, and which accounts may list all pods.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bursar_e2e::chart::NAMESPACE;
use kube::Client;
use libtest_mimic::Failed;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::isolated_scope::IsolatedScope;
use crate::server::{Server, acquire_permit};

const DEVICE: &str = "bursar.dev/gpu-memory-gib";
const MANAGED: &str = "bursar.dev/managed-memory-gib";
const COMPUTE: &str = bursar_crds::resources::GPU_COMPUTE;
const OPERATOR: &str = "bursar-operator";
const NO_BUDGET: &str = "namespace policed has no GpuMemoryBudget in force";
/// The API server applies a new policy or a namespace's new label within this time.
const POLICY_TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) async fn policies(server: &Server) -> Result<String, Failed> {
    let _permit = acquire_permit().await;
    let at = IsolatedScope::set_up(server, "policed").await?;
    let rows = rows(&at).await?;
    needs_a_budget(server, &at).await?;
    per_container(&at).await?;
    let accounts = check_accounts_that_list_pods(server).await?;
    Ok(format!(
        "{rows} pods let in or refused; of {accounts} accounts one lists pods"
    ))
}

pub(crate) async fn managed_memory(server: &Server) -> Result<String, Failed> {
    let _permit = acquire_permit().await;
    let at = IsolatedScope::set_up(server, "managed").await?;
    let rows = managed_rows(&at).await?;
    resized(&at).await?;
    Ok(format!("{rows} pods with managed memory let in or refused"))
}

/// Makes a pod with the limits of its container, and `init` for its init container.
fn pod(limits: Value, init: Value, annotations: Value) -> Value {
    let container = |name: &str, limits| json!({ "name": name, "image": "i", "resources": { "limits": limits } });
    json!({
        "metadata": { "name": "row", "annotations": annotations },
        "spec": { "containers": [container("c", limits)], "initContainers": [container("init", init)] },
    })
}

/// Makes a pod whose host memory is scheduled for less than its managed memory.
fn requesting_less() -> Value {
    let limits = json!({ DEVICE: "4", MANAGED: "2", "memory": "4Gi" });
    let mut pod = pod(limits, json!({}), json!({}));
    pod["spec"]["containers"][0]["resources"]["requests"] = json!({ "memory": "1Gi" });
    pod
}

/// Makes a pod with GPU memory that mounts a volume at `path`.
fn mounting(path: &str) -> Value {
    let mut pod = pod(json!({ DEVICE: "16" }), json!({}), json!({}));
    pod["spec"]["volumes"] = json!([{ "name": "v", "emptyDir": {} }]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{ "name": "v", "mountPath": path }]);
    pod
}

/// Returns the API server's refusal of the pod, empty if the server accepts.
async fn refusal(at: &IsolatedScope, pod: Value) -> Result<String, Failed> {
    let path = format!("{}?dryRun=All", at.pods_path());
    match at.create(&path, pod).await {
        Ok(_) => Ok(String::new()),
        Err(kube::Error::Api(status)) => Ok(status.message.clone()),
        Err(other) => Err(other.into()),
    }
}

async fn rows(at: &IsolatedScope) -> Result<usize, Failed> {
    let none = || json!({});
    let in_quanta = |container: &str, resource: &str, write: u32, not: &str| {
        format!("container {container}: {resource} counts quanta of 1Gi: write {write}, not {not}")
    };
    let ours = "an annotation cdi.k8s.io/ names a device of bursar.dev";
    let covers =
        |path: &str| format!("a volume is mounted at {path}, where the GPU memory quota is held");
    let rows = [
        (pod(json!({ DEVICE: "16" }), none(), none()), String::new()),
        (mounting("/data/opt/bursar"), String::new()),
        (mounting("//opt/bursar/lib"), covers("//opt/bursar/lib")),
        (mounting("opt/bursar/lib"), covers("opt/bursar/lib")),
        (
            mounting("usr/lib64/libcuda.so.1"),
            covers("usr/lib64/libcuda.so.1"),
        ),
        (
            pod(json!({ DEVICE: "16Gi" }), none(), none()),
            in_quanta("c", DEVICE, 16, "16Gi"),
        ),
        (
            pod(json!({ DEVICE: "1536Mi" }), none(), none()),
            in_quanta("c", DEVICE, 2, "1536Mi"),
        ),
        (
            pod(json!({ DEVICE: "4", MANAGED: "4Gi" }), none(), none()),
            in_quanta("c", MANAGED, 4, "4Gi"),
        ),
        (
            pod(json!({ DEVICE: "4" }), json!({ DEVICE: "8Gi" }), none()),
            in_quanta("init", DEVICE, 8, "8Gi"),
        ),
        (
            pod(
                none(),
                none(),
                json!({ "cdi.k8s.io/x": "bursar.dev/gpu=0" }),
            ),
            ours.to_owned(),
        ),
        (
            pod(
                none(),
                none(),
                json!({ "cdi.k8s.io/x": "nvidia.com/gpu=0,bursar.dev/gpu=0" }),
            ),
            ours.to_owned(),
        ),
        (
            pod(
                none(),
                none(),
                json!({ "cdi.k8s.io/x": "nvidia.com/gpu=0" }),
            ),
            String::new(),
        ),
    ];
    let unknown = |name: &str| format!("this cluster has no resource {name}: write {DEVICE}");
    let spread = |gpus: &str| {
        pod(
            json!({ DEVICE: "4" }),
            none(),
            json!({ "bursar.dev/gpus": gpus }),
        )
    };
    let weight = |container: &str| {
        format!("container {container} asks for {COMPUTE}: write at most 100, hundredths of a GPU")
    };
    let not_gpus = |gpus: &str| format!("annotation bursar.dev/gpus is {gpus}: write a number");
    let rows = rows.into_iter().chain([
        (
            pod(json!({ "bursar.dev/gpu-memory-gb": "4" }), none(), none()),
            unknown("bursar.dev/gpu-memory-gb"),
        ),
        (
            pod(
                json!({ "bursar.dev/gpu-memory-512mib": "4" }),
                none(),
                none(),
            ),
            unknown("bursar.dev/gpu-memory-512mib"),
        ),
        (
            pod(json!({ DEVICE: "4", COMPUTE: "100" }), none(), none()),
            String::new(),
        ),
        (
            pod(json!({ DEVICE: "4", COMPUTE: "101" }), none(), none()),
            weight("c"),
        ),
        (
            pod(json!({ DEVICE: "4" }), json!({ COMPUTE: "5" }), none()),
            weight("init"),
        ),
        (spread("2"), String::new()),
        (spread("two"), not_gpus("\"two\"")),
        (spread("0"), not_gpus("\"0\"")),
        (spread(&"9".repeat(60)), not_gpus("too long")),
    ]);
    check_refusals(at, rows.collect()).await
}

/// Checks the refusal of each pod, empty where the pod is let in. Returns the number of pods.
async fn check_refusals(at: &IsolatedScope, rows: Vec<(Value, String)>) -> Result<usize, Failed> {
    let count = rows.len();
    for (pod, words) in rows {
        let refused_with = refusal(at, pod.clone()).await?;
        assert!(
            refused_with.contains(&words) && refused_with.is_empty() == words.is_empty(),
            "{pod}: {refused_with}"
        );
    }
    Ok(count)
}

/// Checks the host memory that pods with managed memory must have.
async fn managed_rows(at: &IsolatedScope) -> Result<usize, Failed> {
    let none = || json!({});
    let backs = |container: &str, quanta: u32, mib: u32| {
        format!(
            "container {container} asks for {quanta} of {MANAGED}, which its host memory must back: \
             write limits.memory of at least {mib}Mi"
        )
    };
    let rows = vec![
        (
            pod(
                json!({ DEVICE: "4", MANAGED: "64", "memory": "70Gi" }),
                none(),
                none(),
            ),
            String::new(),
        ),
        (
            pod(json!({ DEVICE: "4", MANAGED: "64" }), none(), none()),
            backs("c", 64, 65_536),
        ),
        (
            pod(
                json!({ DEVICE: "4", MANAGED: "2", "memory": "2047Mi" }),
                none(),
                none(),
            ),
            backs("c", 2, 2_048),
        ),
        (
            pod(
                none(),
                json!({ DEVICE: "4", MANAGED: "2", "memory": "1Gi" }),
                none(),
            ),
            backs("init", 2, 2_048),
        ),
        (requesting_less(), backs("c", 2, 2_048)),
        (
            pod(json!({ DEVICE: "4", MANAGED: "0" }), none(), none()),
            String::new(),
        ),
    ];
    check_refusals(at, rows).await
}

/// Checks that a pod with managed memory keeps the host memory that backs it when it is resized.
async fn resized(at: &IsolatedScope) -> Result<(), Failed> {
    let memory = |limit: &str| json!({ DEVICE: "4", MANAGED: "2", "memory": limit });
    let mut resized = pod(memory("4Gi"), json!({}), json!({}));
    resized["metadata"]["name"] = json!("resized");
    let created = at.create(&at.pods_path(), resized).await?;
    let resize = async |limit: &str| {
        let mut containers = created["spec"]["containers"].clone();
        for amounts in ["limits", "requests"] {
            containers[0]["resources"][amounts]["memory"] = json!(limit);
        }
        let path = format!("{}/resized/resize?dryRun=All", at.pods_path());
        at.try_merge(&path, json!({ "spec": { "containers": containers } }))
            .await
    };
    resize("2Gi").await?;
    match resize("2047Mi").await {
        Err(kube::Error::Api(status)) => assert!(
            status
                .message
                .contains("write limits.memory of at least 2048Mi"),
            "{status:?}"
        ),
        other => return Err(format!("host memory of 2047Mi was let in: {other:?}").into()),
    }
    at.delete(&format!("{}/resized", at.pods_path())).await
}

/// Checks `policies.requireBudget` in one namespace: pods with GPU memory are refused until a
/// budget is enforced. This policy is one without weights of compute time.
async fn needs_a_budget(server: &Server, at: &IsolatedScope) -> Result<(), Failed> {
    let chart = server
        .control_plane
        .chart_without_workloads(&["--set=policies.requireBudget=true"])
        .await?;
    let about_pods = chart
        .into_iter()
        .filter(|object| object["metadata"]["name"] == "bursar-pods");
    let policy = about_pods.map(|mut object| {
        object["metadata"]["name"] = json!("policed-pods");
        if object["kind"] == "ValidatingAdmissionPolicyBinding" {
            object["spec"]["policyName"] = json!("policed-pods");
            let here = json!({ "kubernetes.io/metadata.name": at.name });
            object["spec"]["matchResources"]["namespaceSelector"]["matchLabels"] = here;
        }
        object
    });
    server.control_plane.apply(policy.collect()).await?;
    wait_for_refusal(at, NO_BUDGET).await?;
    let quiet = refusal(at, pod(json!({}), json!({}), json!({}))).await?;
    assert_eq!(quiet, "");
    let operator = at.with_client(Client::try_from(server.control_plane.operator_config())?);
    let in_force = json!({ "metadata": { "labels": { "bursar.dev/budget": "enforced" } } });
    operator.merge(&at.namespace_path(), in_force).await?;
    wait_for_refusal(at, "").await?;
    let weighted = pod(json!({ DEVICE: "4", COMPUTE: "5" }), json!({}), json!({}));
    let refused = refusal(at, weighted).await?;
    assert!(
        refused.contains(&format!("no resource {COMPUTE}")),
        "{refused}"
    );
    Ok(())
}

/// Checks a budget's maxima per container, which are absent if a template left the field empty.
async fn per_container(at: &IsolatedScope) -> Result<(), Failed> {
    let budget = |most: Value| {
        json!({
            "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget", "metadata": { "name": "default" },
            "spec": { "deviceMemory": { "guaranteed": "16Gi" }, "managedMemory": { "limit": "16Gi" },
                "perContainer": most },
        })
    };
    let most = |container: &str, requested: u32, resource: &str, most: u32, field: &str| {
        format!(
            "container {container} asks for {requested} of {resource}: GpuMemoryBudget default of namespace \
             policed allows {most} a container (spec.perContainer.{field})"
        )
    };
    at.create(&at.budgets_path(), budget(json!({ "max": "2Gi" })))
        .await?;
    wait_for_refusal(at, &most("c", 4, DEVICE, 2, "max")).await?;
    let bounds = json!({ "spec": { "perContainer": { "max": null, "maxManaged": "2Gi" } } });
    at.merge(&at.budget_path(), bounds).await?;
    wait_for_refusal(at, "").await?;
    let managed = |main: &str, init: &str| {
        let limits = |managed: &str| json!({ DEVICE: "4", MANAGED: managed, "memory": "16Gi" });
        pod(limits(main), limits(init), json!({}))
    };
    let bytes = format!("container c: {MANAGED} counts quanta of 1Gi: write 4, not 4Gi");
    for (pod, words) in [
        (managed("2", "2"), String::new()),
        (managed("3", "2"), most("c", 3, MANAGED, 2, "maxManaged")),
        (managed("1", "3"), most("init", 3, MANAGED, 2, "maxManaged")),
        (managed("4Gi", "1"), bytes),
    ] {
        let refused_with = refusal(at, pod).await?;
        assert!(
            refused_with.contains(&words) && refused_with.is_empty() == words.is_empty(),
            "{refused_with:?}, not {words:?}"
        );
    }
    let empty = budget(json!({ "max": null, "maxManaged": null }));
    at.delete(&at.budget_path()).await?;
    let created = at.create(&at.budgets_path(), empty).await?;
    assert_eq!(
        created["spec"]["perContainer"].get("max"),
        Some(&Value::Null)
    );
    sleep(Duration::from_secs(2)).await;
    wait_for_refusal(at, "").await?;
    at.delete(&at.budget_path()).await?;
    let created = at.create(&at.budgets_path(), budget(Value::Null)).await?;
    assert_eq!(created["spec"].get("perContainer"), Some(&Value::Null));
    // The API server may apply the absence of any budget for a moment.
    sleep(Duration::from_secs(2)).await;
    wait_for_refusal(at, "").await
}

/// Waits until a pod with 4 GiB is refused with these words, or is accepted if there are none.
async fn wait_for_refusal(at: &IsolatedScope, words: &str) -> Result<(), Failed> {
    let begin = Instant::now();
    loop {
        let requesting_pod = pod(json!({ DEVICE: "4" }), json!({}), json!({}));
        let refused_with = refusal(at, requesting_pod).await?;
        if refused_with.contains(words) && refused_with.is_empty() == words.is_empty() {
            return Ok(());
        }
        if begin.elapsed() > POLICY_TIMEOUT {
            return Err(format!("not {words:?} but {refused_with:?}").into());
        }
        sleep(Duration::from_millis(200)).await;
    }
}

/// Checks that only the operator's account may list pods, and returns the number of the chart's
/// accounts.
async fn check_accounts_that_list_pods(server: &Server) -> Result<usize, Failed> {
    let chart = server.control_plane.chart_without_workloads(&[]).await?;
    let name = |object: &Value| object["name"].as_str().unwrap_or_default().to_owned();
    let has = |list: &Value, words: &[&str]| {
        let mut list = list.as_array().into_iter().flatten();
        list.any(|value| value == "*" || words.iter().any(|word| value == word))
    };
    let lists = |rule: &Value| {
        has(&rule["apiGroups"], &[""])
            && has(&rule["resources"], &["pods"])
            && has(&rule["verbs"], &["list", "watch"])
    };
    let of_kinds = |kinds: [&'static str; 2]| {
        chart
            .iter()
            .filter(move |object| kinds.iter().any(|kind| object["kind"] == *kind))
    };
    // A Role and a ClusterRole may have the same name.
    let roles: BTreeMap<_, _> = of_kinds(["Role", "ClusterRole"])
        .map(|role| ((role["kind"].as_str(), name(&role["metadata"])), role))
        .collect();
    let mut may = BTreeSet::new();
    for binding in of_kinds(["RoleBinding", "ClusterRoleBinding"]) {
        let reference = &binding["roleRef"];
        let role = roles.get(&(reference["kind"].as_str(), name(reference)));
        let role = role.ok_or_else(|| format!("no role of ours: {binding}"))?;
        if role["rules"].as_array().into_iter().flatten().any(lists) {
            may.extend(
                binding["subjects"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .map(name),
            );
        }
    }
    assert_eq!(may, BTreeSet::from([OPERATOR.to_owned()]));

    let mut accounts = 0;
    for account in of_kinds(["ServiceAccount", ""]) {
        let account = name(&account["metadata"]);
        let mut config = server.control_plane.operator_config();
        config.auth_info.impersonate = Some(format!("system:serviceaccount:{NAMESPACE}:{account}"));
        let listed = Client::try_from(config)?
            .request_text(http::Request::get("/api/v1/pods?limit=1").body(Vec::new())?)
            .await;
        let refused = matches!(&listed, Err(kube::Error::Api(status)) if status.code == 403);
        assert_eq!(refused, account != OPERATOR, "{account}: {listed:?}");
        accounts += 1;
    }
    assert!(accounts > 1, "no account but the operator's");
    Ok(accounts)
}
