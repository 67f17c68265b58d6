//! Reads snapshots from the API server, as far as the user's rights go.

mod metrics;

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::api::ListParams;
use kube::client::Body;
use kube::core::Request;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::objects::{Named, Pod};
use crate::snapshot::{ABSENT, Kind, Snapshot, Unreadable};
use crate::table::clean;

pub use metrics::read_metrics;

/// Objects in one response. The API server's own tools ask for as many.
const PAGE: u32 = 500;

/// The objects that a command reads.
#[derive(Clone, Debug)]
pub struct Wanted<'a> {
    /// The kinds.
    pub kinds: &'a [Kind],
    /// The namespace of tenants' objects; `None` is all namespaces.
    pub namespace: Option<&'a str>,
    /// The label selector of tenants' pods.
    pub selector: Option<&'a str>,
}

/// The reason why objects could not be read, for people. A tenant's pod may have written it: the
/// API server passes on the answer of a pod behind its proxy.
pub fn reason(error: &kube::Error) -> String {
    clean(match error {
        kube::Error::Api(status) if status.code == 403 => "forbidden".to_owned(),
        kube::Error::Api(status) if status.code == 404 => ABSENT.to_owned(),
        kube::Error::Api(status) => status.message.clone(),
        other => {
            // The cause that helps is the last: a refused connection, an unknown authority.
            let mut cause: &dyn std::error::Error = other;
            while let Some(source) = cause.source() {
                cause = source;
            }
            cause.to_string()
        }
    })
}

/// An error with its causes, for people: the API server's message in place of its whole answer.
pub fn message(error: &anyhow::Error) -> String {
    let mut parts = Vec::new();
    for cause in error.chain() {
        if let Some(kube::Error::Api(status)) = cause.downcast_ref() {
            parts.push(status.message.clone());
            break;
        }
        parts.push(cause.to_string());
    }
    clean(parts.join(": "))
}

/// Whether an error says that no API server answered, or that it does not know the user.
pub fn is_unreachable(error: &kube::Error) -> bool {
    !matches!(error, kube::Error::Api(status) if status.code != 401)
}

#[derive(Deserialize)]
struct Page<T> {
    #[serde(default)]
    metadata: PageMeta,
    #[serde(default = "Vec::new")]
    items: Vec<T>,
}

#[derive(Default, Deserialize)]
struct PageMeta {
    #[serde(default, rename = "continue")]
    next: String,
}

/// Lists the objects with these label and field selectors page by page.
///
/// # Errors
/// When the API server refuses.
pub(crate) async fn list<T: DeserializeOwned>(
    client: &Client,
    path: &str,
    (labels, fields): (Option<&str>, Option<&str>),
    mut each: impl FnMut(T),
) -> Result<(), kube::Error> {
    let request = Request::new(path);
    let mut params = ListParams::default().limit(PAGE);
    params.label_selector = labels.map(str::to_owned);
    params.field_selector = fields.map(str::to_owned);
    loop {
        let page = request.list(&params).map_err(kube::Error::BuildRequest)?;
        let page: Page<T> = client.request(page).await?;
        page.items.into_iter().for_each(&mut each);
        if page.metadata.next.is_empty() {
            return Ok(());
        }
        params.continue_token = Some(page.metadata.next);
    }
}

/// The path of a kind's list.
pub fn list_path(kind: Kind, namespace: Option<&str>) -> String {
    let (group, plural, is_namespaced) = kind.path();
    match namespace.filter(|_| is_namespaced) {
        Some(namespace) => format!("{group}/namespaces/{namespace}/{plural}"),
        None => format!("{group}/{plural}"),
    }
}

