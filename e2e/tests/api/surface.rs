//! Checks what clients see of the API: the columns of tables, warnings, and the examples.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use bursar_e2e::paths;
use kube::client::Body;
use libtest_mimic::Failed;
use serde::Deserialize as _;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::isolated_scope::IsolatedScope;
use crate::server::{Server, acquire_permit};

const DEVICE: &str = "bursar.dev/gpu-memory-gib";
/// The API server applies a new policy within this time.
const POLICY_TIMEOUT: Duration = Duration::from_secs(30);
/// The module that has Kueue's CRDs, and its checksum as in a `go.sum`.
const KUEUE: (&str, &str) = (
    "sigs.k8s.io/kueue@v0.17.0",
    "h1:7hzb38M4eKGzYW+CFv2s1L+swzzacUCHOCXxZmAV90I=",
);
/// The kinds of Kueue that the example has, as in the names of their CRDs.
const KUEUE_KINDS: [&str; 3] = ["clusterqueues", "localqueues", "resourceflavors"];

pub(crate) async fn surface(server: &Server) -> Result<String, Failed> {
    let _permit = acquire_permit().await;
    let at = IsolatedScope::set_up(server, "surface").await?;
    node_table_is_for_people(server, &at).await?;
    budget_table_has_what_counts(server, &at).await?;
    plain_number_is_refused(&at).await?;
    borrower_is_warned(server, &at).await?;
    server.control_plane.apply(kueue_crds()?).await?;
    kueue_budget_is_its_quota()?;
    let objects = examples(&at).await?;
    Ok(format!("tables, a warning, {objects} objects of examples"))
}

/// Returns the cells of an object in the table that `kubectl get -o wide` prints, by column.
async fn row(server: &Server, path: &str) -> Result<Value, Failed> {
    let table = "application/json;as=Table;v=v1;g=meta.k8s.io";
    let request = http::Request::get(path).header("Accept", table);
    let client = server.control_plane.client();
    let text = client.request_text(request.body(Vec::new())?).await?;
    let table: Value = serde_json::from_str(&text)?;
    let columns = table["columnDefinitions"].as_array().into_iter().flatten();
    let names = columns.filter_map(|column| column["name"].as_str());
    let cells = table["rows"][0]["cells"].as_array().into_iter().flatten();
    Ok(names
        .map(str::to_owned)
        .zip(cells.cloned())
        .collect::<serde_json::Map<_, _>>()
        .into())
}

async fn node_table_is_for_people(server: &Server, at: &IsolatedScope) -> Result<(), Failed> {
    let path = format!("/apis/bursar.dev/v1alpha1/gpunodes/{}", at.name);
    let summary = json!({ "gpus": "2x Simulated", "free": "10 of 32 GiB", "largestFree": "6 GiB",
        "waiting": 2, "faults": 1, "notEnforced": 0 });
    let patch = json!({ "status": { "summary": summary } });
    at.merge(&format!("{path}/status"), patch).await?;
    let row = row(server, &path).await?;
    for (column, cell) in [
        ("GPUs", json!("2x Simulated")),
        ("Free", json!("10 of 32 GiB")),
        ("Largest", json!("6 GiB")),
        ("Waiting", json!(2)),
        ("Faults", json!(1)),
    ] {
        assert_eq!(row[column], cell, "{column} of {row}");
    }
    Ok(())
}

async fn budget_table_has_what_counts(server: &Server, at: &IsolatedScope) -> Result<(), Failed> {
    let budget = json!({
        "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget", "metadata": { "name": "default" },
        "spec": { "deviceMemory": { "guaranteed": "1500Mi" } },
    });
    at.create(&at.budgets_path(), budget).await?;
    let amount = |gib: u32| json!({ "quanta": gib, "bytes": format!("{gib}Gi") });
    let memory = json!({ "guaranteed": amount(1), "limit": amount(1), "requested": amount(0),
        "borrowed": amount(0), "observed": amount(1), "peak": amount(1) });
    let path = at.budget_path();
    let patch = json!({ "status": { "deviceMemory": memory } });
    at.merge(&format!("{path}/status"), patch).await?;
    let row = row(server, &path).await?;
    for (column, cell) in [("Guaranteed", "1Gi"), ("Limit", "1Gi"), ("Used", "1Gi")] {
        assert_eq!(row[column], cell, "{column} of {row}");
    }
    at.delete(&path).await
}

async fn plain_number_is_refused(at: &IsolatedScope) -> Result<(), Failed> {
    let budget = json!({
        "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget", "metadata": { "name": "default" },
        "spec": { "deviceMemory": { "guaranteed": 8 } },
    });
    let created = at.create(&at.budgets_path(), budget).await;
    let Err(kube::Error::Api(refused)) = &created else {
        return Err(format!("a guarantee of 8 bytes: {created:?}").into());
    };
    assert!(refused.message.contains("write 8Gi, not 8"), "{refused:?}");
    Ok(())
}

/// Checks that the API server warns the client that creates a borrower, and no other client.
async fn borrower_is_warned(server: &Server, at: &IsolatedScope) -> Result<(), Failed> {
    let warning = async |class: &str| {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "row" },
            "spec": { "priorityClassName": class, "containers": [
                { "name": "c", "image": "i", "resources": { "limits": { DEVICE: "4" } } }] },
        });
        let request = http::Request::post(format!("{}?dryRun=All", at.pods_path()))
            .header("Content-Type", "application/json")
            .body(Body::from(pod.to_string().into_bytes()))?;
        let answer = server.control_plane.client().send(request).await?;
        let warnings = answer.headers().get_all("warning").iter();
        let warnings = warnings.map(|text| String::from_utf8_lossy(text.as_bytes()).into_owned());
        Ok::<_, Failed>(warnings.collect::<Vec<_>>().join("\n"))
    };
    let begin = Instant::now();
    while !warning("bursar-borrowed")
        .await?
        .contains("borrows GPU memory")
    {
        if begin.elapsed() > POLICY_TIMEOUT {
            return Err("no warning for a borrower".into());
        }
        sleep(Duration::from_millis(200)).await;
    }
    assert_eq!(warning("").await?, "");
    Ok(())
}

