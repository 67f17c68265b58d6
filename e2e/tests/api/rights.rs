//! Checks that Bursar's accounts and containers have the rights in `docs/internals/security.md`,
//! and no others.

use std::collections::BTreeSet;
use std::time::Duration;

use bursar_e2e::paths;
use kube::Client;
use libtest_mimic::Failed;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::hostile::{as_account, check};
use crate::isolated_scope::IsolatedScope;
use crate::server::{Server, acquire_permit};

const DEVICE: &str = "bursar.dev/gpu-memory-gib";
/// The API server's cache has a new pod within this time.
const AUTHORIZATION_TIMEOUT: Duration = Duration::from_secs(20);

pub(crate) async fn rights(server: &Server) -> Result<String, Failed> {
    let _permit = acquire_permit().await;
    let manifests = server.control_plane.manifests(&[]).await?;
    let rows = compare_with_security_page(&manifests)?;
    let at = IsolatedScope::set_up(server, "rights").await?;
    let beside = at.second_node().await?;
    for (name, node, limits) in [
        ("asks", &at, json!({ DEVICE: "1" })),
        ("quiet", &at, json!({})),
        ("elsewhere", &beside, json!({ DEVICE: "1" })),
    ] {
        let pod = json!({
            "metadata": { "name": name },
            "spec": {
                "nodeName": node.name,
                "containers": [{ "name": "c", "image": "i", "resources": { "limits": limits } }],
            },
        });
        at.create(&at.pods_path(), pod).await?;
    }
    let agent = agents(server, &at).await?;
    let operator = operators(server, &at).await?;
    Ok(format!(
        "{rows} rows of docs/internals/security.md as the manifests are; {agent} calls of an agent and {operator} of the operator let in or refused"
    ))
}

/// Checks the calls of an agent on the scope's node, allowed and refused.
async fn agents(server: &Server, at: &IsolatedScope) -> Result<usize, Failed> {
    let node_name = at.name.as_str();
    let agent = at.with_client(as_account(
        server.control_plane.operator_config(),
        "agent",
        Some(node_name),
    )?);
    let namespace = at.namespace_path();
    let mut calls = 0;
    for path in [
        at.pod_path("asks"),
        at.pods_path(),
        format!("{namespace}/secrets"),
        format!("{namespace}/configmaps"),
        "/api/v1/nodes".to_owned(),
        "/api/v1/namespaces".to_owned(),
        "/apis/bursar.dev/v1alpha1/gpumemorybudgets".to_owned(),
    ] {
        let read = agent.get(&path).await.map_err(|error| format!("{error:?}"));
        match read {
            Err(error) if error.contains("cannot ") => calls += 1,
            other => return Err(format!("{path}: {other:?}").into()),
        }
    }

    // The API server decodes a patched object before admission, and answers with the whole object
    // where that fails. So a right to patch would be a right to read.
    let status = |pod: &str| format!("{}/status", at.pod_path(pod));
    let event = format!("/apis/events.k8s.io/v1/namespaces/{node_name}/events/e");
    let priority = json!({ "spec": { "priority": "x" } });
    let rows = [
        (status("elsewhere"), priority.clone(), "pods/status"),
        (status("asks"), priority.clone(), "pods/status"),
        (status("asks"), json!({}), "pods/status"),
        (at.pod_path("elsewhere"), priority, "pods"),
        (event, json!({ "series": { "count": "x" } }), "events"),
    ];
    calls += rows.len();
    for (path, patch, resource) in rows {
        let refused = agent.try_merge(&format!("{path}?dryRun=All"), patch).await;
        let text = format!("{refused:?}");
        if text.contains("containers") {
            return Err(format!("{path} is read by a refused patch: {text}").into());
        }
        let words = format!("cannot patch resource \"{resource}\"");
        check(&path, refused, &words)?;
    }

    let events = format!("/apis/events.k8s.io/v1/namespaces/{node_name}/events?dryRun=All");
    let event = |about: &str, labels: Value| {
        json!({
            "metadata": { "name": "e", "labels": labels }, "type": "Normal",
            "eventTime": "2026-01-01T00:00:00.000000Z", "reason": "R", "action": "A", "note": "n",
            "reportingController": "bursar-agent", "reportingInstance": node_name,
            "regarding": { "apiVersion": "v1", "kind": "Pod", "name": about, "namespace": node_name },
        })
    };
    let labelled = || json!({ "bursar.dev/writer": "agent" });
    let rows = [
        (event("asks", labelled()), ""),
        (
            event("asks", json!({})),
            "have the label bursar.dev/writer=agent",
        ),
        (
            event("elsewhere", labelled()),
            "pod elsewhere is on another",
        ),
    ];
    calls += rows.len();
    for (event, words) in rows {
        let about = event.to_string();
        wait_for_answer(&about, words, async || {
            agent.create(&events, event.clone()).await
        })
        .await?;
    }
    Ok(calls)
}

