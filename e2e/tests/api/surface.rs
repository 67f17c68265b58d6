//! Checks what clients see of the API: the columns of tables, warnings, and the examples.

use std::fs;
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

pub(crate) async fn surface(server: &Server) -> Result<String, Failed> {
    let _permit = acquire_permit().await;
    let at = IsolatedScope::set_up(server, "surface").await?;
    node_table_is_for_people(server, &at).await?;
    budget_table_has_what_counts(server, &at).await?;
    plain_number_is_refused(&at).await?;
    borrower_is_warned(server, &at).await?;
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

/// Sends every example to the API server, without storing it. Returns the number of objects.
///
/// The server does not know the kinds of KEDA and Kueue.
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
            if version.starts_with("keda.sh/") || version.starts_with("kueue.x-k8s.io/") {
                continue;
            }
            let group = match version {
                "v1" => "/api/v1".to_owned(),
                version => format!("/apis/{version}"),
            };
            let kind = object["kind"].as_str().unwrap_or_default().to_lowercase();
            let path_of_kind = format!("{group}/namespaces/{}/{kind}s?dryRun=All", at.name);
            let created = at.create(&path_of_kind, object.clone()).await;
            let created = created.map_err(|error| format!("{}: {error}", path.display()))?;
            assert_eq!(created["kind"], object["kind"], "{}", path.display());
            accepted += 1;
        }
    }
    assert!(accepted > 8, "only {accepted} objects");
    Ok(accepted)
}