/// Returns the CRDs of Kueue without v1beta1, which Kueue serves no more from 0.20 on.
fn kueue_crds() -> Result<Vec<Value>, Failed> {
    let (module, sum) = KUEUE;
    let output = Command::new("go")
        .args(["mod", "download", "-json", module])
        .env("GONOSUMDB", "*")
        .current_dir(std::env::temp_dir())
        .output()?;
    let downloaded: Value = serde_json::from_slice(&output.stdout)?;
    assert_eq!(downloaded["Sum"], sum, "{downloaded}");
    let folder = Path::new(downloaded["Dir"].as_str().unwrap_or_default());
    let folder = folder.join("config/components/crd/bases");
    let crd = |kind: &str| {
        let text = fs::read_to_string(folder.join(format!("kueue.x-k8s.io_{kind}.yaml")))?;
        let mut crd: Value = serde_yaml_ng::from_str(&text)?;
        if let Some(versions) = crd["spec"]["versions"].as_array_mut() {
            versions.retain(|version| version["name"] != "v1beta1");
        }
        Ok(crd)
    };
    KUEUE_KINDS.into_iter().map(crd).collect()
}

/// Checks that the budget of Kueue's example lets pods have what the queue can admit.
fn kueue_budget_is_its_quota() -> Result<(), Failed> {
    let text = fs::read_to_string(paths::repository().join("docs/use/examples/kueue.yaml"))?;
    let objects = serde_yaml_ng::Deserializer::from_str(&text).map(Value::deserialize);
    let objects = objects.collect::<Result<Vec<_>, _>>()?;
    let spec = |kind: &str| {
        let mut objects = objects.iter();
        let object = objects.find(|object| object["kind"] == kind);
        object.map_or(&Value::Null, |object| &object["spec"])
    };
    let quota = &spec("ClusterQueue")["resourceGroups"][0]["flavors"][0]["resources"][0];
    let gib = |field: &str| quota[field].as_u64().unwrap_or_default();
    let sum = format!("{}Gi", gib("nominalQuota") + gib("borrowingLimit"));
    let budget = &spec("GpuMemoryBudget")["deviceMemory"];
    assert_eq!(*budget, json!({ "guaranteed": sum, "limit": sum }));
    Ok(())
}

/// Sends every example to the API server, without storing it. Returns the number of objects.
///
/// The server does not know the kinds of KEDA.
async fn examples(at: &IsolatedScope) -> Result<usize, Failed> {
    let mut accepted = 0;
    for entry in fs::read_dir(paths::repository().join("docs/use/examples"))? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "yaml") {
            continue;
        }
        let text = fs::read_to_string(&path)?;
        for document in serde_yaml_ng::Deserializer::from_str(&text) {
            let object = Value::deserialize(document)?;
            let version = object["apiVersion"].as_str().unwrap_or_default();
            if version.starts_with("keda.sh/") {
                continue;
            }
            let group = match version {
                "v1" => "/api/v1".to_owned(),
                version => format!("/apis/{version}"),
            };
            let kind = object["kind"].as_str().unwrap_or_default().to_lowercase();
            check_rollout(&object);
            let namespace = match kind.as_str() {
                "clusterqueue" | "resourceflavor" => String::new(),
                _ => format!("/namespaces/{}", at.name),
            };
            let path_of_kind =
                format!("{group}{namespace}/{kind}s?dryRun=All&fieldValidation=Strict");
            let created = create_once_served(at, &path_of_kind, &object).await;
            let created = created.map_err(|error| format!("{}: {error}", path.display()))?;
            assert_eq!(created["kind"], object["kind"], "{}", path.display());
            accepted += 1;
        }
    }
    assert!(accepted > 8, "only {accepted} objects");
    Ok(accepted)
}

/// Checks that no pod of an example's Deployment waits for the memory of its predecessor, and that
/// a program on several GPUs has shared memory.
fn check_rollout(object: &Value) {
    if object["kind"] == "Deployment" {
        assert_eq!(object["spec"]["strategy"]["type"], "Recreate", "{object}");
        let container = &object["spec"]["template"]["spec"]["containers"][0];
        assert!(container["readinessProbe"].is_object(), "{object}");
    }
    if !object["metadata"]["annotations"]["bursar.dev/gpus"].is_null() {
        let volume = &object["spec"]["volumes"][0]["emptyDir"];
        assert_eq!(volume["medium"], "Memory", "{object}");
        let mount = &object["spec"]["containers"][0]["volumeMounts"][0];
        assert_eq!(mount["mountPath"], "/dev/shm", "{object}");
    }
}

/// Creates an object, whose kind the API server may serve a moment later.
async fn create_once_served(at: &IsolatedScope, path: &str, object: &Value) -> kube::Result<Value> {
    let begin = Instant::now();
    loop {
        match at.create(path, object.clone()).await {
            Err(kube::Error::Api(refused))
                if refused.code == 404 && begin.elapsed() < POLICY_TIMEOUT =>
            {
                sleep(Duration::from_millis(200)).await;
            }
            created => return created,
        }
    }
}