/// Checks the operator's calls about pods and quotas, allowed and refused.
async fn operators(server: &Server, at: &IsolatedScope) -> Result<usize, Failed> {
    let operator = at.with_client(Client::try_from(server.control_plane.operator_config())?);
    let namespace = at.namespace_path();
    let mut calls = 0;
    for (path, object) in [
        (at.pods_path(), json!({ "metadata": { "name": "new" } })),
        (
            format!("{namespace}/secrets"),
            json!({ "metadata": { "name": "new" } }),
        ),
        (
            "/api/v1/nodes".to_owned(),
            json!({ "metadata": { "name": "new" } }),
        ),
    ] {
        check(&path, operator.create(&path, object).await, "cannot create")?;
        calls += 1;
    }
    let evict = |pod: &str, labels: Value| {
        let eviction = json!({
            "apiVersion": "policy/v1", "kind": "Eviction", "metadata": { "name": pod, "labels": labels },
        });
        (
            format!("{}/eviction?dryRun=All", at.pod_path(pod)),
            eviction,
        )
    };
    let labelled = || json!({ "bursar.dev/writer": "operator" });
    let rows = [
        (evict("asks", labelled()), ""),
        (evict("quiet", labelled()), "and pod quiet asks for none"),
        (
            evict("quiet", json!({})),
            "have the label bursar.dev/writer=operator",
        ),
    ];
    calls += rows.len();
    for ((path, eviction), words) in rows {
        wait_for_answer(&path, words, async || {
            operator.create(&path, eviction.clone()).await
        })
        .await?;
    }
    let quotas = format!("{namespace}/resourcequotas?dryRun=All");
    for (name, hard, words) in [
        (
            "gpu-memory-budget-limit",
            "requests.bursar.dev/gpu-memory-gib",
            "",
        ),
        (
            "gpu-memory-budget-limit",
            "pods",
            "the operator sets amounts of GPU memory",
        ),
        (
            "others",
            "requests.bursar.dev/gpu-memory-gib",
            "the operator writes gpu-memory-budget-",
        ),
    ] {
        let quota = json!({ "metadata": { "name": name }, "spec": { "hard": { hard: "0" } } });
        check(name, operator.create(&quotas, quota).await, words)?;
        calls += 1;
    }
    Ok(calls)
}

/// Waits for this answer of the API server, whose cache may lack the pods at first.
async fn wait_for_answer(
    what: &str,
    words: &str,
    call: impl AsyncFn() -> kube::Result<Value>,
) -> Result<(), Failed> {
    let start = Instant::now();
    loop {
        match check(what, call().await, words) {
            Err(_) if start.elapsed() < AUTHORIZATION_TIMEOUT => {
                sleep(Duration::from_millis(200)).await
            }
            result => return result,
        }
    }
}

/// Compares the tables of `docs/internals/security.md` with the manifests and the code, and returns
/// the number of rows.
fn compare_with_security_page(manifests: &[Value]) -> Result<usize, Failed> {
    let page = std::fs::read_to_string(paths::repository().join("docs/internals/security.md"))?;
    let mut rows = 0;
    for (heading, columns, actual) in [
        ("### Accounts", 3, accounts(manifests)),
        ("### Containers", 2, containers(manifests)),
        ("### Capabilities of the agent", 2, capabilities()),
    ] {
        let documented = table(&page, heading, columns);
        let missing: Vec<_> = actual.difference(&documented).collect();
        let wrong: Vec<_> = documented.difference(&actual).collect();
        if !missing.is_empty() || !wrong.is_empty() {
            let why = format!(
                "{heading} of docs/internals/security.md lacks {missing:#?} and has {wrong:#?}"
            );
            return Err(why.into());
        }
        rows += documented.len();
    }
    Ok(rows)
}

type Rows = BTreeSet<Vec<String>>;

/// Parses the first columns of the table below a heading.
fn table(page: &str, heading: &str, columns: usize) -> Rows {
    let lines = page.lines().skip_while(|line| *line != heading);
    let table = lines
        .skip_while(|line| !line.starts_with('|'))
        .take_while(|line| line.starts_with('|'));
    let cells = |line: &str| {
        let cells = line.trim_matches('|').split('|');
        let cells = cells.map(|cell| cell.trim().replace('`', ""));
        cells.take(columns).collect()
    };
    table.skip(2).map(cells).collect()
}