/// Reads the wanted kinds at the same time.
///
/// # Errors
/// When no API server answers, or it does not know the user. A kind that the user may not read is
/// noted in the snapshot.
pub async fn read(client: &Client, wanted: &Wanted<'_>) -> Result<Snapshot, kube::Error> {
    let snapshot = Mutex::new(Snapshot {
        now: Timestamp::now(),
        namespace: wanted.namespace.map(str::to_owned),
        ..Snapshot::default()
    });
    let mut kinds: Vec<Kind> = wanted.kinds.to_vec();
    kinds.retain(|kind| *kind != Kind::AgentMetrics);
    let reads = kinds
        .iter()
        .map(|kind| read_kind(client, *kind, wanted, &snapshot));
    let results = futures::future::join_all(reads).await;
    let mut snapshot = snapshot
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    for (kind, result) in kinds.iter().zip(results) {
        match result {
            Ok(()) => {}
            Err(error) if is_unreachable(&error) => return Err(error),
            Err(error) => drop(snapshot.unread.insert(*kind, reason(&error))),
        }
    }
    keep_own(client, &mut snapshot).await?;
    sort(&mut snapshot);
    if wanted.kinds.contains(&Kind::AgentMetrics) {
        let pods = snapshot.pods.iter().map(|pod| pod.spec.node_name.clone());
        let nodes: BTreeSet<String> = pods.collect();
        let all = wanted.namespace.is_none();
        read_metrics(client, &mut snapshot, |node| all || nodes.contains(node)).await;
    }
    Ok(snapshot)
}

#[derive(Deserialize)]
struct Binding {
    #[serde(default = "Vec::new")]
    subjects: Vec<Subject>,
}

#[derive(Deserialize)]
struct Subject {
    #[serde(default)]
    namespace: String,
}

/// Drops pods and workloads that a tenant labelled as Bursar's. Bursar's namespace is that of its
/// accounts, whose ClusterRoleBindings no tenant can create. Where they cannot be read, all are
/// dropped, because a tenant's pod could answer for an agent.
async fn keep_own(client: &Client, snapshot: &mut Snapshot) -> Result<(), kube::Error> {
    if snapshot.labelled_namespaces().len() < 2 {
        return Ok(());
    }
    let kind = Kind::ClusterRoleBindings;
    let (path, selectors) = (list_path(kind, None), (kind.labels(), kind.fields()));
    let mut namespaces = BTreeSet::new();
    let read = list(client, &path, selectors, |binding: Binding| {
        let subjects = binding.subjects.into_iter();
        namespaces.extend(subjects.map(|subject| subject.namespace));
    });
    match read.await {
        Ok(()) => {}
        Err(error) if is_unreachable(&error) => return Err(error),
        Err(error) => drop(snapshot.unread.insert(kind, reason(&error))),
    }
    snapshot.keep_own(&namespaces);
    Ok(())
}

fn sort(snapshot: &mut Snapshot) {
    snapshot
        .gpu_nodes
        .sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
    snapshot
        .budgets
        .sort_by(|a, b| a.metadata.namespace.cmp(&b.metadata.namespace));
    snapshot.pods.sort_by(|a, b| {
        let key = |pod: &Pod| (pod.metadata.namespace.clone(), pod.metadata.name.clone());
        key(a).cmp(&key(b))
    });
    snapshot.events.sort_by_key(|event| event.time());
}

/// The namespace that a kind is read from; `None` is all namespaces.
fn namespace_of<'a>(kind: Kind, wanted: &Wanted<'a>) -> Option<&'a str> {
    match kind {
        Kind::Leases => Some("kube-node-lease"),
        Kind::Budgets | Kind::Pods | Kind::Quotas => wanted.namespace,
        Kind::AgentEvents | Kind::OperatorEvents => wanted.namespace,
        _ => None,
    }
}