fn words(list: &Value) -> String {
    let words = list.as_array().into_iter().flatten();
    let words: Vec<_> = words.filter_map(Value::as_str).collect();
    words.join(", ")
}

fn of_kinds<'a>(manifests: &'a [Value], kinds: &'a [&str]) -> impl Iterator<Item = &'a Value> {
    let is = |object: &&Value| {
        object["kind"]
            .as_str()
            .is_some_and(|kind| kinds.contains(&kind))
    };
    manifests.iter().filter(is)
}

/// Returns the rules of all roles: account, resource and verbs.
fn accounts(manifests: &[Value]) -> Rows {
    let roles = of_kinds(manifests, &["Role", "ClusterRole"]);
    roles
        .flat_map(|role| {
            let account = role["metadata"]["name"].as_str().unwrap_or_default();
            let rules = role["rules"].as_array().into_iter().flatten();
            rules.map(move |rule| {
                let mut on = words(&rule["resources"]);
                if let Some(names) = rule["resourceNames"].as_array() {
                    on = format!("{on} {}", words(&json!(names)));
                }
                vec![account.to_owned(), on, words(&rule["verbs"])]
            })
        })
        .collect()
}

/// Returns the settings of each container that differ from the kernel's and the kubelet's defaults.
fn containers(manifests: &[Value]) -> Rows {
    let workloads = of_kinds(manifests, &["DaemonSet", "Deployment"]);
    workloads
        .flat_map(|workload| {
            let spec = &workload["spec"]["template"]["spec"];
            let containers = spec["containers"].as_array().into_iter().flatten();
            containers.flat_map(|container| {
                let name = container["name"].as_str().unwrap_or_default().to_owned();
                let facts = facts(spec, container).into_iter();
                facts.map(move |fact| vec![name.clone(), fact])
            })
        })
        .collect()
}

fn facts(spec: &Value, container: &Value) -> Vec<String> {
    let of = |field: &str| {
        let own = &container["securityContext"][field];
        match own.is_null() {
            true => &spec["securityContext"][field],
            false => own,
        }
    };
    let mut facts = Vec::new();
    for field in ["hostPID", "hostNetwork", "hostIPC"] {
        if spec[field] == true {
            facts.push(field.to_owned());
        }
    }
    for field in [
        "privileged",
        "allowPrivilegeEscalation",
        "readOnlyRootFilesystem",
        "runAsUser",
        "runAsNonRoot",
    ] {
        if !of(field).is_null() {
            facts.push(format!("{field}: {}", of(field)));
        }
    }
    let capabilities = of("capabilities");
    for change in ["drop", "add"] {
        if !capabilities[change].is_null() {
            facts.push(format!(
                "capabilities {change}: {}",
                words(&capabilities[change])
            ));
        }
    }
    let seccomp = of("seccompProfile")["type"]
        .as_str()
        .unwrap_or("Unconfined");
    facts.push(format!("seccomp: {seccomp}"));
    facts.push(match spec["automountServiceAccountToken"] == false {
        true => "no token".to_owned(),
        false => format!(
            "token of {}",
            spec["serviceAccountName"].as_str().unwrap_or("default")
        ),
    });
    let volumes = spec["volumes"].as_array().into_iter().flatten();
    let volumes: Vec<_> = volumes.collect();
    for mount in container["volumeMounts"].as_array().into_iter().flatten() {
        let volume = volumes
            .iter()
            .find(|volume| volume["name"] == mount["name"]);
        let host = volume.and_then(|volume| volume["hostPath"]["path"].as_str());
        let rights = match mount["readOnly"] == true {
            true => "read-only",
            false => "writable",
        };
        let at = mount["mountPath"].as_str().unwrap_or_default();
        facts.push(match host {
            Some(host) if host == at => format!("the host's {at}, {rights}"),
            Some(host) => format!("the host's {host} at {at}, {rights}"),
            None => format!("{at}, {rights}"),
        });
    }
    facts
}

/// Returns the capabilities that the agent keeps of a privileged container, each with its reason.
fn capabilities() -> Rows {
    let kept = bursar_confine::AGENT_CAPABILITIES.iter();
    kept.map(|(name, _, why)| vec![(*name).to_owned(), why.replace('`', "")])
        .collect()
}