async fn read_kind(
    client: &Client,
    kind: Kind,
    wanted: &Wanted<'_>,
    snapshot: &Mutex<Snapshot>,
) -> Result<(), kube::Error> {
    let path = list_path(kind, namespace_of(kind, wanted));
    let selectors = (kind.labels(), kind.fields());
    let lock = || snapshot.lock().unwrap_or_else(PoisonError::into_inner);
    macro_rules! into {
        ($field:ident) => {{
            let mut found = Vec::new();
            let read = list(client, &path, selectors, |object| found.push(object)).await;
            lock().$field.extend(found);
            read
        }};
    }
    match kind {
        Kind::GpuNodes => {
            let (found, bad) = list_lenient(client, &path, kind).await?;
            let mut snapshot = lock();
            snapshot.gpu_nodes.extend(found);
            snapshot.unreadable.extend(bad);
            Ok(())
        }
        Kind::Budgets => {
            let (found, bad) = list_lenient(client, &path, kind).await?;
            let mut snapshot = lock();
            snapshot.budgets.extend(found);
            snapshot.unreadable.extend(bad);
            Ok(())
        }
        Kind::Pods => {
            let mut found = Vec::new();
            let read = list(client, &path, (wanted.selector, None), |pod: Pod| {
                if pod.gpu_containers().next().is_some() {
                    found.push(pod);
                }
            })
            .await;
            lock().pods = found;
            read
        }
        Kind::OwnPods => into!(own_pods),
        Kind::GpuNamespaces => into!(gpu_namespaces),
        Kind::DaemonSets => into!(daemon_sets),
        Kind::Deployments => into!(deployments),
        Kind::Nodes => into!(nodes),
        Kind::Namespaces => into!(namespaces),
        Kind::Quotas => into!(quotas),
        Kind::AgentEvents | Kind::OperatorEvents => into!(events),
        Kind::Leases => into!(leases),
        Kind::PodMonitors => into!(pod_monitors),
        Kind::NetworkPolicies => into!(network_policies),
        Kind::MutatingPolicies => into!(mutating_policies),
        Kind::AgentMetrics | Kind::ClusterRoleBindings => Ok(()),
    }
}

/// Lists a kind of Bursar's. An object that cannot be parsed hides no other.
async fn list_lenient<T: DeserializeOwned>(
    client: &Client,
    path: &str,
    kind: Kind,
) -> Result<(Vec<T>, Vec<Unreadable>), kube::Error> {
    let (mut found, mut bad) = (Vec::new(), Vec::new());
    list(
        client,
        path,
        (kind.labels(), kind.fields()),
        |object: Value| match parse(kind, object) {
            Ok(object) => found.push(object),
            Err(error) => bad.push(error),
        },
    )
    .await?;
    Ok((found, bad))
}

/// Lists the objects of a kind as the API server has them, without a loss of fields or values that
/// this version does not know.
///
/// # Errors
/// When the API server refuses.
pub async fn objects(
    client: &Client,
    kind: Kind,
    namespace: Option<&str>,
) -> Result<Vec<Value>, kube::Error> {
    let mut found = Vec::new();
    let (path, selectors) = (list_path(kind, namespace), (kind.labels(), kind.fields()));
    list(client, &path, selectors, |object| found.push(object)).await?;
    Ok(found)
}

/// Parses one object of Bursar's.
///
/// # Errors
/// Names the object and the parser's error.
pub fn parse<T: DeserializeOwned>(kind: Kind, object: Value) -> Result<T, Unreadable> {
    let named: Named = serde_json::from_value(object.clone()).unwrap_or_default();
    serde_json::from_value(object).map_err(|error| Unreadable {
        kind,
        name: named.metadata.key(),
        error: clean(error.to_string()),
    })
}

/// The API server's version and clock.
///
/// # Errors
/// When the API server does not answer.
pub async fn server(client: &Client) -> Result<(String, Option<Timestamp>), kube::Error> {
    let request = http::Request::get("/version")
        .body(Body::empty())
        .map_err(kube::Error::HttpError)?;
    let response = client.send(request).await?;
    let date = response.headers().get(http::header::DATE).cloned();
    let date = date.and_then(|date| {
        let text = date.to_str().ok()?;
        k8s_openapi::jiff::fmt::rfc2822::parse(text)
            .ok()
            .map(|zoned| zoned.timestamp())
    });
    let info = client.apiserver_version().await?;
    Ok((info.git_version, date))
}
